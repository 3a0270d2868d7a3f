//! Division of a tensor between the ranks, by rows of dimension 0.

use std::ops::Range;

use crate::Result;
use crate::call::call_arguments::refuse;
use crate::dtype::DType;

/// Division of the rows of a tensor between the ranks of a group: each rank's part is a run of rows, in the order of
/// the ranks. Where the rows do not divide evenly, the first ranks have one more.
///
/// ```
/// use burn_ddp_comm::RowDivision;
///
/// let division = RowDivision { rows: 5, row_bytes: 8, world_size: 2 };
/// assert_eq!((division.rows_of(0), division.rows_of(1)), (0..3, 3..5));
/// assert_eq!(division.bytes_of(1), 24..40);
/// assert_eq!(division.len_bytes(), 40);
/// assert!(!division.is_even());
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RowDivision {
    /// Number of rows of the whole tensor.
    pub rows: usize,
    /// Bytes of one row.
    pub row_bytes: usize,
    /// Number of ranks, at least 1: the methods panic otherwise.
    pub world_size: usize,
}

impl RowDivision {
    /// Rows of one rank's part; at least one row if there are as many rows as ranks.
    pub fn rows_of(self, rank: usize) -> Range<usize> {
        let (each, more) = (self.rows / self.world_size, self.rows % self.world_size);
        let start = rank * each + rank.min(more);
        start..start + each + usize::from(rank < more)
    }

    /// Place of one rank's part in the bytes of the whole tensor.
    pub fn bytes_of(self, rank: usize) -> Range<usize> {
        let rows = self.rows_of(rank);
        rows.start * self.row_bytes..rows.end * self.row_bytes
    }

    /// Bytes of the whole tensor.
    pub fn len_bytes(self) -> usize {
        self.rows * self.row_bytes
    }

    /// True if all parts are equally long.
    pub fn is_even(self) -> bool {
        self.rows.is_multiple_of(self.world_size)
    }

    /// The division as numbers, for comparison between ranks.
    pub(crate) fn words(self) -> [u64; 2] {
        [self.rows as u64, self.row_bytes as u64]
    }

    /// Bytes of the longest part.
    pub(crate) fn part_bytes(self) -> usize {
        self.rows_of(0).len() * self.row_bytes
    }

    /// Cuts the whole tensor into the parts of all ranks, each padded to the longest: `[world, n]`.
    pub(super) fn padded(self, whole: &[u8]) -> Vec<u8> {
        let mut parts = vec![0; self.part_bytes() * self.world_size];
        for rank in 0..self.world_size {
            let (from, to) = (self.bytes_of(rank), rank * self.part_bytes());
            parts[to..to + from.len()].copy_from_slice(&whole[from]);
        }
        parts
    }

    /// Checks that the division is between `ranks` ranks, and that its rows are whole elements.
    pub(crate) fn check(self, dtype: DType, ranks: usize) -> Result<()> {
        if self.world_size != ranks {
            refuse(format!("a RowDivision between {} ranks, but the group has {ranks}", self.world_size))
        } else if !self.row_bytes.is_multiple_of(dtype.size_bytes()) {
            refuse(format!("rows of {} bytes: not a whole number of {dtype} elements", self.row_bytes))
        } else {
            Ok(())
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_are_the_whole_and_differ_by_one_row() {
        for world_size in 1..6 {
            for rows in 0..3 * world_size + 2 {
                let division = RowDivision { rows, row_bytes: 3, world_size };
                let whole: Vec<u8> = (0..rows * 3).map(|i| i as u8).collect();
                let parts = division.padded(&whole);
                assert_eq!(parts.len(), rows.div_ceil(world_size) * 3 * world_size);
                for rank in 0..world_size {
                    let (from, own) = (rank * division.part_bytes(), &whole[division.bytes_of(rank)]);
                    assert_eq!(parts[from..][..own.len()], *own);
                }
                let lens: Vec<usize> = (0..world_size).map(|rank| division.rows_of(rank).len()).collect();
                assert_eq!(lens.iter().sum::<usize>(), rows);
                assert!(lens.iter().all(|len| *len + 1 >= lens[0] && *len <= lens[0]), "{lens:?}");
                assert_eq!(division.is_even(), lens.iter().all(|len| *len == lens[0]));
            }
        }
    }
}
