//! `sync_buffers`: running statistics synchronised outside of a backward.

use burn::module::Module;
use burn_ddp_comm::ProcessGroup;

use super::running_stats::{self, BufferPolicy};
use crate::Result;
use crate::ddp::Ddp;
use crate::wrap::wrapped_in;

impl Ddp {
    /// Synchronises the running statistics of `model` (BatchNorm's mean and variance) between the ranks, in place.
    /// *Collective*: every rank passes its model, or a copy such as `model.valid()`. Blocks until all ranks have called
    /// it. Costs two rounds of small messages with 8 bytes per statistic, and, if statistics differ, an all-reduce or
    /// broadcast of all of them per dtype; no communication for a model without statistics.
    ///
    /// A reduction synchronises the statistics that its own forward changed. Call this if other forwards have changed
    /// them since (a detached pass of a GAN's generator, batches read to calibrate), and before each rank validates.
    /// `save`, `check_replicas` and checkpoints call it by themselves.
    ///
    /// By the [policy](BufferPolicy) of the wrapped model all ranks get rank 0's statistics, or the mean in which each
    /// rank counts the same; with [`Local`](BufferPolicy::Local) nothing changes. A model that is not wrapped gets the
    /// mean.
    ///
    /// # Errors
    ///
    /// [`Error::Comm`](crate::Error::Comm) if a peer failed; [`Error::Invalid`](crate::Error::Invalid) on every rank if
    /// statistics cannot be read from a device.
    ///
    /// # Example
    ///
    /// ```
    /// # use burn::nn::{BatchNorm, BatchNormConfig};
    /// # use burn::prelude::*;
    /// # use burn_ddp::prelude::*;
    /// let means = Ddp::spawn(2, |ddp| {
    ///     let device = ddp.device()?.autodiff();
    ///     let norm: BatchNorm = ddp.wrap(BatchNormConfig::new(1).init(&device))?;
    ///     let x = Tensor::<2>::from_floats([[0.0], [2.0]], &device) + 10.0 * ddp.rank() as f32;
    ///     let _ = norm.forward(x).detach(); // no backward
    ///     ddp.sync_buffers(&norm)?;
    ///     Ok(norm.running_mean.value().into_scalar::<f32>())
    /// })?;
    /// assert_eq!(means, [0.6, 0.6]); // a tenth of 1 and of 11, and their mean
    /// # Ok::<(), burn_ddp::Error>(())
    /// ```
    #[track_caller]
    pub fn sync_buffers<M: Module>(&self, model: &M) -> Result<()> {
        match wrapped_in(self.group(), model)?.is_empty() {
            true => running_stats::sync(self.group(), model, BufferPolicy::Average, |_, _| false),
            false => sync_wrapped(self.group(), model),
        }
    }
}

/// Synchronises the running statistics of a wrapped `model`, or of a copy, by its policy; does nothing if it is not
/// wrapped. *Collective*.
#[track_caller]
pub(crate) fn sync_wrapped<M: Module>(group: &ProcessGroup, model: &M) -> Result<()> {
    let wrapped = wrapped_in(group, model)?;
    match wrapped.first().and_then(|wrapped| Some((wrapped, wrapped.buffer_policy()?))) {
        Some((wrapped, policy)) => {
            running_stats::sync(group, model, policy, |path, id| wrapped.is_local(path, id))?;
            wrapped.keep_statistics();
            Ok(())
        }
        None => Ok(()),
    }
}
