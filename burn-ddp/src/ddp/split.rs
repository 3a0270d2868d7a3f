//! `Ddp::split`: handles for parts of the ranks.

use std::sync::Arc;

use super::Ddp;
use crate::Result;
use crate::agreement::list_ranks;

impl Ddp {
    /// Divides the ranks into parts: ranks that pass the same color get a handle of their part, ranks that pass `None`
    /// get `None`. *Collective*; blocks until every rank has called it. It is MPI's `MPI_Comm_split`.
    ///
    /// The ranks of a part are numbered in the order of their keys, ranks with equal keys in their previous order. On
    /// the handle of a part [`rank`](Self::rank), [`world_size`](Self::world_size) and [`is_main`](Self::is_main) count
    /// the ranks of the part, and `wrap`, loaders, `save`, checkpoints, `join`, Burn's trainer and telemetry concern
    /// its ranks only. A part can be split again. [`local_rank`](Self::local_rank), [`device`](Self::device) and the
    /// numbers of ranks in errors are those of the job. A rank that fails ends the job, with all its parts.
    ///
    /// A rank with several handles must make its collective calls in an order in which the other ranks of each part
    /// make theirs, too: while it waits in one part, it is missing in the other. The seed and the weight of a batch
    /// belong to the rank: a batch from a loader of one handle weighs the backwards of the models of all its handles.
    /// Parts that write files need different paths. A model belongs to the handle that wrapped it.
    ///
    /// Costs one step, in which a rank sends 32 bytes to each other rank, and for each part what
    /// [`World::group`](crate::comm::World::group) costs among its ranks.
    ///
    /// # Errors
    ///
    /// [`Error::Comm`](crate::Error::Comm) if a peer failed or does not call it in time.
    ///
    /// # Example
    ///
    /// Ranks 0 and 1 train one model, ranks 2 and 3 another.
    ///
    /// ```
    /// # use burn::nn::{Linear, LinearConfig};
    /// # use burn::prelude::*;
    /// # use burn_ddp::prelude::*;
    /// let gradients = Ddp::spawn(5, |job| {
    ///     let color = (job.rank() < 4).then_some(job.rank() as u64 / 2);
    ///     let Some(ddp) = job.split(color, 0)? else { return Ok(None) }; // rank 4 does something else
    ///     let device = ddp.device()?.autodiff();
    ///     let model: Linear = ddp.wrap(LinearConfig::new(1, 1).init(&device))?;
    ///     let x = Tensor::<2>::from_floats([[job.rank() as f32]], &device);
    ///     let grads = ddp.backward(&model.forward(x).sum(), &model)?.expect("a step"); // over two ranks
    ///     Ok(Some(grads.get::<2>(model.weight.id).unwrap().into_scalar::<f32>()))
    /// })?;
    /// assert_eq!(gradients, [Some(0.5), Some(0.5), Some(2.5), Some(2.5), None]);
    /// # Ok::<(), burn_ddp::Error>(())
    /// ```
    #[track_caller]
    pub fn split(&self, color: Option<u64>, key: i64) -> Result<Option<Ddp>> {
        let Some(group) = self.group().split(color, key)? else { return Ok(None) };
        tracing::info!(
            rank = group.rank(),
            world_size = group.world_size(),
            engine = group.engine(),
            "new part: {} of the job",
            list_ranks(group.ranks())
        );
        let state = Arc::new(self.state.part(group));
        Ok(Some(Ddp { state, _presence: self._presence.clone() }))
    }
}

#[cfg(test)]
mod tests {
    use burn::tensor::Device;

    use super::*;

    #[test]
    fn a_seed_counts_ranks_of_the_handle_that_set_it() {
        let seeds = Ddp::spawn(2, |job| {
            let alone = job.split(Some(job.rank() as u64), 0)?.expect("a part of one rank");
            let mut seeds = Vec::new();
            for ddp in [&job, &alone] {
                ddp.seed(&Device::default(), 5);
                // The seed belongs to the rank, whatever handle asks.
                seeds.push((job.state().next_seed_of_rank(), alone.state().next_seed_of_rank()));
            }
            Ok(seeds)
        });
        let seeds = seeds.unwrap();
        assert_ne!(seeds[0][0], seeds[1][0]);
        assert_eq!(seeds[0][1], seeds[1][1]);
        assert_eq!(seeds[0][0], seeds[0][1], "rank 0 of both");
    }
}
