//! LibTorch: contiguous gradients on the CPU are read where they are; all others, and averages, are copied.
#![allow(unsafe_code)]

use burn::backend::LibTorch;
use burn::backend::TensorMetadata;
use burn::backend::libtorch::LibTorchDevice;
use burn::backend::tensor::FloatTensor;
use burn::tensor::DType;

use super::{GradientMemory, with_copy};

impl GradientMemory for LibTorch {
    fn with_bytes<R>(tensor: FloatTensor<Self>, read: impl FnOnce(DType, &[u8]) -> R) -> Result<R, String> {
        let dtype = tensor.dtype();
        if tensor.device() == LibTorchDevice::Cpu && tensor.tensor.is_contiguous() {
            let len_bytes = tensor.tensor.numel() * dtype.size();
            if len_bytes == 0 {
                return Ok(read(dtype, &[]));
            }
            let start = tensor.tensor.data_ptr().cast::<u8>();
            // SAFETY: a contiguous tensor on the CPU has `numel` elements of its dtype behind its data pointer, which
            // is not null for tensors that have elements. `tensor` is alive for as long as `read` runs, and nothing
            // writes to a tensor that has another owner.
            let bytes = unsafe { std::slice::from_raw_parts(start, len_bytes) };
            return Ok(read(dtype, bytes));
        }
        with_copy::<Self, R>(tensor, read)
    }
}
