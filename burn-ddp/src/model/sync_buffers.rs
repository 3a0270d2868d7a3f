//! `sync_buffers`: running statistics synchronised outside of a backward.

use std::sync::Arc;

use burn::module::Module;
use burn_ddp_comm::ProcessGroup;

use super::running_stats::{self, BufferPolicy, OwnStatistics};
use crate::Result;
use crate::ddp::Ddp;
use crate::intercept::WrappedModel;
use crate::wrap::wrapped_in;

impl Ddp {
    /// Synchronises the running statistics of `model` (BatchNorm's mean and variance) between the ranks, in place.
    /// *Collective*: every rank passes its model, or a copy such as `model.valid()`. Blocks until all ranks have called
    /// it. Costs two rounds of small messages with 8 bytes per statistic, and, if statistics differ, an all-reduce or
    /// broadcast of all of them per dtype; no communication for a model without statistics.
    ///
    /// A reduction synchronises the statistics that its own forward changed. Call this if other forwards have changed
    /// them since (a detached pass of a GAN's generator, batches read to calibrate), and before each rank validates.
    /// `save` and checkpoints write the statistics that this call would set, and leave those of the model alone.
    ///
    /// By the [policy](BufferPolicy) of the wrapped model all ranks get rank 0's statistics, or the mean; with
    /// [`Local`](BufferPolicy::Local) nothing changes. In the mean each rank counts by the items of the micro-batches
    /// that it holds, and the same if no rank holds any. A model that is not wrapped gets the mean.
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
        let wrapped = wrapped_in(self.group(), model)?;
        let own = match wrapped.is_empty() {
            true => {
                let own = running_stats::sync(self.group(), model, BufferPolicy::Average, 0.0, |_, _| false)?;
                own.into_iter().collect()
            }
            false => agreed_statistics(self.group(), model, &wrapped)?,
        };
        own.into_iter().for_each(OwnStatistics::replace);
        wrapped.iter().for_each(|wrapped| wrapped.keep_statistics(true));
        Ok(())
    }
}

/// Makes the running statistics of the `wrapped` models in `model`, which may be a copy, equal on all ranks until the
/// result is dropped. Each wrapped model has its own policy. *Collective*.
#[track_caller]
pub(crate) fn agreed_statistics<M: Module>(
    group: &ProcessGroup,
    model: &M,
    wrapped: &[Arc<WrappedModel>],
) -> Result<Vec<OwnStatistics<M>>> {
    let mut own = Vec::new();
    for (nth, this) in wrapped.iter().enumerate() {
        let Some(policy) = this.buffer_policy() else { continue };
        let earlier = |id| wrapped[..nth].iter().any(|wrapped| wrapped.has_id(id));
        let later = |id| !this.has_id(id) && wrapped[nth..].iter().any(|wrapped| wrapped.has_id(id));
        let is_excluded = |path: &str, id| this.is_local(path, id) || earlier(id) || later(id);
        own.extend(running_stats::sync(group, model, policy, this.held().0.items, is_excluded)?);
    }
    Ok(own)
}
