//! Accumulation of gradients over the micro-batches of an optimizer step.

use std::collections::HashSet;

use burn::module::{Module, ModuleVisitor, Param, ParamId};
use burn::optim::GradientsParams;
use burn::tensor::Tensor;

/// Micro-batches since the last optimizer step.
pub(super) struct MicroBatches {
    /// Micro-batches per step.
    per_step: usize,
    /// True if a step takes the sum over its micro-batches, as Burn's trainer does; false for their mean.
    adds_up: bool,
    /// Micro-batches so far.
    done: usize,
}

impl MicroBatches {
    pub(super) fn new(per_step: usize, adds_up: bool) -> Self {
        MicroBatches { per_step, adds_up, done: 0 }
    }

    /// True if a step has more than one micro-batch.
    pub(super) fn accumulates(&self) -> bool {
        self.per_step > 1
    }

    /// True if the next micro-batch is the last of its step.
    pub(super) fn completes(&self, last_of_epoch: bool) -> bool {
        last_of_epoch || self.done + 1 >= self.per_step
    }

    /// Counts a micro-batch. If it `completes` the step, returns the step's gradients. `grads` is their (weighted)
    /// mean, which is multiplied by their number if the step takes the sum.
    pub(super) fn add<M: Module>(
        &mut self,
        model: &M,
        grads: GradientsParams,
        completes: bool,
    ) -> Option<GradientsParams> {
        self.done += 1;
        let adds_up = self.adds_up;
        completes.then(|| {
            let done = std::mem::take(&mut self.done);
            scaled(model, grads, if adds_up { done } else { 1 })
        })
    }
}

/// `grads` of `model`, times `factor`.
fn scaled<M: Module>(model: &M, mut grads: GradientsParams, factor: usize) -> GradientsParams {
    struct Scale<'a> {
        grads: &'a mut GradientsParams,
        factor: f64,
        /// Clones of a parameter share an id.
        seen: HashSet<ParamId>,
    }
    impl ModuleVisitor for Scale<'_> {
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
            if self.seen.insert(param.id)
                && let Some(grad) = self.grads.remove::<D>(param.id)
            {
                self.grads.register(param.id, grad.mul_scalar(self.factor));
            }
        }
    }
    if factor > 1 {
        model.visit(&mut Scale { grads: &mut grads, factor: factor as f64, seen: HashSet::new() });
    }
    grads
}
