//! Offsets of all parts of a group's segment.
//!
//! ```text
//! [cell; n]              each rank's words for all others: lines, progress, doorbell, mailbox
//! [[pair; n]; n]         rank i's words for rank j alone: send and receive
//! [[eager; 2]; n]        small payloads that do not fit in a line, by parity of the round
//! [[slot; SLOTS]; n]     chunks of large messages
//! [[result; SLOTS]; n]   each rank's results for its part of a chunk
//! [[parcel; SLOTS]; n]   chunks of a message to one rank
//! ```

use std::ops::Range;

use super::rank_cell::{Cell, Pair};

/// Chunks that a rank has under way at a time.
pub(super) const SLOTS: usize = 2;

/// Most bytes of all ranks' payloads together that go through the eager buffers, where each rank reads all of them.
const EAGER_TOTAL_BYTES: usize = 64 << 10;
/// Bytes of a slot: a chunk, what other ranks add to it, and its result stay in a core's cache.
const SLOT_BYTES: usize = 256 << 10;
/// Bytes of a chunk from one rank to another.
const PARCEL_BYTES: usize = 64 << 10;
/// Areas begin at multiples of this, so that no page belongs to two areas.
const ALIGN: usize = 4096;

/// Offsets in a segment for `n` ranks.
#[derive(Clone, Copy, Debug)]
pub(super) struct Layout {
    n: usize,
    pairs: usize,
    eager: usize,
    eager_bytes: usize,
    slots: usize,
    results: usize,
    result_bytes: usize,
    parcels: usize,
    len: usize,
}

impl Layout {
    pub(super) fn new(n: usize) -> Layout {
        let mut end = 0;
        let mut area = |count: usize, bytes: usize| {
            let start = end;
            end = (start + count * bytes).next_multiple_of(ALIGN);
            start
        };
        area(n, size_of::<Cell>());
        let eager_bytes = (EAGER_TOTAL_BYTES / n).max(64).next_multiple_of(64);
        let pairs = area(n * n, size_of::<Pair>());
        let eager = area(n * 2, eager_bytes);
        let slots = area(n * SLOTS, SLOT_BYTES);
        // Parts of a chunk differ by an element, which is shorter than 64 bytes.
        let result_bytes = (SLOT_BYTES / n + 64).next_multiple_of(64);
        let results = area(n * SLOTS, result_bytes);
        let parcels = area(n * SLOTS, PARCEL_BYTES);
        Layout { n, pairs, eager, eager_bytes, slots, results, result_bytes, parcels, len: end }
    }

    /// Bytes of the segment.
    pub(super) fn len(&self) -> usize {
        self.len
    }

    /// Ranges that `rank` makes present: mostly those that it writes later. The ranges of all ranks cover the segment.
    pub(super) fn parts(&self, rank: usize) -> Vec<Range<usize>> {
        let areas = [self.eager, self.slots, self.results, self.parcels, self.len];
        // The cells and pairs of all ranks are in front, and small.
        let words = (rank == 0).then_some(0..self.eager);
        words.into_iter().chain(areas.windows(2).map(|ends| share(ends[0]..ends[1], rank, self.n))).collect()
    }

    pub(super) fn cell(&self, rank: usize) -> usize {
        debug_assert!(rank < self.n);
        rank * size_of::<Cell>()
    }

    /// Offset of the words of `from` for `to`.
    pub(super) fn pair(&self, from: usize, to: usize) -> usize {
        self.pairs + (from * self.n + to) * size_of::<Pair>()
    }

    /// Bytes of one eager buffer.
    pub(super) fn eager_bytes(&self) -> usize {
        self.eager_bytes
    }

    /// The first `len` bytes of the eager buffer of `rank` for `round`.
    pub(super) fn eager(&self, rank: usize, round: u64, len: usize) -> Range<usize> {
        debug_assert!(len <= self.eager_bytes);
        let start = self.eager + (rank * 2 + (round % 2) as usize) * self.eager_bytes;
        start..start + len
    }

    pub(super) fn slot_bytes(&self) -> usize {
        SLOT_BYTES
    }

    /// `part` of the slot of `rank` for its chunk number `chunk`.
    pub(super) fn slot(&self, rank: usize, chunk: usize, part: Range<usize>) -> Range<usize> {
        debug_assert!(part.end <= SLOT_BYTES);
        let start = self.slots + (rank * SLOTS + chunk % SLOTS) * SLOT_BYTES;
        start + part.start..start + part.end
    }

    /// The first `len` bytes of the result of `rank` for its chunk number `chunk`.
    pub(super) fn result(&self, rank: usize, chunk: usize, len: usize) -> Range<usize> {
        debug_assert!(len <= self.result_bytes);
        let start = self.results + (rank * SLOTS + chunk % SLOTS) * self.result_bytes;
        start..start + len
    }

    pub(super) fn parcel_bytes(&self) -> usize {
        PARCEL_BYTES
    }

    /// The first `len` bytes of the parcel number `chunk` that `rank` sends.
    pub(super) fn parcel(&self, rank: usize, chunk: usize, len: usize) -> Range<usize> {
        debug_assert!(len <= PARCEL_BYTES);
        let start = self.parcels + (rank * SLOTS + chunk % SLOTS) * PARCEL_BYTES;
        start..start + len
    }
}

/// The part of `rank` in an area that `n` ranks share equally.
pub(super) fn share(area: Range<usize>, rank: usize, n: usize) -> Range<usize> {
    let at = |rank: usize| area.start + (area.len() as u128 * rank as u128 / n as u128) as usize;
    at(rank)..at(rank + 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn areas_do_not_overlap() {
        for n in [1, 2, 3, 7, 32] {
            let layout = Layout::new(n);
            let mut ranges: Vec<Range<usize>> = Vec::new();
            for rank in 0..n {
                ranges.push(layout.cell(rank)..layout.cell(rank) + size_of::<Cell>());
                ranges.extend((0..n).map(|to| layout.pair(rank, to)..layout.pair(rank, to) + size_of::<Pair>()));
                ranges.extend((0..2).map(|round| layout.eager(rank, round, layout.eager_bytes())));
                ranges.extend((0..SLOTS).map(|chunk| layout.slot(rank, chunk, 0..SLOT_BYTES)));
                ranges.extend((0..SLOTS).map(|chunk| layout.result(rank, chunk, SLOT_BYTES / n + 64)));
                ranges.extend((0..SLOTS).map(|chunk| layout.parcel(rank, chunk, PARCEL_BYTES)));
            }
            ranges.sort_by_key(|range| range.start);
            assert!(ranges.windows(2).all(|pair| pair[0].end <= pair[1].start));
            assert!(ranges.last().is_some_and(|last| last.end <= layout.len()));
        }
    }

    #[test]
    fn parts_cover_the_segment() {
        for n in [1, 2, 3, 7, 32] {
            let layout = Layout::new(n);
            let mut parts: Vec<Range<usize>> = (0..n).flat_map(|rank| layout.parts(rank)).collect();
            parts.sort_by_key(|part| part.start);
            assert!(parts.windows(2).all(|pair| pair[0].end == pair[1].start), "{parts:?}");
            assert_eq!((parts[0].start, parts[parts.len() - 1].end), (0, layout.len()));
            // A rank's slots are its own but for the edge of a page.
            for rank in 0..n {
                let slot = layout.slot(rank, 0, 0..SLOT_BYTES);
                let own = layout.parts(rank).into_iter().find(|part| part.contains(&(slot.start + ALIGN))).unwrap();
                assert!(own.start <= slot.start + ALIGN && own.end + ALIGN >= slot.end, "{own:?} {slot:?}");
            }
        }
    }
}
