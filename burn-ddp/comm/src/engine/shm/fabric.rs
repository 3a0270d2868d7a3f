//! The shm fabric: shares memory between the ranks of a new group.

use std::sync::Arc;

use super::NAME;
use super::engine::ShmEngine;
use super::layout::Layout;
use super::peer_waits::Board;
use super::segment_handover::Handover;
use crate::auth::job_key::LinkKey;
use crate::call::Call;
use crate::engine::{Engine, Fabric, Unavailable};
use crate::enough_cores::core_per_rank;
use crate::membership::Membership;
use crate::{Error, Result};

/// Opens a rank's groups in shared memory, if all their ranks are on its machine.
pub(crate) struct ShmFabric {
    key: LinkKey,
    membership: Arc<Membership>,
}

impl ShmFabric {
    pub(crate) fn new(key: LinkKey, membership: Arc<Membership>) -> ShmFabric {
        ShmFabric { key, membership }
    }
}

impl Fabric for ShmFabric {
    fn name(&self) -> &'static str {
        NAME
    }

    fn open(&self, call: &Call) -> Result<Box<dyn Engine>> {
        self.try_open(call)?.map_err(|reason| Error::Environment {
            message: format!("BURN_DDP_ENGINE=shm, but the ranks cannot share memory: {reason}"),
        })
    }

    fn try_open(&self, call: &Call) -> Result<Result<Box<dyn Engine>, Unavailable>> {
        Ok(self.try_share(call)?.map(|engine| Box::new(engine) as Box<dyn Engine>))
    }
}

impl ShmFabric {
    /// [`try_open`](Fabric::try_open), for an engine that is built on this one.
    pub(in crate::engine) fn try_share(&self, call: &Call) -> Result<Result<ShmEngine, Unavailable>> {
        let (size, rank) = (call.members.count(), call.group_rank()?);
        let handover = Handover { call, membership: &self.membership, key: &self.key, rank, number: 0 };
        let layout = Layout::new(size);
        let segment = match handover.share(layout.len(), &layout.parts(rank))? {
            Ok(segment) => segment,
            Err(reason) => return Ok(Err(reason)),
        };
        // Where ranks share cores, a spinning rank keeps the peers it waits for from running.
        let spins = core_per_rank(self.membership.rank(), self.membership.peers());
        let board = Board::new(segment, size, rank, self.membership.clone(), spins);
        Ok(Ok(ShmEngine::new(board, self.key.clone())))
    }
}
