//! The numerics contract: the one place where elements of several ranks become one.
//!
//! Per element, a balanced binary tree over the ranks in order: (0,1), (2,3), …, an odd last one carried up, then the
//! same over the results. Sums of floats are left + right in the accumulator type (f32 for f16, bf16 and f32; f64 for
//! f64) without fused multiply-add, then at most one division, then one rounding. Integers wrap. min and max yield NaN
//! if either side is NaN. A NaN in a result is always the same one, quiet, positive and without payload, because which
//! NaN comes out of a sum of two is the compiler's choice. So the bits depend on nothing but the inputs.
//!
//! | part | file |
//! |---|---|
//! | choice of the sources that take part, and their factors | here |
//! | one pass over memory, and its instructions | `kernel.rs` |
//! | buffers cut in blocks, passes over the results of passes | `cache_blocks.rs` |
//! | results of subtrees, put together elsewhere | `partial_sums.rs` |
//! | the tree | `tree.rs` |
//! | operations and element types, the definition of their bits | `fold_and_weights.rs`, `element.rs` |
//! | loops over elements; the same with vector instructions, where f32 accumulates | `portable.rs`; `simd.rs`, `x86.rs` |
//! | two ranks and a few elements | `small_reductions.rs` |

use std::sync::OnceLock;

use self::cache_blocks::Plan;
use self::fold_and_weights::Fold;
use self::kernel::Isa;
pub(crate) use self::partial_sums::{Form, Leaf, Terms};
pub(crate) use self::source::Source;
pub(crate) use self::tree::halves;
use crate::call::{Call, Collective};
use crate::{DType, Error, ReduceOp, Result};

mod cache_blocks;
mod element;
#[cfg_attr(not(target_arch = "x86_64"), allow(dead_code, reason = "parts are for x86-64's vector instructions"))]
mod fold_and_weights;
mod kernel;
mod partial_sums;
mod portable;
#[cfg_attr(not(target_arch = "x86_64"), allow(dead_code, reason = "parts are for x86-64's vector instructions"))]
mod simd;
mod small_reductions;
#[cfg_attr(not(target_arch = "x86_64"), allow(dead_code, reason = "parts are for x86-64's vector instructions"))]
mod source;
#[cfg(test)]
mod tests;
mod tree;
#[cfg(target_arch = "x86_64")]
mod x86;

/// Most ranks for which a weighted mean keeps sources and factors on the stack.
const FEW: usize = 32;

/// The operation that reduces the sources, one per rank in rank order, to one.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Reduction<'a> {
    /// A reduce op; all sources count alike.
    Op(ReduceOp),
    /// Σ wᵣxᵣ / Σ wᵣ with these weights, which are finite, not negative, and not all zero.
    Weighted(&'a [f64]),
    /// Σ xᵣ / Σ wᵣ with such weights: each source is a weighted sum already, or −0 where its rank adds nothing. All
    /// keep their places in the tree.
    Sums(&'a [f64]),
}

impl<'a> Reduction<'a> {
    /// The reduction of a call whose ranks have `weights`.
    pub(crate) fn of_weights(call: &Call, weights: &'a [f64]) -> Reduction<'a> {
        match call.info.collective {
            Collective::AllReduceLeaves => Reduction::Sums(weights),
            _ => Reduction::Weighted(weights),
        }
    }
}

/// Reduces `sources`, each as long as `out`, into `out`.
pub(crate) fn reduce(dtype: DType, reduction: Reduction<'_>, sources: &[Source<'_>], out: &mut [u8]) -> Result<()> {
    reduce_to(dtype, reduction, sources, out, None)
}

/// Like [`reduce`]; the result goes to `also` as well, which is as long as `out`.
pub(crate) fn reduce_to(
    dtype: DType,
    reduction: Reduction<'_>,
    sources: &[Source<'_>],
    out: &mut [u8],
    also: Option<&mut [u8]>,
) -> Result<()> {
    reduce_with(isa(), dtype, reduction, sources, (out, also))
}

/// The best instructions of this processor.
fn isa() -> Isa {
    static BEST: OnceLock<Isa> = OnceLock::new();
    *BEST.get_or_init(|| Isa::all().last().unwrap_or(Isa::Portable))
}

fn reduce_with(
    isa: Isa,
    dtype: DType,
    reduction: Reduction<'_>,
    sources: &[Source<'_>],
    (out, also): (&mut [u8], Option<&mut [u8]>),
) -> Result<()> {
    let internal = |message| Err(Error::Internal { message });
    let fits = |source: &Source<'_>| matches!(source, Source::Output) || source.len() == Some(out.len());
    let whole = out.len() & (dtype.size_bytes() - 1) == 0;
    let also_fits = also.as_ref().is_none_or(|also| also.len() == out.len());
    if sources.is_empty() || !sources.iter().all(fits) || !also_fits || !whole {
        return internal(format!("{} sources of {dtype} that do not fit {} bytes", sources.len(), out.len()));
    }
    let plan = |fold| Plan { isa, fold, dtype, sources, factors: None, total: 1.0 };
    check_defined(dtype, reduction)?;
    match reduction {
        Reduction::Op(op) if also.is_none() && small_reductions::two(dtype, op, sources, out) => Ok(()),
        Reduction::Op(op) => Plan { total: divisor(op, sources.len()), ..plan(Fold::of(op)) }.run(out, also),
        Reduction::Weighted(weights) | Reduction::Sums(weights) if weights.len() != sources.len() => {
            internal(format!("{} weights for {} sources", weights.len(), sources.len()))
        }
        Reduction::Weighted(weights) if sources.len() <= FEW => {
            let mut present = ([Source::Output; FEW], [0.0; FEW]);
            weighted(plan(Fold::Sum), weights, (&mut present.0, &mut present.1)).run(out, also)
        }
        Reduction::Weighted(weights) => {
            let mut present = (sources.to_vec(), weights.to_vec());
            weighted(plan(Fold::Sum), weights, (&mut present.0, &mut present.1)).run(out, also)
        }
        Reduction::Sums(weights) => Plan { total: sum_up_the_tree(weights), ..plan(Fold::Sum) }.run(out, also),
    }
}

/// The sum of numbers of all places, added in the order in which their elements are.
pub(crate) fn sum_up_the_tree(numbers: &[f64]) -> f64 {
    match numbers {
        [] => 0.0,
        [number] => *number,
        _ => {
            let (left, right) = numbers.split_at(halves(0..numbers.len()).1.start);
            sum_up_the_tree(left) + sum_up_the_tree(right)
        }
    }
}

/// Fails if `reduction` is not defined for `dtype`.
fn check_defined(dtype: DType, reduction: Reduction<'_>) -> Result<()> {
    let defined = match reduction {
        Reduction::Op(op) => op.supports(dtype),
        Reduction::Weighted(_) | Reduction::Sums(_) => ReduceOp::Mean.supports(dtype),
    };
    let message = || format!("an undefined reduction of {dtype} reached the kernels");
    if defined { Ok(()) } else { Err(Error::Internal { message: message() }) }
}

/// The divisor of `op` over `ranks` ranks.
fn divisor(op: ReduceOp, ranks: usize) -> f64 {
    if op == ReduceOp::Mean { ranks as f64 } else { 1.0 }
}

/// The weighted mean over the ranks with a weight above 0, as if the others did not exist: `present`, with room for
/// all, gets the sources and factors of these only.
fn weighted<'a>(plan: Plan<'a>, weights: &[f64], present: (&'a mut [Source<'a>], &'a mut [f64])) -> Plan<'a> {
    let (sources, factors) = present;
    let mut count = 0;
    for (weight, source) in weights.iter().zip(plan.sources).filter(|(weight, _)| **weight > 0.0) {
        (sources[count], factors[count]) = (*source, *weight);
        count += 1;
    }
    let (sources, factors) = (&sources[..count], &mut factors[..count]);
    match scale(factors) {
        Some(total) => Plan { sources, total, factors: Some(factors), ..plan },
        None => Plan { sources, total: count as f64, ..plan },
    }
}

/// Scales the weights of the ranks that have one; returns the divisor of their sum. `None` if all are equal, since
/// factors are not needed then.
fn scale(factors: &mut [f64]) -> Option<f64> {
    if factors.windows(2).all(|pair| pair[0] == pair[1]) {
        return None;
    }
    // A power of two that brings the largest weight near 1 changes no ratio, and neither weights nor products overflow.
    // It is made from the bits: every machine finds the same one, while the precision of `log2` and `powi` is its own.
    let largest = factors.iter().copied().fold(0.0, f64::max);
    let (zero, shift) = (f64::MAX_EXP - 1, f64::MANTISSA_DIGITS - 1);
    let exponent = (largest.to_bits() >> shift) as i32 - zero;
    let scale = f64::from_bits(((zero - exponent.clamp(-1000, 1000)) as u64) << shift);
    factors.iter_mut().for_each(|factor| *factor *= scale);
    Some(factors.iter().sum())
}
