//! Sums over the leaves of one rank: the part of the tree over all leaves that this rank can add up.

use std::ops::Range;

use burn_ddp_comm::{DType, LogicalRanks};

use super::accumulation::Sum;

/// The leaves of this rank among those of the job.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct OwnRun {
    pub(crate) division: LogicalRanks,
    pub(crate) rank: usize,
}

impl OwnRun {
    pub(crate) fn leaves(&self) -> Range<usize> {
        self.division.of_rank(self.rank)
    }

    /// The subtree in which two leaves meet, if all of it is this rank's.
    fn meet(&self, one: usize, other: usize) -> Option<Range<usize>> {
        let (tree, own) = (self.division.meet(one, other), self.leaves());
        (own.start <= tree.start && tree.end <= own.end).then_some(tree)
    }
}

/// Sums of subtrees, each known by its first leaf: the digits of a binary counter, since two subtrees become one as
/// soon as no leaf between or behind them can follow.
///
/// A leaf that adds nothing is left out, which is the same as adding −0.
#[derive(Clone, Debug)]
pub(crate) struct Nodes<T>(Vec<(usize, T)>);

impl<T> Default for Nodes<T> {
    fn default() -> Self {
        Nodes(Vec::new())
    }
}

impl<T> Nodes<T> {
    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = &(usize, T)> {
        self.0.iter()
    }

    /// First leaves of the sums.
    pub(crate) fn leaves(&self) -> Vec<usize> {
        self.0.iter().map(|(leaf, _)| *leaf).collect()
    }

    /// The sum from this leaf on.
    pub(crate) fn sum(&self, leaf: usize) -> Option<&T> {
        self.0.iter().find(|(at, _)| *at == leaf).map(|(_, sum)| sum)
    }

    /// The sum of `leaf` as it is held alone, to add more to it; `None` if it has none yet.
    pub(crate) fn at(&mut self, leaf: usize) -> Option<&mut T> {
        self.0.iter_mut().find(|(at, _)| *at == leaf).map(|(_, sum)| sum)
    }

    /// Puts the first sum of `leaf`. Earlier leaves of `run` are complete: `add` adds the second of two neighbours to
    /// the first.
    pub(crate) fn push(&mut self, run: Option<OwnRun>, leaf: usize, sum: T, add: impl FnMut(T, T) -> T) {
        self.carry(run, leaf, add);
        self.restore(leaf, sum);
    }

    /// Puts a sum where it belongs.
    pub(crate) fn restore(&mut self, leaf: usize, sum: T) {
        let at = self.0.partition_point(|(before, _)| *before <= leaf);
        self.0.insert(at, (leaf, sum));
    }

    /// Makes one of neighbours whose subtree lies in `run`, before the leaf `end`.
    fn carry(&mut self, run: Option<OwnRun>, end: usize, mut add: impl FnMut(T, T) -> T) {
        let Some(run) = run else { return };
        let mut right = self.0.partition_point(|(leaf, _)| *leaf < end);
        while right >= 2 && run.meet(self.0[right - 2].0, self.0[right - 1].0).is_some_and(|tree| tree.end <= end) {
            right -= 1;
            self.merge(right - 1, &mut add);
        }
    }

    /// The sums of the largest subtrees of `run`: all its leaves are complete, or never come.
    pub(crate) fn fold(mut self, run: Option<OwnRun>, mut add: impl FnMut(T, T) -> T) -> Vec<(usize, T)> {
        let Some(run) = run else { return self.0 };
        loop {
            let meet = |nth: usize| run.meet(self.0[nth].0, self.0[nth + 1].0).map(|tree| (tree.len(), nth));
            // The smallest subtree first.
            let Some((_, nth)) = (0..self.0.len().saturating_sub(1)).filter_map(meet).min() else { return self.0 };
            self.merge(nth, &mut add);
        }
    }

    fn merge(&mut self, nth: usize, add: &mut impl FnMut(T, T) -> T) {
        let (_, right) = self.0.remove(nth + 1);
        let (leaf, left) = self.0.remove(nth);
        self.0.insert(nth, (leaf, add(left, right)));
    }
}

impl Nodes<Sum> {
    /// Adds `weight` times a gradient to the sum of a leaf.
    pub(crate) fn add(&mut self, run: Option<OwnRun>, (leaf, weight): (usize, f64), dtype: DType, gradient: &[u8]) {
        match self.at(leaf) {
            Some(sum) => sum.add(dtype, gradient, weight),
            None if run.is_some() => self.push(run, leaf, Sum::of(dtype, gradient, weight), Sum::plus),
            None => {
                let mut sum = Sum::zeros(dtype, gradient.len() / dtype.size_bytes());
                sum.add(dtype, gradient, weight);
                self.push(None, leaf, sum, Sum::plus);
            }
        }
    }

    /// Adds to the sum from this leaf on.
    pub(crate) fn add_sum(&mut self, leaf: usize, sum: Sum) {
        match self.at(leaf) {
            Some(held) => held.add(sum.dtype(), sum.bytes(), 1.0),
            // As it is: zero plus -0 would be another zero.
            None => self.restore(leaf, sum),
        }
    }
}

/// The rows in which this rank passes its sums.
#[derive(Clone, Debug)]
pub(crate) struct Rows {
    pub(crate) run: OwnRun,
    subtrees: Vec<Range<usize>>,
}

impl Rows {
    pub(crate) fn new(run: OwnRun) -> Rows {
        Rows { subtrees: run.division.subtrees(run.rank), run }
    }

    /// Row of the subtree that has this leaf. With one row it is the only subtree's.
    pub(crate) fn of_leaf(&self, leaf: usize) -> usize {
        self.subtrees.iter().position(|subtree| subtree.contains(&leaf)).unwrap_or_default()
    }

    /// Fills `row` with −0, which changes no sum.
    pub(crate) fn clear(dtype: DType, row: &mut [u8]) {
        match dtype {
            DType::F64 => row.chunks_exact_mut(8).for_each(|x| x.copy_from_slice(&(-0.0_f64).to_ne_bytes())),
            _ => row.chunks_exact_mut(4).for_each(|x| x.copy_from_slice(&(-0.0_f32).to_ne_bytes())),
        }
    }

    /// The weights of this rank's rows.
    pub(crate) fn weights(&self, weights: &Nodes<f64>) -> Vec<f64> {
        let mut rows = vec![0.0; self.run.division.rows()];
        for (leaf, weight) in weights.clone().fold(Some(self.run), |left, right| left + right) {
            rows[self.of_leaf(leaf)] = weight;
        }
        rows
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A sum as the text of its additions.
    fn text(left: String, right: String) -> String {
        format!("({left}{right})")
    }

    fn sums(division: LogicalRanks, rank: usize, leaves: &[usize]) -> Vec<(usize, String)> {
        let run = Some(OwnRun { division, rank });
        let mut nodes = Nodes::default();
        for leaf in leaves {
            nodes.push(run, *leaf, leaf.to_string(), text);
            assert!(nodes.0.len() as u32 <= division.count().ilog2() + 1, "{nodes:?}");
        }
        nodes.fold(run, text)
    }

    #[test]
    fn complete_runs_become_the_largest_subtrees() {
        let eight = |ranks| LogicalRanks::new(8, ranks).unwrap();
        let one = |leaf, sum: &str| (leaf, sum.to_string());
        assert_eq!(sums(eight(1), 0, &[0, 1, 2, 3, 4, 5, 6, 7]), [one(0, "(((01)(23))((45)(67)))")]);
        assert_eq!(sums(eight(2), 1, &[4, 5, 6, 7]), [one(4, "((45)(67))")]);
        assert_eq!(sums(eight(3), 1, &[3, 4, 5]), [one(3, "3"), one(4, "(45)")]);
        let six = LogicalRanks::new(6, 2).unwrap();
        assert_eq!(sums(six, 1, &[3, 4, 5]), [one(3, "3"), one(4, "(45)")]);
        assert_eq!(sums(LogicalRanks::new(7, 1).unwrap(), 0, &[0, 1, 2, 3, 4, 5, 6]), [one(0, "(((01)(23))((45)6))")]);
    }

    #[test]
    fn missing_leaves_leave_the_others_where_they_are() {
        let division = LogicalRanks::new(8, 1).unwrap();
        let one = |leaf, sum: &str| (leaf, sum.to_string());
        assert_eq!(sums(division, 0, &[0, 2, 3, 7]), [one(0, "((0(23))7)")]);
        assert_eq!(sums(division, 0, &[1, 6]), [one(1, "(16)")]);
        assert_eq!(sums(division, 0, &[]), []);
    }

    #[test]
    fn sums_of_other_numbers_of_ranks_go_on_where_they_ended() {
        let (one, four) = (LogicalRanks::new(8, 1).unwrap(), LogicalRanks::new(8, 4).unwrap());
        // One rank held the sum of leaves 0 to 3; of four ranks the first two own them.
        let mut nodes = Nodes::default();
        nodes.restore(0, "((01)(23))".to_string());
        assert_eq!(nodes.fold(Some(OwnRun { division: four, rank: 0 }), text), [(0, "((01)(23))".to_string())]);
        // Four ranks held one leaf each.
        let run = Some(OwnRun { division: one, rank: 0 });
        let mut nodes = Nodes::default();
        [4, 0, 6, 2].into_iter().for_each(|leaf| nodes.restore(leaf, leaf.to_string()));
        assert_eq!(nodes.fold(run, text), [(0, "((02)(46))".to_string())]);
    }
}
