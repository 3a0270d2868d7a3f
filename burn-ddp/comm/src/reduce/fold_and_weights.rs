//! Operations of a reduction: the operation on two elements, and the factors and the divisor of a sum.

use super::tree::MAX_SOURCES;
use crate::{DType, ReduceOp};

/// The operation on two elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Fold {
    Sum,
    Min,
    Max,
    Product,
}

impl Fold {
    /// The operation of a reduce op; a mean is a sum that is divided.
    pub(super) fn of(op: ReduceOp) -> Fold {
        match op {
            ReduceOp::Sum | ReduceOp::Mean => Fold::Sum,
            ReduceOp::Min => Fold::Min,
            ReduceOp::Max => Fold::Max,
            ReduceOp::Product => Fold::Product,
        }
    }

    /// Most sources of `dtype` that a pass takes. Sums of floats, which training consists of, have loops for each
    /// number up to [`MAX_SOURCES`].
    pub(super) fn arity(self, dtype: DType) -> usize {
        if self == Fold::Sum && dtype.is_float() { MAX_SOURCES } else { 2 }
    }
}

/// Factors of the sources of a sum of floats, and the divisor of the sum. Factors and divisors of 1 change nothing.
#[derive(Clone, Copy, Debug)]
pub(super) struct Weights {
    pub(super) factors: [f64; MAX_SOURCES],
    pub(super) total: f64,
}

impl Weights {
    pub(super) const ONE: Weights = Weights { factors: [1.0; MAX_SOURCES], total: 1.0 };
}

/// The division of a sum by its total, or the multiplication by its inverse if it is a power of two, which rounds
/// alike.
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
