//! Checks that each gradient went through its tap, and that the ranks still train the same model.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use burn::backend::autodiff::grads::Gradients as BackendGradients;
use burn::backend::tensor::FloatTensor;
use burn::module::{Module, Param, ParamId};
use burn::tensor::{Gradients, Tensor, TensorData, read_sync};

use super::model_state::State;
use super::model_walk::{AtTap, note_values, walk};
use super::wrapped_model::{TapHandle, WrappedModel};
use crate::gradients::{GradientMemory, Piggyback, PiggybackResult};
use crate::model::digest::{self, Comparison};
use crate::model::parameter_movement::{Sketch, tolerance};
use crate::tensor_conversion::data_of;
use crate::{Error, Result};

/// Placeholder for the digest of a gradient in steps that compute none.
pub(super) const UNREAD: i64 = 0;

impl TapHandle {
    /// True if parameters that differ between ranks are judged by their movements.
    pub(crate) fn judges_movements(&self) -> bool {
        self.model.lock().movements().is_some()
    }

    /// Movement of the parameter from the last comparison until it had the value `now`.
    pub(crate) fn movement_until(&self, now: &Sketch) -> Sketch {
        self.model.lock().movements().map_or(Sketch::UNKNOWN, |movements| movements.until(self.slot, now))
    }
}

impl WrappedModel {
    /// Measures movements from the values of `model`, which all ranks have got.
    pub(crate) fn measure_movements_from<M: Module>(self: &Arc<Self>, model: &M) {
        note_values(model, self);
        if let Some(movements) = self.lock().movements() {
            movements.restart();
        }
    }

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
    /// that came before the last gate; [`find_past_tap`] sees the others.
    pub(super) fn refuse_past_tap<B: GradientMemory>(&self, state: &State<B>, grads: &BackendGradients) -> Result<()> {
        let past = state
            .values
            .iter()
            .position(|value| value.as_ref().is_some_and(|leaf| leaf.is_tracked() && grads.get::<B>(leaf).is_some()));
        match past {
            None => Ok(()),
            Some(slot) => Err(self.fault(past_tap(&self.slots[slot].path))),
        }
    }

    /// Measures movements from the values that the ranks got at `wrap`, which the first backward finds noted.
    pub(super) fn measure_movements<B: GradientMemory>(&self, state: &mut State<B>) -> Result<()> {
        let Some(movements) = state.movements.as_mut().filter(|movements| movements.is_new()) else { return Ok(()) };
        let sketch = |value: &mut Option<FloatTensor<B>>| -> Result<Sketch> {
            Ok(self.read_value::<B>(value.take())?.map_or(Sketch::UNKNOWN, |value| Sketch::of(&value)))
        };
        movements.measure_from(state.compared.iter_mut().map(sketch).collect::<Result<_>>()?);
        Ok(())
    }

    /// Adds what is compared to the payload: digests and movements of the values that the backward's forward read.
    pub(super) fn compare<B: GradientMemory>(&self, state: &mut State<B>, piggyback: &mut Piggyback) -> Result<()> {
        let mut digests = Vec::new();
        let mut sketches = Vec::new();
        for value in &mut state.compared {
            let value = self.read_value::<B>(value.take())?;
            digests.push(value.as_ref().map_or(0, |value| digest::digest(value.as_bytes())));
            if state.movements.is_some() {
                sketches.push(value.map_or(Sketch::UNKNOWN, |value| Sketch::of(&value)));
            }
        }
        if let Some(movements) = &mut state.movements {
            movements.set_now(sketches);
            piggyback.movements = movements.until_now();
        }
        piggyback.digests = Some(digests);
        piggyback.own_gradients = state.same_gradients.take();
        Ok(())
    }

    /// Fails if the ranks hold different parameters, as shown by what all ranks sent.
    pub(super) fn refuse_differences<B: GradientMemory>(
        &self,
        state: &mut State<B>,
        step: u64,
        results: &PiggybackResult,
    ) -> Result<()> {
        let PiggybackResult { digests, movements, .. } = results;
        if digests.is_empty() {
            return Ok(());
        }
        state.same_gradients.compare(&results.own_gradients, &self.ddp);
        let paths: Vec<&str> = self.slots.iter().map(|s| s.path.as_str()).collect();
        let ranks = self.ddp.group().ranks();
        let comparison = Comparison { paths: &paths, ranks, digests, step: Some(step) };
        let Some(own) = &mut state.movements else { return comparison.exactly() };
        let tolerances: Vec<f64> = self.slots.iter().map(|s| tolerance(s.dtype)).collect();
        if let Some(rounding) = comparison.by_movement(movements, &tolerances)? {
            let first = !std::mem::replace(&mut state.warned_rounding, true);
            self.ddp.state().meter.rounded(&rounding, Some(step), first);
        }
        // Ranks that have called `join` read no parameters, so their digests are 0.
        let training: Vec<&Vec<i64>> = digests.iter().filter(|of_rank| of_rank.iter().any(|d| *d != 0)).collect();
        own.accept(|slot| training.iter().all(|of_rank| of_rank[slot] != 0));
        Ok(())
    }

    fn read_value<B: GradientMemory>(&self, value: Option<FloatTensor<B>>) -> Result<Option<TensorData>> {
        let data = value.map(|value| read_sync(B::float_into_data(value)));
        data.transpose().map_err(|e| self.fault(format!("reading parameters failed: {e:?}")))
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

/// Compares each gradient in `gradients` with the average that the tap of its parameter delivered in the last backward
/// of `wrapped`. Returns the error text for the first parameter of `model` where they differ.
pub(super) fn find_past_tap<M: Module>(
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
        /// Digest of the gradient on the parameter's leaf, and the parameter's id.
        type Seen = (Option<i64>, ParamId);

        fn parameter<const D: usize>(&mut self, param: &Param<Tensor<D>>) -> Option<Self::Seen> {
            let base = param.base();
            let gradient = if base.is_require_grad() { base.grad(self.gradients) } else { None };
            let digest = match gradient {
                None => Ok(None),
                Some(_) if !self.digested => Ok(Some(UNREAD)),
                Some(gradient) => data_of(gradient)
                    .map(|data| Some(digest::digest(data.as_bytes())))
                    .map_err(|e| Error::invalid(format!("reading a gradient failed: {e}"))),
            };
            digest.map_err(|e| self.found = Err(e)).ok().map(|digest| (digest, param.id))
        }

        fn leave(&mut self, path: &str, (on_leaf, id): Self::Seen, tap: Option<TapHandle>) {
            let Ok(None) = &self.found else { return };
            match tap.filter(|tap| Arc::ptr_eq(&tap.model, self.wrapped)) {
                Some(tap) if !self.wrapped.was_delivered(tap.slot, on_leaf) => self.found = Ok(Some(past_tap(path))),
                None if on_leaf.is_some() && !self.wrapped.is_local(path, id) => self.found = Ok(Some(lost_tap(path))),
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
