//! Running statistics of a wrapped model: made equal on all ranks in each reduction, and put back after a failed step
//! or a batch that does not count.

use std::collections::HashSet;

use burn::module::ParamId;
use burn::optim::GradientsParams;
use burn::tensor::TensorData;

use crate::Result;
use crate::gradients::{Piggyback, PiggybackResult};
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
}

impl SyncedStatistics {
    pub(crate) fn new(buffers: Box<dyn Buffers>, paths: Vec<String>, policy: BufferPolicy) -> Self {
        let after_step = buffers.values();
        SyncedStatistics { buffers, paths, policy, sent: Vec::new(), after_step, after_micro_batch: None }
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

    /// Puts the values into the payload of the step.
    pub(super) fn send(&mut self, piggyback: &mut Piggyback) -> Result<()> {
        if self.is_synced() {
            self.sent = self.buffers.read()?;
            piggyback.statistics = running_stats::pack(&self.sent);
            piggyback.from_first = self.policy == BufferPolicy::Broadcast;
        }
        Ok(())
    }

    /// Sets the values that the ranks agreed on.
    pub(super) fn receive(&mut self, results: &PiggybackResult) {
        if self.is_synced() {
            let sent = std::mem::take(&mut self.sent);
            self.buffers.write(running_stats::unpack(&sent, &results.statistics));
        }
    }

    /// Keeps the values at the end of a step, or of a micro-batch that only added up.
    pub(super) fn keep(&mut self, step_ended: bool) {
        let values = self.buffers.values();
        match step_ended {
            true => (self.after_step, self.after_micro_batch) = (values, None),
            false => self.after_micro_batch = Some(values),
        }
    }

    /// Sets the values of the end of the last step.
    pub(super) fn restore_step(&mut self) {
        self.sent.clear();
        self.after_micro_batch = None;
        self.buffers.set(&self.after_step, &HashSet::new());
    }

    /// Sets the values of the end of the last call: its batch does not count. The statistics `of_all_ranks` do not
    /// contain this rank's batch.
    pub(super) fn forget_batch(&mut self, of_all_ranks: &HashSet<ParamId>) {
        self.buffers.set(self.after_micro_batch.as_ref().unwrap_or(&self.after_step), of_all_ranks);
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
