//! Large messages that are moved as they are, reduce-scatters, and reductions in [`Parts`]: chunk by chunk, through the
//! slots of [`slot_reductions`](super::slot_reductions).
//!
//! Each rank puts its chunk into its slot (*ready*); when it has taken its data from the others' slots it is *done*. A
//! slot is used again when all its readers are done with its chunk.
#![allow(unsafe_code)]

use std::ops::Range;

use super::chunks::{Chunks, within};
use super::engine::ShmEngine;
use super::layout::SLOTS;
use crate::call::Call;
use crate::reduce::Source;
use crate::{DType, ReduceOp, Result};

/// A function that gets a range of the buffer, and the bytes of each rank there, by group rank.
pub(in crate::engine) type FoldRange<'a> = dyn FnMut(Range<usize>, &[&[u8]]) -> Result<()> + 'a;

/// A range of the buffer, and the result that a rank has made for it.
pub(in crate::engine) type Made<'a> = (Range<usize>, &'a [u8]);

/// The buffers of a reduction that the ranks of a machine do one part after the other. All ranks pass the same parts in
/// the same order; `work` has the ranges of each rank in a part, in bytes of whole elements.
pub(in crate::engine) trait Parts {
    /// Weights of the machine's ranks in this call.
    fn weights(&self) -> &[f64];

    /// Hands `fold` the bytes of all ranks' inputs at this rank's part.
    fn fold(&mut self, work: &[Vec<Range<usize>>], fold: &mut FoldRange<'_>) -> Result<()>;

    /// Hands the results of each rank to the ranks that want them; `mine` are this rank's.
    fn spread(&mut self, work: &[Vec<Range<usize>>], mine: &[Made<'_>]) -> Result<()>;
}

/// The ranks that read this rank's slots, and those whose slots it reads.
struct Route<'a> {
    readers: &'a [usize],
    sources: &'a [usize],
}

impl ShmEngine {
    /// Puts and takes `chunks`. All earlier chunks of the round have been taken before.
    fn stream(
        &self,
        call: &Call,
        route: &Route<'_>,
        chunks: Range<usize>,
        put: impl Fn(usize),
        mut take: impl FnMut(usize) -> Result<()>,
    ) -> Result<()> {
        for step in chunks.start..=chunks.end {
            if step < chunks.end && !route.readers.is_empty() {
                if step >= SLOTS {
                    self.await_done(call, route.readers, step - SLOTS)?;
                }
                put(step);
                self.ready(step);
            }
            if step > chunks.start && !route.sources.is_empty() {
                self.await_ready(call, route.sources, step - 1)?;
                take(step - 1)?;
                self.done(step - 1);
            }
        }
        Ok(())
    }

    /// Copies `part` of the slot of `peer` to `out`.
    fn take(&self, peer: usize, chunk: usize, part: Range<usize>, out: &mut [u8]) {
        // SAFETY: chunks are taken between *ready* and *done*, see `stream`.
        out.copy_from_slice(unsafe { self.slot(peer, chunk, part) });
    }

    /// Chunks in which `len` bytes are passed on.
    fn whole(&self, len: usize) -> Chunks {
        Chunks::new(len, 1, self.board.layout().slot_bytes())
    }

    /// Chunks in which rows of `len` bytes are passed on, one per rank at a time; and the range of a rank's row in a
    /// slot.
    fn rows(&self, len: usize, size: usize) -> (Chunks, impl Fn(usize, usize) -> Range<usize> + use<>) {
        let room = self.board.layout().slot_bytes() / self.board.size() / size * size;
        (Chunks::new(len, size, room), move |rank: usize, len: usize| rank * room..rank * room + len)
    }

    pub(super) fn broadcast_chunks(&mut self, call: &Call, buf: &mut [u8], root: usize) -> Result<()> {
        self.announce(call, 0)?;
        let chunks = self.whole(buf.len());
        if self.board.rank() == root {
            let route = Route { readers: self.board.peers(), sources: &[] };
            let put = |chunk| self.put(chunk, 0..chunks.range(chunk).len(), &buf[chunks.range(chunk)]);
            return self.stream(call, &route, 0..chunks.count(), put, |_| Ok(()));
        }
        let route = Route { readers: &[], sources: &[root] };
        let take = |chunk| {
            let range: Range<usize> = chunks.range(chunk);
            self.take(root, chunk, 0..range.len(), &mut buf[range]);
            Ok(())
        };
        self.stream(call, &route, 0..chunks.count(), |_| (), take)
    }

    /// Gathers all ranks' `input` on the root, which passes `outputs`.
    pub(super) fn gather_chunks(
        &mut self,
        call: &Call,
        input: &[u8],
        outputs: Option<&mut [&mut [u8]]>,
        root: usize,
    ) -> Result<()> {
        self.announce(call, 0)?;
        let chunks = self.whole(input.len());
        let Some(outputs) = outputs else {
            let route = Route { readers: &[root], sources: &[] };
            let put = |chunk| self.put(chunk, 0..chunks.range(chunk).len(), &input[chunks.range(chunk)]);
            return self.stream(call, &route, 0..chunks.count(), put, |_| Ok(()));
        };
        let route = Route { readers: &[], sources: self.board.peers() };
        let take = |chunk| {
            let range: Range<usize> = chunks.range(chunk);
            for &peer in self.board.peers() {
                self.take(peer, chunk, 0..range.len(), &mut outputs[peer][range.clone()]);
            }
            Ok(())
        };
        self.stream(call, &route, 0..chunks.count(), |_| (), take)
    }

    /// Scatters the rows of `inputs`, which the root passes, to the other ranks.
    pub(super) fn scatter_chunks(
        &mut self,
        call: &Call,
        inputs: Option<&[&[u8]]>,
        output: &mut [u8],
        root: usize,
    ) -> Result<()> {
        self.announce(call, 0)?;
        let (chunks, place) = self.rows(output.len(), 1);
        if let Some(inputs) = inputs {
            let route = Route { readers: self.board.peers(), sources: &[] };
            let put = |chunk| {
                let range: Range<usize> = chunks.range(chunk);
                for &peer in self.board.peers() {
                    self.put(chunk, place(peer, range.len()), &inputs[peer][range.clone()]);
                }
            };
            return self.stream(call, &route, 0..chunks.count(), put, |_| Ok(()));
        }
        let route = Route { readers: &[], sources: &[root] };
        let take = |chunk| {
            let range = chunks.range(chunk);
            self.take(root, chunk, place(self.board.rank(), range.len()), &mut output[range]);
            Ok(())
        };
        self.stream(call, &route, 0..chunks.count(), |_| (), take)
    }

    /// Sends row `j` of `input` to rank `j`; rows of `len` bytes.
    pub(super) fn all_to_all_chunks(&mut self, call: &Call, input: &[u8], output: &mut [u8], len: usize) -> Result<()> {
        self.announce(call, 0)?;
        let (chunks, place) = self.rows(len, 1);
        let route = Route { readers: self.board.peers(), sources: self.board.peers() };
        let put = |chunk| {
            let range = chunks.range(chunk);
            for &peer in self.board.peers() {
                self.put(chunk, place(peer, range.len()), &input[within(peer * len, &range)]);
            }
        };
        let take = |chunk| {
            let range = chunks.range(chunk);
            for &peer in self.board.peers() {
                let place = place(self.board.rank(), range.len());
                self.take(peer, chunk, place, &mut output[within(peer * len, &range)]);
            }
            Ok(())
        };
        self.stream(call, &route, 0..chunks.count(), put, take)
    }

    /// Gathers all ranks' `input`, of at most `longest` bytes, on all ranks.
    pub(super) fn all_gather_chunks(
        &mut self,
        call: &Call,
        input: &[u8],
        longest: usize,
        outputs: &mut [&mut [u8]],
    ) -> Result<()> {
        self.announce(call, 0)?;
        let route = Route { readers: self.board.peers(), sources: self.board.peers() };
        let mine = self.whole(input.len());
        let put = |chunk| self.put(chunk, 0..mine.range(chunk).len(), &input[mine.range(chunk)]);
        let take = |chunk| {
            for &peer in self.board.peers() {
                let range = self.whole(outputs[peer].len()).range(chunk);
                self.take(peer, chunk, 0..range.len(), &mut outputs[peer][range]);
            }
            Ok(())
        };
        self.stream(call, &route, 0..self.whole(longest).count(), put, take)
    }

    pub(super) fn reduce_scatter_chunks(
        &mut self,
        call: &Call,
        dtype: DType,
        input: &[u8],
        output: &mut [u8],
        op: ReduceOp,
    ) -> Result<()> {
        self.announce(call, 0)?;
        let (me, len) = (self.board.rank(), output.len());
        if self.board.peers().is_empty() {
            return self.reduce(dtype, Some(op), |_| Source::Bytes(input), output);
        }
        let (chunks, place) = self.rows(len, dtype.size_bytes());
        let route = Route { readers: self.board.peers(), sources: self.board.peers() };
        let put = |chunk| {
            let range = chunks.range(chunk);
            for &peer in self.board.peers() {
                self.put(chunk, place(peer, range.len()), &input[within(peer * len, &range)]);
            }
        };
        let fold = |chunk| {
            let range = chunks.range(chunk);
            let source = |rank| match rank == me {
                true => Source::Bytes(&input[within(me * len, &range)]),
                // SAFETY: between ready and done, see `stream`.
                false => Source::Bytes(unsafe { self.slot(rank, chunk, place(me, range.len())) }),
            };
            self.reduce(dtype, Some(op), source, &mut output[range.clone()])
        };
        self.stream(call, &route, 0..chunks.count(), put, fold)
    }
}

/// [`Parts`] of buffers in the ranks' own memory; every rank gets all results.
pub(super) struct SliceParts<'a> {
    pub(super) engine: &'a ShmEngine,
    pub(super) call: &'a Call,
    pub(super) buf: &'a mut [u8],
    /// Number of the next chunk of slots.
    pub(super) chunk: usize,
}

/// Like [`SliceParts`], but each rank gets only its own results, one after the other in `output`.
pub(super) struct RowParts<'a> {
    pub(super) engine: &'a ShmEngine,
    pub(super) call: &'a Call,
    pub(super) input: &'a [u8],
    pub(super) output: &'a mut [u8],
    /// Number of the next chunk of slots.
    pub(super) chunk: usize,
}

impl Parts for SliceParts<'_> {
    fn weights(&self) -> &[f64] {
        self.engine.weights()
    }

    fn fold(&mut self, work: &[Vec<Range<usize>>], fold: &mut FoldRange<'_>) -> Result<()> {
        self.chunk += self.engine.fold_ranges(self.call, self.chunk, work, self.buf, fold)?;
        Ok(())
    }

    fn spread(&mut self, work: &[Vec<Range<usize>>], mine: &[Made<'_>]) -> Result<()> {
        self.chunk += self.engine.spread_ranges(self.call, self.chunk, work, mine, self.buf)?;
        Ok(())
    }
}

impl Parts for RowParts<'_> {
    fn weights(&self) -> &[f64] {
        self.engine.weights()
    }

    fn fold(&mut self, work: &[Vec<Range<usize>>], fold: &mut FoldRange<'_>) -> Result<()> {
        self.chunk += self.engine.fold_ranges(self.call, self.chunk, work, self.input, fold)?;
        Ok(())
    }

    fn spread(&mut self, _: &[Vec<Range<usize>>], mine: &[Made<'_>]) -> Result<()> {
        for (_, bytes) in mine {
            let (room, behind) = std::mem::take(&mut self.output).split_at_mut(bytes.len());
            room.copy_from_slice(bytes);
            self.output = behind;
        }
        Ok(())
    }
}

impl ShmEngine {
    /// Hands `fold` the bytes of all ranks' `input` at this rank's ranges: `work` has the ranges of each rank, of whole
    /// elements. All ranks have announced the call. Uses chunks from `first` on; returns how many.
    fn fold_ranges(
        &self,
        call: &Call,
        first: usize,
        work: &[Vec<Range<usize>>],
        input: &[u8],
        fold: &mut FoldRange<'_>,
    ) -> Result<usize> {
        const LARGEST_ELEMENT: usize = 8;
        let (me, size) = (self.board.rank(), self.board.size());
        if self.board.peers().is_empty() {
            work[me].iter().try_for_each(|range| fold(range.clone(), &[&input[range.clone()]]))?;
            return Ok(0);
        }
        let room = self.board.layout().slot_bytes() / size / LARGEST_ELEMENT * LARGEST_ELEMENT;
        let route = Route { readers: self.board.peers(), sources: self.board.peers() };
        let put = |chunk| {
            for &peer in self.board.peers() {
                for (at, range) in pieces(&work[peer], chunk - first, room) {
                    let at = peer * room + at;
                    self.put(chunk, at..at + range.len(), &input[range]);
                }
            }
        };
        let take = |chunk| {
            for (at, range) in pieces(&work[me], chunk - first, room) {
                let at = me * room + at;
                let source = |rank| match rank == me {
                    true => &input[range.clone()],
                    // SAFETY: between ready and done, see `stream`.
                    false => unsafe { self.slot(rank, chunk, at..at + range.len()) },
                };
                let sources: Vec<&[u8]> = (0..size).map(source).collect();
                fold(range.clone(), &sources)?;
            }
            Ok(())
        };
        let count = chunks_of(work, room);
        self.stream(call, &route, first..first + count, put, take)?;
        Ok(count)
    }

    /// Fills `out` with the results of each rank: `work` has the ranges of each rank, `mine` the results of this rank
    /// in the order of its ranges. Uses chunks from `first` on; returns how many.
    fn spread_ranges(
        &self,
        call: &Call,
        first: usize,
        work: &[Vec<Range<usize>>],
        mine: &[Made<'_>],
        out: &mut [u8],
    ) -> Result<usize> {
        let room = self.board.layout().slot_bytes();
        mine.iter().for_each(|(range, bytes)| out[range.clone()].copy_from_slice(bytes));
        if self.board.peers().is_empty() {
            return Ok(0);
        }
        let route = Route { readers: self.board.peers(), sources: self.board.peers() };
        let put = |chunk| {
            for (at, nth, part) in cuts(mine.iter().map(|(_, bytes)| bytes.len()), chunk - first, room) {
                self.put(chunk, at..at + part.len(), &mine[nth].1[part]);
            }
        };
        let take = |chunk| {
            for &peer in self.board.peers() {
                for (at, range) in pieces(&work[peer], chunk - first, room) {
                    self.take(peer, chunk, at..at + range.len(), &mut out[range]);
                }
            }
            Ok(())
        };
        let count = chunks_of(work, room);
        self.stream(call, &route, first..first + count, put, take)?;
        Ok(count)
    }
}

/// Rows of `lens` bytes, one after the other, cut into chunks of `room` bytes; the pieces in chunk `nth`: where in the
/// chunk each begins, the number of its row, and its range in the row.
fn cuts(
    lens: impl Iterator<Item = usize>,
    nth: usize,
    room: usize,
) -> impl Iterator<Item = (usize, usize, Range<usize>)> {
    let (start, end) = (nth * room, (nth + 1) * room);
    let mut before = 0;
    lens.enumerate().filter_map(move |(which, len)| {
        let from = start.saturating_sub(before).min(len);
        let to = end.saturating_sub(before).min(len);
        let at = (before + from).saturating_sub(start);
        before += len;
        (from < to).then_some((at, which, from..to))
    })
}

/// [`cuts`] of the rows that `ranges` are in a buffer: where in the chunk each begins, and its range in the buffer.
fn pieces(ranges: &[Range<usize>], nth: usize, room: usize) -> impl Iterator<Item = (usize, Range<usize>)> {
    let place = |(at, which, part): (usize, usize, Range<usize>)| {
        let start = ranges[which].start;
        (at, start + part.start..start + part.end)
    };
    cuts(ranges.iter().map(Range::len), nth, room).map(place)
}

/// Number of chunks of `room` bytes in the longest row of `work`.
fn chunks_of(work: &[Vec<Range<usize>>], room: usize) -> usize {
    let len = |ranges: &Vec<Range<usize>>| ranges.iter().map(Range::len).sum::<usize>();
    work.iter().map(len).max().unwrap_or(0).div_ceil(room)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chunks_of_ranges_are_the_ranges() {
        let ranges = [3..8, 20..20, 30..34, 40..50];
        let row: Vec<usize> = ranges.iter().cloned().flatten().collect();
        for room in 1..21 {
            let mut found = Vec::new();
            for chunk in 0..chunks_of(&[ranges.to_vec()], room) {
                for (at, range) in pieces(&ranges, chunk, room) {
                    assert_eq!(chunk * room + at, found.len());
                    assert!(at + range.len() <= room);
                    found.extend(range);
                }
            }
            assert_eq!(found, row);
        }
    }
}
