//! Running statistics of a wrapped model: made equal on all ranks in each reduction, and put back after a failed step.

use burn::tensor::TensorData;

use crate::Result;
use crate::gradients::{Piggyback, PiggybackResult};
use crate::model::running_stats::{self, BufferPolicy, Buffers};

/// The model's running statistics, and how ranks agree on them.
pub(crate) struct SyncedStatistics {
    buffers: Box<dyn Buffers>,
    policy: BufferPolicy,
    /// Values read for the running step: they have the shapes of the results.
    sent: Vec<TensorData>,
}

impl SyncedStatistics {
    pub(crate) fn new(mut buffers: Box<dyn Buffers>, policy: BufferPolicy) -> Self {
        buffers.keep();
        SyncedStatistics { buffers, policy, sent: Vec::new() }
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

    /// Keeps the values for [`restore`](Self::restore).
    pub(super) fn keep(&mut self) {
        self.buffers.keep();
    }

    /// Sets the values that were kept: when the last step ended, or when others were loaded.
    pub(super) fn restore(&mut self) {
        self.sent.clear();
        self.buffers.restore();
    }
}
