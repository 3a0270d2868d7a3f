//! Loops over elements one by one: the definition of each operation, compiled for what every processor has and, where
//! [`x86`](super::x86) calls them, for more.

// Counting over arrays of known length compiles to straight vector code.
#![allow(clippy::needless_range_loop)]

use super::element::{Float, Number, Stored};
use super::fold_and_weights::{Fold, Weights};
use super::source::Source;
use super::tree::{MAX_SOURCES, fold_tree, with_array};

/// The sum, minimum, maximum or product of floats, element by element; the definition that vector instructions are held
/// to.
#[inline(always)]
pub(super) fn floats<In: Stored<Acc: Float>, Out: Stored<Acc = In::Acc>>(
    fold: Fold,
    weights: &Weights,
    sources: &[Source<'_>],
    out: &mut [u8],
) {
    if fold != Fold::Sum {
        return pairs::<In, Out>(fold, sources, out);
    }
    let total = In::Acc::from_f64(weights.total);
    with_array!(sources, |sources: Source<'_>| {
        let factors = weights.factors.map(In::Acc::from_f64);
        elements::<In, Out, _>(sources, out, |x| sum(x, &factors).div(total).canonical());
    });
}

/// [`floats`] of types that accumulate in f32, by instructions that every processor has.
#[inline(never)]
pub(super) fn portable_f32s<In: Stored<Acc = f32>, Out: Stored<Acc = f32>>(
    fold: Fold,
    weights: &Weights,
    sources: &[Source<'_>],
    out: &mut [u8],
) {
    floats::<In, Out>(fold, weights, sources, out);
}

#[inline(always)]
fn sum<T: Float, const K: usize>(mut x: [T; K], factors: &[T; MAX_SOURCES]) -> T {
    for nth in 0..K {
        x[nth] = x[nth].mul(factors[nth]);
    }
    fold_tree!(x, K, |left, right| left.add(right))
}

/// One source or two, without weights.
#[inline(always)]
pub(super) fn pairs<In: Stored, Out: Stored<Acc = In::Acc>>(fold: Fold, sources: &[Source<'_>], out: &mut [u8]) {
    match (sources, fold) {
        ([a], _) => elements::<In, Out, 1>(&[*a], out, |[x]| x.canonical()),
        ([a, b], Fold::Sum) => elements::<In, Out, 2>(&[*a, *b], out, |[x, y]| x.add(y).canonical()),
        ([a, b], Fold::Min) => elements::<In, Out, 2>(&[*a, *b], out, |[x, y]| x.min(y).canonical()),
        ([a, b], Fold::Max) => elements::<In, Out, 2>(&[*a, *b], out, |[x, y]| x.max(y).canonical()),
        ([a, b], Fold::Product) => elements::<In, Out, 2>(&[*a, *b], out, |[x, y]| x.mul(y).canonical()),
        _ => {}
    }
}

/// The loop over elements, for all operations. Elements of the output are copied aside, a little at a time, so that the
/// compiler sees a loop from memory to other memory.
#[inline(always)]
fn elements<In: Stored, Out: Stored<Acc = In::Acc>, const K: usize>(
    sources: &[Source<'_>; K],
    out: &mut [u8],
    combine: impl Fn([In::Acc; K]) -> In::Acc,
) {
    let (from, to) = (size_of::<In::Bytes>(), size_of::<Out::Bytes>());
    let in_place = sources.iter().any(|source| matches!(source, Source::Output));
    let mut aside = Aside([0; ASIDE_BYTES]);
    let step = if in_place { ASIDE_BYTES } else { out.len().max(1) };
    let mut start = 0;
    for out in out.chunks_mut(step) {
        if in_place {
            aside.0[..out.len()].copy_from_slice(out);
        }
        let len = out.len() / to;
        let mut slices: [&[In::Bytes]; K] = [&[]; K];
        for (slice, source) in slices.iter_mut().zip(sources) {
            *slice = bytemuck::cast_slice(match source {
                Source::Bytes(bytes) => &bytes[start * from..(start + len) * from],
                Source::Output => &aside.0[..len * from],
            });
        }
        let out: &mut [Out::Bytes] = bytemuck::cast_slice_mut(out);
        let slices = slices.map(|slice| &slice[..len]);
        for at in 0..len {
            let mut x = [In::Acc::ZERO; K];
            for nth in 0..K {
                x[nth] = In::load(slices[nth][at]);
            }
            out[at] = Out::store(combine(x));
        }
        start += len;
    }
}

const ASIDE_BYTES: usize = 256;

/// Memory for [`elements`].
#[repr(align(64))]
struct Aside([u8; ASIDE_BYTES]);
