//! Streams: queues of work of a device.
#![allow(unsafe_code)]

use std::ffi::c_void;
use std::fmt;
use std::sync::Arc;

use crate::device::{Device, DriverHandle};
use crate::device_and_pinned_memory::{HostBuffer, Region};
use crate::driver::{Raw, STREAM_NON_BLOCKING};
use crate::error::DeviceError;
use crate::event::Event;
use crate::process_end;

impl Device {
    /// Creates a stream that does not wait for the legacy default stream.
    ///
    /// # Errors
    /// The driver's message.
    pub fn stream(&self) -> Result<Stream, String> {
        self.bind()?;
        let mut stream: Raw = std::ptr::null_mut();
        // SAFETY: a valid out-pointer, in a current context.
        let code = unsafe { self.driver().calls().stream_create(&mut stream, STREAM_NON_BLOCKING) };
        self.driver().check("cuStreamCreate", code)?;
        Ok(Stream { inner: Arc::new(Inner { device: self.clone(), handle: DriverHandle(stream) }) })
    }
}

/// A queue of work of a device. Clones are the same stream; the last one that is dropped ends it. A communicator holds
/// the stream of its last launch.
#[derive(Clone)]
pub struct Stream {
    inner: Arc<Inner>,
}

struct Inner {
    device: Device,
    handle: DriverHandle,
}

impl Stream {
    /// The `CUstream`.
    pub fn raw(&self) -> *mut c_void {
        self.inner.handle.0
    }

    /// Makes the work enqueued from now on wait for the work that `event` was last recorded behind.
    ///
    /// # Errors
    /// The driver's message.
    pub fn wait(&self, event: &Event) -> Result<(), String> {
        // SAFETY: both are alive; the flags are 0.
        let code = unsafe { self.inner.device.driver().calls().stream_wait_event(self.raw(), event.raw(), 0) };
        self.inner.device.driver().check("cuStreamWaitEvent", code)
    }

    /// Records `event` behind the work enqueued so far.
    ///
    /// # Errors
    /// The driver's message.
    pub fn record(&self, event: &Event) -> Result<(), String> {
        // SAFETY: both are alive.
        let code = unsafe { self.inner.device.driver().calls().event_record(event.raw(), self.raw()) };
        self.inner.device.driver().check("cuEventRecord", code)
    }

    /// Fails unless this stream belongs to the device `expected`.
    pub(crate) fn check_device(&self, expected: usize) -> Result<(), DeviceError> {
        let stream = self.inner.device.ordinal();
        if stream == expected { Ok(()) } else { Err(DeviceError::WrongStream { stream, expected }) }
    }

    /// Copies the first bytes of `from` to `to`.
    pub(crate) fn upload(&self, from: &HostBuffer, to: Region) -> Result<(), DeviceError> {
        self.check_device(to.ordinal)?;
        if to.len_bytes > from.len_bytes() {
            let message = format!("{} bytes from a buffer of {}", to.len_bytes, from.len_bytes());
            return Err(DeviceError::invalid_argument(message));
        }
        // SAFETY: the lengths were compared; both stay until the work is done, see `Staging`.
        let code = unsafe {
            self.inner.device.driver().calls().memcpy_htod_async(to.pointer, from.raw(), to.len_bytes, self.raw())
        };
        Ok(self.inner.device.driver().check("cuMemcpyHtoDAsync", code)?)
    }

    /// Copies `from` to the first bytes of `to`.
    pub(crate) fn download(&self, from: Region, to: &HostBuffer) -> Result<(), DeviceError> {
        self.check_device(from.ordinal)?;
        if from.len_bytes > to.len_bytes() {
            let message = format!("{} bytes to a buffer of {}", from.len_bytes, to.len_bytes());
            return Err(DeviceError::invalid_argument(message));
        }
        // SAFETY: the lengths were compared; both stay until the work is done, see `Staging`.
        let code = unsafe {
            self.inner.device.driver().calls().memcpy_dtoh_async(to.raw(), from.pointer, from.len_bytes, self.raw())
        };
        Ok(self.inner.device.driver().check("cuMemcpyDtoHAsync", code)?)
    }

    /// Fills `region` with zeros.
    pub(crate) fn clear(&self, region: Region) -> Result<(), DeviceError> {
        self.check_device(region.ordinal)?;
        // SAFETY: a region is `len_bytes` of device memory, by its contract.
        let code = unsafe {
            self.inner.device.driver().calls().memset_d8_async(region.pointer, 0, region.len_bytes, self.raw())
        };
        Ok(self.inner.device.driver().check("cuMemsetD8Async", code)?)
    }
}

impl Drop for Inner {
    /// Returns at once: the driver frees the stream when its work is done.
    fn drop(&mut self) {
        let Some(_in_use) = process_end::in_use() else { return };
        // SAFETY: a stream of this crate that has no other user.
        unsafe { self.device.driver().calls().stream_destroy(self.handle.0) };
    }
}

impl fmt::Debug for Stream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Stream({:?})", self.inner.device)
    }
}
