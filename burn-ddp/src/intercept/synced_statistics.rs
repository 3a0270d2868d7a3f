//! Running statistics of a wrapped model: made equal on all ranks in each reduction, and put back after a failed step
//! or a batch that does not count.

use std::collections::HashSet;

use burn::module::ParamId;
use burn::optim::GradientsParams;
use burn::tensor::TensorData;
use burn_ddp_comm::DType;

use crate::Result;
use crate::gradients::{AlignedBytes, Nodes, OwnRun, Piggyback, PiggybackResult, Rows, Sum, sum_dtype};
use crate::model::running_stats::{self, BufferPolicy, Buffers};

/// The model's running statistics, and how ranks agree on them.
pub(crate) struct SyncedStatistics {
    buffers: Box<dyn Buffers>,
    /// Their paths in the model.
    paths: Vec<String>,
    policy: BufferPolicy,
    /// Values read for the running step: they have the shapes of the results.
    sent: Vec<TensorData>,
    /// Values when the last step ended, or when others were loaded.
    after_step: GradientsParams,
    /// Values when the last micro-batch ended that only added up; `None` if the last call ended a step.
    after_micro_batch: Option<GradientsParams>,
    /// With logical ranks, if the values are averaged.
    leaves: Option<LeafStatistics>,
}

/// Running statistics of the leaves of a step, each of which begins with those before the step.
struct LeafStatistics {
    rows: Rows,
    /// Weighted sums, one tensor of all values for each dtype.
    sums: Vec<(DType, Nodes<Sum>)>,
}

impl LeafStatistics {
    /// Adds what a leaf has made of the values.
    fn add(&mut self, (leaf, weight): (usize, f64), values: &[TensorData]) {
        for (nth, (dtype, packed)) in running_stats::pack(values).into_iter().enumerate() {
            if self.sums.len() == nth {
                self.sums.push((dtype, Nodes::default()));
            }
            self.sums[nth].1.add(Some(self.rows.run), (leaf, weight), dtype, packed.bytes());
        }
    }

    /// The payload: for each dtype of `values` a row for each subtree, in the type in which they are added.
    fn take(&mut self, values: &[TensorData]) -> Vec<(DType, AlignedBytes)> {
        let mut sums = std::mem::take(&mut self.sums).into_iter();
        let payload = running_stats::pack(values).into_iter().map(|(dtype, packed)| {
            let wide = sum_dtype(dtype);
            let row_bytes = packed.bytes().len() / dtype.size_bytes() * wide.size_bytes();
            let mut rows = AlignedBytes::zeroed(row_bytes * self.rows.run.division.rows());
            Rows::clear(wide, rows.bytes_mut());
            for (leaf, sum) in sums.next().map_or(Vec::new(), |(_, nodes)| nodes.fold(Some(self.rows.run), Sum::plus)) {
                let row = self.rows.of_leaf(leaf) * row_bytes;
                sum.write(wide, 1.0, &mut rows.bytes_mut()[row..row + row_bytes]);
            }
            (wide, rows)
        });
        payload.collect()
    }
}

impl SyncedStatistics {
    pub(crate) fn new(
        buffers: Box<dyn Buffers>,
        paths: Vec<String>,
        policy: BufferPolicy,
        run: Option<OwnRun>,
    ) -> Self {
        let after_step = buffers.values();
        let leaves = run.filter(|_| policy == BufferPolicy::Average);
        let leaves = leaves.map(|run| LeafStatistics { rows: Rows::new(run), sums: Vec::new() });
        SyncedStatistics { buffers, paths, policy, sent: Vec::new(), after_step, after_micro_batch: None, leaves }
    }

    pub(super) fn paths(&self) -> &[String] {
        &self.paths
    }

    pub(super) fn policy(&self) -> BufferPolicy {
        self.policy
    }

    /// True if the ranks make the values equal.
    pub(super) fn is_synced(&self) -> bool {
        self.policy != BufferPolicy::Local
    }

    /// Puts the values into the payload of the step; with logical ranks those of all leaves, of which the last is
    /// `leaf` with its weight.
    pub(super) fn send(&mut self, piggyback: &mut Piggyback, leaf: Option<(usize, f64)>) -> Result<()> {
        if self.is_synced() {
            self.sent = self.buffers.read()?;
            piggyback.statistics = match &mut self.leaves {
                Some(leaves) => {
                    leaf.into_iter().for_each(|leaf| leaves.add(leaf, &self.sent));
                    leaves.take(&self.sent)
                }
                None => running_stats::pack(&self.sent),
            };
            piggyback.from_first = self.policy == BufferPolicy::Broadcast;
        }
        Ok(())
    }

    /// Sets the values that the ranks agreed on.
    pub(super) fn receive(&mut self, results: &PiggybackResult) {
        if !self.is_synced() {
            return;
        }
        let sent = std::mem::take(&mut self.sent);
        if self.leaves.is_none() {
            return self.buffers.write(running_stats::unpack(&sent, &results.statistics));
        }
        let narrow =
            running_stats::pack(&sent).into_iter().zip(&results.statistics).map(|((dtype, own), (_, mean))| {
                let mut narrow = AlignedBytes::zeroed(own.bytes().len());
                Sum::from_bytes(dtype, mean.bytes()).write(dtype, 1.0, narrow.bytes_mut());
                (dtype, narrow)
            });
        self.buffers.write(running_stats::unpack(&sent, &narrow.collect::<Vec<_>>()));
    }

    /// With logical ranks: adds what a leaf has made of the values, and sets those before the step, with which the next
    /// leaf begins.
    pub(super) fn end_leaf(&mut self, leaf: Option<(usize, f64)>) -> Result<()> {
        let Some(leaves) = &mut self.leaves else { return Ok(()) };
        if let Some(leaf) = leaf {
            leaves.add(leaf, &self.buffers.read()?);
        }
        self.buffers.set(&self.after_step, &HashSet::new());
        Ok(())
    }

    /// Keeps the values at the end of a step, or of a micro-batch that only added up.
    pub(super) fn keep(&mut self, step_ended: bool) {
        let values = self.buffers.values();
        match step_ended {
            true => (self.after_step, self.after_micro_batch) = (values, None),
            // With logical ranks the next leaf begins with the values before the step.
            false if self.leaves.is_some() => {}
            false => self.after_micro_batch = Some(values),
        }
    }

    /// Sets the values of the end of the last step.
    pub(super) fn restore_step(&mut self) {
        self.sent.clear();
        self.forget_leaves();
        self.after_micro_batch = None;
        self.buffers.set(&self.after_step, &HashSet::new());
    }

    /// Sets the values of the end of the last call: its batch does not count. The statistics `of_all_ranks` do not
    /// contain this rank's batch.
    pub(super) fn forget_batch(&mut self, of_all_ranks: &HashSet<ParamId>) {
        self.buffers.set(self.after_micro_batch.as_ref().unwrap_or(&self.after_step), of_all_ranks);
    }

    /// Number of the dtype, and first leaf, of each sum that is held.
    pub(super) fn held_leaves(&self) -> Vec<(usize, usize)> {
        let sums = self.leaves.iter().flat_map(|leaves| leaves.sums.iter().enumerate());
        sums.flat_map(|(nth, (_, nodes))| nodes.leaves().into_iter().map(move |leaf| (nth, leaf))).collect()
    }

    /// The sum of the `nth` dtype from a leaf on.
    pub(super) fn held_leaf(&self, nth: usize, leaf: usize) -> Option<Sum> {
        self.leaves.as_ref()?.sums.get(nth)?.1.sum(leaf).cloned()
    }

    /// Adds to the sum of the `nth` dtype from a leaf on.
    pub(super) fn add_held_leaf(&mut self, nth: usize, leaf: usize, sum: Sum) {
        let Some(leaves) = &mut self.leaves else { return };
        while leaves.sums.len() <= nth {
            leaves.sums.push((sum.dtype(), Nodes::default()));
        }
        leaves.sums[nth].1.add_sum(leaf, sum);
    }

    /// Type and number of elements of the sums of the `nth` dtype.
    pub(super) fn like_leaf(&self, nth: usize) -> Option<(DType, usize)> {
        self.leaves.as_ref()?;
        let values = self.buffers.read().ok()?;
        let packed = running_stats::pack(&values).into_iter().nth(nth);
        packed.map(|(dtype, packed)| (sum_dtype(dtype), packed.bytes().len() / dtype.size_bytes()))
    }

    /// Drops what the leaves of the running step have made of the values.
    pub(super) fn forget_leaves(&mut self) {
        self.leaves.iter_mut().for_each(|leaves| leaves.sums.clear());
    }

    /// This rank's values.
    pub(super) fn read(&self) -> Result<Vec<TensorData>> {
        self.buffers.read()
    }

    /// Sets this rank's values, from a checkpoint.
    pub(super) fn load(&mut self, values: Vec<TensorData>) {
        self.buffers.write(values);
        self.keep(true);
    }
}
