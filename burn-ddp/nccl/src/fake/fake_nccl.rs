//! NCCL: communicators, groups of calls, and what happens in the background.

use std::cell::RefCell;
use std::ffi::{c_char, c_int, c_void};
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use super::clique::{Clique, Part, What};
use super::fake_driver::{FakeStream, GLANCE, Task};
use super::arithmetic::{Kind, size_of_code};
use super::{Fault, Inner};
use crate::driver::Raw;
use crate::nccl::{Config, IN_PROGRESS, NcclCalls, RawComm, SUCCESS, UniqueId};
use crate::watchdog::lock;

const SYSTEM_ERROR: c_int = 2;
const INVALID_ARGUMENT: c_int = 4;
const INVALID_USAGE: c_int = 5;
/// Ops with a factor have numbers from here on.
const FIRST_OWN_OP: i32 = 5;

pub(super) struct FakeComm {
    clique: Arc<Clique>,
    rank: usize,
    ordinal: usize,
    blocking: bool,
    aborted: AtomicBool,
    finalizing: AtomicBool,
    /// What the next looks will see.
    error: AtomicI32,
    /// How many looks it takes until what was launched is enqueued, and that.
    looks: AtomicU32,
    held: Mutex<Option<(Arc<FakeStream>, Vec<Op>)>>,
    /// How many collectives were launched.
    launched: AtomicU64,
}

/// What is called.
enum Op {
    Collective { nth: u64, part: PartOp },
    Send { peer: usize, from: u64, bytes: usize },
    Receive { peer: usize, to: u64, bytes: usize },
    Never,
}

struct PartOp {
    what: What,
    count: usize,
    dtype: i32,
    kind: Option<Kind>,
    input: u64,
    input_bytes: usize,
    output: u64,
}

/// A call in a group: communicator, stream, call.
type Called = (u64, u64, Op);

/// What a stream does for a call; `None` if that was aborted.
type Step = Box<dyn FnOnce(&FakeComm) -> Option<()> + Send>;

thread_local! {
    /// How deep in groups this thread is, and the calls so far.
    static GROUP: RefCell<(u32, Vec<Called>)> = const { RefCell::new((0, Vec::new())) };
}

impl Inner {
    fn comm(&self, raw: RawComm) -> Option<Arc<FakeComm>> {
        lock(&self.comms).get(&(raw as u64)).cloned()
    }

    /// A call with a communicator, alone or in a group.
    fn call(self: &Inner, comm: RawComm, stream: *mut c_void, op: impl FnOnce(&FakeComm) -> Option<Op>) -> c_int {
        let Some(found) = self.comm(comm) else { return INVALID_ARGUMENT };
        if self.current() != Some(found.ordinal) {
            self.misused(format!("a call for device {} while {:?} is current", found.ordinal, self.current()));
            return INVALID_USAGE;
        }
        if lock(&found.held).is_some() {
            self.misused("a call while another is in progress".to_owned());
            return INVALID_USAGE;
        }
        let Some(op) = op(&found) else { return INVALID_ARGUMENT };
        let alone = GROUP.with_borrow_mut(|(depth, calls)| {
            calls.push((comm as u64, stream as u64, op));
            *depth == 0
        });
        if alone { self.end_group() } else { SUCCESS }
    }

    fn collective(
        &self,
        (what, kind): (What, Option<Kind>),
        (input, output): (*const c_void, *mut c_void),
        (count, dtype): (usize, c_int),
        comm: RawComm,
        stream: *mut c_void,
    ) -> c_int {
        self.call(comm, stream, |found| {
            let row = count.checked_mul(size_of_code(dtype)?)?;
            let (size, rank) = (found.clique.size, found.rank);
            let (input_bytes, output_bytes) = match what {
                What::AllReduce => (row, row),
                What::Reduce(root) => (row, if root == rank { row } else { 0 }),
                What::Broadcast(root) => (if root == rank { row } else { 0 }, row),
                What::AllGather => (row, row * size),
                What::ReduceScatter => (row * size, row),
            };
            for (pointer, bytes) in [(input as u64, input_bytes), (output as u64, output_bytes)] {
                if bytes > 0 && self.within(pointer, bytes).is_none_or(|(memory, _)| memory.ordinal != found.ordinal) {
                    self.misused(format!(
                        "{what:?} of {bytes} bytes at {pointer:#x}, which are not of device {}",
                        found.ordinal
                    ));
                    return None;
                }
            }
            let nth = found.launched.fetch_add(1, Ordering::Relaxed);
            let part = PartOp { what, count, dtype, kind, input: input as u64, input_bytes, output: output as u64 };
            match self.fault(found.ordinal) {
                Some(Fault::LaunchFails(after)) if nth >= after => None,
                Some(Fault::Hangs(after)) if nth >= after => Some(Op::Never),
                Some(Fault::AsyncError(after)) if nth >= after => {
                    found.error.store(SYSTEM_ERROR, Ordering::Relaxed);
                    Some(Op::Never)
                }
                _ => Some(Op::Collective { nth, part }),
            }
        })
    }

    /// The op of a number, with this communicator's factor.
    fn kind(&self, op: c_int, comm: RawComm) -> Option<Kind> {
        if op < FIRST_OWN_OP {
            return Kind::of(op);
        }
        let (owner, factor) = *lock(&self.ops).get(&op)?;
        (owner == comm as u64).then(|| Kind::Scaled(vec![factor]))
    }

    /// Launches what this thread has collected: at once, or when the communicator is looked at.
    fn end_group(&self) -> c_int {
        let calls = GROUP.with_borrow_mut(|(_, calls)| std::mem::take(calls));
        let Some((raw, stream, _)) = calls.first() else { return SUCCESS };
        let (raw, stream) = (*raw, *stream);
        if calls.iter().any(|(comm, on, _)| (*comm, *on) != (raw, stream)) {
            self.misused("a group of several communicators or streams".to_owned());
            return INVALID_USAGE;
        }
        let (Some(comm), Some(stream)) = (self.comm(raw as RawComm), self.stream(stream as Raw)) else {
            return INVALID_ARGUMENT;
        };
        self.delays.dawdle();
        let ops: Vec<Op> = calls.into_iter().map(|(_, _, op)| op).collect();
        if comm.blocking {
            self.enqueue(&comm, &stream, ops);
            return SUCCESS;
        }
        comm.looks.store(2, Ordering::Relaxed);
        *lock(&comm.held) = Some((stream, ops));
        IN_PROGRESS
    }

    fn enqueue(&self, comm: &Arc<FakeComm>, stream: &FakeStream, ops: Vec<Op>) {
        let numbers = ops.iter().filter_map(|op| if let Op::Collective { nth, .. } = op { Some(*nth) } else { None });
        lock(&self.launches).extend(numbers.map(|nth| (comm.ordinal, comm.clique.id, nth)));
        let resolved: Vec<Step> = ops.into_iter().map(|op| self.resolved(comm.ordinal, op)).collect();
        let comm = comm.clone();
        stream.push(Task::Run(Box::new(move || {
            for op in resolved {
                if op(&comm).is_none() {
                    return;
                }
            }
        })));
    }

    /// Memory is found now: a device has its addresses.
    fn resolved(&self, ordinal: usize, op: Op) -> Step {
        let memory = |pointer: u64, bytes: usize| {
            self.within(pointer, bytes).filter(|(memory, _)| bytes > 0 && memory.ordinal == ordinal)
        };
        match op {
            Op::Collective { nth, part } => {
                let input = memory(part.input, part.input_bytes);
                // How much comes is known when it does; where it goes begins here.
                let output = memory(part.output, 1);
                let PartOp { what, count, dtype, kind, input_bytes, .. } = part;
                let misuse = self.misuse.clone();
                Box::new(move |comm| {
                    let read = |(memory, offset): (super::Allocation, usize)| {
                        lock(&memory.bytes)[offset..offset + input_bytes].to_vec()
                    };
                    let part = Part { what, count, dtype, kind, input: input.map(read).unwrap_or_default() };
                    let misused = |text| lock(&misuse).push(text);
                    let bytes = comm.clique.meet(comm.rank, nth, part, &|| comm.is_aborted(), &misused)?;
                    if let Some((memory, offset)) = output.filter(|_| !bytes.is_empty()) {
                        lock(&memory.bytes)[offset..offset + bytes.len()].copy_from_slice(&bytes);
                    }
                    Some(())
                })
            }
            Op::Send { peer, from, bytes } => {
                let memory = memory(from, bytes);
                Box::new(move |comm| {
                    let sent = memory.map(|(memory, offset)| lock(&memory.bytes)[offset..offset + bytes].to_vec());
                    comm.clique.send(comm.rank, peer, sent.unwrap_or_default());
                    Some(())
                })
            }
            Op::Receive { peer, to, bytes } => {
                let memory = memory(to, bytes);
                Box::new(move |comm| {
                    let received = comm.clique.receive(peer, comm.rank, &|| comm.is_aborted())?;
                    if let Some((memory, offset)) = memory {
                        let len = received.len().min(bytes);
                        lock(&memory.bytes)[offset..offset + len].copy_from_slice(&received[..len]);
                    }
                    Some(())
                })
            }
            Op::Never => Box::new(|comm| {
                while !comm.is_aborted() {
                    std::thread::sleep(GLANCE);
                }
                None
            }),
        }
    }
}

impl FakeComm {
    fn is_aborted(&self) -> bool {
        self.aborted.load(Ordering::Acquire)
    }
}

impl NcclCalls for Inner {
    unsafe fn get_version(&self, version: *mut c_int) -> c_int {
        // SAFETY: the caller's place.
        unsafe { *version = 22907 };
        SUCCESS
    }

    unsafe fn get_unique_id(&self, id: *mut UniqueId) -> c_int {
        let mut bytes = [0; 128];
        bytes[..8].copy_from_slice(&self.handle().to_le_bytes());
        // SAFETY: the caller's place.
        unsafe { *id = UniqueId(bytes) };
        SUCCESS
    }

    unsafe fn comm_init_rank_config(
        &self,
        comm: *mut RawComm,
        size: c_int,
        id: UniqueId,
        rank: c_int,
        config: *mut Config,
    ) -> c_int {
        let Some(ordinal) = self.current() else { return INVALID_USAGE };
        // SAFETY: the caller's configuration.
        let blocking = unsafe { (*config).blocking } != 0;
        let (size, rank) = (size as usize, rank as usize);
        if rank >= size || id.0 == [0; 128] {
            return INVALID_ARGUMENT;
        }
        self.delays.dawdle();
        let number = self.handle();
        let clique = lock(&self.cliques).entry(id.0).or_insert_with(|| Arc::new(Clique::new(number, size))).clone();
        let fault = self.fault(ordinal);
        if !matches!(fault, Some(Fault::InitFails | Fault::InitHangs)) {
            let mut state = lock(&clique.state);
            if state.joined.values().any(|other| *other == ordinal) || state.joined.insert(rank, ordinal).is_some() {
                self.misused(format!("rank {rank} on device {ordinal} is in this communicator twice"));
                return INVALID_USAGE;
            }
            clique.changed.notify_all();
            while blocking && state.joined.len() < size {
                state = clique.changed.wait(state).expect("no panic");
            }
        }
        let new = FakeComm {
            clique,
            rank,
            ordinal,
            blocking,
            aborted: AtomicBool::new(false),
            finalizing: AtomicBool::new(false),
            error: AtomicI32::new(if fault == Some(Fault::InitFails) { SYSTEM_ERROR } else { SUCCESS }),
            looks: AtomicU32::new(0),
            held: Mutex::new(None),
            launched: AtomicU64::new(0),
        };
        let handle = self.handle();
        lock(&self.comms).insert(handle, Arc::new(new));
        // SAFETY: the caller's place.
        unsafe { *comm = handle as RawComm };
        if blocking { SUCCESS } else { IN_PROGRESS }
    }

    unsafe fn comm_get_async_error(&self, comm: RawComm, error: *mut c_int) -> c_int {
        let Some(found) = self.comm(comm) else { return INVALID_ARGUMENT };
        let mut held = lock(&found.held);
        let state = match found.error.load(Ordering::Relaxed) {
            SUCCESS => {
                let peers = lock(&found.clique.state);
                let (joined, finalized) = (peers.joined.len(), peers.finalized);
                drop(peers);
                let ready = joined == found.clique.size
                    && (!found.finalizing.load(Ordering::Relaxed) || finalized == found.clique.size);
                let looked = held.is_none() || found.looks.fetch_sub(1, Ordering::Relaxed) <= 1;
                if let Some((stream, ops)) = held.take_if(|_| looked) {
                    self.delays.dawdle();
                    self.enqueue(&found, &stream, ops);
                }
                if ready && looked { SUCCESS } else { IN_PROGRESS }
            }
            // What was launched is on the device nevertheless.
            code => {
                if let Some((stream, ops)) = held.take() {
                    self.enqueue(&found, &stream, ops);
                }
                code
            }
        };
        // SAFETY: the caller's place.
        unsafe { *error = state };
        SUCCESS
    }

    unsafe fn comm_finalize(&self, comm: RawComm) -> c_int {
        let Some(found) = self.comm(comm) else { return INVALID_ARGUMENT };
        found.finalizing.store(true, Ordering::Relaxed);
        lock(&found.clique.state).finalized += 1;
        IN_PROGRESS
    }

    unsafe fn comm_destroy(&self, comm: RawComm) -> c_int {
        let Some(found) = lock(&self.comms).remove(&(comm as u64)) else { return INVALID_ARGUMENT };
        if !found.finalizing.load(Ordering::Relaxed) {
            self.misused("a communicator was destroyed that was not finalized, which blocks".to_owned());
        }
        SUCCESS
    }

    unsafe fn comm_abort(&self, comm: RawComm) -> c_int {
        let Some(found) = lock(&self.comms).remove(&(comm as u64)) else { return INVALID_ARGUMENT };
        found.aborted.store(true, Ordering::Release);
        if !found.finalizing.load(Ordering::Relaxed) {
            lock(&found.clique.state).finalized += 1;
        }
        found.clique.changed.notify_all();
        SUCCESS
    }

    unsafe fn get_error_string(&self, error: c_int) -> *const c_char {
        match error {
            SYSTEM_ERROR => c"unhandled system error",
            INVALID_ARGUMENT => c"invalid argument",
            _ => c"invalid usage",
        }
        .as_ptr()
    }

    unsafe fn get_last_error(&self, _comm: RawComm) -> *const c_char {
        c"said by the fake NCCL".as_ptr()
    }

    unsafe fn group_start(&self) -> c_int {
        GROUP.with_borrow_mut(|(depth, _)| *depth += 1);
        SUCCESS
    }

    unsafe fn group_end(&self) -> c_int {
        let depth = GROUP.with_borrow_mut(|(depth, _)| {
            *depth = depth.saturating_sub(1);
            *depth
        });
        if depth == 0 { self.end_group() } else { SUCCESS }
    }

    unsafe fn all_reduce(
        &self,
        input: *const c_void,
        output: *mut c_void,
        count: usize,
        dtype: c_int,
        op: c_int,
        comm: RawComm,
        stream: *mut c_void,
    ) -> c_int {
        let Some(kind) = self.kind(op, comm) else { return INVALID_ARGUMENT };
        self.collective((What::AllReduce, Some(kind)), (input, output), (count, dtype), comm, stream)
    }

    unsafe fn reduce(
        &self,
        input: *const c_void,
        output: *mut c_void,
        count: usize,
        dtype: c_int,
        op: c_int,
        root: c_int,
        comm: RawComm,
        stream: *mut c_void,
    ) -> c_int {
        let Some(kind) = self.kind(op, comm) else { return INVALID_ARGUMENT };
        self.collective((What::Reduce(root as usize), Some(kind)), (input, output), (count, dtype), comm, stream)
    }

    unsafe fn broadcast(
        &self,
        input: *const c_void,
        output: *mut c_void,
        count: usize,
        dtype: c_int,
        root: c_int,
        comm: RawComm,
        stream: *mut c_void,
    ) -> c_int {
        self.collective((What::Broadcast(root as usize), None), (input, output), (count, dtype), comm, stream)
    }

    unsafe fn all_gather(
        &self,
        input: *const c_void,
        output: *mut c_void,
        count: usize,
        dtype: c_int,
        comm: RawComm,
        stream: *mut c_void,
    ) -> c_int {
        self.collective((What::AllGather, None), (input, output), (count, dtype), comm, stream)
    }

    unsafe fn reduce_scatter(
        &self,
        input: *const c_void,
        output: *mut c_void,
        count: usize,
        dtype: c_int,
        op: c_int,
        comm: RawComm,
        stream: *mut c_void,
    ) -> c_int {
        let Some(kind) = self.kind(op, comm) else { return INVALID_ARGUMENT };
        self.collective((What::ReduceScatter, Some(kind)), (input, output), (count, dtype), comm, stream)
    }

    unsafe fn send(
        &self,
        input: *const c_void,
        count: usize,
        dtype: c_int,
        peer: c_int,
        comm: RawComm,
        stream: *mut c_void,
    ) -> c_int {
        self.call(comm, stream, |found| {
            let bytes = count.checked_mul(size_of_code(dtype)?)?;
            let from = input as u64;
            self.within(from, bytes).filter(|(memory, _)| memory.ordinal == found.ordinal)?;
            Some(Op::Send { peer: peer as usize, from, bytes })
        })
    }

    unsafe fn recv(
        &self,
        output: *mut c_void,
        count: usize,
        dtype: c_int,
        peer: c_int,
        comm: RawComm,
        stream: *mut c_void,
    ) -> c_int {
        self.call(comm, stream, |found| {
            let bytes = count.checked_mul(size_of_code(dtype)?)?;
            let to = output as u64;
            self.within(to, bytes).filter(|(memory, _)| memory.ordinal == found.ordinal)?;
            Some(Op::Receive { peer: peer as usize, to, bytes })
        })
    }

    unsafe fn red_op_create_pre_mul_sum(
        &self,
        op: *mut c_int,
        scalar: *mut c_void,
        dtype: c_int,
        _residence: c_int,
        comm: RawComm,
    ) -> c_int {
        let Some(size) = size_of_code(dtype) else { return INVALID_ARGUMENT };
        let mut factor = [0; 8];
        // SAFETY: the caller's scalar is an element of the type.
        unsafe { std::ptr::copy_nonoverlapping(scalar.cast::<u8>(), factor.as_mut_ptr(), size) };
        let mut ops = lock(&self.ops);
        let number = (FIRST_OWN_OP..).find(|number| !ops.contains_key(number)).unwrap_or(FIRST_OWN_OP);
        ops.insert(number, (comm as u64, factor));
        // SAFETY: the caller's place.
        unsafe { *op = number };
        SUCCESS
    }

    unsafe fn red_op_destroy(&self, op: c_int, comm: RawComm) -> c_int {
        let mut ops = lock(&self.ops);
        match ops.get(&op) {
            Some((owner, _)) if *owner == comm as u64 => ops.remove(&op).map_or(INVALID_ARGUMENT, |_| SUCCESS),
            _ => INVALID_ARGUMENT,
        }
    }
}
