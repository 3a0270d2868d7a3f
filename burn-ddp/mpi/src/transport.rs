//! Frames over MPI.

use std::sync::Arc;
use std::thread;

use burn_ddp_comm::engine::{Incoming, Outgoing, Piece, Transport};
use burn_ddp_comm::membership::Membership;
use burn_ddp_comm::{Call, Error, Result};

use crate::exchange::{CLOSING, Exchange, Receiving, Route, Sending, Wires};
use crate::ffi::{Comm, Flights};
use crate::idle::Idle;
use crate::fragments::{FIRST_ROOM, Pieces};
use crate::lifecycle::{self, InUse};

pub(crate) const NAME: &str = "mpi";

/// One group's messages on one rank. What waits lets MPI make progress again and again, and looks at the membership and the deadline in
/// between.
pub(crate) struct MpiTransport {
    /// This rank in the group.
    rank: usize,
    wires: Wires,
    pieces: Pieces,
    membership: Arc<Membership>,
    /// An exchange ended by an error, so messages may be on their way that nobody expects.
    broken: bool,
    /// Whether peers are told when this side closes.
    says_goodbye: bool,
    _in_use: InUse,
}

impl MpiTransport {
    /// Of the group rank `rank`; `routes` are those of all ranks of the group, in its order.
    pub(crate) fn new(
        rank: usize,
        routes: Vec<Route>,
        comm: Arc<Comm>,
        membership: Arc<Membership>,
        says_goodbye: bool,
    ) -> Result<MpiTransport> {
        let in_use = lifecycle::in_use()?;
        let idle = Idle::new(membership.rank(), membership.peers());
        let pieces = Pieces::of(routes.len());
        let wires = Wires::new(routes, Flights::new(comm), idle);
        Ok(MpiTransport { rank, wires, pieces, membership, broken: false, says_goodbye, _in_use: in_use })
    }

    fn run(
        &mut self,
        call: &Call,
        sends: &[Outgoing<'_>],
        receiving: &mut [Receiving<'_>],
        take: Option<&mut dyn FnMut(Piece<'_>)>,
    ) -> Result<()> {
        if self.broken {
            self.membership.check()?;
            let message = format!("{} after an error on the same group", call.info);
            return Err(Error::Internal { message });
        }
        let sending = sends.iter().map(|send| Sending::new(send.peer, send.payload)).collect();
        let result = Exchange::new(call, &self.membership, self.pieces, sending, receiving).run(&mut self.wires, take);
        self.broken = result.is_err();
        result
    }
}

impl Transport for MpiTransport {
    fn name(&self) -> &'static str {
        NAME
    }

    fn rank(&self) -> usize {
        self.rank
    }

    fn world_size(&self) -> usize {
        self.wires.routes.len()
    }

    fn exchange(&mut self, call: &Call, sends: &[Outgoing<'_>], receives: &mut [Incoming<'_>]) -> Result<()> {
        let receive = |incoming| {
            let Incoming { peer, payload, .. }: &mut Incoming<'_> = incoming;
            Receiving::new(*peer, payload.len(), Some(payload))
        };
        let mut receiving: Vec<_> = receives.iter_mut().map(receive).collect();
        self.run(call, sends, &mut receiving, None)?;
        let weights: Vec<f64> = receiving.iter().map(Receiving::weight).collect();
        receives.iter_mut().zip(weights).for_each(|(incoming, weight)| incoming.weight = weight);
        Ok(())
    }

    /// The pieces are reduced where MPI has put them.
    fn collect(
        &mut self,
        call: &Call,
        sends: &[Outgoing<'_>],
        len: usize,
        _scratch: &mut Vec<u8>,
        take: &mut dyn FnMut(Piece<'_>),
    ) -> Result<()> {
        let (rank, count) = (self.rank, self.world_size());
        if count == 1 {
            take(Piece { start: 0, rows: &[], weights: &[call.weight] });
            return Ok(());
        }
        let peers = (0..count).filter(|peer| *peer != rank);
        let mut receiving: Vec<_> = peers.map(|peer| Receiving::new(peer, len, None)).collect();
        self.run(call, sends, &mut receiving, Some(take))
    }
}

/// Peers that still need something from this rank on this group are told that they wait in vain. Does not wait.
impl Drop for MpiTransport {
    fn drop(&mut self) {
        // Whoever hears of an ended world needs nothing else, and a rank that panics ends it.
        if self.broken || !self.says_goodbye || thread::panicking() || self.membership.check().is_err() {
            return;
        }
        let mut flights = Flights::new(self.wires.flights.comm().clone());
        for (peer, route) in self.wires.routes.iter().enumerate().filter(|(peer, _)| *peer != self.rank) {
            let sent = flights.send(route.process, route.send, CLOSING.to_vec(), CLOSING.len(), ());
            // Room for any first message: one that comes in place of the word is from a rank whose world ends.
            let received = match sent {
                Ok(()) if !self.wires.closed[peer] => {
                    flights.receive(route.process, route.receive, vec![0; FIRST_ROOM], FIRST_ROOM, ())
                }
                sent => sent,
            };
            if let Err(failure) = received {
                tracing::debug!(%failure, peer, "a group closes unheard");
                return;
            }
        }
        lifecycle::close(flights);
    }
}
