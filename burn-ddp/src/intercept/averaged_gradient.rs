//! Average of one parameter, for programs that step without an optimizer of Burn.

use std::sync::Arc;

use burn::module::{Module, Param};
use burn::tensor::{Gradients, Tensor};

use super::model_walk::{AtTap, walk};
use super::parameter_tap::Tap;
use super::unused_parameter_averages::Found;
use super::wrapped_model::{TapHandle, WrappedModel};
use crate::ddp::Ddp;
use crate::device::is_libtorch;

impl Ddp {
    /// The average of one parameter's gradient over all ranks, from the result of a backward; also of a parameter that
    /// other ranks have used and this rank has not. Not collective: it neither communicates nor waits.
    ///
    /// Returns `None` if no rank has used the parameter, and after backwards that only sum up (accumulation,
    /// [`no_sync`](Ddp::no_sync)). In a world of 1 it is the gradient.
    ///
    /// `param.base().grad(&grads)` is the same for parameters that this rank has used. `param.val().grad(&grads)` is
    /// `None`, also for a `val()` that was kept from the forward.
    /// An optimizer written by hand must step every parameter for which this returns an average, or the ranks train
    /// apart: the next backward warns of it, and the comparison of replicas fails. A `ModuleMapper` gets parameters
    /// without what `wrap` has added: there, take the averages out of `GradientsParams::from_grads` by `param.id`.
    ///
    /// # Example
    ///
    /// ```
    /// # use burn::{nn::LinearConfig, prelude::*};
    /// # use burn_ddp::prelude::*;
    /// let gradients = Ddp::spawn(2, |ddp| {
    ///     let device = ddp.device()?.autodiff();
    ///     let model = ddp.wrap(LinearConfig::new(1, 1).init(&device))?;
    ///     let x = Tensor::<2>::from_floats([[2.0 * ddp.rank() as f32]], &device); // 0 on rank 0, 2 on rank 1
    ///     let grads = model.forward(x).sum().backward();
    ///     Ok(ddp.grad(&model.weight, &grads).map(|gradient| gradient.into_scalar::<f32>()))
    /// })?;
    /// assert_eq!(gradients, [Some(1.0), Some(1.0)]);
    /// # Ok::<(), burn_ddp::Error>(())
    /// ```
    #[must_use]
    pub fn grad<const D: usize>(&self, param: &Param<Tensor<D>>, grads: &Gradients) -> Option<Tensor<D>> {
        let base = param.base();
        if !base.is_require_grad() {
            return None;
        }
        if let Some(gradient) = base.grad(grads) {
            return Some(gradient);
        }
        let tap = param.reparameterization::<Tap>()?;
        let found = tap.find();
        let tap = tap.handle();
        match found {
            Found::Nothing => return None,
            Found::Outdated => {
                tap.model.warn_outdated(tap.slot);
                return None;
            }
            Found::Unclear => tap.model.warn_unclear(tap.slot),
            Found::Waits => {}
        }
        let average = tap.stand_in::<D>().grad(grads)?;
        tap.take_waiting();
        Some(average)
    }
}

/// Moves averages that wait on stand-in leaves in `gradients` to the leaves of the parameters of `model`. On LibTorch
/// they stay there, where optimizers of Burn and [`Ddp::grad`] find them: Burn 0.22.1's `grad_replace` panics on it.
pub(super) fn settle<M: Module>(model: &M, wrapped: &Arc<WrappedModel>, gradients: &mut Gradients) {
    struct Settle<'a> {
        wrapped: &'a Arc<WrappedModel>,
        gradients: &'a mut Gradients,
    }
    impl AtTap for Settle<'_> {
        /// Moves the average of the parameter, if there is one.
        type Seen = Box<dyn FnOnce(&TapHandle, &mut Gradients) -> bool>;

        fn parameter<const D: usize>(&mut self, param: &Param<Tensor<D>>) -> Option<Self::Seen> {
            let base = param.base();
            if !base.is_require_grad() {
                return None;
            }
            Some(Box::new(move |tap, gradients| {
                let Some(average) = tap.stand_in::<D>().grad_remove(gradients) else { return false };
                base.grad_replace(gradients, average);
                true
            }))
        }

        fn leave(&mut self, _: &str, settle: Self::Seen, tap: Option<TapHandle>) {
            if let Some(tap) = tap.filter(|tap| Arc::ptr_eq(&tap.model, self.wrapped))
                && tap.waits()
                && settle(&tap, self.gradients)
            {
                tap.note_settled();
            }
        }
    }
    if wrapped.averages_wait() && !is_libtorch(&wrapped.device) {
        walk(model, &mut Settle { wrapped, gradients });
    }
}
