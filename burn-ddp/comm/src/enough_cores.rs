//! Comparison of a machine's cores with the ranks on it.

use std::num::NonZero;
use std::thread;

use serde::{Deserialize, Serialize};

use crate::PeerInfo;

/// Cores that a rank may use, as its affinity and the control groups' quota of CPU time say.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Cores {
    /// Numbers of the cores in the affinity of its thread, ascending; empty where the system does not say.
    numbers: Vec<u16>,
    /// Number of cores that it may use at a time: less than all of `numbers` under a quota.
    at_a_time: usize,
}

impl Cores {
    /// Cores of the calling thread.
    pub(crate) fn of_this_thread() -> Cores {
        Cores { numbers: affinity(), at_a_time: thread::available_parallelism().map_or(1, NonZero::get) }
    }

    /// True if a quota allows fewer cores at a time than the affinity has.
    fn has_quota(&self) -> bool {
        self.at_a_time < self.numbers.len()
    }
}

#[cfg(target_os = "linux")]
fn affinity() -> Vec<u16> {
    use rustix::thread::{CpuSet, sched_getaffinity};
    // The call fails where the system has more cores than the set has places.
    let Ok(set) = sched_getaffinity(None) else { return Vec::new() };
    (0..CpuSet::MAX_CPU).filter(|core| set.is_set(*core)).map(|core| core as u16).collect()
}

#[cfg(not(target_os = "linux"))]
fn affinity() -> Vec<u16> {
    Vec::new()
}

/// True if each rank on the machine of `rank` can have a core that no other of them uses. Otherwise a spinning rank
/// keeps its peers from running. `peers` are all ranks, by rank.
///
/// The result is the same on all ranks of the machine.
pub fn core_per_rank(rank: usize, peers: &[PeerInfo]) -> bool {
    let here = peers.get(rank).map(|peer| &peer.host);
    let cores: Vec<&Cores> = peers.iter().filter(|peer| Some(&peer.host) == here).map(|peer| &*peer.cores).collect();
    cores_suffice(&cores)
}

/// True if ranks that may use these cores can have one each.
fn cores_suffice(ranks: &[&Cores]) -> bool {
    if ranks.iter().any(|cores| cores.numbers.is_empty() || cores.has_quota()) {
        // Core numbers are unknown, or a quota counts: as many as each rank may use at a time must suffice for all
        // ranks.
        return ranks.iter().all(|cores| ranks.len() <= cores.at_a_time);
    }
    let count = ranks.iter().filter_map(|cores| cores.numbers.last()).max().map_or(0, |last| usize::from(*last) + 1);
    let mut taken_by = vec![None; count];
    (0..ranks.len()).all(|rank| take_core(ranks, rank, &mut taken_by, &mut vec![false; count]))
}

/// Gives `rank` a core: a free one, or one whose rank can take another. False if there is none. `tried` are the cores
/// that need no second look.
fn take_core(ranks: &[&Cores], rank: usize, taken_by: &mut [Option<usize>], tried: &mut [bool]) -> bool {
    let own = || ranks[rank].numbers.iter().map(|core| usize::from(*core));
    if let Some(free) = own().find(|core| taken_by[*core].is_none()) {
        taken_by[free] = Some(rank);
        return true;
    }
    for core in own() {
        let Some(other) = taken_by[core].filter(|_| !tried[core]) else { continue };
        tried[core] = true;
        if take_core(ranks, other, taken_by, tried) {
            taken_by[core] = Some(rank);
            return true;
        }
    }
    false
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cores(numbers: &[u16]) -> Cores {
        Cores { numbers: numbers.to_vec(), at_a_time: numbers.len() }
    }

    fn suffice(ranks: &[&[u16]]) -> bool {
        let ranks: Vec<Cores> = ranks.iter().map(|numbers| cores(numbers)).collect();
        cores_suffice(&ranks.iter().collect::<Vec<_>>())
    }

    #[test]
    fn ranks_that_outnumber_cores_are_noticed() {
        let available = thread::available_parallelism().unwrap().get();
        let peers: Vec<PeerInfo> = (0..=available).map(|rank| PeerInfo::here(rank, rank, 0)).collect();
        assert!(!core_per_rank(0, &peers));
        assert!(core_per_rank(0, &peers[..available]));
    }

    #[test]
    fn ranks_on_other_machines_do_not_count() {
        let there = PeerInfo { host: "elsewhere".into(), cores: Box::new(cores(&[1])), ..PeerInfo::here(1, 0, 1) };
        let here = PeerInfo { cores: Box::new(cores(&[1])), ..PeerInfo::here(0, 0, 0) };
        assert!(core_per_rank(0, &[here.clone(), there.clone()]));
        assert!(!core_per_rank(0, &[here.clone(), PeerInfo { host: here.host, ..there }]));
    }

    #[test]
    fn ranks_bound_to_a_core_each_have_one() {
        assert!(suffice(&[&[0], &[1]]));
        assert!(suffice(&[&[5, 6], &[7]]));
    }

    #[test]
    fn ranks_bound_to_one_core_share_it() {
        assert!(!suffice(&[&[3], &[3]]));
        // Each has two cores, but the three have two in all; the fourth has cores of its own.
        assert!(!suffice(&[&[0, 1], &[0, 1], &[4, 5, 6], &[0, 1]]));
    }

    #[test]
    fn ranks_make_room_for_each_other() {
        // Taken in order, ranks 0 and 1 leave no core for rank 2.
        assert!(suffice(&[&[0, 1], &[1, 2], &[0]]));
        assert!(suffice(&[&[0, 1], &[1, 2], &[2, 3], &[0]]));
        assert!(!suffice(&[&[0, 1], &[1, 2], &[0], &[2]]));
    }

    #[test]
    fn a_quota_counts_for_all_ranks() {
        let limited = Cores { numbers: (0..8).collect(), at_a_time: 2 };
        assert!(cores_suffice(&[&limited, &limited]));
        assert!(!cores_suffice(&[&limited, &limited, &limited]));
        let unknown = Cores { numbers: Vec::new(), at_a_time: 2 };
        assert!(cores_suffice(&[&unknown, &unknown]));
        assert!(!cores_suffice(&[&unknown, &unknown, &unknown]));
    }
}
