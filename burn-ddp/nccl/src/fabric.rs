//! The fabric of one rank on one device, which makes the engines of its groups.

use std::fmt;
use std::sync::Arc;

use burn_ddp_comm::engine::{Engine, Fabric};
use burn_ddp_comm::membership::Membership;
use burn_ddp_comm::{Call, Result};

use crate::device::Device;
use crate::driver::Driver;
use crate::engine::NcclEngine;
use crate::host_through_device::HostMemory;
use crate::nccl::Nccl;
use crate::rank_device_state::RankDevice;

/// The [`Fabric`] of this crate. [`World::set_fabric`](burn_ddp_comm::World::set_fabric) puts it around the world's own
/// fabric.
///
/// One per rank and device. Launches are ordered among the groups of one fabric; a program with several worlds on one
/// device has to order the launches of these worlds itself.
pub struct NcclFabric {
    own: Arc<dyn Fabric>,
    rank_device: Arc<RankDevice>,
    memory: HostMemory,
}

impl NcclFabric {
    /// A fabric on the device `ordinal` of this machine, with its driver and its NCCL.
    ///
    /// # Errors
    /// [`Error::Environment`](burn_ddp_comm::Error::Environment) that names the package to install or the variable to
    /// set.
    pub fn load(
        own: Arc<dyn Fabric>,
        membership: Arc<Membership>,
        ordinal: usize,
        memory: HostMemory,
    ) -> Result<NcclFabric> {
        let device = Device::new(&Driver::load()?, ordinal)?;
        NcclFabric::new(own, membership, Nccl::load()?, device, memory)
    }

    /// A fabric on `device`, with `nccl`.
    ///
    /// # Errors
    /// [`Error::PeerFailed`](burn_ddp_comm::Error::PeerFailed), naming this rank, if the device cannot be used.
    pub fn new(
        own: Arc<dyn Fabric>,
        membership: Arc<Membership>,
        nccl: Nccl,
        device: Device,
        memory: HostMemory,
    ) -> Result<NcclFabric> {
        let rank_device = Arc::new(RankDevice::new(membership, nccl, device)?);
        Ok(NcclFabric { own, rank_device, memory })
    }

    /// The device, which also makes the events for [`DeviceElements`](crate::DeviceElements).
    pub fn device(&self) -> &Device {
        &self.rank_device.device
    }

    /// The NCCL it uses.
    pub fn nccl(&self) -> &Nccl {
        &self.rank_device.nccl
    }
}

impl Fabric for NcclFabric {
    fn name(&self) -> &'static str {
        "nccl"
    }

    fn open(&self, call: &Call) -> Result<Box<dyn Engine>> {
        let host = self.own.open(call)?;
        Ok(Box::new(NcclEngine::new(host, self.rank_device.clone(), self.memory, call)?))
    }
}

impl fmt::Debug for NcclFabric {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("NcclFabric")
            .field("own", &self.own.name())
            .field("device", self.device())
            .field("memory", &self.memory)
            .finish_non_exhaustive()
    }
}
