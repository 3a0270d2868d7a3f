//! Running statistics of a wrapped model, made equal on all ranks in each reduction.

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
    pub(crate) fn new(buffers: Box<dyn Buffers>, policy: BufferPolicy) -> Self {
        SyncedStatistics { buffers, policy, sent: Vec::new() }
    }

    pub(super) fn policy(&self) -> BufferPolicy {
        self.policy
    }

    /// Puts the values into the payload of the step.
    pub(super) fn send(&mut self, piggyback: &mut Piggyback) -> Result<()> {
        self.sent = self.buffers.read()?;
        piggyback.statistics = running_stats::pack(&self.sent);
        piggyback.from_first = self.policy == BufferPolicy::Broadcast;
        Ok(())
    }

    /// Sets the values that the ranks agreed on.
    pub(super) fn receive(&mut self, results: &PiggybackResult) {
        let sent = std::mem::take(&mut self.sent);
        self.buffers.write(running_stats::unpack(&sent, &results.statistics));
    }
}
