//! How gradients get out of a backend's tensors, and averages into them.

use std::ops::Range;
use std::sync::Arc;

use burn::backend::Backend;
use burn::backend::tensor::FloatTensor;
#[cfg(feature = "flex")]
use burn::backend::{
    Flex,
    flex::{FlexTensor, Layout},
};
use burn::tensor::{AllocationProperty, Bytes, DType, Shape, TensorData, read_sync};
use burn_ddp_comm::SharedView;

/// What a backend can do without a copy. The methods as they are here work for every backend, and copy.
pub trait GradientMemory: Backend {
    /// Lets `read` see the elements of `tensor`, row by row.
    ///
    /// # Errors
    ///
    /// What the backend says when its device cannot be read.
    fn with_bytes<R>(tensor: FloatTensor<Self>, read: impl FnOnce(DType, &[u8]) -> R) -> Result<R, String> {
        let data = read_sync(Self::float_into_data(tensor)).map_err(|e| format!("{e:?}"))?;
        Ok(read(data.dtype(), data.as_bytes()))
    }

    /// A tensor of the elements at `range` of `bytes`, which nobody changes.
    fn from_shared(
        bytes: &Arc<Bytes>,
        range: Range<usize>,
        shape: Shape,
        dtype: DType,
        device: &Self::Device,
    ) -> FloatTensor<Self> {
        let data = TensorData::from_bytes_vec(bytes[range].to_vec(), shape, dtype);
        Self::float_from_data(data, device)
    }
}

#[cfg(feature = "flex")]
impl GradientMemory for Flex {
    fn with_bytes<R>(tensor: FloatTensor<Self>, read: impl FnOnce(DType, &[u8]) -> R) -> Result<R, String> {
        let dtype = tensor.dtype();
        if let Some((start, end)) = tensor.layout().contiguous_offsets() {
            return Ok(read(dtype, &tensor.bytes()[start * dtype.size()..end * dtype.size()]));
        }
        let tensor = tensor.to_contiguous();
        Ok(read(dtype, tensor.bytes()))
    }

    /// All tensors of a bucket look at the same bytes. Whoever made the bytes keeps them too, so that no operation takes a tensor for their
    /// only owner and writes there: Flex would copy the whole bucket first.
    fn from_shared(
        bytes: &Arc<Bytes>,
        range: Range<usize>,
        shape: Shape,
        dtype: DType,
        _device: &Self::Device,
    ) -> FloatTensor<Self> {
        let strides = Layout::contiguous(shape.clone()).strides().to_vec();
        FlexTensor::from_arc(bytes.clone(), Layout::new(shape, strides, range.start / dtype.size()), dtype)
    }
}

/// The bytes of `view`, for Burn. Writing to them copies them first.
pub(super) fn shared_bytes(view: &SharedView) -> Arc<Bytes> {
    let bytes = bytes::Bytes::from_owner(view.clone());
    Arc::new(Bytes::from_shared(bytes, AllocationProperty::Other))
}
