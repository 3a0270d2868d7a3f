//! Logical ranks: a fixed number of leaves of one tree of additions, dealt to any number of ranks.

use std::ops::Range;

use crate::reduce::halves;

/// Division of the leaves of a sum between the ranks of a group.
///
/// A sum over [`count`](Self::count) leaves is added up one balanced tree: neighbours first, an odd last one carried
/// up, and the same again over the results. Each rank has a run of leaves and passes the sums of the largest whole
/// subtrees in its run, so the bits of the result do not depend on the number of ranks.
///
/// ```
/// use burn_ddp_comm::LogicalRanks;
///
/// let even = LogicalRanks::new(8, 4).unwrap();
/// assert_eq!((even.of_rank(1), even.rows()), (2..4, 1));
///
/// let uneven = LogicalRanks::new(8, 3).unwrap(); // 3, 3 and 2 leaves
/// assert_eq!((uneven.count(), uneven.ranks()), (8, 3));
/// assert_eq!(uneven.subtrees(0), [0..2, 2..3]);
/// assert_eq!(uneven.subtrees(1), [3..4, 4..6]);
/// assert_eq!(uneven.rows(), 2); // sums that each rank passes
/// assert_eq!(uneven.meet(2, 3), 2..4); // the smallest subtree with both leaves
///
/// assert!(LogicalRanks::new(3, 4).is_none());
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LogicalRanks {
    count: usize,
    ranks: usize,
    rows: usize,
}

impl LogicalRanks {
    /// `count` leaves for `ranks` ranks; `None` unless each rank gets one.
    pub fn new(count: usize, ranks: usize) -> Option<LogicalRanks> {
        if ranks == 0 || count < ranks {
            return None;
        }
        let division = LogicalRanks { count, ranks, rows: 1 };
        if division.has_the_tree_of_ranks(0..count, 0..ranks) {
            return Some(division);
        }
        let rows = (0..ranks).map(|rank| division.subtrees(rank).len()).max().unwrap_or(1);
        // The sums of the ranks alone would be added in another order, so they take the way of several sums.
        Some(LogicalRanks { rows: rows.max(2), ..division })
    }

    /// Number of leaves.
    pub fn count(&self) -> usize {
        self.count
    }

    /// Number of ranks.
    pub fn ranks(&self) -> usize {
        self.ranks
    }

    /// Number of sums that each rank passes: 1 if the tree over the leaves is the tree over the ranks with a subtree in
    /// place of each rank, as with equally many leaves for each rank, a power of two.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Leaves of a rank, at least one. The numbers differ by one at most; the first ranks have more.
    pub fn of_rank(&self, rank: usize) -> Range<usize> {
        let (each, more) = (self.count / self.ranks, self.count % self.ranks);
        let start = rank * each + rank.min(more);
        start..start + each + usize::from(rank < more)
    }

    /// The largest subtrees that make up the leaves of a rank, in order.
    pub fn subtrees(&self, rank: usize) -> Vec<Range<usize>> {
        let mut found = Vec::new();
        find_subtrees(0..self.count, &self.of_rank(rank), &mut found);
        found
    }

    /// The smallest subtree that has both leaves.
    pub fn meet(&self, one: usize, other: usize) -> Range<usize> {
        let (first, last) = (one.min(other), one.max(other));
        let mut tree = 0..self.count;
        while tree.len() > 1 {
            let (left, right) = halves(tree.clone());
            tree = if last < left.end {
                left
            } else if first >= right.start {
                right
            } else {
                break;
            };
        }
        tree
    }

    /// True if the ranks' runs are subtrees of `leaves`, which meet as the ranks do in the tree over `ranks`.
    fn has_the_tree_of_ranks(&self, leaves: Range<usize>, ranks: Range<usize>) -> bool {
        if ranks.len() == 1 {
            return self.of_rank(ranks.start) == leaves;
        }
        if leaves.len() == 1 {
            return false;
        }
        let ((left, right), (left_ranks, right_ranks)) = (halves(leaves), halves(ranks));
        self.has_the_tree_of_ranks(left, left_ranks) && self.has_the_tree_of_ranks(right, right_ranks)
    }
}

fn find_subtrees(tree: Range<usize>, run: &Range<usize>, found: &mut Vec<Range<usize>>) {
    if tree.start >= run.end || tree.end <= run.start {
        return;
    }
    if run.start <= tree.start && tree.end <= run.end {
        return found.push(tree);
    }
    let (left, right) = halves(tree);
    find_subtrees(left, run, found);
    find_subtrees(right, run, found);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn runs_are_all_leaves_and_subtrees_are_the_runs() {
        for count in 1..40 {
            for ranks in 1..=count {
                let division = LogicalRanks::new(count, ranks).unwrap();
                let leaves: Vec<usize> = (0..ranks).flat_map(|rank| division.of_rank(rank)).collect();
                assert_eq!(leaves, (0..count).collect::<Vec<_>>());
                for rank in 0..ranks {
                    let subtrees = division.subtrees(rank);
                    assert!(subtrees.len() <= division.rows());
                    let leaves: Vec<usize> = subtrees.iter().cloned().flatten().collect();
                    assert_eq!(leaves, division.of_rank(rank).collect::<Vec<_>>());
                    for subtree in subtrees {
                        assert_eq!(division.meet(subtree.start, subtree.end - 1), subtree, "{count} {ranks}");
                    }
                }
            }
        }
    }

    #[test]
    fn equal_powers_of_two_need_one_row() {
        let rows = |count, ranks| LogicalRanks::new(count, ranks).unwrap().rows();
        for ranks in 1..20 {
            for each in [1, 2, 4, 8] {
                assert_eq!(rows(ranks * each, ranks), 1);
            }
            assert_eq!(rows(ranks + 5, 1), 1);
        }
        assert_eq!([rows(6, 2), rows(8, 3), rows(12, 4), rows(12, 5), rows(30, 2)], [2, 2, 2, 2, 4]);
        // One subtree each, which do not meet as the ranks do: 2, 1, 1 and 1 leaves.
        assert_eq!(rows(5, 4), 2);
        assert_eq!(rows(7, 4), 1);
    }

    #[test]
    fn nothing_is_dealt_to_more_ranks_than_leaves() {
        assert_eq!((LogicalRanks::new(0, 0), LogicalRanks::new(4, 0), LogicalRanks::new(2, 3)), (None, None, None));
    }
}
