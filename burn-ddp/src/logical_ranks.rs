//! Logical ranks: the micro-batches of a step, numbered, so that a run has the same bits on any number of processes.

use burn_ddp_comm::LogicalRanks;

use crate::gradients::OwnRun;
use crate::{Ddp, Error, Result, agreement};

impl Ddp {
    /// Fixes the number of logical ranks of this handle: the micro-batches of one optimizer step over all processes.
    /// *Collective*, before the first training loader and the first `wrap`.
    ///
    /// A step then has `count` micro-batches, the *leaves*, on any number of processes: each process makes a run of
    /// them, one after the other, and `backward` returns averages after its last one. Loaders deal the items of a step
    /// to leaves, random numbers are seeded by leaf, and gradients and running statistics are added up one tree over
    /// all leaves. [`exact_sums`](Self::exact_sums) is for numbers that steer training. So 8 logical ranks on 1, 2, 3
    /// or 8 processes train the same bits; `docs/data.md` and [`WrapConfig::with_exact`](crate::WrapConfig::with_exact)
    /// name what can break that. `batch_size` of a loader is that of a leaf.
    ///
    /// Cost: up to log₂ of this process's leaves whole sums of gradients in memory; gradients in half precision travel
    /// as f32; and where the leaves of a process are not one whole subtree (3 of 8), `(r + 1) / 2` times the bytes for
    /// `r` subtrees, 2 in most cases.
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`], on every rank: fewer leaves than processes, another number than was set before, a loader or
    /// a model that was made without it, or ranks that pass different numbers. [`Error::Comm`] if a peer failed.
    ///
    /// ```
    /// # use burn_ddp::prelude::*;
    /// let leaves = Ddp::spawn(3, |ddp| {
    ///     ddp.set_logical_ranks(8)?;
    ///     assert_eq!(ddp.logical_ranks(), 8);
    ///     Ok([ddp.next_leaf()?, ddp.next_leaf()?, ddp.logical_rank()])
    /// })?;
    /// assert_eq!(leaves, [[0, 1, 1], [3, 4, 4], [6, 7, 7]]);
    /// # Ok::<(), burn_ddp::Error>(())
    /// ```
    #[track_caller]
    pub fn set_logical_ranks(&self, count: usize) -> Result<()> {
        let settings = vec![("the number of logical ranks".to_string(), count.to_string())];
        if let Some(difference) = agreement::on_settings(self.group(), &settings)? {
            return Err(Error::invalid(format!("the ranks set different numbers: {difference}")));
        }
        // All ranks pass the same number, and get the same error.
        self.state().leaves.set(count, self.world_size())
    }

    /// Number of micro-batches of a step over all processes: as [set](Self::set_logical_ranks), or the number of
    /// processes.
    #[must_use]
    pub fn logical_ranks(&self) -> usize {
        self.state().leaves.division().map_or(self.world_size(), |division| division.count())
    }

    /// The leaf of the batch that a training loader (`ddp.loader`) of this rank handed out last, or of the last
    /// [`next_leaf`](Self::next_leaf); without either the first leaf of this rank. Without logical ranks it is the
    /// rank.
    #[must_use]
    pub fn logical_rank(&self) -> usize {
        let (last, run) = (self.state().batch_weight.leaf(), self.run());
        let last = last.filter(|last| last.group == self.group().id()).map(|last| last.leaf);
        last.unwrap_or_else(|| run.leaves().start)
    }

    /// Begins the next micro-batch of this rank in a program that reads its data without a loader of this library, and
    /// returns its leaf: call it before the data of the leaf are read or drawn. Seeds the device for the leaf, after
    /// [`Ddp::seed`]. Makes no collective.
    ///
    /// That a leaf gets the same data on every number of processes is then the program's promise, and so is that it
    /// saves checkpoints between steps. Processes with fewer leaves than others make fewer backwards, so a model with
    /// sharded parameters or a `SyncBatchNorm` needs as many leaves for each.
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`] without logical ranks.
    ///
    /// # Example
    ///
    /// As in [`set_logical_ranks`](Self::set_logical_ranks).
    pub fn next_leaf(&self) -> Result<usize> {
        let Some(division) = self.state().leaves.division() else {
            return Err(Error::invalid("`next_leaf` needs the number of leaves: `ddp.set_logical_ranks(count)?`"));
        };
        self.state().leaves.used_by("`next_leaf`");
        let own = division.of_rank(self.rank());
        let next = self.state().batch_weight.next_leaf(self.group().id(), division, own);
        self.state().seed_leaf(next.leaf, next.step.2);
        Ok(next.leaf)
    }

    /// This rank's leaves; without logical ranks one per rank.
    pub(crate) fn run(&self) -> OwnRun {
        let one_each = || LogicalRanks::new(self.world_size(), self.world_size());
        let division = self.state().leaves.division().or_else(one_each);
        let division = division.expect("as many leaves as ranks");
        OwnRun { division, rank: self.rank() }
    }

    /// True if the ranks draw their random numbers, seeded by `ddp.seed`, from one generator.
    pub(crate) fn draws_alike(&self) -> bool {
        self.state().is_seeded() && self.world().peers().len() > 1 && self.world().engine() == "threads"
    }

    /// Sets the number of logical ranks that the launcher or a config file gives.
    pub(crate) fn read_logical_ranks(&self) -> Result<()> {
        let given = self.world().options().logical_ranks;
        given.map_or(Ok(()), |count| self.state().leaves.set(count, self.world_size()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_that_contradict_are_refused() {
        let errors = Ddp::spawn(2, |ddp| {
            let few = ddp.set_logical_ranks(1).unwrap_err().to_string();
            let differ = ddp.set_logical_ranks(4 + 2 * ddp.rank()).unwrap_err().to_string();
            assert!(ddp.next_leaf().unwrap_err().to_string().contains("ddp.set_logical_ranks"));
            // A refused number changes nothing.
            ddp.set_logical_ranks(4)?;
            Ok((few, differ))
        });
        let (few, differ) = errors.unwrap().swap_remove(1);
        assert!(few.contains("1 logical ranks for 2 processes"), "{few}");
        assert!(differ.contains("4 on rank 0") && differ.contains("6 on rank 1"), "{differ}");
        let again = Ddp::spawn(2, |ddp| {
            assert_eq!(ddp.logical_ranks(), 2);
            ddp.set_logical_ranks(4)?;
            ddp.set_logical_ranks(4)?;
            Ok(ddp.set_logical_ranks(6).unwrap_err().to_string())
        });
        assert!(again.unwrap()[0].contains("the job has 4"));
    }
}
