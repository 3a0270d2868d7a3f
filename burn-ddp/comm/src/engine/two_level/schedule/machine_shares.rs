//! How many elements of a reduction each machine puts together.

use std::ops::Range;

use crate::reduce::Terms;
use crate::topology::Machines;

/// A subtree whose ranks are all on one machine, and as large as it can be: the machine sends one partial result for
/// it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(in crate::engine::two_level) struct Subtree {
    /// Places in the tree.
    pub(in crate::engine::two_level) places: Range<usize>,
    pub(in crate::engine::two_level) machine: usize,
    /// Bytes of an element of its partial result.
    pub(in crate::engine::two_level) size: usize,
}

/// Shares of the elements that the machines put together, one per machine, and the arguments from which the shares
/// follow.
#[derive(Debug)]
pub(in crate::engine::two_level) struct Shares {
    partials: Vec<usize>,
    size: usize,
    of_machines: Vec<f64>,
}

impl Shares {
    pub(in crate::engine::two_level) fn new(partials: &[usize], size: usize) -> Shares {
        Shares { partials: partials.to_vec(), size, of_machines: shares(partials, size) }
    }

    pub(in crate::engine::two_level) fn are_of(&self, partials: &[usize], size: usize) -> bool {
        (&self.partials[..], self.size) == (partials, size)
    }
}

/// The subtrees of the tree over the ranks of `terms`, in order.
pub(in crate::engine::two_level) fn subtrees(machines: &Machines, terms: &Terms) -> Vec<Subtree> {
    let subtree = |(places, machine)| Subtree { size: terms.partial_bytes(&places), places, machine };
    machines.subtrees(terms.ranks()).into_iter().map(subtree).collect()
}

/// Bytes per element that each machine sends to a machine that puts partial results together.
pub(in crate::engine::two_level) fn partial_bytes(subtrees: &[Subtree], machines: usize) -> Vec<usize> {
    let mut bytes = vec![0; machines];
    subtrees.iter().for_each(|subtree| bytes[subtree.machine] += subtree.size);
    bytes
}

/// The share of the elements that each machine puts together, so that the busiest direction of any machine carries
/// least. `partials` as of [`partial_bytes`]; results have `size` bytes.
///
/// A machine with the share `s` sends `(1 - s) × partials` to the others, and `s × size` to each of them; it receives
/// `s × partials` of all others, and `(1 - s) × size`.
pub(in crate::engine::two_level) fn shares(partials: &[usize], size: usize) -> Vec<f64> {
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
pub(in crate::engine::two_level) fn segments(chunk: Range<usize>, shares: &Shares) -> Vec<Range<usize>> {
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

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::super::simulation_tests::{DTYPES, machines, placements, terms_of, weights};
    use super::*;
    use crate::reduce::halves;

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

    proptest! {
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
}
