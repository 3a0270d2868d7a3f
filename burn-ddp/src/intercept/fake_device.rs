//! A device in host memory for tests without a GPU. Flex computes; a thread copies the tensors that it lends to other
//! memory some time later. Faults can be injected.
//!
//! Its engine adds like the engines between hosts, so results are those of host memory bit by bit ([`install`]). Or it
//! is NCCL's, on the GPU that the crate `burn-ddp-nccl` has for tests ([`install_gpu`]): gradients go the same way as
//! on CUDA, through events, launches and communicators, and missing synchronisation gives wrong numbers.
#![allow(unsafe_code)]

use std::any::Any;
use std::cell::{Cell, RefCell};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, channel};
use std::time::Duration;

use burn::backend::flex::FlexTensor;
use burn::backend::{Flex, TensorMetadata};
use burn::tensor::{DType, Shape, TensorData};
use burn_ddp_comm::call::Call;
use burn_ddp_comm::engine::{Engine, Fabric, Incoming, OnDevice, Outgoing, gather_rows_into, reduce_rows};
use burn_ddp_comm::membership::Membership;
use burn_ddp_comm::{DType as CommDType, Error, PartReduction, ReduceOp, Result, RowDivision, SharedBuffer};
use burn_ddp_nccl::fake::Machine;
use burn_ddp_nccl::{Device, DeviceBuffer, DeviceElements, HostMemory, NcclFabric, Piece, Stream};

use crate::Ddp;
use crate::gradients::{DeviceLoan, GradientMemory};

/// Name of the engine that adds like the engines between hosts.
const NAME: &str = "fake device";

/// A failure of the device, once.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Fault {
    Lend,
    /// The device answers with an error, later.
    Place,
    /// The device does not answer.
    Silence,
    /// The reduction fails; not on a [GPU](install_gpu), which has faults of its own.
    Reduce,
    TakeBack,
}

/// All failures, and what their errors say.
pub(crate) const FAULTS: [(Fault, &str); 5] = [
    (Fault::Lend, "lends nothing"),
    (Fault::Place, "no such memory"),
    (Fault::Silence, "the fake device: it does not answer"),
    (Fault::Reduce, "fell off the bus"),
    (Fault::TakeBack, "gives nothing back"),
];

/// Memory of a rank's device.
#[derive(Clone)]
enum Memory {
    /// Bytes that a thread copies some time later.
    Late,
    Gpu(Gpu),
}

/// A rank's GPU, and the stream on which it computes.
#[derive(Clone)]
struct Gpu {
    machine: Machine,
    device: Device,
    stream: Arc<Stream>,
}

thread_local! {
    /// Fault that this rank's device has at the next occasion.
    pub(crate) static FAULT: Cell<Option<Fault>> = const { Cell::new(None) };
    /// This rank's device.
    static MEMORY: RefCell<Option<Memory>> = const { RefCell::new(None) };
}

fn fails(fault: Fault) -> bool {
    FAULT.get() == Some(fault) && FAULT.take().is_some()
}

/// True if gradients of this rank stay on its fake device.
pub(crate) fn is_installed() -> bool {
    MEMORY.with_borrow(Option::is_some)
}

/// Gradients of models that this rank wraps from now on are reduced on the device, by an engine that counts reductions.
pub(crate) fn install(ddp: &Ddp) -> Arc<AtomicUsize> {
    MEMORY.set(Some(Memory::Late));
    let count = Arc::new(AtomicUsize::new(0));
    let counted = count.clone();
    ddp.world()
        .set_fabric(|own, membership| {
            Ok::<_, Error>(Arc::new(FakeFabric { own, membership, count: counted }) as Arc<dyn Fabric>)
        })
        .expect("this fabric is always made");
    count
}

/// Gradients of models that this rank wraps from now on are reduced by NCCL's engine on the GPU of its number.
pub(crate) fn install_gpu(ddp: &Ddp, machine: &Machine) {
    let device = Device::new(&machine.driver(), ddp.rank()).expect("a device");
    let stream = Arc::new(device.stream().expect("a stream"));
    MEMORY.set(Some(Memory::Gpu(Gpu { machine: machine.clone(), device: device.clone(), stream })));
    ddp.world()
        .set_fabric(|own, membership| {
            NcclFabric::new(own, membership, machine.nccl(), device, HostMemory::ByHost)
                .map(|f| Arc::new(f) as Arc<dyn Fabric>)
        })
        .expect("a fabric");
}

#[derive(Debug)]
struct FakeLoan {
    place: Place,
    fault: Option<Fault>,
    /// Number of elements lent.
    len_elems: usize,
    results: Vec<(Shape, DType)>,
}

#[derive(Debug)]
enum Place {
    Late { answer: Receiver<std::result::Result<Vec<Vec<u8>>, String>>, runs: Option<Runs> },
    Gpu { reduce: DeviceElements, buffers: Vec<DeviceBuffer> },
}

/// Runs of elements in the memory of the [engine](FakeEngine).
#[derive(Debug)]
struct Runs {
    bytes: Vec<Vec<u8>>,
    is_done: bool,
    fails: bool,
}

impl DeviceLoan for FakeLoan {
    fn len_elems(&self) -> usize {
        self.len_elems
    }

    fn place(&mut self, patience: Duration) -> std::result::Result<&mut dyn Any, String> {
        match self.fault {
            Some(Fault::Place) => return Err("the fake device has no such memory".into()),
            Some(Fault::Silence) => return Err("the fake device: it does not answer".into()),
            _ => {}
        }
        match &mut self.place {
            Place::Late { answer, runs } => {
                let bytes = answer.recv_timeout(patience).map_err(|e| format!("the fake device: {e}"))??;
                Ok(runs.insert(Runs { bytes, is_done: false, fails: self.fault == Some(Fault::Reduce) }))
            }
            Place::Gpu { reduce, .. } => Ok(reduce),
        }
    }
}

/// [`GradientMemory::lend`] of Flex in tests.
pub(crate) fn lend(tensors: Vec<(FlexTensor, Shape)>) -> std::result::Result<Box<dyn DeviceLoan>, String> {
    if fails(Fault::Lend) {
        return Err("the fake device lends nothing".into());
    }
    let faults = [Fault::Place, Fault::Silence, Fault::Reduce, Fault::TakeBack];
    let fault = faults.into_iter().find(|fault| fails(*fault));
    let len_elems = tensors.iter().map(|(tensor, _)| tensor.shape().num_elements()).sum();
    let results = tensors.iter().map(|(tensor, result)| (result.clone(), tensor.dtype())).collect();
    let place = match MEMORY.with_borrow(Clone::clone).ok_or("this rank has no fake device")? {
        Memory::Late => copy_later(tensors),
        Memory::Gpu(gpu) => gpu.copy(tensors)?,
    };
    Ok(Box::new(FakeLoan { place, fault, len_elems, results }))
}

/// [`GradientMemory::take_back`] of Flex in tests.
pub(crate) fn take_back(loan: Box<dyn DeviceLoan>) -> std::result::Result<Vec<FlexTensor>, String> {
    let loan: Box<dyn Any> = loan;
    let FakeLoan { place, fault, results, .. } =
        *loan.downcast::<FakeLoan>().map_err(|_| "the loan was made by another device")?;
    if fault == Some(Fault::TakeBack) {
        return Err("the fake device gives nothing back".into());
    }
    let bytes = match (place, MEMORY.with_borrow(Clone::clone)) {
        (Place::Late { runs: Some(Runs { bytes, is_done: true, .. }), .. }, _) => bytes,
        (Place::Gpu { reduce, buffers }, Some(Memory::Gpu(gpu))) => gpu.read_reduced(&reduce, &buffers)?,
        _ => return Err("this was never reduced".into()),
    };
    let tensor = |(bytes, (shape, dtype)): (Vec<u8>, (Shape, DType))| {
        FlexTensor::from_data(TensorData::from_bytes_vec(bytes, shape, dtype))
    };
    Ok(bytes.into_iter().zip(results).map(tensor).collect())
}

fn copy_later(tensors: Vec<(FlexTensor, Shape)>) -> Place {
    let (answers, answer) = channel();
    std::thread::spawn(move || {
        std::thread::sleep(Duration::from_millis(1));
        let bytes = |(tensor, _)| Flex::with_bytes(tensor, |_, bytes: &[u8]| bytes.to_vec());
        let _ = answers.send(tensors.into_iter().map(bytes).collect());
    });
    Place::Late { answer, runs: None }
}

impl Gpu {
    /// Copies tensors to buffers of the GPU, by kernels that take their time.
    fn copy(&self, tensors: Vec<(FlexTensor, Shape)>) -> std::result::Result<Place, String> {
        let Gpu { machine, device, stream } = self;
        let (mut buffers, mut pieces) = (Vec::new(), Vec::new());
        for (tensor, shape) in tensors {
            let (input_elems, output_elems) = (tensor.shape().num_elements(), shape.num_elements());
            let (is_reduced, elem_bytes) = (tensor.shape() == shape, tensor.dtype().size());
            let bytes = Flex::with_bytes(tensor, |_, bytes: &[u8]| bytes.to_vec())?;
            let (buffer, result) = (device.alloc(bytes.len())?, device.alloc(output_elems * elem_bytes)?);
            let (input, other) = (buffer.pointer(), result.pointer());
            // Each second one is not reduced in place.
            let output = if is_reduced && pieces.len() % 2 == 0 { input } else { other };
            pieces.push(Piece { input, input_elems, output, output_elems });
            machine.launch(stream, move |machine| {
                std::thread::sleep(Duration::from_millis(1));
                machine.write(input, &bytes);
            });
            // Of each two, the second has the result.
            buffers.extend(if output == input { [result, buffer] } else { [buffer, result] });
        }
        let ready = device.event()?;
        // SAFETY: a stream of this device.
        unsafe { ready.record_on(stream.raw()) }?;
        // SAFETY: on this machine access to what is not allocated is an error, and nothing else.
        let reduce = unsafe { DeviceElements::new(device.ordinal(), pieces, Some(ready)) };
        Ok(Place::Gpu { reduce, buffers })
    }

    /// Reads results behind the reduction.
    fn read_reduced(
        &self,
        reduce: &DeviceElements,
        buffers: &[DeviceBuffer],
    ) -> std::result::Result<Vec<Vec<u8>>, String> {
        let done = reduce.done().ok_or("this was never reduced")?;
        // SAFETY: a stream of this device.
        unsafe { done.hold_up(self.stream.raw()) }?;
        let (sender, receiver) = channel();
        let results: Vec<_> = buffers.iter().skip(1).step_by(2).map(|b| (b.pointer(), b.len_bytes())).collect();
        self.machine.launch(&self.stream, move |machine| {
            let _ = sender.send(results.iter().map(|(pointer, len)| machine.read(*pointer, *len)).collect());
        });
        receiver.recv_timeout(Duration::from_secs(20)).map_err(|e| format!("the GPU's stream: {e}"))
    }
}

struct FakeFabric {
    own: Arc<dyn Fabric>,
    membership: Arc<Membership>,
    count: Arc<AtomicUsize>,
}

impl Fabric for FakeFabric {
    fn name(&self) -> &'static str {
        NAME
    }

    fn open(&self, call: &Call) -> Result<Box<dyn Engine>> {
        let (own, membership, count) = (self.own.open(call)?, self.membership.clone(), self.count.clone());
        Ok(Box::new(FakeEngine { own, membership, count }))
    }
}

/// Adds like the world's own engine, which does all collectives in host memory.
struct FakeEngine {
    own: Box<dyn Engine>,
    membership: Arc<Membership>,
    count: Arc<AtomicUsize>,
}

impl FakeEngine {
    /// The memory of a collective on the device, and what it holds, one tensor behind the other.
    fn open<'a>(&self, place: &'a mut dyn Any) -> Result<(&'a mut Runs, Vec<u8>)> {
        let refuse = || Error::Environment { message: "this is not on the fake device".into() };
        let place = place.downcast_mut::<Runs>().ok_or_else(refuse)?;
        if place.fails {
            let peer = self.membership.peers()[self.membership.rank()].clone();
            return Err(Error::PeerFailed { peer, cause: "the fake device fell off the bus".into(), during: None });
        }
        let all = place.bytes.concat();
        Ok((place, all))
    }

    /// Writes what a collective has made, one tensor of its length behind the other.
    fn close(&self, place: &mut Runs, lens: &[usize], all: &[u8]) {
        let mut rest = all;
        place.bytes = lens
            .iter()
            .map(|len| {
                let (own, others) = rest.split_at(*len);
                rest = others;
                own.to_vec()
            })
            .collect();
        place.is_done = true;
        self.count.fetch_add(1, Ordering::Relaxed);
    }
}

impl Engine for FakeEngine {
    fn name(&self) -> &'static str {
        NAME
    }

    fn leave(&mut self) {
        self.own.leave();
    }

    fn all_reduce_on_device(&mut self, call: &Call, elements: OnDevice<'_>, op: Option<ReduceOp>) -> Result<()> {
        let OnDevice { dtype, len_elems, place } = elements;
        let (place, mut all) = self.open(place)?;
        if all.len() != len_elems * dtype.size_bytes() {
            return Err(Error::Environment { message: "this is another number of elements".into() });
        }
        match op {
            Some(op) => self.own.all_reduce(call, dtype, &mut all, op)?,
            None => self.own.all_reduce_weighted(call, dtype, &mut all)?,
        }
        let lens: Vec<usize> = place.bytes.iter().map(Vec::len).collect();
        self.close(place, &lens, &all);
        Ok(())
    }

    fn all_gather_on_device(
        &mut self,
        call: &Call,
        (_, division): (CommDType, RowDivision),
        place: &mut dyn Any,
    ) -> Result<()> {
        let (place, part) = self.open(place)?;
        let whole =
            gather_rows_into(&mut *self.own, call, division, &part, &mut SharedBuffer::plain(division.len_bytes()))?;
        self.close(place, &[division.len_bytes()], &whole);
        Ok(())
    }

    fn reduce_scatter_on_device(
        &mut self,
        call: &Call,
        (dtype, division): (CommDType, RowDivision),
        reduction: &PartReduction,
        place: &mut dyn Any,
    ) -> Result<()> {
        let (place, whole) = self.open(place)?;
        let mut part = vec![0; division.bytes_of(call.group_rank()?).len()];
        reduce_rows(&mut *self.own, call, (dtype, division), &whole, reduction, &mut part)?;
        self.close(place, &[part.len()], &part);
        Ok(())
    }

    fn barrier(&mut self, call: &Call) -> Result<()> {
        self.own.barrier(call)
    }

    fn all_reduce(&mut self, call: &Call, dtype: CommDType, buf: &mut [u8], op: ReduceOp) -> Result<()> {
        self.own.all_reduce(call, dtype, buf, op)
    }

    fn all_reduce_weighted(&mut self, call: &Call, dtype: CommDType, buf: &mut [u8]) -> Result<()> {
        self.own.all_reduce_weighted(call, dtype, buf)
    }

    fn broadcast(&mut self, call: &Call, buf: &mut [u8], root: usize) -> Result<()> {
        self.own.broadcast(call, buf, root)
    }

    fn all_gather(&mut self, call: &Call, input: &[u8], outputs: &mut [&mut [u8]]) -> Result<()> {
        self.own.all_gather(call, input, outputs)
    }

    fn reduce_scatter(
        &mut self,
        call: &Call,
        dtype: CommDType,
        input: &[u8],
        output: &mut [u8],
        op: ReduceOp,
    ) -> Result<()> {
        self.own.reduce_scatter(call, dtype, input, output, op)
    }

    fn reduce(&mut self, call: &Call, dtype: CommDType, buf: &mut [u8], op: ReduceOp, root: usize) -> Result<()> {
        self.own.reduce(call, dtype, buf, op, root)
    }

    fn gather(&mut self, call: &Call, input: &[u8], outputs: Option<&mut [&mut [u8]]>, root: usize) -> Result<()> {
        self.own.gather(call, input, outputs, root)
    }

    fn scatter(&mut self, call: &Call, inputs: Option<&[&[u8]]>, output: &mut [u8], root: usize) -> Result<()> {
        self.own.scatter(call, inputs, output, root)
    }

    fn all_to_all(&mut self, call: &Call, input: &[u8], output: &mut [u8]) -> Result<()> {
        self.own.all_to_all(call, input, output)
    }

    fn send_recv(&mut self, call: &Call, send: Option<Outgoing<'_>>, receive: Option<&mut Incoming<'_>>) -> Result<()> {
        self.own.send_recv(call, send, receive)
    }
}
