//! Collectives of a rank in a group that spans machines.

use std::sync::Arc;
use std::thread;

use super::NAME;
use super::between_machines::{Wire, floats};
use super::schedule::{ReductionSchedule, broadcast};
use crate::call::{Call, Members};
use crate::engine::shm::{Parts, ShmEngine};
use crate::engine::{Engine, Incoming, Outgoing, checked_weights, gather_rows_into};
use crate::membership::Membership;
use crate::reduce::{Reduction, Source, reduce};
use crate::{DType, Error, ReduceOp, Result, RowDivision, SharedBuffer, SharedView};

/// Stages of a call's exchanges inside a machine.
const FIRST: u8 = 0;
const SECOND: u8 = 1;
const REDUCTION: u8 = 2;

/// Engine of a rank in a group that spans machines.
pub(super) struct TwoLevelEngine {
    /// Collectives of this machine's ranks.
    local: ShmEngine,
    /// This machine's ranks, in the order of the group.
    neighbours: Arc<Members>,
    wire: Wire,
    membership: Arc<Membership>,
}

impl TwoLevelEngine {
    pub(super) fn new(
        local: ShmEngine,
        neighbours: Arc<Members>,
        wire: Wire,
        membership: Arc<Membership>,
    ) -> TwoLevelEngine {
        TwoLevelEngine { local, neighbours, wire, membership }
    }

    /// An exchange of `call` inside the machine.
    fn inside(&self, call: &Call, stage: u8) -> Call {
        call.among(&self.neighbours).at_stage(stage)
    }

    fn leads(&self) -> bool {
        self.wire.local_rank() == 0
    }

    fn size(&self) -> usize {
        self.wire.machines.rank_count()
    }

    /// Compares the calls of all ranks: first inside the machines, then between their leaders. The other ranks hear of
    /// other machines with the next exchange inside their machine.
    fn meet(&mut self, call: &Call) -> Result<()> {
        self.local.barrier(&self.inside(call, FIRST))?;
        if self.leads() {
            let leaders = self.wire.leaders();
            self.wire.meet(&call.at_stage(FIRST), &leaders)?;
        }
        Ok(())
    }

    fn reduce_all(&mut self, call: &Call, dtype: DType, buf: &mut [u8], op: Option<ReduceOp>) -> Result<()> {
        if ReductionSchedule::choose(&self.wire.machines, buf.len()) == ReductionSchedule::OneExchange {
            return self.reduce_small(call, dtype, buf, op);
        }
        let (inside, wire) = (self.inside(call, REDUCTION), &mut self.wire);
        let (len, mut weights) = (buf.len(), vec![]);
        self.local.reduce_by(&inside, buf, |parts| wire.all_reduce(call, (dtype, op), len, parts, &mut weights))?;
        if op.is_none() { checked_weights(call, &weights).map(drop) } else { Ok(()) }
    }

    /// The leader of each machine collects its ranks' buffers, sends them to the other leaders, reduces all and hands
    /// the result to its machine.
    fn reduce_small(&mut self, call: &Call, dtype: DType, buf: &mut [u8], op: Option<ReduceOp>) -> Result<()> {
        let (len, size) = (buf.len(), self.size());
        let weight_bytes = if op.is_none() { size_of::<f64>() } else { 0 };
        // The bytes that each rank gets: the weights by rank, if they matter, and the result.
        let mut outcome = vec![0; size * weight_bytes + len];
        let inside = self.inside(call, FIRST);
        if self.leads() {
            // By machine: the weights of its ranks, and their buffers.
            let row = weight_bytes + len;
            let mut rows = vec![0; size * row];
            let mut places = self.places(&mut rows, row);
            let mine = std::mem::take(&mut places[self.wire.here]);
            let (weights, buffers) = mine.split_at_mut(self.wire.neighbours().len() * weight_bytes);
            let mut outputs: Vec<&mut [u8]> = self.split(buffers, len);
            self.local.gather(&inside, buf, Some(&mut outputs), 0)?;
            if op.is_none() {
                weights.copy_from_slice(bytemuck::cast_slice(self.local.weights()));
            }
            let leaders = self.wire.leaders();
            self.wire.swap(&call.at_stage(SECOND), &leaders, mine, places)?;
            self.reduce_rows(call, (dtype, op), &rows, &mut outcome)?;
        } else {
            self.local.gather(&inside, buf, None, 0)?;
        }
        self.local.broadcast(&self.inside(call, SECOND), &mut outcome, 0)?;
        let (weights, result) = outcome.split_at(size * weight_bytes);
        if op.is_none() {
            checked_weights(call, &floats(weights))?;
        }
        buf.copy_from_slice(result);
        Ok(())
    }

    /// Reduces the weights and buffers of all machines, see [`reduce_small`](Self::reduce_small), into an outcome.
    fn reduce_rows(
        &self,
        call: &Call,
        (dtype, op): (DType, Option<ReduceOp>),
        rows: &[u8],
        outcome: &mut [u8],
    ) -> Result<()> {
        let size = self.size();
        let weight_bytes = if op.is_none() { size_of::<f64>() } else { 0 };
        let (weights_out, result) = outcome.split_at_mut(size * weight_bytes);
        let mut sources = vec![Source::Output; size];
        let mut weights = vec![1.0; size];
        let mut rest = rows;
        for machine in 0..self.wire.machines.count() {
            let ranks = self.wire.machines.ranks_of(machine);
            let (of_ranks, behind) = rest.split_at(ranks.len() * weight_bytes);
            let (buffers, behind) = behind.split_at(ranks.len() * result.len());
            rest = behind;
            for (nth, rank) in ranks.iter().enumerate() {
                sources[*rank] = Source::Bytes(&buffers[nth * result.len()..][..result.len()]);
                if op.is_none() {
                    weights[*rank] = floats(&of_ranks[nth * weight_bytes..][..weight_bytes])[0];
                }
            }
        }
        if op.is_none() {
            weights_out.copy_from_slice(bytemuck::cast_slice(&weights));
        }
        match op {
            Some(op) => reduce(dtype, Reduction::Op(op), &sources, result),
            // All ranks of all machines refuse these weights when they get them.
            None if checked_weights(call, &weights).is_err() => Ok(()),
            None => reduce(dtype, Reduction::of_weights(call, &weights), &sources, result),
        }
    }

    /// Splits `rows`, of `len` bytes per rank, by machine.
    fn places<'a>(&self, rows: &'a mut [u8], len: usize) -> Vec<&'a mut [u8]> {
        let mut rest = rows;
        let machines = 0..self.wire.machines.count();
        let place = |machine| {
            let count = self.wire.machines.ranks_of(machine).len();
            let (place, behind) = std::mem::take(&mut rest).split_at_mut(count * len);
            rest = behind;
            place
        };
        machines.map(place).collect()
    }

    /// Splits `rows`, of `len` bytes for each rank of this machine, by rank.
    fn split<'a>(&self, rows: &'a mut [u8], len: usize) -> Vec<&'a mut [u8]> {
        let mut rest = rows;
        let row = |_| {
            let (row, behind) = std::mem::take(&mut rest).split_at_mut(len);
            rest = behind;
            row
        };
        self.wire.neighbours().iter().map(row).collect()
    }
}

impl Engine for TwoLevelEngine {
    fn name(&self) -> &'static str {
        NAME
    }

    fn leave(&mut self) {
        self.wire.flat.leave();
    }

    fn barrier(&mut self, call: &Call) -> Result<()> {
        self.meet(call)?;
        self.local.barrier(&self.inside(call, SECOND))
    }

    fn all_reduce(&mut self, call: &Call, dtype: DType, buf: &mut [u8], op: ReduceOp) -> Result<()> {
        self.reduce_all(call, dtype, buf, Some(op))
    }

    fn all_reduce_weighted(&mut self, call: &Call, dtype: DType, buf: &mut [u8]) -> Result<()> {
        self.reduce_all(call, dtype, buf, None)
    }

    /// The root hands the buffer to its machine, the leader there to the other leaders, and they to their machines.
    fn broadcast(&mut self, call: &Call, buf: &mut [u8], root: usize) -> Result<()> {
        let from = self.wire.machines.machine_of(root);
        let is_from_here = from == self.wire.here;
        let (first, second) = (self.inside(call, FIRST), self.inside(call, SECOND));
        match is_from_here {
            true => self.local.broadcast(&first, buf, self.wire.machines.local_rank_of(root))?,
            false => self.local.barrier(&first)?,
        }
        if self.leads() {
            let steps = broadcast(&self.wire.machines, self.wire.here, from, buf.len());
            self.wire.follow(call, &steps, buf)?;
        }
        if is_from_here { self.local.barrier(&second) } else { self.local.broadcast(&second, buf, 0) }
    }

    /// Each rank sends its buffer to one rank of each other machine, which hands it to the ranks of its machine.
    fn all_gather(&mut self, call: &Call, input: &[u8], outputs: &mut [&mut [u8]]) -> Result<()> {
        self.local.barrier(&self.inside(call, FIRST))?;
        let held = self.wire.rows_by_local_rank();
        let local_rank = self.wire.local_rank();
        outputs[self.wire.me].copy_from_slice(input);
        let is_mine = |rank: usize| held[local_rank][1..].contains(&rank);
        let rooms = outputs.iter_mut().enumerate().filter(|(rank, _)| is_mine(*rank));
        let mut receives: Vec<_> = rooms.map(|(rank, room)| Incoming::new(rank, room)).collect();
        self.wire.gather(&call.at_stage(FIRST), input, &mut receives)?;
        if held.len() == 1 {
            return Ok(());
        }
        for turn in 0..held.iter().map(Vec::len).max().unwrap_or(0) {
            let in_turn: Vec<Option<usize>> = held.iter().map(|ranks| ranks.get(turn).copied()).collect();
            let mine = in_turn[local_rank].map_or_else(Vec::new, |rank| outputs[rank].to_vec());
            let mut rooms: Vec<&mut [u8]> = in_turn.iter().map(|_| &mut [][..]).collect();
            for (rank, output) in outputs.iter_mut().enumerate() {
                if let Some(nth) = in_turn.iter().position(|held| *held == Some(rank)) {
                    rooms[nth] = output;
                }
            }
            let stage = SECOND + (turn % 128) as u8;
            self.local.all_gather(&call.among(&self.neighbours).at_stage(stage), &mine, &mut rooms)?;
        }
        Ok(())
    }

    fn reduce_scatter(
        &mut self,
        call: &Call,
        dtype: DType,
        input: &[u8],
        output: &mut [u8],
        op: ReduceOp,
    ) -> Result<()> {
        let (inside, wire, len) = (self.inside(call, REDUCTION), &mut self.wire, output.len());
        self.local.reduce_rows_by(&inside, input, output, |parts| wire.reduce_scatter(call, (dtype, op), len, parts))
    }

    /// An all-reduce of a copy: between two machines nothing costs less, and small buffers take one exchange.
    fn reduce(&mut self, call: &Call, dtype: DType, buf: &mut [u8], op: ReduceOp, root: usize) -> Result<()> {
        if self.wire.me == root {
            return self.reduce_all(call, dtype, buf, Some(op));
        }
        self.reduce_all(call, dtype, &mut buf.to_vec(), Some(op))
    }

    /// Ranks of other machines send their buffers straight to the root, those of its machine through shared memory.
    fn gather(&mut self, call: &Call, input: &[u8], outputs: Option<&mut [&mut [u8]]>, root: usize) -> Result<()> {
        self.meet(call)?;
        let (second, wire) = (self.inside(call, SECOND), &mut self.wire);
        if wire.machines.machine_of(root) != wire.here {
            wire.exchange(&call.at_stage(SECOND), &[Outgoing { peer: root, payload: input }], &mut [])?;
            return self.local.barrier(&second);
        }
        let near_root = wire.machines.local_rank_of(root);
        let Some(outputs) = outputs else { return self.local.gather(&second, input, None, near_root) };
        let (mut near, mut far) = (Vec::new(), Vec::new());
        for (rank, output) in outputs.iter_mut().enumerate() {
            match wire.machines.machine_of(rank) == wire.here {
                true => near.push(&mut **output),
                false => far.push(Incoming::new(rank, output)),
            }
        }
        wire.exchange(&call.at_stage(SECOND), &[], &mut far)?;
        self.local.gather(&second, input, Some(&mut near), near_root)
    }

    /// The reverse of [`gather`](Self::gather).
    fn scatter(&mut self, call: &Call, inputs: Option<&[&[u8]]>, output: &mut [u8], root: usize) -> Result<()> {
        self.meet(call)?;
        let (second, wire) = (self.inside(call, SECOND), &mut self.wire);
        if wire.machines.machine_of(root) != wire.here {
            wire.exchange(&call.at_stage(SECOND), &[], &mut [Incoming::new(root, output)])?;
            return self.local.barrier(&second);
        }
        let near_root = wire.machines.local_rank_of(root);
        let Some(inputs) = inputs else { return self.local.scatter(&second, None, output, near_root) };
        let far = (0..inputs.len()).filter(|rank| wire.machines.machine_of(*rank) != wire.here);
        let sends: Vec<_> = far.map(|peer| Outgoing { peer, payload: inputs[peer] }).collect();
        wire.exchange(&call.at_stage(SECOND), &sends, &mut [])?;
        let near: Vec<&[u8]> = wire.neighbours().iter().map(|rank| inputs[*rank]).collect();
        self.local.scatter(&second, Some(&near), output, near_root)
    }

    /// Rows for ranks of other machines go straight to them, those for ranks of this machine through shared memory.
    fn all_to_all(&mut self, call: &Call, input: &[u8], output: &mut [u8]) -> Result<()> {
        let (len, first, wire) = (input.len() / self.size(), self.inside(call, FIRST), &mut self.wire);
        let row = |rank: usize| &input[rank * len..][..len];
        let near = wire.neighbours().iter().map(|rank| row(*rank)).collect::<Vec<_>>().concat();
        let mut from_near = vec![0; near.len()];
        self.local.all_to_all(&first, &near, &mut from_near)?;
        let (mut sends, mut receives, mut rest) = (Vec::new(), Vec::new(), output);
        for rank in 0..wire.machines.rank_count() {
            let (room, behind) = rest.split_at_mut(len);
            rest = behind;
            if wire.machines.machine_of(rank) == wire.here {
                room.copy_from_slice(&from_near[wire.machines.local_rank_of(rank) * len..][..len]);
            } else {
                sends.push(Outgoing { peer: rank, payload: row(rank) });
                receives.push(Incoming::new(rank, room));
            }
        }
        wire.exchange(&call.at_stage(FIRST), &sends, &mut receives)
    }

    fn send_recv(&mut self, call: &Call, send: Option<Outgoing<'_>>, receive: Option<&mut Incoming<'_>>) -> Result<()> {
        let (machines, here) = (&self.wire.machines, self.wire.here);
        let is_near = |peer: usize| machines.machine_of(peer) == here;
        let (near_send, far_send) = (send.filter(|to| is_near(to.peer)), send.filter(|to| !is_near(to.peer)));
        let (near, far) = match receive {
            Some(from) if is_near(from.peer) => (Some(from), None),
            from => (None, from),
        };
        let peer_of = |send: &Option<Outgoing<'_>>, receive: &Option<&mut Incoming<'_>>| {
            send.map(|to| to.peer).or(receive.as_ref().map(|from| from.peer))
        };
        let Some(near_peer) = peer_of(&near_send, &near) else { return self.wire.flat.send_recv(call, far_send, far) };
        let inside = |peer: usize| machines.local_rank_of(peer);
        let far_peer = peer_of(&far_send, &far);
        let near_send = near_send.map(|to| Outgoing { peer: inside(to.peer), ..to });
        let mut near = near.map(|from| Incoming::new(inside(from.peer), &mut *from.payload));
        let Some(far_peer) = far_peer else {
            let mut near_call = call.among(&self.neighbours);
            near_call.receives = call.receives.clone().map(|halves| Box::new((inside(halves.0), halves.1)));
            return self.local.send_recv(&near_call, near_send, near.as_mut());
        };
        // One peer is here and one elsewhere: neither half of the call may wait for the other.
        let (near_call, far_call) = (call.half_for(near_peer).among(&self.neighbours), call.half_for(far_peer));
        let Self { local, wire, membership, .. } = self;
        let conclude = |done: Result<()>, call: &Call| done.map_err(|error| membership.conclude(error, call));
        thread::scope(|scope| {
            let far_half = || conclude(wire.flat.send_recv(&far_call, far_send, far), &far_call);
            let far = thread::Builder::new().spawn_scoped(scope, far_half).map_err(|error| Error::Environment {
                message: format!("cannot start a thread for the half of a send_recv with another machine: {error}"),
            })?;
            let near = conclude(local.send_recv(&near_call, near_send, near.as_mut()), &near_call);
            near.and(far.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)))
        })
    }

    fn shared_buffers(&mut self, call: &Call, lens: &[usize]) -> Result<Vec<SharedBuffer>> {
        self.barrier(call)?;
        if self.wire.neighbours().len() == 1 {
            return Ok(lens.iter().map(|len| SharedBuffer::plain(*len)).collect());
        }
        self.local.shared_buffers(&self.inside(call, REDUCTION), lens)
    }

    fn all_reduce_shared(
        &mut self,
        call: &Call,
        dtype: DType,
        buffer: &mut SharedBuffer,
        op: Option<ReduceOp>,
    ) -> Result<SharedView> {
        let len = buffer.len_bytes();
        if ReductionSchedule::choose(&self.wire.machines, len) == ReductionSchedule::OneExchange {
            self.reduce_small(call, dtype, buffer.bytes_mut(), op)?;
            return Ok(buffer.view());
        }
        let (inside, wire) = (self.inside(call, REDUCTION), &mut self.wire);
        let mut weights = vec![];
        let reduce = |parts: &mut dyn Parts| wire.all_reduce(call, (dtype, op), len, parts, &mut weights);
        let view = self.local.reduce_shared_by(&inside, buffer, reduce)?;
        if op.is_none() { checked_weights(call, &weights).map(|_| view) } else { Ok(view) }
    }

    /// Rows of other machines arrive in the memory that the ranks of this machine share.
    fn all_gather_shared(
        &mut self,
        call: &Call,
        division: RowDivision,
        part: &[u8],
        buffer: &mut SharedBuffer,
    ) -> Result<SharedView> {
        let (inside, wire) = (self.inside(call, FIRST), &mut self.wire);
        let ranks = wire.rows_by_local_rank().swap_remove(wire.local_rank());
        let mine: Vec<_> = ranks.iter().map(|rank| division.bytes_of(*rank)).collect();
        let gathered = self.local.gather_shared_by(&inside, buffer, &mine, |rooms| {
            rooms[0].copy_from_slice(part);
            let rooms = ranks.iter().zip(rooms).skip(1);
            let mut receives: Vec<_> = rooms.map(|(rank, room)| Incoming::new(*rank, room)).collect();
            wire.gather(&call.at_stage(FIRST), part, &mut receives)
        })?;
        match gathered {
            Some(view) => Ok(view),
            None => gather_rows_into(self, call, division, part, buffer),
        }
    }
}
