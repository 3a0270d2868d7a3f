//! Horovod's names for two broadcasts. Its `DistributedOptimizer` is [`crate::DistributedOptimizer`].

use burn::module::Module;
use burn::optim::ModuleOptimizer;

use crate::ddp::Ddp;
use crate::model::broadcast;
use crate::{Result, optimizer};

impl Ddp {
    /// `root`'s parameters and buffers on every rank, wrapped or not; parameter ids stay what they are. *Collective*.
    ///
    /// Each rank passes a model of the same shape and holds the same values after. [`Ddp::wrap`] does this from rank 0
    /// by itself.
    ///
    /// # Errors
    ///
    /// On every rank: [`Error::ModelsDiffer`](crate::Error::ModelsDiffer) naming the first parameter that differs and
    /// both shapes; [`Error::Comm`](crate::Error::Comm) if a peer failed or `root` is no rank.
    ///
    /// # Example
    ///
    /// ```
    /// # use burn::{nn::LinearConfig, prelude::*};
    /// # use burn_ddp::prelude::*;
    /// let hashes = Ddp::spawn(2, |ddp| {
    ///     let model = LinearConfig::new(3, 1).init(&ddp.device()?); // other values on each rank
    ///     Ok(param_hash(&ddp.broadcast_parameters(model, 1)?)?)
    /// })?;
    /// assert_eq!(hashes[0], hashes[1]);
    /// # Ok::<(), burn_ddp::Error>(())
    /// ```
    #[track_caller]
    pub fn broadcast_parameters<M: Module>(&self, model: M, root: usize) -> Result<M> {
        broadcast::model(self, model, root)
    }

    /// Gives every rank the state of `root`'s optimizer (momentum, moments, step counts), bit by bit. *Collective*.
    ///
    /// Each rank passes its optimizer, of the same kind everywhere, and the model that it trains. The state that it had
    /// is replaced; a `root` that has not stepped yet leaves none.
    ///
    /// # Errors
    ///
    /// On every rank, and nothing has changed: [`Error::ModelsDiffer`](crate::Error::ModelsDiffer);
    /// [`Error::Invalid`](crate::Error::Invalid) if the optimizers are of different kinds, or the state cannot be
    /// loaded without loss.
    ///
    /// # Example
    ///
    /// ```
    /// # use burn::nn::{Linear, LinearConfig};
    /// # use burn::optim::{GradientsParams, SgdConfig, momentum::MomentumConfig};
    /// # use burn::prelude::*;
    /// # use burn_ddp::prelude::*;
    /// let hashes = Ddp::spawn(2, |ddp| {
    ///     let device = ddp.device()?.autodiff();
    ///     let mut model: Linear = LinearConfig::new(2, 1).init(&device);
    ///     let mut optim = SgdConfig::new().with_momentum(Some(MomentumConfig::new())).init();
    ///     let grads = |model: &Linear, x: usize| {
    ///         let loss = model.forward(Tensor::<2>::full([1, 2], x as f64, &device)).sum();
    ///         GradientsParams::from_grads(loss.backward(), model)
    ///     };
    ///     let own = grads(&model, ddp.rank() + 1);
    ///     model = optim.step(0.1, model, own); // each rank by itself, so far
    ///     model = ddp.broadcast_parameters(model, 0)?;
    ///     ddp.broadcast_optimizer_state(&mut optim, &model, 0)?;
    ///     let same = grads(&model, 1);
    ///     Ok(param_hash(&optim.step(0.1, model, same))?)
    /// })?;
    /// assert_eq!(hashes[0], hashes[1]); // the momentum of rank 0 on both
    /// # Ok::<(), burn_ddp::Error>(())
    /// ```
    #[track_caller]
    pub fn broadcast_optimizer_state<M: Module>(
        &self,
        optim: &mut ModuleOptimizer,
        model: &M,
        root: usize,
    ) -> Result<()> {
        optimizer::state::broadcast(self.group(), optim, model, root)
    }
}
