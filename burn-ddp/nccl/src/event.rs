//! Events: marks in streams.
#![allow(unsafe_code)]

use std::ffi::c_void;
use std::fmt;
use std::sync::Arc;

use crate::device::{Device, DriverHandle};
use crate::driver::{EVENT_DISABLE_TIMING, NOT_READY, Raw};

impl Device {
    /// An event without timing: a spare one, or a new one.
    ///
    /// # Errors
    /// The driver's message.
    pub fn event(&self) -> Result<Event, String> {
        let handle = match self.take_spare_event() {
            Some(handle) => handle,
            None => {
                self.bind()?;
                let mut event: Raw = std::ptr::null_mut();
                // SAFETY: a valid out-pointer, in a current context.
                let code = unsafe { self.driver().calls().event_create(&mut event, EVENT_DISABLE_TIMING) };
                self.driver().check("cuEventCreate", code)?;
                DriverHandle(event)
            }
        };
        Ok(Event { inner: Arc::new(Inner { device: self.clone(), handle }) })
    }
}

/// A mark in a stream. Clones are the same event; after the last one is dropped, [`Device::event`] reuses it.
///
/// This is safe while streams still wait for the event: a wait is for the record that was the last one when the wait
/// was enqueued.
#[derive(Clone)]
pub struct Event {
    inner: Arc<Inner>,
}

struct Inner {
    device: Device,
    handle: DriverHandle,
}

impl Event {
    /// The `CUevent`, which other code may record or wait for while this event is alive.
    pub fn raw(&self) -> *mut c_void {
        self.inner.handle.0
    }

    /// Records this event behind the work enqueued so far on `stream`, which other code may have made.
    ///
    /// # Errors
    /// The driver's message.
    ///
    /// # Safety
    /// `stream` is a `CUstream` of the primary context of this event's device, and alive.
    pub unsafe fn record_on(&self, stream: *mut c_void) -> Result<(), String> {
        let driver = self.inner.device.driver();
        // SAFETY: by the contract of this function; the event is alive.
        let code = unsafe { driver.calls().event_record(self.raw(), stream) };
        driver.check("cuEventRecord", code)
    }

    /// Makes later work on `stream`, which other code may have made, wait for the work that this event was last
    /// recorded behind.
    ///
    /// # Errors
    /// The driver's message.
    ///
    /// # Safety
    /// As [`record_on`](Self::record_on).
    pub unsafe fn hold_up(&self, stream: *mut c_void) -> Result<(), String> {
        let driver = self.inner.device.driver();
        // SAFETY: by the contract of this function; the event is alive; the flags are 0.
        let code = unsafe { driver.calls().stream_wait_event(stream, self.raw(), 0) };
        driver.check("cuStreamWaitEvent", code)
    }

    /// True if the work that this event was last recorded behind is done, or the event was never recorded.
    ///
    /// # Errors
    /// The driver's message, which may be an error of earlier work of the device.
    pub fn is_done(&self) -> Result<bool, String> {
        let driver = self.inner.device.driver();
        // SAFETY: an event that is alive.
        match unsafe { driver.calls().event_query(self.raw()) } {
            NOT_READY => Ok(false),
            code => driver.check("cuEventQuery", code).map(|()| true),
        }
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        self.device.return_spare_event(self.handle);
    }
}

impl fmt::Debug for Event {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Event({:p})", self.raw())
    }
}
