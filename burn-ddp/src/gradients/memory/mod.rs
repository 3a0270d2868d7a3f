//! Access to the memory of each backend's tensors: gradients out of it, averages into it.

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

use burn::backend::tensor::FloatTensor;
use burn::backend::{Backend, TensorMetadata};
use burn::tensor::{AllocationProperty, Bytes, DType, Shape, TensorData, read_sync};
use burn_ddp_comm::SharedView;

use super::device_loan::DeviceLoan;

/// Copies of tensors on their way to host memory.
pub type HostCopy = Pin<Box<dyn Future<Output = Result<Vec<(DType, Bytes)>, String>> + Send>>;

/// Access of engines to a backend's memory.
///
/// Engines between hosts use the methods that read and write; their default implementations work for every backend, but
/// copy, and wait for the device. Engines on devices use [`lend`](Self::lend).
pub trait GradientMemory: Backend {
    /// True if the device goes on computing after an operation has returned, so that reading means waiting: gradients
    /// are then read by [`begin_read`](Self::begin_read).
    const ASYNCHRONOUS: bool = false;

    /// True if tensors of [`from_shared`](Self::from_shared) look at the shared bytes; false if they copy them.
    const VIEWS_AVERAGES: bool = false;

    /// True if no other handle to the memory of `tensor` is alive.
    fn is_unique(tensor: &FloatTensor<Self>) -> bool {
        tensor.can_mut()
    }

    /// Calls `read` with the elements of `tensor`, row by row.
    ///
    /// # Errors
    ///
    /// The backend's error when its device cannot be read.
    fn with_bytes<R>(tensor: FloatTensor<Self>, read: impl FnOnce(DType, &[u8]) -> R) -> Result<R, String> {
        with_copy::<Self, R>(tensor, read)
    }

    /// Starts to copy `tensors` to host memory, behind all operations launched before and ahead of all launched after.
    /// Does not wait; the caller awaits the copies in the order of calls.
    fn begin_read(tensors: Vec<FloatTensor<Self>>) -> HostCopy {
        let copy = |tensor| Self::with_bytes(tensor, |dtype, bytes| (dtype, Bytes::from_bytes_vec(bytes.to_vec())));
        let copies = tensors.into_iter().map(copy).collect();
        Box::pin(std::future::ready(copies))
    }

    /// A tensor of the elements at `range` of `bytes`, which never change.
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

    /// True if an engine on the device with the number `ordinal` reaches the memory of `device`: the two are the same.
    fn reaches(device: &Self::Device, ordinal: usize) -> bool {
        let _ = (device, ordinal);
        false
    }

    /// Lends the elements of `tensors`, which are on one device, to an engine that works on them there. Each comes with
    /// the shape of its result: its own, unless the engine gathers or scatters. Operations launched before may not have
    /// run yet; nothing waits for them.
    ///
    /// # Errors
    ///
    /// An error if no engine reaches the memory of this backend or device.
    fn lend(tensors: Vec<(FloatTensor<Self>, Shape)>) -> Result<Box<dyn DeviceLoan>, String> {
        drop(tensors);
        Err(format!("no engine reaches the memory of {}", std::any::type_name::<Self>()))
    }

    /// Returns the results after the engine has worked on their loan. Operations launched on them from now on run after
    /// that work, for which nothing waits here.
    ///
    /// # Errors
    ///
    /// The device's error, or that another backend made the loan.
    fn take_back(loan: Box<dyn DeviceLoan>) -> Result<Vec<FloatTensor<Self>>, String> {
        let own = std::any::type_name::<Self>();
        Err(format!("a bug of burn-ddp, please report it: {own} was handed the tensors of another backend ({loan:?})"))
    }
}

/// [`GradientMemory::with_bytes`] for tensors that cannot be read where they are.
fn with_copy<B: Backend, R>(tensor: FloatTensor<B>, read: impl FnOnce(DType, &[u8]) -> R) -> Result<R, String> {
    let data = read_sync(B::float_into_data(tensor)).map_err(|e| format!("{e:?}"))?;
    Ok(read(data.dtype(), data.as_bytes()))
}

/// The bytes of `view`, for Burn. Writing to them copies them first.
pub(crate) fn shared_bytes(view: SharedView) -> Arc<Bytes> {
    let bytes = bytes::Bytes::from_owner(view);
    Arc::new(Bytes::from_shared(bytes, AllocationProperty::Other))
}
