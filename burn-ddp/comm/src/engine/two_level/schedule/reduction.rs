//! Plans of the traffic between machines: pure functions of the machines, the weights and the length, so the plans of
//! all ranks fit together.

use std::ops::Range;

use crate::engine::host_engine::fit_one_exchange;
use crate::engine::shm::part;
use crate::reduce::Terms;
use crate::topology::Machines;

/// Schedules by which the ranks of several machines reduce a buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ReductionSchedule {
    /// The first rank of each machine sends all its machine's buffers to those of the others, and reduces all.
    OneExchange,
    /// Each rank gets the machines' partial results of its part of the elements, puts them together and returns the
    /// results; see [`Plan`].
    Parts,
}

impl ReductionSchedule {
    /// The schedule for a buffer of `bytes` per rank.
    pub(super) fn choose(machines: &Machines, bytes: usize) -> ReductionSchedule {
        match fit_one_exchange(bytes, machines.rank_count()) {
            true => ReductionSchedule::OneExchange,
            false => ReductionSchedule::Parts,
        }
    }
}

/// Schedules by which the first ranks of several machines pass on a buffer that one machine has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum BroadcastSchedule {
    /// The machine sends it to each other one.
    Direct,
    /// Each machine sends it to the next, chunk by chunk, so each cable carries it once.
    Chain,
}

impl BroadcastSchedule {
    /// The schedule for a buffer of `bytes`.
    pub(super) fn choose(machines: &Machines, bytes: usize) -> BroadcastSchedule {
        let receivers = machines.count() - 1;
        match receivers == 1 || fit_one_exchange(bytes, receivers) {
            true => BroadcastSchedule::Direct,
            false => BroadcastSchedule::Chain,
        }
    }
}

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

/// Part of a rank in a reduction.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Plan {
    /// By local rank of this machine, the elements for which that rank makes the machine's partial results.
    pub(super) work: Vec<Vec<Range<usize>>>,
    /// This rank's work in its order, each piece with the rank that puts its partial results together; `None` is this
    /// rank.
    pub(super) pieces: Vec<(Option<usize>, Range<usize>)>,
    /// Ranks of other machines, and the elements for which they send partial results that this rank puts together.
    pub(super) receives: Vec<Exchanged>,
    /// True if results go back to the ranks whose partial results they are made of.
    pub(super) returns: bool,
}

/// Shares of the elements that the machines put together, one per machine, and the arguments from which the shares
/// follow.
#[derive(Debug)]
pub(super) struct Shares {
    partials: Vec<usize>,
    size: usize,
    of_machines: Vec<f64>,
}

impl Shares {
    pub(super) fn new(partials: &[usize], size: usize) -> Shares {
        Shares { partials: partials.to_vec(), size, of_machines: shares(partials, size) }
    }

    pub(super) fn are_of(&self, partials: &[usize], size: usize) -> bool {
        (&self.partials[..], self.size) == (partials, size)
    }
}

/// `len` elements in chunks of about the same length, at most `most` each; one chunk at least.
pub(super) fn chunks(len: usize, most: usize) -> impl Iterator<Item = Range<usize>> {
    let count = len.div_ceil(most.max(1)).max(1);
    (0..count).map(move |nth| part(len, 1, count, nth))
}

/// The subtrees of the tree over the ranks of `terms`, in order.
pub(super) fn subtrees(machines: &Machines, terms: &Terms) -> Vec<Subtree> {
    let subtree = |(places, machine)| Subtree { size: terms.partial_bytes(&places), places, machine };
    machines.subtrees(terms.ranks()).into_iter().map(subtree).collect()
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
    // As even as the ranges allow: the rest, positive or negative, is spread by how far each share can move.
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

/// The elements that each machine puts together: those of `chunk`, cut by `shares`.
pub(super) fn segments(chunk: Range<usize>, shares: &Shares) -> Vec<Range<usize>> {
    let (shares, len) = (&shares.of_machines, chunk.len() as f64);
    let (mut sum, mut start) = (0.0, chunk.start);
    let cut = |(nth, share): (usize, &f64)| {
        sum += share;
        let end = chunk.start + (len * sum).round() as usize;
        let end = if nth + 1 == shares.len() { chunk.end } else { end.clamp(start, chunk.end) };
        let segment = start..end;
        start = end;
        segment
    };
    shares.iter().enumerate().map(cut).collect()
}

impl Plan {
    /// Plan of group rank `me` for an all-reduce in which each machine puts together one of `segments`.
    ///
    /// Each machine cuts segment `o` into as many parts as it has ranks. On machine `o`, rank `j` puts part `j`
    /// together; on any other machine, rank `j` makes that machine's partial results of part `j`.
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
        let work = vec![Vec::new(); machines.ranks_of(here).len()];
        let mut plan = Plan { work, pieces: vec![], receives: vec![], returns: true };
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

    /// Plan of group rank `me` for the elements `chunk` of each row of a reduce-scatter of rows of `len` elements: each
    /// rank puts its row together. The row of local rank `i` of any machine is the work of local rank `i` here, modulo
    /// the number of ranks here.
    pub(super) fn reduce_scatter(machines: &Machines, me: usize, len: usize, chunk: Range<usize>) -> Plan {
        let here = machines.machine_of(me);
        let ranks = machines.ranks_of(here);
        let row = |rank: usize| rank * len + chunk.start..rank * len + chunk.end;
        let work = vec![Vec::new(); ranks.len()];
        let mut plan = Plan { work, pieces: vec![], receives: vec![], returns: false };
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

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::reduce::{Reduction, halves};
    use crate::{DType, ReduceOp};

    fn machines(identities: &[usize]) -> Machines {
        Machines::new(identities)
    }

    fn blocks(sizes: &[usize]) -> Machines {
        let of_machine = |(machine, size): (usize, &usize)| vec![machine; *size];
        machines(&sizes.iter().enumerate().flat_map(of_machine).collect::<Vec<_>>())
    }

    fn sum(dtype: DType, ranks: usize) -> Terms {
        Terms::new(dtype, Reduction::Op(ReduceOp::Sum), ranks).unwrap()
    }

    #[test]
    fn small_buffers_take_one_exchange() {
        use super::{BroadcastSchedule as Broadcast, ReductionSchedule as Reduction};
        let two_by_four = blocks(&[4, 4]);
        assert_eq!(Reduction::choose(&two_by_four, 8 * 1024), Reduction::OneExchange);
        assert_eq!(Reduction::choose(&two_by_four, 8 * 1024 + 1), Reduction::Parts);
        assert_eq!(Reduction::choose(&two_by_four, usize::MAX), Reduction::Parts);
        // One cable carries what a broadcast sends between two machines in any case.
        assert_eq!(Broadcast::choose(&two_by_four, usize::MAX), Broadcast::Direct);
        let three = blocks(&[1, 2, 1]);
        assert_eq!(Broadcast::choose(&three, 32 * 1024), Broadcast::Direct);
        assert_eq!(Broadcast::choose(&three, 32 * 1024 + 1), Broadcast::Chain);
    }

    /// Facts of a reduction that all ranks know.
    struct Case {
        machines: Machines,
        subtrees: Vec<Subtree>,
        partials: Vec<usize>,
        size: usize,
        plans: Vec<Plan>,
    }

    impl Case {
        fn new(
            machines: Machines,
            dtype: DType,
            terms: &Terms,
            plan: impl Fn(&Machines, usize, &Shares) -> Plan,
        ) -> Case {
            let subtrees = subtrees(&machines, terms);
            let partials = partial_bytes(&subtrees, machines.count());
            let size = dtype.size_bytes();
            let shares = Shares::new(&partials, size);
            let plans = (0..machines.rank_count()).map(|rank| plan(&machines, rank, &shares)).collect();
            Case { machines, subtrees, partials, size, plans }
        }

        fn all_reduce(machines: Machines, dtype: DType, terms: &Terms, len: usize) -> Case {
            Case::new(machines, dtype, terms, |machines, rank, shares| {
                Plan::all_reduce(machines, rank, &segments(0..len, shares))
            })
        }

        fn reduce_scatter(machines: Machines, dtype: DType, terms: &Terms, len: usize) -> Case {
            Case::new(machines, dtype, terms, |machines, rank, _| Plan::reduce_scatter(machines, rank, len, 0..len))
        }

        /// All pairs of a sender and a receiver of partial results, and the elements, as the senders plan them.
        fn sends(&self) -> Vec<(usize, usize, Range<usize>)> {
            let of_rank = |(from, plan): (usize, &Plan)| {
                let pieces = plan.pieces.iter().filter_map(|(peer, range)| Some(((*peer)?, range.clone())));
                pieces.map(move |(to, range)| (from, to, range)).collect::<Vec<_>>()
            };
            sorted(self.plans.iter().enumerate().flat_map(of_rank).collect())
        }

        /// The same, as the receivers plan them.
        fn receives(&self) -> Vec<(usize, usize, Range<usize>)> {
            let of_rank = |(to, plan): (usize, &Plan)| {
                plan.receives.iter().map(move |from| (from.peer, to, from.range.clone())).collect::<Vec<_>>()
            };
            sorted(self.plans.iter().enumerate().flat_map(of_rank).collect())
        }

        /// Checks what holds for every reduction of `len` elements.
        fn check(&self, len: usize) -> std::result::Result<(), TestCaseError> {
            let Case { machines, subtrees, plans, .. } = self;
            let places = subtrees.last().map_or(0, |subtree| subtree.places.end);
            // No send without its receive, at most one between two ranks, none inside a machine or of nothing.
            let sends = self.sends();
            prop_assert_eq!(&sends, &self.receives());
            for pair in sends.windows(2) {
                prop_assert_ne!((pair[0].0, pair[0].1), (pair[1].0, pair[1].1), "two sends between two ranks");
            }
            for (from, to, range) in &sends {
                prop_assert_ne!(machines.machine_of(*from), machines.machine_of(*to));
                prop_assert!(!range.is_empty() || len == 0, "{} sends nothing to {}", from, to);
                let own = plans[*to].own();
                prop_assert!(own.start <= range.start && range.end <= own.end, "{range:?} is not of {to}'s {own:?}");
            }
            for (rank, plan) in plans.iter().enumerate() {
                let neighbours = machines.ranks_of(machines.machine_of(rank));
                prop_assert_eq!(&plan.work, &plans[neighbours[0]].work, "neighbours differ");
                // The pieces are the work, cut further and in its order.
                let work = &plan.work[machines.local_rank_of(rank)];
                let work: Vec<usize> = work.iter().cloned().flatten().collect();
                let pieces: Vec<usize> = plan.pieces.iter().flat_map(|(_, range)| range.clone()).collect();
                prop_assert_eq!(work, pieces);
                prop_assert!(plan.pieces.iter().filter(|(peer, _)| peer.is_none()).count() <= 1);
            }
            // Each machine makes its partial results of each element once, and each element is put together once.
            for machine in 0..machines.count() {
                let work = &plans[machines.ranks_of(machine)[0]].work;
                prop_assert_eq!(
                    times_covered(work.iter().flatten().cloned(), len),
                    vec![1; len],
                    "by machine {}",
                    machine
                );
            }
            prop_assert_eq!(times_covered(plans.iter().map(Plan::own), len), vec![1; len]);
            // Where an element is put together, each subtree of each machine arrives once: the whole tree in order.
            for element in 0..len {
                let owner = plans.iter().position(|plan| plan.own().contains(&element)).unwrap();
                let arriving = sends.iter().filter(|(_, to, range)| *to == owner && range.contains(&element));
                let from: Vec<usize> =
                    arriving.map(|(from, ..)| machines.machine_of(*from)).chain([machines.machine_of(owner)]).collect();
                let there = subtrees.iter().flat_map(|subtree| {
                    from.iter().filter(|machine| **machine == subtree.machine).flat_map(|_| subtree.places.clone())
                });
                prop_assert!(there.eq(0..places), "element {element} is put together of machines {from:?}");
            }
            Ok(())
        }

        /// Bytes that the busiest machine sends in an all-reduce ÷ those of the buffer of `len` elements.
        fn sent(&self, len: usize) -> f64 {
            let mut sent = vec![0; self.machines.count()];
            for (from, to, range) in self.sends() {
                let (from, to) = (self.machines.machine_of(from), self.machines.machine_of(to));
                sent[from] += range.len() * self.partials[from];
                sent[to] += range.len() * self.size;
            }
            sent.into_iter().max().unwrap() as f64 / (len * self.size) as f64
        }
    }

    fn sorted(mut exchanges: Vec<(usize, usize, Range<usize>)>) -> Vec<(usize, usize, Range<usize>)> {
        exchanges.sort_by_key(|(from, to, range)| (*from, *to, range.start));
        exchanges
    }

    fn times_covered(ranges: impl Iterator<Item = Range<usize>>, len: usize) -> Vec<usize> {
        let mut times = vec![0; len];
        ranges.flatten().for_each(|element| times[element] += 1);
        times
    }

    /// Bytes per element that the busiest direction of any machine carries.
    fn busiest(shares: &[f64], partials: &[usize], size: usize) -> f64 {
        let (others, size) = ((shares.len() - 1) as f64, size as f64);
        let all: f64 = partials.iter().map(|bytes| *bytes as f64).sum();
        let of_machine = |(share, own): (&f64, &usize)| {
            let own = *own as f64;
            ((1.0 - share) * own + share * others * size).max(share * (all - own) + (1.0 - share) * size)
        };
        shares.iter().zip(partials).map(of_machine).fold(0.0, f64::max)
    }

    prop_compose! {
        /// Ranks on two to four machines, in any order.
        fn placements()(
            mut identities in proptest::collection::vec(0_usize..4, 2..12),
        ) -> Vec<usize> {
            if identities.iter().all(|identity| *identity == identities[0]) {
                identities[0] = 4;
            }
            identities
        }
    }

    /// Weights of which one at least is not 0; `None` for a sum.
    fn weights() -> impl Strategy<Value = Option<Vec<f64>>> {
        let weight = prop_oneof![Just(0.0), Just(1.0), 0.1_f64..9.0];
        proptest::option::of(proptest::collection::vec(weight, 12))
    }

    fn terms_of(dtype: DType, weights: Option<Vec<f64>>, ranks: usize) -> Terms {
        let Some(mut weights) = weights else { return sum(dtype, ranks) };
        weights.truncate(ranks);
        if weights.iter().all(|weight| *weight == 0.0) {
            weights[ranks - 1] = 1.0;
        }
        Terms::new(dtype, Reduction::Weighted(&weights), ranks).unwrap()
    }

    const DTYPES: [DType; 3] = [DType::F64, DType::F32, DType::F16];

    proptest! {
        #[test]
        fn an_all_reduce_is_complete(
            identities in placements(),
            dtype in proptest::sample::select(&DTYPES[..]),
            weights in weights(),
            len in prop_oneof![0_usize..20, 20_usize..400],
        ) {
            let terms = terms_of(dtype, weights, identities.len());
            Case::all_reduce(machines(&identities), dtype, &terms, len).check(len)?;
        }

        #[test]
        fn a_reduce_scatter_is_complete(
            identities in placements(),
            dtype in proptest::sample::select(&DTYPES[..]),
            len in 0_usize..20,
        ) {
            let ranks = identities.len();
            let case = Case::reduce_scatter(machines(&identities), dtype, &sum(dtype, ranks), len);
            case.check(ranks * len)?;
            for (rank, plan) in case.plans.iter().enumerate() {
                prop_assert_eq!(plan.own(), rank * len..(rank + 1) * len);
            }
        }

        #[test]
        fn segments_lie_side_by_side_whatever_the_shares(
            shares in proptest::collection::vec(0.0_f64..0.5, 1..6),
            len in 0_usize..1000,
        ) {
            let shares = Shares { partials: vec![], size: 4, of_machines: shares };
            let segments = segments(7..7 + len, &shares);
            prop_assert_eq!(segments.iter().cloned().flatten().collect::<Vec<_>>(), (7..7 + len).collect::<Vec<_>>());
        }

        #[test]
        fn subtrees_are_as_large_as_machines_allow(
            identities in placements(),
            dtype in proptest::sample::select(&DTYPES[..]),
            weights in weights(),
        ) {
            let terms = terms_of(dtype, weights, identities.len());
            let machines = machines(&identities);
            let subtrees = subtrees(&machines, &terms);
            let mut whole = vec![];
            // Every subtree of the tree, larger ones first, that lies on one machine and in none found before.
            let mut rest: std::collections::VecDeque<_> = std::iter::once(0..terms.ranks().len()).collect();
            while let Some(places) = rest.pop_front() {
                let on: Vec<usize> =
                    places.clone().map(|place| machines.machine_of(terms.ranks()[place])).collect();
                if on.iter().all(|machine| *machine == on[0]) {
                    whole.push((places.clone(), on[0], terms.partial_bytes(&places)));
                } else {
                    let (left, right) = halves(places);
                    rest.extend([left, right]);
                }
            }
            whole.sort_by_key(|(places, ..)| places.start);
            let found: Vec<_> =
                subtrees.into_iter().map(|subtree| (subtree.places, subtree.machine, subtree.size)).collect();
            prop_assert_eq!(found, whole);
        }

        #[test]
        fn no_other_shares_have_a_lighter_busiest_direction(
            partials in proptest::collection::vec(0_usize..40, 2..6),
            others in proptest::collection::vec(0.01_f64..1.0, 6),
            size in proptest::sample::select(vec![1_usize, 2, 4, 8]),
        ) {
            let shares = shares(&partials, size);
            prop_assert!(shares.iter().all(|share| (-1e-9..=1.0 + 1e-9).contains(share)), "{shares:?}");
            prop_assert!((shares.iter().sum::<f64>() - 1.0).abs() < 1e-6, "{shares:?}");
            let all: f64 = others[..partials.len()].iter().sum();
            let others: Vec<f64> = others[..partials.len()].iter().map(|share| share / all).collect();
            let (ours, theirs) = (busiest(&shares, &partials, size), busiest(&others, &partials, size));
            prop_assert!(ours <= theirs + 1e-6, "{shares:?}: {ours}, {others:?}: {theirs}");
        }
    }

    #[test]
    fn the_busiest_machine_sends_no_more_than_predicted() {
        let in_turn = machines(&[0, 1, 0, 1, 0, 1, 0, 1]);
        let predicted = [
            ("f32 2 x 4", blocks(&[4, 4]), DType::F32, 1.0),
            ("f32 4 x 4", blocks(&[4; 4]), DType::F32, 1.5),
            ("f32 3 x 3", blocks(&[3; 3]), DType::F32, 2.1),
            ("f32 2 x 3", blocks(&[3, 3]), DType::F32, 1.6),
            ("f32 1 + 5", blocks(&[1, 5]), DType::F32, 1.1),
            ("f32 2 x 4 in turn", in_turn, DType::F32, 2.6),
            ("f16 2 x 4", blocks(&[4, 4]), DType::F16, 1.55),
        ];
        let len = 1 << 20;
        for (name, machines, dtype, most) in predicted {
            let terms = sum(dtype, machines.rank_count());
            let sent = Case::all_reduce(machines, dtype, &terms, len).sent(len);
            assert!(sent <= most + 0.001, "{name}: {sent} times the buffer");
            assert!(sent > most * 0.8, "{name}: {sent} times the buffer are too few");
        }
    }
}
