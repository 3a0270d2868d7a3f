//! Types in which a model computes and its gradients travel.

use std::fmt;
use std::str::FromStr;

use burn::tensor::FloatDType;
use serde::{Deserialize, Serialize};

use crate::Error;

/// A floating-point type of a wrapped model: that of its forward and backward
/// ([`WrapConfig::with_compute_dtype`](crate::WrapConfig::with_compute_dtype)), or that in which its gradients travel
/// ([`WrapConfig::with_reduce_dtype`](crate::WrapConfig::with_reduce_dtype)).
///
/// ```
/// # use burn_ddp::Precision;
/// let precision: Precision = "bf16".parse()?; // of a command line, say
/// assert_eq!(precision, Precision::Bf16);
/// assert_eq!(precision.dtype(), burn::tensor::FloatDType::BF16); // for `inputs.cast(..)`
/// assert_eq!(precision.to_string(), "bf16");
/// # Ok::<(), burn_ddp::Error>(())
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Precision {
    /// Single precision, 32 bits.
    #[default]
    F32,
    /// bfloat16: the range of f32 with 8 bits of precision.
    Bf16,
    /// IEEE half precision: 11 bits of precision, up to 65504.
    F16,
}

impl Precision {
    /// The type for Burn's `Tensor::cast`.
    #[must_use]
    pub fn dtype(self) -> FloatDType {
        match self {
            Precision::F32 => FloatDType::F32,
            Precision::Bf16 => FloatDType::BF16,
            Precision::F16 => FloatDType::F16,
        }
    }

    /// The type for engines, if it is a half.
    pub(crate) fn half(self) -> Option<burn_ddp_comm::DType> {
        match self {
            Precision::F32 => None,
            Precision::Bf16 => Some(burn_ddp_comm::DType::BF16),
            Precision::F16 => Some(burn_ddp_comm::DType::F16),
        }
    }
}

impl fmt::Display for Precision {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Precision::F32 => "f32",
            Precision::Bf16 => "bf16",
            Precision::F16 => "f16",
        })
    }
}

impl FromStr for Precision {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self, Error> {
        let all = [Precision::F32, Precision::Bf16, Precision::F16];
        all.into_iter()
            .find(|precision| precision.to_string() == text)
            .ok_or_else(|| Error::invalid(format!("the precision {text:?} is none of f32, bf16, f16")))
    }
}
