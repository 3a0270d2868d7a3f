//! Exchanges of a rank with ranks of other machines.

use super::chunked_reduction::SpareMemory;
use super::schedule::Shares;
use crate::Result;
use crate::call::Call;
use crate::engine::tcp::TcpTransport;
use crate::engine::{HostEngine, Incoming, Outgoing, Transport};
use crate::topology::Machines;

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

    /// The rank of `machine` from which `rank` of another machine gets data that all ranks of `machine` have.
    pub(super) fn counterpart(&self, machine: usize, rank: usize) -> usize {
        let ranks = self.machines.ranks_of(machine);
        ranks[self.machines.local_rank_of(rank) % ranks.len()]
    }

    /// For each rank of this machine, the ranks whose rows it puts in at a gather: itself, and those of other machines
    /// that send theirs to it.
    pub(super) fn rows_by_local_rank(&self) -> Vec<Vec<usize>> {
        let mut rows: Vec<Vec<usize>> = self.neighbours().iter().map(|rank| vec![*rank]).collect();
        for rank in (0..self.machines.rank_count()).filter(|rank| self.machines.machine_of(*rank) != self.here) {
            rows[self.machines.local_rank_of(self.counterpart(self.here, rank))].push(rank);
        }
        rows
    }

    /// Sends this rank's row to one rank of each other machine, and receives the rows that this rank gets.
    pub(super) fn gather(&mut self, call: &Call, row: &[u8], receives: &mut [Incoming<'_>]) -> Result<()> {
        let others = (0..self.machines.count()).filter(|machine| *machine != self.here);
        let to = |machine| Outgoing { peer: self.counterpart(machine, self.me), payload: row };
        let sends: Vec<_> = others.map(to).collect();
        self.exchange(call, &sends, receives)
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

    /// Exchanges one byte per machine, on which the ranks of each machine agree; returns the bytes, by machine.
    pub(super) fn of_machines(&mut self, call: &Call, own: u8) -> Result<Vec<u8>> {
        let payload = [own];
        let counts_on_me = |rank: &usize| {
            self.machines.machine_of(*rank) != self.here && self.counterpart(self.here, *rank) == self.me
        };
        let listeners = (0..self.machines.rank_count()).filter(counts_on_me);
        let sends: Vec<_> = listeners.map(|peer| Outgoing { peer, payload: &payload }).collect();
        let mut bytes = vec![own; self.machines.count()];
        let places = bytes.iter_mut().enumerate().filter(|(machine, _)| *machine != self.here);
        let mut receives: Vec<_> = places
            .map(|(machine, byte)| Incoming::new(self.counterpart(machine, self.me), std::slice::from_mut(byte)))
            .collect();
        self.flat.transport().exchange(call, &sends, &mut receives)?;
        Ok(bytes)
    }

    /// [`swap`](Self::swap) without payloads, to compare the call.
    pub(super) fn meet(&mut self, call: &Call, ranks: &[usize]) -> Result<()> {
        let places = ranks.iter().map(|_| &mut [][..]).collect();
        self.swap(call, ranks, &[], places)
    }
}

/// The numbers in `bytes`, which need not be aligned.
pub(super) fn floats(bytes: &[u8]) -> Vec<f64> {
    bytes.as_chunks().0.iter().map(|bytes| f64::from_le_bytes(*bytes)).collect()
}
