//! A rank without data takes part in the reductions of the others, as torch's `Join` does with shadow collectives.

use std::sync::atomic::Ordering;

use super::model_state::State;
use super::overflow_verdict::Verdict;
use super::wrapped_model::WrappedModel;
use crate::Result;
use crate::agreement::tell_peers;
use crate::gradients::GradientMemory;

impl WrappedModel {
    /// Takes part in a reduction of the other ranks without a backward. Returns false if no rank has a gradient,
    /// because all ranks shadow.
    pub(crate) fn shadow(&self) -> Result<bool> {
        self.lock().shadow(self)
    }
}

pub(super) fn run<B: GradientMemory>(model: &WrappedModel, state: &mut State<B>) -> Result<bool> {
    let given = reduce(model, state);
    if let Err(error) = &given {
        state.reducer.discard();
        tell_peers(&model.ddp, error);
    }
    given
}

fn reduce<B: GradientMemory>(model: &WrappedModel, state: &mut State<B>) -> Result<bool> {
    state.last_batch = 0;
    state.epoch = None;
    model.ddp.world().set_step(state.reducer.step());
    let mut piggyback = model.statistics(state, None)?;
    if state.reducer.compares_replicas() {
        // This rank's parameters are no longer those of the others, and take no part in the comparison.
        state.compared.iter_mut().for_each(|value| *value = None);
        model.compare(state, &mut piggyback)?;
    }
    let step = state.reducer.step();
    let given = state.reducer.shadow(piggyback)?;
    if given {
        state.loss_scale = state.scaler.as_ref().map(|scaler| scaler.state.scale);
        state.look_for_overflow(model, step)?;
        state.reducer.end_step()?;
        let mut verdict = Verdict::default();
        if let Some(culprit) = state.overflow {
            verdict.add(model.overflow_of(culprit), state.scaler.is_some());
        }
        model.ddp.state().meter.skipped(verdict.skips());
        state.end_scaled_step(model, &verdict)?;
    }
    model.comparing.store(state.reducer.compares_replicas(), Ordering::Release);
    Ok(given)
}
