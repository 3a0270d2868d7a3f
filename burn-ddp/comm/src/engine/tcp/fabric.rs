//! The tcp fabric: connects the ranks of a new group.

use std::sync::Arc;
use std::time::Instant;

use super::NAME;
use super::data_stream::DataStream;
use super::exchange::GRACE;
use super::flows::Flows;
use super::link::Link;
use super::transport::TcpTransport;
use crate::Result;
use crate::auth::handshake::Purpose;
use crate::auth::job_key::LinkKey;
use crate::auth::secure_stream::SecureStream;
use crate::call::Call;
use crate::engine::{Engine, Fabric, HostEngine};
use crate::membership::control::Links;
use crate::membership::{Membership, Watch};
use crate::net::dial_rank::Dial;
use crate::net::interface::Interface;
use crate::net::keep_alive;

/// Addresses and keys by which a rank and its peers reach each other.
pub(crate) struct Reach {
    pub(crate) rank: usize,
    /// Each rank's listening address, by rank.
    pub(crate) addresses: Vec<(String, u16)>,
    /// Secret that both ends of a connection prove to know.
    pub(crate) key: LinkKey,
    /// Local interface of outgoing connections.
    pub(crate) via: Interface,
    /// Connections that arrive from higher ranks.
    pub(crate) links: Arc<Links>,
}

/// Forgets the connections that came for a group when the group is gone.
pub(super) struct Arrivals {
    links: Arc<Links>,
    group: u64,
}

impl Drop for Arrivals {
    fn drop(&mut self) {
        self.links.forget(self.group);
    }
}

/// Opens a rank's groups over sockets.
pub(crate) struct TcpFabric {
    reach: Reach,
    membership: Arc<Membership>,
}

impl TcpFabric {
    pub(crate) fn new(reach: Reach, membership: Arc<Membership>) -> Self {
        Self { reach, membership }
    }

    /// Fails if waiting for `peer` is in vain.
    fn check(&self, peer: usize) -> Result<()> {
        self.membership.check()?;
        if self.membership.has_left(peer) { Err(self.membership.left_error(peer)) } else { Ok(()) }
    }

    /// One of the flows to the peer at a group rank for the group that `call` makes. The higher rank of a pair
    /// connects.
    fn connect(&self, call: &Call, at: usize, flow: u8) -> Result<SecureStream> {
        let Reach { rank, addresses, key, via, links } = &self.reach;
        let (rank, peer, group) = (*rank, call.world_rank(at), call.info.group);
        let mut watch = Watch::new(&self.membership, call);
        if peer > rank {
            let purpose = Purpose::Data { rank: peer as u32, group, flow };
            loop {
                if let Some(stream) = links.claim(purpose, watch.look(&[at])?, || self.check(peer))? {
                    return Ok(stream);
                }
            }
        }
        let (host, port) = &addresses[peer];
        let purpose = Purpose::Data { rank: rank as u32, group, flow };
        let dial = Dial { to: (host, *port), via, key, peer, purpose };
        loop {
            // A handshake that takes long is given up for a moment, to report it.
            let until = watch.look(&[at])?;
            self.check(peer)?;
            let cause = match dial.connect(until, Some(&self.membership)) {
                Ok(stream) => return Ok(stream),
                Err(cause) => cause,
            };
            if let Some(why) = cause.shortage(addresses.len()) {
                return Err(self.membership.own_error(why));
            }
            // The control connections find out whether its machine is gone.
            if cause.is_silence() {
                continue;
            }
            links.watch(call.deadline().min(Instant::now() + GRACE), || self.check(peer))?;
            return Err(self.membership.lost_error(peer, format!("it could not be reached for a new group: {cause}")));
        }
    }
}

impl Fabric for TcpFabric {
    fn name(&self) -> &'static str {
        NAME
    }

    fn open(&self, call: &Call) -> Result<Box<dyn Engine>> {
        Ok(Box::new(HostEngine::new(self.open_mesh(call)?)))
    }
}

impl TcpFabric {
    /// Number of flows to the peer at a group rank: one inside a machine.
    fn flows(&self, call: &Call, at: usize) -> u8 {
        let is_here = self.membership.routes().is_on_this_machine(call.world_rank(at));
        if is_here { 1 } else { self.membership.options().flows }
    }

    /// A connected [flow](Self::connect), ready for data.
    fn flow(&self, call: &Call, at: usize, flow: u8) -> Result<DataStream> {
        let stream = self.connect(call, at, flow)?;
        let options = self.membership.options();
        keep_alive::probe_when_idle(stream.socket(), options.machine_timeout())
            .and_then(|()| DataStream::new(stream, options.encrypt_data))
            .map_err(|e| self.membership.lost_error(call.world_rank(at), e.to_string()))
    }

    /// This rank's connections to all others of a new group.
    pub(in crate::engine) fn open_mesh(&self, call: &Call) -> Result<TcpTransport> {
        let me = call.group_rank()?;
        let mut links = Vec::with_capacity(call.members.count());
        for at in 0..call.members.count() {
            links.push(if at == me {
                None
            } else {
                let streams = (0..self.flows(call, at)).map(|flow| self.flow(call, at, flow));
                Some(Link::new(Flows::new(streams.collect::<Result<_>>()?)))
            });
        }
        let arrivals = Arrivals { links: self.reach.links.clone(), group: call.info.group };
        TcpTransport::new(me, links, self.membership.clone(), arrivals)
    }
}
