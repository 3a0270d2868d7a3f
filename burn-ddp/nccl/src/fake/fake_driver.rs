//! The fake CUDA driver: contexts, streams, events, memory.
#![allow(unsafe_code)]

use std::cell::Cell;
use std::ffi::{c_char, c_int, c_uint, c_void};
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex};

use super::fake_comm::FakeComm;
use super::fake_state::{Allocation, State};
use super::fake_stream::{FakeStream, Task};
use crate::driver::{DevicePtr, DriverCalls, NOT_READY, Raw, SUCCESS};
use crate::poison_free_lock::lock;

const INVALID_VALUE: c_int = 1;
const INVALID_DEVICE: c_int = 101;
const INVALID_CONTEXT: c_int = 201;
const INVALID_HANDLE: c_int = 400;

thread_local! {
    /// Machine and device of this thread's calls.
    static CURRENT: Cell<Option<(usize, usize)>> = const { Cell::new(None) };
}

impl State {
    /// The device that is current on this thread.
    pub(super) fn current(&self) -> Option<usize> {
        CURRENT.get().filter(|(machine, _)| *machine == self.id).map(|(_, ordinal)| ordinal)
    }

    fn text(&self, device: c_int, text: &str, to: *mut c_char, len: c_int) -> c_int {
        if device < 0 || device as usize >= self.devices || text.len() >= len as usize {
            return INVALID_VALUE;
        }
        for (nth, byte) in text.bytes().chain([0]).enumerate() {
            // SAFETY: the caller's array has room for `len`.
            unsafe { *to.add(nth) = byte as c_char };
        }
        SUCCESS
    }
}

impl DriverCalls for State {
    unsafe fn init(&self, _flags: c_uint) -> c_int {
        SUCCESS
    }

    unsafe fn driver_get_version(&self, version: *mut c_int) -> c_int {
        // SAFETY: the caller's out-pointer.
        unsafe { *version = 12080 };
        SUCCESS
    }

    unsafe fn get_error_string(&self, _error: c_int, text: *mut *const c_char) -> c_int {
        // SAFETY: the caller's out-pointer.
        unsafe { *text = c"an error of the fake driver".as_ptr() };
        SUCCESS
    }

    unsafe fn device_get_count(&self, count: *mut c_int) -> c_int {
        // SAFETY: the caller's out-pointer.
        unsafe { *count = self.devices as c_int };
        SUCCESS
    }

    unsafe fn device_get(&self, device: *mut c_int, ordinal: c_int) -> c_int {
        if ordinal < 0 || ordinal as usize >= self.devices {
            return INVALID_DEVICE;
        }
        // SAFETY: the caller's out-pointer.
        unsafe { *device = ordinal };
        SUCCESS
    }

    unsafe fn device_get_name(&self, name: *mut c_char, len: c_int, device: c_int) -> c_int {
        self.text(device, "Fake Device", name, len)
    }

    unsafe fn device_get_pci_bus_id(&self, id: *mut c_char, len: c_int, device: c_int) -> c_int {
        self.text(device, &format!("0000:{device:02x}:00.0"), id, len)
    }

    unsafe fn device_get_uuid(&self, uuid: *mut [u8; 16], device: c_int) -> c_int {
        // SAFETY: the caller's out-pointer.
        unsafe { *uuid = [device as u8; 16] };
        SUCCESS
    }

    unsafe fn primary_ctx_retain(&self, context: *mut Raw, device: c_int) -> c_int {
        // SAFETY: the caller's out-pointer.
        unsafe { *context = (self.id << 16 | device as usize) as Raw };
        SUCCESS
    }

    unsafe fn ctx_set_current(&self, context: Raw) -> c_int {
        let context = context as usize;
        if context >> 16 != self.id {
            return INVALID_CONTEXT;
        }
        CURRENT.set(Some((self.id, context & 0xffff)));
        SUCCESS
    }

    unsafe fn stream_create(&self, stream: *mut Raw, _flags: c_uint) -> c_int {
        let Some(ordinal) = self.current() else { return INVALID_CONTEXT };
        let handle = self.handle();
        lock(&self.streams).insert(handle, FakeStream::start(ordinal, self.delays.clone()));
        // SAFETY: the caller's out-pointer.
        unsafe { *stream = handle as Raw };
        SUCCESS
    }

    unsafe fn stream_destroy(&self, stream: Raw) -> c_int {
        let Some(stream) = lock(&self.streams).remove(&(stream as u64)) else { return INVALID_HANDLE };
        let launches_on_it =
            |comm: &Arc<FakeComm>| matches!(&*lock(&comm.held), Some((on, _)) if Arc::ptr_eq(on, &stream));
        if lock(&self.comms).values().any(launches_on_it) {
            self.misused("a stream was destroyed on which NCCL launches in the background".to_owned());
        }
        stream.close();
        SUCCESS
    }

    unsafe fn stream_wait_event(&self, stream: Raw, event: Raw, _flags: c_uint) -> c_int {
        let (Some(stream), Some(event)) = (self.stream(stream), self.event(event)) else { return INVALID_HANDLE };
        let (recorded, _) = event.counts();
        stream.push(Task::Wait(event, recorded));
        SUCCESS
    }

    unsafe fn event_create(&self, event: *mut Raw, _flags: c_uint) -> c_int {
        if self.current().is_none() {
            return INVALID_CONTEXT;
        }
        let handle = self.handle();
        lock(&self.events).insert(handle, Arc::default());
        // SAFETY: the caller's out-pointer.
        unsafe { *event = handle as Raw };
        SUCCESS
    }

    unsafe fn event_record(&self, event: Raw, stream: Raw) -> c_int {
        let (Some(stream), Some(event)) = (self.stream(stream), self.event(event)) else { return INVALID_HANDLE };
        let count = event.record();
        stream.push(Task::Complete(event, count));
        SUCCESS
    }

    unsafe fn event_query(&self, event: Raw) -> c_int {
        let Some(event) = self.event(event) else { return INVALID_HANDLE };
        let (recorded, completed) = event.counts();
        if completed < recorded { NOT_READY } else { SUCCESS }
    }

    unsafe fn event_destroy(&self, event: Raw) -> c_int {
        if lock(&self.events).remove(&(event as u64)).is_some() { SUCCESS } else { INVALID_HANDLE }
    }

    unsafe fn mem_alloc(&self, pointer: *mut DevicePtr, bytes: usize) -> c_int {
        let Some(ordinal) = self.current() else { return INVALID_CONTEXT };
        if bytes == 0 {
            return INVALID_VALUE;
        }
        // With a gap behind it, so that access beyond its end is found.
        let room = (bytes as u64).next_multiple_of(0x100) + 0x100;
        let address = self.next.fetch_add(room, Ordering::Relaxed);
        // Fresh memory of a real device is not zero either.
        let bytes = Arc::new(Mutex::new(vec![0xa5; bytes]));
        lock(&self.memory).insert(address, Allocation { ordinal, bytes });
        // SAFETY: the caller's out-pointer.
        unsafe { *pointer = address };
        SUCCESS
    }

    unsafe fn mem_free(&self, pointer: DevicePtr) -> c_int {
        let uses_it = |comm: &Arc<FakeComm>| {
            let held = lock(&comm.held);
            held.as_ref().is_some_and(|(_, ops)| ops.iter().any(|op| op.uses(pointer)))
        };
        if lock(&self.comms).values().any(uses_it) {
            self.misused("memory was freed on which NCCL launches in the background".to_owned());
        }
        if lock(&self.memory).remove(&pointer).is_some() { SUCCESS } else { INVALID_VALUE }
    }

    unsafe fn mem_alloc_host(&self, pointer: *mut *mut c_void, bytes: usize) -> c_int {
        let memory: &'static mut [u8] = Box::leak(vec![0_u8; bytes].into_boxed_slice());
        let address = memory.as_mut_ptr();
        lock(&self.pinned).insert(address as usize, bytes);
        // SAFETY: the caller's out-pointer.
        unsafe { *pointer = address.cast() };
        SUCCESS
    }

    unsafe fn mem_free_host(&self, pointer: *mut c_void) -> c_int {
        let Some(bytes) = lock(&self.pinned).remove(&(pointer as usize)) else { return INVALID_VALUE };
        // SAFETY: leaked by `mem_alloc_host` with this length, and freed once.
        drop(unsafe { Box::from_raw(std::ptr::slice_from_raw_parts_mut(pointer.cast::<u8>(), bytes)) });
        SUCCESS
    }

    unsafe fn memcpy_htod_async(&self, to: DevicePtr, from: *const c_void, bytes: usize, stream: Raw) -> c_int {
        let Some(stream) = self.stream(stream) else { return INVALID_HANDLE };
        let Some((memory, offset)) = self.within(to, bytes).filter(|(memory, _)| memory.ordinal == stream.ordinal)
        else {
            return INVALID_VALUE;
        };
        let from = from as usize;
        stream.push(Task::Run(Box::new(move || {
            // SAFETY: the caller keeps the memory until the stream is through with it.
            let from = unsafe { std::slice::from_raw_parts(from as *const u8, bytes) };
            lock(&memory.bytes)[offset..offset + bytes].copy_from_slice(from);
        })));
        SUCCESS
    }

    unsafe fn memcpy_dtoh_async(&self, to: *mut c_void, from: DevicePtr, bytes: usize, stream: Raw) -> c_int {
        let Some(stream) = self.stream(stream) else { return INVALID_HANDLE };
        let Some((memory, offset)) = self.within(from, bytes).filter(|(memory, _)| memory.ordinal == stream.ordinal)
        else {
            return INVALID_VALUE;
        };
        let to = to as usize;
        stream.push(Task::Run(Box::new(move || {
            let from = lock(&memory.bytes);
            // SAFETY: the caller keeps the memory, and does not look at it, until the stream is through with it.
            unsafe { std::ptr::copy_nonoverlapping(from[offset..].as_ptr(), to as *mut u8, bytes) };
        })));
        SUCCESS
    }

    unsafe fn memset_d8_async(&self, to: DevicePtr, value: u8, bytes: usize, stream: Raw) -> c_int {
        let Some(stream) = self.stream(stream) else { return INVALID_HANDLE };
        let Some((memory, offset)) = self.within(to, bytes) else { return INVALID_VALUE };
        stream.push(Task::Run(Box::new(move || lock(&memory.bytes)[offset..offset + bytes].fill(value))));
        SUCCESS
    }
}
