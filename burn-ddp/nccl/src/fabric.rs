//! Makes the engines of one rank on one device.

use std::fmt;
use std::sync::Arc;

use burn_ddp_comm::call::Call;
use burn_ddp_comm::engine::{Engine, Fabric};
use burn_ddp_comm::membership::Membership;
use burn_ddp_comm::{Error, Result};

use crate::communicator::Fault;
use crate::device::{Device, Stream};
use crate::driver::Driver;
use crate::engine::NcclEngine;
use crate::nccl::Nccl;
use crate::launch_order::Order;
use crate::watchdog::{Watchdog, concluded, own_failure};

/// How collectives on host memory are done.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum HostMemory {
    /// By the engines of the world's own fabric, with their numerics.
    #[default]
    ByHost,
    /// Copied to the device, done by NCCL with its numerics, and copied back; transfers between two ranks are still done by the
    /// host. For machines between which the GPUs have the far better network.
    ThroughDevice,
}

/// What the engines of a rank share.
pub(crate) struct Shared {
    pub(crate) membership: Arc<Membership>,
    pub(crate) nccl: Nccl,
    pub(crate) device: Device,
    /// For all communicators: an order of launches is one of execution only on one stream, since each waits for events of its own.
    pub(crate) stream: Stream,
    pub(crate) order: Order,
    pub(crate) watchdog: Arc<Watchdog>,
}

impl Shared {
    /// Whether `call` can still succeed.
    pub(crate) fn alive(&self, call: &Call) -> Result<()> {
        self.membership.check()?;
        if std::time::Instant::now() >= call.deadline() {
            return Err(call.timed_out(crate::watchdog::others(call)));
        }
        Ok(())
    }

    /// What a call returns for a failure of this rank's device or NCCL.
    pub(crate) fn error(&self, fault: Fault) -> Error {
        match fault {
            Fault::World(error) => error,
            Fault::Device(why) => concluded(&self.membership, &why),
        }
    }
}

/// The way in: a [`Fabric`] to be put around a world's own by [`World::set_fabric`](burn_ddp_comm::World::set_fabric).
///
/// One per rank and device. Launches are ordered among the groups of one fabric; programs whose worlds share a device have to order theirs.
pub struct NcclFabric {
    own: Arc<dyn Fabric>,
    shared: Arc<Shared>,
    memory: HostMemory,
}

impl NcclFabric {
    /// On the device `ordinal` of this machine, by its driver and its NCCL.
    ///
    /// # Errors
    /// [`Error::Environment`] that says what to install or set.
    pub fn load(own: Arc<dyn Fabric>, membership: Arc<Membership>, ordinal: usize, memory: HostMemory) -> Result<NcclFabric> {
        let device = Device::new(&Driver::load()?, ordinal)?;
        NcclFabric::new(own, membership, Nccl::load()?, device, memory)
    }

    /// On `device`, by `nccl`.
    ///
    /// # Errors
    /// [`Error::PeerFailed`], naming this rank, if the device cannot be used.
    pub fn new(
        own: Arc<dyn Fabric>,
        membership: Arc<Membership>,
        nccl: Nccl,
        device: Device,
        memory: HostMemory,
    ) -> Result<NcclFabric> {
        let stream = device.stream().map_err(|why| own_failure(&membership, &why))?;
        let watchdog = Arc::new(Watchdog::new(membership.clone(), device.clone()));
        let shared = Shared { membership, nccl, device, stream, order: Order::default(), watchdog };
        Ok(NcclFabric { own, shared: Arc::new(shared), memory })
    }

    /// The device, which also has the events for [`DeviceReduce`](crate::DeviceReduce).
    pub fn device(&self) -> &Device {
        &self.shared.device
    }

    /// The NCCL it uses.
    pub fn nccl(&self) -> &Nccl {
        &self.shared.nccl
    }
}

impl Fabric for NcclFabric {
    fn name(&self) -> &'static str {
        "nccl"
    }

    fn open(&self, call: &Call) -> Result<Box<dyn Engine>> {
        let host = self.own.open(call)?;
        Ok(Box::new(NcclEngine::new(host, self.shared.clone(), self.memory, call)?))
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
