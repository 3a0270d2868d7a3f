//! Identity of a rank, as others see it: machine, process, local rank.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::enough_cores::Cores;

/// A rank as others see it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PeerInfo {
    /// Its rank in the world.
    pub rank: usize,
    /// Name of its machine.
    pub host: String,
    /// Id of its process.
    pub pid: u32,
    /// Its rank among those of its machine.
    pub local_rank: usize,
    /// Number of its machine.
    pub node_rank: usize,
    /// Cores that it may use. In a box, to keep errors small, which contain this struct.
    pub cores: Box<Cores>,
}

impl PeerInfo {
    /// This process as `rank`.
    pub fn here(rank: usize, local_rank: usize, node_rank: usize) -> PeerInfo {
        PeerInfo {
            rank,
            host: rustix::system::uname().nodename().to_string_lossy().into_owned(),
            pid: std::process::id(),
            local_rank,
            node_rank,
            cores: Box::new(Cores::of_this_thread()),
        }
    }
}

impl fmt::Display for PeerInfo {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "rank {} (host {}, pid {})", self.rank, self.host, self.pid)
    }
}

/// `rank 2`, or `ranks 1, 2 and 5`.
pub(crate) fn list_ranks(ranks: &[usize]) -> String {
    match ranks {
        [] => "no rank".to_string(),
        [rank] => format!("rank {rank}"),
        [head @ .., last] => {
            let head: Vec<String> = head.iter().map(usize::to_string).collect();
            format!("ranks {} and {last}", head.join(", "))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::list_ranks;

    #[test]
    fn ranks_are_listed_as_people_do() {
        assert_eq!(list_ranks(&[3]), "rank 3");
        assert_eq!(list_ranks(&[1, 2]), "ranks 1 and 2");
        assert_eq!(list_ranks(&[1, 2, 5]), "ranks 1, 2 and 5");
    }
}
