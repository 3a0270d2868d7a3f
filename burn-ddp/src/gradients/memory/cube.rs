//! CubeCL (CUDA, ROCm, Metal, Vulkan, WebGPU): the device computes while the host goes on, with fusion even later.

use std::sync::{Mutex, PoisonError};

use burn::backend::tensor::FloatTensor;
#[cfg(feature = "nccl")]
use burn::tensor::Shape;
use burn_cubecl::cubecl::client::Client;
use burn_cubecl::cubecl::server::CopyDescriptor;
use burn_cubecl::kernel::into_contiguous;
use burn_cubecl::{Cube, CubeBackend, CubeDevice};

#[cfg(feature = "nccl")]
use super::{DeviceLoan, cuda};
use super::{GradientMemory, HostCopy};

impl GradientMemory for Cube {
    const ASYNCHRONOUS: bool = true;

    /// Burn's own `float_into_data` copies when the bytes are first read, and so behind the rest of the backward.
    fn begin_read(tensors: Vec<FloatTensor<Self>>) -> HostCopy {
        // The first one launches what fusion has held back; there is nothing left for the others.
        let resolve = |tensor: FloatTensor<Self>| {
            into_contiguous(tensor.client.clone().resolve_tensor_float::<CubeBackend>(tensor))
        };
        let tensors: Vec<_> = tensors.into_iter().map(resolve).collect();
        let Some(first) = tensors.first() else { return Box::pin(std::future::ready(Ok(Vec::new()))) };
        let client = client(&first.device, &first.client);
        let describe = |tensor: &burn_cubecl::tensor::CubeTensor| {
            let (shape, strides) = (tensor.meta.shape().clone(), tensor.meta.strides().clone());
            CopyDescriptor::new(tensor.handle.clone().binding(), shape, strides, tensor.elem_size())
        };
        let copies = client.read_tensor_async(tensors.iter().map(describe).collect());
        Box::pin(async move {
            let bytes = copies.await.map_err(|e| format!("{e:?}"))?;
            Ok(tensors.iter().map(|tensor| tensor.dtype).zip(bytes).collect())
        })
    }

    #[cfg(feature = "nccl")]
    fn reaches(device: &Self::Device, ordinal: usize) -> bool {
        matches!(device, CubeDevice::Cuda(cuda) if cuda.index == ordinal)
    }

    #[cfg(feature = "nccl")]
    fn lend(tensors: Vec<(FloatTensor<Self>, Shape)>) -> Result<Box<dyn DeviceLoan>, String> {
        cuda::lend(tensors)
    }

    #[cfg(feature = "nccl")]
    fn take_back(loan: Box<dyn DeviceLoan>) -> Result<Vec<FloatTensor<Self>>, String> {
        cuda::take_back(loan)
    }
}

/// A client of the device that lives as long as the process: what is under way borrows it.
fn client(device: &CubeDevice, like: &Client) -> &'static Client {
    static CLIENTS: Mutex<Vec<(CubeDevice, &'static Client)>> = Mutex::new(Vec::new());
    let mut clients = CLIENTS.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some((_, client)) = clients.iter().find(|(known, _)| known == device) {
        return client;
    }
    let client = Box::leak(Box::new(like.clone()));
    clients.push((device.clone(), client));
    client
}
