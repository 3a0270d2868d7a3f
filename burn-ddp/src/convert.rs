//! Burn's element types and ours.

use burn::tensor::{BoolStore, DType as BurnDType};
use burn_ddp_comm::DType;

/// Our name for a Burn dtype; `None` for what no collective carries (quantized, unsigned beyond u8, packed bools).
pub(crate) fn comm_dtype(dtype: BurnDType) -> Option<DType> {
    Some(match dtype {
        BurnDType::F64 => DType::F64,
        BurnDType::F32 | BurnDType::Flex32 => DType::F32,
        BurnDType::F16 => DType::F16,
        BurnDType::BF16 => DType::BF16,
        BurnDType::I64 => DType::I64,
        BurnDType::I32 => DType::I32,
        BurnDType::I8 => DType::I8,
        BurnDType::U8 => DType::U8,
        BurnDType::Bool(BoolStore::Native) => DType::Bool,
        _ => return None,
    })
}

/// Burn's name for one of our dtypes.
pub(crate) fn burn_dtype(dtype: DType) -> BurnDType {
    match dtype {
        DType::F64 => BurnDType::F64,
        DType::F32 => BurnDType::F32,
        DType::F16 => BurnDType::F16,
        DType::BF16 => BurnDType::BF16,
        DType::I64 => BurnDType::I64,
        DType::I32 => BurnDType::I32,
        DType::I8 => BurnDType::I8,
        DType::U8 => BurnDType::U8,
        DType::Bool => BurnDType::Bool(BoolStore::Native),
    }
}
