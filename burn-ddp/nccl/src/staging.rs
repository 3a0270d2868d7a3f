//! Host memory on its way through a device.

use std::mem::ManuallyDrop;
use std::time::{Duration, Instant};

use crate::device::{Device, DeviceBuffer, Event, HostBuffer, Region, Stream};

/// How long a device may take to end what was aborted. Nobody waits for that.
const RETIRE: Duration = Duration::from_secs(60);

/// Room on the host and on the device, each for what goes in and what comes out. Kept, since making it is slow.
///
/// What is copied by the device is only ever this room, never the memory of a caller: so a collective that fails can return at once, and
/// the room goes when the device is through with it.
#[derive(Debug)]
pub(crate) struct Staging {
    pub(crate) host: HostBuffer,
    device: DeviceBuffer,
    /// Recorded behind what is on its way.
    pub(crate) done: Event,
}

/// Both parts begin on such a boundary, as the driver's own allocations do.
const ALIGN: usize = 256;

impl Staging {
    /// Room for at least this much.
    pub(crate) fn new(device: &Device, len_bytes: usize) -> Result<Staging, String> {
        let len_bytes = len_bytes.next_power_of_two().max(64 * 1024);
        Ok(Staging { host: device.alloc_host(len_bytes)?, device: device.alloc(len_bytes)?, done: device.event()? })
    }

    /// How much room an input and an output need.
    pub(crate) fn needed(input_bytes: usize, output_bytes: usize) -> Option<usize> {
        input_bytes.checked_next_multiple_of(ALIGN)?.checked_add(output_bytes)
    }

    pub(crate) fn holds(&self, len_bytes: usize) -> bool {
        len_bytes <= self.device.len_bytes()
    }

    /// The parts on the device.
    pub(crate) fn regions(&self, input_bytes: usize, output_bytes: usize) -> Result<(Region, Region), String> {
        let all = self.device.all();
        Ok((all.part(0, input_bytes)?, all.part(input_bytes.next_multiple_of(ALIGN), output_bytes)?))
    }

    /// Keeps it until the device is through with what failed on `stream`; if that is never, forever.
    pub(crate) fn retire(self, device: &Device, stream: &Stream) {
        let enqueued = stream.record(&self.done);
        let held = ManuallyDrop::new(self);
        device.later("retire", move || {
            let until = Instant::now() + RETIRE;
            while enqueued.is_ok() && Instant::now() < until {
                match held.done.is_done() {
                    Ok(true) => return drop(ManuallyDrop::into_inner(held)),
                    Ok(false) => std::thread::sleep(Duration::from_millis(10)),
                    Err(_) => break,
                }
            }
            tracing::debug!("memory of a collective that failed stays until the process ends");
        });
    }
}
