//! Copies between the host and a device that return when they are done.

use std::mem::ManuallyDrop;

use crate::device_and_pinned_memory::{DeviceBuffer, HostBuffer};
use crate::error::DeviceError;
use crate::stream::Stream;
use crate::wait::{WaitCheck, wait_until};

impl DeviceBuffer {
    /// Copies `bytes` to the first bytes of this buffer, and waits until the copy and all earlier work on `stream` is
    /// done.
    ///
    /// # Errors
    /// [`DeviceError::InvalidArgument`] if there are too many bytes; [`DeviceError::WrongStream`]; errors of the driver
    /// and of `check`.
    pub fn write(&self, stream: &Stream, bytes: &[u8], check: WaitCheck<'_>) -> Result<(), DeviceError> {
        let mut host = self.device().alloc_host(bytes.len())?;
        host.bytes_mut().copy_from_slice(bytes);
        stream.upload(&host, self.all().part(0, bytes.len())?)?;
        self.wait(stream, host, check).map(drop)
    }

    /// Returns the first `len_bytes` bytes of this buffer, after waiting until all earlier work on `stream` is done.
    ///
    /// # Errors
    /// [`DeviceError::InvalidArgument`] if the buffer is shorter; [`DeviceError::WrongStream`]; errors of the driver
    /// and of `check`.
    pub fn read(&self, stream: &Stream, len_bytes: usize, check: WaitCheck<'_>) -> Result<Vec<u8>, DeviceError> {
        let host = self.device().alloc_host(len_bytes)?;
        stream.download(self.all().part(0, len_bytes)?, &host)?;
        Ok(self.wait(stream, host, check)?.bytes().to_vec())
    }

    /// Waits for `stream`, which copies from or to `host`. On an error `host` stays allocated: the stream may still use
    /// it.
    fn wait(&self, stream: &Stream, host: HostBuffer, check: WaitCheck<'_>) -> Result<HostBuffer, DeviceError> {
        let host = ManuallyDrop::new(host);
        let done = self.device().event()?;
        stream.record(&done)?;
        wait_until(check, || Ok::<_, DeviceError>(done.is_done()?))?;
        Ok(ManuallyDrop::into_inner(host))
    }
}
