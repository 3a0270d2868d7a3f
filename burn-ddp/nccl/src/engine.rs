//! The engine of one group on one rank.
//!
//! NCCL works on elements in the device's memory. First the ranks exchange small messages over the world's host engine:
//! they compare their calls, learn which rank is missing, and agree on the order of launches. So a rank calls NCCL only
//! when all ranks do.

use std::any::Any;
use std::sync::Arc;

use burn_ddp_comm::engine::{Engine, Incoming, OnDevice, Outgoing, gather_rows_into, reduce_rows};
use burn_ddp_comm::{Call, DType, Error, PartReduction, ReduceOp, Result, RowDivision, SharedBuffer, SharedView};

use crate::communicator::{Communicator, abort};
use crate::coordinated_launch::GroupLaunch;
use crate::device_and_pinned_memory::Region;
use crate::device_elements::DeviceElements;
use crate::error::DeviceError;
use crate::host_through_device::{HostBytes, HostMemory, ThroughDevice, Work};
use crate::nccl_op::{NcclOp, Part};
use crate::poison_free_lock::lock;
use crate::rank_device_state::RankDevice;
use crate::stream::Stream;
use crate::wait::WaitCheck;
use crate::watchdog::Enqueued;

/// An [`Engine`] that reduces on a device.
pub(crate) struct NcclEngine {
    group: GroupLaunch,
    memory: HostMemory,
    through_device: ThroughDevice,
}

impl NcclEngine {
    pub(crate) fn new(
        host: Box<dyn Engine>,
        rank_device: Arc<RankDevice>,
        memory: HostMemory,
        call: &Call,
    ) -> Result<NcclEngine> {
        let group = GroupLaunch::new(host, rank_device, call)?;
        Ok(NcclEngine { group, memory, through_device: ThroughDevice::default() })
    }

    fn by_host(&self) -> bool {
        self.memory == HostMemory::ByHost
    }

    fn staged(&mut self, call: &Call, bytes: HostBytes<'_>, work: Work<'_>, take: impl FnOnce(&[u8])) -> Result<()> {
        self.through_device.run(&mut self.group, call, bytes, work, take)
    }

    fn reduce_staged(&mut self, call: &Call, dtype: DType, buf: &mut [u8], op: Option<ReduceOp>) -> Result<()> {
        let weights = self.group.meet(call, 0)?;
        let part = Part::of(call, dtype, op, &weights, self.group.rank)?;
        let bytes = HostBytes { inputs: &[buf], output_bytes: buf.len(), empty: buf.is_empty() };
        let mut result = Vec::new();
        self.staged(
            call,
            bytes,
            &mut |communicator, stream, pair, check| all_reduce(communicator, stream, &[pair], part, check),
            |output| result.extend_from_slice(output),
        )?;
        buf.copy_from_slice(&result);
        Ok(())
    }
}

impl Engine for NcclEngine {
    fn name(&self) -> &'static str {
        "nccl"
    }

    /// Also ends the communicator, which holds memory of the device: together with the other ranks, on a thread, or by
    /// an abort if the world has failed.
    fn leave(&mut self) {
        self.group.host.leave();
        match self.group.rank_device.membership.check() {
            Ok(()) => drop(lock(&self.group.communicator).take()),
            Err(_) => abort(&self.group.communicator),
        }
    }

    fn barrier(&mut self, call: &Call) -> Result<()> {
        self.group.host.barrier(call)
    }

    fn all_reduce(&mut self, call: &Call, dtype: DType, buf: &mut [u8], op: ReduceOp) -> Result<()> {
        if self.by_host() {
            return self.group.host.all_reduce(call, dtype, buf, op);
        }
        self.reduce_staged(call, dtype, buf, Some(op))
    }

    fn all_reduce_weighted(&mut self, call: &Call, dtype: DType, buf: &mut [u8]) -> Result<()> {
        if self.by_host() {
            return self.group.host.all_reduce_weighted(call, dtype, buf);
        }
        self.reduce_staged(call, dtype, buf, None)
    }

    fn broadcast(&mut self, call: &Call, buf: &mut [u8], root: usize) -> Result<()> {
        if self.by_host() {
            return self.group.host.broadcast(call, buf, root);
        }
        self.group.meet(call, 0)?;
        let (len, empty) = (buf.len(), buf.is_empty());
        // Only the root's bytes go to its device.
        let inputs: &[u8] = if self.group.rank == root { buf } else { &[] };
        let inputs = inputs.to_vec();
        self.staged(
            call,
            HostBytes { inputs: &[&inputs], output_bytes: len, empty },
            &mut |communicator, stream, (input, output), check| {
                communicator.broadcast(stream, &[(root, input, output)], check)
            },
            |output| buf.copy_from_slice(output),
        )
    }

    fn all_gather(&mut self, call: &Call, input: &[u8], outputs: &mut [&mut [u8]]) -> Result<()> {
        if self.by_host() {
            return self.group.host.all_gather(call, input, outputs);
        }
        self.group.meet(call, 0)?;
        let lens: Vec<usize> = outputs.iter().map(|output| output.len()).collect();
        let (total, rank) = (lens.iter().sum(), self.group.rank);
        if lens.get(rank) != Some(&input.len()) {
            return refuse(format!("an input of {} bytes for rows of {lens:?}", input.len()));
        }
        self.staged(
            call,
            HostBytes { inputs: &[input], output_bytes: total, empty: total == 0 },
            &mut |communicator, stream, (input, output), check| {
                gather_rows(communicator, stream, (input, output), &lens, check)
            },
            |mut rows| {
                for output in outputs {
                    let (row, rest) = rows.split_at(output.len());
                    output.copy_from_slice(row);
                    rows = rest;
                }
            },
        )
    }

    fn reduce_scatter(
        &mut self,
        call: &Call,
        dtype: DType,
        input: &[u8],
        output: &mut [u8],
        op: ReduceOp,
    ) -> Result<()> {
        if self.by_host() {
            return self.group.host.reduce_scatter(call, dtype, input, output, op);
        }
        self.group.meet(call, 0)?;
        self.staged(
            call,
            HostBytes { inputs: &[input], output_bytes: output.len(), empty: input.is_empty() },
            &mut |communicator, stream, pair, check| {
                communicator.reduce_scatter(stream, pair, (dtype, NcclOp::Builtin(op)), check)
            },
            |row| output.copy_from_slice(row),
        )
    }

    fn reduce(&mut self, call: &Call, dtype: DType, buf: &mut [u8], op: ReduceOp, root: usize) -> Result<()> {
        if self.by_host() {
            return self.group.host.reduce(call, dtype, buf, op, root);
        }
        self.group.meet(call, 0)?;
        let (rank, len, empty, input) = (self.group.rank, buf.len(), buf.is_empty(), buf.to_vec());
        self.staged(
            call,
            HostBytes { inputs: &[&input], output_bytes: len, empty },
            &mut |communicator, stream, (input, output), check| {
                communicator.reduce(stream, &[(root, input, output)], (dtype, NcclOp::Builtin(op)), check)
            },
            |output| {
                if rank == root {
                    buf.copy_from_slice(output);
                }
            },
        )
    }

    fn gather(&mut self, call: &Call, input: &[u8], outputs: Option<&mut [&mut [u8]]>, root: usize) -> Result<()> {
        if self.by_host() {
            return self.group.host.gather(call, input, outputs, root);
        }
        self.group.meet(call, 0)?;
        let (len, size, rank) = (input.len(), self.group.size, self.group.rank);
        let room = if rank == root { len * size } else { 0 };
        self.staged(
            call,
            HostBytes { inputs: &[input], output_bytes: room, empty: len == 0 },
            &mut |communicator, stream, (input, output), check| {
                let receives = if rank == root { rows(output, len, size)? } else { Vec::new() };
                communicator.exchange(stream, &[(root, input)], &receives, check)
            },
            |gathered| {
                let rows = gathered.chunks_exact(len.max(1));
                outputs.into_iter().flatten().zip(rows).for_each(|(output, row)| output.copy_from_slice(row));
            },
        )
    }

    fn scatter(&mut self, call: &Call, inputs: Option<&[&[u8]]>, output: &mut [u8], root: usize) -> Result<()> {
        if self.by_host() {
            return self.group.host.scatter(call, inputs, output, root);
        }
        self.group.meet(call, 0)?;
        let (len, size, rank) = (output.len(), self.group.size, self.group.rank);
        self.staged(
            call,
            HostBytes { inputs: inputs.unwrap_or_default(), output_bytes: len, empty: len == 0 },
            &mut |communicator, stream, (input, output), check| {
                let sends = if rank == root { rows(input, len, size)? } else { Vec::new() };
                communicator.exchange(stream, &sends, &[(root, output)], check)
            },
            |row| output.copy_from_slice(row),
        )
    }

    fn all_to_all(&mut self, call: &Call, input: &[u8], output: &mut [u8]) -> Result<()> {
        if self.by_host() {
            return self.group.host.all_to_all(call, input, output);
        }
        self.group.meet(call, 0)?;
        let (size, len) = (self.group.size, input.len() / self.group.size);
        self.staged(
            call,
            HostBytes { inputs: &[input], output_bytes: output.len(), empty: input.is_empty() },
            &mut |communicator, stream, (input, output), check| {
                communicator.exchange(stream, &rows(input, len, size)?, &rows(output, len, size)?, check)
            },
            |rows| output.copy_from_slice(rows),
        )
    }

    /// Always done by the host engine: making the communicator, and agreeing on the order of launches, takes all ranks
    /// of the group.
    fn send_recv(&mut self, call: &Call, send: Option<Outgoing<'_>>, receive: Option<&mut Incoming<'_>>) -> Result<()> {
        self.group.host.send_recv(call, send, receive)
    }

    fn shared_buffers(&mut self, call: &Call, lens: &[usize]) -> Result<Vec<SharedBuffer>> {
        if self.by_host() {
            return self.group.host.shared_buffers(call, lens);
        }
        self.barrier(call)?;
        Ok(lens.iter().map(|len| SharedBuffer::plain(*len)).collect())
    }

    fn all_reduce_shared(
        &mut self,
        call: &Call,
        dtype: DType,
        buffer: &mut SharedBuffer,
        op: Option<ReduceOp>,
    ) -> Result<SharedView> {
        if self.by_host() {
            return self.group.host.all_reduce_shared(call, dtype, buffer, op);
        }
        self.reduce_staged(call, dtype, buffer.bytes_mut(), op)?;
        Ok(buffer.view())
    }

    fn all_gather_shared(
        &mut self,
        call: &Call,
        division: RowDivision,
        part: &[u8],
        buffer: &mut SharedBuffer,
    ) -> Result<SharedView> {
        if self.by_host() {
            return self.group.host.all_gather_shared(call, division, part, buffer);
        }
        gather_rows_into(self, call, division, part, buffer)
    }

    fn reduce_scatter_shared(
        &mut self,
        call: &Call,
        (dtype, division): (DType, RowDivision),
        buffer: &mut SharedBuffer,
        reduction: &PartReduction,
        part: &mut [u8],
    ) -> Result<()> {
        if self.by_host() {
            return self.group.host.reduce_scatter_shared(call, (dtype, division), buffer, reduction, part);
        }
        reduce_rows(self, call, (dtype, division), buffer.bytes_mut(), reduction, part)
    }

    /// Returns when the reduction is enqueued; [`DeviceElements::done()`] is then the event recorded behind it. A later
    /// failure on the device ends the world.
    fn all_reduce_on_device(&mut self, call: &Call, elements: OnDevice<'_>, op: Option<ReduceOp>) -> Result<()> {
        let OnDevice { dtype, len_elems, place } = elements;
        let place = own_place(place)?;
        let regions = place.to_reduce(self.ordinal(), dtype, len_elems)?;
        let weights = self.group.meet(call, place.cut())?;
        let part = Part::of(call, dtype, op, &weights, self.group.rank)?;
        self.enqueue(call, place, regions.is_empty(), &mut |communicator, stream, check| {
            all_reduce(communicator, stream, &regions, part, check)
        })
    }

    /// Returns when the gather is enqueued, like [`all_reduce_on_device`](Self::all_reduce_on_device).
    fn all_gather_on_device(
        &mut self,
        call: &Call,
        (dtype, division): (DType, RowDivision),
        place: &mut dyn Any,
    ) -> Result<()> {
        let place = own_place(place)?;
        let lens: Vec<usize> = (0..self.group.size).map(|rank| division.bytes_of(rank).len()).collect();
        let bytes = (lens[self.group.rank], division.len_bytes());
        let (part, whole) = place.to_divide(self.ordinal(), dtype, bytes)?;
        self.group.meet(call, 0)?;
        self.enqueue(call, place, whole.len_bytes == 0, &mut |communicator, stream, check| {
            gather_rows(communicator, stream, (part, whole), &lens, check)
        })
    }

    /// Returns when the reduction is enqueued, like [`all_reduce_on_device`](Self::all_reduce_on_device).
    fn reduce_scatter_on_device(
        &mut self,
        call: &Call,
        (dtype, division): (DType, RowDivision),
        reduction: &PartReduction,
        place: &mut dyn Any,
    ) -> Result<()> {
        let place = own_place(place)?;
        let bytes = (division.len_bytes(), division.bytes_of(self.group.rank).len());
        let (whole, part) = place.to_divide(self.ordinal(), dtype, bytes)?;
        self.group.meet(call, 0)?;
        let own = match reduction {
            PartReduction::Op(op) => Part::of(call, dtype, Some(*op), &[], self.group.rank),
            PartReduction::Weighted(weights) => Part::of(call, dtype, None, weights, self.group.rank),
        }?;
        self.enqueue(call, place, whole.len_bytes == 0, &mut |communicator, stream, check| {
            if own.absent {
                stream.clear(whole)?;
            }
            scatter_rows(communicator, stream, (whole, part), division, (dtype, own.op), check)
        })
    }
}

impl NcclEngine {
    fn ordinal(&self) -> usize {
        self.group.rank_device.device.ordinal()
    }

    /// Enqueues `work` behind the event `ready` of `place` and before its event `done`, unless it is empty. All ranks
    /// have passed [`meet`](GroupLaunch::meet).
    fn enqueue(
        &mut self,
        call: &Call,
        place: &mut DeviceElements,
        is_empty: bool,
        work: &mut dyn FnMut(&mut Communicator, &Stream, WaitCheck<'_>) -> Result<(), DeviceError>,
    ) -> Result<()> {
        let rank_device = self.group.rank_device.clone();
        // Any thread of the program may make this call.
        let event = rank_device.device.bind().and_then(|()| rank_device.device.event());
        let done = event.map_err(|why| rank_device.error(DeviceError::Library(why)))?;
        if !is_empty {
            self.group.launch(call, &mut |communicator, stream, check| {
                place.ready().map_or(Ok(()), |ready| stream.wait(ready))?;
                work(communicator, stream, check)?;
                Ok(stream.record(&done)?)
            })?;
            let communicator = self.group.communicator.clone();
            rank_device.watchdog.watch(Enqueued { communicator, done: done.clone(), call: call.clone() })?;
        }
        place.done = Some(done);
        Ok(())
    }
}

/// The elements of a call on device memory, not enqueued yet.
fn own_place(place: &mut dyn Any) -> Result<&mut DeviceElements> {
    let Some(place) = place.downcast_mut::<DeviceElements>() else {
        return refuse("elements for the nccl engine must be in a burn_ddp_nccl::DeviceElements".to_owned());
    };
    place.done = None;
    Ok(place)
}

/// Gathers the rows of all ranks, of these numbers of bytes, into the second region; the first is this rank's row.
fn gather_rows(
    communicator: &mut Communicator,
    stream: &Stream,
    (row, rows): (Region, Region),
    lens: &[usize],
    check: WaitCheck<'_>,
) -> Result<(), DeviceError> {
    if lens.iter().all(|len| *len == lens[0]) {
        return communicator.all_gather(stream, row, rows, check);
    }
    let (own, mut start) = (communicator.rank(), 0);
    let mut copies = Vec::with_capacity(lens.len());
    for (root, len) in lens.iter().enumerate() {
        let output = rows.part(start, *len)?;
        copies.extend((*len > 0).then_some((root, if root == own { row } else { output }, output)));
        start += len;
    }
    communicator.broadcast(stream, &copies, check)
}

/// Reduces `whole` over all ranks, and writes this rank's rows of the result to `part`.
fn scatter_rows(
    communicator: &mut Communicator,
    stream: &Stream,
    (whole, part): (Region, Region),
    division: RowDivision,
    what: (DType, NcclOp),
    check: WaitCheck<'_>,
) -> Result<(), DeviceError> {
    if division.is_even() {
        return communicator.reduce_scatter(stream, (whole, part), what, check);
    }
    let mut rows = Vec::with_capacity(division.world_size);
    for root in 0..division.world_size {
        let range = division.bytes_of(root);
        let input = whole.part(range.start, range.len())?;
        // Only the root's output is written.
        let output = if root == communicator.rank() { part } else { input };
        rows.extend((!range.is_empty()).then_some((root, input, output)));
    }
    communicator.reduce(stream, &rows, what, check)
}

/// Reduces the first region of each pair into the second. A rank that is `absent` contributes zeros.
fn all_reduce(
    communicator: &mut Communicator,
    stream: &Stream,
    pieces: &[(Region, Region)],
    Part { dtype, op, absent }: Part,
    check: WaitCheck<'_>,
) -> Result<(), DeviceError> {
    if !absent {
        return communicator.all_reduce(stream, pieces, (dtype, op), check);
    }
    pieces.iter().try_for_each(|(_, output)| stream.clear(*output))?;
    let zeros: Vec<_> = pieces.iter().map(|(_, output)| (*output, *output)).collect();
    communicator.all_reduce(stream, &zeros, (dtype, op), check)
}

/// `region` as `count` rows of `len` bytes, each with its rank.
fn rows(region: Region, len: usize, count: usize) -> Result<Vec<(usize, Region)>, DeviceError> {
    (0..count).map(|rank| Ok((rank, region.part(rank * len, len)?))).collect()
}

fn refuse<R>(message: String) -> Result<R> {
    Err(Error::InvalidArgument { message, rank: None, during: None })
}
