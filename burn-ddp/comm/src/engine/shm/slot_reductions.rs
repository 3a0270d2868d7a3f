//! Reductions of large messages: chunk by chunk through slots that stay in the caches.
//!
//! A chunk has a part per rank. Each rank puts the other ranks' parts of its chunk into its slot (*ready*), folds its
//! own part of all slots and leaves the result beside its slot (*done*), then takes the other results. It puts chunk `c
//! + 1` before it folds chunk `c`, so that a rank that is a little late keeps no other waiting.
//!
//! Slots are used again two chunks later. A rank's slot is overwritten by its `put(c + 2)`, which follows its
//! `take(c)`, which has waited until all ranks are done with chunk `c`. A result is overwritten by `fold(c + 2)`, which
//! waits for all ranks' `put(c + 2)`, which follow their `take(c)`. A call writes nothing before all ranks have
//! announced it, and so have finished the call before.
#![allow(unsafe_code)]

use std::ops::Range;

use super::chunks::{Chunks, within};
use super::engine::ShmEngine;
use crate::call::Call;
use crate::reduce::Source;
use crate::{DType, ReduceOp, Result};

/// Bits of a ticket that count chunks.
const CHUNK_BITS: u32 = 24;

/// The progress of a rank that has finished chunk `chunk` of `round`: it grows with both.
pub(super) fn ticket(round: u64, chunk: usize) -> u64 {
    round << CHUNK_BITS | (chunk as u64 + 1)
}

impl ShmEngine {
    pub(super) fn ticket(&self, chunk: usize) -> u64 {
        ticket(self.round, chunk)
    }

    /// Chunks of a buffer of `len` bytes: shorter for small buffers, so that putting and folding overlap.
    fn chunks(&self, len: usize, dtype: DType) -> Chunks {
        const FINEST: usize = 64 << 10;
        let most = self.board.layout().slot_bytes();
        Chunks::new(len, dtype.size_bytes(), (len / 4).clamp(FINEST.min(most), most))
    }

    /// Publishes that this rank's part of chunk `chunk` is in its slot.
    pub(super) fn ready(&self, chunk: usize) {
        self.board.mine().ready.publish(self.ticket(chunk));
        self.board.wake_sleepers();
    }

    /// Publishes that this rank is done with the others' parts of chunk `chunk`.
    pub(super) fn done(&self, chunk: usize) {
        self.board.mine().done.publish(self.ticket(chunk));
        self.board.wake_sleepers();
    }

    pub(super) fn await_ready(&self, call: &Call, peers: &[usize], chunk: usize) -> Result<()> {
        let ticket = self.ticket(chunk);
        self.board.wait(call, peers, &|peer| self.board.cell(peer).ready.has_reached(ticket))
    }

    pub(super) fn await_done(&self, call: &Call, peers: &[usize], chunk: usize) -> Result<()> {
        let ticket = self.ticket(chunk);
        self.board.wait(call, peers, &|peer| self.board.cell(peer).done.has_reached(ticket))
    }

    /// Copies `bytes` to `part` of this rank's slot.
    pub(super) fn put(&self, chunk: usize, part: Range<usize>, bytes: &[u8]) {
        let room = self.board.layout().slot(self.board.rank(), chunk, part);
        // SAFETY: no rank reads this part: all are done with the chunk that was here before (see the top), and do not
        // know yet that this one is ready.
        unsafe { self.board.segment().bytes_mut(room) }.copy_from_slice(bytes);
    }

    /// `part` of the slot of `rank`, which has published that it is ready.
    ///
    /// # Safety
    /// Until the slice is gone this rank does not publish that it is done with it.
    pub(super) unsafe fn slot(&self, rank: usize, chunk: usize, part: Range<usize>) -> &[u8] {
        let range = self.board.layout().slot(rank, chunk, part);
        // SAFETY: as the caller vouches; `rank` writes its slot again only when all are done with it (see the top).
        unsafe { self.board.segment().bytes(range) }
    }

    pub(super) fn reduce_chunks(
        &mut self,
        call: &Call,
        dtype: DType,
        buf: &mut [u8],
        op: Option<ReduceOp>,
    ) -> Result<()> {
        let chunks = self.chunks(buf.len(), dtype);
        self.announce(call, 0)?;
        self.check_weights(call, op)?;
        self.put_parts(chunks, 0, buf);
        for chunk in 0..chunks.count() {
            if chunk > 0 {
                self.take_parts(call, chunks, chunk - 1, buf)?;
            }
            if chunk + 1 < chunks.count() {
                self.put_parts(chunks, chunk + 1, buf);
            }
            self.fold_part(call, (dtype, op), chunks, chunk, buf)?;
        }
        self.take_parts(call, chunks, chunks.count() - 1, buf)
    }

    /// Reduces all ranks' `buf` into the root's; the other ranks' buffers stay as they are. A result is overwritten
    /// after the root has taken it: the root puts its next chunk but one after that.
    pub(super) fn reduce_chunks_to(
        &mut self,
        call: &Call,
        dtype: DType,
        buf: &mut [u8],
        op: ReduceOp,
        root: usize,
    ) -> Result<()> {
        let chunks = self.chunks(buf.len(), dtype);
        self.announce(call, 0)?;
        self.put_parts(chunks, 0, buf);
        for chunk in 0..chunks.count() {
            if chunk > 0 {
                self.take_if_root(call, chunks, chunk - 1, buf, root)?;
            }
            if chunk + 1 < chunks.count() {
                self.put_parts(chunks, chunk + 1, buf);
            }
            self.fold_aside(call, (dtype, op), chunks, chunk, buf)?;
        }
        self.take_if_root(call, chunks, chunks.count() - 1, buf, root)
    }

    fn take_if_root(&self, call: &Call, chunks: Chunks, chunk: usize, buf: &mut [u8], root: usize) -> Result<()> {
        if self.board.rank() != root {
            return self.await_done(call, self.board.peers(), chunk);
        }
        self.take_parts(call, chunks, chunk, buf)?;
        let part = chunks.part(chunk, self.board.size(), root);
        let own = self.result(root, chunk, part.len());
        buf[within(chunks.range(chunk).start, &part)].copy_from_slice(own);
        Ok(())
    }

    /// Reduces this rank's part into its result only.
    fn fold_aside(
        &self,
        call: &Call,
        (dtype, op): (DType, ReduceOp),
        chunks: Chunks,
        chunk: usize,
        buf: &[u8],
    ) -> Result<()> {
        self.await_ready(call, self.board.peers(), chunk)?;
        let me = self.board.rank();
        let part = chunks.part(chunk, self.board.size(), me);
        let room = self.board.layout().result(me, chunk, part.len());
        // SAFETY: all are ready, so the root has taken the result that was here before; no rank reads this one before
        // `done` below.
        let out = unsafe { self.board.segment().bytes_mut(room) };
        let source = |rank| match rank == me {
            true => Source::Bytes(&buf[within(chunks.range(chunk).start, &part)]),
            // SAFETY: ready; this rank publishes below that it is done.
            false => Source::Bytes(unsafe { self.slot(rank, chunk, part.clone()) }),
        };
        self.reduce(dtype, Some(op), source, out)?;
        self.done(chunk);
        Ok(())
    }

    /// Puts the other ranks' parts into this rank's slot.
    fn put_parts(&self, chunks: Chunks, chunk: usize, buf: &[u8]) {
        let start = chunks.range(chunk).start;
        for &peer in self.board.peers() {
            let part = chunks.part(chunk, self.board.size(), peer);
            self.put(chunk, part.clone(), &buf[within(start, &part)]);
        }
        self.ready(chunk);
    }

    /// Reduces this rank's part into `buf` and into its result in the segment.
    fn fold_part(
        &self,
        call: &Call,
        (dtype, op): (DType, Option<ReduceOp>),
        chunks: Chunks,
        chunk: usize,
        buf: &mut [u8],
    ) -> Result<()> {
        self.await_ready(call, self.board.peers(), chunk)?;
        let me = self.board.rank();
        let part = chunks.part(chunk, self.board.size(), me);
        let source = |rank| match rank == me {
            true => Source::Output,
            // SAFETY: ready; this rank publishes below that it is done.
            false => Source::Bytes(unsafe { self.slot(rank, chunk, part.clone()) }),
        };
        let own = &mut buf[within(chunks.range(chunk).start, &part)];
        let room = self.board.layout().result(me, chunk, part.len());
        // SAFETY: all are ready, so they have taken the result that was here before; no rank reads this one before
        // `done` below.
        let also = unsafe { self.board.segment().bytes_mut(room) };
        self.reduce_to(dtype, op, source, (own, Some(also)))?;
        self.done(chunk);
        Ok(())
    }

    /// Copies the other ranks' results of a chunk to `buf`.
    fn take_parts(&self, call: &Call, chunks: Chunks, chunk: usize, buf: &mut [u8]) -> Result<()> {
        self.await_done(call, self.board.peers(), chunk)?;
        let start = chunks.range(chunk).start;
        for &peer in self.board.peers() {
            let part = chunks.part(chunk, self.board.size(), peer);
            buf[within(start, &part)].copy_from_slice(self.result(peer, chunk, part.len()));
        }
        Ok(())
    }

    /// The `len` bytes that `rank` has made of chunk `chunk`, which it has published as done.
    fn result(&self, rank: usize, chunk: usize, len: usize) -> &[u8] {
        let range = self.board.layout().result(rank, chunk, len);
        // SAFETY: `rank` writes it again only after this rank has put the next chunk but one, which follows the copy of
        // the slice, or has announced its next call, which needs the engine mutably.
        unsafe { self.board.segment().bytes(range) }
    }
}
