//! Where all calls of a group meet: one after the other, checked, remembered, then the engine.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use crate::call::{Call, CallInfo, Collective, GroupId, Members};
use crate::clock::{Ticks, nanos};
use crate::dtype::{DType, Element};
use crate::engine::{Engine, Incoming, OnDevice, Outgoing};
use crate::history::Log;
use crate::plan::{Caller, Plan, check_op, check_rows, check_whole, refuse};
use crate::sync::lock;
use crate::timeline::Fact;
use crate::world::Member;
use crate::{ReduceOp, Result, SharedBuffer, SharedView};

/// One rank's side of a group, as the threads that call on it share it.
pub(crate) struct Core {
    pub(crate) member: Arc<Member>,
    /// The number of the group in its world.
    pub(crate) id: u64,
    /// This rank in the group.
    pub(crate) rank: usize,
    pub(crate) members: Arc<Members>,
    /// What was called; written by whose turn it is.
    log: Arc<Log>,
    /// Whether the timeline shows its calls.
    shown: AtomicBool,
    /// How long its calls have taken so far, in ticks. Written by whose turn it is.
    ticks_in_calls: AtomicU64,
    /// Locked for the whole of a call: the next one waits.
    turn: Mutex<Turn>,
}

struct Turn {
    engine: Box<dyn Engine>,
    /// The call under way, or the last one: what is the same in all of them stays.
    call: Call,
    /// The number of the next call. Calls that are refused count too: so a rank that was refused what others were not
    /// is noticed at its next call.
    sequence: u64,
    /// By group rank, the number of the next call with that rank alone. Empty until the first.
    pair_sequences: Vec<u64>,
}

/// One direction of a call between two ranks: the other one by group rank, and the bytes.
pub(crate) type Outbound<'a> = (usize, &'a [u8]);
/// See [`Outbound`].
pub(crate) type Inbound<'a> = (usize, &'a mut [u8]);

impl Core {
    /// The group that `call` made.
    pub(crate) fn new(member: Arc<Member>, rank: usize, call: Call, log: Arc<Log>, engine: Box<dyn Engine>) -> Core {
        let (id, members) = (call.info.group, call.members.clone());
        let turn = Mutex::new(Turn { engine, call, sequence: 0, pair_sequences: Vec::new() });
        let (shown, ticks_in_calls) = (AtomicBool::new(true), AtomicU64::new(0));
        Core { member, id, rank, members, log, shown, ticks_in_calls, turn }
    }

    /// The timeline does not show its calls.
    pub(crate) fn hide(&self) {
        self.shown.store(false, Ordering::Relaxed);
    }

    pub(crate) fn time_in_calls(&self) -> Duration {
        nanos(self.ticks_in_calls.load(Ordering::Relaxed))
    }

    pub(crate) fn size(&self) -> usize {
        self.members.count()
    }

    /// Does one call when its turn has come.
    pub(crate) fn call<R>(&self, plan: Plan, body: impl FnOnce(&mut dyn Engine, &Call) -> Result<R>) -> Result<R> {
        let mut turn = lock(&self.turn);
        let Turn { engine, call, sequence, .. } = &mut *turn;
        // In place, field by field: every call passes here.
        let CallInfo { collective, reduce, dtype, len_elems, root, tag, group: _, sequence: number, site, step } =
            &mut call.info;
        *collective = plan.collective;
        *reduce = plan.reduce;
        *dtype = plan.dtype;
        *len_elems = plan.len_elems as u64;
        *root = plan.root.map(|root| self.members.world_rank(root));
        *tag = plan.tag;
        *number = *sequence;
        *site = plan.caller.site.into();
        *step = plan.caller.step;
        *sequence += 1;
        call.renew(plan.weight);
        self.run(call, || body(&mut **engine, call))
    }

    /// Runs the call whose turn it is.
    fn run<R>(&self, call: &Call, body: impl FnOnce() -> Result<R>) -> Result<R> {
        let recorded = self.member.timeline().filter(|_| self.shown.load(Ordering::Relaxed));
        let began = recorded.map(|_| Instant::now());
        let result = self.member.run(&self.log, call, body);
        let took = Ticks::now().0.saturating_sub(call.started_ticks().0);
        self.ticks_in_calls.fetch_add(took, Ordering::Relaxed);
        if let (Some(timeline), Some(began)) = (recorded, began) {
            let time = began..Instant::now();
            let (info, site) = (&call.info, call.info.site.to_string());
            let bytes = info.dtype.map_or(0, |dtype| info.len_elems * dtype.size_bytes() as u64);
            let error = result.as_ref().err().map(ToString::to_string);
            let facts = [
                ("bytes", Fact::Number(bytes)),
                ("number", Fact::Number(info.sequence)),
                ("site", Fact::Text(&site)),
                ("error", Fact::Text(error.as_deref().unwrap_or_default())),
            ];
            let facts = &facts[..facts.len() - usize::from(error.is_none())];
            timeline.span(&format!("collectives of group {}", GroupId(self.id)), info.collective, time, facts);
        }
        result
    }

    /// A transfer to one rank and from one, at least one of both.
    pub(crate) fn transfer(
        &self,
        caller: Caller,
        dtype: DType,
        send: Option<Outbound<'_>>,
        receive: Option<Inbound<'_>>,
    ) -> Result<()> {
        let mut turn = lock(&self.turn);
        let Turn { engine, call, pair_sequences, .. } = &mut *turn;
        pair_sequences.resize(self.size(), 0);
        let elements = |len_bytes: usize| (len_bytes / dtype.size_bytes()) as u64;
        let mut side = |collective, peer: usize, len_bytes: usize| {
            let mut info = CallInfo {
                dtype: Some(dtype),
                len_elems: elements(len_bytes),
                root: Some(self.members.world_rank(peer)),
                step: caller.step,
                ..CallInfo::bare(collective, self.id, 0, caller.site)
            };
            // Who does not exist is refused below, and has no number.
            if let Some(sequence) = pair_sequences.get_mut(peer) {
                info.sequence = *sequence;
                *sequence += 1;
            }
            info
        };
        let (to, from) = (send.map(|(to, _)| to), receive.as_ref().map(|(from, _)| *from));
        let (out_bytes, in_bytes) =
            (send.map_or(0, |(_, out)| out.len()), receive.as_ref().map_or(0, |(_, r)| r.len()));
        let (info, receives) = match (to, from) {
            (Some(to), Some(from)) if to == from => {
                let swap = side(Collective::SendRecv, to, out_bytes);
                (CallInfo { tag: elements(in_bytes), ..swap }, None)
            }
            (Some(to), Some(from)) => {
                let receives = Box::new((from, side(Collective::Recv, from, in_bytes)));
                (side(Collective::Send, to, out_bytes), Some(receives))
            }
            (Some(to), None) => (side(Collective::Send, to, out_bytes), None),
            (None, Some(from)) => (side(Collective::Recv, from, in_bytes), None),
            (None, None) => return Ok(()),
        };
        call.info = info;
        call.renew(1.0);
        call.receives = receives;
        self.run(call, || {
            [out_bytes, in_bytes].into_iter().try_for_each(|len_bytes| check_whole(dtype, len_bytes))?;
            for peer in [to, from].into_iter().flatten() {
                self.check_rank("rank", peer)?;
            }
            match (send, receive) {
                (Some((to, out)), Some((from, room))) if to == self.rank && from == self.rank => {
                    if out.len() != room.len() {
                        let (out, room) = (elements(out.len()), elements(room.len()));
                        return refuse(format!("{out} elements to this rank itself, with room for {room}"));
                    }
                    room.copy_from_slice(out);
                    Ok(())
                }
                _ if [to, from].contains(&Some(self.rank)) => {
                    let rank = self.member.seat.rank;
                    refuse(format!("rank {rank} and itself: only send_recv to and from it does something"))
                }
                (send, receive) => {
                    let send = send.map(|(peer, payload)| Outgoing { peer, payload });
                    let mut receive = receive.map(|(peer, payload)| Incoming::new(peer, payload));
                    engine.send_recv(call, send, receive.as_mut())
                }
            }
        })
    }

    pub(crate) fn check_root(&self, root: usize) -> Result<()> {
        self.check_rank("root", root)
    }

    fn check_rank(&self, what: &str, rank: usize) -> Result<()> {
        if rank < self.size() {
            return Ok(());
        }
        let of = if self.size() == self.member.seat.peers.len() { "world" } else { "group" };
        refuse(format!("{what} {rank} is not a rank of a {of} of {}", self.size()))
    }
}

/// The collectives on elements: all checks, then the engine.
impl Core {
    pub(crate) fn barrier(&self, caller: Caller) -> Result<()> {
        self.call(Plan::bare(Collective::Barrier, caller), |engine, call| engine.barrier(call))
    }

    pub(crate) fn all_reduce(
        &self,
        caller: Caller,
        dtype: DType,
        buf: &mut [u8],
        op: ReduceOp,
        tag: u64,
    ) -> Result<()> {
        let plan = Plan { reduce: Some(op), tag, ..Plan::elements(Collective::AllReduce, dtype, buf.len(), caller) };
        self.call(plan, |engine, call| {
            check_whole(dtype, buf.len())?;
            check_op(op, dtype)?;
            engine.all_reduce(call, dtype, buf, op)
        })
    }

    pub(crate) fn all_reduce_weighted(
        &self,
        caller: Caller,
        dtype: DType,
        buf: &mut [u8],
        weight: f64,
        tag: u64,
    ) -> Result<()> {
        let plan = Plan { weight, tag, ..Plan::elements(Collective::AllReduceWeighted, dtype, buf.len(), caller) };
        self.call(plan, |engine, call| {
            check_whole(dtype, buf.len())?;
            check_op(ReduceOp::Mean, dtype)?;
            engine.all_reduce_weighted(call, dtype, buf)
        })
    }

    pub(crate) fn shared_buffers(&self, caller: Caller, lens_bytes: &[usize]) -> Result<Vec<SharedBuffer>> {
        // Lists of different lengths in bytes are different, even if they need as much memory.
        let tag = lens_bytes.iter().fold(lens_bytes.len() as u64, |hash, len| {
            (hash ^ *len as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(31)
        });
        let total = lens_bytes.iter().sum();
        let plan = Plan { tag, ..Plan::elements(Collective::SharedBuffers, DType::U8, total, caller) };
        self.call(plan, |engine, call| engine.shared_buffers(call, lens_bytes))
    }

    pub(crate) fn all_reduce_shared(
        &self,
        caller: Caller,
        dtype: DType,
        buffer: &mut SharedBuffer,
        op: ReduceOp,
        tag: u64,
    ) -> Result<SharedView> {
        let len = buffer.len_bytes();
        let plan = Plan { reduce: Some(op), tag, ..Plan::elements(Collective::AllReduce, dtype, len, caller) };
        self.call(plan, |engine, call| {
            check_whole(dtype, len)?;
            check_op(op, dtype)?;
            engine.all_reduce_shared(call, dtype, buffer, Some(op))
        })
    }

    pub(crate) fn all_reduce_weighted_shared(
        &self,
        caller: Caller,
        dtype: DType,
        buffer: &mut SharedBuffer,
        weight: f64,
        tag: u64,
    ) -> Result<SharedView> {
        let len = buffer.len_bytes();
        let plan = Plan { weight, tag, ..Plan::elements(Collective::AllReduceWeighted, dtype, len, caller) };
        self.call(plan, |engine, call| {
            check_whole(dtype, len)?;
            check_op(ReduceOp::Mean, dtype)?;
            engine.all_reduce_shared(call, dtype, buffer, None)
        })
    }

    /// Without an `op`: to the mean, in which this rank has the weight `weight`.
    pub(crate) fn all_reduce_on_device(
        &self,
        caller: Caller,
        elements: OnDevice<'_>,
        op: Option<ReduceOp>,
        weight: f64,
        tag: u64,
    ) -> Result<()> {
        let OnDevice { dtype, len_elems, .. } = elements;
        let collective = if op.is_some() { Collective::AllReduce } else { Collective::AllReduceWeighted };
        let plan = Plan { reduce: op, dtype: Some(dtype), len_elems, weight, tag, ..Plan::bare(collective, caller) };
        self.call(plan, |engine, call| {
            check_op(op.unwrap_or(ReduceOp::Mean), dtype)?;
            engine.all_reduce_on_device(call, elements, op)
        })
    }

    pub(crate) fn reduce(&self, caller: Caller, dtype: DType, buf: &mut [u8], op: ReduceOp, root: usize) -> Result<()> {
        let plan = Plan::elements(Collective::Reduce, dtype, buf.len(), caller);
        self.call(Plan { reduce: Some(op), root: Some(root), ..plan }, |engine, call| {
            check_whole(dtype, buf.len())?;
            check_op(op, dtype)?;
            self.check_root(root)?;
            engine.reduce(call, dtype, buf, op, root)
        })
    }

    pub(crate) fn reduce_scatter(
        &self,
        caller: Caller,
        dtype: DType,
        input: &[u8],
        output: &mut [u8],
        op: ReduceOp,
    ) -> Result<()> {
        let plan = Plan { reduce: Some(op), ..Plan::elements(Collective::ReduceScatter, dtype, output.len(), caller) };
        self.call(plan, |engine, call| {
            check_whole(dtype, output.len())?;
            check_op(op, dtype)?;
            check_rows("an input", dtype, input.len(), self.size(), output.len())?;
            engine.reduce_scatter(call, dtype, input, output, op)
        })
    }

    pub(crate) fn broadcast(&self, caller: Caller, dtype: DType, buf: &mut [u8], root: usize) -> Result<()> {
        let plan = Plan { root: Some(root), ..Plan::elements(Collective::Broadcast, dtype, buf.len(), caller) };
        self.call(plan, |engine, call| {
            check_whole(dtype, buf.len())?;
            self.check_root(root)?;
            engine.broadcast(call, buf, root)
        })
    }

    pub(crate) fn all_gather(&self, caller: Caller, dtype: DType, input: &[u8], rows: &mut [u8]) -> Result<()> {
        let plan = Plan::elements(Collective::AllGather, dtype, input.len(), caller);
        self.call(plan, |engine, call| {
            check_whole(dtype, input.len())?;
            engine.all_gather(call, input, &mut self.rows_mut(rows, input.len()))
        })
    }

    /// The root passes `rows`.
    pub(crate) fn gather(
        &self,
        caller: Caller,
        dtype: DType,
        input: &[u8],
        rows: Option<&mut [u8]>,
        root: usize,
    ) -> Result<()> {
        let plan = Plan { root: Some(root), ..Plan::elements(Collective::Gather, dtype, input.len(), caller) };
        self.call(plan, |engine, call| {
            check_whole(dtype, input.len())?;
            self.check_root(root)?;
            let mut rows = rows.map(|rows| self.rows_mut(rows, input.len()));
            engine.gather(call, input, rows.as_deref_mut(), root)
        })
    }

    /// [`gather`](Self::gather), with room made for it on the root.
    pub(crate) fn gather_elements<T: Element>(
        &self,
        caller: Caller,
        input: &[T],
        root: usize,
    ) -> Result<Option<Vec<T>>> {
        let bytes = T::bytes(input);
        if self.rank != root {
            return self.gather(caller, T::DTYPE, bytes, None, root).map(|()| None);
        }
        let mut rows = T::zeros(input.len() * self.size());
        T::edit(&mut rows, |rows| self.gather(caller, T::DTYPE, bytes, Some(rows), root))?;
        Ok(Some(rows))
    }

    pub(crate) fn scatter(
        &self,
        caller: Caller,
        dtype: DType,
        input: Option<&[u8]>,
        output: &mut [u8],
        root: usize,
    ) -> Result<()> {
        let plan = Plan { root: Some(root), ..Plan::elements(Collective::Scatter, dtype, output.len(), caller) };
        self.call(plan, |engine, call| {
            check_whole(dtype, output.len())?;
            self.check_root(root)?;
            if self.rank != root {
                return engine.scatter(call, None, output, root);
            }
            let Some(input) = input else {
                return refuse("the root passed None: it passes the rows of all ranks".to_string());
            };
            check_rows("an input", dtype, input.len(), self.size(), output.len())?;
            let rows: Vec<&[u8]> = (0..self.size()).map(|nth| &input[nth * output.len()..][..output.len()]).collect();
            engine.scatter(call, Some(&rows), output, root)
        })
    }

    pub(crate) fn all_to_all(&self, caller: Caller, dtype: DType, input: &[u8], output: &mut [u8]) -> Result<()> {
        let plan = Plan::elements(Collective::AllToAll, dtype, input.len(), caller);
        self.call(plan, |engine, call| {
            check_whole(dtype, input.len())?;
            let elements = input.len() / dtype.size_bytes();
            if !elements.is_multiple_of(self.size()) {
                return refuse(format!("an input of {elements} elements is not [world, n] = {} × n", self.size()));
            }
            if input.len() != output.len() {
                let room = output.len() / dtype.size_bytes();
                return refuse(format!("an input of {elements} elements and an output of {room}: both are [world, n]"));
            }
            engine.all_to_all(call, input, output)
        })
    }

    /// `rows` as one row of `len` bytes per rank. Rows of no bytes still are rows.
    fn rows_mut<'a>(&self, rows: &'a mut [u8], len: usize) -> Vec<&'a mut [u8]> {
        let mut rest = rows;
        let mut outputs = Vec::with_capacity(self.size());
        for _ in 0..self.size() {
            let (row, behind) = rest.split_at_mut(len);
            outputs.push(row);
            rest = behind;
        }
        outputs
    }
}

/// What was called is remembered. A group that goes while its rank panics will never do what the others wait for.
impl Drop for Core {
    fn drop(&mut self) {
        self.member.fail_if_panicking();
        self.member.seat.membership.history().close(&self.log);
    }
}
