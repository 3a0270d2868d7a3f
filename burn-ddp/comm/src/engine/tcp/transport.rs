//! Exchanges of frames over one group's connections.

use std::sync::Arc;

use super::NAME;
use super::exchange::{Exchange, piece_bytes};
use super::group_links::GroupLinks;
use super::link::{Receiving, Sending};
use super::spin::Spin;
use crate::Result;
use crate::call::Call;
use crate::engine::{Incoming, Outgoing, Piece, Transport};
use crate::membership::{Membership, Watch};
use crate::net::wait::Waker;

/// One group's connections on one rank.
pub(in crate::engine) struct TcpTransport {
    /// This rank in the group.
    rank: usize,
    links: GroupLinks,
    membership: Arc<Membership>,
    /// Woken by the membership and by connections that arrive, polled by the exchange.
    waker: Arc<Waker>,
    /// Memory for headers, reused.
    headers: Vec<u8>,
    spin: Spin,
}

impl TcpTransport {
    pub(super) fn new(rank: usize, links: GroupLinks, membership: Arc<Membership>, waker: Arc<Waker>) -> Self {
        let spin = Spin::new(&membership);
        Self { rank, links, membership, waker, headers: Vec::new(), spin }
    }
}

impl TcpTransport {
    /// Connects to `peers`; returns what an exchange with them needs.
    #[cfg(target_os = "linux")]
    pub(super) fn connected(
        &mut self,
        call: &Call,
        peers: impl Iterator<Item = usize>,
    ) -> Result<(&mut GroupLinks, &mut Spin, &Membership, &Waker)> {
        self.links.connect(call, peers)?;
        Ok((&mut self.links, &mut self.spin, &self.membership, &self.waker))
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
        self.links.count()
    }

    fn exchange(&mut self, call: &Call, sends: &[Outgoing<'_>], receives: &mut [Incoming<'_>]) -> Result<()> {
        let receive = |incoming| {
            let Incoming { peer, payload, .. }: &mut Incoming<'_> = incoming;
            Receiving::new(*peer, call, payload.len(), payload)
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
        let (rank, count) = (self.rank, self.links.count());
        let room = piece_bytes(count - 1).min(len);
        scratch.resize(room * (count - 1), 0);
        let mut receiving = Vec::with_capacity(count - 1);
        let mut rest = &mut scratch[..];
        for peer in (0..count).filter(|peer| *peer != rank) {
            let (row, behind) = rest.split_at_mut(room);
            receiving.push(Receiving::new(peer, call, len, row));
            rest = behind;
        }
        self.run(call, sends, &mut receiving, Some(take))
    }

    fn leave(&mut self) {
        self.links.close();
    }
}

impl TcpTransport {
    /// Runs an exchange; `take`, if given, gets the payloads piece by piece.
    fn run(
        &mut self,
        call: &Call,
        sends: &[Outgoing<'_>],
        receiving: &mut [Receiving<'_>],
        take: Option<&mut dyn FnMut(Piece<'_>)>,
    ) -> Result<()> {
        let peers = sends.iter().map(|send| send.peer).chain(receiving.iter().map(Receiving::peer));
        self.links.connect(call, peers)?;
        self.headers.clear();
        let mut ends = Vec::with_capacity(sends.len());
        for send in sends {
            call.header(send.peer, send.payload.len()).encode(&mut self.headers);
            ends.push(self.headers.len());
        }
        let mut sending = Vec::with_capacity(sends.len());
        let mut start = 0;
        for (send, end) in sends.iter().zip(ends) {
            sending.push((send.peer, Sending::new(&self.headers[start..end], send.payload)));
            start = end;
        }
        let watch = Watch::new(&self.membership, call);
        let needed = (sending.len(), receiving.len());
        let (sending, membership, waker) = (&mut sending[..], &self.membership, &self.waker);
        let exchange = Exchange { call, membership, waker, sending, receiving, needed, ended: &mut Vec::new(), watch };
        exchange.run(&mut self.links, &mut self.spin, take)
    }
}
