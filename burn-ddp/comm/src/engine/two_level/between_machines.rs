//! Exchanges of a rank with ranks of other machines.

use std::sync::Arc;

use super::chunked_reduction::SpareMemory;
use super::schedule::{Exchanged, Shares, Step, announcements, counterpart, rows_by_local_rank};
use crate::Result;
use crate::call::Call;
use crate::engine::tcp::{FramesUnderWay, TcpTransport};
use crate::engine::{HostEngine, Incoming, Outgoing, Transport};
use crate::topology::Machines;

/// Stage of the first step of a schedule, and the number of stages, which steps use in turn.
const FIRST_STAGE: usize = 2;
const STAGES: usize = 128;

/// Exchanges of a rank with the ranks of other machines. Ranks are group ranks.
pub(super) struct Wire {
    /// Engine for calls that only use the tcp connections.
    pub(super) flat: HostEngine<TcpTransport>,
    pub(super) machines: Machines,
    pub(super) me: usize,
    /// This rank's machine.
    pub(super) here: usize,
    /// Memory of chunks that are reduced. Kept between calls, since fresh memory costs page faults.
    pub(super) spare: SpareMemory,
    /// The machines' shares in the last all-reduce.
    pub(super) shares: Option<Shares>,
    /// Weights of all ranks in the last large reduction that had weights, the same on all ranks.
    pub(super) weights: Vec<f64>,
}

impl Wire {
    pub(super) fn new(flat: HostEngine<TcpTransport>, machines: Machines, me: usize) -> Wire {
        let (here, weights) = (machines.machine_of(me), vec![1.0; machines.rank_count()]);
        Wire { flat, me, here, machines, spare: SpareMemory::default(), shares: None, weights }
    }

    /// Ranks of this machine, ascending.
    pub(super) fn neighbours(&self) -> &[usize] {
        self.machines.ranks_of(self.here)
    }

    /// Position of this rank among those of its machine.
    pub(super) fn local_rank(&self) -> usize {
        self.machines.local_rank_of(self.me)
    }

    /// The leader of each machine: its first rank.
    pub(super) fn leaders(&self) -> Vec<usize> {
        (0..self.machines.count()).map(|machine| self.machines.ranks_of(machine)[0]).collect()
    }

    /// The rank of `machine` with which `rank` of another machine exchanges what all ranks of a machine have or get.
    pub(super) fn counterpart(&self, machine: usize, rank: usize) -> usize {
        counterpart(&self.machines, machine, rank)
    }

    /// For each rank of this machine, the ranks whose rows it puts in at a gather, itself first.
    pub(super) fn rows_by_local_rank(&self) -> Vec<Vec<usize>> {
        rows_by_local_rank(&self.machines, self.here)
    }

    /// Sends this rank's row to one rank of each other machine, and receives the rows that this rank gets.
    pub(super) fn gather(&mut self, call: &Call, row: &[u8], receives: &mut [Incoming<'_>]) -> Result<()> {
        let others = (0..self.machines.count()).filter(|machine| *machine != self.here);
        let to = |machine| Outgoing { peer: self.counterpart(machine, self.me), payload: row };
        let sends: Vec<_> = others.map(to).collect();
        self.exchange(call, &sends, receives)
    }

    /// Does `steps`, whose bytes are those of `buf`: in each step, what arrives is one range, behind all that leaves.
    pub(super) fn follow(&mut self, call: &Call, steps: &[Step], buf: &mut [u8]) -> Result<()> {
        for step in steps {
            let arriving = step.receives.iter().map(|from| &from.range).filter(|range| !range.is_empty());
            let boundary = arriving.map(|range| range.start).min().unwrap_or(buf.len());
            let (before, mut behind) = buf.split_at_mut(boundary);
            let send = |to: &Exchanged| Outgoing { peer: to.peer, payload: &before[to.range.clone()] };
            let sends: Vec<_> = step.sends.iter().map(send).collect();
            let receive = |from: &Exchanged| {
                let (room, rest) = std::mem::take(&mut behind).split_at_mut(from.range.len());
                behind = rest;
                Incoming::new(from.peer, room)
            };
            let mut receives: Vec<_> = step.receives.iter().map(receive).collect();
            self.exchange(&call_of_step(call, step.number), &sends, &mut receives)?;
        }
        Ok(())
    }

    pub(super) fn exchange(
        &mut self,
        call: &Call,
        sends: &[Outgoing<'_>],
        receives: &mut [Incoming<'_>],
    ) -> Result<()> {
        self.flat.transport().exchange(call, sends, receives)
    }

    /// Sends `payload` from each of `ranks`, one per machine, to the others, into their `places`: memory for all
    /// machines' payloads, by machine; this machine's is not used.
    pub(super) fn swap(&mut self, call: &Call, ranks: &[usize], payload: &[u8], places: Vec<&mut [u8]>) -> Result<()> {
        let here = self.here;
        let others = || ranks.iter().enumerate().filter(move |(machine, _)| *machine != here).map(|(_, rank)| *rank);
        let sends: Vec<_> = others().map(|peer| Outgoing { peer, payload }).collect();
        let places = places.into_iter().enumerate().filter(|(machine, _)| *machine != here).map(|(_, place)| place);
        let mut receives: Vec<_> = others().zip(places).map(|(peer, place)| Incoming::new(peer, place)).collect();
        self.exchange(call, &sends, &mut receives)
    }

    /// Queues the frames of a step: it sends bytes of `payload`, and receives into memory of its own.
    pub(super) fn queue(&mut self, call: &Call, step: &Step, payload: &Arc<Vec<u8>>, frames: &mut FramesUnderWay) {
        let call = call_of_step(call, step.number);
        for to in &step.sends {
            frames.send(&call, step.number, to.peer, (payload, to.range.clone()));
        }
        for from in &step.receives {
            frames.receive(&call, step.number, from.peer, self.spare.take(from.range.len()));
        }
    }

    /// Exchanges one byte per machine, on which the ranks of each machine agree; returns the bytes, by machine.
    pub(super) fn of_machines(&mut self, call: &Call, own: u8) -> Result<Vec<u8>> {
        let step = announcements(&self.machines, self.me, &vec![1; self.machines.count()]);
        let mut frames = FramesUnderWay::default();
        self.queue(call, &step, &Arc::new(vec![own]), &mut frames);
        self.flat.transport().complete(call, &mut frames, step.number)?;
        let mut bytes = frames.received(step.number).concat();
        bytes.insert(self.here, own);
        Ok(bytes)
    }

    /// [`swap`](Self::swap) without payloads, to compare the call.
    pub(super) fn meet(&mut self, call: &Call, ranks: &[usize]) -> Result<()> {
        let places = ranks.iter().map(|_| &mut [][..]).collect();
        self.swap(call, ranks, &[], places)
    }
}

/// The call of the frames of a step.
pub(super) fn call_of_step(call: &Call, step: usize) -> Call {
    call.at_stage((FIRST_STAGE + step % STAGES) as u8)
}

/// The numbers in `bytes`, which need not be aligned.
pub(super) fn floats(bytes: &[u8]) -> Vec<f64> {
    bytes.as_chunks().0.iter().map(|bytes| f64::from_le_bytes(*bytes)).collect()
}
