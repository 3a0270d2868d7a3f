//! `join`: ranks whose own loaders end at different steps.

use std::borrow::BorrowMut;

use burn::module::Module;
use burn::optim::ModuleOptimizer;

use crate::ddp::Ddp;
use crate::intercept::refuse_sharded;
use crate::model::broadcast;
use crate::wrap::{only, wrapped_in};
use crate::{Error, Result, optimizer};

const NO_SYNCED_NORM: &str = "`join` with a `SyncBatchNorm` in the model is not possible: ranks that still train need \
    every rank's passes through it; use Burn's `BatchNorm`, or give all ranks equally many batches and leave `join` \
    out";

const NO_LOCAL_PARAMETERS: &str = "`join` with local parameters in the model is not possible: at its end all ranks get \
    the optimizer's state of one rank; leave `with_local_parameters` out, or give all ranks equally many batches and \
    leave `join` out";

/// Advice for sharded parameters. Each rank must step its own rows in every step, which `join` cannot do for it: `join`
/// does not know the learning rate.
const NO_PARTS: &str = "each rank steps its own rows in every step, also one without data. Let it pass a batch again \
    by `ddp.weighted(0.0).backward(..)` and step, until `ddp.sum` says that all are done; `ddp.loader` gives all ranks \
    as many batches by itself";

impl Ddp {
    /// Waits for the ranks that still have data, and gives every rank the model and the optimizer state of a rank that
    /// trained longest. *Collective*: each rank calls it when its own data are used up, so at different times.
    ///
    /// It is torch's [`Join`](https://docs.pytorch.org/docs/stable/distributed.algorithms.join.html), for loaders that
    /// give ranks different numbers of batches; [`Ddp::loader`] never does. A rank that has called it takes part in the
    /// reductions of the others with weight 0, so gradients are the mean over the ranks that still train; each backward
    /// counts 1, or what [`Ddp::weighted`] says. Micro-batches that this rank holds for
    /// [accumulation](crate::WrapConfig::with_accumulation) count in the step that another rank completes; if none
    /// does, they are thrown away. When every rank has called it, all have the parameters, running statistics and
    /// optimizer state of a rank that trained to the end.
    ///
    /// Returns how many optimizer steps this rank missed: a learning-rate schedule that counts steps must be moved on
    /// by as many.
    ///
    /// Until every rank has called it, the ranks that still train may call no other collective (`ddp.mean`,
    /// [`Ddp::flush`]), as the waiting ranks do not call them. The loop must train `model` alone: wrap several models
    /// as one module, without a [`SyncBatchNorm`](crate::nn::SyncBatchNorm), whose passes all ranks make together. In a
    /// world of 1 it only discards gradients that are held.
    ///
    /// A waiting rank communicates as much as in a step of [`Ddp::backward`]. The end costs a small gather and, if the
    /// ranks made different numbers of steps, a broadcast of model and optimizer state: one rank sends `(n - 1) b`
    /// bytes for `b` bytes on `n` ranks.
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`] if `model` is not one wrapped model, has a `SyncBatchNorm`,
    /// [local parameters](crate::WrapConfig::with_local_parameters) or
    /// [sharded ones](crate::WrapConfig::with_sharding), of which every rank must step its rows;
    /// [`Error::Comm`] if a peer failed, or left without calling it; [`Error::ReplicasDiffer`] as every backward.
    ///
    /// [`Error::Invalid`]: crate::Error::Invalid
    /// [`Error::Comm`]: crate::Error::Comm
    /// [`Error::ReplicasDiffer`]: crate::Error::ReplicasDiffer
    ///
    /// # Example
    ///
    /// ```
    /// # use burn::nn::{Linear, LinearConfig};
    /// # use burn::optim::AdamConfig;
    /// # use burn::prelude::*;
    /// # use burn_ddp::prelude::*;
    /// let ranks = Ddp::spawn(2, |ddp| {
    ///     let device = ddp.device()?.autodiff();
    ///     let mut model: Linear = ddp.wrap(LinearConfig::new(1, 1).init(&device))?;
    ///     let mut optim = AdamConfig::new().init();
    ///     let files = [vec![1.0, 2.0], vec![3.0, 4.0, 5.0]]; // rank 1 has one batch more
    ///     for x in &files[ddp.rank()] {
    ///         let loss = model.forward(Tensor::<2>::from_floats([[*x]], &device)).sum();
    ///         let Some(grads) = ddp.backward(&loss, &model)? else { continue };
    ///         model = optim.step(0.1, model, grads);
    ///     }
    ///     let missed = ddp.join(&mut model, &mut optim)?;
    ///     Ok((missed, param_hash(&model)?))
    /// })?;
    /// assert_eq!((ranks[0].0, ranks[1].0), (1, 0));
    /// assert_eq!(ranks[0].1, ranks[1].1);
    /// # Ok::<(), burn_ddp::Error>(())
    /// ```
    #[track_caller]
    pub fn join<M: Module + 'static>(
        &self,
        model: &mut M,
        optim: &mut impl BorrowMut<ModuleOptimizer>,
    ) -> Result<usize> {
        let wrapped = wrapped_in(self.group(), model)?;
        let wrapped = only(&wrapped, "join with")?;
        self.state().leaves.refuse_if_exact("`join`, which ends ranks early", "use `ddp.loader`")?;
        if wrapped.has_synced_norm() {
            return Err(Error::invalid(NO_SYNCED_NORM));
        }
        if !wrapped.local().is_empty() {
            return Err(Error::invalid(NO_LOCAL_PARAMETERS));
        }
        refuse_sharded(model, "`join`", NO_PARTS)?;
        if self.world_size() == 1 {
            wrapped.discard();
            return Ok(0);
        }
        // Skipped steps are no steps of an optimizer.
        let mine = wrapped.steps();
        let skipped = wrapped.skipped();
        while wrapped.shadow()? {}

        let all = self.group().all_gather_object(&(mine, skipped))?;
        let steps: Vec<u64> = all.iter().map(|(steps, _)| *steps).collect();
        let last = *steps.iter().max().expect("a world has ranks");
        if steps.iter().any(|steps| *steps != last) {
            let root = steps.iter().position(|steps| *steps == last).expect("one has most");
            *model = broadcast::model(self, model.clone(), root)?;
            wrapped.measure_movements_from(model);
            // A rank that trained to the end has this state; loading it would move it through Burn's default device.
            optimizer::state::broadcast_to(mine < last, self.group(), optim.borrow_mut(), model, root)?;
        }
        let of_last = all.iter().find(|(steps, _)| *steps == last).map_or(0, |(_, skipped)| *skipped);
        Ok((last - mine - (of_last - skipped)) as usize)
    }
}
