//! The functions of the fake NCCL library.
#![allow(unsafe_code)]

use std::ffi::{c_char, c_int, c_void};
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use super::fake_comm::{FakeComm, Op};
use super::fake_launch::{FIRST_OWN_OP, INVALID_ARGUMENT, INVALID_USAGE, SYSTEM_ERROR};
use super::fake_reduction::size_of_code;
use super::fake_rendezvous::{FakeRendezvous, What};
use super::fake_state::{Fault, State};
use crate::nccl::{Config, IN_PROGRESS, NcclCalls, RawComm, SUCCESS, UniqueId};
use crate::poison_free_lock::lock;

/// Time that an abort waits for a launch in the background.
const END_OF_A_LAUNCH: Duration = Duration::from_millis(100);

impl NcclCalls for State {
    unsafe fn get_version(&self, version: *mut c_int) -> c_int {
        // SAFETY: the caller's out-pointer.
        unsafe { *version = 22907 };
        SUCCESS
    }

    unsafe fn get_unique_id(&self, id: *mut UniqueId) -> c_int {
        let mut bytes = [0; 128];
        bytes[..8].copy_from_slice(&self.handle().to_le_bytes());
        // SAFETY: the caller's out-pointer.
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
        let rendezvous =
            lock(&self.rendezvous).entry(id.0).or_insert_with(|| Arc::new(FakeRendezvous::new(number, size))).clone();
        let fault = self.fault(ordinal);
        if !matches!(fault, Some(Fault::InitFails | Fault::InitHangs)) {
            let mut state = lock(&rendezvous.state);
            if state.joined.values().any(|other| *other == ordinal) || state.joined.insert(rank, ordinal).is_some() {
                self.misused(format!("rank {rank} on device {ordinal} is in this communicator twice"));
                return INVALID_USAGE;
            }
            rendezvous.changed.notify_all();
            while blocking && state.joined.len() < size {
                state = rendezvous.changed.wait(state).expect("no panic");
            }
        }
        let new = FakeComm {
            rendezvous,
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
        // SAFETY: the caller's out-pointer.
        unsafe { *comm = handle as RawComm };
        if blocking { SUCCESS } else { IN_PROGRESS }
    }

    unsafe fn comm_get_async_error(&self, comm: RawComm, error: *mut c_int) -> c_int {
        let Some(found) = self.comm(comm) else { return INVALID_ARGUMENT };
        let mut held = lock(&found.held);
        let state = match found.error.load(Ordering::Relaxed) {
            SUCCESS => {
                let peers = lock(&found.rendezvous.state);
                let (joined, finalized) = (peers.joined.len(), peers.finalized);
                drop(peers);
                let ready = joined == found.rendezvous.size
                    && (!found.finalizing.load(Ordering::Relaxed) || finalized == found.rendezvous.size);
                let launched = found.launched.load(Ordering::Relaxed);
                let hangs = matches!(self.fault(found.ordinal), Some(Fault::LaunchHangs(after)) if launched > after);
                let looked = held.is_none() || !hangs && found.looks.fetch_sub(1, Ordering::Relaxed) <= 1;
                if let Some((stream, ops)) = held.take_if(|_| looked) {
                    self.delays.dawdle();
                    self.enqueue(&found, &stream, ops);
                }
                if ready && looked { SUCCESS } else { IN_PROGRESS }
            }
            // The launched calls are enqueued in spite of the error.
            code => {
                if let Some((stream, ops)) = held.take() {
                    self.enqueue(&found, &stream, ops);
                }
                code
            }
        };
        // SAFETY: the caller's out-pointer.
        unsafe { *error = state };
        SUCCESS
    }

    unsafe fn comm_finalize(&self, comm: RawComm) -> c_int {
        let Some(found) = self.comm(comm) else { return INVALID_ARGUMENT };
        found.finalizing.store(true, Ordering::Relaxed);
        lock(&found.rendezvous.state).finalized += 1;
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
        let Some(found) = self.comm(comm) else { return INVALID_ARGUMENT };
        found.aborted.store(true, Ordering::Release);
        if lock(&found.held).is_some() {
            // An abort waits for the thread that launches.
            std::thread::sleep(END_OF_A_LAUNCH);
        }
        lock(&self.comms).remove(&(comm as u64));
        if !found.finalizing.load(Ordering::Relaxed) {
            lock(&found.rendezvous.state).finalized += 1;
        }
        found.rendezvous.changed.notify_all();
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
        self.begin_group();
        SUCCESS
    }

    unsafe fn group_end(&self) -> c_int {
        self.end_group()
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
        // SAFETY: the caller's out-pointer.
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
