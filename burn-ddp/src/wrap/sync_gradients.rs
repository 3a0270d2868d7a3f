//! Reduction of gradients that are held when no further backward comes.

use burn::module::Module;
use burn::optim::GradientsParams;
use burn_ddp_comm::ReduceOp;

use super::{only, wrapped_in};
use crate::ddp::Ddp;
use crate::{Result, intercept};

impl Ddp {
    /// Reduces the gradients of micro-batches that no backward has reduced, and returns their averages for the
    /// optimizer, like the last backward of a step. *Collective*.
    ///
    /// Two loops need it: one with [accumulation](crate::WrapConfig::with_accumulation), if an epoch ends with fewer
    /// micro-batches than a step has; and one with [`no_sync`](Ddp::no_sync), if no backward follows. In the first case
    /// a loop over [`Ddp::loader`] needs no call, as the last batch of its epoch reduces by itself, unless the loop
    /// calls [`Ddp::set_batch_items`] or leaves the epoch early. Other loops call it at the end of each epoch, on
    /// **every rank** at the same place; ranks may hold different numbers of micro-batches, or none. If no rank holds
    /// any, the result is empty and no step is counted.
    ///
    /// The averages are the mean over the items of all micro-batches and ranks, or the sum, as
    /// [`GradientReduction`](crate::GradientReduction) says. Blocks until all ranks have called it. Costs an all-reduce
    /// of one byte; if a rank holds gradients, also the communication of [`Ddp::backward`] and memory for one gradient
    /// of each parameter.
    ///
    /// # Errors
    ///
    /// Those of [`Ddp::backward`].
    ///
    /// # Example
    ///
    /// ```
    /// # use burn::nn::{Linear, LinearConfig};
    /// # use burn::optim::{GradientsParams, SgdConfig};
    /// # use burn::prelude::*;
    /// # use burn_ddp::prelude::*;
    /// let moved = Ddp::spawn(2, |ddp| {
    ///     let device = ddp.device()?.autodiff();
    ///     let model: Linear = LinearConfig::new(1, 1).init(&device);
    ///     let mut model = ddp.wrap_with(model, &WrapConfig::new().with_accumulation(2))?;
    ///     let mut optim = SgdConfig::new().init();
    ///     let before = model.weight.val().into_scalar::<f32>();
    ///     let files = [[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]; // three micro-batches, two to a step
    ///     for x in files[ddp.rank()] {
    ///         let loss = model.forward(Tensor::<2>::from_floats([[x]], &device)).sum();
    ///         let grads = GradientsParams::from_grads(loss.backward(), &model);
    ///         if !grads.is_empty() {
    ///             model = optim.step(1.0, model, grads); // by (1 + 4 + 2 + 5) / 4
    ///         }
    ///     }
    ///     let grads = ddp.sync_gradients(&model)?;
    ///     if !grads.is_empty() {
    ///         model = optim.step(1.0, model, grads); // by (3 + 6) / 2
    ///     }
    ///     Ok(before - model.weight.val().into_scalar::<f32>())
    /// })?;
    /// assert!(moved.iter().all(|moved| (moved - 7.5).abs() < 1e-5));
    /// # Ok::<(), burn_ddp::Error>(())
    /// ```
    #[track_caller]
    pub fn sync_gradients<M: Module>(&self, model: &M) -> Result<GradientsParams> {
        let wrapped = wrapped_in(self.group(), model)?;
        let wrapped = only(&wrapped, "synchronise")?;
        let mut held = [u8::from(wrapped.holds_gradients())];
        self.group().all_reduce(&mut held, ReduceOp::Max)?;
        if held == [0] {
            return Ok(GradientsParams::new());
        }
        // A backward of weight 0 that reaches every parameter: it puts the averages on the leaves as any other does.
        let Some(loss) = intercept::read_all(model, wrapped) else {
            let reason = "gradients of micro-batches are held, but the model has no trainable parameter any more";
            return Err(intercept::refused(self, reason.into()));
        };
        let grads = wrapped.reduce_held(|| intercept::checked_backward(wrapped, &loss, model))?;
        Ok(GradientsParams::from_grads(grads, model))
    }
}
