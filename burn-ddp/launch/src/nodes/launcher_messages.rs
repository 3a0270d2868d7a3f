//! Messages between launchers: values in their store, as JSON.
//!
//! | key | writer | value |
//! |---|---|---|
//! | `node/{k}` | launcher k, once | [`Node`]: its settings; present once it has registered |
//! | `beat/{k}` | launcher k, every second | a number that grows, or `paused` while it is stopped by Ctrl-Z |
//! | `{g}/plan` | launcher 0 | [`GenerationPlan`] of generation g |
//! | `{g}/stop` | the first launcher that sees the end | [`Stop`]: reason why generation g is over |
//! | `{g}/hurry` | a launcher that gets a further signal | [`Stop::Hurried`]: the ranks that were asked to stop end at once |
//! | `{g}/done/{k}` | launcher k | its [`NodeOutcome`](crate::node_outcome::NodeOutcome), once all its ranks are dead |
//! | `{g}/post-mortem/{r}` | the launcher of rank r | the report that rank r wrote when its world ended, shortened |
//! | `{g}/verdict` | launcher 0 | [`Verdict`]: outcome of generation g, and whether another follows |
//! | `bye/{k}` | launcher k | empty; present once launcher k has read the last verdict |
//!
//! Entries of generation g are removed when g + 2 begins.

use std::time::Duration;

use burn_ddp_comm::Store;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::report::outcome::Outcome;

/// One launcher of the job.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Node {
    pub(crate) node: usize,
    pub(crate) host: String,
    pub(crate) pid: u32,
    /// Number of ranks that this launcher starts.
    pub(crate) nproc: usize,
    /// Number of launchers that this launcher expects.
    pub(crate) nnodes: usize,
    pub(crate) version: String,
    /// Fingerprint of the program's arguments; `None` if the user named the job (`--rdzv-id`).
    pub(crate) arguments: Option<u64>,
    /// Name of the signal that asks the ranks to stop.
    pub(crate) stop_signal: String,
}

/// Node 0's plan of a generation, by which each launcher starts its ranks: the job's names, the address of the ranks'
/// store, and the machines.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct GenerationPlan {
    pub(crate) job_id: String,
    /// Names the job's log directory.
    pub(crate) job_name: String,
    /// Address of the store in which the ranks meet.
    pub(crate) host: String,
    pub(crate) port: u16,
    /// All launchers, by node rank.
    pub(crate) nodes: Vec<Node>,
}

impl GenerationPlan {
    pub(crate) fn world_size(&self) -> usize {
        self.first_rank(self.nodes.len())
    }

    /// The first rank of a machine: ranks are numbered machine by machine.
    pub(crate) fn first_rank(&self, node: usize) -> usize {
        // Another launcher may send any number: an overflow must not end this process.
        self.nodes[..node].iter().fold(0, |ranks, node| ranks.saturating_add(node.nproc))
    }

    /// Machine of a rank.
    pub(crate) fn node_of(&self, rank: usize) -> Option<&Node> {
        (0..self.nodes.len()).rev().find(|&node| self.first_rank(node) <= rank).map(|node| &self.nodes[node])
    }
}

/// Node 0's decision at the end of a generation.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Verdict {
    pub(crate) outcome: Outcome,
    pub(crate) restart: bool,
}

pub(crate) fn put<T: Serialize>(store: &dyn Store, key: &str, value: &T) -> burn_ddp_comm::Result<()> {
    store.set(key, &encode(value))
}

/// True if the key was not set before.
pub(crate) fn put_new<T: Serialize>(store: &dyn Store, key: &str, value: &T) -> burn_ddp_comm::Result<bool> {
    store.set_new(key, &encode(value)).map(|old| old.is_none())
}

/// `None` if the key was not set in time.
pub(crate) fn take<T: DeserializeOwned>(
    store: &dyn Store,
    key: &str,
    wait: Duration,
) -> burn_ddp_comm::Result<Option<T>> {
    let bytes = match store.get(key, wait) {
        Ok(bytes) => bytes,
        Err(burn_ddp_comm::Error::StoreTimeout { .. }) => return Ok(None),
        Err(error) => return Err(error),
    };
    let parsed = serde_json::from_slice(&bytes);
    parsed.map(Some).map_err(|error| burn_ddp_comm::Error::Store {
        message: format!(
            "the launchers cannot parse each other's messages ({key}: {error}): they must be of one version"
        ),
    })
}

pub(crate) fn encode(value: &impl Serialize) -> Vec<u8> {
    // serde_json cannot fail on these types: strings, numbers and lists.
    serde_json::to_vec(value).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_are_numbered_machine_by_machine() {
        let node = |node, nproc| {
            let (host, version) = (format!("h{node}"), "1".into());
            Node { node, host, pid: 1, nproc, nnodes: 3, version, arguments: None, stop_signal: String::new() }
        };
        let nodes = vec![node(0, 2), node(1, 1), node(2, 3)];
        let start = GenerationPlan { job_id: "j".into(), job_name: "n".into(), host: "h".into(), port: 1, nodes };
        assert_eq!(start.world_size(), 6);
        assert_eq!([0, 1, 2].map(|node| start.first_rank(node)), [0, 2, 3]);
        let hosts: Vec<_> = (0..6).map(|rank| start.node_of(rank).unwrap().host.as_str()).collect();
        assert_eq!(hosts, ["h0", "h0", "h1", "h2", "h2", "h2"]);
        let senseless = GenerationPlan { nodes: vec![node(0, usize::MAX), node(1, 2)], ..start };
        assert_eq!((senseless.world_size(), senseless.first_rank(1)), (usize::MAX, usize::MAX));
    }
}
