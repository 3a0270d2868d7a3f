//! Plans of what crosses machines: pure functions of the machines, the weights and the length, so all ranks make the
//! same.

use std::ops::Range;

use crate::engine::shm::part;
use crate::reduce::{Terms, halves};
use crate::topology::Machines;

/// A subtree whose ranks are all on one machine, and as large as it can be: the machine sends one partial result for
/// it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Subtree {
    /// Places in the tree.
    pub(super) places: Range<usize>,
    pub(super) machine: usize,
    /// Bytes of an element of its partial result.
    pub(super) size: usize,
}

/// Elements that two ranks of different machines exchange.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Exchanged {
    /// The other rank, in the group.
    pub(super) peer: usize,
    /// Elements of the buffer.
    pub(super) range: Range<usize>,
}

/// One rank's part in a reduction.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Plan {
    /// By local rank of this machine, the elements of which it makes the machine's partial results.
    pub(super) work: Vec<Vec<Range<usize>>>,
    /// This rank's work in its order, by the rank that puts the partial results together; `None` for this rank.
    pub(super) pieces: Vec<(Option<usize>, Range<usize>)>,
    /// Ranks of other machines, and the elements of which they send partial results for this rank to put together.
    pub(super) receives: Vec<Exchanged>,
}

/// The subtrees of the tree over the ranks of `terms`, in order.
pub(super) fn subtrees(machines: &Machines, terms: &Terms) -> Vec<Subtree> {
    fn cut(places: Range<usize>, machine_at: &impl Fn(usize) -> usize, found: &mut impl FnMut(Range<usize>)) {
        let machine = machine_at(places.start);
        if places.clone().all(|place| machine_at(place) == machine) {
            return found(places);
        }
        let (left, right) = halves(places);
        cut(left, machine_at, found);
        cut(right, machine_at, found);
    }
    let ranks = terms.ranks();
    let machine_at = |place: usize| machines.machine_of(ranks[place]);
    let mut all = Vec::new();
    cut(0..ranks.len(), &machine_at, &mut |places| {
        let (machine, size) = (machine_at(places.start), terms.partial_bytes(&places));
        all.push(Subtree { places, machine, size });
    });
    all
}

/// Bytes per element that each machine sends to a machine that puts partial results together.
pub(super) fn partial_bytes(subtrees: &[Subtree], machines: usize) -> Vec<usize> {
    let mut bytes = vec![0; machines];
    subtrees.iter().for_each(|subtree| bytes[subtree.machine] += subtree.size);
    bytes
}

/// The share of the elements that each machine puts together, so that the busiest direction of any machine carries
/// least. `partials` as of [`partial_bytes`]; results have `size` bytes.
///
/// A machine with the share `s` sends `(1 - s) × partials` to the others, and `s × size` to each of them; it receives
/// `s × partials` of all others, and `(1 - s) × size`.
pub(super) fn shares(partials: &[usize], size: usize) -> Vec<f64> {
    /// Halvings of the interval in which the least load lies.
    const STEPS: usize = 40;
    let (count, size) = (partials.len() as f64, size as f64);
    let all: f64 = partials.iter().map(|bytes| *bytes as f64).sum();
    // Shares with which a machine sends and receives at most `load`.
    let fitting = |own: usize, load: f64| {
        let (own, results) = (own as f64, (count - 1.0) * size);
        let (mut least, mut most) = (0.0_f64, 1.0_f64);
        let mut limit = |at_none: f64, at_all: f64| {
            let slope = at_all - at_none;
            if slope > 0.0 {
                most = most.min((load - at_none) / slope);
            } else if slope < 0.0 {
                least = least.max((load - at_none) / slope);
            } else if at_none > load {
                most = -1.0;
            }
        };
        limit(own, results);
        limit(size, all - own);
        (least, most)
    };
    let fits = |load: f64| {
        let ranges: Vec<_> = partials.iter().map(|own| fitting(*own, load)).collect();
        let sum = |of: fn(&(f64, f64)) -> f64| ranges.iter().map(of).sum::<f64>();
        let possible = ranges.iter().all(|(least, most)| least <= most);
        (possible && sum(|range| range.0) <= 1.0 && sum(|range| range.1) >= 1.0).then_some(ranges)
    };
    let (mut low, mut high) = (0.0, all + count * size);
    for _ in 0..STEPS {
        let middle = (low + high) / 2.0;
        if fits(middle).is_some() { high = middle } else { low = middle }
    }
    let Some(ranges) = fits(high) else { return vec![1.0 / count; partials.len()] };
    // As even as the ranges allow: what is missing, or too much, is spread by how far each can go.
    let mut shares: Vec<f64> = ranges.iter().map(|(least, most)| (1.0 / count).clamp(*least, *most)).collect();
    let missing = 1.0 - shares.iter().sum::<f64>();
    let room = |share: f64, (least, most): (f64, f64)| if missing > 0.0 { most - share } else { share - least };
    let rooms: Vec<f64> = shares.iter().zip(&ranges).map(|(share, range)| room(*share, *range)).collect();
    let total: f64 = rooms.iter().sum();
    if total > 0.0 {
        shares.iter_mut().zip(rooms).for_each(|(share, room)| *share += missing * room / total);
    }
    shares
}

/// The elements that each machine puts together: `len` elements, cut by `shares`.
pub(super) fn segments(len: usize, shares: &[f64]) -> Vec<Range<usize>> {
    let (mut sum, mut start) = (0.0, 0);
    let cut = |(nth, share): (usize, &f64)| {
        sum += share;
        let end = if nth + 1 == shares.len() { len } else { ((len as f64 * sum).round() as usize).clamp(start, len) };
        let segment = start..end;
        start = end;
        segment
    };
    shares.iter().enumerate().map(cut).collect()
}

impl Plan {
    /// Plan of group rank `me` for an all-reduce in which each machine puts together one of `segments`.
    ///
    /// Segment `o` is cut in as many parts as the machine has ranks: for rank `j` of machine `o`, which puts it
    /// together, and for rank `j` of any other, which makes the partial results of that machine.
    pub(super) fn all_reduce(machines: &Machines, me: usize, segments: &[Range<usize>]) -> Plan {
        let here = machines.machine_of(me);
        let parts = |machine: usize, segment: &Range<usize>| {
            let (start, ranks) = (segment.start, machines.ranks_of(machine).to_vec());
            let (len, count) = (segment.len(), ranks.len());
            ranks.into_iter().enumerate().map(move |(nth, rank)| {
                let part = part(len, 1, count, nth);
                (rank, start + part.start..start + part.end)
            })
        };
        let mut plan = Plan { work: vec![Vec::new(); machines.ranks_of(here).len()], pieces: vec![], receives: vec![] };
        for (machine, segment) in segments.iter().enumerate() {
            for (nth, (rank, part)) in parts(here, segment).enumerate().filter(|(_, (_, part))| !part.is_empty()) {
                plan.work[nth].push(part.clone());
                if rank != me {
                    continue;
                }
                if machine == here {
                    plan.pieces.push((None, part.clone()));
                    for other in (0..segments.len()).filter(|other| *other != here) {
                        let common = parts(other, segment).map(|(peer, theirs)| (peer, common(&theirs, &part)));
                        let common = common.filter(|(_, range)| !range.is_empty());
                        plan.receives.extend(common.map(|(peer, range)| Exchanged { peer, range }));
                    }
                } else {
                    let common = parts(machine, segment).map(|(peer, theirs)| (Some(peer), common(&theirs, &part)));
                    plan.pieces.extend(common.filter(|(_, range)| !range.is_empty()));
                }
            }
        }
        plan
    }

    /// Plan of group rank `me` for a reduce-scatter of rows of `len` elements: each rank puts its row together. The
    /// rows for rank `i` of another machine are the work of rank `i` here, counted round.
    pub(super) fn reduce_scatter(machines: &Machines, me: usize, len: usize) -> Plan {
        let here = machines.machine_of(me);
        let ranks = machines.ranks_of(here);
        let row = |rank: usize| rank * len..(rank + 1) * len;
        let mut plan = Plan { work: vec![Vec::new(); ranks.len()], pieces: vec![], receives: vec![] };
        for machine in 0..machines.count() {
            for (nth, rank) in machines.ranks_of(machine).iter().enumerate() {
                let worker = nth % ranks.len();
                plan.work[worker].push(row(*rank));
                if ranks[worker] == me {
                    plan.pieces.push(((*rank != me).then_some(*rank), row(*rank)));
                }
            }
            if machine != here {
                let theirs = machines.ranks_of(machine);
                let peer = theirs[machines.local_rank_of(me) % theirs.len()];
                plan.receives.push(Exchanged { peer, range: row(me) });
            }
        }
        plan
    }

    /// The elements that this rank puts together.
    pub(super) fn own(&self) -> Range<usize> {
        self.pieces.iter().find(|(peer, _)| peer.is_none()).map_or(0..0, |(_, range)| range.clone())
    }
}

fn common(a: &Range<usize>, b: &Range<usize>) -> Range<usize> {
    let start = a.start.max(b.start);
    start..a.end.min(b.end).max(start)
}
