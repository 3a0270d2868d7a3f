//! Connecting two ranks of a group.
//!
//! The higher rank of a pair dials, the lower one waits for the connection. A rank that has closed the group accepts
//! every connection for that group and hangs up. So a lower rank that has waited for long dials, too, to find out if
//! the peer has closed it.

use std::io;
use std::sync::Arc;
use std::thread;
use std::time::Instant;

use super::data_stream::DataStream;
use super::exchange::GRACE;
use super::flows::Flows;
use super::link::Link;
use crate::auth::handshake::{Purpose, by};
use crate::auth::job_key::LinkKey;
use crate::auth::secure_stream::SecureStream;
use crate::call::{Call, Collective};
use crate::membership::control::Links;
use crate::membership::{Membership, Watch};
use crate::net::dial_rank::{Dial, Undialled};
use crate::net::interface::Interface;
use crate::net::keep_alive;
use crate::net::peer_addresses::PeerAddresses;
use crate::{Error, Result};

/// Refusals of a peer after which this rank still tries again.
const RETRIES_REFUSED: usize = 2;

/// Addresses and keys by which a rank and its peers reach each other.
pub(crate) struct Reach {
    pub(crate) rank: usize,
    pub(crate) addresses: PeerAddresses,
    /// Secret that both ends of a connection prove to know.
    pub(crate) key: LinkKey,
    /// Local interface of outgoing connections.
    pub(crate) via: Interface,
    /// Connections that arrive from higher ranks.
    pub(crate) links: Arc<Links>,
}

/// Connects a rank to its peers.
pub(super) struct Connector {
    pub(super) reach: Reach,
    pub(super) membership: Arc<Membership>,
}

impl Connector {
    /// Dials the lower rank at group rank `at`, for data of `group`. That rank need not be in a call: its monitor
    /// thread answers.
    ///
    /// # Errors
    /// The first that is known: the cause that ended the world, a peer that left or cannot be reached, or the deadline
    /// of `call`.
    pub(super) fn dial(&self, call: &Call, group: u64, at: usize) -> Result<Link> {
        let flows = (0..self.flows(call, at)).map(|flow| self.dial_flow(call, at, (group, flow)));
        self.link(call, at, flows.collect::<Result<_>>()?)
    }

    /// The link to the higher rank at group rank `at`; `None` until that rank has dialled.
    ///
    /// # Errors
    /// The connection is broken already.
    pub(super) fn arrived(&self, call: &Call, group: u64, at: usize) -> Result<Option<Link>> {
        let rank = call.world_rank(at) as u32;
        let flow = |flow| Purpose::Data { rank, group, flow, opened: false };
        let flows: Vec<_> = (0..self.flows(call, at)).map(flow).collect();
        self.reach.links.take_all(&flows).map(|streams| self.link(call, at, streams)).transpose()
    }

    /// Number of flows to the peer at a group rank: one inside a machine.
    fn flows(&self, call: &Call, at: usize) -> u8 {
        let is_here = self.membership.routes().is_on_this_machine(call.world_rank(at));
        if is_here { 1 } else { self.membership.options().flows }
    }

    /// A link of these flows, ready for data.
    fn link(&self, call: &Call, at: usize, streams: Vec<SecureStream>) -> Result<Link> {
        let options = self.membership.options();
        let ready = |stream: SecureStream| {
            // Some systems refuse probes on a connection that has ended since. Data that came before the end are still
            // read.
            if let Err(error) = keep_alive::probe_when_idle(stream.socket(), options.machine_timeout()) {
                tracing::debug!(%error, "no probes on a data connection");
            }
            DataStream::new(stream, options.encrypt_data)
        };
        let flows: io::Result<Vec<_>> = streams.into_iter().map(ready).collect();
        let flows = flows.map_err(|e| self.membership.lost_error(call.world_rank(at), e.to_string()))?;
        Ok(Link::new(Flows::new(flows)))
    }

    /// A flow to a lower rank.
    fn dial_flow(&self, call: &Call, at: usize, (group, flow): (u64, u8)) -> Result<SecureStream> {
        let (peer, links) = (call.world_rank(at), &self.reach.links);
        let dial = self.dial_to(call, peer, group, flow)?;
        let mut watch = Watch::new(&self.membership, call);
        let (mut unreached_since, mut refusals) = (None, 0);
        loop {
            // An attempt ends at `until` if the peer stays silent, to report the stall.
            let until = watch.look(&[at])?;
            self.check(peer)?;
            // Once the peer answers, the attempt goes on, and `answer_by` reports stalls.
            let answer_by = || watch.look(&[at]).ok();
            let cause = match dial.connect(until, answer_by, Some(&self.membership)) {
                Ok(stream) => return Ok(stream),
                Err(cause) => cause,
            };
            if let Some(why) = cause.shortage(self.reach.addresses.count()) {
                return Err(self.membership.own_error(why));
            }
            // The control connections find out whether the peer's machine is gone.
            if cause.is_silence() {
                unreached_since = None;
                continue;
            }
            // If the peer no longer listens, the control connections know soon how it ended.
            let since = *unreached_since.get_or_insert_with(Instant::now);
            links.watch(call.deadline().min(Instant::now() + GRACE), || self.check(peer))?;
            // A peer that has not noticed yet that an earlier attempt ended refuses the next one, but not for long.
            refusals += usize::from(cause.is_verdict());
            if refusals > RETRIES_REFUSED || since.elapsed() >= self.membership.options().machine_timeout() {
                return Err(match cause {
                    Undialled::Unresolved(e) => self.membership.own_error(e.to_string()),
                    cause => self.membership.lost_error(peer, format!("it could not be reached for data: {cause}")),
                });
            }
        }
    }

    /// The group ranks in `asked`, all higher than this rank, that are known to have closed `group`: only such a rank
    /// accepts a connection from a lower one. Asks all at the same time, and takes at most [`GRACE`].
    pub(super) fn closed(&self, call: &Call, group: u64, asked: &[usize]) -> Vec<usize> {
        // No rank closes a group before all ranks have opened it.
        if !is_open(call) {
            return Vec::new();
        }
        let until = call.deadline().min(Instant::now() + GRACE);
        let has_closed = |at: usize| {
            let dial = self.dial_to(call, call.world_rank(at), group, 0).ok()?;
            dial.connect(until, by(until), Some(&self.membership)).is_ok().then_some(at)
        };
        if let [at] = asked {
            return has_closed(*at).into_iter().collect();
        }
        let name = || thread::Builder::new().name(format!("burn-ddp rank {} asks", self.reach.rank));
        thread::scope(|scope| {
            let has_closed = &has_closed;
            // A rank for which no thread can be started is asked the next time.
            let ask = |at| name().spawn_scoped(scope, move || has_closed(at)).ok();
            let asking: Vec<_> = asked.iter().copied().filter_map(ask).collect();
            asking.into_iter().filter_map(|thread| thread.join().ok().flatten()).collect()
        })
    }

    fn dial_to(&self, call: &Call, peer: usize, group: u64, flow: u8) -> Result<Dial<'_>> {
        let Reach { rank, addresses, key, via, .. } = &self.reach;
        let no_address = || Error::Internal { message: format!("rank {rank} has no address of rank {peer}") };
        let to = addresses.get(peer).ok_or_else(no_address)?;
        let purpose = Purpose::Data { rank: *rank as u32, group, flow, opened: is_open(call) };
        Ok(Dial { to, via, key, peer, purpose })
    }

    /// Fails if the world has ended or `peer` has left it.
    fn check(&self, peer: usize) -> Result<()> {
        self.membership.check()?;
        if self.membership.has_left(peer) { Err(self.membership.left_error(peer)) } else { Ok(()) }
    }
}

/// True if all ranks have opened the group of `call`: always but in the call that opens it, which ends when all have.
fn is_open(call: &Call) -> bool {
    call.info.collective != Collective::NewGroup
}

#[cfg(test)]
pub(super) mod tests {
    use std::net::{SocketAddr, TcpListener};
    use std::sync::Arc;
    use std::time::Duration;

    use super::*;
    use crate::auth::handshake::agreed;
    use crate::call::{CallInfo, Members};
    use crate::membership::ControlMessage;
    use crate::membership::control::{self, Control};
    use crate::net::wait::Waker;
    use crate::{JobKey, Machines, PeerInfo, WorldOptions};

    pub(crate) const PATIENCE: Duration = Duration::from_secs(60);

    /// The connector of `rank` in a world whose ranks listen at these addresses.
    pub(crate) fn connector(rank: usize, addresses: &[SocketAddr]) -> Arc<Connector> {
        let count = addresses.len();
        let peers = (0..count).map(|rank| PeerInfo::here(rank, rank, 0)).collect();
        let membership = Membership::new(rank, peers, Machines::new(&vec![(); count]), WorldOptions::default());
        let key = JobKey::trusting_network("job", 0).links(&[1; crate::auth::hmac_key::KEY_BYTES]);
        let addresses = addresses.iter().map(|address| (address.ip().to_string(), address.port()));
        let addresses = PeerAddresses::new(addresses);
        let links = Arc::new(Links::new(rank, count));
        membership.add_waker(Arc::downgrade(&(links.clone() as Arc<dyn crate::membership::Wake>)));
        Arc::new(Connector { reach: Reach { rank, addresses, key, via: Interface::default(), links }, membership })
    }

    /// A call of `rank` in group 7, of all of `count` ranks.
    pub(crate) fn barrier(rank: usize, count: usize) -> Call {
        let info = CallInfo::bare(Collective::Barrier, 7, 0, "src/main.rs:1:1");
        Call::new(info, Arc::new(Members::all(count)), rank, PATIENCE)
    }

    /// An address where no process listens.
    fn closed_port() -> SocketAddr {
        TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap()
    }

    #[test]
    fn a_peer_that_refuses_for_a_moment_is_dialled_again() {
        let (listener, address) = control::listen([127, 0, 0, 1].into(), &Interface::default()).unwrap();
        let connector = connector(1, &[address; 2]);
        let control = Control::start(listener, 0, 2, connector.reach.key.clone()).unwrap();
        let (links, waker) = (control.links().clone(), Arc::new(Waker::new().unwrap()));
        links.open_group(7, Arc::downgrade(&waker));
        // An exchange of the peer has taken the connection of an earlier attempt, and soon finds its end.
        let purpose = Purpose::Data { rank: 1, group: 7, flow: 0, opened: true };
        let [earlier, _dropped] = SecureStream::pair(agreed()).unwrap();
        links.put(purpose, earlier);
        assert!(links.take_all(&[purpose]).is_some());
        let peer = thread::spawn(move || {
            thread::sleep(GRACE / 2);
            links.close_group(7);
            links.open_group(7, Arc::downgrade(&waker));
            waker
        });
        let begin = std::time::Instant::now();
        let dialled = connector.dial(&barrier(1, 2), 7, 0);
        let _waker = peer.join().unwrap();
        assert!(dialled.is_ok(), "{}", dialled.err().unwrap());
        assert!(begin.elapsed() >= GRACE / 2, "it was refused at first");
    }

    #[test]
    fn a_peer_that_refuses_again_and_again_is_lost() {
        let (listener, address) = control::listen([127, 0, 0, 1].into(), &Interface::default()).unwrap();
        let connector = connector(1, &[address; 2]);
        // Another rank listens there.
        let _control = Control::start(listener, 5, 9, connector.reach.key.clone()).unwrap();
        let begin = std::time::Instant::now();
        let Err(error) = connector.dial(&barrier(1, 2), 7, 0) else { panic!("connected") };
        assert!(matches!(&error, Error::PeerLost { peer, .. } if peer.rank == 0), "{error}");
        assert!(error.to_string().contains("this is rank 5"), "{error}");
        assert!(begin.elapsed() < PATIENCE / 4, "{:?}", begin.elapsed());
    }

    #[test]
    fn a_host_name_that_cannot_be_looked_up_is_this_ranks_error() {
        let own = connector(1, &[closed_port(); 2]);
        let addresses = PeerAddresses::new(vec![("no such host".to_owned(), 7); 2]);
        let (key, links) = (own.reach.key.clone(), own.reach.links.clone());
        let peers = (0..2).map(|rank| PeerInfo::here(rank, rank, 0)).collect();
        let options = WorldOptions { peer_timeout: Some(Duration::from_millis(200)), ..WorldOptions::default() };
        let membership = Membership::new(1, peers, Machines::new(&[(); 2]), options);
        let connector =
            Connector { reach: Reach { rank: 1, addresses, key, via: Interface::default(), links }, membership };
        let Err(error) = connector.dial(&barrier(1, 2), 7, 0) else { panic!("connected") };
        assert_eq!(error.rank(), Some(1), "{error}");
        assert!(error.to_string().contains("\"no such host\" cannot be looked up"), "{error}");
    }

    #[test]
    fn a_rank_that_listens_no_more_is_lost_only_if_no_goodbye_comes() {
        let connector = connector(1, &[closed_port(); 2]);
        let membership = connector.membership.clone();
        let goodbye = thread::spawn(move || {
            thread::sleep(GRACE + GRACE / 4);
            membership.receive(0, ControlMessage::Goodbye);
        });
        let Err(error) = connector.dial(&barrier(1, 2), 7, 0) else { panic!("connected") };
        assert!(matches!(&error, Error::PeerLeft { peer, .. } if peer.rank == 0), "{error}");
        goodbye.join().unwrap();
    }
}
