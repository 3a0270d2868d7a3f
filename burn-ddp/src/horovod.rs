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
