//! One pass over memory: a few sources, all read once, are reduced to one, by the best instructions of the processor.

use half::{bf16, f16};

use super::element::{Flag, Stored};
use super::fold_and_weights::{Fold, Weights};
use super::portable::{floats, pairs, portable_f32s};
use super::simd::SimdElement;
use super::source::Source;
#[cfg(target_arch = "x86_64")]
use super::x86;
use crate::{DType, Error, Result};

/// Vector instructions of a pass.
#[derive(Clone, Copy, Debug)]
pub(super) enum Isa {
    /// Instructions that every processor of this architecture has.
    Portable,
    #[cfg(target_arch = "x86_64")]
    Avx2(x86::Avx2),
    #[cfg(target_arch = "x86_64")]
    Avx512(x86::Avx512),
}

impl Isa {
    /// The instructions that this processor has, best last.
    pub(super) fn all() -> impl Iterator<Item = Isa> {
        #[cfg(target_arch = "x86_64")]
        let more = [x86::Avx2::detect().map(Isa::Avx2), x86::Avx512::detect().map(Isa::Avx512)];
        #[cfg(not(target_arch = "x86_64"))]
        let more = [None; 0];
        [Some(Isa::Portable)].into_iter().chain(more).flatten()
    }
}

/// One pass: its operation and its element types.
#[derive(Clone, Copy, Debug)]
pub(super) struct Pass<'a> {
    pub(super) isa: Isa,
    pub(super) fold: Fold,
    /// Type of the sources.
    pub(super) from: DType,
    /// Type of the result: that of the sources, or one of the two is the accumulator of the other.
    pub(super) to: DType,
    pub(super) weights: &'a Weights,
}

impl Pass<'_> {
    /// Reduces `sources`, in order and as many as [`Fold::arity`] at most, into `out`; all have the same number of
    /// whole elements. A source may be [`Source::Output`] only if `from` is `to`.
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
