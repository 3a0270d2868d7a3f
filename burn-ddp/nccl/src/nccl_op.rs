//! Operators with which NCCL combines elements.

use burn_ddp_comm::engine::checked_weights;
use burn_ddp_comm::{Call, Collective, DType, ReduceOp, Result};

/// Operator of a reduction.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum NcclOp {
    /// An operator of NCCL's own. Its mean multiplies by 1/n before it adds.
    Builtin(ReduceOp),
    /// Sum of the ranks' elements, each rank's multiplied by its own factor first. Floats only.
    PreMulSum(f64),
}

/// One rank's part in a reduction.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Part {
    pub(crate) dtype: DType,
    pub(crate) op: NcclOp,
    /// True if this rank has weight 0: it contributes zeros, whatever its elements are, since zero times NaN is NaN.
    pub(crate) absent: bool,
}

impl Part {
    /// Part of the rank `rank` of a reduction by `op`, or of a mean weighted by `weights` if `op` is `None`.
    ///
    /// # Errors
    /// Weights that no rank can use: negative, not finite, or all 0.
    pub(crate) fn of(call: &Call, dtype: DType, op: Option<ReduceOp>, weights: &[f64], rank: usize) -> Result<Part> {
        if let Some(op) = op {
            return Ok(Part { dtype, op: NcclOp::Builtin(op), absent: false });
        }
        let weights = checked_weights(call, weights)?;
        if call.info.collective == Collective::AllReduceLeaves {
            return Ok(Part { dtype, op: NcclOp::PreMulSum(1.0 / weights.iter().sum::<f64>()), absent: false });
        }
        if weights.iter().all(|weight| *weight == weights[0]) {
            return Ok(Part { dtype, op: NcclOp::Builtin(ReduceOp::Mean), absent: false });
        }
        Ok(Part { dtype, op: NcclOp::PreMulSum(share(weights, rank)), absent: weights[rank] == 0.0 })
    }
}

/// Share of `rank` in the sum of all weights, which are finite, not negative and not all 0. They are divided by the
/// largest first, so nothing overflows.
fn share(weights: &[f64], rank: usize) -> f64 {
    let largest = weights.iter().copied().fold(0.0, f64::max);
    let total: f64 = weights.iter().map(|weight| weight / largest).sum();
    weights[rank] / largest / total
}

/// `factor` as an element of `dtype`, in bytes; `None` if that is not a float type. Rounded to the type: in bf16 by up
/// to 1 part in 256.
pub(crate) fn scalar(dtype: DType, factor: f64) -> Option<[u8; 8]> {
    let mut bytes = [0; 8];
    match dtype {
        DType::F64 => bytes = factor.to_le_bytes(),
        DType::F32 => bytes[..4].copy_from_slice(&(factor as f32).to_le_bytes()),
        DType::F16 => bytes[..2].copy_from_slice(&half::f16::from_f64(factor).to_le_bytes()),
        DType::BF16 => bytes[..2].copy_from_slice(&half::bf16::from_f64(factor).to_le_bytes()),
        _ => return None,
    }
    Some(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn factors_are_shares() {
        assert_eq!(share(&[3.0, 1.0], 0), 0.75);
        assert_eq!(share(&[3.0, 0.0], 1), 0.0);
        let huge = [f64::MAX, f64::MAX, f64::MAX / 2.0];
        assert_eq!((0..3).map(|rank| share(&huge, rank)).collect::<Vec<_>>(), [0.4, 0.4, 0.2]);
    }

    #[test]
    fn factors_are_elements() {
        assert_eq!(scalar(DType::F64, 0.1), Some(0.1_f64.to_le_bytes()));
        assert_eq!(scalar(DType::F32, 0.5), Some([0, 0, 0, 0x3f, 0, 0, 0, 0]));
        assert_eq!(scalar(DType::F16, 1.0), Some([0, 0x3c, 0, 0, 0, 0, 0, 0]));
        assert_eq!(scalar(DType::BF16, 1.0), Some([0x80, 0x3f, 0, 0, 0, 0, 0, 0]));
        assert_eq!(scalar(DType::I32, 1.0), None);
    }
}
