//! Reductions of shared buffers where they are: rank `j` reduces slice `j` of all inputs into the result, which all
//! read.
//!
//! Each rank announces the buffer it reduces, and if it still holds a view of that buffer's last result. If no rank
//! holds one, the result is overwritten; when all are *done*, it is complete and the inputs are free. If a rank holds
//! one, each rank leaves its slice in its own input instead (*done*), all copy the slices to memory of their own, and
//! the inputs are free when all have (*done* again). Ranks that pass different kinds of buffers reduce them as plain
//! slices.
#![allow(unsafe_code)]

use std::ops::Range;
use std::sync::Arc;

use super::chunked_data_movement::{FoldRange, Made, Parts, RowParts, SliceParts};
use super::chunks::part;
use super::engine::ShmEngine;
use super::in_place_buffer::{ArenaBuffer, Regions};
use super::segment_handover::Handover;
use crate::call::Call;
use crate::engine::Unavailable;
use crate::reduce::Source;
use crate::{DType, ReduceOp, Result, SharedBuffer, SharedView};

/// The buffers that the ranks passed to a reduction or a gather.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Passed {
    /// The same buffer of the group, without a view of its last result.
    Free,
    /// The same buffer of the group, with a view of its last result on some rank.
    Viewed,
    /// Different buffers, or plain memory.
    Plain,
}

/// A shared buffer whose result no rank has a view of.
struct ResultParts<'a> {
    engine: &'a ShmEngine,
    arena: &'a ArenaBuffer,
}

/// A shared buffer whose last result some rank still views: results are written to the inputs, and copied from there.
struct AsideParts<'a> {
    engine: &'a ShmEngine,
    arena: &'a ArenaBuffer,
    /// For each part, each rank's ranges, to be copied from its input.
    spread: Vec<Vec<Vec<Range<usize>>>>,
    result: &'a mut [u8],
}

impl Parts for ResultParts<'_> {
    fn weights(&self) -> &[f64] {
        self.engine.weights()
    }

    fn fold(&mut self, work: &[Vec<Range<usize>>], fold: &mut FoldRange<'_>) -> Result<()> {
        self.engine.fold_inputs(self.arena, work, fold)
    }

    fn spread(&mut self, _: &[Vec<Range<usize>>], mine: &[Made<'_>]) -> Result<()> {
        for (range, bytes) in mine {
            // SAFETY: no rank has a view of the result, and every rank writes ranges of its own.
            unsafe { self.arena.result(range) }.copy_from_slice(bytes);
        }
        Ok(())
    }
}

impl Parts for AsideParts<'_> {
    fn weights(&self) -> &[f64] {
        self.engine.weights()
    }

    fn fold(&mut self, work: &[Vec<Range<usize>>], fold: &mut FoldRange<'_>) -> Result<()> {
        self.engine.fold_inputs(self.arena, work, fold)
    }

    fn spread(&mut self, work: &[Vec<Range<usize>>], mine: &[Made<'_>]) -> Result<()> {
        for (range, bytes) in mine {
            // SAFETY: no other rank reads this range of this rank's input before it is done.
            unsafe { self.arena.own_input(range) }.copy_from_slice(bytes);
            self.result[range.clone()].copy_from_slice(bytes);
        }
        self.spread.push(work.to_vec());
        Ok(())
    }
}

impl ShmEngine {
    /// A reduction of `buf` that `make` does part by part; all ranks get the whole result.
    pub(in crate::engine) fn reduce_by(
        &mut self,
        call: &Call,
        buf: &mut [u8],
        make: impl FnOnce(&mut dyn Parts) -> Result<()>,
    ) -> Result<()> {
        self.announce(call, 0)?;
        make(&mut SliceParts { engine: self, call, buf, chunk: 0 })
    }

    /// [`reduce_by`](Self::reduce_by), but each rank gets only its own results, in `output`.
    pub(in crate::engine) fn reduce_rows_by(
        &mut self,
        call: &Call,
        input: &[u8],
        output: &mut [u8],
        make: impl FnOnce(&mut dyn Parts) -> Result<()>,
    ) -> Result<()> {
        self.announce(call, 0)?;
        make(&mut RowParts { engine: self, call, input, output, chunk: 0 })
    }

    /// [`reduce_by`](Self::reduce_by) of shared buffers.
    pub(in crate::engine) fn reduce_shared_by(
        &mut self,
        call: &Call,
        buffer: &mut SharedBuffer,
        make: impl FnOnce(&mut dyn Parts) -> Result<()>,
    ) -> Result<SharedView> {
        let outcome = match (self.announce_buffer(call, buffer)?, buffer.as_arena()) {
            (Passed::Free, Some(arena)) => self.reduce_in_place_by(call, arena, make),
            (Passed::Viewed, Some(arena)) => self.reduce_aside_by(call, arena, make),
            _ => {
                make(&mut SliceParts { engine: self, call, buf: buffer.bytes_mut(), chunk: 0 })?;
                return Ok(buffer.view());
            }
        };
        replace_if_failed(buffer, outcome)
    }

    pub(super) fn make_shared(&mut self, call: &Call, lens: &[usize]) -> Result<Vec<SharedBuffer>> {
        self.announce(call, 0)?;
        let (ranks, rank) = (self.board.size(), self.board.rank());
        let number = self.segments;
        self.segments += 1;
        let handover = Handover { call, membership: self.board.membership(), key: &self.key, rank, number };
        let made = match Regions::plan(lens, ranks) {
            Some((regions, len)) => {
                let shared = handover.share(len, &Regions::parts(&regions, rank, ranks))?;
                shared.map(|segment| (regions, Arc::new(segment)))
            }
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
        let passed = self.announce_buffer(call, buffer)?;
        self.check_weights(call, op)?;
        let outcome = match (passed, buffer.as_arena()) {
            (Passed::Free, Some(arena)) => self.reduce_in_place(call, dtype, arena, op),
            (Passed::Viewed, Some(arena)) => self.reduce_aside(call, dtype, arena, op),
            _ => return self.reduce_plainly(call, dtype, buffer, op),
        };
        replace_if_failed(buffer, outcome)
    }

    /// Announces the call and the buffer, and waits for the announcements of the peers.
    pub(super) fn announce_buffer(&mut self, call: &Call, buffer: &mut SharedBuffer) -> Result<Passed> {
        let note = self.note(buffer);
        // Peers that have heard all ranks may read the input from now on.
        let announced = self.announce(call, note);
        replace_if_failed(buffer, announced)?;
        Ok(self.passed(note))
    }

    /// The note that announces `buffer`: its number in the group, or 0, and if this rank has a view of its last result.
    fn note(&self, buffer: &mut SharedBuffer) -> u64 {
        let known = buffer.as_arena().and_then(|arena| Some((arena.number(&self.token)?, arena.is_viewed())));
        known.map_or(0, |(number, viewed)| number << 1 | u64::from(viewed))
    }

    /// The kind of buffers that the ranks announced; `mine` is this rank's note.
    fn passed(&self, mine: u64) -> Passed {
        let number = mine >> 1;
        let notes = || self.board.peers().iter().map(|peer| self.heard[*peer].note);
        if number == 0 || notes().any(|note| note >> 1 != number) {
            return Passed::Plain;
        }
        let viewed = mine & 1 == 1 || notes().any(|note| note & 1 == 1);
        if viewed { Passed::Viewed } else { Passed::Free }
    }

    /// Reduces the buffers as plain slices.
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
        // SAFETY: all have announced; this rank publishes only below that it is done.
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
        // SAFETY: all have announced; this rank publishes only below that it is done.
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

    /// Hands `fold` the inputs of all ranks at this rank's part of `work`. All ranks have announced the buffer, and do
    /// not know yet that this rank is done with it.
    fn fold_inputs(&self, arena: &ArenaBuffer, work: &[Vec<Range<usize>>], fold: &mut FoldRange<'_>) -> Result<()> {
        for range in &work[self.board.rank()] {
            // SAFETY: all have announced; this rank publishes that it is done only after all parts.
            let sources = (0..self.board.size()).map(|rank| unsafe { arena.input(rank, range) });
            fold(range.clone(), &sources.collect::<Vec<_>>())?;
        }
        Ok(())
    }

    fn reduce_in_place_by(
        &self,
        call: &Call,
        arena: &ArenaBuffer,
        make: impl FnOnce(&mut dyn Parts) -> Result<()>,
    ) -> Result<SharedView> {
        make(&mut ResultParts { engine: self, arena })?;
        self.done(0);
        self.await_done(call, self.board.peers(), 0)?;
        Ok(SharedView::arena(arena.view()))
    }

    fn reduce_aside_by(
        &self,
        call: &Call,
        arena: &ArenaBuffer,
        make: impl FnOnce(&mut dyn Parts) -> Result<()>,
    ) -> Result<SharedView> {
        let mut result = SharedBuffer::plain(arena.len());
        let mut parts = AsideParts { engine: self, arena, spread: Vec::new(), result: result.bytes_mut() };
        make(&mut parts)?;
        let AsideParts { spread, result: out, .. } = parts;
        self.done(0);
        self.await_done(call, self.board.peers(), 0)?;
        for (work, &peer) in spread.iter().flat_map(|work| self.board.peers().iter().map(move |peer| (work, peer))) {
            for range in &work[peer] {
                // SAFETY: the peer is done with its ranges of its input, and waits until all have read them.
                out[range.clone()].copy_from_slice(unsafe { arena.input(peer, range) });
            }
        }
        self.done(1);
        self.await_done(call, self.board.peers(), 1)?;
        Ok(result.view())
    }
}

/// Replaces the buffer of a call that failed: peers may still be reading it, or writing its result.
pub(super) fn replace_if_failed<R>(buffer: &mut SharedBuffer, outcome: Result<R>) -> Result<R> {
    if outcome.is_err() {
        *buffer = SharedBuffer::plain(buffer.len_bytes());
    }
    outcome
}
