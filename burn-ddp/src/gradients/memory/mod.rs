//! How gradients get out of a backend's tensors, and averages into them.

#[cfg(feature = "cube")]
mod cube;
#[cfg(feature = "nccl")]
mod cuda;
#[cfg(feature = "flex")]
mod flex;
#[cfg(feature = "tch")]
mod libtorch;
#[cfg(feature = "ndarray")]
mod ndarray;

use std::ops::Range;
use std::pin::Pin;
use std::sync::Arc;

use burn::backend::Backend;
use burn::backend::tensor::FloatTensor;
use burn::tensor::{AllocationProperty, Bytes, DType, Shape, TensorData, read_sync};
use burn_ddp_comm::SharedView;

use super::store::DeviceLoan;

/// Tensors on their way to host memory: what they were made of when the way began.
pub type HostCopy = Pin<Box<dyn Future<Output = Result<Vec<(DType, Bytes)>, String>> + Send>>;

/// How engines reach a backend's memory: those between hosts by methods that, as they are here, work for every backend, copy, and wait for
/// the device; those on devices by [`lend`](Self::lend).
pub trait GradientMemory: Backend {
    /// The device goes on computing after an operation has returned, so that to read is to wait: gradients are read by
    /// [`begin_read`](Self::begin_read).
    const ASYNCHRONOUS: bool = false;

    /// Lets `read` see the elements of `tensor`, row by row.
    ///
    /// # Errors
    ///
    /// What the backend says when its device cannot be read.
    fn with_bytes<R>(tensor: FloatTensor<Self>, read: impl FnOnce(DType, &[u8]) -> R) -> Result<R, String> {
        with_copy::<Self, R>(tensor, read)
    }

    /// Starts to copy `tensors` to host memory, behind all that was launched before and before all that is launched after. Waiting
    /// for the copies is left to whoever awaits what this returns, which is done in the order of calls.
    fn begin_read(tensors: Vec<FloatTensor<Self>>) -> HostCopy {
        let copy = |tensor| Self::with_bytes(tensor, |dtype, bytes| (dtype, Bytes::from_bytes_vec(bytes.to_vec())));
        let copies = tensors.into_iter().map(copy).collect();
        Box::pin(std::future::ready(copies))
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

    /// Gives the elements of `tensors`, which are on one device, to an engine that reduces them there. What was launched before is still to come,
    /// and nothing waits for it.
    ///
    /// # Errors
    ///
    /// If no engine reaches this backend's memory, or this device's.
    fn lend(tensors: Vec<FloatTensor<Self>>) -> Result<Box<dyn DeviceLoan>, String> {
        drop(tensors);
        Err(format!("no engine reaches the memory of {}", std::any::type_name::<Self>()))
    }

    /// The tensors, after the engine has worked on what was lent of them: what is launched on them from now on comes after its reduction, for
    /// which nothing waits here.
    ///
    /// # Errors
    ///
    /// What the device says, or that another backend lent this.
    fn take_back(lent: Box<dyn DeviceLoan>) -> Result<Vec<FloatTensor<Self>>, String> {
        Err(format!("{lent:?} is not of {}", std::any::type_name::<Self>()))
    }
}

/// [`GradientMemory::with_bytes`] of what cannot be read where it is.
fn with_copy<B: Backend, R>(tensor: FloatTensor<B>, read: impl FnOnce(DType, &[u8]) -> R) -> Result<R, String> {
    let data = read_sync(B::float_into_data(tensor)).map_err(|e| format!("{e:?}"))?;
    Ok(read(data.dtype(), data.as_bytes()))
}

/// The bytes of `view`, for Burn. Writing to them copies them first.
pub(crate) fn shared_bytes(view: &SharedView) -> Arc<Bytes> {
    let bytes = bytes::Bytes::from_owner(view.clone());
    Arc::new(Bytes::from_shared(bytes, AllocationProperty::Other))
}
