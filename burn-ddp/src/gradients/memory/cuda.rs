//! CUDA: NCCL works on gradients and parameters where they are, on a stream of its own, between two events of cubecl's.
//!
//! Work on cubecl's streams runs as tasks on the thread that serves the device, behind all earlier launches: one task
//! finds the tensors and records `ready`; one, after NCCL was launched, makes cubecl's stream wait for `done`. The
//! host waits for tasks, never for the device. The pieces of a bucket go to NCCL as they are, since gathering them into
//! one buffer and scattering them again would read and write every gradient twice more, and NCCL reduces several pieces
//! in one launch.
#![allow(unsafe_code)]

use std::any::Any;
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use burn::backend::TensorMetadata;
use burn::backend::ir::{BackendIr, InitOperationIr, OperationIr, OperationOutput};
use burn::backend::tensor::FloatTensor;
use burn::tensor::Shape;
use burn_cubecl::cubecl::__private::Runtime;
use burn_cubecl::cubecl::cuda::CudaRuntime;
use burn_cubecl::cubecl::device::DeviceId;
use burn_cubecl::cubecl::device_handle::DeviceHandle;
use burn_cubecl::cubecl::server::{BufferBinding, Handle, Server, ServerError, ServerStorage};
use burn_cubecl::fusion::FusionCubeRuntime;
use burn_cubecl::kernel::into_contiguous;
use burn_cubecl::tensor::CubeTensor;
use burn_cubecl::{Cube, CubeBackend, CubeDevice};
use burn_ddp_nccl::{Device, DeviceElements, Driver, Event, Piece};
use burn_fusion::NoOp;
use burn_fusion::client::GlobalFusionClient;
use burn_fusion::stream::StreamId;
use cubecl_server::memory_management::ManagedMemoryHandle;
use cubecl_server::stream::{FailureStore, WriteScoped};

use super::DeviceLoan;

/// Server of a device, which has a thread of its own.
type CudaServer = <CudaRuntime as Runtime>::Server;

/// Handles that keep memory from being freed, moved or used again. If this is dropped without
/// [`release`](Pins::release), while NCCL may still work there, the memory stays as it is until the process ends.
#[derive(Default)]
struct Pins(Vec<Box<dyn Any + Send>>);

impl Pins {
    fn release(mut self) {
        self.0.clear();
    }
}

impl Drop for Pins {
    fn drop(&mut self) {
        std::mem::forget(std::mem::take(&mut self.0));
    }
}

impl std::fmt::Debug for Pins {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Pins({})", self.0.len())
    }
}

/// A tensor: its memory, and that of its result, with their numbers of elements.
struct Run {
    input: BufferBinding,
    input_elems: usize,
    output: BufferBinding,
    output_elems: usize,
    /// Memory of the output and its size, if it must still be allocated.
    fresh: Option<(ManagedMemoryHandle, u64)>,
    elem_bytes: usize,
}

type Answer = Result<(DeviceElements, Vec<Box<dyn Any + Send>>), String>;

#[derive(Debug)]
struct CudaLoan {
    answer: Receiver<Answer>,
    place: Option<DeviceElements>,
    pins: Pins,
    /// Tensors that hold the results.
    outputs: Vec<CubeTensor>,
    /// The stream on which the results are used.
    home: StreamId,
    /// Streams whose memory the engine reads, without `home`.
    others: Vec<StreamId>,
    device: DeviceId,
    len_elems: usize,
}

impl DeviceLoan for CudaLoan {
    fn len_elems(&self) -> usize {
        self.len_elems
    }

    fn place(&mut self, patience: Duration) -> Result<&mut dyn Any, String> {
        let place = match self.place.take() {
            Some(place) => place,
            None => {
                let answer = self.answer.recv_timeout(patience).map_err(|e| match e {
                    RecvTimeoutError::Timeout => {
                        format!("the thread that serves the GPU has not answered for {patience:?}")
                    }
                    RecvTimeoutError::Disconnected => {
                        "the thread that serves the GPU has failed; it logs why".to_owned()
                    }
                });
                let (place, pins) = answer??;
                self.pins = Pins(pins);
                place
            }
        };
        Ok(self.place.insert(place))
    }
}

pub(super) fn lend(tensors: Vec<(FloatTensor<Cube>, Shape)>) -> Result<Box<dyn DeviceLoan>, String> {
    // The first one launches what fusion has held back; rows may be padded, or in an order that differs between ranks.
    let resolve =
        |tensor: FloatTensor<Cube>| into_contiguous(tensor.client.clone().resolve_tensor_float::<CubeBackend>(tensor));
    let tensors: Vec<(CubeTensor, Shape)> =
        tensors.into_iter().map(|(tensor, result)| (resolve(tensor), result)).collect();
    let Some((first, _)) = tensors.first() else { return Err("there is nothing to lend".to_owned()) };
    let (client, device) = (first.client.clone(), first.device.clone());
    let CubeDevice::Cuda(cuda) = &device else { return Err(format!("{device:?} is not a CUDA device")) };
    let ordinal = cuda.index;
    if client.is_capturing() {
        return Err("a CUDA graph is being captured, which other streams may not take part in".to_owned());
    }
    let (ready, home, id) = (event(ordinal)?, StreamId::current(), client.service_id().device);
    let (mut runs, mut outputs, mut others, mut total) = (Vec::new(), Vec::new(), Vec::new(), 0);
    for (tensor, result) in tensors {
        if tensor.device != device {
            return Err(format!("tensors of one model on {:?} and {device:?}", tensor.device));
        }
        if tensor.qparams.is_some() || tensor.meta.is_tiled() || !tensor.is_contiguous() {
            return Err("a tensor that is quantized, tiled or not contiguous".to_owned());
        }
        let (input_elems, output_elems) = (tensor.meta.shape().num_elements(), result.num_elements());
        let elem_bytes = tensor.dtype.size();
        let is_reduced = *tensor.meta.shape() == result;
        if is_reduced && input_elems == 0 {
            outputs.push(tensor);
            continue;
        }
        total += input_elems;
        // In place only if the memory is of this stream, which waits for NCCL, and no other tensor shares it.
        let in_place = is_reduced && tensor.handle.can_mut() && tensor.handle.stream == home;
        if tensor.handle.stream != home && !others.contains(&tensor.handle.stream) {
            others.push(tensor.handle.stream);
        }
        let input = tensor.handle.clone().binding();
        let (output, fresh) = if in_place {
            outputs.push(tensor);
            (input.clone(), None)
        } else {
            let len_bytes = (output_elems * elem_bytes) as u64;
            let handle = Handle::new(client.service_id(), home, len_bytes);
            let fresh = Some((handle.memory.clone(), len_bytes));
            let binding = handle.clone().binding();
            let dtype = tensor.dtype;
            outputs.push(CubeTensor::new_contiguous(client.clone(), device.clone(), result, handle, dtype));
            (binding, fresh)
        };
        runs.push(Run { input, input_elems, output, output_elems, fresh, elem_bytes });
    }
    let (answers, answer) = channel();
    let server = DeviceHandle::<CudaServer>::new(id);
    server.submit(move |server: &mut CudaServer| {
        let place = resolve_runs(server, &runs, home, ready, ordinal);
        // If the backward has ended, the answer has no receiver, and nothing was given to NCCL.
        let _ = answers.send(place);
    });
    server.flush_queue();
    let pins = Pins::default();
    Ok(Box::new(CudaLoan { answer, place: None, pins, outputs, home, others, device: id, len_elems: total }))
}

/// Finds the memory of all runs. Runs on the thread that serves the device, behind the launches that write the
/// tensors.
fn resolve_runs(server: &mut CudaServer, runs: &[Run], home: StreamId, ready: Event, ordinal: usize) -> Answer {
    let mut pieces = Vec::with_capacity(runs.len());
    let mut pins: Vec<Box<dyn Any + Send>> = Vec::with_capacity(2 * runs.len());
    for run in runs {
        if let Some((memory, len_bytes)) = &run.fresh {
            server.initialize_memory(memory.clone(), *len_bytes, home).map_err(|e| format!("{e}"))?;
        }
        let mut pin = |binding: &BufferBinding, len_elems: usize| {
            // On its own stream: to resolve it on another one takes a place in a queue of 8, which then waits for the
            // device.
            let resource = server.get_resource(binding.clone(), binding.stream).map_err(|e| format!("{e}"))?;
            let (pointer, room) = (resource.resource().ptr, resource.resource().size);
            pins.push(Box::new(resource));
            let len_bytes = len_elems * run.elem_bytes;
            if room < len_bytes as u64 {
                return Err(format!("a tensor of {len_bytes} bytes in memory of {room}"));
            }
            Ok(pointer)
        };
        let Run { input_elems, output_elems, .. } = *run;
        let (input, output) = (pin(&run.input, input_elems)?, pin(&run.output, output_elems)?);
        pieces.push(Piece { input, input_elems, output, output_elems });
    }
    // `resolve` makes the stream `home` wait for the other streams that compute the tensors.
    let inputs = runs.iter().map(|run| &run.input);
    let mut streams = server.write_streams().resolve(home, inputs).map_err(|e| format!("{e}"))?;
    let stream = streams.current().sys;
    // SAFETY: cubecl's stream, which lives as long as its server, whose thread this is, in the device's primary
    // context.
    unsafe { ready.record_on(stream.cast()) }?;
    // SAFETY: each piece is memory of this device, pinned, of at least its length, checked above; each output is one
    // that no other tensor shares, or fresh. cubecl uses it again only behind the wait of `take_back`, or never, see
    // `Pins`. What a rank of weight 0 lends to a scatter are zeros already.
    let place = unsafe { DeviceElements::new(ordinal, pieces, Some(ready)) };
    Ok((place, pins))
}

pub(super) fn take_back(lent: Box<dyn DeviceLoan>) -> Result<Vec<FloatTensor<Cube>>, String> {
    let lent: Box<dyn Any> = lent;
    let lent = lent.downcast::<CudaLoan>().map_err(|_| "the loan was made by another device")?;
    let CudaLoan { place, pins, outputs, home, others, device, .. } = *lent;
    let Some(done) = place.as_ref().and_then(DeviceElements::done).cloned() else {
        return Err("NCCL was not launched on the loan".to_owned());
    };
    let results: Vec<BufferBinding> = outputs.iter().map(|output| output.handle.clone().binding()).collect();
    let server = DeviceHandle::<CudaServer>::new(device);
    // An input of another stream may be freed there, and its memory used again, so that stream waits as well.
    let streams = [home].into_iter().chain(others);
    server.submit(move |server: &mut CudaServer| match wait_on(server, streams, &done) {
        // What uses the memory again from now on is behind NCCL.
        Ok(()) => pins.release(),
        Err(reason) => {
            // Reads of the results return this error; the memory is never used again.
            let error = ServerError::Generic { reason, backtrace: Default::default() };
            server.write_streams().taint(error, results.iter());
            drop(pins);
        }
    });
    server.flush_queue();
    Ok(outputs.into_iter().map(from_cube).collect())
}

/// Makes all later launches on `streams` wait for `done`.
fn wait_on(server: &mut CudaServer, streams: impl Iterator<Item = StreamId>, done: &Event) -> Result<(), String> {
    for id in streams {
        let mut streams = server.write_streams().resolve(id, [].into_iter()).map_err(|e| format!("{e}"))?;
        let stream = streams.current().sys;
        // SAFETY: as in `resolve_runs`.
        unsafe { done.hold_up(stream.cast()) }?;
    }
    Ok(())
}

/// A fused tensor of `tensor`, made as Burn makes them of data.
fn from_cube(tensor: CubeTensor) -> FloatTensor<Cube> {
    let client = GlobalFusionClient::<FusionCubeRuntime>::load(&tensor.device);
    let (shape, dtype) = (tensor.shape(), tensor.dtype());
    let handle = CubeBackend::float_tensor_handle(tensor);
    let operation = InitOperationIr::create(shape, dtype, || client.register_tensor_handle(handle));
    client.register(StreamId::current(), OperationIr::Init(operation), NoOp::<CubeBackend>::new()).output()
}

/// A spare event of the device, or a new one.
fn event(ordinal: usize) -> Result<Event, String> {
    static DEVICES: Mutex<Vec<Device>> = Mutex::new(Vec::new());
    let mut devices = DEVICES.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(device) = devices.iter().find(|device| device.ordinal() == ordinal) {
        return device.event();
    }
    let device = Driver::load().and_then(|driver| Device::new(&driver, ordinal)).map_err(|e| e.to_string())?;
    let event = device.event();
    devices.push(device);
    event
}
