//! One device: its context, streams, events and memory.
#![allow(unsafe_code)]

use std::ffi::c_void;
use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};

use burn_ddp_comm::Result;

use crate::communicator::{Alive, Fault};
use crate::driver::{DevicePtr, Driver, EVENT_DISABLE_TIMING, NOT_READY, Raw, STREAM_NON_BLOCKING};
use crate::nccl::environment;
use crate::pause::Pause;

/// A handle of the driver.
#[derive(Clone, Copy, PartialEq, Eq)]
struct Handle(Raw);

// SAFETY: the driver's functions may be called with the same context, stream or event from any thread at any time (CUDA driver API,
// "API synchronization behavior"); the pointer is never followed here.
unsafe impl Send for Handle {}
// SAFETY: as above.
unsafe impl Sync for Handle {}

/// A device in its primary context, which is the one that the CUDA runtime and cubecl use. Clones are the same device.
#[derive(Clone)]
pub struct Device {
    inner: Arc<Inner>,
}

struct Inner {
    driver: Driver,
    ordinal: usize,
    /// Retained for as long as the process lives: others have it too, and work may be under way in it at any time.
    context: Handle,
    /// Events that nobody has. Taken by [`Device::event`], returned when the last clone of an [`Event`] goes.
    spare: Mutex<Vec<Handle>>,
}

impl Device {
    /// The device `ordinal` of those that this process sees.
    ///
    /// # Errors
    /// [`Error::Environment`](burn_ddp_comm::Error::Environment) if there is none or it cannot be used.
    pub fn new(driver: &Driver, ordinal: usize) -> Result<Device> {
        let device = driver.device(ordinal)?;
        let mut context: Raw = std::ptr::null_mut();
        // SAFETY: a place for a handle, and a device that exists.
        let code = unsafe { driver.calls().primary_ctx_retain(&mut context, device) };
        driver
            .check("cuDevicePrimaryCtxRetain", code)
            .map_err(|why| environment(format!("CUDA device {ordinal}: {why}")))?;
        let (driver, context, spare) = (driver.clone(), Handle(context), Mutex::new(Vec::new()));
        Ok(Device { inner: Arc::new(Inner { driver, ordinal, context, spare }) })
    }

    /// Its number among those that this process sees.
    pub fn ordinal(&self) -> usize {
        self.inner.ordinal
    }

    fn driver(&self) -> &Driver {
        &self.inner.driver
    }

    /// Lets this thread's driver calls go to this device.
    ///
    /// # Errors
    /// What the driver says.
    pub fn bind(&self) -> Result<(), String> {
        // SAFETY: a context that is retained.
        let code = unsafe { self.driver().calls().ctx_set_current(self.inner.context.0) };
        self.driver().check("cuCtxSetCurrent", code)
    }

    /// A new stream, which does not wait for the legacy default stream.
    ///
    /// # Errors
    /// What the driver says.
    pub fn stream(&self) -> Result<Stream, String> {
        self.bind()?;
        let mut stream: Raw = std::ptr::null_mut();
        // SAFETY: a place for a handle, in a current context.
        let code = unsafe { self.driver().calls().stream_create(&mut stream, STREAM_NON_BLOCKING) };
        self.driver().check("cuStreamCreate", code)?;
        Ok(Stream { device: self.clone(), handle: Handle(stream) })
    }

    /// An event without timing, from those that are spare or a new one.
    ///
    /// # Errors
    /// What the driver says.
    pub fn event(&self) -> Result<Event, String> {
        let spare = self.inner.spare.lock().unwrap_or_else(PoisonError::into_inner).pop();
        let handle = match spare {
            Some(handle) => handle,
            None => {
                self.bind()?;
                let mut event: Raw = std::ptr::null_mut();
                // SAFETY: a place for a handle, in a current context.
                let code = unsafe { self.driver().calls().event_create(&mut event, EVENT_DISABLE_TIMING) };
                self.driver().check("cuEventCreate", code)?;
                Handle(event)
            }
        };
        Ok(Event { inner: Arc::new(EventInner { device: self.clone(), handle }) })
    }

    /// Memory of this device, with unspecified contents.
    ///
    /// # Errors
    /// What the driver says.
    pub fn alloc(&self, len_bytes: usize) -> Result<DeviceBuffer, String> {
        self.bind()?;
        let mut pointer = 0;
        // SAFETY: a place for a pointer, in a current context; the driver refuses a length of 0.
        let code = unsafe { self.driver().calls().mem_alloc(&mut pointer, len_bytes.max(1)) };
        self.driver().check("cuMemAlloc", code)?;
        Ok(DeviceBuffer { device: self.clone(), pointer, len_bytes })
    }

    /// Memory of the host that this device can read and write, all zero.
    ///
    /// # Errors
    /// What the driver says.
    pub fn alloc_host(&self, len_bytes: usize) -> Result<HostBuffer, String> {
        self.bind()?;
        let mut pointer: *mut c_void = std::ptr::null_mut();
        // SAFETY: a place for a pointer, in a current context.
        let code = unsafe { self.driver().calls().mem_alloc_host(&mut pointer, len_bytes.max(1)) };
        self.driver().check("cuMemAllocHost", code)?;
        // SAFETY: the allocation is this long; it must be initialised before it is seen as a slice.
        unsafe { std::ptr::write_bytes(pointer.cast::<u8>(), 0, len_bytes) };
        Ok(HostBuffer { device: self.clone(), pointer: Handle(pointer), len_bytes })
    }

    /// Has `work` done by a thread of its own, bound to this device: what may wait for the device is not done in `drop`.
    pub(crate) fn later(&self, what: &str, work: impl FnOnce() + Send + 'static) {
        let device = self.clone();
        let spawned = std::thread::Builder::new().name(format!("nccl {what}")).spawn(move || match device.bind() {
            Ok(()) => work(),
            Err(why) => tracing::debug!(why, "left to the end of the process"),
        });
        if let Err(error) = spawned {
            tracing::debug!(%error, what, "no thread; left to the end of the process");
        }
    }
}

impl fmt::Debug for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Device({})", self.ordinal())
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        // Nobody has them, so nothing waits: this does not block.
        for event in self.spare.get_mut().unwrap_or_else(PoisonError::into_inner).drain(..) {
            // SAFETY: an event of ours that nobody has.
            unsafe { self.driver.calls().event_destroy(event.0) };
        }
    }
}

/// A queue of work of a device.
pub struct Stream {
    device: Device,
    handle: Handle,
}

impl Stream {
    /// The `CUstream`.
    pub fn raw(&self) -> *mut c_void {
        self.handle.0
    }

    /// What is enqueued from now on waits for what `event` was last recorded behind.
    ///
    /// # Errors
    /// What the driver says.
    pub fn wait(&self, event: &Event) -> Result<(), String> {
        // SAFETY: both are alive; the flags are 0.
        let code = unsafe { self.device.driver().calls().stream_wait_event(self.handle.0, event.raw(), 0) };
        self.device.driver().check("cuStreamWaitEvent", code)
    }

    /// Records `event` behind what is enqueued so far.
    ///
    /// # Errors
    /// What the driver says.
    pub fn record(&self, event: &Event) -> Result<(), String> {
        // SAFETY: both are alive.
        let code = unsafe { self.device.driver().calls().event_record(event.raw(), self.handle.0) };
        self.device.driver().check("cuEventRecord", code)
    }

    /// Copies the first bytes of `from` to `to`.
    pub(crate) fn upload(&self, from: &HostBuffer, to: Region) -> Result<(), String> {
        if to.len_bytes > from.len_bytes {
            return Err(format!("{} bytes from a buffer of {}", to.len_bytes, from.len_bytes));
        }
        // SAFETY: the lengths were compared; both stay until the work is done, see `Staging`.
        let code = unsafe {
            self.device.driver().calls().memcpy_htod_async(to.pointer, from.pointer.0, to.len_bytes, self.handle.0)
        };
        self.device.driver().check("cuMemcpyHtoDAsync", code)
    }

    /// Copies `from` to the first bytes of `to`.
    pub(crate) fn download(&self, from: Region, to: &HostBuffer) -> Result<(), String> {
        if from.len_bytes > to.len_bytes {
            return Err(format!("{} bytes to a buffer of {}", from.len_bytes, to.len_bytes));
        }
        // SAFETY: the lengths were compared; both stay until the work is done, see `Staging`.
        let code = unsafe {
            self.device.driver().calls().memcpy_dtoh_async(to.pointer.0, from.pointer, from.len_bytes, self.handle.0)
        };
        self.device.driver().check("cuMemcpyDtoHAsync", code)
    }

    /// Fills with zeros.
    pub(crate) fn clear(&self, region: Region) -> Result<(), String> {
        // SAFETY: a region is as long as it says.
        let code =
            unsafe { self.device.driver().calls().memset_d8_async(region.pointer, 0, region.len_bytes, self.handle.0) };
        self.device.driver().check("cuMemsetD8Async", code)
    }
}

impl Drop for Stream {
    /// Returns at once: the driver frees the stream when its work is done.
    fn drop(&mut self) {
        // SAFETY: a stream of ours that nobody uses any more.
        unsafe { self.device.driver().calls().stream_destroy(self.handle.0) };
    }
}

impl fmt::Debug for Stream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Stream({:?})", self.device)
    }
}

/// A mark in a stream. Clones are the same event; when the last one goes, the event is used again by the next who asks for one.
///
/// That is safe while streams still wait for it: they wait for what it was recorded behind when they were told to.
#[derive(Clone)]
pub struct Event {
    inner: Arc<EventInner>,
}

struct EventInner {
    device: Device,
    handle: Handle,
}

impl Event {
    /// The `CUevent`, to be recorded or waited for by others while this lives.
    pub fn raw(&self) -> *mut c_void {
        self.inner.handle.0
    }

    /// Records it behind what is enqueued so far on a stream of somebody else.
    ///
    /// # Errors
    /// What the driver says.
    ///
    /// # Safety
    /// `stream` is a `CUstream` of the primary context of this event's device, and alive.
    pub unsafe fn record_on(&self, stream: *mut c_void) -> Result<(), String> {
        let driver = self.inner.device.driver();
        // SAFETY: by the contract of this function; the event is alive.
        let code = unsafe { driver.calls().event_record(self.raw(), stream) };
        driver.check("cuEventRecord", code)
    }

    /// What is enqueued from now on, on a stream of somebody else, waits for what this was last recorded behind.
    ///
    /// # Errors
    /// What the driver says.
    ///
    /// # Safety
    /// As [`record_on`](Self::record_on).
    pub unsafe fn hold_up(&self, stream: *mut c_void) -> Result<(), String> {
        let driver = self.inner.device.driver();
        // SAFETY: by the contract of this function; the event is alive; the flags are 0.
        let code = unsafe { driver.calls().stream_wait_event(stream, self.raw(), 0) };
        driver.check("cuStreamWaitEvent", code)
    }

    /// Whether what it was last recorded behind is done; true if it never was.
    ///
    /// # Errors
    /// What the driver says, which may be an error of earlier work of the device.
    pub fn is_done(&self) -> Result<bool, String> {
        let driver = self.inner.device.driver();
        // SAFETY: an event that is alive.
        match unsafe { driver.calls().event_query(self.raw()) } {
            NOT_READY => Ok(false),
            code => driver.check("cuEventQuery", code).map(|()| true),
        }
    }
}

impl Drop for EventInner {
    fn drop(&mut self) {
        self.device.inner.spare.lock().unwrap_or_else(PoisonError::into_inner).push(self.handle);
    }
}

impl fmt::Debug for Event {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Event({:p})", self.raw())
    }
}

/// Bytes in a device's memory, for work that is enqueued while they are valid and that they outlive.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Region {
    pub(crate) pointer: DevicePtr,
    pub(crate) len_bytes: usize,
    pub(crate) ordinal: usize,
}

impl Region {
    /// # Safety
    /// `len_bytes` from `pointer` on are memory of the device `ordinal`, used by nobody else and not freed before all work that is
    /// enqueued with this region is done.
    pub unsafe fn new(pointer: DevicePtr, len_bytes: usize, ordinal: usize) -> Region {
        Region { pointer, len_bytes, ordinal }
    }

    /// `len_bytes` of it from `start` on.
    pub(crate) fn part(self, start: usize, len_bytes: usize) -> Result<Region, String> {
        match start.checked_add(len_bytes) {
            Some(end) if end <= self.len_bytes => {
                Ok(Region { pointer: self.pointer + start as u64, len_bytes, ..self })
            }
            _ => Err(format!("{len_bytes} bytes from {start} on of {} on the device", self.len_bytes)),
        }
    }
}

/// Memory of a device. Freed by a thread of its own, since that may wait for the device.
#[derive(Debug)]
pub struct DeviceBuffer {
    device: Device,
    pointer: DevicePtr,
    len_bytes: usize,
}

impl DeviceBuffer {
    /// Its length.
    pub fn len_bytes(&self) -> usize {
        self.len_bytes
    }

    /// Where it is.
    pub fn pointer(&self) -> DevicePtr {
        self.pointer
    }

    /// All of it.
    ///
    /// # Safety
    /// The buffer outlives all work that is enqueued with the region.
    pub unsafe fn region(&self) -> Region {
        self.all()
    }

    /// Copies `bytes` to its first ones, and waits until that and all before it on `stream` is done.
    ///
    /// # Errors
    /// If there are too many; what the driver or `alive` says.
    pub fn write(&self, stream: &Stream, bytes: &[u8], alive: Alive<'_>) -> Result<(), Fault> {
        let mut host = self.device.alloc_host(bytes.len())?;
        host.bytes_mut().copy_from_slice(bytes);
        stream.upload(&host, self.all().part(0, bytes.len())?)?;
        self.through(stream, host, alive).map(drop)
    }

    /// Its first bytes, when all before on `stream` is done, for which this waits.
    ///
    /// # Errors
    /// If there are not as many; what the driver or `alive` says.
    pub fn read(&self, stream: &Stream, len_bytes: usize, alive: Alive<'_>) -> Result<Vec<u8>, Fault> {
        let host = self.device.alloc_host(len_bytes)?;
        stream.download(self.all().part(0, len_bytes)?, &host)?;
        Ok(self.through(stream, host, alive)?.bytes().to_vec())
    }

    /// Waits for `stream`, which copies from or to `host`: that stays allocated if it is not known when the stream is through.
    fn through(&self, stream: &Stream, host: HostBuffer, alive: Alive<'_>) -> Result<HostBuffer, Fault> {
        let host = std::mem::ManuallyDrop::new(host);
        let (done, mut pause) = (self.device.event()?, Pause::new());
        stream.record(&done)?;
        while !done.is_done()? {
            alive()?;
            pause.wait();
        }
        Ok(std::mem::ManuallyDrop::into_inner(host))
    }

    /// [`region`](Self::region), for those who keep to its conditions by how they are built.
    pub(crate) fn all(&self) -> Region {
        Region { pointer: self.pointer, len_bytes: self.len_bytes, ordinal: self.device.ordinal() }
    }
}

impl Drop for DeviceBuffer {
    fn drop(&mut self) {
        let (device, pointer) = (self.device.clone(), self.pointer);
        self.device.later("free", move || {
            // SAFETY: memory of ours that nobody uses any more.
            unsafe { device.driver().calls().mem_free(pointer) };
        });
    }
}

/// Memory of the host that a device can read and write by itself. Freed like a [`DeviceBuffer`].
pub struct HostBuffer {
    device: Device,
    pointer: Handle,
    len_bytes: usize,
}

impl HostBuffer {
    /// What is there, once no work is under way that writes it.
    pub(crate) fn bytes(&self) -> &[u8] {
        // SAFETY: the allocation is this long, initialised, and ours; `Staging` lends it only while nothing is under way.
        unsafe { std::slice::from_raw_parts(self.pointer.0.cast::<u8>(), self.len_bytes) }
    }

    /// What is there, to be changed, once no work is under way that uses it.
    pub(crate) fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: as in `bytes`.
        unsafe { std::slice::from_raw_parts_mut(self.pointer.0.cast::<u8>(), self.len_bytes) }
    }
}

impl Drop for HostBuffer {
    fn drop(&mut self) {
        let (device, pointer) = (self.device.clone(), self.pointer);
        self.device.later("free", move || {
            let pointer = pointer;
            // SAFETY: memory of ours that nobody uses any more.
            unsafe { device.driver().calls().mem_free_host(pointer.0) };
        });
    }
}

impl fmt::Debug for HostBuffer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "HostBuffer({} bytes)", self.len_bytes)
    }
}
