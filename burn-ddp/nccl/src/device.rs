//! One CUDA device: its context, in which streams, events and memory are made.
#![allow(unsafe_code)]

use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};

use burn_ddp_comm::Result;

use crate::driver::{Driver, Raw};
use crate::error::environment;
use crate::poison_free_lock::lock;
use crate::process_end;

/// Handle of a context, stream, event or host allocation of the driver.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) struct DriverHandle(pub(crate) Raw);

// SAFETY: the driver's functions may be called with the same context, stream or event from any thread at any time (CUDA
// driver API, "API synchronization behavior"); the pointer is never followed here.
unsafe impl Send for DriverHandle {}
// SAFETY: as above.
unsafe impl Sync for DriverHandle {}

/// A device in its primary context, which the CUDA runtime and CubeCL use too. Clones are the same device.
#[derive(Clone)]
pub struct Device {
    inner: Arc<Inner>,
}

struct Inner {
    driver: Driver,
    ordinal: usize,
    /// Never released: other libraries use this context too, and may have work under way in it at any time.
    context: DriverHandle,
    /// Events out of use: [`Device::event`] takes them, and the last clone of an [`Event`](crate::Event) returns it
    /// here.
    spare_events: Mutex<Vec<DriverHandle>>,
}

impl Device {
    /// Device number `ordinal` of those that this process sees.
    ///
    /// # Errors
    /// [`Error::Environment`](burn_ddp_comm::Error::Environment) if there is none or it cannot be used.
    pub fn new(driver: &Driver, ordinal: usize) -> Result<Device> {
        let device = driver.device(ordinal)?;
        let mut context: Raw = std::ptr::null_mut();
        // SAFETY: a valid out-pointer, and a device that exists.
        let code = unsafe { driver.calls().primary_ctx_retain(&mut context, device) };
        driver
            .check("cuDevicePrimaryCtxRetain", code)
            .map_err(|why| environment(format!("CUDA device {ordinal}: {why}")))?;
        let context = DriverHandle(context);
        Ok(Device {
            inner: Arc::new(Inner { driver: driver.clone(), ordinal, context, spare_events: Mutex::default() }),
        })
    }

    /// Number of this device among those that this process sees.
    pub fn ordinal(&self) -> usize {
        self.inner.ordinal
    }

    pub(crate) fn driver(&self) -> &Driver {
        &self.inner.driver
    }

    /// Makes this thread's driver calls go to this device.
    ///
    /// # Errors
    /// The driver's message.
    pub fn bind(&self) -> Result<(), String> {
        // SAFETY: a context that is retained.
        let code = unsafe { self.driver().calls().ctx_set_current(self.inner.context.0) };
        self.driver().check("cuCtxSetCurrent", code)
    }

    /// Runs `work` on a thread of its own that is bound to this device. For destructors, which never wait for a device;
    /// the end of the process waits for them.
    pub(crate) fn later(&self, what: &str, work: impl FnOnce() + Send + 'static) {
        let Some(in_use) = process_end::in_use() else { return };
        let device = self.clone();
        let spawned = std::thread::Builder::new().name(format!("nccl {what}")).spawn(move || {
            match device.bind() {
                Ok(()) => work(),
                Err(why) => tracing::debug!(why, "a resource stays until the process ends: its device cannot be bound"),
            }
            drop(device);
            drop(in_use);
        });
        if let Err(error) = spawned {
            tracing::debug!(%error, what, "a resource stays until the process ends: no thread can be started");
        }
    }

    pub(crate) fn take_spare_event(&self) -> Option<DriverHandle> {
        lock(&self.inner.spare_events).pop()
    }

    pub(crate) fn return_spare_event(&self, event: DriverHandle) {
        lock(&self.inner.spare_events).push(event);
    }
}

impl fmt::Debug for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Device({})", self.ordinal())
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        let Some(_in_use) = process_end::in_use() else { return };
        // No stream waits for a spare event, so destroying it does not block.
        for event in self.spare_events.get_mut().unwrap_or_else(PoisonError::into_inner).drain(..) {
            // SAFETY: an event of this device that has no other user.
            unsafe { self.driver.calls().event_destroy(event.0) };
        }
    }
}
