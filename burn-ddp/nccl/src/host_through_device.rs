//! Collectives on host memory through the device: elements are copied there, and NCCL's results are copied back.

use burn_ddp_comm::{Call, Result};

use crate::communicator::{Communicator, abort};
use crate::coordinated_launch::GroupLaunch;
use crate::device::Device;
use crate::device_and_pinned_memory::Region;
use crate::error::DeviceError;
use crate::poison_free_lock::lock;
use crate::staging_buffers::Staging;
use crate::stream::Stream;
use crate::wait::{WaitCheck, wait_until};

/// Choice of the engine for collectives on host memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum HostMemory {
    /// The engines of the world's own fabric, with their numerics.
    #[default]
    ByHost,
    /// NCCL, with its numerics, on copies in the device's memory. Transfers between two ranks still use the host's
    /// engine. For machines whose GPUs have a much faster network than their hosts.
    ThroughDevice,
}

/// Bytes of one collective on host memory.
pub(crate) struct HostBytes<'a> {
    /// Inputs, copied to the device one behind the other.
    pub(crate) inputs: &'a [&'a [u8]],
    /// Number of bytes copied back.
    pub(crate) output_bytes: usize,
    /// True if there is nothing to do. All ranks have the same value.
    pub(crate) empty: bool,
}

/// Enqueues a collective on two regions of the device: input and output.
pub(crate) type Work<'a> =
    &'a mut dyn FnMut(&mut Communicator, &Stream, (Region, Region), WaitCheck<'_>) -> Result<(), DeviceError>;

/// Buffers of one group for collectives on host memory.
#[derive(Default)]
pub(crate) struct ThroughDevice {
    /// `None` before the first use, and while work with the buffers is under way.
    staging: Option<Staging>,
}

impl ThroughDevice {
    /// Copies the inputs to the device, does `work` there, copies the output back and passes it to `take`. All ranks
    /// have passed [`meet`](GroupLaunch::meet).
    pub(crate) fn run(
        &mut self,
        group: &mut GroupLaunch,
        call: &Call,
        bytes: HostBytes<'_>,
        work: Work<'_>,
        take: impl FnOnce(&[u8]),
    ) -> Result<()> {
        let HostBytes { inputs, output_bytes, empty } = bytes;
        if empty {
            take(&[]);
            return Ok(());
        }
        let rank_device = group.rank_device.clone();
        let input_bytes = inputs.iter().map(|input| input.len()).sum();
        let staging = self.staging(&rank_device.device, input_bytes, output_bytes);
        let mut staging = staging.map_err(|why| rank_device.error(DeviceError::Library(why)))?;
        let mut room = staging.host.bytes_mut();
        for input in inputs {
            let (head, tail) = room.split_at_mut(input.len());
            head.copy_from_slice(input);
            room = tail;
        }
        let launched = group.launch(call, &mut |communicator, stream, check| {
            let (input, output) = staging.regions(input_bytes, output_bytes)?;
            stream.upload(&staging.host, input)?;
            work(communicator, stream, (input, output), check)?;
            stream.download(output, &staging.host)?;
            Ok(stream.record(&staging.done)?)
        });
        let done =
            launched.and_then(|()| wait_for_device(group, call, &staging).inspect_err(|_| abort(&group.communicator)));
        if let Err(error) = done {
            staging.retire(&rank_device.device, &rank_device.stream, group.failed.clone());
            return Err(error);
        }
        take(&staging.host.bytes()[..output_bytes]);
        self.staging = Some(staging);
        Ok(())
    }

    fn staging(&mut self, device: &Device, input_bytes: usize, output_bytes: usize) -> Result<Staging, String> {
        let needed = Staging::needed(input_bytes, output_bytes).ok_or("more bytes than there can be")?;
        match self.staging.take() {
            Some(staging) if staging.holds(needed) => Ok(staging),
            _ => Staging::new(device, needed),
        }
    }
}

/// Waits until the device is done.
fn wait_for_device(group: &GroupLaunch, call: &Call, staging: &Staging) -> Result<()> {
    let rank_device = &group.rank_device;
    let done = wait_until(&|| rank_device.check(call), || {
        if staging.done.is_done()? {
            return Ok(true);
        }
        match lock(&group.communicator).as_mut().and_then(Communicator::async_error) {
            Some((_, why)) => Err(DeviceError::Library(why)),
            None => Ok(false),
        }
    });
    done.map_err(|error| rank_device.error(error))
}
