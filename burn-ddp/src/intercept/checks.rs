//! Checks that each gradient went through its tap, and that the ranks still train the same model.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use burn::backend::autodiff::grads::Gradients as BackendGradients;
use burn::backend::tensor::FloatTensor;
use burn::module::{Module, Param};
use burn::tensor::{Gradients, Tensor, read_sync};

use super::ladder::AutodiffTensor;
use super::model_state::State;
use super::model_walk::{AtTap, walk};
use super::wrapped_model::{TapHandle, WrappedModel};
use crate::gradients::GradientMemory;
use crate::model::digest;
use crate::{Error, Result};

/// Placeholder for the digest of a gradient in steps that compute none.
pub(super) const UNREAD: i64 = 0;

impl WrappedModel {
    /// Refuses to go on after an optimizer has missed an average that waited for it.
    pub(super) fn refuse_stale(&self) -> Result<()> {
        self.stale.get().map_or(Ok(()), |stale| Err(stale.clone()))
    }

    /// Ends the job, since an optimizer has missed an average that waited for it.
    pub(super) fn note_stale_id(&self, slot: usize) {
        let path = &self.slots[slot].path;
        let fault = self.fault(format!(
            "the average of {path}, which this rank did not use, missed the optimizer: the parameter's id has changed \
            since `wrap`, as `load_record` does. Load before `wrap`, or `ddp.wrap(ddp.unwrap(model)?)` again"
        ));
        self.ddp.world().fail(fault.to_string());
        self.stale.get_or_init(|| fault);
    }

    /// Refuses copies with running statistics of their own: they would not be synced.
    pub(super) fn refuse_retrained(&self) -> Result<()> {
        if !self.retrained.load(Ordering::Acquire) {
            return Ok(());
        }
        Err(self.fault(
            "the wrapped model, or a copy, went through `valid().train()`, which gives it running statistics of its \
            own: `ddp.wrap(ddp.unwrap(model)?)` it again, or keep the model that `valid()` was called on"
                .into(),
        ))
    }

    /// Refuses a parameter that lost its tap: it would train on this rank's gradients alone.
    pub(super) fn refuse_lost_taps(&self) -> Result<()> {
        let attached = self.attached.get().into_iter().flatten();
        let lost = |(taps, attached): (&AtomicUsize, &bool)| *attached && taps.load(Ordering::Acquire) == 0;
        match self.taps.iter().zip(attached).position(lost) {
            None => Ok(()),
            Some(slot) => Err(self.fault(lost_tap(&self.slots[slot].path))),
        }
    }

    /// Refuses a gradient that is on a leaf before any average was put there: it went past the tap. This sees gradients
    /// that came before the last gate; [`bypassed`] sees the others.
    pub(super) fn refuse_bypass<B: GradientMemory>(&self, state: &State<B>, grads: &BackendGradients) -> Result<()> {
        let past = state
            .values
            .iter()
            .position(|value| value.as_ref().is_some_and(|leaf| leaf.is_tracked() && grads.get::<B>(leaf).is_some()));
        match past {
            None => Ok(()),
            Some(slot) => Err(self.fault(past_tap(&self.slots[slot].path))),
        }
    }

    /// Refuses ranks that hold different parameters, by the digests of all ranks.
    pub(super) fn refuse_differences(&self, step: u64, digests: &[Vec<i64>]) -> Result<()> {
        if digests.is_empty() {
            return Ok(());
        }
        let paths: Vec<&str> = self.slots.iter().map(|s| s.path.as_str()).collect();
        digest::compare(&paths, digests, Some(step))
    }

    /// Digests of the values that the running backward's forward read; 0 for others.
    pub(super) fn digests<B: GradientMemory>(&self, state: &mut State<B>) -> Result<Vec<i64>> {
        let take = |value: &mut Option<AutodiffTensor<B>>| -> Result<i64> {
            let Some(value) = value.take() else { return Ok(0) };
            let data = read_sync(B::float_into_data(value.primitive().clone()))
                .map_err(|e| self.fault(format!("reading parameters failed: {e:?}")))?;
            Ok(digest::digest(data.as_bytes()))
        };
        state.values.iter_mut().map(take).collect()
    }

    /// Digest of the elements of a slot's average.
    pub(super) fn digest<B: GradientMemory>(&self, slot: usize, average: &FloatTensor<B>) -> Result<i64> {
        B::with_bytes(average.clone(), |_, bytes| digest::digest(bytes))
            .map_err(|e| self.fault(format!("reading the average of {}: {e}", self.slots[slot].path)))
    }

    /// True if `on_leaf` is what the last backward put on the slot's leaf. Clones of a parameter may share theirs, and
    /// are not compared.
    fn was_delivered(&self, slot: usize, on_leaf: Option<i64>) -> bool {
        self.cloned[slot] || self.lock().delivered().digests[slot] == on_leaf
    }
}

/// Error text for the first parameter of `model` whose gradient is not what its tap put there, after a backward of
/// `wrapped`.
pub(super) fn bypassed<M: Module>(
    model: &M,
    wrapped: &Arc<WrappedModel>,
    gradients: &Gradients,
) -> Result<Option<String>> {
    struct Compare<'a> {
        wrapped: &'a Arc<WrappedModel>,
        gradients: &'a Gradients,
        digested: bool,
        found: Result<Option<String>>,
    }
    impl AtTap for Compare<'_> {
        /// Digest of the gradient on the parameter's leaf.
        type Seen = Option<i64>;

        fn parameter<const D: usize>(&mut self, param: &Param<Tensor<D>>) -> Option<Self::Seen> {
            let base = param.base();
            let gradient = if base.is_require_grad() { base.grad(self.gradients) } else { None };
            let digest = match gradient {
                None => Ok(None),
                Some(_) if !self.digested => Ok(Some(UNREAD)),
                Some(gradient) => gradient
                    .try_into_data()
                    .map(|data| Some(digest::digest(data.as_bytes())))
                    .map_err(|e| Error::invalid(format!("reading a gradient failed: {e:?}"))),
            };
            digest.map_err(|e| self.found = Err(e)).ok()
        }

        fn leave(&mut self, path: &str, on_leaf: Self::Seen, tap: Option<TapHandle>) {
            let Ok(None) = &self.found else { return };
            match tap.filter(|tap| Arc::ptr_eq(&tap.model, self.wrapped)) {
                Some(tap) if !self.wrapped.was_delivered(tap.slot, on_leaf) => self.found = Ok(Some(past_tap(path))),
                None if on_leaf.is_some() => self.found = Ok(Some(lost_tap(path))),
                _ => {}
            }
        }
    }
    let digested = wrapped.lock().delivered().digested;
    let mut compare = Compare { wrapped, gradients, digested, found: Ok(None) };
    walk(model, &mut compare);
    compare.found
}

/// Error text for a parameter whose gradient its tap did not see.
fn past_tap(path: &str) -> String {
    format!(
        "{path} was read past its tap, so its gradient is not averaged: read parameters through `val()`, not through \
        `base()` or by dereferencing the `Param`"
    )
}

/// Error text for a parameter without a tap.
fn lost_tap(path: &str) -> String {
    format!(
        "{path} is no longer tapped, so its gradient is not averaged: it was replaced after `wrap` (`Param::map` makes \
        a new parameter; `Module::map` keeps the tap). Change it before, or `ddp.wrap(ddp.unwrap(model)?)` again"
    )
}
