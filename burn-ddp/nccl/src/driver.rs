//! The CUDA driver: its functions, and their results as errors.
#![allow(unsafe_code)]

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::fmt;
use std::sync::Arc;

use burn_ddp_comm::Result;
use cudarc::driver::sys;

use crate::error::environment;

/// `CUdeviceptr`: an address in a device's memory.
pub type DevicePtr = u64;
/// `CUcontext`, `CUstream` or `CUevent`.
pub type Raw = *mut c_void;

/// `CUDA_SUCCESS`.
pub const SUCCESS: c_int = 0;
/// `CUDA_ERROR_NOT_READY`: the work is not done yet.
pub const NOT_READY: c_int = 600;
/// `CU_STREAM_NON_BLOCKING`: does not wait for the legacy default stream.
pub const STREAM_NON_BLOCKING: c_uint = 1;
/// `CU_EVENT_DISABLE_TIMING`: an event without timing is cheaper.
pub const EVENT_DISABLE_TIMING: c_uint = 2;

/// Declares functions of the driver: a trait, which tests implement themselves, and its implementation by cudarc.
macro_rules! driver {
    ($(fn $name:ident($($arg:ident: $ty:ty),* $(,)?) = $call:expr;)*) => {
        /// Functions of the CUDA driver that this crate uses.
        ///
        /// # Safety
        /// The arguments are what the documentation of the C function asks for.
        #[allow(missing_docs, clippy::missing_safety_doc, reason = "they are C's functions")]
        pub trait DriverCalls: Send + Sync {
            $(unsafe fn $name(&self, $($arg: $ty),*) -> c_int;)*
        }

        /// The driver of this machine. Made only if libcuda can be loaded: otherwise cudarc panics.
        struct Cudarc;

        impl DriverCalls for Cudarc {
            $(
                unsafe fn $name(&self, $($arg: $ty),*) -> c_int {
                    // SAFETY: the caller promises what the function asks for; casts are between names of one C type.
                    unsafe { $call as c_int }
                }
            )*
        }
    };
}

driver! {
    fn init(flags: c_uint) = sys::cuInit(flags);
    fn driver_get_version(version: *mut c_int) = sys::cuDriverGetVersion(version);
    // `error` was returned by one of these functions, so it is a `CUresult`.
    fn get_error_string(error: c_int, text: *mut *const c_char) =
        sys::cuGetErrorString(std::mem::transmute::<c_int, sys::CUresult>(error), text);
    fn device_get_count(count: *mut c_int) = sys::cuDeviceGetCount(count);
    fn device_get(device: *mut c_int, ordinal: c_int) = sys::cuDeviceGet(device, ordinal);
    fn device_get_name(name: *mut c_char, len: c_int, device: c_int) = sys::cuDeviceGetName(name, len, device);
    fn device_get_pci_bus_id(id: *mut c_char, len: c_int, device: c_int) = sys::cuDeviceGetPCIBusId(id, len, device);
    fn device_get_uuid(uuid: *mut [u8; 16], device: c_int) = sys::cuDeviceGetUuid_v2(uuid.cast(), device);
    fn primary_ctx_retain(context: *mut Raw, device: c_int) = sys::cuDevicePrimaryCtxRetain(context.cast(), device);
    fn ctx_set_current(context: Raw) = sys::cuCtxSetCurrent(context.cast());
    fn stream_create(stream: *mut Raw, flags: c_uint) = sys::cuStreamCreate(stream.cast(), flags);
    fn stream_destroy(stream: Raw) = sys::cuStreamDestroy_v2(stream.cast());
    fn stream_wait_event(stream: Raw, event: Raw, flags: c_uint) =
        sys::cuStreamWaitEvent(stream.cast(), event.cast(), flags);
    fn event_create(event: *mut Raw, flags: c_uint) = sys::cuEventCreate(event.cast(), flags);
    fn event_record(event: Raw, stream: Raw) = sys::cuEventRecord(event.cast(), stream.cast());
    fn event_query(event: Raw) = sys::cuEventQuery(event.cast());
    fn event_destroy(event: Raw) = sys::cuEventDestroy_v2(event.cast());
    fn mem_alloc(pointer: *mut DevicePtr, bytes: usize) = sys::cuMemAlloc_v2(pointer, bytes);
    fn mem_free(pointer: DevicePtr) = sys::cuMemFree_v2(pointer);
    fn mem_alloc_host(pointer: *mut *mut c_void, bytes: usize) = sys::cuMemAllocHost_v2(pointer, bytes);
    fn mem_free_host(pointer: *mut c_void) = sys::cuMemFreeHost(pointer);
    fn memcpy_htod_async(to: DevicePtr, from: *const c_void, bytes: usize, stream: Raw) =
        sys::cuMemcpyHtoDAsync_v2(to, from, bytes, stream.cast());
    fn memcpy_dtoh_async(to: *mut c_void, from: DevicePtr, bytes: usize, stream: Raw) =
        sys::cuMemcpyDtoHAsync_v2(to, from, bytes, stream.cast());
    fn memset_d8_async(to: DevicePtr, value: u8, bytes: usize, stream: Raw) =
        sys::cuMemsetD8Async(to, value, bytes, stream.cast());
}

/// A loaded and initialised CUDA driver.
#[derive(Clone)]
pub struct Driver {
    calls: Arc<dyn DriverCalls>,
    version: c_int,
}

impl Driver {
    /// Loads the driver of this machine.
    ///
    /// # Errors
    /// [`Error::Environment`](burn_ddp_comm::Error::Environment) if there is none, or it cannot be used.
    pub fn load() -> Result<Driver> {
        // The driver reads CUDA_VISIBLE_DEVICES itself.
        // SAFETY: this only tries to load libcuda, whose initialisers have no conditions.
        if !unsafe { sys::is_culib_present() } {
            let message = "no NVIDIA driver on this machine (no libcuda): install it (nvidia-smi then lists the GPUs); \
                           in a container, start that with access to the GPUs (docker: --gpus all)";
            return Err(environment(message.to_owned()));
        }
        Driver::of(Arc::new(Cudarc))
    }

    /// A driver that consists of the functions `calls`.
    ///
    /// # Errors
    /// [`Error::Environment`](burn_ddp_comm::Error::Environment) if `cuInit` or `cuDriverGetVersion` fails.
    pub fn of(calls: Arc<dyn DriverCalls>) -> Result<Driver> {
        let mut driver = Driver { calls, version: 0 };
        // SAFETY: no conditions.
        let code = unsafe { driver.calls.init(0) };
        driver.check("cuInit", code).map_err(|why| {
            environment(format!(
                "the NVIDIA driver cannot be used: {why}; does nvidia-smi list a GPU, and does \
                 CUDA_VISIBLE_DEVICES leave one?"
            ))
        })?;
        let mut version = 0;
        // SAFETY: a valid out-pointer.
        let code = unsafe { driver.calls.driver_get_version(&mut version) };
        driver.check("cuDriverGetVersion", code).map_err(environment)?;
        driver.version = version;
        Ok(driver)
    }

    /// CUDA version of the driver in its own encoding: 12.8 is 12080.
    pub fn version(&self) -> i32 {
        self.version
    }

    pub(crate) fn calls(&self) -> &dyn DriverCalls {
        &*self.calls
    }

    /// Number of devices that this process sees.
    ///
    /// # Errors
    /// The driver's message.
    pub fn device_count(&self) -> Result<usize, String> {
        let mut count = 0;
        // SAFETY: a valid out-pointer.
        let code = unsafe { self.calls.device_get_count(&mut count) };
        self.check("cuDeviceGetCount", code)?;
        Ok(usize::try_from(count).unwrap_or(0))
    }

    /// The driver's handle of the device `ordinal`.
    pub(crate) fn device(&self, ordinal: usize) -> Result<c_int> {
        let count = self.device_count().map_err(environment)?;
        if ordinal >= count {
            return Err(environment(format!(
                "there is no CUDA device {ordinal}: this process sees {count} (CUDA_VISIBLE_DEVICES is {})",
                std::env::var("CUDA_VISIBLE_DEVICES").unwrap_or_else(|_| "not set".to_owned())
            )));
        }
        let mut device = 0;
        // SAFETY: a valid out-pointer, and a device that exists.
        let code = unsafe { self.calls.device_get(&mut device, ordinal as c_int) };
        self.check("cuDeviceGet", code).map_err(environment)?;
        Ok(device)
    }

    /// Name, PCI bus id and UUID of a device.
    pub(crate) fn describe(&self, ordinal: usize) -> Result<[String; 3]> {
        let device = self.device(ordinal)?;
        let (mut name, mut bus, mut uuid) = ([0 as c_char; 256], [0 as c_char; 64], [0_u8; 16]);
        // SAFETY: the lengths are those of the arrays, a UUID has 16 bytes, and the device exists.
        let codes = unsafe {
            [
                ("cuDeviceGetName", self.calls.device_get_name(name.as_mut_ptr(), name.len() as c_int - 1, device)),
                (
                    "cuDeviceGetPCIBusId",
                    self.calls.device_get_pci_bus_id(bus.as_mut_ptr(), bus.len() as c_int - 1, device),
                ),
                ("cuDeviceGetUuid", self.calls.device_get_uuid(&mut uuid, device)),
            ]
        };
        codes.into_iter().try_for_each(|(call, code)| self.check(call, code)).map_err(environment)?;
        // SAFETY: the last element of each is still zero.
        let text = |array: &[c_char]| unsafe { CStr::from_ptr(array.as_ptr()) }.to_string_lossy().into_owned();
        let uuid = uuid.iter().map(|byte| format!("{byte:02x}")).collect();
        Ok([text(&name), text(&bus), uuid])
    }

    /// Fails with the driver's message if `code`, the result of `call`, is an error.
    pub(crate) fn check(&self, call: &str, code: c_int) -> Result<(), String> {
        if code == SUCCESS {
            return Ok(());
        }
        let mut text: *const c_char = std::ptr::null();
        // SAFETY: any code, and a valid out-pointer.
        unsafe { self.calls.get_error_string(code, &mut text) };
        let text = match text.is_null() {
            true => "unknown error".into(),
            // SAFETY: the driver's texts end with a zero and stay.
            false => unsafe { CStr::from_ptr(text) }.to_string_lossy(),
        };
        Err(format!("{call}: {text} (code {code})"))
    }
}

impl fmt::Debug for Driver {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Driver({})", self.version)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Checks something only on machines without a driver, such as those that run the tests.
    #[test]
    fn a_machine_without_a_driver_is_told_so() {
        if let Err(error) = Driver::load() {
            let text = error.to_string();
            assert!(text.contains("NVIDIA driver"), "{text}");
        }
    }
}
