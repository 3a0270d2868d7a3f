//! What Horovod offers beside the average of gradients: broadcasts of parameters and of optimizer state.

use burn::module::Module;
use burn::optim::ModuleOptimizer;
use burn::tensor::Device;

use crate::ddp::Ddp;
use crate::model::running_stats;
use crate::model::schema::Schema;
use crate::optimizer::state as optimizer_state;
use crate::{Result, agreement, intercept, wrap};

impl Ddp {
    /// `root`'s parameters and buffers on every rank, wrapped or not; parameter ids stay what they are. *Collective*.
    ///
    /// Each rank passes a model of the same shape and holds the same values after. [`Ddp::wrap`] does this from rank 0 by itself. It is
    /// Horovod's `broadcast_parameters`.
    ///
    /// # Errors
    ///
    /// On every rank: [`Error::ModelsDiffer`](crate::Error::ModelsDiffer) naming the first parameter that differs and both shapes;
    /// [`Error::Comm`](crate::Error::Comm) if a peer failed or `root` is no rank.
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
        let mine = intercept::bypass(|| {
            // Running statistics lag one update behind what `visit` shows; `valid` brings them up to date.
            drop(model.valid());
            let schema = Schema::of(&model)?;
            Ok((schema.first_clones(&model)?, schema))
        });
        let (first, schema) = agreement::on_outcome(self.group(), "broadcast its model", mine)?;
        agreement::on_model(self.group(), &schema.entries)?;
        let first = self.group().broadcast_object(Some(first), root)?;
        let trains = model.devices().iter().any(Device::is_autodiff);
        // Ranks that are threads may have started from one model, whose clones share running statistics.
        let model = if trains && intercept::find(&model).is_empty() { running_stats::unshared(model) } else { model };
        let devices = wrap::devices(&model);
        let shared_by = (self.world_size() > 1).then_some((self.group(), root));
        intercept::bypass(|| wrap::share_values(model, shared_by, devices, &schema, first))
    }

    /// Gives every rank the state of `root`'s optimizer (momentum, moments, step counts), bit by bit. *Collective*.
    ///
    /// Each rank passes its optimizer, of the same kind everywhere, and the model that it trains. What it had before is replaced; a `root`
    /// that has not stepped yet leaves none. It is Horovod's `broadcast_optimizer_state`.
    ///
    /// # Errors
    ///
    /// On every rank, and nothing has changed: [`Error::ModelsDiffer`](crate::Error::ModelsDiffer); [`Error::Use`](crate::Error::Use) if
    /// the optimizers are of different kinds, or the state cannot be loaded without loss.
    #[track_caller]
    pub fn broadcast_optimizer_state<M: Module>(
        &self,
        optim: &mut ModuleOptimizer,
        model: &M,
        root: usize,
    ) -> Result<()> {
        optimizer_state::broadcast(self.group(), optim, model, root)
    }
}
