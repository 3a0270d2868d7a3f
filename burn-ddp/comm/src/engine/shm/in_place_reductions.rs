//! Reductions of shared buffers where they are: rank `j` reduces slice `j` of all inputs into the result, which all
//! read.
//!
//! Each rank announces the buffer it reduces, and if it still holds a view of that buffer's last result. If no rank
//! does, the result is overwritten; when all are *done* it is complete and the inputs are free. If one does, each rank
//! leaves its slice in its own input instead (*done*), all copy the slices to memory of their own, and the inputs are
//! free when all have (*done* again). Ranks that pass different kinds of buffers reduce them as plain slices.
#![allow(unsafe_code)]

use std::sync::Arc;

use super::chunks::part;
use super::engine::ShmEngine;
use super::in_place_buffer::{ArenaBuffer, Regions};
use super::segment_handover::Handover;
use crate::call::Call;
use crate::engine::Unavailable;
use crate::reduce::Source;
use crate::{DType, ReduceOp, Result, SharedBuffer, SharedView};

/// The buffers that the ranks passed to a reduction.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Passed {
    /// The same buffer of the group, without a view of its last result.
    Free,
    /// The same buffer of the group, with a view of its last result on some rank.
    Viewed,
    /// Different buffers, or plain memory.
    Plain,
}

impl ShmEngine {
    pub(super) fn make_shared(&mut self, call: &Call, lens: &[usize]) -> Result<Vec<SharedBuffer>> {
        self.announce(call, 0)?;
        let (ranks, rank) = (self.board.size(), self.board.rank());
        let number = self.segments;
        self.segments += 1;
        let handover = Handover { call, membership: self.board.membership(), key: &self.key, rank, number };
        let made = match Regions::plan(lens, ranks) {
            Some((regions, len)) => handover.share(len)?.map(|segment| (regions, Arc::new(segment))),
            None => Err(Unavailable::TooLarge),
        };
        let (regions, segment) = match made {
            Ok(made) => made,
            Err(why) => {
                tracing::warn!(rank = call.rank, %why, "shared buffers take plain memory");
                return Ok(lens.iter().map(|len| SharedBuffer::plain(*len)).collect());
            }
        };
        let buffers = regions.into_iter().map(|regions| {
            self.buffers += 1;
            let (segment, token) = (segment.clone(), self.token.clone());
            SharedBuffer::arena(ArenaBuffer::new(segment, regions, rank, token, self.buffers))
        });
        Ok(buffers.collect())
    }

    pub(super) fn reduce_shared(
        &mut self,
        call: &Call,
        dtype: DType,
        buffer: &mut SharedBuffer,
        op: Option<ReduceOp>,
    ) -> Result<SharedView> {
        let known = buffer.as_arena().and_then(|arena| Some((arena.number(&self.token)?, arena.is_viewed())));
        let note = known.map_or(0, |(number, viewed)| number << 1 | u64::from(viewed));
        self.announce(call, note)?;
        self.check_weights(call, op)?;
        let outcome = match (self.passed(note), buffer.as_arena()) {
            (Passed::Free, Some(arena)) => self.reduce_in_place(call, dtype, arena, op),
            (Passed::Viewed, Some(arena)) => self.reduce_aside(call, dtype, arena, op),
            _ => return self.reduce_plainly(call, dtype, buffer, op),
        };
        if outcome.is_err() {
            // Peers may still be reading the input.
            *buffer = SharedBuffer::plain(buffer.len_bytes());
        }
        outcome
    }

    /// The buffers that all ranks announced; `mine` is this rank's note.
    fn passed(&self, mine: u64) -> Passed {
        let number = mine >> 1;
        let notes = || self.board.peers().iter().map(|peer| self.heard[*peer].note);
        if number == 0 || notes().any(|note| note >> 1 != number) {
            return Passed::Plain;
        }
        let viewed = mine & 1 == 1 || notes().any(|note| note & 1 == 1);
        if viewed { Passed::Viewed } else { Passed::Free }
    }

    /// As slices.
    fn reduce_plainly(
        &mut self,
        call: &Call,
        dtype: DType,
        buffer: &mut SharedBuffer,
        op: Option<ReduceOp>,
    ) -> Result<SharedView> {
        self.reduce_all(&call.next_stage(), dtype, buffer.bytes_mut(), op)?;
        Ok(buffer.view())
    }

    fn reduce_in_place(
        &self,
        call: &Call,
        dtype: DType,
        arena: &ArenaBuffer,
        op: Option<ReduceOp>,
    ) -> Result<SharedView> {
        let slice = part(arena.len(), dtype.size_bytes(), self.board.size(), self.board.rank());
        // SAFETY: all have announced; this rank is done below.
        let source = |rank| Source::Bytes(unsafe { arena.input(rank, &slice) });
        // SAFETY: no rank has a view of the result, and every rank writes a slice of its own.
        let out = unsafe { arena.result(&slice) };
        self.reduce_to(dtype, op, source, (out, None))?;
        self.done(0);
        self.await_done(call, self.board.peers(), 0)?;
        Ok(SharedView::arena(arena.view()))
    }

    fn reduce_aside(&self, call: &Call, dtype: DType, arena: &ArenaBuffer, op: Option<ReduceOp>) -> Result<SharedView> {
        let (me, size) = (self.board.rank(), self.board.size());
        let slice = |rank| part(arena.len(), dtype.size_bytes(), size, rank);
        let mut result = SharedBuffer::plain(arena.len());
        let own = slice(me);
        // SAFETY: all have announced; this rank is done below.
        let source = |rank| Source::Bytes(unsafe { arena.input(rank, &own) });
        self.reduce(dtype, op, source, &mut result.bytes_mut()[own.clone()])?;
        // SAFETY: no other rank reads this slice of this rank's input before it is done.
        unsafe { arena.own_input(&own) }.copy_from_slice(&result.bytes_mut()[own.clone()]);
        self.done(0);
        self.await_done(call, self.board.peers(), 0)?;
        for &peer in self.board.peers() {
            let slice = slice(peer);
            // SAFETY: the peer is done with its slice of its input, and waits until all have read it.
            result.bytes_mut()[slice.clone()].copy_from_slice(unsafe { arena.input(peer, &slice) });
        }
        self.done(1);
        self.await_done(call, self.board.peers(), 1)?;
        Ok(result.view())
    }
}
