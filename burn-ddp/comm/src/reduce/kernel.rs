//! One pass over memory: a few sources, all read once, become one.

// Counting over arrays of known length is what becomes straight vector code.
#![allow(clippy::needless_range_loop)]

use half::{bf16, f16};

use super::Source;
use super::element::{Flag, Float, Number, Stored};
use super::simd::SimdElement;
#[cfg(target_arch = "x86_64")]
use super::x86;
use crate::{DType, Error, Result};

/// Sources of one pass at most.
pub(super) const MAX_SOURCES: usize = 4;

/// What two elements become.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Fold {
    Sum,
    Min,
    Max,
    Product,
}

impl Fold {
    /// How many sources of `dtype` a pass takes: the sums that training lives on get loops for any number of them.
    pub(super) fn arity(self, dtype: DType) -> usize {
        if self == Fold::Sum && dtype.is_float() { MAX_SOURCES } else { 2 }
    }
}

/// What a sum of floats multiplies its sources by, and divides by in the end. Ones change nothing.
#[derive(Clone, Copy, Debug)]
pub(super) struct Weights {
    pub(super) factors: [f64; MAX_SOURCES],
    pub(super) total: f64,
}

impl Weights {
    pub(super) const ONE: Weights = Weights { factors: [1.0; MAX_SOURCES], total: 1.0 };
}

/// The instructions that passes use.
#[derive(Clone, Copy, Debug)]
pub(super) enum Isa {
    /// What every processor of this architecture has.
    Portable,
    #[cfg(target_arch = "x86_64")]
    Avx2(x86::Avx2),
    #[cfg(target_arch = "x86_64")]
    Avx512(x86::Avx512),
}

impl Isa {
    /// All that this processor has, best last.
    pub(super) fn all() -> impl Iterator<Item = Isa> {
        #[cfg(target_arch = "x86_64")]
        let more = [x86::Avx2::detect().map(Isa::Avx2), x86::Avx512::detect().map(Isa::Avx512)];
        #[cfg(not(target_arch = "x86_64"))]
        let more = [None; 0];
        [Some(Isa::Portable)].into_iter().chain(more).flatten()
    }
}

/// A pass: what is done to what.
#[derive(Clone, Copy, Debug)]
pub(super) struct Pass<'a> {
    pub(super) isa: Isa,
    pub(super) fold: Fold,
    /// Of the sources.
    pub(super) from: DType,
    /// Of the result: like the sources, or what they are accumulated in, or the other way round.
    pub(super) to: DType,
    pub(super) weights: &'a Weights,
}

impl Pass<'_> {
    /// Reduces `sources`, in order and as many as [`Fold::arity`] at most, into `out`; all have the same number of whole elements.
    /// [`Source::Output`] only if `from` is `to`.
    pub(super) fn run(&self, sources: &[Source<'_>], out: &mut [u8]) -> Result<()> {
        use DType::*;
        match (self.from, self.to) {
            (F32, F32) => self.f32s::<f32, f32>(sources, out),
            (F16, F16) => self.f32s::<f16, f16>(sources, out),
            (F16, F32) => self.f32s::<f16, f32>(sources, out),
            (F32, F16) => self.f32s::<f32, f16>(sources, out),
            (BF16, BF16) => self.f32s::<bf16, bf16>(sources, out),
            (BF16, F32) => self.f32s::<bf16, f32>(sources, out),
            (F32, BF16) => self.f32s::<f32, bf16>(sources, out),
            (F64, F64) => self.f64s(sources, out),
            (I64, I64) => self.integers::<i64>(sources, out),
            (I32, I32) => self.integers::<i32>(sources, out),
            (I8, I8) => self.integers::<i8>(sources, out),
            (U8, U8) => self.integers::<u8>(sources, out),
            (Bool, Bool) => self.integers::<Flag>(sources, out),
            (from, to) => {
                return Err(Error::Internal { message: format!("no kernel reduces {from} into {to}") });
            }
        }
        Ok(())
    }

    fn f32s<In: SimdElement, Out: SimdElement>(&self, sources: &[Source<'_>], out: &mut [u8]) {
        match self.isa {
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512(isa) => isa.f32s::<In, Out>(self.fold, self.weights, sources, out),
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2(isa) => isa.f32s::<In, Out>(self.fold, self.weights, sources, out),
            Isa::Portable => portable_f32s::<In, Out>(self.fold, self.weights, sources, out),
        }
    }

    fn f64s(&self, sources: &[Source<'_>], out: &mut [u8]) {
        match self.isa {
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512(x86::Avx512 { avx2: isa, .. }) | Isa::Avx2(isa) => {
                isa.f64s(self.fold, self.weights, sources, out)
            }
            Isa::Portable => floats::<f64, f64>(self.fold, self.weights, sources, out),
        }
    }

    fn integers<L: Stored>(&self, sources: &[Source<'_>], out: &mut [u8]) {
        match self.isa {
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512(x86::Avx512 { avx2: isa, .. }) | Isa::Avx2(isa) => isa.integers::<L>(self.fold, sources, out),
            Isa::Portable => pairs::<L, L>(self.fold, sources, out),
        }
    }
}

/// Runs `$body` with `$array` being the slice `$slice` as an array, of any length up to [`MAX_SOURCES`].
macro_rules! with_array {
    ($slice:expr, |$array:ident: $ty:ty| $body:expr) => {
        match $slice.len() {
            1 => with_array!(@ $slice, 1, $array: $ty, $body),
            2 => with_array!(@ $slice, 2, $array: $ty, $body),
            3 => with_array!(@ $slice, 3, $array: $ty, $body),
            4 => with_array!(@ $slice, 4, $array: $ty, $body),
            _ => {}
        }
    };
    (@ $slice:expr, $len:literal, $array:ident: $ty:ty, $body:expr) => {
        if let Some($array) = $slice.first_chunk::<$len>() {
            let $array: &[$ty; $len] = $array;
            $body
        }
    };
}

pub(super) use with_array;

/// The tree over the elements of `x`, in order: neighbours pair up until one is left.
#[inline(always)]
fn tree<T: Copy, const K: usize>(mut x: [T; K], fold: impl Fn(T, T) -> T) -> T {
    let mut len = K;
    while len > 1 {
        for nth in 0..len / 2 {
            x[nth] = fold(x[2 * nth], x[2 * nth + 1]);
        }
        if len % 2 == 1 {
            x[len / 2] = x[len - 1];
        }
        len = len.div_ceil(2);
    }
    x[0]
}

/// How a sum is divided by its total. Multiplying by the inverse of a power of two rounds like dividing.
#[derive(Clone, Copy)]
pub(super) struct Scale<T> {
    pub(super) divides: bool,
    pub(super) by: T,
}

impl Scale<f32> {
    #[inline(always)]
    pub(super) fn f32(total: f64) -> Scale<f32> {
        let total = total as f32;
        let divides = total.to_bits().trailing_zeros() < f32::MANTISSA_DIGITS - 1;
        Scale { divides, by: if divides { total } else { 1.0 / total } }
    }
}

/// The sum, minimum, maximum or product of floats, element by element; the definition that vector instructions are held to.
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

/// Those that are accumulated in f32, with what every processor has.
#[inline(never)]
pub(super) fn portable_f32s<In: SimdElement, Out: SimdElement>(
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
    tree(x, T::add)
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

/// The loop of all that is done element by element. What is in the output waits aside, a little at a time, so that the compiler sees a
/// loop from memory to other memory.
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
