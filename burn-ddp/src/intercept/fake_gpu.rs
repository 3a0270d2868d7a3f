//! A GPU in host memory, the one that the crate `burn-ddp-nccl` has for tests, under Flex: gradients go the way that they go on CUDA, through
//! events, launches and communicators, and what does not wait for what it should gets wrong numbers.
#![allow(unsafe_code)]

use std::any::Any;
use std::cell::RefCell;
use std::sync::Arc;
use std::sync::mpsc::channel;
use std::time::Duration;

use burn::backend::flex::FlexTensor;
use burn::backend::{Flex, TensorMetadata};
use burn::tensor::{DType, Shape, TensorData};
use burn_ddp_comm::engine::Fabric;
use burn_ddp_nccl::fake::Machine;
use burn_ddp_nccl::{Device, DeviceBuffer, DeviceReduce, HostMemory, NcclFabric, Piece, Stream};

use crate::Ddp;
use crate::gradients::{DeviceLoan, GradientMemory};

/// Where a rank computes.
#[derive(Clone)]
struct Gpu {
    machine: Machine,
    device: Device,
    stream: Arc<Stream>,
}

thread_local! {
    /// This rank's.
    static GPU: RefCell<Option<Gpu>> = const { RefCell::new(None) };
}

/// Whether gradients of this rank go through its GPU.
pub(crate) fn is_installed() -> bool {
    GPU.with_borrow(Option::is_some)
}

/// Gradients of models that this rank wraps from now on are reduced on the GPU of its number.
pub(crate) fn install(ddp: &Ddp, machine: &Machine) {
    let device = Device::new(&machine.driver(), ddp.rank()).expect("a device");
    let stream = Arc::new(device.stream().expect("a stream"));
    GPU.set(Some(Gpu { machine: machine.clone(), device: device.clone(), stream }));
    ddp.world()
        .set_fabric(|own, membership| {
            NcclFabric::new(own, membership, machine.nccl(), device, HostMemory::ByHost)
                .map(|f| Arc::new(f) as Arc<dyn Fabric>)
        })
        .expect("a fabric");
}

#[derive(Debug)]
struct GpuLoan {
    place: DeviceReduce,
    buffers: Vec<DeviceBuffer>,
    tensors: Vec<(Shape, DType)>,
}

impl DeviceLoan for GpuLoan {
    fn len_elems(&self) -> usize {
        self.tensors.iter().map(|(shape, _)| shape.num_elements()).sum()
    }

    fn place(&mut self, _: Duration) -> Result<&mut dyn Any, String> {
        Ok(&mut self.place)
    }
}

pub(crate) fn lend(tensors: Vec<FlexTensor>) -> Result<Box<dyn DeviceLoan>, String> {
    let Gpu { machine, device, stream } = GPU.with_borrow(Clone::clone).ok_or("this rank has no GPU")?;
    let (mut buffers, mut shapes, mut pieces) = (Vec::new(), Vec::new(), Vec::new());
    for tensor in tensors {
        shapes.push((tensor.shape(), tensor.dtype()));
        let len_elems = tensor.shape().num_elements();
        let bytes = Flex::with_bytes(tensor, |_, bytes: &[u8]| bytes.to_vec())?;
        let (buffer, result) = (device.alloc(bytes.len())?, device.alloc(bytes.len())?);
        let (input, other) = (buffer.pointer(), result.pointer());
        // Each second one is not reduced in place.
        let output = if pieces.len() % 2 == 0 { input } else { other };
        pieces.push(Piece { input, output, len_elems });
        // The gradient's kernel takes its time.
        machine.launch(&stream, move |machine| {
            std::thread::sleep(Duration::from_millis(1));
            machine.write(input, &bytes);
        });
        buffers.extend(if output == input { [result, buffer] } else { [buffer, result] });
    }
    let ready = device.event()?;
    // SAFETY: a stream of this device.
    unsafe { ready.record_on(stream.raw()) }?;
    // SAFETY: on this machine what is not allocated is an error, and nothing else.
    let place = unsafe { DeviceReduce::new(device.ordinal(), pieces, Some(ready)) };
    Ok(Box::new(GpuLoan { place, buffers, tensors: shapes }))
}

pub(crate) fn take_back(lent: Box<dyn DeviceLoan>) -> Result<Vec<FlexTensor>, String> {
    let Gpu { machine, stream, .. } = GPU.with_borrow(Clone::clone).ok_or("this rank has no GPU")?;
    let lent: Box<dyn Any> = lent;
    let lent = lent.downcast::<GpuLoan>().map_err(|_| "this was lent by another device")?;
    let done = lent.place.done().ok_or("this was never reduced")?;
    // SAFETY: a stream of this device.
    unsafe { done.hold_up(stream.raw()) }?;
    let (sender, receiver) = channel();
    // Of each two, the second has the result.
    let results: Vec<_> = lent.buffers.iter().skip(1).step_by(2).map(|b| (b.pointer(), b.len_bytes())).collect();
    machine.launch(&stream, move |machine| {
        let _ = sender.send(results.iter().map(|(pointer, len)| machine.read(*pointer, *len)).collect::<Vec<_>>());
    });
    let results = receiver.recv_timeout(Duration::from_secs(20)).map_err(|e| format!("the GPU's stream: {e}"))?;
    let tensor = |(bytes, (shape, dtype)): (Vec<u8>, &(Shape, DType))| {
        FlexTensor::from_data(TensorData::from_bytes_vec(bytes, shape.clone(), *dtype))
    };
    Ok(results.into_iter().zip(&lent.tensors).map(tensor).collect())
}
