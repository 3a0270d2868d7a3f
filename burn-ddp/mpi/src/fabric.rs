//! Groups over MPI: one communicator per world, and separate tags for each group.

use std::ffi::c_int;
use std::sync::Arc;

use burn_ddp_comm::engine::{Engine, Fabric, HostEngine};
use burn_ddp_comm::membership::Membership;
use burn_ddp_comm::{Call, GroupId, Result};

use crate::channel::Route;
use crate::error::environment;
use crate::ffi::Comm;
use crate::transport::{MpiTransport, NAME};

/// Mapping of a world's ranks to processes of MPI.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Ranks {
    /// Each rank is the process of the same number.
    Processes,
    /// All ranks are threads of this process.
    Threads,
}

/// Opens the groups of one rank.
pub(crate) struct MpiFabric {
    comm: Arc<Comm>,
    membership: Arc<Membership>,
    ranks: Ranks,
}

impl MpiFabric {
    pub(crate) fn new(comm: Arc<Comm>, membership: Arc<Membership>, ranks: Ranks) -> MpiFabric {
        MpiFabric { comm, membership, ranks }
    }
}

impl Fabric for MpiFabric {
    fn name(&self) -> &'static str {
        NAME
    }

    /// Sends nothing: the group's tags follow from its number.
    fn open(&self, call: &Call) -> Result<Box<dyn Engine>> {
        self.membership.check()?;
        let rank = call.group_rank()?;
        let routes = routes(self.ranks, call, self.membership.peers().len(), self.comm.tag_max())?;
        let transport = MpiTransport::new(rank, routes, self.comm.clone(), self.membership.clone(), true)?;
        Ok(Box::new(HostEngine::new(transport)))
    }
}

/// Routes to the ranks of the group of `call`.
fn routes(ranks: Ranks, call: &Call, world_size: usize, tag_max: c_int) -> Result<Vec<Route>> {
    let count = call.members.count();
    // Within one process the tag identifies sender and receiver.
    let width = if ranks == Ranks::Threads { world_size * world_size } else { 1 };
    let slot = slot(call.info.group, world_size);
    let too_many = || {
        let (group, groups) = (GroupId(call.info.group), tag_max as usize / width / (world_size + 1));
        environment(format!(
            "group {group} is one more than this MPI can tell apart: its tags end at {tag_max}, and {world_size} ranks \
             can make {groups} groups each"
        ))
    };
    let tag = |place: usize| {
        let tag = slot.checked_mul(width as u64).and_then(|tag| tag.checked_add(place as u64));
        // The last tag is the one of `attach`.
        tag.and_then(|tag| c_int::try_from(tag).ok()).filter(|tag| *tag < tag_max).ok_or_else(too_many)
    };
    let me = call.rank;
    let route = |group_rank: usize| {
        let peer = call.world_rank(group_rank);
        Ok(match ranks {
            Ranks::Processes => {
                let process = c_int::try_from(peer).map_err(|_| too_many())?;
                Route { process, send: tag(0)?, receive: tag(0)? }
            }
            Ranks::Threads => {
                Route { process: 0, send: tag(me * world_size + peer)?, receive: tag(peer * world_size + me)? }
            }
        })
    };
    (0..count).map(route).collect()
}

/// Number of a group, which no other group of its world has. Small as long as there are few groups.
fn slot(group: u64, world_size: usize) -> u64 {
    // The upper half is 0 if all ranks numbered the group, else 1 + the rank of its leader.
    let (leader, number) = (group >> 32, group & u64::from(u32::MAX));
    number.saturating_mul(world_size as u64 + 1).saturating_add(leader)
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;
    use std::time::Duration;

    use burn_ddp_comm::{CallInfo, Collective, Members};

    use super::*;

    fn call(group: u64, members: &[usize], rank: usize) -> Call {
        let info = CallInfo::bare(Collective::NewGroup, group, 0, "a.rs:1:1");
        Call::new(info, Arc::new(Members::new(members)), rank, Duration::from_secs(1))
    }

    #[test]
    fn groups_have_slots_of_their_own() {
        let mut seen = HashSet::new();
        for number in 1..50 {
            assert!(seen.insert(slot(u64::from(number), 3)));
            (0..3).for_each(|leader| assert!(seen.insert(slot(GroupId::led_by(leader, number).0, 3))));
        }
        assert_eq!(seen.iter().max(), Some(&(49 * 4 + 3)));
    }

    #[test]
    fn both_ends_of_a_way_have_the_same_tags() {
        let members = [4, 1, 3];
        for ranks in [Ranks::Processes, Ranks::Threads] {
            let of = |rank| routes(ranks, &call(7, &members, rank), 5, 32767).unwrap();
            let all: Vec<_> = members.iter().map(|rank| of(*rank)).collect();
            let mut tags = HashSet::new();
            for (a, b) in [(0, 1), (0, 2), (1, 2)] {
                assert_eq!((all[a][b].send, all[a][b].receive), (all[b][a].receive, all[b][a].send));
                tags.extend([all[a][b].send, all[b][a].send]);
            }
            assert_eq!(tags.len(), if ranks == Ranks::Threads { 6 } else { 1 });
            assert_eq!(all[0][2].process, if ranks == Ranks::Threads { 0 } else { 3 });
        }
    }

    #[test]
    fn more_groups_than_tags_are_an_error() {
        let error = routes(Ranks::Processes, &call(9000, &[0, 1, 2], 0), 3, 32767).unwrap_err().to_string();
        assert!(error.contains("group 9000") && error.contains("8191 groups"), "{error}");
        assert!(routes(Ranks::Processes, &call(u64::MAX, &[0, 1, 2], 0), 3, 32767).is_err());
    }
}
