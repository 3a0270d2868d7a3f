//! A reduction in parts: the results of whole subtrees are made in one place and put together in another, to the same
//! bits as a reduction in one place.

use std::ops::Range;

use super::cache_blocks::accumulator;
use super::fold_and_weights::{Fold, Weights};
use super::kernel::{Isa, Pass};
use super::source::Source;
use super::tree::{MAX_SOURCES, halves};
use super::{Reduction, check_defined, divisor, isa, scale, sum_up_the_tree};
use crate::{DType, ReduceOp, Result};

/// Elements that are reduced at a time: intermediate results stay in the first cache level.
const BLOCK: usize = 1024;

/// Rule that makes one element of several ranks' elements: the same for all parts of a reduction.
///
/// Ranks with a weight have *places* in the tree, 0, 1, and so on; a rank of weight 0 has none.
#[derive(Clone, Debug)]
pub(crate) struct Terms {
    isa: Isa,
    dtype: DType,
    fold: Fold,
    /// The rank at each place, ascending.
    ranks: Vec<usize>,
    /// Factor of each place, for a sum of floats.
    factors: Option<Vec<f64>>,
    /// Divisor of a sum of floats.
    total: f64,
}

/// The result of a subtree: in the elements' own type for one rank, in the accumulator's for several.
#[derive(Clone, Debug)]
pub(crate) struct Leaf<'a> {
    pub(crate) places: Range<usize>,
    pub(crate) bytes: &'a [u8],
}

/// Form of a result.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Form {
    /// The bytes of a [`Leaf`], to be put together with other parts.
    Partial,
    /// Elements, divided and rounded.
    Final,
}

/// Place of a block of elements in the leaves, and the type and the divisor of its result.
#[derive(Clone, Copy)]
struct Block {
    start: usize,
    len: usize,
    to: DType,
    total: f64,
}

impl Terms {
    /// Terms of a reduction of `ranks` ranks.
    pub(crate) fn new(dtype: DType, reduction: Reduction<'_>, ranks: usize) -> Result<Terms> {
        check_defined(dtype, reduction)?;
        let all = Terms { isa: isa(), dtype, fold: Fold::Sum, ranks: (0..ranks).collect(), factors: None, total: 1.0 };
        Ok(match reduction {
            Reduction::Op(op) => Terms { fold: Fold::of(op), total: divisor(op, ranks), ..all },
            Reduction::Weighted(weights) => {
                let present: Vec<usize> = (0..ranks).filter(|rank| weights[*rank] > 0.0).collect();
                let mut factors: Vec<f64> = present.iter().map(|rank| weights[*rank]).collect();
                let total = scale(&mut factors);
                let factors = total.map(|_| factors);
                Terms { total: total.unwrap_or(present.len() as f64), factors, ranks: present, ..all }
            }
            Reduction::Sums(weights) => Terms { total: sum_up_the_tree(weights), ..all },
        })
    }

    /// Terms of a sum over `leaves` leaves, weighted already, that is divided by `total`.
    pub(crate) fn of_leaves(dtype: DType, leaves: usize, total: f64) -> Result<Terms> {
        Ok(Terms { total, ..Terms::new(dtype, Reduction::Op(ReduceOp::Sum), leaves)? })
    }

    /// True if these terms are those of the weighted `reduction` of so many ranks.
    pub(crate) fn are_of(&self, reduction: Reduction<'_>, ranks: usize) -> Result<bool> {
        let theirs = Terms::new(self.dtype, reduction, ranks)?;
        Ok((&self.ranks, &self.factors, self.total) == (&theirs.ranks, &theirs.factors, theirs.total))
    }

    pub(crate) fn ranks(&self) -> &[usize] {
        &self.ranks
    }

    /// Bytes per element of the partial result of these places.
    pub(crate) fn partial_bytes(&self, places: &Range<usize>) -> usize {
        if places.len() == 1 { self.dtype.size_bytes() } else { accumulator(self.dtype).size_bytes() }
    }

    /// Reduces `leaves`, which are in order and make up the subtree of `places`, into `out`.
    pub(crate) fn reduce(&self, places: Range<usize>, leaves: &[Leaf<'_>], form: Form, out: &mut [u8]) -> Result<()> {
        let (to, total) = match form {
            Form::Final => (self.dtype, self.total),
            Form::Partial if places.len() == 1 => {
                // One rank's elements as they are.
                leaves.iter().for_each(|leaf| out.copy_from_slice(leaf.bytes));
                return Ok(());
            }
            Form::Partial => (accumulator(self.dtype), 1.0),
        };
        let size = to.size_bytes();
        let levels = if self.is_one_pass(leaves) { 0 } else { places.len().next_power_of_two().trailing_zeros() };
        let mut scratch = vec![0; 2 * levels as usize * BLOCK * accumulator(self.dtype).size_bytes()];
        for (nth, out) in out.chunks_mut(BLOCK * size).enumerate() {
            let block = Block { start: nth * BLOCK, len: out.len() / size, to, total };
            self.subtree(places.clone(), leaves, block, &mut scratch, out)?;
        }
        Ok(())
    }

    /// True if one pass takes all leaves.
    fn is_one_pass(&self, leaves: &[Leaf<'_>]) -> bool {
        leaves.len() == 1
            || leaves.len() <= self.fold.arity(self.dtype) && leaves.iter().all(|leaf| leaf.places.len() == 1)
    }

    fn subtree(
        &self,
        places: Range<usize>,
        leaves: &[Leaf<'_>],
        block: Block,
        scratch: &mut [u8],
        out: &mut [u8],
    ) -> Result<()> {
        let (accumulator, Block { to, total, .. }) = (accumulator(self.dtype), block);
        let part = |size: usize| block.start * size..(block.start + block.len) * size;
        if self.is_one_pass(leaves) {
            let single = places.len() == leaves.len();
            let from = if single { self.dtype } else { accumulator };
            let mut sources = [Source::Output; MAX_SOURCES];
            let mut weights = Weights { total, ..Weights::ONE };
            for (nth, leaf) in leaves.iter().enumerate() {
                sources[nth] = Source::Bytes(&leaf.bytes[part(from.size_bytes())]);
                if let Some(factors) = self.factors.as_ref().filter(|_| single) {
                    weights.factors[nth] = factors[leaf.places.start];
                }
            }
            return self.pass(from, to, &weights).run(&sources[..leaves.len()], out);
        }
        let (left, right) = halves(places);
        let (left_leaves, right_leaves) =
            leaves.split_at(leaves.partition_point(|leaf| leaf.places.start < right.start));
        let slot = block.len * accumulator.size_bytes();
        let (slots, scratch) = scratch.split_at_mut(2 * BLOCK * accumulator.size_bytes());
        let (left_slot, right_slot) = slots.split_at_mut(BLOCK * accumulator.size_bytes());
        let mut sides = [Source::Output; 2];
        let of_sides = [(left, left_leaves, &mut left_slot[..slot]), (right, right_leaves, &mut right_slot[..slot])];
        for (side, (places, leaves, room)) in sides.iter_mut().zip(of_sides) {
            *side = match leaves {
                // A partial result is read where it is.
                [leaf] if places.len() > 1 => Source::Bytes(&leaf.bytes[part(accumulator.size_bytes())]),
                _ => {
                    self.subtree(places, leaves, Block { to: accumulator, total: 1.0, ..block }, scratch, room)?;
                    Source::Bytes(room)
                }
            };
        }
        self.pass(accumulator, to, &Weights { total, ..Weights::ONE }).run(&sides, out)
    }

    /// Vector instructions leave accumulated bf16 in an order of their own, unlike other machines: such passes are
    /// portable.
    fn pass<'w>(&self, from: DType, to: DType, weights: &'w Weights) -> Pass<'w> {
        let isa = if self.dtype == DType::BF16 && from != to { Isa::Portable } else { self.isa };
        Pass { isa, fold: self.fold, from, to, weights }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::super::reduce;
    use super::*;

    /// The subtrees of `places` that lie in one part each, where `part_of` says the part of each place.
    fn cut(places: Range<usize>, part_of: &[usize], out: &mut Vec<Range<usize>>) {
        if part_of[places.clone()].windows(2).all(|pair| pair[0] == pair[1]) {
            return out.push(places);
        }
        let (left, right) = halves(places);
        cut(left, part_of, out);
        cut(right, part_of, out);
    }

    const DTYPES: [DType; 9] =
        [DType::F64, DType::F32, DType::F16, DType::BF16, DType::I64, DType::I32, DType::I8, DType::U8, DType::Bool];

    proptest! {
        #[test]
        fn parts_put_together_have_the_bits_of_the_whole(
            dtype in proptest::sample::select(&DTYPES[..]),
            ops in proptest::sample::select(vec![
                None, Some(ReduceOp::Sum), Some(ReduceOp::Mean), Some(ReduceOp::Min), Some(ReduceOp::Max),
                Some(ReduceOp::Product),
            ]),
            part_of in proptest::collection::vec(0_usize..3, 1..11),
            weights in proptest::collection::vec(prop_oneof![Just(0.0), Just(1.0), 0.1_f64..9.0], 11),
            // More than a block now and then.
            len in prop_oneof![0_usize..70, 1000_usize..1100],
            seed in any::<u64>(),
            split in 0_usize..1100,
            sums in any::<bool>(),
        ) {
            let n = part_of.len();
            let weights = &weights[..n];
            let reduction = match ops {
                Some(op) => Reduction::Op(op),
                None if sums => Reduction::Sums(weights),
                None => Reduction::Weighted(weights),
            };
            let op = ops.unwrap_or(ReduceOp::Mean);
            prop_assume!(op.supports(dtype) && weights.iter().any(|weight| *weight > 0.0));
            let mut state = seed;
            let mut byte = || {
                state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
                (state >> 56) as u8
            };
            let inputs: Vec<Vec<u8>> =
                (0..n).map(|_| (0..len * dtype.size_bytes()).map(|_| byte()).collect()).collect();
            let mut expected = vec![0; len * dtype.size_bytes()];
            let sources: Vec<_> = inputs.iter().map(|input| Source::Bytes(input)).collect();
            reduce(dtype, reduction, &sources, &mut expected).unwrap();

            let terms = Terms::new(dtype, reduction, n).unwrap();
            let parts: Vec<usize> = terms.ranks().iter().map(|rank| part_of[*rank]).collect();
            let mut subtrees = Vec::new();
            cut(0..parts.len(), &parts, &mut subtrees);
            let partials: Vec<Vec<u8>> = subtrees
                .iter()
                .map(|places| {
                    let leaves: Vec<Leaf<'_>> = places
                        .clone()
                        .map(|place| Leaf { places: place..place + 1, bytes: &inputs[terms.ranks()[place]] })
                        .collect();
                    let size = terms.partial_bytes(places);
                    let mut partial = vec![0; len * size];
                    // In two runs, as pieces come.
                    let at = split.min(len);
                    let (head, tail) = partial.split_at_mut(at * size);
                    for (range, out) in [(0..at, head), (at..len, tail)] {
                        let range = range.start * dtype.size_bytes()..range.end * dtype.size_bytes();
                        let part = |leaf: &Leaf<'_>| {
                            let bytes = &inputs[terms.ranks()[leaf.places.start]][range.clone()];
                            Leaf { places: leaf.places.clone(), bytes }
                        };
                        let leaves: Vec<_> = leaves.iter().map(part).collect();
                        terms.reduce(places.clone(), &leaves, Form::Partial, out).unwrap();
                    }
                    partial
                })
                .collect();
            let leaves: Vec<_> =
                subtrees.iter().zip(&partials).map(|(places, bytes)| Leaf { places: places.clone(), bytes }).collect();
            let mut got = vec![0; len * dtype.size_bytes()];
            terms.reduce(0..parts.len(), &leaves, Form::Final, &mut got).unwrap();
            prop_assert!(got == expected, "{dtype} {reduction:?} of {part_of:?}");
        }
    }
}
