//! Opening a group that spans machines.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use super::NAME;
use super::between_machines::Wire;
use super::engine::TwoLevelEngine;
use crate::Result;
use crate::call::{Call, Members};
use crate::engine::shm::ShmFabric;
use crate::engine::tcp::{self, TcpFabric};
use crate::engine::{Engine, Fabric, HostEngine};
use crate::membership::Membership;
use crate::topology::Machines;

/// Opens a rank's groups by shared memory inside machines and tcp between them.
pub(crate) struct TwoLevelFabric {
    /// By rank, the identity of the machine on which it can share memory; `None` if it is unknown.
    memories: Vec<Option<String>>,
    shm: Arc<ShmFabric>,
    tcp: Arc<TcpFabric>,
    membership: Arc<Membership>,
    /// True after a group whose ranks could not share memory.
    failed: AtomicBool,
}

impl TwoLevelFabric {
    pub(crate) fn new(
        memories: Vec<Option<String>>,
        shm: Arc<ShmFabric>,
        tcp: Arc<TcpFabric>,
        membership: Arc<Membership>,
    ) -> TwoLevelFabric {
        TwoLevelFabric { memories, shm, tcp, membership, failed: AtomicBool::new(false) }
    }
}

impl Fabric for TwoLevelFabric {
    fn name(&self) -> &'static str {
        if self.failed.load(Ordering::Relaxed) { tcp::NAME } else { NAME }
    }

    fn open(&self, call: &Call) -> Result<Box<dyn Engine>> {
        let me = call.group_rank()?;
        let memory = |rank: &usize| self.memories.get(*rank).and_then(Option::as_ref);
        let Some(memories) = call.members.ranks().iter().map(memory).collect::<Option<Vec<_>>>() else {
            return self.tcp.open(call);
        };
        let machines = Machines::new(&memories);
        let here = Arc::new(Members::part(&call.members, machines.ranks_of(machines.machine_of(me))));
        let local = self.shm.try_share(&call.among(&here))?;
        let mut wire = Wire::new(HostEngine::new(self.tcp.transport(call)?), machines, me);
        let shares = wire.of_machines(call, u8::from(local.is_ok()))?;
        let without = (0..shares.len()).find(|machine| shares[*machine] != 1);
        match (local, without) {
            (Ok(local), None) => Ok(Box::new(TwoLevelEngine::new(local, here, wire, self.membership.clone()))),
            (local, machine) => {
                let first = call.world_rank(wire.machines.ranks_of(machine.unwrap_or(wire.here))[0]);
                let elsewhere = || format!("the ranks on the machine of rank {first} cannot share memory");
                let why = local.err().map_or_else(elsewhere, |why| why.to_string());
                tracing::warn!(rank = call.rank, %why, "ranks of a machine cannot share memory: collectives use tcp");
                self.failed.store(true, Ordering::Relaxed);
                Ok(Box::new(wire.flat))
            }
        }
    }
}
