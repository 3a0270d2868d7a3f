//! The one door: a backward begins and ends in [`run`], which is the function to read first.

use std::any::Any;
use std::cell::RefCell;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::Arc;

use burn::backend::Backend;
use burn::backend::autodiff::grads::Gradients;
use burn::tensor::{DType, FloatDType, Tensor};

use super::hook_depth::{AutodiffTensor, scalar, untracked};
use super::overflow_verdict::Verdict;
use super::wrapped_model::WrappedModel;
use crate::agreement::tell_peers;
use crate::ddp::Ddp;
use crate::{Error, Result};

thread_local! {
    /// The innermost call of [`run`] or [`catch`] on this thread.
    static OPEN: RefCell<Option<Open>> = const { RefCell::new(None) };
}

#[derive(Default)]
struct Open {
    /// Models that the call trains; `None` in [`catch`].
    models: Option<Vec<Arc<WrappedModel>>>,
    /// Weight of the backward, for layers that weigh in it; `None` in [`catch`].
    items: Option<f64>,
    /// True if code of others runs the backward, so that there may be two.
    counts_backwards: bool,
    /// An autodiff tensor of the models' backend that the first hook has registered in its `Gradients`, so that a
    /// second backward shows.
    mark: Option<Box<dyn Any>>,
    /// True once a backward of weight 0 has passed a collective that mixes gradients of all ranks' losses.
    mixed_losses: bool,
    /// Scale of the loss, if the models have one.
    loss_scale: Option<f64>,
    /// True once the loss was scaled.
    is_scaled: bool,
    /// Models that the backward reached and the call does not train.
    ignored: Vec<Arc<WrappedModel>>,
    /// The first error of a hook, or of a collective in a forward or backward.
    error: Option<Error>,
}

/// Settings of one call.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Call {
    /// Weight that the program gave; `None` for that of the loader's last batch.
    pub(crate) items: Option<f64>,
    /// True if the micro-batch only adds up, whatever the accumulation.
    pub(crate) holds: bool,
    /// True if code of others runs the backward.
    pub(crate) counts_backwards: bool,
}

/// Relation of a model to the call that is open on this thread.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Role {
    /// The call trains the model.
    Trains { counts_backwards: bool },
    /// The call trains other models: the gradients of this one are dropped.
    Ignored,
    /// No call is open.
    NoCall,
}

/// Runs `f`, which runs one backward over `models`, looks at its result with `prepare`, which also learns whether the
/// batch counts, and reduces the gradients unless the micro-batch only adds up. Returns the result of `prepare` if the
/// averages are there, which they are not after an overflow of a scaled loss. *Collective*.
///
/// # Errors
///
/// The first error of this rank, which the other ranks get, too. Nothing of the call remains then. A panic of `f`
/// abandons the step in the same way.
pub(crate) fn run<R, P>(
    ddp: &Ddp,
    mut models: Vec<Arc<WrappedModel>>,
    call: Call,
    f: impl FnOnce() -> R,
    prepare: impl FnOnce(&mut R, bool) -> Result<P>,
) -> Result<(R, Option<P>)> {
    // The same order on all ranks.
    models.sort_by_key(|model| model.id);
    let outcome = (|| {
        let batch = ddp.state().begin_backward(call.items)?;
        let loss_scale = loss_scale(&models);
        let mut steps = Steps::begin(&models, |model| model.begin_step(&batch, call, loss_scale))?;
        let open = Open {
            models: Some(models.clone()),
            items: Some(batch.items),
            counts_backwards: call.counts_backwards,
            loss_scale,
            ..Open::default()
        };
        let (mut out, is_scaled) = within(open, f)?;
        let counts = batch.items > 0.0;
        if !counts {
            models.iter().for_each(|model| model.forget_batch());
        }
        for model in &models {
            model.refuse_unreached()?;
        }
        if loss_scale.is_some() && !is_scaled {
            return Err(Error::invalid(
                "the model has a loss scale, and the loss was not scaled: call \
                `burn_ddp::scale_loss(&loss).backward()` instead of `loss.backward()`",
            ));
        }
        let prepared = prepare(&mut out, counts)?;
        Ok((out, steps.reduce()?.then_some(prepared)))
    })();
    outcome.map_err(|error| refused(ddp, error))
}

/// Reduces the gradients that the ranks hold for `models`. Returns true if the averages are there. *Collective*.
pub(crate) fn reduce_held(ddp: &Ddp, mut models: Vec<Arc<WrappedModel>>) -> Result<bool> {
    models.sort_by_key(|model| model.id);
    let loss_scale = loss_scale(&models);
    let outcome = Steps::begin(&models, |model| model.begin_flush(loss_scale)).and_then(|mut steps| steps.reduce());
    outcome.map_err(|error| refused(ddp, error))
}

/// The smallest loss scale of the models of a call, if they have some.
fn loss_scale(models: &[Arc<WrappedModel>]) -> Option<f64> {
    models.iter().filter_map(|model| model.loss_scale()).reduce(f64::min)
}

/// Runs `f`, a forward without a backward, with errors of its collectives returned instead of panics.
#[cfg(feature = "train")]
pub(crate) fn catch<R>(f: impl FnOnce() -> R) -> Result<R> {
    within(Open::default(), f).map(|(out, _)| out)
}

/// The steps of several models in one call. They are abandoned when this value is dropped before they have ended.
struct Steps<'a> {
    begun: Vec<&'a Arc<WrappedModel>>,
    ended: bool,
    /// True if all ranks end without averages alike.
    fails_alike: bool,
}

impl<'a> Steps<'a> {
    fn begin(models: &'a [Arc<WrappedModel>], begin: impl Fn(&WrappedModel) -> Result<bool>) -> Result<Self> {
        let mut steps = Steps { begun: Vec::new(), ended: false, fails_alike: false };
        let mut reduces = None;
        for model in models {
            model.open_step()?;
            steps.begun.push(model);
            let reduces_this = begin(model)?;
            if *reduces.get_or_insert(reduces_this) != reduces_this {
                return Err(model.fault(
                    "one of the models would reduce in this call, and another would only add up: give them the same \
                    accumulation, or call `ddp.backward` for each"
                        .into(),
                ));
            }
        }
        Ok(steps)
    }

    /// Submits what backward has not submitted, of all models before it waits for any: so no rank waits for a bucket
    /// that another has not sent. Waits for all models, also after an error of one: what is under way would be taken
    /// for results of the next call.
    fn reduce(&mut self) -> Result<bool> {
        self.begun.iter().try_for_each(|model| model.submit_step())?;
        let (mut reduced, mut first_error) = (false, None);
        for model in &self.begun {
            match model.finish_step() {
                Ok(reduced_this) => reduced |= reduced_this,
                Err(error) => drop(first_error.get_or_insert(error)),
            }
        }
        if let Some(error) = first_error {
            self.fails_alike = error.job_usable();
            return Err(error);
        }
        let mut verdict = Verdict::default();
        self.begun.iter().for_each(|model| model.add_to(&mut verdict));
        if let Some(model) = self.begun.first().filter(|_| reduced) {
            model.ddp.state().meter.skipped(verdict.skips());
            let ended = self.begun.iter().map(|model| model.end_scaled_step(&verdict)).fold(Ok(()), Result::and);
            ended.inspect_err(|error| self.fails_alike = error.job_usable())?;
        }
        self.begun.iter().for_each(|model| model.keep_statistics(reduced));
        self.ended = true;
        Ok(reduced && !verdict.skips())
    }
}

impl Drop for Steps<'_> {
    fn drop(&mut self) {
        if !self.ended {
            self.begun.iter().for_each(|model| model.abandon_step(self.fails_alike));
        }
    }
}

/// Runs `f` with `open` as the call of this thread. An error that was noted meanwhile comes before the result, and
/// before a panic, since it leaves Burn's graph unfinished, so that Burn may panic later. Also returns whether `f` has
/// scaled a loss.
fn within<R>(open: Open, f: impl FnOnce() -> R) -> Result<(R, bool)> {
    struct Restore(Option<Open>);
    impl Drop for Restore {
        fn drop(&mut self) {
            OPEN.set(self.0.take());
        }
    }
    let restore = Restore(OPEN.replace(Some(open)));
    let out = catch_unwind(AssertUnwindSafe(f));
    let Open { ignored, items, error, is_scaled, .. } = OPEN.take().unwrap_or_default();
    drop(restore);
    for model in ignored {
        model.restart_reads();
        if items == Some(0.0) {
            model.forget_batch();
        }
    }
    match (error, out) {
        (Some(error), _) => Err(error),
        (None, Ok(out)) => Ok((out, is_scaled)),
        (None, Err(panic)) => resume_unwind(panic),
    }
}

/// The relation of `model` to the call that is open on this thread.
pub(super) fn role_of(model: &Arc<WrappedModel>) -> Role {
    OPEN.with_borrow(|open| match open {
        Some(Open { models: Some(models), counts_backwards, .. }) => {
            match models.iter().any(|of| Arc::ptr_eq(of, model)) {
                true => Role::Trains { counts_backwards: *counts_backwards },
                false => Role::Ignored,
            }
        }
        _ => Role::NoCall,
    })
}

/// Notes that the backward of the call reached a model that it does not train.
pub(super) fn note_ignored(model: &Arc<WrappedModel>) {
    OPEN.with_borrow_mut(|open| {
        if let Some(open) = open
            && !open.ignored.iter().any(|known| Arc::ptr_eq(known, model))
        {
            open.ignored.push(model.clone());
        }
    });
}

/// True if `grads` are not those of the first backward of the call that is open on this thread. `device` and `dtype`
/// are those of a gradient.
pub(super) fn is_second_backward<B: Backend>(grads: &mut Gradients, device: &B::Device, dtype: DType) -> bool {
    OPEN.with_borrow_mut(|open| {
        let Some(open) = open else { return false };
        match open.mark.as_ref().map(|mark| mark.downcast_ref::<AutodiffTensor<B>>()) {
            Some(mark) => mark.is_none_or(|mark| grads.get::<B>(mark).is_none()),
            None => {
                let mark = untracked::<B>(scalar::<B>(device, dtype));
                grads.register::<B>(mark.id(), mark.primitive().clone());
                open.mark = Some(Box::new(mark));
                false
            }
        }
    })
}

/// The loss of a backward of the call that is open on this thread, times its scale.
pub(crate) fn scaled<const D: usize>(loss: &Tensor<D>) -> Tensor<D> {
    let scale = OPEN.with_borrow_mut(|open| {
        let open = open.as_mut()?;
        open.is_scaled = true;
        open.loss_scale
    });
    match (scale, loss.dtype()) {
        (None, _) => loss.clone(),
        // The product is out of a half's range.
        (Some(scale), DType::F16 | DType::BF16) => loss.clone().cast(FloatDType::F32).mul_scalar(scale),
        (Some(scale), _) => loss.clone().mul_scalar(scale),
    }
}

/// Weight of the backward that runs on this thread, if a call of the door runs it.
pub(crate) fn weight_of_backward() -> Option<f64> {
    OPEN.with_borrow(|open| open.as_ref().and_then(|open| open.items))
}

/// True if the gradient at a collective, in a backward of this thread, is that of a batch of weight 0. A collective
/// that `mixes_losses` sends on gradients of other ranks' losses.
///
/// # Errors
///
/// A collective before this one has mixed such a gradient with those of other ranks.
pub(crate) fn has_weight_0(mixes_losses: bool) -> Result<bool> {
    OPEN.with_borrow_mut(|open| {
        let Some(open) = open.as_mut().filter(|open| open.items == Some(0.0)) else { return Ok(false) };
        if open.mixed_losses {
            return Err(Error::invalid(
                "the backward weighs 0 and passes several differentiable collectives, so the gradient of this rank's \
                loss cannot be told from those of other ranks: let every rank leave out the batch with \
                `ddp.skip_batch()?`",
            ));
        }
        open.mixed_losses = mixes_losses;
        Ok(true)
    })
}

/// True if the call that is open on this thread has failed: what it computes is of no use.
pub(super) fn has_failed() -> bool {
    OPEN.with_borrow(|open| open.as_ref().is_some_and(|open| open.error.is_some()))
}

/// The error of a call that this rank may make alone: the other ranks, which are in the call, get it, too.
pub(crate) fn refused(ddp: &Ddp, error: Error) -> Error {
    let error = match error {
        Error::Invalid { reason, .. } => Error::Backward { rank: ddp.world().rank(), reason },
        other => other,
    };
    if !error.job_usable() {
        note_error(&error);
    }
    tell_peers(ddp, &error);
    error
}

/// Makes `error` the one of the call that is open on this thread, unless that has one. Returns false if none is open.
fn note_error(error: &Error) -> bool {
    OPEN.with_borrow_mut(|open| match open {
        Some(open) => {
            open.error.get_or_insert_with(|| error.clone());
            true
        }
        None => false,
    })
}

/// Reports the error of a collective in a backward to the other ranks, and to the call of this thread; panics without
/// one.
pub(crate) fn fail(ddp: &Ddp, error: Error) {
    let note = "a `loss.backward()` of the program ends here, since it cannot return an error (RUST_BACKTRACE=1 shows \
        its line); `ddp.backward(&loss, &model)` returns this error";
    fail_with(ddp, error, note);
}

/// [`fail`] in a forward.
pub(super) fn fail_forward(ddp: &Ddp, error: Error) {
    let note = "a forward of the program ends here, since it cannot return an error (RUST_BACKTRACE=1 shows its line)";
    fail_with(ddp, error, note);
}

fn fail_with(ddp: &Ddp, error: Error, note: &str) {
    // Before the world ends: the caller must get this error, not one that follows from that end.
    let noted = note_error(&error);
    tell_peers(ddp, &error);
    if !noted {
        panic!("{error}\nnote: {note}");
    }
}
