//! Buffers through which host memory goes to a device and back.

use std::mem::ManuallyDrop;
use std::time::{Duration, Instant};

use crate::communicator::Closed;
use crate::device::Device;
use crate::device_and_pinned_memory::{DeviceBuffer, HostBuffer, Region};
use crate::error::DeviceError;
use crate::event::Event;
use crate::stream::Stream;

/// Longest wait for a device to end aborted work, on a thread of its own.
const RETIRE: Duration = Duration::from_secs(60);

/// One buffer on the host and one on the device, each with room for input and output. Reused, since allocating them is
/// slow.
///
/// The device copies only from and to these buffers, never the memory of a caller: so a collective that fails can
/// return at once, and the buffers are freed when the device is through with them.
#[derive(Debug)]
pub(crate) struct Staging {
    pub(crate) host: HostBuffer,
    device: DeviceBuffer,
    /// Event behind the copies under way.
    pub(crate) done: Event,
}

/// Alignment of input and output on the device, in bytes: that of the driver's own allocations.
const ALIGN: usize = 256;

impl Staging {
    /// Buffers of at least `len_bytes`.
    pub(crate) fn new(device: &Device, len_bytes: usize) -> Result<Staging, String> {
        let len_bytes = len_bytes.next_power_of_two().max(64 * 1024);
        Ok(Staging { host: device.alloc_host(len_bytes)?, device: device.alloc(len_bytes)?, done: device.event()? })
    }

    /// Bytes that an input and an output need; `None` if the sum overflows.
    pub(crate) fn needed(input_bytes: usize, output_bytes: usize) -> Option<usize> {
        input_bytes.checked_next_multiple_of(ALIGN)?.checked_add(output_bytes)
    }

    pub(crate) fn holds(&self, len_bytes: usize) -> bool {
        len_bytes <= self.device.len_bytes()
    }

    /// Regions of input and output on the device.
    pub(crate) fn regions(&self, input_bytes: usize, output_bytes: usize) -> Result<(Region, Region), DeviceError> {
        let all = self.device.all();
        Ok((all.part(0, input_bytes)?, all.part(input_bytes.next_multiple_of(ALIGN), output_bytes)?))
    }

    /// Frees the buffers when the device has ended the failed work on `stream`; never if that takes longer than
    /// [`RETIRE`]. If the launch itself failed, NCCL may still enqueue kernels until its communicator is `closed`.
    pub(crate) fn retire(self, device: &Device, stream: &Stream, closed: Option<Closed>) {
        let (held, stream) = (ManuallyDrop::new(self), stream.clone());
        device.later("retire", move || {
            let until = Instant::now() + RETIRE;
            let mut enqueued = None;
            while Instant::now() < until {
                if closed.as_ref().is_none_or(Closed::is_over) {
                    let enqueued = enqueued.get_or_insert_with(|| stream.record(&held.done));
                    match enqueued.as_ref().map(|()| held.done.is_done()) {
                        Ok(Ok(true)) => return drop(ManuallyDrop::into_inner(held)),
                        Ok(Ok(false)) => {}
                        Ok(Err(_)) | Err(_) => break,
                    }
                }
                std::thread::sleep(Duration::from_millis(10));
            }
            tracing::debug!("memory of a collective that failed stays until the process ends");
        });
    }
}
