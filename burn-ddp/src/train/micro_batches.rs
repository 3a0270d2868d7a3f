//! Micro-batches of an optimizer step.

use std::collections::HashSet;

use burn::module::{Module, ModuleVisitor, Param, ParamId};
use burn::optim::{GradientsAccumulator, GradientsParams};
use burn::tensor::Tensor;

/// What was computed since the last optimizer step.
pub(super) struct Accumulation<M> {
    /// Micro-batches per step.
    per_step: usize,
    /// Micro-batches so far.
    done: usize,
    /// Their gradients, where no reducer holds them.
    local: GradientsAccumulator<M>,
}

impl<M: Module> Accumulation<M> {
    pub(super) fn new(per_step: usize) -> Self {
        Accumulation { per_step, done: 0, local: GradientsAccumulator::new() }
    }

    /// Whether a step has more than one micro-batch.
    pub(super) fn is_on(&self) -> bool {
        self.per_step > 1
    }

    /// Whether the micro-batch to come ends a step.
    pub(super) fn completes(&self, last_of_epoch: bool) -> bool {
        last_of_epoch || self.done + 1 >= self.per_step
    }

    /// One more micro-batch has passed, which was, or was not, the last of its step.
    ///
    /// Yields the gradients of the step: the sum of those of its micro-batches, as in Burn's trainer. `reduced` says that a reducer held them, and that
    /// `grads` is their mean.
    pub(super) fn add(
        &mut self,
        model: &M,
        grads: GradientsParams,
        completes: bool,
        reduced: bool,
    ) -> Option<GradientsParams> {
        self.done += 1;
        if !self.is_on() {
            self.done = 0;
            return Some(grads);
        }
        if !reduced {
            self.local.accumulate(model, grads);
            return completes.then(|| {
                self.done = 0;
                self.local.grads()
            });
        }
        completes.then(|| scaled(model, grads, std::mem::take(&mut self.done)))
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
