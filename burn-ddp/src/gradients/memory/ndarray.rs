//! NdArray: contiguous gradients in f32 and f64 are read where they are. Averages are copied out of the shared buffer,
//! since NdArray would copy a tensor that borrows its memory in every operation.

use burn::backend::NdArray;
use burn::backend::ndarray::NdArrayTensor;
use burn::backend::tensor::FloatTensor;
use burn::tensor::DType;

use super::{GradientMemory, with_copy};

impl GradientMemory for NdArray {
    /// NdArray's `can_mut` is always false.
    fn is_unique(tensor: &FloatTensor<Self>) -> bool {
        match tensor {
            NdArrayTensor::F32(x) => x.is_unique(),
            NdArrayTensor::F64(x) => x.is_unique(),
            _ => false,
        }
    }

    fn with_bytes<R>(tensor: FloatTensor<Self>, read: impl FnOnce(DType, &[u8]) -> R) -> Result<R, String> {
        let bytes: Option<(DType, &[u8])> = match &tensor {
            NdArrayTensor::F32(x) => x.view().to_slice().map(|x| (DType::F32, bytemuck::cast_slice(x))),
            NdArrayTensor::F64(x) => x.view().to_slice().map(|x| (DType::F64, bytemuck::cast_slice(x))),
            _ => None,
        };
        match bytes {
            Some((dtype, bytes)) => Ok(read(dtype, bytes)),
            None => with_copy::<Self, R>(tensor, read),
        }
    }
}
