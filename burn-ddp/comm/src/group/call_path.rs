//! The path of every call of a group: it waits for its turn, is recorded, and goes to the engine.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, TryLockError};
use std::thread;
use std::time::{Duration, Instant};

use crate::Result;
use crate::call::call_arguments::{Caller, Request, check_whole, refuse};
use crate::call::{Call, CallInfo, Collective, GroupId, Members};
use crate::clock::{Ticks, nanos};
use crate::engine::{Engine, Incoming, Outgoing};
use crate::history::Log;
use crate::poison_free_locks::lock;
use crate::tensor_type::TensorType;
use crate::timeline::Fact;
use crate::world_member::Member;

/// One rank's side of a group, shared by all threads that make calls on it.
pub(crate) struct CallPath {
    pub(crate) member: Arc<Member>,
    /// The number of the group in its world.
    pub(crate) id: u64,
    /// This rank in the group.
    pub(crate) rank: usize,
    pub(crate) members: Arc<Members>,
    /// Name of the engine.
    pub(crate) engine: &'static str,
    /// Log of the last calls; written by the thread whose turn it is.
    log: Arc<Log>,
    /// True if the timeline shows the group's calls.
    shown: AtomicBool,
    /// See [`ProcessGroup::explain_tags`](super::ProcessGroup::explain_tags).
    pub(super) purpose_of_tag: OnceLock<Box<PurposeOfTag>>,
    /// Time that the group's calls have taken so far, in ticks. Written by the thread whose turn it is.
    ticks_in_calls: AtomicU64,
    /// Locked for the whole of a call, so that the next call waits.
    turn: Mutex<Turn>,
}

struct Turn {
    engine: Box<dyn Engine>,
    /// The call under way, or the last one. Reused, since many of its fields are the same in all calls.
    call: Call,
    /// The number of the next call. Refused calls count too: if only some ranks refuse a call, the sequence numbers
    /// differ at the next call, and the ranks notice.
    sequence: u64,
    /// By group rank, the number of the next call with that rank alone. Empty until the first such call.
    pair_sequences: Vec<u64>,
}

/// Purpose of a group's calls by their tag; `None` if it is unknown.
type PurposeOfTag = dyn Fn(u64) -> Option<String> + Send + Sync;

/// Sending half of a call between two ranks: the peer's group rank, and the bytes.
pub(crate) type Outbound<'a> = (usize, &'a [u8]);
/// Receiving half of a call between two ranks: the peer's group rank, and room for the bytes.
pub(crate) type Inbound<'a> = (usize, &'a mut [u8]);

impl CallPath {
    /// The group that the call `call` has opened.
    pub(crate) fn new(
        member: Arc<Member>,
        rank: usize,
        call: Call,
        log: Arc<Log>,
        engine: Box<dyn Engine>,
    ) -> Arc<CallPath> {
        let (id, members, name) = (call.info.group, call.members.clone(), engine.name());
        let turn = Mutex::new(Turn { engine, call, sequence: 0, pair_sequences: Vec::new() });
        let (shown, ticks_in_calls) = (AtomicBool::new(true), AtomicU64::new(0));
        let path = Arc::new(CallPath {
            member,
            id,
            rank,
            members,
            engine: name,
            log,
            shown,
            purpose_of_tag: OnceLock::new(),
            ticks_in_calls,
            turn,
        });
        path.member.opened(&path);
        path
    }

    /// Hides the group's calls from the timeline.
    pub(crate) fn hide(&self) {
        self.shown.store(false, Ordering::Relaxed);
    }

    /// Purpose of the group's call with this tag, if known.
    pub(crate) fn purpose(&self, tag: u64) -> Option<String> {
        self.purpose_of_tag.get().and_then(|purpose_of| purpose_of(tag))
    }

    pub(crate) fn time_in_calls(&self) -> Duration {
        nanos(self.ticks_in_calls.load(Ordering::Relaxed))
    }

    pub(crate) fn size(&self) -> usize {
        self.members.count()
    }

    /// Waits until no other thread of this rank is in a call.
    #[inline]
    fn turn(&self) -> MutexGuard<'_, Turn> {
        match self.turn.try_lock() {
            Ok(turn) => turn,
            Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
            Err(TryLockError::WouldBlock) => self.log.await_caller(|| lock(&self.turn)),
        }
    }

    /// Runs one call when its turn has come.
    pub(crate) fn call<R>(
        &self,
        request: Request,
        body: impl FnOnce(&mut dyn Engine, &Call) -> Result<R>,
    ) -> Result<R> {
        let mut turn = self.turn();
        let Turn { engine, call, sequence, .. } = &mut *turn;
        // In place, field by field, which is cheaper than a new `Call`: every call passes here.
        let CallInfo {
            collective,
            reduce,
            dtype,
            len_elems,
            root,
            tag,
            digest,
            shape,
            group: _,
            sequence: number,
            site,
            step,
        } = &mut call.info;
        *collective = request.collective;
        *reduce = request.reduce;
        *dtype = request.dtype;
        *len_elems = request.len_elems as u64;
        *root = request.root.map(|root| self.members.world_rank(root));
        *tag = request.tag;
        *digest = request.digest;
        *shape = request.shape;
        *number = *sequence;
        *site = request.caller.shown();
        *step = request.caller.step;
        *sequence += 1;
        call.renew(request.weight);
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

    /// A transfer: sends to one rank, receives from one rank, or both.
    pub(crate) fn transfer(
        &self,
        caller: Caller,
        elements: impl Into<TensorType>,
        send: Option<Outbound<'_>>,
        receive: Option<Inbound<'_>>,
    ) -> Result<()> {
        let TensorType { dtype, shape } = elements.into();
        let mut turn = self.turn();
        let Turn { engine, call, pair_sequences, .. } = &mut *turn;
        pair_sequences.resize(self.size(), 0);
        let elements = |len_bytes: usize| (len_bytes / dtype.size_bytes()) as u64;
        let mut side = |collective, peer: usize, len_bytes: usize| {
            let mut info = CallInfo {
                dtype: Some(dtype),
                shape,
                len_elems: elements(len_bytes),
                root: Some(self.members.world_rank(peer)),
                step: caller.step,
                ..CallInfo::bare(collective, self.id, 0, caller.shown())
            };
            // A peer that does not exist is refused below, and has no number.
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
                        return refuse(format!("this rank sends {out} elements to itself, but has room for {room}"));
                    }
                    room.copy_from_slice(out);
                    Ok(())
                }
                _ if [to, from].contains(&Some(self.rank)) => {
                    let rank = self.member.seat.rank;
                    refuse(format!("rank {rank} can transfer to itself only by a send_recv to and from itself"))
                }
                (send, receive) => {
                    let send = send.map(|(peer, payload)| Outgoing { peer, payload });
                    let mut receive = receive.map(|(peer, payload)| Incoming::new(peer, payload));
                    engine.send_recv(call, send, receive.as_mut())
                }
            }
        })
    }

    /// Closes the engine's side towards the peers, since this rank has left the world: at once, or after the call that
    /// another thread is in. Does not block.
    pub(crate) fn leave(self: Arc<Self>) {
        if let Ok(mut turn) = self.turn.try_lock() {
            return turn.engine.leave();
        }
        let rank = self.member.seat.rank;
        let waiting = thread::Builder::new().name(format!("burn-ddp rank {rank} leaves"));
        if let Err(error) = waiting.spawn(move || self.turn().engine.leave()) {
            tracing::warn!(rank, %error, "cannot start a thread that closes a group: its peers may wait in vain");
        }
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

/// Closes the group's log, whose calls stay in the history. Ends the world if this thread is panicking: the peers would
/// wait for this group in vain.
impl Drop for CallPath {
    fn drop(&mut self) {
        self.member.fail_if_panicking();
        self.member.seat.membership.history().close(&self.log);
    }
}
