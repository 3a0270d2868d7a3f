//! Buffers that a group reduces where they are: per buffer an input of each rank, and one result for all.
#![allow(unsafe_code)]

use std::ops::Range;
use std::sync::Arc;

use super::layout::share;
use super::segment::Segment;

/// Regions begin at multiples of this.
const ALIGN: usize = 4096;

/// Places of one buffer's regions in its segment.
#[derive(Clone, Copy, Debug)]
pub(super) struct Regions {
    start: usize,
    len: usize,
    stride: usize,
}

impl Regions {
    /// The regions of buffers of `lens` bytes between `ranks` ranks, and the bytes of the segment; `None` if no segment
    /// can be as large.
    pub(super) fn plan(lens: &[usize], ranks: usize) -> Option<(Vec<Regions>, usize)> {
        let mut end = 0_usize;
        let mut all = Vec::with_capacity(lens.len());
        for &len in lens {
            let stride = len.checked_next_multiple_of(ALIGN)?;
            all.push(Regions { start: end, len, stride });
            end = end.checked_add(stride.checked_mul(ranks + 1)?)?;
        }
        // An empty segment cannot be mapped.
        Some((all, end.max(ALIGN)))
    }

    /// Ranges that `rank` of `ranks` makes present in buffers of these regions: its inputs, and its shares of the
    /// results. The ranges of all ranks cover the segment.
    pub(super) fn parts(all: &[Regions], rank: usize, ranks: usize) -> Vec<Range<usize>> {
        // A segment without buffers has a page all the same.
        let first = (rank == 0).then_some(0..ALIGN);
        let of_buffer = |regions: &Regions| {
            let (result, input) = (regions.start..regions.start + regions.stride, regions.input(rank).start);
            [share(result, rank, ranks), input..input + regions.stride]
        };
        first.into_iter().chain(all.iter().flat_map(of_buffer)).collect()
    }

    pub(super) fn input(&self, rank: usize) -> Range<usize> {
        // The result is in front.
        let start = self.start + (rank + 1) * self.stride;
        start..start + self.len
    }

    pub(super) fn result(&self) -> Range<usize> {
        self.start..self.start + self.len
    }
}

/// One rank's handle to a buffer.
pub(crate) struct ArenaBuffer {
    segment: Arc<Segment>,
    regions: Regions,
    rank: usize,
    /// Identity of the group that made it.
    token: Arc<()>,
    /// Number of the buffer in its group; the same on all ranks.
    number: u64,
    /// Referenced once here and once by each view of the result that is alive on this rank.
    views: Arc<()>,
}

/// A rank's view of the result. No rank changes the result while the view is alive.
#[derive(Clone)]
pub(crate) struct ArenaView {
    segment: Arc<Segment>,
    range: Range<usize>,
    _alive: Arc<()>,
}

impl ArenaBuffer {
    pub(super) fn new(
        segment: Arc<Segment>,
        regions: Regions,
        rank: usize,
        token: Arc<()>,
        number: u64,
    ) -> ArenaBuffer {
        ArenaBuffer { segment, regions, rank, token, number, views: Arc::new(()) }
    }

    pub(crate) fn len(&self) -> usize {
        self.regions.len
    }

    /// Makes the buffer `len` bytes long. Returns false if its regions are smaller.
    pub(crate) fn set_len(&mut self, len: usize) -> bool {
        let fits = len <= self.regions.stride;
        if fits {
            self.regions.len = len;
        }
        fits
    }

    /// This rank's input.
    pub(crate) fn bytes(&self) -> &[u8] {
        // SAFETY: only this rank writes its input, through a mutable borrow of this value.
        unsafe { self.segment.bytes(self.regions.input(self.rank)) }
    }

    /// This rank's input, to be written.
    pub(crate) fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: other ranks read this input only within a reduction, from its announcement by this rank until this
        // rank returns from it, and the reduction borrows this value. If a reduction fails, this value is not used
        // again: other ranks may still be reading.
        unsafe { self.segment.bytes_mut(self.regions.input(self.rank)) }
    }

    /// Number of the buffer, if it is one of the group with `token`.
    pub(super) fn number(&self, token: &Arc<()>) -> Option<u64> {
        Arc::ptr_eq(&self.token, token).then_some(self.number)
    }

    /// True if a view of the last result is alive. If not, this rank no longer reads the result.
    pub(super) fn is_viewed(&mut self) -> bool {
        Arc::get_mut(&mut self.views).is_none()
    }

    /// A view of the result, which is complete.
    pub(super) fn view(&self) -> ArenaView {
        ArenaView { segment: self.segment.clone(), range: self.regions.result(), _alive: self.views.clone() }
    }

    /// The bytes `part` of the input of `rank`.
    ///
    /// # Safety
    /// `rank` has announced a reduction of this buffer, and while the slice is alive this rank does not publish that it
    /// is done.
    pub(super) unsafe fn input(&self, rank: usize, part: &Range<usize>) -> &[u8] {
        let start = self.regions.input(rank).start;
        // SAFETY: as the caller vouches.
        unsafe { self.segment.bytes(start + part.start..start + part.end) }
    }

    /// The bytes `part` of this rank's input, to be written.
    ///
    /// # Safety
    /// No other thread or rank reads or writes these bytes.
    #[expect(clippy::mut_from_ref, reason = "the protocol between ranks allows one writer")]
    pub(super) unsafe fn own_input(&self, part: &Range<usize>) -> &mut [u8] {
        let start = self.regions.input(self.rank).start;
        // SAFETY: as the caller vouches.
        unsafe { self.segment.bytes_mut(start + part.start..start + part.end) }
    }

    /// The bytes `part` of the result, to be written.
    ///
    /// # Safety
    /// No rank holds a view, or writes these bytes.
    #[expect(clippy::mut_from_ref, reason = "the result belongs to all ranks")]
    pub(super) unsafe fn result(&self, part: &Range<usize>) -> &mut [u8] {
        let start = self.regions.result().start;
        // SAFETY: as the caller vouches.
        unsafe { self.segment.bytes_mut(start + part.start..start + part.end) }
    }
}

impl ArenaView {
    pub(crate) fn bytes(&self) -> &[u8] {
        // SAFETY: all ranks learn that this view is alive before they would write the result again, and then do not.
        unsafe { self.segment.bytes(self.range.clone()) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn regions_do_not_overlap() {
        let (buffers, len) = Regions::plan(&[1, 0, 4096, 10_000], 3).unwrap();
        let mut ranges: Vec<_> = buffers.iter().flat_map(|one| (0..3).map(|rank| one.input(rank))).collect();
        ranges.extend(buffers.iter().map(Regions::result));
        ranges.retain(|range| !range.is_empty());
        ranges.sort_by_key(|range| range.start);
        assert!(ranges.windows(2).all(|pair| pair[0].end <= pair[1].start));
        assert!(ranges.iter().all(|range| range.end <= len && range.start.is_multiple_of(ALIGN)));
        let mut parts: Vec<_> = (0..3).flat_map(|rank| Regions::parts(&buffers, rank, 3)).collect();
        parts.sort_by_key(|part| part.start);
        let covered = parts.iter().fold(0, |end, part| if part.start <= end { end.max(part.end) } else { end });
        assert_eq!(covered, len);
        assert!(Regions::plan(&[usize::MAX / 2], 3).is_none());
        assert!(Regions::plan(&[], 3).unwrap().1 > 0);
    }
}
