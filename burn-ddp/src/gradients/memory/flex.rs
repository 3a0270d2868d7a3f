//! Flex: averages are views of the memory of the collectives.

use std::ops::Range;
use std::sync::Arc;

use burn::backend::Flex;
use burn::backend::flex::{FlexTensor, Layout};
use burn::backend::tensor::FloatTensor;
use burn::tensor::{Bytes, DType, Shape};

use super::GradientMemory;
#[cfg(test)]
use crate::gradients::DeviceLoan;

impl GradientMemory for Flex {
    const VIEWS_AVERAGES: bool = true;

    fn with_bytes<R>(tensor: FloatTensor<Self>, read: impl FnOnce(DType, &[u8]) -> R) -> Result<R, String> {
        let dtype = tensor.dtype();
        if let Some((start, end)) = tensor.layout().contiguous_offsets() {
            return Ok(read(dtype, &tensor.bytes()[start * dtype.size()..end * dtype.size()]));
        }
        let tensor = tensor.to_contiguous();
        Ok(read(dtype, tensor.bytes()))
    }

    /// All tensors of a bucket look at the same bytes. The store keeps them too, so that no operation takes a tensor
    /// for their only owner and writes there: Flex would copy the whole bucket first. A gathered parameter is the only
    /// owner of its bytes, and such an operation copies that parameter.
    fn from_shared(
        bytes: &Arc<Bytes>,
        range: Range<usize>,
        shape: Shape,
        dtype: DType,
        _device: &Self::Device,
    ) -> FloatTensor<Self> {
        let mut strides = vec![1; shape.num_dims()];
        for dim in (1..strides.len()).rev() {
            strides[dim - 1] = strides[dim] * shape[dim] as isize;
        }
        FlexTensor::from_arc(bytes.clone(), Layout::new(shape, strides, range.start / dtype.size()), dtype)
    }

    #[cfg(test)]
    fn reaches(_: &Self::Device, _: usize) -> bool {
        crate::intercept::fake_device::is_installed()
    }

    #[cfg(test)]
    fn lend(tensors: Vec<(FloatTensor<Self>, Shape)>) -> Result<Box<dyn DeviceLoan>, String> {
        crate::intercept::fake_device::lend(tensors)
    }

    #[cfg(test)]
    fn take_back(loan: Box<dyn DeviceLoan>) -> Result<Vec<FloatTensor<Self>>, String> {
        crate::intercept::fake_device::take_back(loan)
    }
}
