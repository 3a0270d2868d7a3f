//! Thirty-two elements at a time, in vector registers.
//!
//! A [`Chunk`](SimdElement::Chunk) is held as two vectors: its first and second half; for bf16 the elements at even and
//! at odd places, since a pair of them is the two halves of a 32-bit word. A pass from or to accumulators in memory
//! leaves or finds them in that order; for passes between accumulators it makes no difference.

// Counting over arrays of known length compiles to straight vector code.
#![allow(clippy::needless_range_loop)]

use half::{bf16, f16};

use super::element::Stored;
use super::fold_and_weights::{Fold, Scale, Weights};
use super::portable::portable_f32s;
use super::source::Source;
use super::tree::{MAX_SOURCES, fold_tree, with_array};

/// Elements in two [`Simd::V`].
const LANES: usize = 32;

/// Vector instructions of this processor: a value of this type is the proof that it has them.
///
/// Each operation yields the bits that [`Number`](super::element::Number) yields for each element, apart from which NaN
/// a NaN is.
pub(super) trait Simd: Copy {
    /// Sixteen f32.
    type V: Copy;
    fn splat(self, x: f32) -> Self::V;
    fn add(self, left: Self::V, right: Self::V) -> Self::V;
    fn mul(self, left: Self::V, right: Self::V) -> Self::V;
    fn div(self, left: Self::V, right: Self::V) -> Self::V;
    fn min(self, left: Self::V, right: Self::V) -> Self::V;
    fn max(self, left: Self::V, right: Self::V) -> Self::V;
    fn canonical(self, x: Self::V) -> Self::V;
    fn load_f32(self, bytes: &[u8; 128]) -> [Self::V; 2];
    fn store_f32(self, x: [Self::V; 2], bytes: &mut [u8; 128]);
    fn load_f16(self, bytes: &[u8; 64]) -> [Self::V; 2];
    fn store_f16(self, x: [Self::V; 2], bytes: &mut [u8; 64]);
    fn load_bf16(self, bytes: &[u8; 64]) -> [Self::V; 2];
    /// Rounds; of NaNs `x` has only canonical ones.
    fn store_bf16(self, x: [Self::V; 2], bytes: &mut [u8; 64]);
}

/// An element type that is accumulated in f32.
pub(super) trait SimdElement: Stored<Acc = f32> {
    /// The bytes of thirty-two elements.
    type Chunk: bytemuck::Pod;
    fn load_chunk<S: Simd>(simd: S, bytes: &Self::Chunk) -> [S::V; 2];
    fn store_chunk<S: Simd>(simd: S, x: [S::V; 2], bytes: &mut Self::Chunk);
}

macro_rules! wide {
    ($($ty:ty, $load:ident, $store:ident;)*) => {$(
        impl SimdElement for $ty {
            type Chunk = [u8; LANES * size_of::<$ty>()];

            #[inline(always)]
            fn load_chunk<S: Simd>(simd: S, bytes: &Self::Chunk) -> [S::V; 2] {
                simd.$load(bytes)
            }

            #[inline(always)]
            fn store_chunk<S: Simd>(simd: S, x: [S::V; 2], bytes: &mut Self::Chunk) {
                simd.$store(x, bytes);
            }
        }
    )*};
}

wide! {
    f32, load_f32, store_f32;
    f16, load_f16, store_f16;
    bf16, load_bf16, store_bf16;
}

/// Like [`portable_f32s`], with vector instructions for all but the elements that do not fill a chunk.
#[inline(always)]
pub(super) fn f32s<S: Simd, In: SimdElement, Out: SimdElement>(
    simd: S,
    fold: Fold,
    weights: &Weights,
    sources: &[Source<'_>],
    out: &mut [u8],
) {
    match (sources, fold) {
        (_, Fold::Sum) if weights.factors == Weights::ONE.factors => {
            let sum = Sum::new(simd, weights.total);
            with_array!(sources, |sources: Source<'_>| chunks::<S, In, Out, _, _>(simd, sources, out, sum));
        }
        (_, Fold::Sum) => {
            let sum = WeightedSum::new(simd, weights);
            with_array!(sources, |sources: Source<'_>| chunks::<S, In, Out, _, _>(simd, sources, out, sum));
        }
        ([a], _) => chunks::<S, In, Out, _, 1>(simd, &[*a], out, Only),
        ([a, b], Fold::Min) => chunks::<S, In, Out, _, 2>(simd, &[*a, *b], out, Min),
        ([a, b], Fold::Max) => chunks::<S, In, Out, _, 2>(simd, &[*a, *b], out, Max),
        ([a, b], Fold::Product) => chunks::<S, In, Out, _, 2>(simd, &[*a, *b], out, Product),
        _ => {}
    }
    let (from, to) = (LANES * size_of::<In::Bytes>(), LANES * size_of::<Out::Bytes>());
    let done = out.len() / to;
    let rest = &mut out[done * to..];
    if !rest.is_empty() {
        let mut tails = [Source::Output; MAX_SOURCES];
        for (tail, source) in tails.iter_mut().zip(sources) {
            *tail = source.from(done * from);
        }
        portable_f32s::<In, Out>(fold, weights, &tails[..sources.len()], rest);
    }
}

/// The operation on one vector of each source. Not a closure, since it must be inlined into the loop that has the
/// vector instructions.
trait Combine<S: Simd, const K: usize>: Copy {
    fn combine(self, simd: S, x: [S::V; K]) -> S::V;
}

#[derive(Clone, Copy)]
struct Only;

impl<S: Simd> Combine<S, 1> for Only {
    #[inline(always)]
    fn combine(self, _: S, [x]: [S::V; 1]) -> S::V {
        x
    }
}

macro_rules! combine_two {
    ($($name:ident: $fold:ident;)*) => {$(
        #[derive(Clone, Copy)]
        struct $name;

        impl<S: Simd> Combine<S, 2> for $name {
            #[inline(always)]
            fn combine(self, simd: S, [x, y]: [S::V; 2]) -> S::V {
                simd.$fold(x, y)
            }
        }
    )*};
}

combine_two! {
    Min: min;
    Max: max;
    Product: mul;
}

/// The tree over the ranks, and the division.
#[derive(Clone, Copy)]
struct Sum<V> {
    divides: bool,
    by: V,
}

impl<V> Sum<V> {
    #[inline(always)]
    fn new<S: Simd<V = V>>(simd: S, total: f64) -> Sum<V> {
        let scale = Scale::f32(total);
        Sum { divides: scale.divides, by: simd.splat(scale.by) }
    }
}

impl<S: Simd, const K: usize> Combine<S, K> for Sum<S::V> {
    #[inline(always)]
    fn combine(self, simd: S, mut x: [S::V; K]) -> S::V {
        let sum = fold_tree!(x, K, |left, right| simd.add(left, right));
        if self.divides { simd.div(sum, self.by) } else { simd.mul(sum, self.by) }
    }
}

#[derive(Clone, Copy)]
struct WeightedSum<V> {
    factors: [V; MAX_SOURCES],
    sum: Sum<V>,
}

impl<V: Copy> WeightedSum<V> {
    #[inline(always)]
    fn new<S: Simd<V = V>>(simd: S, weights: &Weights) -> WeightedSum<V> {
        let mut factors = [simd.splat(1.0); MAX_SOURCES];
        for nth in 0..MAX_SOURCES {
            factors[nth] = simd.splat(weights.factors[nth] as f32);
        }
        WeightedSum { factors, sum: Sum::new(simd, weights.total) }
    }
}

impl<S: Simd, const K: usize> Combine<S, K> for WeightedSum<S::V> {
    #[inline(always)]
    fn combine(self, simd: S, mut x: [S::V; K]) -> S::V {
        for nth in 0..K {
            x[nth] = simd.mul(x[nth], self.factors[nth]);
        }
        self.sum.combine(simd, x)
    }
}

/// The loop over chunks, for all operations.
#[inline(always)]
fn chunks<S: Simd, In: SimdElement, Out: SimdElement, C: Combine<S, K>, const K: usize>(
    simd: S,
    sources: &[Source<'_>; K],
    out: &mut [u8],
    how: C,
) {
    let out_len = out.len() / size_of::<Out::Chunk>();
    let out: &mut [Out::Chunk] = bytemuck::cast_slice_mut(&mut out[..out_len * size_of::<Out::Chunk>()]);
    let mut slices: [Option<&[In::Chunk]>; K] = [None; K];
    for nth in 0..K {
        if let Source::Bytes(bytes) = sources[nth] {
            slices[nth] = Some(bytemuck::cast_slice(&bytes[..out_len * size_of::<In::Chunk>()]));
        }
    }
    for at in 0..out_len {
        let (mut first, mut second) = ([simd.splat(0.0); K], [simd.splat(0.0); K]);
        for nth in 0..K {
            [first[nth], second[nth]] = match slices[nth] {
                Some(slice) => In::load_chunk(simd, &slice[at]),
                None => Out::load_chunk(simd, &out[at]),
            };
        }
        let result = [simd.canonical(how.combine(simd, first)), simd.canonical(how.combine(simd, second))];
        Out::store_chunk(simd, result, &mut out[at]);
    }
}
