//! The numerics contract: the one place where elements of several ranks become one.
//!
//! Per element, a balanced binary tree over the ranks in order: (0,1), (2,3), …, an odd last one carried up, then the
//! same over the results. Sums of floats are left + right in the accumulator type (f32 for f16, bf16 and f32; f64 for
//! f64) without fused multiply-add, then at most one division, then one rounding. Integers wrap. min and max yield NaN
//! if either side is NaN. So the bits depend on nothing but the inputs.

use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};

use crate::{DType, Error, ReduceOp, Result};

/// Elements reduced at a time: the whole tree of a block stays in the first cache level.
const BLOCK: usize = 1024;

/// Where the elements of one rank are.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Source<'a> {
    /// Came from a peer.
    Bytes(&'a [u8]),
    /// Are in the output buffer, to be replaced.
    Output,
}

/// How the sources, one per rank in rank order, become one.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Reduction<'a> {
    Op(ReduceOp),
    /// Σ wᵣxᵣ / Σ wᵣ with these weights, which are finite, not negative, and not all zero.
    Weighted(&'a [f64]),
}

/// Reduces `sources`, each as long as `out`, into `out`.
pub(crate) fn reduce(dtype: DType, reduction: Reduction<'_>, sources: &[Source<'_>], out: &mut [u8]) -> Result<()> {
    match dtype {
        DType::F64 => float::<f64>(reduction, sources, out),
        DType::F32 => float::<f32>(reduction, sources, out),
        DType::F16 => float::<f16>(reduction, sources, out),
        DType::BF16 => float::<bf16>(reduction, sources, out),
        DType::I64 => integer::<i64>(dtype, reduction, sources, out),
        DType::I32 => integer::<i32>(dtype, reduction, sources, out),
        DType::I8 => integer::<i8>(dtype, reduction, sources, out),
        DType::U8 => integer::<u8>(dtype, reduction, sources, out),
        DType::Bool => boolean(reduction, sources, out),
    }
}

fn float<L: Lane<Acc: Float>>(reduction: Reduction<'_>, sources: &[Source<'_>], out: &mut [u8]) -> Result<()> {
    let none = |x: L::Acc| x;
    match reduction {
        Reduction::Op(ReduceOp::Sum) => tree::<L>(sources, |_, _| {}, L::Acc::add, none, out),
        Reduction::Op(ReduceOp::Mean) => {
            let count = L::Acc::from_f64(sources.len() as f64);
            tree::<L>(sources, |_, _| {}, L::Acc::add, |x| x.div(count), out);
        }
        Reduction::Op(ReduceOp::Min) => tree::<L>(sources, |_, _| {}, L::Acc::min, none, out),
        Reduction::Op(ReduceOp::Max) => tree::<L>(sources, |_, _| {}, L::Acc::max, none, out),
        Reduction::Op(ReduceOp::Product) => tree::<L>(sources, |_, _| {}, L::Acc::mul, none, out),
        Reduction::Weighted(weights) => weighted::<L>(weights, sources, out),
    }
    Ok(())
}

/// The weighted mean over the ranks with a weight, as if the others were not there.
fn weighted<L: Lane<Acc: Float>>(weights: &[f64], sources: &[Source<'_>], out: &mut [u8]) {
    let (weights, sources): (Vec<f64>, Vec<Source<'_>>) =
        weights.iter().zip(sources).filter(|(weight, _)| **weight > 0.0).unzip();
    if weights.windows(2).all(|pair| pair[0] == pair[1]) {
        let count = L::Acc::from_f64(weights.len() as f64);
        return tree::<L>(&sources, |_, _| {}, L::Acc::add, |x| x.div(count), out);
    }
    // A power of two that brings the largest weight near 1 changes no ratio, and neither weights nor products overflow.
    let largest = weights.iter().copied().fold(0.0, f64::max);
    let scale = f64::powi(2.0, -(largest.log2().floor() as i32).clamp(-1000, 1000));
    let weights: Vec<f64> = weights.iter().map(|weight| weight * scale).collect();
    let total = L::Acc::from_f64(weights.iter().sum());
    let factors: Vec<L::Acc> = weights.iter().map(|weight| L::Acc::from_f64(*weight)).collect();
    let scale_leaf = |index: usize, leaf: &mut [L::Acc]| leaf.iter_mut().for_each(|x| *x = x.mul(factors[index]));
    tree::<L>(&sources, scale_leaf, L::Acc::add, |x| x.div(total), out);
}

fn integer<L: Lane<Acc: Number>>(
    dtype: DType,
    reduction: Reduction<'_>,
    sources: &[Source<'_>],
    out: &mut [u8],
) -> Result<()> {
    let none = |x: L::Acc| x;
    match reduction {
        Reduction::Op(ReduceOp::Sum) => tree::<L>(sources, |_, _| {}, L::Acc::add, none, out),
        Reduction::Op(ReduceOp::Min) => tree::<L>(sources, |_, _| {}, L::Acc::min, none, out),
        Reduction::Op(ReduceOp::Max) => tree::<L>(sources, |_, _| {}, L::Acc::max, none, out),
        Reduction::Op(ReduceOp::Product) => tree::<L>(sources, |_, _| {}, L::Acc::mul, none, out),
        Reduction::Op(ReduceOp::Mean) | Reduction::Weighted(_) => return Err(unsupported(dtype)),
    }
    Ok(())
}

fn boolean(reduction: Reduction<'_>, sources: &[Source<'_>], out: &mut [u8]) -> Result<()> {
    match reduction {
        Reduction::Op(ReduceOp::Min) => tree::<Flag>(sources, |_, _| {}, Number::min, |x| x, out),
        Reduction::Op(ReduceOp::Max) => tree::<Flag>(sources, |_, _| {}, Number::max, |x| x, out),
        _ => return Err(unsupported(DType::Bool)),
    }
    Ok(())
}

fn unsupported(dtype: DType) -> Error {
    Error::Internal { message: format!("an undefined reduction of {dtype} reached the kernels") }
}

/// The tree, block by block. Finished subtrees wait on a stack, like the ones of a binary counter: after rank `r`, as
/// many merges as `r` has trailing ones.
fn tree<L: Lane>(
    sources: &[Source<'_>],
    prepare_leaf: impl Fn(usize, &mut [L::Acc]),
    fold: impl Fn(L::Acc, L::Acc) -> L::Acc + Copy,
    finish: impl Fn(L::Acc) -> L::Acc,
    out: &mut [u8],
) {
    let block = BLOCK.min(out.len() / L::BYTES).max(1);
    let levels = (sources.len().ilog2() + 2) as usize;
    let mut stack = vec![L::ZERO; levels * block];

    let mut start = 0;
    for out in out.chunks_mut(block * L::BYTES) {
        let len = out.len() / L::BYTES;
        let mut depth = 0;
        let merge = |stack: &mut [L::Acc], depth: &mut usize| {
            let (below, top) = stack.split_at_mut((*depth - 1) * block);
            let left = &mut below[(*depth - 2) * block..][..len];
            left.iter_mut().zip(&top[..len]).for_each(|(left, right)| *left = fold(*left, *right));
            *depth -= 1;
        };
        for (index, source) in sources.iter().enumerate() {
            let bytes = match source {
                Source::Bytes(bytes) => &bytes[start..start + out.len()],
                Source::Output => &*out,
            };
            let leaf = &mut stack[depth * block..][..len];
            L::load(bytes, leaf);
            prepare_leaf(index, leaf);
            depth += 1;
            for _ in 0..index.trailing_ones() {
                merge(&mut stack, &mut depth);
            }
        }
        while depth > 1 {
            merge(&mut stack, &mut depth);
        }
        let result = &mut stack[..len];
        result.iter_mut().for_each(|x| *x = finish(*x));
        L::store(result, out);
        start += out.len();
    }
}

/// An element type in memory, and the type it is accumulated in.
trait Lane {
    type Acc: Copy;
    const BYTES: usize;
    const ZERO: Self::Acc;
    /// Bytes need not be aligned. At most [`BLOCK`] elements.
    fn load(bytes: &[u8], elements: &mut [Self::Acc]);
    fn store(elements: &[Self::Acc], bytes: &mut [u8]);
}

/// Operations of accumulators; integers wrap.
trait Number: Copy {
    fn add(self, right: Self) -> Self;
    fn mul(self, right: Self) -> Self;
    fn min(self, right: Self) -> Self;
    fn max(self, right: Self) -> Self;
}

trait Float: Number {
    fn div(self, right: Self) -> Self;
    fn from_f64(value: f64) -> Self;
}

macro_rules! plain_lane {
    ($($ty:ty),*) => {$(
        impl Lane for $ty {
            type Acc = $ty;
            const BYTES: usize = size_of::<$ty>();
            const ZERO: $ty = 0 as $ty;

            fn load(bytes: &[u8], elements: &mut [$ty]) {
                let (chunks, _) = bytes.as_chunks();
                elements.iter_mut().zip(chunks).for_each(|(x, bytes)| *x = <$ty>::from_le_bytes(*bytes));
            }

            fn store(elements: &[$ty], bytes: &mut [u8]) {
                let (chunks, _) = bytes.as_chunks_mut();
                chunks.iter_mut().zip(elements).for_each(|(bytes, x)| *bytes = x.to_le_bytes());
            }
        }
    )*};
}

plain_lane!(f64, f32, i64, i32, i8, u8);

/// Converted with the processor's instructions, where it has them.
impl Lane for f16 {
    type Acc = f32;
    const BYTES: usize = 2;
    const ZERO: f32 = 0.0;

    fn load(bytes: &[u8], elements: &mut [f32]) {
        let mut halves = [f16::ZERO; BLOCK];
        let halves = &mut halves[..elements.len()];
        let (chunks, _) = bytes.as_chunks();
        halves.iter_mut().zip(chunks).for_each(|(x, bytes)| *x = f16::from_le_bytes(*bytes));
        halves.convert_to_f32_slice(elements);
    }

    fn store(elements: &[f32], bytes: &mut [u8]) {
        let mut halves = [f16::ZERO; BLOCK];
        let halves = &mut halves[..elements.len()];
        halves.convert_from_f32_slice(elements);
        let (chunks, _) = bytes.as_chunks_mut();
        chunks.iter_mut().zip(halves).for_each(|(bytes, x)| *bytes = x.to_le_bytes());
    }
}

/// The upper half of an f32. Without branches, so that loops over it become vector instructions.
impl Lane for bf16 {
    type Acc = f32;
    const BYTES: usize = 2;
    const ZERO: f32 = 0.0;

    fn load(bytes: &[u8], elements: &mut [f32]) {
        let (chunks, _) = bytes.as_chunks();
        let widen = |bytes: &[u8; 2]| f32::from_bits(u32::from(u16::from_le_bytes(*bytes)) << 16);
        elements.iter_mut().zip(chunks).for_each(|(x, bytes)| *x = widen(bytes));
    }

    fn store(elements: &[f32], bytes: &mut [u8]) {
        let (chunks, _) = bytes.as_chunks_mut();
        chunks.iter_mut().zip(elements).for_each(|(bytes, x)| *bytes = round_to_bf16(*x).to_le_bytes());
    }
}

/// The bits of the nearest bf16, ties to even; NaN stays NaN.
fn round_to_bf16(x: f32) -> u16 {
    let bits = x.to_bits();
    let even = (bits >> 16) & 1;
    let rounded = bits.wrapping_add(0x7fff + even) >> 16;
    let quiet_nan = (bits >> 16) | 0x40;
    (if x.is_nan() { quiet_nan } else { rounded }) as u16
}

/// A bool as a byte: 0, or anything else.
struct Flag;

impl Lane for Flag {
    type Acc = u8;
    const BYTES: usize = 1;
    const ZERO: u8 = 0;

    fn load(bytes: &[u8], elements: &mut [u8]) {
        elements.iter_mut().zip(bytes).for_each(|(x, byte)| *x = u8::from(*byte != 0));
    }

    fn store(elements: &[u8], bytes: &mut [u8]) {
        bytes.copy_from_slice(elements);
    }
}

macro_rules! integers {
    ($($ty:ty),*) => {$(
        impl Number for $ty {
            fn add(self, right: Self) -> Self {
                self.wrapping_add(right)
            }

            fn mul(self, right: Self) -> Self {
                self.wrapping_mul(right)
            }

            fn min(self, right: Self) -> Self {
                Ord::min(self, right)
            }

            fn max(self, right: Self) -> Self {
                Ord::max(self, right)
            }
        }
    )*};
}

integers!(i64, i32, i8, u8);

macro_rules! floats {
    ($($ty:ty),*) => {$(
        impl Number for $ty {
            fn add(self, right: Self) -> Self {
                self + right
            }

            fn mul(self, right: Self) -> Self {
                self * right
            }

            /// The right side unless the left is smaller or NaN: so a NaN on either side is the result.
            fn min(self, right: Self) -> Self {
                if self < right || self.is_nan() { self } else { right }
            }

            fn max(self, right: Self) -> Self {
                if self > right || self.is_nan() { self } else { right }
            }
        }

        impl Float for $ty {
            fn div(self, right: Self) -> Self {
                self / right
            }

            fn from_f64(value: f64) -> Self {
                value as $ty
            }
        }
    )*};
}

floats!(f64, f32);

#[cfg(test)]
mod tests {
    use super::*;

    fn f32s(op: Reduction<'_>, inputs: &[Vec<f32>]) -> Vec<f32> {
        let sources: Vec<Source<'_>> = inputs.iter().map(|input| Source::Bytes(bytemuck::cast_slice(input))).collect();
        let mut out = vec![0.0_f32; inputs[0].len()];
        reduce(DType::F32, op, &sources, bytemuck::cast_slice_mut(&mut out)).unwrap();
        out
    }

    /// The definition: pair up neighbours until one is left.
    fn by_levels(mut level: Vec<f32>) -> f32 {
        while level.len() > 1 {
            level = level.chunks(2).map(|pair| pair.iter().copied().reduce(|a, b| a + b).unwrap()).collect();
        }
        level[0]
    }

    #[test]
    fn the_tree_is_the_one_of_the_contract_for_any_world() {
        for world in 1..40 {
            let inputs: Vec<Vec<f32>> = (0..world)
                .map(|rank| (0..2500).map(|i| 1e3_f32.powi((rank * 7 + i) % 5 - 2) * (i as f32 + 0.1)).collect())
                .collect();
            let sums = f32s(Reduction::Op(ReduceOp::Sum), &inputs);
            for (i, sum) in sums.iter().enumerate() {
                let expected = by_levels(inputs.iter().map(|input| input[i]).collect());
                assert_eq!(sum.to_bits(), expected.to_bits(), "world {world} element {i}");
            }
        }
    }

    #[test]
    fn the_output_can_be_an_input_and_need_not_be_aligned() {
        let peer: Vec<u8> = [1.0_f32, 2.0].iter().flat_map(|x| x.to_le_bytes()).collect();
        let mut memory = [0_u8; 9];
        memory[1..].copy_from_slice(&peer);
        reduce(DType::F32, Reduction::Op(ReduceOp::Sum), &[Source::Output, Source::Bytes(&peer)], &mut memory[1..])
            .unwrap();
        assert_eq!(memory[1..5], 2.0_f32.to_le_bytes());
        assert_eq!(memory[5..], 4.0_f32.to_le_bytes());
    }

    #[test]
    fn extreme_weights_neither_overflow_nor_vanish() {
        let inputs = [vec![1.0], vec![3.0]];
        for unit in [f64::powi(2.0, 1020), 1.0, f64::powi(2.0, -1070)] {
            assert_eq!(f32s(Reduction::Weighted(&[unit, 3.0 * unit]), &inputs), [2.5], "{unit}");
        }
        assert_eq!(f32s(Reduction::Weighted(&[f64::MAX, f64::MAX / 4.0]), &inputs), [1.4]);
    }

    #[test]
    fn bf16_rounds_like_the_half_crate() {
        for upper in 0..=u16::MAX {
            for lower in [0, 1, 0x7fff, 0x8000, 0x8001, 0xffff] {
                let x = f32::from_bits(u32::from(upper) << 16 | lower);
                assert_eq!(round_to_bf16(x), bf16::from_f32(x).to_bits(), "{:#x}", x.to_bits());
            }
        }
    }

    #[test]
    fn what_is_undefined_is_an_error() {
        for (dtype, op) in [(DType::I32, ReduceOp::Mean), (DType::Bool, ReduceOp::Sum)] {
            assert!(reduce(dtype, Reduction::Op(op), &[Source::Output], &mut [0; 4]).is_err());
        }
    }
}
