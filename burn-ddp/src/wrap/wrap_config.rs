//! Settings of `wrap`.

use serde::{Deserialize, Serialize};

use crate::gradients::{Caps, Reduction};
use crate::model::running_stats::BufferPolicy;
use crate::{Error, Result};

/// How [`Ddp::wrap_with`] averages. Must be the same on every rank.
///
/// ```
/// use burn_ddp::{Reduction, WrapConfig};
/// let config = WrapConfig::new().with_accumulation(4).with_reduction(Reduction::Mean).with_bucket_cap_bytes(4 << 20);
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct WrapConfig {
    /// 1 unless it says.
    accumulation: Option<usize>,
    reduction: Reduction,
    /// What fits the place where gradients are reduced, unless they say.
    first_bucket_cap_bytes: Option<usize>,
    bucket_cap_bytes: Option<usize>,
    buffers: BufferPolicy,
    replica_check: usize,
    overlap: Option<bool>,
    alone: bool,
}

impl Default for WrapConfig {
    fn default() -> Self {
        WrapConfig {
            accumulation: None,
            reduction: Reduction::Mean,
            first_bucket_cap_bytes: None,
            bucket_cap_bytes: None,
            buffers: BufferPolicy::default(),
            replica_check: 100,
            overlap: None,
            alone: false,
        }
    }
}

impl WrapConfig {
    /// One backward per step, mean, buckets of 1 MiB (25 MiB for NCCL), running statistics averaged, replicas compared every 100 steps.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Every `k`-th backward reduces, and yields the mean over the items of all `k` micro-batches and all ranks; the others
    /// yield no gradients: call the optimizer after the `k`-th only. 1 by default.
    #[must_use]
    pub fn with_accumulation(mut self, k: usize) -> Self {
        self.accumulation = Some(k);
        self
    }

    /// Mean (the default) or sum.
    #[must_use]
    pub fn with_reduction(mut self, reduction: Reduction) -> Self {
        self.reduction = reduction;
        self
    }

    /// Size limit of a bucket: by default 1 MiB, and 25 MiB for gradients that NCCL reduces on their device, as in torch (not measured
    /// here). Results do not depend on it, but for NCCL's.
    #[must_use]
    pub fn with_bucket_cap_bytes(mut self, bytes: usize) -> Self {
        self.bucket_cap_bytes = Some(bytes);
        self
    }

    /// Size limit of the first bucket: by default 256 KiB, and 1 MiB for NCCL. Small, so that communication starts early.
    #[must_use]
    pub fn with_first_bucket_cap_bytes(mut self, bytes: usize) -> Self {
        self.first_bucket_cap_bytes = Some(bytes);
        self
    }

    /// What happens to running statistics such as BatchNorm's: averaged over the ranks by default.
    #[must_use]
    pub fn with_buffers(mut self, policy: BufferPolicy) -> Self {
        self.buffers = policy;
        self
    }

    /// Every how many steps the ranks compare digests of their parameters, 100 by default, 0 for never. The first two steps
    /// after the first are compared too, since that is where mistakes show.
    ///
    /// A step compares what its forward read. Where values differ, the backward fails on every rank with
    /// [`Error::ReplicasDiffer`], which names the parameter and the rank.
    #[must_use]
    pub fn with_replica_check(mut self, every_steps: usize) -> Self {
        self.replica_check = every_steps;
        self
    }

    /// Whether a thread reduces buckets while backward goes on, or the caller all of them at its end. Without this it is a thread where
    /// communication waits for a network, where a GPU computes, or where each rank of the machine has two cores; else it would only take
    /// turns with backward.
    /// Results do not depend on it.
    #[must_use]
    pub fn with_overlap(mut self, overlap: bool) -> Self {
        self.overlap = Some(overlap);
        self
    }

    /// Whether gradients are intercepted and reduced in a world of 1 too, where there is nothing to average: to measure what that costs.
    /// By default they are not, unless they are accumulated.
    #[must_use]
    pub fn with_reduction_alone(mut self, alone: bool) -> Self {
        self.alone = alone;
        self
    }

    /// How many, if that was said.
    pub(crate) fn accumulation(&self) -> Option<usize> {
        self.accumulation
    }

    /// How large buckets are.
    fn caps(&self, on_device: bool) -> Caps {
        let (first_bytes, bytes) = if on_device { (1 << 20, 25 << 20) } else { (256 << 10, 1 << 20) };
        Caps {
            first_bytes: self.first_bucket_cap_bytes.unwrap_or(first_bytes),
            bytes: self.bucket_cap_bytes.unwrap_or(bytes),
        }
    }

    pub(crate) fn check(&self) -> Result<()> {
        if self.accumulation == Some(0) {
            return Err(Error::Use("accumulation counts micro-batches per step: 1 or more".into()));
        }
        if self.bucket_cap_bytes == Some(0) || self.first_bucket_cap_bytes == Some(0) {
            return Err(Error::Use("a bucket cap is a number of bytes: 1 or more".into()));
        }
        Ok(())
    }
}
