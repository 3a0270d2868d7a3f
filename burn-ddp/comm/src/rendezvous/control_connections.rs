//! Control connections of a rank that joins, to its neighbours.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::meeting_round::{Entry, Met, Round};
use crate::auth::handshake::{Purpose, by};
use crate::auth::job_key::LinkKey;
use crate::auth::secure_stream::SecureStream;
use crate::membership::Routes;
use crate::membership::control::Control;
use crate::net::dial_rank::Dial;
use crate::net::interface::Interface;
use crate::net::peer_addresses::PeerAddresses;
use crate::{Error, PeerInfo, Result};

/// Time between two checks for failures of other ranks.
const LOOK: Duration = Duration::from_millis(500);

/// A rank and the means to connect to its neighbours.
pub(super) struct Neighbours<'a> {
    pub(super) control: &'a Arc<Control>,
    pub(super) key: &'a LinkKey,
    pub(super) to: &'a PeerAddresses,
    pub(super) via: &'a Interface,
    pub(super) routes: &'a Routes,
}

impl Neighbours<'_> {
    /// Connects to the neighbours and puts the connections into `streams`, by rank.
    ///
    /// # Errors
    /// If a neighbour cannot be reached, or any rank has failed since all came. Connections made before are in
    /// `streams`.
    pub(super) fn connect(
        &self,
        round: &Round<'_>,
        met: &Met,
        deadline: Instant,
        streams: &mut [Option<SecureStream>],
    ) -> Result<()> {
        let (lower, higher) = met.entries.split_at(self.routes.rank());
        for entry in lower.iter().filter(|entry| self.routes.is_near(entry.peer.rank)) {
            streams[entry.peer.rank] = Some(self.dial(entry, met, deadline)?);
        }
        for entry in higher.iter().filter(|entry| self.routes.is_near(entry.peer.rank)) {
            streams[entry.peer.rank] = Some(self.claim(&entry.peer, round, met, deadline)?);
        }
        Ok(())
    }

    /// Connects to a lower rank.
    fn dial(&self, entry: &Entry, met: &Met, deadline: Instant) -> Result<SecureStream> {
        let (rank, peer) = (self.routes.rank(), &entry.peer);
        let purpose = Purpose::Control { rank: rank as u32 };
        let Some(to) = self.to.get(peer.rank) else { return Err(unreached(peer, "since its address is unknown")) };
        let dial = Dial { to, via: self.via, key: self.key, peer: peer.rank, purpose };
        // A name that cannot be looked up is blamed on the peer: more likely, its machine does not have that name.
        dial.connect(deadline, by(deadline), None).map_err(|cause| match cause.shortage(met.entries.len()) {
            Some(why) => Error::environment(format!("{} cannot join: {why}", met.entries[rank].peer)),
            None => unreached(peer, &format!("at {to}: {cause}")),
        })
    }

    /// Waits for the connection of a higher rank.
    fn claim(&self, peer: &PeerInfo, round: &Round<'_>, met: &Met, deadline: Instant) -> Result<SecureStream> {
        let purpose = Purpose::Control { rank: peer.rank as u32 };
        loop {
            let look_at = deadline.min(Instant::now() + LOOK);
            if let Some(stream) = self.control.links().claim(purpose, look_at, || Ok(()))? {
                return Ok(stream);
            }
            round.check(met)?;
            if Instant::now() >= deadline {
                return Err(unreached(peer, "in time: it did not connect"));
            }
        }
    }
}

fn unreached(peer: &PeerInfo, how: &str) -> Error {
    Error::Rendezvous {
        message: format!(
            "{peer} came, but could not be reached {how}; it has probably ended, or a firewall blocks the connection"
        ),
        came: Vec::new(),
        missing: vec![peer.rank],
    }
}

#[cfg(test)]
mod tests {
    use std::net::{IpAddr, Ipv4Addr};
    use std::thread;

    use super::*;
    use crate::membership::control;
    use crate::rendezvous::entry;
    use crate::{JobKey, LaunchEnv, Meeting, StoreClient, StoreServer, World, WorldOptions};

    /// Deadline of joining, and so of the connections. The errors must come within half of it.
    const PATIENCE: Duration = Duration::from_secs(60);

    /// Takes part in the round and ends before it connects to any rank: as with a process that ends, its connection to
    /// the store and its listener close.
    fn end_once_met(env: &LaunchEnv, options: &WorldOptions, address: &str, job: &JobKey) -> Instant {
        let store = StoreClient::connect(address, job, PATIENCE).unwrap();
        let (_listener, listens) = control::listen(IpAddr::V4(Ipv4Addr::LOCALHOST), &Interface::default()).unwrap();
        let me = entry(env, options, listens, false);
        let start = Instant::now();
        let round =
            Round { store: &store, job, me: &me, server: None, is_watched: false, start, deadline: start + PATIENCE };
        round.attend().unwrap();
        Instant::now()
    }

    /// Each rank in turn ends before it connects; `machines` has the machine of each rank.
    fn check(machines: &[&str]) {
        let size = machines.len();
        let options = WorldOptions { join_timeout: PATIENCE, timeout: PATIENCE, ..WorldOptions::default() };
        let job = JobKey::trusting_network("job", 0);
        let check_one = |ends: usize| {
            let store = StoreServer::bind("127.0.0.1:0", &job).unwrap();
            let (address, port) = (store.local_addr().to_string(), store.local_addr().port());
            let meeting = Meeting::Launcher { host: "127.0.0.1".to_owned(), port };
            let env = |rank: usize| LaunchEnv {
                trust_network: true,
                machine: Some(machines[rank].to_owned()),
                ..LaunchEnv::new(rank, size, meeting.clone(), "job")
            };
            let join = |rank: usize| {
                // A rank that had connected to all of its neighbours meets the failure in its first call.
                let world = World::join(&env(rank), options.clone());
                (world.and_then(|world| world.group()?.barrier()).unwrap_err(), Instant::now())
            };
            thread::scope(|scope| {
                let survivors = (0..size).filter(|rank| *rank != ends);
                let survivors: Vec<_> = survivors.map(|rank| (rank, scope.spawn(move || join(rank)))).collect();
                let ended = end_once_met(&env(ends), &options, &address, &job);
                for (rank, survivor) in survivors {
                    let (error, at) = survivor.join().unwrap();
                    assert_eq!(error.rank(), Some(ends), "{machines:?}, rank {rank}: {error}");
                    assert!(error.to_string().contains(&format!("rank {ends} (host ")), "{error}");
                    let waited = at.saturating_duration_since(ended);
                    assert!(waited < PATIENCE / 2, "{machines:?}, rank {rank}: {waited:?}: {error}");
                }
            });
        };
        let check_one = &check_one;
        thread::scope(|scope| (0..size).for_each(|ends| drop(scope.spawn(move || check_one(ends)))));
    }

    #[test]
    fn a_rank_that_ends_before_it_connects_is_named_by_all_others() {
        check(&["0", "0", "0"]);
    }

    #[test]
    fn a_rank_that_ends_before_it_connects_is_named_on_other_machines_too() {
        check(&["0", "0", "1", "1"]);
    }
}
