//! State of one rank's device that the engines of all its groups share: stream, launch order, watchdog.

use std::sync::Arc;
use std::time::Instant;

use burn_ddp_comm::membership::Membership;
use burn_ddp_comm::{Call, Error, Result};

use crate::device::Device;
use crate::error::{DeviceError, awaited_ranks, own_failure, root_cause};
use crate::launch_order::LaunchOrder;
use crate::nccl::Nccl;
use crate::stream::Stream;
use crate::watchdog::Watchdog;

/// A rank's device, the NCCL on it, and the state that keeps the launches of its groups in order.
pub(crate) struct RankDevice {
    pub(crate) membership: Arc<Membership>,
    pub(crate) nccl: Nccl,
    pub(crate) device: Device,
    /// Stream on which all communicators launch. Each launch waits for an event of its own, so only on a single stream
    /// is the order of launches also the order of execution.
    pub(crate) stream: Stream,
    pub(crate) launch_order: LaunchOrder,
    pub(crate) watchdog: Arc<Watchdog>,
}

impl RankDevice {
    /// # Errors
    /// [`Error::PeerFailed`], naming this rank, if the device cannot be used.
    pub(crate) fn new(membership: Arc<Membership>, nccl: Nccl, device: Device) -> Result<RankDevice> {
        let stream = device.stream().map_err(|why| own_failure(&membership, &why))?;
        let watchdog = Arc::new(Watchdog::new(membership.clone(), device.clone()));
        Ok(RankDevice { membership, nccl, device, stream, launch_order: LaunchOrder::default(), watchdog })
    }

    /// Fails if `call` cannot succeed any more: the world has ended, or the deadline has passed.
    pub(crate) fn check(&self, call: &Call) -> Result<()> {
        self.membership.check()?;
        if Instant::now() >= call.deadline() {
            return Err(call.timed_out(awaited_ranks(call)));
        }
        Ok(())
    }

    /// Error that a call returns for a failure on this rank's device.
    pub(crate) fn error(&self, error: DeviceError) -> Error {
        match error {
            DeviceError::World(error) => error,
            why => root_cause(&self.membership, &why.to_string()),
        }
    }
}
