//! The engine of one group on one rank.
//!
//! What is in the device's memory is reduced by NCCL. Before anything is launched, the ranks meet over the engine between their hosts: they
//! compare their calls, learn who is missing, and agree when to launch. So an NCCL call is only made when all ranks make it.

use burn_ddp_comm::call::Call;
use burn_ddp_comm::engine::{Engine, Incoming, OnDevice, Outgoing, checked_weights};
use burn_ddp_comm::{DType, Error, ReduceOp, Result, SharedBuffer, SharedView};
use std::sync::Arc;
use std::time::Duration;

use crate::communicator::{Alive, Communicator, Fault, How};
use crate::device::{Region, Stream};
use crate::fabric::{HostMemory, Shared};
use crate::nccl::{UNIQUE_ID_BYTES, UniqueId};
use crate::pause::Pause;
use crate::device_reduce::{DeviceReduce, refuse};
use crate::staging::Staging;
use crate::watchdog::{Enqueued, Slot, abort, lock};

/// An [`Engine`] that reduces on a device.
pub(crate) struct NcclEngine {
    host: Box<dyn Engine>,
    shared: Arc<Shared>,
    memory: HostMemory,
    /// This rank in the group, and the group's size.
    rank: usize,
    size: usize,
    slot: Slot,
    /// Made when it is first needed, never with work under way.
    staging: Option<Staging>,
}

/// A look at the world while waiting for the turn to launch, which is announced.
const TURN: Duration = Duration::from_millis(20);

/// The steps of a collective on regions of the device: input and output.
type Work<'a> = &'a mut dyn FnMut(&mut Communicator, &Stream, (Region, Region), Alive<'_>) -> Result<(), Fault>;

/// What goes to the device, one behind the other, and how much comes back.
struct Load<'a> {
    inputs: &'a [&'a [u8]],
    output_bytes: usize,
    /// Whether there is nothing to do, on all ranks alike.
    empty: bool,
}

impl NcclEngine {
    pub(crate) fn new(
        host: Box<dyn Engine>,
        shared: Arc<Shared>,
        memory: HostMemory,
        call: &Call,
    ) -> Result<NcclEngine> {
        let (rank, size) = (call.group_rank()?, call.members.count());
        Ok(NcclEngine { host, shared, memory, rank, size, slot: Slot::default(), staging: None })
    }

    fn by_host(&self) -> bool {
        self.memory == HostMemory::ByHost
    }

    /// Everybody's `mine`, of one length, by an exchange between the hosts, which compares the calls.
    fn gathered(&mut self, call: &Call, mine: &[u8]) -> Result<Vec<Vec<u8>>> {
        let mut rows = vec![vec![0; mine.len()]; self.size];
        let mut outputs: Vec<&mut [u8]> = rows.iter_mut().map(Vec::as_mut_slice).collect();
        self.host.all_gather(call, mine, &mut outputs)?;
        Ok(rows)
    }

    /// Waits until all ranks are in this call, with elements cut alike; yields their weights.
    fn arrive(&mut self, call: &Call, cut: u64) -> Result<Vec<f64>> {
        let mine = [call.weight.to_le_bytes(), cut.to_le_bytes()].concat();
        let rows = self.gathered(call, &mine)?;
        // All ranks see the same, so all refuse.
        if let Some(odd) = rows.iter().position(|row| row[8..] != rows[0][8..]) {
            let (first, odd) = (call.world_rank(0), call.world_rank(odd));
            let message =
                format!("rank {odd} passed its elements in other pieces than rank {first}: all ranks cut them alike");
            return Err(Error::InvalidArgument { message, rank: Some(odd), during: None });
        }
        Ok(rows.iter().map(|row| f64::from_bits(number(row))).collect())
    }

    /// Enqueues `work` when it is this call's turn among those of the device. All ranks have [arrived](Self::arrive).
    fn launch(
        &mut self,
        call: &Call,
        work: &mut dyn FnMut(&mut Communicator, &Stream, Alive<'_>) -> Result<(), Fault>,
    ) -> Result<()> {
        let shared = self.shared.clone();
        let alive = || shared.alive(call);
        let place = shared.order.propose(call.info.group);
        let mut mine = place.proposal.to_le_bytes().to_vec();
        let first = lock(&self.slot).is_none();
        if first {
            let id = match self.rank {
                0 => shared.nccl.unique_id().map_err(|why| shared.error(Fault::Device(why)))?,
                _ => UniqueId([0; UNIQUE_ID_BYTES]),
            };
            mine.extend_from_slice(&id.0);
        }
        let rows = self.gathered(&call.next_stage(), &mine)?;
        place.agree(rows.iter().map(|row| number(row)).max().unwrap_or(place.proposal));
        while !place.wait(TURN) {
            alive()?;
        }
        let slot = self.slot.clone();
        let mut slot = lock(&slot);
        let launched = match slot.as_mut() {
            Some(communicator) => Ok(communicator),
            None if first => self.join(&rows[0], &alive).map(|communicator| slot.insert(communicator)),
            None => Err(Fault::Device("its communicator was aborted".to_owned())),
        };
        let launched = launched.and_then(|communicator| work(communicator, &shared.stream, &alive));
        launched.map_err(|fault| {
            slot.take().into_iter().for_each(|mut communicator| communicator.give_up());
            shared.error(fault)
        })
    }

    /// Makes the communicator, in the order of launches: that may wait for the device, and so for kernels that wait for other ranks.
    fn join(&self, row: &[u8], alive: Alive<'_>) -> Result<Communicator, Fault> {
        let mut id = UniqueId([0; UNIQUE_ID_BYTES]);
        id.0.copy_from_slice(
            row.get(8..).filter(|id| id.len() == UNIQUE_ID_BYTES).ok_or("no unique id came".to_owned())?,
        );
        let Shared { nccl, device, .. } = &*self.shared;
        Communicator::init((nccl, device), id, (self.rank, self.size), false, alive)
    }

    /// How to reduce, and whether this rank counts as absent.
    fn how(&self, call: &Call, op: Option<ReduceOp>, weights: &[f64]) -> Result<(How, bool)> {
        let Some(op) = op else {
            let weights = checked_weights(call, weights)?;
            if weights.iter().all(|weight| *weight == weights[0]) {
                return Ok((How::Op(ReduceOp::Mean), false));
            }
            return Ok((How::Scaled(factor(weights, self.rank)), weights[self.rank] == 0.0));
        };
        Ok((How::Op(op), false))
    }

    /// Copies `inputs` to the device, does `work` there, copies `output_bytes` back and shows them to `take`.
    fn staged(&mut self, call: &Call, load: Load<'_>, work: Work<'_>, take: impl FnOnce(&[u8])) -> Result<()> {
        let Load { inputs, output_bytes, empty } = load;
        if empty {
            take(&[]);
            return Ok(());
        }
        let input_bytes = inputs.iter().map(|input| input.len()).sum();
        let mut staging =
            self.staging(input_bytes, output_bytes).map_err(|why| self.shared.error(Fault::Device(why)))?;
        let mut room = staging.host.bytes_mut();
        for input in inputs {
            let (here, rest) = room.split_at_mut(input.len());
            here.copy_from_slice(input);
            room = rest;
        }
        let launched = self.launch(call, &mut |communicator, stream, alive| {
            let (input, output) = staging.regions(input_bytes, output_bytes)?;
            stream.upload(&staging.host, input)?;
            work(communicator, stream, (input, output), alive)?;
            stream.download(output, &staging.host)?;
            Ok(stream.record(&staging.done)?)
        });
        let done = launched.and_then(|()| self.completed(call, &staging).inspect_err(|_| abort(&self.slot)));
        if let Err(error) = done {
            staging.retire(&self.shared.device, &self.shared.stream);
            return Err(error);
        }
        take(&staging.host.bytes()[..output_bytes]);
        self.staging = Some(staging);
        Ok(())
    }

    fn staging(&mut self, input_bytes: usize, output_bytes: usize) -> Result<Staging, String> {
        let needed = Staging::needed(input_bytes, output_bytes).ok_or("more bytes than there can be")?;
        match self.staging.take() {
            Some(staging) if staging.holds(needed) => Ok(staging),
            _ => Staging::new(&self.shared.device, needed),
        }
    }

    /// Waits until the device is through.
    fn completed(&self, call: &Call, staging: &Staging) -> Result<()> {
        let mut pause = Pause::new();
        while !staging.done.is_done().map_err(|why| self.shared.error(Fault::Device(why)))? {
            if let Some((_, why)) = lock(&self.slot).as_mut().and_then(Communicator::async_error) {
                return Err(self.shared.error(Fault::Device(why)));
            }
            self.shared.alive(call)?;
            pause.wait();
        }
        Ok(())
    }

    fn reduce_staged(&mut self, call: &Call, dtype: DType, buf: &mut [u8], op: Option<ReduceOp>) -> Result<()> {
        let weights = self.arrive(call, 0)?;
        let (how, absent) = self.how(call, op, &weights)?;
        let (len, empty) = (buf.len(), buf.is_empty());
        let mut result = Vec::new();
        let mut work = |communicator: &mut Communicator, stream: &Stream, pair: (Region, Region), alive: Alive<'_>| {
            reduce_all(communicator, stream, &[pair], (dtype, how), absent, alive)
        };
        let load = Load { inputs: &[buf], output_bytes: len, empty };
        self.staged(call, load, &mut work, |output| result.extend_from_slice(output))?;
        buf.copy_from_slice(&result);
        Ok(())
    }
}

/// A rank that is absent counts with zeros, whatever it has: zero times NaN is NaN.
fn reduce_all(
    communicator: &mut Communicator,
    stream: &Stream,
    pieces: &[(Region, Region)],
    what: (DType, How),
    absent: bool,
    alive: Alive<'_>,
) -> Result<(), Fault> {
    if !absent {
        return communicator.all_reduce(stream, pieces, what, alive);
    }
    pieces.iter().try_for_each(|(_, output)| stream.clear(*output))?;
    let zeros: Vec<_> = pieces.iter().map(|(_, output)| (*output, *output)).collect();
    communicator.all_reduce(stream, &zeros, what, alive)
}

/// This rank's share of the sum of all weights, which are finite, not negative and not all 0. The largest is brought to 1 first, so
/// nothing overflows.
fn factor(weights: &[f64], rank: usize) -> f64 {
    let largest = weights.iter().copied().fold(0.0, f64::max);
    let total: f64 = weights.iter().map(|weight| weight / largest).sum();
    weights[rank] / largest / total
}

fn number(row: &[u8]) -> u64 {
    row.first_chunk().map_or(0, |bytes| u64::from_le_bytes(*bytes))
}

impl Engine for NcclEngine {
    fn name(&self) -> &'static str {
        "nccl"
    }

    fn barrier(&mut self, call: &Call) -> Result<()> {
        self.host.barrier(call)
    }

    fn all_reduce(&mut self, call: &Call, dtype: DType, buf: &mut [u8], op: ReduceOp) -> Result<()> {
        if self.by_host() {
            return self.host.all_reduce(call, dtype, buf, op);
        }
        self.reduce_staged(call, dtype, buf, Some(op))
    }

    fn all_reduce_weighted(&mut self, call: &Call, dtype: DType, buf: &mut [u8]) -> Result<()> {
        if self.by_host() {
            return self.host.all_reduce_weighted(call, dtype, buf);
        }
        self.reduce_staged(call, dtype, buf, None)
    }

    fn broadcast(&mut self, call: &Call, buf: &mut [u8], root: usize) -> Result<()> {
        if self.by_host() {
            return self.host.broadcast(call, buf, root);
        }
        self.arrive(call, 0)?;
        let (len, empty) = (buf.len(), buf.is_empty());
        // Only the root's bytes go to its device.
        let inputs: &[u8] = if self.rank == root { buf } else { &[] };
        let inputs = inputs.to_vec();
        self.staged(
            call,
            Load { inputs: &[&inputs], output_bytes: len, empty },
            &mut |communicator, stream, (input, output), alive| {
                communicator.broadcast(stream, &[(root, input, output)], alive)
            },
            |output| buf.copy_from_slice(output),
        )
    }

    fn all_gather(&mut self, call: &Call, input: &[u8], outputs: &mut [&mut [u8]]) -> Result<()> {
        if self.by_host() {
            return self.host.all_gather(call, input, outputs);
        }
        self.arrive(call, 0)?;
        let lens: Vec<usize> = outputs.iter().map(|output| output.len()).collect();
        let (total, rank) = (lens.iter().sum(), self.rank);
        if lens.get(rank) != Some(&input.len()) {
            return refuse(format!("an input of {} bytes for rows of {lens:?}", input.len()));
        }
        let alike = lens.iter().all(|len| *len == lens[0]);
        self.staged(
            call,
            Load { inputs: &[input], output_bytes: total, empty: total == 0 },
            &mut |communicator, stream, (input, output), alive| {
                if alike {
                    return communicator.all_gather(stream, input, output, alive);
                }
                let mut start = 0;
                let mut copies = Vec::with_capacity(lens.len());
                for (root, len) in lens.iter().enumerate() {
                    let row = output.part(start, *len)?;
                    copies.extend((*len > 0).then_some((root, if root == rank { input } else { row }, row)));
                    start += len;
                }
                communicator.broadcast(stream, &copies, alive)
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
            return self.host.reduce_scatter(call, dtype, input, output, op);
        }
        self.arrive(call, 0)?;
        self.staged(
            call,
            Load { inputs: &[input], output_bytes: output.len(), empty: input.is_empty() },
            &mut |communicator, stream, pair, alive| communicator.reduce_scatter(stream, pair, (dtype, op), alive),
            |row| output.copy_from_slice(row),
        )
    }

    fn reduce(&mut self, call: &Call, dtype: DType, buf: &mut [u8], op: ReduceOp, root: usize) -> Result<()> {
        if self.by_host() {
            return self.host.reduce(call, dtype, buf, op, root);
        }
        self.arrive(call, 0)?;
        let (rank, len, empty, input) = (self.rank, buf.len(), buf.is_empty(), buf.to_vec());
        self.staged(
            call,
            Load { inputs: &[&input], output_bytes: len, empty },
            &mut |communicator, stream, pair, alive| communicator.reduce(stream, pair, (dtype, op), root, alive),
            |output| {
                if rank == root {
                    buf.copy_from_slice(output);
                }
            },
        )
    }

    fn gather(&mut self, call: &Call, input: &[u8], outputs: Option<&mut [&mut [u8]]>, root: usize) -> Result<()> {
        if self.by_host() {
            return self.host.gather(call, input, outputs, root);
        }
        self.arrive(call, 0)?;
        let (len, size, rank) = (input.len(), self.size, self.rank);
        let room = if rank == root { len * size } else { 0 };
        self.staged(
            call,
            Load { inputs: &[input], output_bytes: room, empty: len == 0 },
            &mut |communicator, stream, (input, output), alive| {
                let receives = if rank == root { rows(output, len, size)? } else { Vec::new() };
                communicator.exchange(stream, &[(root, input)], &receives, alive)
            },
            |gathered| {
                let rows = gathered.chunks_exact(len.max(1));
                outputs.into_iter().flatten().zip(rows).for_each(|(output, row)| output.copy_from_slice(row));
            },
        )
    }

    fn scatter(&mut self, call: &Call, inputs: Option<&[&[u8]]>, output: &mut [u8], root: usize) -> Result<()> {
        if self.by_host() {
            return self.host.scatter(call, inputs, output, root);
        }
        self.arrive(call, 0)?;
        let (len, size, rank) = (output.len(), self.size, self.rank);
        self.staged(
            call,
            Load { inputs: inputs.unwrap_or_default(), output_bytes: len, empty: len == 0 },
            &mut |communicator, stream, (input, output), alive| {
                let sends = if rank == root { rows(input, len, size)? } else { Vec::new() };
                communicator.exchange(stream, &sends, &[(root, output)], alive)
            },
            |row| output.copy_from_slice(row),
        )
    }

    fn all_to_all(&mut self, call: &Call, input: &[u8], output: &mut [u8]) -> Result<()> {
        if self.by_host() {
            return self.host.all_to_all(call, input, output);
        }
        self.arrive(call, 0)?;
        let (size, len) = (self.size, input.len() / self.size);
        self.staged(
            call,
            Load { inputs: &[input], output_bytes: output.len(), empty: input.is_empty() },
            &mut |communicator, stream, (input, output), alive| {
                communicator.exchange(stream, &rows(input, len, size)?, &rows(output, len, size)?, alive)
            },
            |rows| output.copy_from_slice(rows),
        )
    }

    /// By the host in any case: two ranks can neither make the communicator of a group, nor agree with others when to launch.
    fn send_recv(&mut self, call: &Call, send: Option<Outgoing<'_>>, receive: Option<&mut Incoming<'_>>) -> Result<()> {
        self.host.send_recv(call, send, receive)
    }

    fn shared_buffers(&mut self, call: &Call, lens: &[usize]) -> Result<Vec<SharedBuffer>> {
        if self.by_host() {
            return self.host.shared_buffers(call, lens);
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
            return self.host.all_reduce_shared(call, dtype, buffer, op);
        }
        self.reduce_staged(call, dtype, buffer.bytes_mut(), op)?;
        Ok(buffer.view())
    }

    /// Returns when the reduction is enqueued; the place then has the event that is recorded behind it. What goes wrong on the device
    /// later ends the world.
    fn all_reduce_on_device(&mut self, call: &Call, elements: OnDevice<'_>, op: Option<ReduceOp>) -> Result<()> {
        let OnDevice { dtype, len_elems, place } = elements;
        let Some(place) = place.downcast_mut::<DeviceReduce>() else {
            return refuse("the engine nccl takes elements at a burn_ddp_nccl::DeviceReduce".to_owned());
        };
        place.done = None;
        let regions = place.regions(self.shared.device.ordinal(), dtype, len_elems)?;
        let weights = self.arrive(call, place.cut())?;
        let (how, absent) = self.how(call, op, &weights)?;
        let done = self.shared.device.event().map_err(|why| self.shared.error(Fault::Device(why)))?;
        if !regions.is_empty() {
            self.launch(call, &mut |communicator, stream, alive| {
                place.ready().map_or(Ok(()), |ready| stream.wait(ready))?;
                reduce_all(communicator, stream, &regions, (dtype, how), absent, alive)?;
                Ok(stream.record(&done)?)
            })?;
            let enqueued = Enqueued { slot: self.slot.clone(), done: done.clone(), call: call.clone() };
            self.shared.watchdog.watch(enqueued)?;
        }
        place.done = Some(done);
        Ok(())
    }
}

/// A region in `count` rows of `len` bytes, by rank.
fn rows(region: Region, len: usize, count: usize) -> Result<Vec<(usize, Region)>, String> {
    (0..count).map(|rank| Ok((rank, region.part(rank * len, len)?))).collect()
}

/// In a world that has ended the others will not end the communicator together with this rank.
impl Drop for NcclEngine {
    fn drop(&mut self) {
        if self.shared.membership.check().is_err() {
            abort(&self.slot);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::factor;

    #[test]
    fn factors_are_shares() {
        assert_eq!(factor(&[3.0, 1.0], 0), 0.75);
        assert_eq!(factor(&[3.0, 0.0], 1), 0.0);
        let huge = [f64::MAX, f64::MAX, f64::MAX / 2.0];
        assert_eq!((0..3).map(|rank| factor(&huge, rank)).collect::<Vec<_>>(), [0.4, 0.4, 0.2]);
    }
}
