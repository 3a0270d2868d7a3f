//! Memory of a device, and memory of the host that a device reads and writes by itself.
#![allow(unsafe_code)]

use std::ffi::c_void;
use std::fmt;

use crate::device::{Device, DriverHandle};
use crate::driver::DevicePtr;
use crate::error::DeviceError;

impl Device {
    /// Allocates memory of this device, with unspecified contents.
    ///
    /// # Errors
    /// The driver's message.
    pub fn alloc(&self, len_bytes: usize) -> Result<DeviceBuffer, String> {
        self.bind()?;
        let mut pointer = 0;
        // SAFETY: a valid out-pointer, in a current context; the driver refuses a length of 0.
        let code = unsafe { self.driver().calls().mem_alloc(&mut pointer, len_bytes.max(1)) };
        self.driver().check("cuMemAlloc", code)?;
        Ok(DeviceBuffer { device: self.clone(), pointer, len_bytes })
    }

    /// Allocates memory of the host that this device can read and write, all zero.
    ///
    /// # Errors
    /// The driver's message.
    pub fn alloc_host(&self, len_bytes: usize) -> Result<HostBuffer, String> {
        self.bind()?;
        let mut pointer: *mut c_void = std::ptr::null_mut();
        // SAFETY: a valid out-pointer, in a current context.
        let code = unsafe { self.driver().calls().mem_alloc_host(&mut pointer, len_bytes.max(1)) };
        self.driver().check("cuMemAllocHost", code)?;
        // SAFETY: the allocation is this long; it must be initialised before it is seen as a slice.
        unsafe { std::ptr::write_bytes(pointer.cast::<u8>(), 0, len_bytes) };
        Ok(HostBuffer { device: self.clone(), pointer: DriverHandle(pointer), len_bytes })
    }
}

/// Range of bytes in a device's memory. The memory outlives the work that is enqueued with it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Region {
    pub(crate) pointer: DevicePtr,
    pub(crate) len_bytes: usize,
    pub(crate) ordinal: usize,
}

impl Region {
    /// # Safety
    /// `len_bytes` from `pointer` on are memory of the device `ordinal`, used by nothing else and not freed before all
    /// work that is enqueued with this region is done.
    pub unsafe fn new(pointer: DevicePtr, len_bytes: usize, ordinal: usize) -> Region {
        Region { pointer, len_bytes, ordinal }
    }

    /// The part of `len_bytes` that begins at `start`.
    pub(crate) fn part(self, start: usize, len_bytes: usize) -> Result<Region, DeviceError> {
        match start.checked_add(len_bytes) {
            Some(end) if end <= self.len_bytes => {
                Ok(Region { pointer: self.pointer + start as u64, len_bytes, ..self })
            }
            _ => Err(DeviceError::invalid_argument(format!(
                "{len_bytes} bytes from byte {start} on are not within a device memory of {} bytes",
                self.len_bytes
            ))),
        }
    }
}

/// Memory of a device. Freed on a thread of its own, since freeing may wait for the device.
#[derive(Debug)]
pub struct DeviceBuffer {
    device: Device,
    pointer: DevicePtr,
    len_bytes: usize,
}

impl DeviceBuffer {
    pub(crate) fn device(&self) -> &Device {
        &self.device
    }

    /// Length in bytes.
    pub fn len_bytes(&self) -> usize {
        self.len_bytes
    }

    /// Address on the device.
    pub fn pointer(&self) -> DevicePtr {
        self.pointer
    }

    /// The whole buffer.
    ///
    /// # Safety
    /// The buffer outlives all work that is enqueued with the region.
    pub unsafe fn region(&self) -> Region {
        self.all()
    }

    /// [`region`](Self::region) for code of this crate, which meets its safety condition by construction.
    pub(crate) fn all(&self) -> Region {
        Region { pointer: self.pointer, len_bytes: self.len_bytes, ordinal: self.device.ordinal() }
    }
}

impl Drop for DeviceBuffer {
    fn drop(&mut self) {
        let (device, pointer) = (self.device.clone(), self.pointer);
        self.device.later("free", move || {
            // SAFETY: memory of this buffer, which has no other user.
            unsafe { device.driver().calls().mem_free(pointer) };
        });
    }
}

/// Memory of the host that a device can read and write by itself ("pinned"). Freed like a [`DeviceBuffer`].
pub struct HostBuffer {
    device: Device,
    pointer: DriverHandle,
    len_bytes: usize,
}

impl HostBuffer {
    pub(crate) fn len_bytes(&self) -> usize {
        self.len_bytes
    }

    pub(crate) fn raw(&self) -> *mut c_void {
        self.pointer.0
    }

    /// Contents, once no work is under way that writes them.
    pub(crate) fn bytes(&self) -> &[u8] {
        // SAFETY: the allocation is this long, initialised, and ours; `Staging` lends it only while nothing is under
        // way.
        unsafe { std::slice::from_raw_parts(self.pointer.0.cast::<u8>(), self.len_bytes) }
    }

    /// Contents to be changed, once no work is under way that uses them.
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
            // SAFETY: memory of this buffer, which has no other user.
            unsafe { device.driver().calls().mem_free_host(pointer.0) };
        });
    }
}

impl fmt::Debug for HostBuffer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "HostBuffer({} bytes)", self.len_bytes)
    }
}
