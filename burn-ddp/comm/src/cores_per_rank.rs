//! Comparison of a machine's cores with the ranks on it.

use std::num::NonZero;
use std::thread;

use crate::PeerInfo;

/// True if the machine of `rank`, one of `peers`, has a core for each rank on it. Otherwise a spinning rank keeps its
/// peers from running.
pub fn core_per_rank(rank: usize, peers: &[PeerInfo]) -> bool {
    let here = peers.get(rank).map(|peer| &peer.host);
    cores_suffice(peers.iter().filter(|peer| Some(&peer.host) == here).count())
}

/// True if this process may use at least `local_ranks` cores.
pub(crate) fn cores_suffice(local_ranks: usize) -> bool {
    local_ranks <= thread::available_parallelism().map_or(1, NonZero::get)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_that_outnumber_cores_are_noticed() {
        let cores = thread::available_parallelism().unwrap().get();
        let peers: Vec<PeerInfo> = (0..=cores).map(|rank| PeerInfo::here(rank, rank, 0)).collect();
        assert!(!core_per_rank(0, &peers));
        assert!(core_per_rank(0, &peers[..cores]));
    }
}
