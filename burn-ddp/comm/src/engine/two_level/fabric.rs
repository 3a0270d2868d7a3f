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

/// Number of the exchange in which ranks say if they share memory with those of their machine.
const AGREEMENT: u8 = u8::MAX;

/// Opens a rank's groups by shared memory inside machines and tcp between them.
pub(crate) struct TwoLevelFabric {
    /// Identity of the memory of each rank's machine, by rank; `None` if it is unknown.
    memories: Vec<Option<String>>,
    shm: Arc<ShmFabric>,
    tcp: Arc<TcpFabric>,
    membership: Arc<Membership>,
    /// Set once memory could not be shared.
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
        let mut flat = HostEngine::new(self.tcp.open_mesh(call)?);
        let mut shares = vec![[0_u8]; call.members.count()];
        let mut outputs: Vec<&mut [u8]> = shares.iter_mut().map(|share| &mut share[..]).collect();
        flat.all_gather(&call.at_stage(AGREEMENT), &[u8::from(local.is_ok())], &mut outputs)?;
        if let Some(rank) = shares.iter().position(|share| *share != [1]) {
            let rank = call.world_rank(rank);
            let why = local.err().map_or_else(|| format!("rank {rank} cannot"), |why| why.to_string());
            tracing::warn!(rank = call.rank, %why, "ranks of a machine cannot share memory: collectives use tcp");
            self.failed.store(true, Ordering::Relaxed);
            return Ok(Box::new(flat));
        }
        let unshared = |why| crate::Error::Internal { message: format!("memory is shared and not shared: {why}") };
        let wire = Wire::new(flat, machines, me);
        Ok(Box::new(TwoLevelEngine::new(local.map_err(unshared)?, here, wire, self.membership.clone())))
    }
}
