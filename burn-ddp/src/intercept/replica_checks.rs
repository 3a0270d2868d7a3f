//! Checks that the ranks still train the same model.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use burn::backend::tensor::FloatTensor;
use burn::module::Module;
use burn::tensor::{TensorData, read_sync};

use super::model_state::State;
use super::model_walk::note_values;
use super::tap_handle::TapHandle;
use super::wrapped_model::WrappedModel;
use crate::Result;
use crate::gradients::{GradientMemory, Piggyback, PiggybackResult};
use crate::model::digest::{self, Comparison, differing};
use crate::model::parameter_movement::{Movement, Sketch, tolerance};

impl TapHandle {
    /// True if parameters that differ between ranks are judged by their movements.
    pub(crate) fn judges_movements(&self) -> bool {
        self.model.lock().movements().is_some()
    }

    /// Movement of the parameter until it had the value `now`.
    pub(crate) fn movement_until(&self, now: &Sketch) -> Movement {
        self.model.lock().movements().map_or(Movement::UNKNOWN, |movements| movements.until(self.slot, now))
    }
}

impl WrappedModel {
    /// Measures movements from the values of `model`, which all ranks have got.
    pub(crate) fn measure_movements_from<M: Module>(self: &Arc<Self>, model: &M) {
        note_values(model);
        if let Some(movements) = self.lock().movements() {
            movements.restart();
        }
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
        own.accept(|slot| training.iter().all(|of_rank| of_rank[slot] != 0), &differing(digests));
        Ok(())
    }

    fn read_value<B: GradientMemory>(&self, value: Option<FloatTensor<B>>) -> Result<Option<TensorData>> {
        let data = value.map(|value| read_sync(B::float_into_data(value)));
        data.transpose().map_err(|e| self.fault(format!("reading parameters failed: {e:?}")))
    }
}
