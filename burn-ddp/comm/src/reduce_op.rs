//! Reduce ops, and which of them make sense for which dtype.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::DType;

/// Operation that reduces the elements of all ranks to one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum ReduceOp {
    /// The sum. Integers wrap.
    Sum,
    /// The sum divided by the world size, floats only.
    Mean,
    /// The smallest; NaN if any is NaN. For bool: and.
    Min,
    /// The largest; NaN if any is NaN. For bool: or.
    Max,
    /// The product. Integers wrap.
    Product,
}

impl ReduceOp {
    /// Every reduce op, in the order of their codes on the wire.
    pub const ALL: [ReduceOp; 5] = [ReduceOp::Sum, ReduceOp::Mean, ReduceOp::Min, ReduceOp::Max, ReduceOp::Product];

    /// True if this op is defined for `dtype`: a mean needs floats, and bool has only min (and) and max (or).
    ///
    /// ```
    /// use burn_ddp_comm::{DType, ReduceOp};
    /// assert!(ReduceOp::Mean.supports(DType::BF16));
    /// assert!(!ReduceOp::Mean.supports(DType::I32));
    /// assert!(!ReduceOp::Sum.supports(DType::Bool));
    /// ```
    pub const fn supports(self, dtype: DType) -> bool {
        match self {
            ReduceOp::Min | ReduceOp::Max => true,
            ReduceOp::Sum | ReduceOp::Product => !matches!(dtype, DType::Bool),
            ReduceOp::Mean => dtype.is_float(),
        }
    }

    pub(crate) fn code(self) -> u8 {
        self as u8
    }

    pub(crate) fn from_code(code: u8) -> Option<ReduceOp> {
        ReduceOp::ALL.get(usize::from(code)).copied()
    }
}

impl fmt::Display for ReduceOp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            ReduceOp::Sum => "sum",
            ReduceOp::Mean => "mean",
            ReduceOp::Min => "min",
            ReduceOp::Max => "max",
            ReduceOp::Product => "product",
        })
    }
}
