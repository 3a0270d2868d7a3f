//! A reduction, cut into blocks whose intermediate results stay in the first cache level.

use super::fold_and_weights::{Fold, Weights};
use super::kernel::{Isa, Pass};
use super::source::Source;
use super::tree::{MAX_SOURCES, subtree};
use crate::{DType, Result};

/// Least elements of a block, unless there are fewer in all.
const MIN_BLOCK: usize = 64;
/// Bytes of a block that is copied while it is in the first cache level.
const DIRECT_BLOCK: usize = 8192;

/// Memory for blocks, on the stack. Its size is a compromise: more would cost a small reduction time to clear, less
/// would cut a large one into more blocks.
#[repr(align(64))]
struct Scratch<const BYTES: usize>([u8; BYTES]);

/// A reduction, without the place of its result.
#[derive(Clone, Copy)]
pub(super) struct Plan<'a> {
    pub(super) isa: Isa,
    pub(super) fold: Fold,
    pub(super) dtype: DType,
    pub(super) sources: &'a [Source<'a>],
    /// Factor of each source, for a sum of floats.
    pub(super) factors: Option<&'a [f64]>,
    /// Divisor of a sum of floats.
    pub(super) total: f64,
}

/// Type in which elements of `dtype` are accumulated.
pub(super) fn accumulator(dtype: DType) -> DType {
    match dtype {
        DType::F16 | DType::BF16 => DType::F32,
        other => other,
    }
}

impl Plan<'_> {
    /// Reduces into `out`, and leaves the result in `also` as well. All lengths have been compared.
    pub(super) fn run(&self, out: &mut [u8], also: Option<&mut [u8]>) -> Result<()> {
        if self.is_one_pass() {
            return self.direct(out, also);
        }
        let per_element = (1 << self.shift()) + (self.slots() << self.accumulator_shift());
        let to = (out, also);
        match per_element * (to.0.len() >> self.shift()) {
            ..=1024 => self.in_blocks(&mut Scratch([0; 1024]).0, per_element, to),
            _ if per_element * MIN_BLOCK <= 16384 => self.in_blocks(&mut Scratch([0; 16384]).0, per_element, to),
            // A world of hundreds of ranks.
            _ => self.in_blocks(&mut vec![0; per_element * MIN_BLOCK], per_element, to),
        }
    }

    /// Reduces in one pass that writes to `out`. Blocks serve the copy to `also`, made while they are in the cache.
    fn direct(&self, out: &mut [u8], also: Option<&mut [u8]>) -> Result<()> {
        let Some(also) = also else { return self.one_pass(0, out) };
        for (nth, (block, copy)) in out.chunks_mut(DIRECT_BLOCK).zip(also.chunks_mut(DIRECT_BLOCK)).enumerate() {
            self.one_pass(nth * DIRECT_BLOCK, block)?;
            copy.copy_from_slice(block);
        }
        Ok(())
    }

    /// Reduces block by block, with intermediate results in `scratch`.
    fn in_blocks(
        &self,
        scratch: &mut [u8],
        per_element: usize,
        (out, mut also): (&mut [u8], Option<&mut [u8]>),
    ) -> Result<()> {
        let fitting = scratch.len() / per_element;
        let elements = if fitting > MIN_BLOCK { fitting - fitting % MIN_BLOCK } else { fitting.max(1) };
        let (target, slots) = scratch.split_at_mut(elements << self.shift());
        let mut start = 0;
        for block in out.chunks_mut(elements << self.shift()) {
            let target = &mut target[..block.len()];
            self.block(block, start, slots, target)?;
            block.copy_from_slice(target);
            if let Some(also) = &mut also {
                also[start..start + target.len()].copy_from_slice(target);
            }
            start += block.len();
        }
        Ok(())
    }

    /// Reduces the bytes of the sources from `start` on into `target`; `old` has the same bytes of the output, for
    /// [`Source::Output`].
    fn block(&self, old: &[u8], start: usize, slots: &mut [u8], target: &mut [u8]) -> Result<()> {
        let (len, arity) = (target.len(), self.arity());
        let slot = len >> self.shift() << self.accumulator_shift();
        let mut count = self.sources.len().div_ceil(arity);
        let (mut from, mut to) = slots.split_at_mut(count * slot);
        for (nth, room) in from.chunks_exact_mut(slot).enumerate() {
            let group = subtree(nth, arity, self.sources.len());
            let weights = Weights { factors: self.factors_of(group.clone()), total: 1.0 };
            let mut sources = [Source::Output; MAX_SOURCES];
            for (part, source) in sources.iter_mut().zip(&self.sources[group.clone()]) {
                *part = match source.part(start, len) {
                    Source::Output => Source::Bytes(old),
                    bytes => bytes,
                };
            }
            self.pass(self.dtype, accumulator(self.dtype), &weights).run(&sources[..group.len()], room)?;
        }
        loop {
            let next = count.div_ceil(arity);
            let last = next == 1;
            let (dtype, total) = if last { (self.dtype, self.total) } else { (accumulator(self.dtype), 1.0) };
            let weights = Weights { total, ..Weights::ONE };
            let pass = self.pass(accumulator(self.dtype), dtype, &weights);
            for (nth, group) in from[..count * slot].chunks(arity * slot).enumerate() {
                let mut sources = [Source::Output; MAX_SOURCES];
                let mut len = 0;
                for (source, slot) in sources.iter_mut().zip(group.chunks_exact(slot)) {
                    *source = Source::Bytes(slot);
                    len += 1;
                }
                let room = if last { &mut *target } else { &mut to[nth * slot..][..slot] };
                pass.run(&sources[..len], room)?;
            }
            if last {
                return Ok(());
            }
            std::mem::swap(&mut from, &mut to);
            count = next;
        }
    }

    /// Reduces the bytes from `start` on in one pass; for few enough sources.
    fn one_pass(&self, start: usize, target: &mut [u8]) -> Result<()> {
        let mut sources = [Source::Output; MAX_SOURCES];
        for (part, source) in sources.iter_mut().zip(self.sources) {
            *part = source.part(start, target.len());
        }
        let weights = Weights { factors: self.factors_of(0..self.sources.len()), total: self.total };
        self.pass(self.dtype, self.dtype, &weights).run(&sources[..self.sources.len()], target)
    }

    fn pass<'w>(&self, from: DType, to: DType, weights: &'w Weights) -> Pass<'w> {
        Pass { isa: self.isa, fold: self.fold, from, to, weights }
    }

    fn factors_of(&self, group: std::ops::Range<usize>) -> [f64; MAX_SOURCES] {
        let mut factors = [1.0; MAX_SOURCES];
        if let Some(all) = self.factors {
            factors.iter_mut().zip(&all[group]).for_each(|(factor, given)| *factor = *given);
        }
        factors
    }

    /// Binary logarithm of the bytes of an element, to shift by: a division takes longer than a small reduction.
    fn shift(&self) -> u32 {
        self.dtype.size_bytes().trailing_zeros()
    }

    fn accumulator_shift(&self) -> u32 {
        accumulator(self.dtype).size_bytes().trailing_zeros()
    }

    fn arity(&self) -> usize {
        self.fold.arity(self.dtype)
    }

    /// True if all sources go into one pass.
    fn is_one_pass(&self) -> bool {
        self.sources.len() <= self.arity()
    }

    /// Accumulators per element that wait at the same time: those of one level, and those of the next.
    fn slots(&self) -> usize {
        let first = self.sources.len().div_ceil(self.arity());
        first + if first > self.arity() { first.div_ceil(self.arity()) } else { 0 }
    }
}
