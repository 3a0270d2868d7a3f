//! Settings of a reducer.

use std::time::Duration;

use burn_ddp_comm::DType;

use super::accumulation::GradientReduction;
use super::bucket_plan::{Caps, Slot};
use super::leaf_nodes::OwnRun;
use crate::loss_scaling::LossScaling;

/// Settings that do not change while a model is wrapped.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ReducerSettings {
    pub reduction: GradientReduction,
    /// Micro-batches per reduction.
    pub accumulation: usize,
    /// This rank's leaves, if the job has logical ranks.
    pub run: Option<OwnRun>,
    pub caps: Caps,
    /// Longest time one collective may take.
    pub timeout: Duration,
    /// Number of steps between comparisons of the ranks' parameters; 0 for never.
    pub replica_check: u64,
    /// True if parameters that differ by rounding are an error, too.
    pub exact_replicas: bool,
    /// True if what breaks the promise of logical ranks is an error.
    pub exact: bool,
    /// Type in which gradients travel, if it is a half.
    pub reduce: Option<DType>,
    /// Settings of the loss scale, if there is one.
    pub scaling: Option<LossScaling>,
    /// True if an average that is not finite is an error.
    pub finite: bool,
    /// True if a thread reduces buckets while backward goes on; if false, all are reduced at its end.
    pub overlap: bool,
    /// True if gradients stay on their device, where the group's engine reduces them. Needs `overlap`.
    pub on_device: bool,
    /// True if gradients stay where they are, since no other rank adds to them: micro-batches are only summed.
    pub alone: bool,
}

impl ReducerSettings {
    /// This rank's leaves, if gradients are added up the tree over all leaves: on their device the engine adds in an
    /// order of its own.
    pub(crate) fn tree(&self) -> Option<OwnRun> {
        self.run.filter(|_| !self.on_device)
    }

    /// A slot in the type in which its gradients travel: sums of leaves in that in which they are added.
    pub(crate) fn sent(&self, slot: &Slot) -> Slot {
        match (self.tree(), self.reduce) {
            (Some(_), _) => slot.widened(),
            (None, Some(dtype)) => Slot { dtype, ..slot.clone() },
            (None, None) => slot.clone(),
        }
    }

    /// True if a step, numbered from 0, compares the ranks' parameters: each `replica_check`-th does, and before the
    /// first of those the powers of two, so that a short training is compared, too.
    pub(super) fn compares_replicas(&self, step: u64) -> bool {
        let every = self.replica_check;
        let early = step.is_power_of_two() && step < every.max(3);
        every > 0 && step > 0 && (early || step.is_multiple_of(every))
    }
}
