//! Launches of collectives: checks of their memory, groups of calls, and the work on the stream.

use std::cell::RefCell;
use std::ffi::{c_int, c_void};
use std::sync::Arc;
use std::sync::atomic::Ordering;

use super::fake_comm::{FakeComm, Op, PartOp};
use super::fake_reduction::{Kind, size_of_code};
use super::fake_rendezvous::{Part, What};
use super::fake_state::{Allocation, Fault, State};
use super::fake_stream::{FakeStream, GLANCE, Task};
use crate::driver::Raw;
use crate::nccl::{IN_PROGRESS, RawComm, SUCCESS};
use crate::poison_free_lock::lock;

pub(super) const SYSTEM_ERROR: c_int = 2;
pub(super) const INVALID_ARGUMENT: c_int = 4;
pub(super) const INVALID_USAGE: c_int = 5;
/// Operators with a factor have numbers from here on.
pub(super) const FIRST_OWN_OP: i32 = 5;

/// A call in a group: communicator, stream, call.
type Called = (u64, u64, Op);

/// Work of a stream for a call; returns `None` if the call was aborted.
type Step = Box<dyn FnOnce(&FakeComm) -> Option<()> + Send>;

thread_local! {
    /// Number of groups that this thread has begun and not ended, and the calls in them so far.
    static GROUP: RefCell<(u32, Vec<Called>)> = const { RefCell::new((0, Vec::new())) };
}

impl State {
    /// Makes a call of a communicator, alone or in a group.
    pub(super) fn call(&self, comm: RawComm, stream: *mut c_void, op: impl FnOnce(&FakeComm) -> Option<Op>) -> c_int {
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
        if alone { self.launch() } else { SUCCESS }
    }

    pub(super) fn collective(
        &self,
        (what, kind): (What, Option<Kind>),
        (input, output): (*const c_void, *mut c_void),
        (count, dtype): (usize, c_int),
        comm: RawComm,
        stream: *mut c_void,
    ) -> c_int {
        self.call(comm, stream, |found| {
            let row = count.checked_mul(size_of_code(dtype)?)?;
            let (size, rank) = (found.rendezvous.size, found.rank);
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

    /// Operator with the number `op`, with this communicator's factor.
    pub(super) fn kind(&self, op: c_int, comm: RawComm) -> Option<Kind> {
        if op < FIRST_OWN_OP {
            return Kind::of(op);
        }
        let (owner, factor) = *lock(&self.ops).get(&op)?;
        (owner == comm as u64).then(|| Kind::Scaled(vec![factor]))
    }

    pub(super) fn begin_group(&self) {
        GROUP.with_borrow_mut(|(depth, _)| *depth += 1);
    }

    pub(super) fn end_group(&self) -> c_int {
        let depth = GROUP.with_borrow_mut(|(depth, _)| {
            *depth = depth.saturating_sub(1);
            *depth
        });
        if depth == 0 { self.launch() } else { SUCCESS }
    }

    /// Launches the calls of this thread's group: at once, or in a later `ncclCommGetAsyncError` if non-blocking.
    fn launch(&self) -> c_int {
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

    pub(super) fn enqueue(&self, comm: &Arc<FakeComm>, stream: &FakeStream, ops: Vec<Op>) {
        let numbers = ops.iter().filter_map(|op| if let Op::Collective { nth, .. } = op { Some(*nth) } else { None });
        lock(&self.launches).extend(numbers.map(|nth| (comm.ordinal, comm.rendezvous.id, nth)));
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

    /// Work of a call. Its memory is looked up now: the stream's thread cannot.
    fn resolved(&self, ordinal: usize, op: Op) -> Step {
        let memory = |pointer: u64, bytes: usize| {
            self.within(pointer, bytes).filter(|(memory, _)| bytes > 0 && memory.ordinal == ordinal)
        };
        match op {
            Op::Collective { nth, part } => {
                let input = memory(part.input, part.input_bytes);
                // The length of the output is known when it comes.
                let output = memory(part.output, 1);
                let PartOp { what, count, dtype, kind, input_bytes, .. } = part;
                let misuse = self.misuse.clone();
                Box::new(move |comm| {
                    let read = |(memory, offset): (Allocation, usize)| {
                        lock(&memory.bytes)[offset..offset + input_bytes].to_vec()
                    };
                    let part = Part { what, count, dtype, kind, input: input.map(read).unwrap_or_default() };
                    let misused = |text| lock(&misuse).push(text);
                    let bytes = comm.rendezvous.meet(comm.rank, nth, part, &|| comm.is_aborted(), &misused)?;
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
                    comm.rendezvous.send(comm.rank, peer, sent.unwrap_or_default());
                    Some(())
                })
            }
            Op::Receive { peer, to, bytes } => {
                let memory = memory(to, bytes);
                Box::new(move |comm| {
                    let received = comm.rendezvous.receive(peer, comm.rank, &|| comm.is_aborted())?;
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
