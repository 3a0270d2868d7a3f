//! The tcp engine: between processes, on one machine or several.
//!
//! Each group has a mesh of its own, one connection per pair of ranks, so no group waits behind another's bytes. An exchange makes
//! progress on all peers at once, both ways, on the calling thread: what can be written or read now is, then `poll` waits for any of it,
//! for the membership, or for the deadline. Payloads are written from and read into the caller's memory. What is to be reduced is read in
//! pieces that stay in the cache until they are.

mod exchange;
mod link;
mod spin;

use std::net::TcpStream;
use std::sync::{Arc, Weak};
use std::time::Instant;

use self::exchange::{Exchange, GRACE};
use self::link::{Link, Receiving, Sending};
use self::spin::Spin;
use super::{Engine, Fabric, HostEngine, Incoming, Outgoing, Piece, Stall, Transport};
use crate::auth::handshake::Purpose;
use crate::auth::job_key::LinkKey;
use crate::call::Call;
use crate::membership::control::Links;
use crate::membership::{Membership, Wake};
use crate::net::dial::dial;
use crate::net::interface::Interface;
use crate::net::wait::Waker;
use crate::{Error, Result};

pub(crate) const NAME: &str = "tcp";

/// How a rank and its peers reach each other.
pub(crate) struct Reach {
    pub(crate) rank: usize,
    /// Where each rank listens.
    pub(crate) addresses: Vec<(String, u16)>,
    /// What both ends of a connection prove to know.
    pub(crate) key: LinkKey,
    /// From where this rank connects.
    pub(crate) via: Interface,
    /// Where connections from higher ranks arrive.
    pub(crate) links: Arc<Links>,
}

/// Makes a rank's transports.
pub(crate) struct TcpFabric {
    reach: Reach,
    membership: Arc<Membership>,
}

impl TcpFabric {
    pub(crate) fn new(reach: Reach, membership: Arc<Membership>) -> Self {
        Self { reach, membership }
    }

    /// Whether `peer` can still be waited for.
    fn check(&self, peer: usize) -> Result<()> {
        self.membership.check()?;
        if self.membership.has_left(peer) { Err(self.membership.left_error(peer)) } else { Ok(()) }
    }

    /// The connection to the peer at a group rank for the group that `call` makes. The higher rank of a pair connects.
    fn connect(&self, call: &Call, at: usize) -> Result<TcpStream> {
        let Reach { rank, addresses, key, via, links } = &self.reach;
        let (rank, peer, group) = (*rank, call.world_rank(at), call.info.group);
        if peer > rank {
            let purpose = Purpose::Data { rank: peer as u32, group };
            let mut stall = Stall::new(call, self.membership.options().stall);
            loop {
                if let Some(stream) = links.claim(purpose, stall.at.min(call.deadline()), || self.check(peer))? {
                    return Ok(stream);
                }
                if Instant::now() >= call.deadline() {
                    return Err(call.timed_out(vec![at]));
                }
                if stall.is_due() {
                    self.membership.stalled(call, vec![at]);
                }
            }
        }
        let (host, port) = &addresses[peer];
        let purpose = Purpose::Data { rank: rank as u32, group };
        dial((host, *port), via, key, peer, purpose, call.deadline()).or_else(|cause| {
            if Instant::now() >= call.deadline() {
                return Err(call.timed_out(vec![at]));
            }
            links.watch(call.deadline().min(Instant::now() + GRACE), || self.check(peer))?;
            Err(self.membership.lost_error(peer, format!("it could not be reached for a new group: {cause}")))
        })
    }
}

impl Fabric for TcpFabric {
    fn name(&self) -> &'static str {
        NAME
    }

    fn open(&self, call: &Call) -> Result<Box<dyn Engine>> {
        let me = call.group_rank()?;
        let mut links = Vec::with_capacity(call.members.count());
        (0..call.members.count()).filter(|at| *at != me).for_each(|at| call.expect(at));
        for at in 0..call.members.count() {
            links.push(if at == me {
                None
            } else {
                let stream = self.connect(call, at)?;
                Some(Link::new(stream).map_err(|e| self.membership.lost_error(call.world_rank(at), e.to_string()))?)
            });
        }
        let transport = TcpTransport::new(me, links, self.membership.clone())?;
        Ok(Box::new(HostEngine::new(transport)))
    }
}

/// One group's connections on one rank.
pub(crate) struct TcpTransport {
    /// This rank in the group.
    rank: usize,
    /// By group rank; `None` for this one.
    links: Vec<Option<Link>>,
    membership: Arc<Membership>,
    bell: Arc<Bell>,
    /// Memory for headers, kept.
    headers: Vec<u8>,
    spin: Spin,
}

/// Rung by the membership, polled by the exchange.
struct Bell(Waker);

impl Wake for Bell {
    fn wake(&self) {
        self.0.wake();
    }
}

impl TcpTransport {
    fn new(rank: usize, links: Vec<Option<Link>>, membership: Arc<Membership>) -> Result<Self> {
        let waker = Waker::new()
            .map_err(|e| Error::Environment { message: format!("this process cannot have another socket: {e}") })?;
        let bell = Arc::new(Bell(waker));
        let weak: Weak<dyn Wake> = Arc::downgrade(&bell) as Weak<dyn Wake>;
        membership.add_waker(weak);
        let spin = Spin::new(&membership);
        Ok(Self { rank, links, membership, bell, headers: Vec::new(), spin })
    }
}

impl Transport for TcpTransport {
    fn name(&self) -> &'static str {
        NAME
    }

    fn rank(&self) -> usize {
        self.rank
    }

    fn world_size(&self) -> usize {
        self.links.len()
    }

    fn exchange(&mut self, call: &Call, sends: &[Outgoing<'_>], receives: &mut [Incoming<'_>]) -> Result<()> {
        let receive = |incoming| {
            let Incoming { peer, payload, .. }: &mut Incoming<'_> = incoming;
            Receiving::new(*peer, payload.len(), payload)
        };
        let mut receiving: Vec<_> = receives.iter_mut().map(receive).collect();
        self.run(call, sends, &mut receiving, None)?;
        let weights: Vec<f64> = receiving.iter().map(Receiving::weight).collect();
        receives.iter_mut().zip(weights).for_each(|(incoming, weight)| incoming.weight = weight);
        Ok(())
    }

    fn collect(
        &mut self,
        call: &Call,
        sends: &[Outgoing<'_>],
        len: usize,
        scratch: &mut Vec<u8>,
        take: &mut dyn FnMut(Piece<'_>),
    ) -> Result<()> {
        let (rank, count) = (self.rank, self.links.len());
        let room = exchange::piece_bytes(count - 1).min(len);
        scratch.resize(room * (count - 1), 0);
        let mut receiving = Vec::with_capacity(count - 1);
        let mut rest = &mut scratch[..];
        for peer in (0..count).filter(|peer| *peer != rank) {
            let (row, behind) = rest.split_at_mut(room);
            receiving.push(Receiving::new(peer, len, row));
            rest = behind;
        }
        self.run(call, sends, &mut receiving, Some(take))
    }
}

impl TcpTransport {
    fn run(
        &mut self,
        call: &Call,
        sends: &[Outgoing<'_>],
        receiving: &mut [Receiving<'_>],
        take: Option<&mut dyn FnMut(Piece<'_>)>,
    ) -> Result<()> {
        self.headers.clear();
        let mut ends = Vec::with_capacity(sends.len());
        for send in sends {
            call.header(send.peer, send.payload.len()).encode(&mut self.headers);
            ends.push(self.headers.len());
        }
        receiving.iter().for_each(|receive| call.expect(receive.peer()));
        let mut sending = Vec::with_capacity(sends.len());
        let mut start = 0;
        for (send, end) in sends.iter().zip(ends) {
            sending.push((send.peer, Sending::new(&self.headers[start..end], send.payload)));
            start = end;
        }
        let stall = Stall::new(call, self.membership.options().stall);
        let exchange =
            Exchange { call, membership: &self.membership, bell: &self.bell.0, sending, receiving, ended: None, stall };
        exchange.run(&mut self.links, &mut self.spin, take)
    }
}
