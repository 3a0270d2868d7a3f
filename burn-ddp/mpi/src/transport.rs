//! The transport of this engine: exchanges of frames over MPI.

use std::sync::Arc;
use std::thread;

use burn_ddp_comm::engine::{Incoming, Outgoing, Piece, Transport};
use burn_ddp_comm::membership::Membership;
use burn_ddp_comm::{Call, Error, Result};

use crate::channel::{Channel, Receiving, Route, Sending};
use crate::exchange::{CLOSING, Exchange};
use crate::ffi::{Comm, Requests};
use crate::fragments::{FIRST_ROOM, Fragments};
use crate::lifecycle::{self, InUse};
use crate::wait::poll_pause;

pub(crate) const NAME: &str = "mpi";

/// Transport of one group on one rank. Its waits let MPI make progress again and again, and check the membership and
/// the deadline in between.
pub(crate) struct MpiTransport {
    /// This rank in the group.
    rank: usize,
    channel: Channel,
    fragments: Fragments,
    membership: Arc<Membership>,
    /// True after an exchange that ended by an error: messages may be under way that no later exchange expects.
    broken: bool,
    /// True if dropping this side tells its peers that it closes.
    says_goodbye: bool,
    _in_use: InUse,
}

impl MpiTransport {
    /// Transport of the group rank `rank`; `routes` lead to all ranks of the group, in group order.
    pub(crate) fn new(
        rank: usize,
        routes: Vec<Route>,
        comm: Arc<Comm>,
        membership: Arc<Membership>,
        says_goodbye: bool,
    ) -> Result<MpiTransport> {
        let in_use = lifecycle::in_use()?;
        let fragments = Fragments::of(routes.len());
        let channel = Channel::new(routes, Requests::new(comm), poll_pause(&membership));
        Ok(MpiTransport { rank, channel, fragments, membership, broken: false, says_goodbye, _in_use: in_use })
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
            let message = format!("{} was called after an error on the same group", call.info);
            return Err(Error::Internal { message });
        }
        let sending = sends.iter().map(|send| Sending::new(send.peer, send.payload)).collect();
        let result =
            Exchange::new(call, &self.membership, self.fragments, sending, receiving).run(&mut self.channel, take);
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
        self.channel.routes.len()
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

    /// Passes fragments to `take` in the buffers into which MPI received them.
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

/// Tells the peers that this rank sends no more on this group, so that a peer that still waits for it fails. Does not
/// wait.
impl Drop for MpiTransport {
    fn drop(&mut self) {
        // The end of the world, which a panic of this rank causes too, reaches the peers without MPI.
        if self.broken || !self.says_goodbye || thread::panicking() || self.membership.check().is_err() {
            return;
        }
        let mut requests = Requests::new(self.channel.requests.comm().clone());
        for (peer, route) in self.channel.routes.iter().enumerate().filter(|(peer, _)| *peer != self.rank) {
            let sent = requests.send(route.process, route.send, CLOSING.to_vec(), CLOSING.len(), ());
            // Room for any first message: one that comes in place of the closing message is from a rank whose world
            // ends.
            let received = match sent {
                Ok(()) if !self.channel.closed[peer] => {
                    requests.receive(route.process, route.receive, vec![0; FIRST_ROOM], FIRST_ROOM, ())
                }
                sent => sent,
            };
            if let Err(failure) = received {
                tracing::debug!(%failure, peer, "could not tell a peer that this group closes");
                return;
            }
        }
        lifecycle::close(requests);
    }
}
