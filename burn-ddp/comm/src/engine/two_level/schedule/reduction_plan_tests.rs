use std::ops::Range;

use proptest::prelude::*;

use super::simulation_tests::{DTYPES, blocks, machines, placements, sum, terms_of, weights};
use super::*;
use crate::DType;
use crate::reduce::Terms;
use crate::topology::Machines;

/// Facts of a reduction that all ranks know.
pub(super) struct Case {
    pub(super) machines: Machines,
    subtrees: Vec<Subtree>,
    pub(super) partials: Vec<usize>,
    pub(super) size: usize,
    plans: Vec<Plan>,
}

impl Case {
    fn new(machines: Machines, dtype: DType, terms: &Terms, plan: impl Fn(&Machines, usize, &Shares) -> Plan) -> Case {
        let subtrees = subtrees(&machines, terms);
        let partials = partial_bytes(&subtrees, machines.count());
        let size = dtype.size_bytes();
        let shares = Shares::new(&partials, size);
        let plans = (0..machines.rank_count()).map(|rank| plan(&machines, rank, &shares)).collect();
        Case { machines, subtrees, partials, size, plans }
    }

    pub(super) fn all_reduce(machines: Machines, dtype: DType, terms: &Terms, len: usize) -> Case {
        Case::new(machines, dtype, terms, |machines, rank, shares| {
            Plan::all_reduce(machines, rank, &segments(0..len, shares))
        })
    }

    pub(super) fn reduce_scatter(machines: Machines, dtype: DType, terms: &Terms, len: usize) -> Case {
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
            prop_assert_eq!(times_covered(work.iter().flatten().cloned(), len), vec![1; len], "by machine {}", machine);
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
