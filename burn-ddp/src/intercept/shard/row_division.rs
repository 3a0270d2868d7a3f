//! Division of a parameter between the ranks, by rows of dimension 0.

use std::ops::Range;

/// Rows of one parameter. Where they do not divide evenly, the first ranks have one more; on the wire all have as many.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Rows {
    pub(crate) rows: usize,
    /// Bytes of one row.
    pub(crate) row_bytes: usize,
    pub(crate) world: usize,
}

impl Rows {
    /// Rows of one rank; at least one if there are as many rows as ranks.
    pub(crate) fn of(self, rank: usize) -> Range<usize> {
        let (each, more) = (self.rows / self.world, self.rows % self.world);
        let start = rank * each + rank.min(more);
        start..start + each + usize::from(rank < more)
    }

    /// Bytes of the rows of one rank.
    pub(crate) fn bytes_of(self, rank: usize) -> Range<usize> {
        let rows = self.of(rank);
        rows.start * self.row_bytes..rows.end * self.row_bytes
    }

    /// Bytes that each rank sends: those of the longest part.
    pub(crate) fn sent_bytes(self) -> usize {
        self.of(0).len() * self.row_bytes
    }

    /// True if all parts are equally long.
    pub(crate) fn is_even(self) -> bool {
        self.rows.is_multiple_of(self.world)
    }

    /// The parts of all ranks as they are sent, `[world, n]`, out of the whole parameter.
    pub(crate) fn spread(self, whole: &[u8]) -> Vec<u8> {
        let mut sent = vec![0; self.sent_bytes() * self.world];
        for rank in 0..self.world {
            let (from, to) = (self.bytes_of(rank), rank * self.sent_bytes());
            sent[to..to + from.len()].copy_from_slice(&whole[from]);
        }
        sent
    }

    /// Moves the whole parameter to the front of the parts of all ranks as they were sent, and returns its length.
    pub(crate) fn join(self, sent: &mut [u8]) -> usize {
        for rank in 1..self.world {
            let (to, from) = (self.bytes_of(rank), rank * self.sent_bytes());
            sent.copy_within(from..from + to.len(), to.start);
        }
        self.rows * self.row_bytes
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_are_the_whole_and_differ_by_one_row() {
        for world in 1..6 {
            for rows in world..3 * world + 2 {
                let division = Rows { rows, row_bytes: 3, world };
                let whole: Vec<u8> = (0..rows * 3).map(|i| i as u8).collect();
                let mut sent = division.spread(&whole);
                assert_eq!(sent.len(), rows.div_ceil(world) * 3 * world);
                let len = division.join(&mut sent);
                assert_eq!(sent[..len], whole);
                let lens: Vec<usize> = (0..world).map(|rank| division.of(rank).len()).collect();
                assert_eq!(lens.iter().sum::<usize>(), rows);
                assert!(lens.iter().all(|len| *len > 0 && *len + 1 >= lens[0] && *len <= lens[0]), "{lens:?}");
                assert_eq!(division.is_even(), lens.iter().all(|len| *len == lens[0]));
            }
        }
    }
}
