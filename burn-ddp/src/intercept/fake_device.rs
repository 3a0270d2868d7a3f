//! A device in host memory whose engine reduces there, for tests where there is no GPU: Flex computes, and the gradients that it lends are
//! where no engine between hosts looks. What is lent is not there at once, and is nobody's until it was taken back. The engine adds as those
//! between hosts do, so results are those of host memory bit by bit.

use std::any::Any;
use std::cell::Cell;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, channel};
use std::time::Duration;

use burn::backend::flex::FlexTensor;
use burn::backend::{Flex, TensorMetadata};
use burn::tensor::{DType, Shape, TensorData};
use burn_ddp_comm::call::Call;
use burn_ddp_comm::engine::{Engine, Fabric, Incoming, OnDevice, Outgoing};
use burn_ddp_comm::membership::Membership;
use burn_ddp_comm::{DType as CommDType, Error, ReduceOp, Result};

use crate::Ddp;
use crate::gradients::{DeviceLoan, GradientMemory};

/// Of its engine.
pub(crate) const NAME: &str = "fake device";

/// What goes wrong, once.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Fault {
    Lend,
    /// The device says no, later.
    Place,
    /// The device says nothing.
    Silence,
    Reduce,
    TakeBack,
}

thread_local! {
    /// What goes wrong on this rank, when next it can.
    pub(crate) static FAULT: Cell<Option<Fault>> = const { Cell::new(None) };
}

fn fails(fault: Fault) -> bool {
    FAULT.get() == Some(fault) && FAULT.take().is_some()
}

/// Runs of elements on the device.
struct DeviceRuns {
    runs: Vec<Vec<u8>>,
    reduced: bool,
    fault: Option<Fault>,
}

#[derive(Debug)]
struct FakeLoan {
    answer: Receiver<std::result::Result<DeviceRuns, String>>,
    place: Option<DeviceRuns>,
    tensors: Vec<(Shape, DType)>,
}

impl std::fmt::Debug for DeviceRuns {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "DeviceRuns({} runs, reduced: {})", self.runs.len(), self.reduced)
    }
}

impl DeviceLoan for FakeLoan {
    fn len_elems(&self) -> usize {
        self.tensors.iter().map(|(shape, _)| shape.num_elements()).sum()
    }

    fn place(&mut self, patience: Duration) -> std::result::Result<&mut dyn Any, String> {
        let answer = self.answer.recv_timeout(patience).map_err(|e| format!("the fake device: {e}"))?;
        Ok(self.place.insert(answer?))
    }
}

pub(crate) fn lend(tensors: Vec<FlexTensor>) -> std::result::Result<Box<dyn DeviceLoan>, String> {
    if fails(Fault::Lend) {
        return Err("the fake device lends nothing".into());
    }
    let fault = [Fault::Place, Fault::Silence, Fault::Reduce, Fault::TakeBack].into_iter().find(|fault| fails(*fault));
    let shapes = tensors.iter().map(|t| (t.shape(), t.dtype())).collect();
    let (answers, answer) = channel();
    std::thread::spawn(move || {
        std::thread::sleep(Duration::from_millis(1));
        let bytes = |tensor| Flex::with_bytes(tensor, |_, bytes: &[u8]| bytes.to_vec());
        let runs: std::result::Result<Vec<_>, _> = tensors.into_iter().map(bytes).collect();
        let place = match fault {
            Some(Fault::Place) => Err("the fake device has no such memory".into()),
            Some(Fault::Silence) => return,
            fault => runs.map(|runs| DeviceRuns { runs, reduced: false, fault }),
        };
        let _ = answers.send(place);
    });
    Ok(Box::new(FakeLoan { answer, place: None, tensors: shapes }))
}

pub(crate) fn take_back(lent: Box<dyn DeviceLoan>) -> std::result::Result<Vec<FlexTensor>, String> {
    let lent: Box<dyn Any> = lent;
    let mut lent = lent.downcast::<FakeLoan>().map_err(|_| "this was lent by another device")?;
    let Some(DeviceRuns { runs, reduced: true, fault }) = lent.place.take() else {
        return Err("this was never reduced".into());
    };
    if fault == Some(Fault::TakeBack) {
        return Err("the fake device gives nothing back".into());
    }
    let tensor = |(bytes, (shape, dtype)): (Vec<u8>, (Shape, DType))| {
        FlexTensor::from_data(TensorData::from_bytes_vec(bytes, shape, dtype))
    };
    Ok(runs.into_iter().zip(std::mem::take(&mut lent.tensors)).map(tensor).collect())
}

/// Gradients of models that are wrapped from now on are reduced on the fake device, which counts reductions.
pub(crate) fn install(ddp: &Ddp) -> Arc<AtomicUsize> {
    let count = Arc::new(AtomicUsize::new(0));
    let counted = count.clone();
    ddp.world()
        .set_fabric(|own, membership| {
            Ok::<_, Error>(Arc::new(FakeFabric { own, membership, count: counted }) as Arc<dyn Fabric>)
        })
        .expect("this fabric is always made");
    count
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

/// What is in host memory is left to the world's own engine.
struct FakeEngine {
    own: Box<dyn Engine>,
    membership: Arc<Membership>,
    count: Arc<AtomicUsize>,
}

impl Engine for FakeEngine {
    fn name(&self) -> &'static str {
        NAME
    }

    fn all_reduce_on_device(&mut self, call: &Call, elements: OnDevice<'_>, op: Option<ReduceOp>) -> Result<()> {
        let OnDevice { dtype, len_elems, place } = elements;
        let refuse = |message: &str| Error::Environment { message: message.into() };
        let place = place.downcast_mut::<DeviceRuns>().ok_or_else(|| refuse("this is not on the fake device"))?;
        if place.fault == Some(Fault::Reduce) {
            let peer = self.membership.peers()[self.membership.rank()].clone();
            return Err(Error::PeerFailed { peer, cause: "the fake device fell off the bus".into(), during: None });
        }
        let mut all = place.runs.concat();
        if all.len() != len_elems * dtype.size_bytes() {
            return Err(refuse("these are not as many elements as was said"));
        }
        match op {
            Some(op) => self.own.all_reduce(call, dtype, &mut all, op)?,
            None => self.own.all_reduce_weighted(call, dtype, &mut all)?,
        }
        let mut rest = &all[..];
        for run in &mut place.runs {
            let (mine, others) = rest.split_at(run.len());
            run.copy_from_slice(mine);
            rest = others;
        }
        place.reduced = true;
        self.count.fetch_add(1, Ordering::Relaxed);
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
