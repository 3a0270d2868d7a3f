//! The functions of the CUDA driver, and their results as errors.
#![allow(unsafe_code)]

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::fmt;
use std::sync::Arc;

use burn_ddp_comm::Result;

use crate::library::{foreign, load};
use crate::nccl::environment;

/// `CUdeviceptr`: an address in a device's memory.
pub type DevicePtr = u64;
/// `CUcontext`, `CUstream` or `CUevent`.
pub type Raw = *mut c_void;

/// `CUDA_SUCCESS`.
pub const SUCCESS: c_int = 0;
/// `CUDA_ERROR_NOT_READY`: not an error, but not done.
pub const NOT_READY: c_int = 600;
/// `CU_STREAM_NON_BLOCKING`: does not wait for the legacy default stream.
pub const STREAM_NON_BLOCKING: c_uint = 1;
/// `CU_EVENT_DISABLE_TIMING`: cheaper.
pub const EVENT_DISABLE_TIMING: c_uint = 2;

foreign! {
    /// What is used of the CUDA driver, by the names of its functions.
    DriverCalls, Symbols {
        fn init(flags: c_uint) -> c_int = "cuInit";
        fn driver_get_version(version: *mut c_int) -> c_int = "cuDriverGetVersion";
        fn get_error_string(error: c_int, text: *mut *const c_char) -> c_int = "cuGetErrorString";
        fn device_get_count(count: *mut c_int) -> c_int = "cuDeviceGetCount";
        fn device_get(device: *mut c_int, ordinal: c_int) -> c_int = "cuDeviceGet";
        fn device_get_name(name: *mut c_char, len: c_int, device: c_int) -> c_int = "cuDeviceGetName";
        fn device_get_pci_bus_id(id: *mut c_char, len: c_int, device: c_int) -> c_int = "cuDeviceGetPCIBusId";
        fn device_get_uuid(uuid: *mut [u8; 16], device: c_int) -> c_int = "cuDeviceGetUuid_v2";
        fn primary_ctx_retain(context: *mut Raw, device: c_int) -> c_int = "cuDevicePrimaryCtxRetain";
        fn ctx_set_current(context: Raw) -> c_int = "cuCtxSetCurrent";
        fn stream_create(stream: *mut Raw, flags: c_uint) -> c_int = "cuStreamCreate";
        fn stream_destroy(stream: Raw) -> c_int = "cuStreamDestroy_v2";
        fn stream_wait_event(stream: Raw, event: Raw, flags: c_uint) -> c_int = "cuStreamWaitEvent";
        fn event_create(event: *mut Raw, flags: c_uint) -> c_int = "cuEventCreate";
        fn event_record(event: Raw, stream: Raw) -> c_int = "cuEventRecord";
        fn event_query(event: Raw) -> c_int = "cuEventQuery";
        fn event_destroy(event: Raw) -> c_int = "cuEventDestroy_v2";
        fn mem_alloc(pointer: *mut DevicePtr, bytes: usize) -> c_int = "cuMemAlloc_v2";
        fn mem_free(pointer: DevicePtr) -> c_int = "cuMemFree_v2";
        fn mem_alloc_host(pointer: *mut *mut c_void, bytes: usize) -> c_int = "cuMemAllocHost_v2";
        fn mem_free_host(pointer: *mut c_void) -> c_int = "cuMemFreeHost";
        fn memcpy_htod_async(to: DevicePtr, from: *const c_void, bytes: usize, stream: Raw) -> c_int = "cuMemcpyHtoDAsync_v2";
        fn memcpy_dtoh_async(to: *mut c_void, from: DevicePtr, bytes: usize, stream: Raw) -> c_int = "cuMemcpyDtoHAsync_v2";
        fn memset_d8_async(to: DevicePtr, value: u8, bytes: usize, stream: Raw) -> c_int = "cuMemsetD8Async";
    }
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
        // Which GPUs it shows is the driver's business: it reads CUDA_VISIBLE_DEVICES.
        let names = ["libcuda.so.1".to_owned(), "libcuda.so".to_owned()];
        let (library, name) = load(&names).map_err(|tried| {
            environment(format!(
                "no NVIDIA driver on this machine ({tried}): install it (nvidia-smi then lists the GPUs); in a container, start that with access to the GPUs (docker: --gpus all)"
            ))
        })?;
        // SAFETY: libcuda is the driver; it stays loaded.
        let symbols = unsafe { Symbols::of(library) }.map_err(|symbol| {
            environment(format!("{name} has no {symbol}: the NVIDIA driver is older than 11.4; update it"))
        })?;
        Driver::of(Arc::new(symbols))
    }

    /// By these functions.
    ///
    /// # Errors
    /// [`Error::Environment`](burn_ddp_comm::Error::Environment) if they fail.
    pub fn of(calls: Arc<dyn DriverCalls>) -> Result<Driver> {
        let mut driver = Driver { calls, version: 0 };
        // SAFETY: no conditions.
        let code = unsafe { driver.calls.init(0) };
        driver.check("cuInit", code).map_err(|why| {
            environment(format!("the NVIDIA driver cannot be used: {why}; does nvidia-smi list a GPU, and does CUDA_VISIBLE_DEVICES leave one?"))
        })?;
        let mut version = 0;
        // SAFETY: a place for an int.
        let code = unsafe { driver.calls.driver_get_version(&mut version) };
        driver.check("cuDriverGetVersion", code).map_err(environment)?;
        driver.version = version;
        Ok(driver)
    }

    /// The CUDA version of the driver, as it counts: 12.8 is 12080.
    pub fn version(&self) -> i32 {
        self.version
    }

    pub(crate) fn calls(&self) -> &dyn DriverCalls {
        &*self.calls
    }

    /// How many devices there are for this process.
    ///
    /// # Errors
    /// What the driver says.
    pub fn device_count(&self) -> Result<usize, String> {
        let mut count = 0;
        // SAFETY: a place for an int.
        let code = unsafe { self.calls.device_get_count(&mut count) };
        self.check("cuDeviceGetCount", code)?;
        Ok(usize::try_from(count).unwrap_or(0))
    }

    /// The driver's handle of a device.
    pub(crate) fn device(&self, ordinal: usize) -> Result<c_int> {
        let count = self.device_count().map_err(environment)?;
        if ordinal >= count {
            return Err(environment(format!(
                "there is no CUDA device {ordinal}: this process sees {count} (CUDA_VISIBLE_DEVICES is {})",
                std::env::var("CUDA_VISIBLE_DEVICES").unwrap_or_else(|_| "not set".to_owned())
            )));
        }
        let mut device = 0;
        // SAFETY: a place for a handle, and a device that exists.
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

    /// The result of `call` as text if it is an error.
    pub(crate) fn check(&self, call: &str, code: c_int) -> Result<(), String> {
        if code == SUCCESS {
            return Ok(());
        }
        let mut text: *const c_char = std::ptr::null();
        // SAFETY: any code, and a place for a pointer.
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

    /// The one that tests run on; elsewhere there is nothing to see.
    #[test]
    fn a_machine_without_a_driver_is_told_so() {
        if let Err(error) = Driver::load() {
            let text = error.to_string();
            assert!(text.contains("NVIDIA driver"), "{text}");
        }
    }
}
