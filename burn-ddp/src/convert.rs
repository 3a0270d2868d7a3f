//! Conversion between Burn's tensors and what collectives carry: element types and elements in host memory.

use burn::tensor::kind::Basic;
use burn::tensor::{BoolStore, DType as BurnDType, Device, Tensor, TensorData};
use burn_ddp_comm::DType;

use crate::{Error, Result};

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

/// Elements of a tensor, for a collective.
pub(crate) fn read<const D: usize, K: Basic>(tensor: Tensor<D, K>) -> Result<(DType, TensorData)> {
    if D == 0 {
        return Err(Error::invalid("collectives take tensors of one dimension or more"));
    }
    // On Flex a tensor that has one holder gives its memory away: no copy.
    let data = tensor
        .try_into_data()
        .map_err(|e| Error::invalid(format!("reading the tensor from its device failed: {e:?}")))?;
    with_dtype(data)
}

/// Elements and their type, as collectives take them.
pub(crate) fn with_dtype(data: TensorData) -> Result<(DType, TensorData)> {
    // Between ranks a bool is a byte, whatever the backend stores it as.
    let data = match data.dtype() {
        dtype if dtype.is_bool() => {
            data.try_cast_as::<bool>().map_err(|e| Error::invalid(format!("reading bools: {e}")))?
        }
        _ => data,
    };
    let dtype = comm_dtype(data.dtype())
        .ok_or_else(|| Error::invalid(format!("tensors of dtype {:?} cannot be sent between ranks", data.dtype())))?;
    Ok((dtype, data))
}

/// A tensor of these elements on `device`.
pub(crate) fn back<const D: usize, K: Basic>(data: TensorData, device: &Device) -> Tensor<D, K> {
    match data.dtype() {
        dtype if dtype.is_bool() => Tensor::from_data(data, device),
        dtype => Tensor::from_data(data, (device, dtype)),
    }
}
