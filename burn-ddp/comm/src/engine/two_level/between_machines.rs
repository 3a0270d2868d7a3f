//! Exchanges of a rank with ranks of other machines.

use std::ops::Range;

use super::schedule::{Plan, Subtree, partial_bytes, segments, shares, subtrees};
use crate::call::Call;
use crate::engine::shm::Inputs;
use crate::engine::tcp::TcpTransport;
use crate::engine::{HostEngine, Incoming, Outgoing, Transport};
use crate::reduce::{Form, Leaf, Terms};
use crate::topology::Machines;
use crate::{DType, Result};

/// Numbers of a reduction's exchanges between machines.
const PARTIALS: u8 = 2;
const RESULTS: u8 = 3;

/// Connections of a rank to the others of its group. Ranks are group ranks.
pub(super) struct Wire {
    /// Collectives over the connections alone.
    pub(super) flat: HostEngine<TcpTransport>,
    pub(super) machines: Machines,
    pub(super) me: usize,
    /// This rank's machine.
    pub(super) here: usize,
    /// This machine's partial results at this rank's work. Kept between calls, since fresh memory costs page faults.
    partials: Vec<u8>,
    /// Partial results from other machines. Kept for the same reason.
    arrived: Vec<u8>,
    /// Results at this rank's work. Kept for the same reason.
    results: Vec<u8>,
    /// The last shares, and what they were made for.
    shares: Option<(Vec<usize>, usize, Vec<f64>)>,
}

/// A reduction, the same on all ranks.
pub(super) struct Reducing {
    terms: Terms,
    subtrees: Vec<Subtree>,
    /// Bytes per element of all partial results of a machine.
    partial_bytes: Vec<usize>,
    /// Bytes of an element.
    size: usize,
}

impl Wire {
    pub(super) fn new(flat: HostEngine<TcpTransport>, machines: Machines, me: usize) -> Wire {
        let here = machines.machine_of(me);
        Wire { flat, me, here, machines, partials: vec![], arrived: vec![], results: vec![], shares: None }
    }

    /// Ranks of this machine, ascending.
    pub(super) fn neighbours(&self) -> &[usize] {
        self.machines.ranks_of(self.here)
    }

    /// Position of this rank among those of its machine.
    pub(super) fn local_rank(&self) -> usize {
        self.machines.local_rank_of(self.me)
    }

    /// The rank of each machine that speaks for it: the first.
    pub(super) fn leaders(&self) -> Vec<usize> {
        (0..self.machines.count()).map(|machine| self.machines.ranks_of(machine)[0]).collect()
    }

    pub(super) fn exchange(
        &mut self,
        call: &Call,
        sends: &[Outgoing<'_>],
        receives: &mut [Incoming<'_>],
    ) -> Result<()> {
        self.flat.transport().exchange(call, sends, receives)
    }

    /// Sends `payload` from each of `ranks`, one per machine, to each other. `places` are those of all other machines'
    /// payloads, by machine; this machine's is not used.
    pub(super) fn swap(&mut self, call: &Call, ranks: &[usize], payload: &[u8], places: Vec<&mut [u8]>) -> Result<()> {
        let here = self.here;
        let others = || ranks.iter().enumerate().filter(move |(machine, _)| *machine != here).map(|(_, rank)| *rank);
        let sends: Vec<_> = others().map(|peer| Outgoing { peer, payload }).collect();
        let places = places.into_iter().enumerate().filter(|(machine, _)| *machine != here).map(|(_, place)| place);
        let mut receives: Vec<_> = others().zip(places).map(|(peer, place)| Incoming::new(peer, place)).collect();
        self.exchange(call, &sends, &mut receives)
    }

    /// [`swap`](Self::swap) of nothing but the call.
    pub(super) fn meet(&mut self, call: &Call, ranks: &[usize]) -> Result<()> {
        let places = ranks.iter().map(|_| &mut [][..]).collect();
        self.swap(call, ranks, &[], places)
    }

    pub(super) fn reducing(&self, dtype: DType, terms: Terms) -> Reducing {
        let subtrees = subtrees(&self.machines, &terms);
        let partial_bytes = partial_bytes(&subtrees, self.machines.count());
        Reducing { terms, subtrees, partial_bytes, size: dtype.size_bytes() }
    }

    /// This rank's plan of an all-reduce of `len` elements.
    pub(super) fn all_reduce_plan(&mut self, reducing: &Reducing, len: usize) -> Plan {
        let known = self
            .shares
            .take()
            .filter(|(partials, size, _)| (partials, size) == (&reducing.partial_bytes, &reducing.size));
        let (_, _, shares) = self.shares.insert(known.unwrap_or_else(|| {
            let shares = shares(&reducing.partial_bytes, reducing.size);
            (reducing.partial_bytes.clone(), reducing.size, shares)
        }));
        Plan::all_reduce(&self.machines, self.me, &segments(len, shares))
    }

    /// Reduces this rank's work, given the inputs of this machine's ranks there; the results in a row.
    pub(super) fn all_reduce(
        &mut self,
        call: &Call,
        reducing: &Reducing,
        plan: &Plan,
        inputs: &Inputs<'_>,
    ) -> Result<&[u8]> {
        let work: usize = plan.pieces.iter().map(|(_, range)| range.len()).sum();
        let mut results = std::mem::take(&mut self.results);
        results.resize(work * reducing.size, 0);
        let (mut own, mut others) = (&mut [][..], Vec::new());
        let mut rest = &mut results[..];
        for (peer, range) in &plan.pieces {
            let (room, behind) = rest.split_at_mut(range.len() * reducing.size);
            match peer {
                Some(peer) => others.push(Incoming::new(*peer, room)),
                None => own = room,
            }
            rest = behind;
        }
        self.reduce_own(call, reducing, plan, inputs, own)?;
        let start = plan.own().start;
        let sends: Vec<_> = plan
            .receives
            .iter()
            .map(|from| {
                let range = from.range.start - start..from.range.end - start;
                Outgoing { peer: from.peer, payload: &own[range.start * reducing.size..range.end * reducing.size] }
            })
            .collect();
        self.exchange(&call.at_stage(RESULTS), &sends, &mut others)?;
        self.results = results;
        Ok(&self.results)
    }

    /// Reduces the elements that this rank puts together into `out`, and sends this machine's partial results to the
    /// ranks that put others together.
    pub(super) fn reduce_own(
        &mut self,
        call: &Call,
        reducing: &Reducing,
        plan: &Plan,
        inputs: &Inputs<'_>,
        out: &mut [u8],
    ) -> Result<()> {
        let mut partials = std::mem::take(&mut self.partials);
        let mut arrived = std::mem::take(&mut self.arrived);
        let done = self.reduce_own_in(call, reducing, plan, (inputs, out), (&mut partials, &mut arrived));
        (self.partials, self.arrived) = (partials, arrived);
        done
    }

    fn reduce_own_in(
        &mut self,
        call: &Call,
        reducing: &Reducing,
        plan: &Plan,
        (inputs, out): (&Inputs<'_>, &mut [u8]),
        (partials, arrived): (&mut Vec<u8>, &mut Vec<u8>),
    ) -> Result<()> {
        let ours = reducing.partial_bytes[self.here];
        let work: usize = plan.pieces.iter().map(|(_, range)| range.len()).sum();
        partials.resize(work * ours, 0);
        inputs(&mut |range, sources| self.fold(reducing, plan, &range, sources, partials))?;

        let mut sends = Vec::with_capacity(plan.pieces.len());
        let (mut own, mut rest) = (&[][..], &partials[..]);
        for (peer, range) in &plan.pieces {
            let (bytes, behind) = rest.split_at(range.len() * ours);
            match peer {
                Some(peer) => sends.push(Outgoing { peer: *peer, payload: bytes }),
                None => own = bytes,
            }
            rest = behind;
        }
        let len =
            |peer: usize, range: &Range<usize>| range.len() * reducing.partial_bytes[self.machines.machine_of(peer)];
        arrived.resize(plan.receives.iter().map(|from| len(from.peer, &from.range)).sum(), 0);
        let mut receives = Vec::with_capacity(plan.receives.len());
        let mut rest = &mut arrived[..];
        for from in &plan.receives {
            let (room, behind) = rest.split_at_mut(len(from.peer, &from.range));
            receives.push(Incoming::new(from.peer, room));
            rest = behind;
        }
        self.exchange(&call.at_stage(PARTIALS), &sends, &mut receives)?;
        let received: Vec<&[u8]> = receives.into_iter().map(|receive| &*receive.payload).collect();
        self.put_together(reducing, plan, own, &received, out)
    }

    /// Makes this machine's partial results of `range`, in bytes of the buffer, where the ranks of this machine have
    /// `sources`.
    fn fold(
        &self,
        reducing: &Reducing,
        plan: &Plan,
        range: &Range<usize>,
        sources: &[&[u8]],
        partials: &mut [u8],
    ) -> Result<()> {
        let Reducing { terms, subtrees, partial_bytes, size } = reducing;
        let range = range.start / size..range.end / size;
        let mut before = 0;
        for (_, piece) in &plan.pieces {
            let room = &mut partials[before..][..piece.len() * partial_bytes[self.here]];
            before += room.len();
            let (start, end) = (range.start.max(piece.start), range.end.min(piece.end));
            if start >= end {
                continue;
            }
            let mut rest = room;
            for subtree in subtrees.iter().filter(|subtree| subtree.machine == self.here) {
                let (room, behind) = rest.split_at_mut(piece.len() * subtree.size);
                rest = behind;
                let of_rank = |place: usize| {
                    let source = sources[self.machines.local_rank_of(terms.ranks()[place])];
                    let bytes = &source[(start - range.start) * size..(end - range.start) * size];
                    Leaf { places: place..place + 1, bytes }
                };
                let leaves: Vec<_> = subtree.places.clone().map(of_rank).collect();
                let out = &mut room[(start - piece.start) * subtree.size..(end - piece.start) * subtree.size];
                terms.reduce(subtree.places.clone(), &leaves, Form::Partial, out)?;
            }
        }
        Ok(())
    }

    /// Puts the partial results of all machines together: this machine's in `own`, the others' as `plan` receives them.
    fn put_together(
        &self,
        reducing: &Reducing,
        plan: &Plan,
        own: &[u8],
        received: &[&[u8]],
        out: &mut [u8],
    ) -> Result<()> {
        let Reducing { terms, subtrees, size, .. } = reducing;
        let all = plan.own();
        let mut cuts: Vec<usize> = plan.receives.iter().map(|from| from.range.start).collect();
        cuts.extend([all.start, all.end]);
        cuts.sort_unstable();
        cuts.dedup();
        for range in cuts.windows(2).map(|pair| pair[0]..pair[1]) {
            let mut leaves = Vec::with_capacity(subtrees.len());
            for machine in 0..self.machines.count() {
                let (start, len, bytes) = if machine == self.here {
                    (all.start, all.len(), own)
                } else {
                    let here = |peer: usize| self.machines.machine_of(peer) == machine;
                    let sent = plan.receives.iter().zip(received);
                    let mut fitting = sent.filter(|(from, _)| here(from.peer) && from.range.contains(&range.start));
                    let Some((from, bytes)) = fitting.next() else { continue };
                    (from.range.start, from.range.len(), *bytes)
                };
                let mut rest = bytes;
                for subtree in subtrees.iter().filter(|subtree| subtree.machine == machine) {
                    let (bytes, behind) = rest.split_at(len * subtree.size);
                    rest = behind;
                    let bytes = &bytes[(range.start - start) * subtree.size..(range.end - start) * subtree.size];
                    leaves.push(Leaf { places: subtree.places.clone(), bytes });
                }
            }
            leaves.sort_by_key(|leaf| leaf.places.start);
            let out = &mut out[(range.start - all.start) * size..(range.end - all.start) * size];
            terms.reduce(0..terms.ranks().len(), &leaves, Form::Final, out)?;
        }
        Ok(())
    }
}

impl Plan {
    /// The work of each rank of this machine, in bytes of elements of `reducing`.
    pub(super) fn work_bytes(&self, reducing: &Reducing) -> Vec<Vec<Range<usize>>> {
        let bytes = |range: &Range<usize>| range.start * reducing.size..range.end * reducing.size;
        self.work.iter().map(|ranges| ranges.iter().map(bytes).collect()).collect()
    }
}
