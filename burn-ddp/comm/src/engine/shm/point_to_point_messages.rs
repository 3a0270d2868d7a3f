//! Send and receive through shared memory: messages from one rank to one other.
//!
//! Both ranks publish a line that only the other reads. The payload follows in parcels; the receiver counts the parcels
//! it has taken, and the sender returns when the last one has been taken. So a rank sends one message at a time, and
//! the same parcels serve any receiver.
#![allow(unsafe_code)]

use super::chunks::Chunks;
use super::eager_messages::hash;
use super::engine::ShmEngine;
use super::layout::SLOTS;
use super::peer_waits::{Board, Sign};
use super::rank_cell::{Announcement, LINE_BYTES, LINE_WORDS};
use super::slot_reductions::ticket;
use crate::call::{Call, CallInfo, Collective};
use crate::engine::{Incoming, Outgoing};
use crate::tensor_type::Shape;
use crate::{DType, Result};

/// The sign of a call between two ranks alone.
struct Agreed<'a> {
    board: &'a Board,
    call: &'a Call,
    /// Number of calls between this rank and each peer alone, this one included.
    pair_rounds: &'a [u64],
    /// Number of the next round of all ranks.
    next_round: u64,
}

impl ShmEngine {
    pub(super) fn transfer(
        &mut self,
        call: &Call,
        send: Option<Outgoing<'_>>,
        receive: Option<&mut Incoming<'_>>,
    ) -> Result<()> {
        let mut peers: Vec<usize> = send.iter().map(|send| send.peer).collect();
        let to = send.map(|send| send.peer);
        peers.extend(receive.iter().map(|receive| receive.peer).filter(|from| to != Some(*from)));
        for &peer in &peers {
            self.pair_rounds[peer] += 1;
            let payload = send.filter(|send| send.peer == peer).map_or(&[][..], |send| send.payload);
            self.tell(call, peer, payload);
        }
        let agreed = Agreed { board: &self.board, call, pair_rounds: &self.pair_rounds, next_round: self.round + 1 };
        self.board.wait(call, &peers, &agreed)?;
        self.carry(call, send, receive)
    }

    /// Publishes this rank's line for `peer`, with the payload if it is small.
    fn tell(&self, call: &Call, peer: usize, payload: &[u8]) {
        let round = self.pair_rounds[peer];
        let fingerprint = fingerprint(call.info_for(peer), call.rank, call.world_rank(peer), round);
        let mut line = Announcement { fingerprint, weight: call.weight, note: 0, payload: [0; LINE_WORDS] };
        if payload.len() <= LINE_BYTES {
            bytemuck::bytes_of_mut(&mut line.payload)[..payload.len()].copy_from_slice(payload);
        }
        self.board.pair(self.board.rank(), peer).line(round).publish(round, &line, LINE_WORDS);
    }

    /// Sends and receives the payloads, parcel by parcel.
    fn carry(&self, call: &Call, send: Option<Outgoing<'_>>, mut receive: Option<&mut Incoming<'_>>) -> Result<()> {
        let me = self.board.rank();
        let out = send.map(|send| (send, self.parcels(send.payload.len())));
        let room = receive.as_ref().map(|receive| (receive.peer, self.parcels(receive.payload.len())));
        let count = |chunks: Option<Chunks>| chunks.map_or(0, |chunks| chunks.count().max(1));
        let (outs, ins) = (count(out.map(|(_, chunks)| chunks)), count(room.map(|(_, chunks)| chunks)));
        for step in 0..=outs.max(ins) {
            if let Some((send, chunks)) = out.filter(|_| step < outs) {
                if step >= SLOTS {
                    self.await_taken(call, send.peer, step - SLOTS)?;
                }
                self.send_parcel(&send, chunks, step);
            }
            if let Some((peer, chunks)) = room.filter(|_| step > 0 && step <= ins)
                && let Some(receive) = &mut receive
            {
                self.take_parcel(call, receive, chunks, step - 1)?;
                self.board.pair(me, peer).taken.publish(ticket(self.pair_rounds[peer], step - 1));
                self.board.wake_sleepers();
            }
        }
        match send {
            Some(send) => self.await_taken(call, send.peer, outs - 1),
            None => Ok(()),
        }
    }

    fn parcels(&self, len: usize) -> Chunks {
        Chunks::new(len, 1, self.board.layout().parcel_bytes())
    }

    fn await_taken(&self, call: &Call, peer: usize, chunk: usize) -> Result<()> {
        let ticket = ticket(self.pair_rounds[peer], chunk);
        self.board
            .wait(call, &[peer], &|peer: usize| self.board.pair(peer, self.board.rank()).taken.has_reached(ticket))
    }

    /// Sends parcel `chunk`; a small payload is in the line already.
    fn send_parcel(&self, send: &Outgoing<'_>, chunks: Chunks, chunk: usize) {
        if send.payload.len() <= LINE_BYTES {
            return;
        }
        let (me, range) = (self.board.rank(), chunks.range(chunk));
        let room = self.board.layout().parcel(me, chunk, range.len());
        // SAFETY: the parcel that was here before has been taken: within this message the sender has waited for that,
        // and the message before returned only when all its parcels had been taken.
        unsafe { self.board.segment().bytes_mut(room) }.copy_from_slice(&send.payload[range]);
        self.board.pair(me, send.peer).sent.publish(ticket(self.pair_rounds[send.peer], chunk));
        self.board.wake_sleepers();
    }

    /// Takes parcel `chunk` when it is there.
    fn take_parcel(&self, call: &Call, into: &mut Incoming<'_>, chunks: Chunks, chunk: usize) -> Result<()> {
        let (me, peer) = (self.board.rank(), into.peer);
        if into.payload.len() <= LINE_BYTES {
            let line = self.board.pair(peer, me).line(self.pair_rounds[peer]).read(LINE_WORDS);
            let len = into.payload.len();
            into.payload.copy_from_slice(&bytemuck::bytes_of(&line.payload)[..len]);
            into.weight = line.weight;
            return Ok(());
        }
        let ticket = ticket(self.pair_rounds[peer], chunk);
        self.board.wait(call, &[peer], &|peer: usize| self.board.pair(peer, me).sent.has_reached(ticket))?;
        let range = chunks.range(chunk);
        let parcel = self.board.layout().parcel(peer, chunk, range.len());
        // SAFETY: the sender has published the parcel, and writes here again only after this rank has published that it
        // took the parcel.
        into.payload[range].copy_from_slice(unsafe { self.board.segment().bytes(parcel) });
        into.weight = self.board.pair(peer, me).line(self.pair_rounds[peer]).read(0).weight;
        Ok(())
    }
}

impl Agreed<'_> {
    /// True if the peer is in a call of all ranks: neither call can complete before the other.
    fn in_a_collective(&self, peer: usize) -> bool {
        self.board.cell(peer).line(self.next_round).is_there(self.next_round)
    }
}

impl Sign for Agreed<'_> {
    fn is_there(&self, peer: usize) -> bool {
        self.board.pair(peer, self.board.rank()).is_there(self.pair_rounds[peer])
    }

    fn arrived(&self, peer: usize) -> Result<()> {
        let (call, round) = (self.call, self.pair_rounds[peer]);
        let expected = fingerprint(call.info_for(peer), call.rank, call.world_rank(peer), round);
        if self.board.pair(peer, self.board.rank()).line(round).read(0).fingerprint == expected {
            return Ok(());
        }
        Err(self.board.mismatch(call, peer))
    }

    fn instead(&self, peer: usize) -> Result<()> {
        if self.in_a_collective(peer) && !self.is_there(peer) {
            return Err(self.board.mismatch(self.call, peer));
        }
        Ok(())
    }
}

/// A hash of the arguments in which two ranks must agree, equal on both: a message is described as its sender sees it,
/// a swap as the lower rank does.
fn fingerprint(info: &CallInfo, me: usize, peer: usize, round: u64) -> u64 {
    let i_am_first = match info.collective {
        Collective::Send => true,
        Collective::Recv => false,
        _ => me < peer,
    };
    let (first, second) = if i_am_first { (me, peer) } else { (peer, me) };
    let swap = info.collective == Collective::SendRecv;
    let lens = if swap && !i_am_first { [info.tag, info.len_elems] } else { [info.len_elems, info.tag] };
    let dtype = u64::from(info.dtype.map_or(u8::MAX, DType::code));
    let kind = u64::from(swap) | dtype << 8 | (first as u64) << 16 | (second as u64) << 40;
    let shape = info.shape.map_or(0, Shape::code);
    hash(round, [kind, lens[0], lens[1], shape, info.group, info.sequence])
}
