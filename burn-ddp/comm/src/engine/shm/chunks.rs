//! Cuts of a buffer: parts for ranks, and chunks for slots.

use std::ops::Range;

/// Part `nth` of `len` bytes that are cut into `count` runs of whole elements of `size` bytes; lengths differ by at
/// most one element.
pub(in crate::engine) fn part(len: usize, size: usize, count: usize, nth: usize) -> Range<usize> {
    let elements = len / size;
    let (share, longer) = (elements / count, elements % count);
    let start = nth * share + nth.min(longer);
    let end = start + share + usize::from(nth < longer);
    start * size..end * size
}

/// A buffer in chunks of whole elements.
#[derive(Clone, Copy, Debug)]
pub(super) struct Chunks {
    len: usize,
    size: usize,
    chunk: usize,
}

impl Chunks {
    /// `len` bytes of elements of `size` bytes, in chunks of at most `most` bytes.
    pub(super) fn new(len: usize, size: usize, most: usize) -> Chunks {
        Chunks { len, size, chunk: (most / size).max(1) * size }
    }

    pub(super) fn count(&self) -> usize {
        self.len.div_ceil(self.chunk)
    }

    /// Range of chunk `nth` in the buffer; empty after the last.
    pub(super) fn range(&self, nth: usize) -> Range<usize> {
        let start = (nth * self.chunk).min(self.len);
        start..(start + self.chunk).min(self.len)
    }

    /// Range within chunk `nth` of its part number `part` of `count`.
    pub(super) fn part(&self, nth: usize, count: usize, part: usize) -> Range<usize> {
        self::part(self.range(nth).len(), self.size, count, part)
    }
}

/// The place of `part` in an area that begins at `start`.
pub(super) fn within(start: usize, part: &Range<usize>) -> Range<usize> {
    start + part.start..start + part.end
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_cover_the_buffer_in_whole_elements() {
        for (elements, count) in [(0, 3), (2, 3), (7, 3), (1000, 7), (5, 1)] {
            let mut end = 0;
            for nth in 0..count {
                let range = part(elements * 4, 4, count, nth);
                assert_eq!(range.start, end);
                assert!(range.len().is_multiple_of(4) && range.len().abs_diff(elements * 4 / count) <= 4);
                end = range.end;
            }
            assert_eq!(end, elements * 4);
        }
    }

    #[test]
    fn chunks_cover_the_buffer_in_whole_elements() {
        let chunks = Chunks::new(100, 4, 30);
        let ranges: Vec<_> = (0..chunks.count()).map(|nth| chunks.range(nth)).collect();
        assert_eq!(ranges, [0..28, 28..56, 56..84, 84..100]);
        assert!(chunks.range(4).is_empty());
        assert_eq!(Chunks::new(0, 4, 30).count(), 0);
    }
}
