//! torch's `DistributedSampler`, for programs that need exactly its arithmetic.

use super::{DataError, permutation};

/// The items of a dataset that a rank reads, by the arithmetic of torch's `DistributedSampler`.
///
/// Every rank gets equally many items: rank r reads positions r, r + world, r + 2·world, … of the epoch's order. If the
/// world size does not divide the number of items, the order is padded by repeating it from its start; with
/// [`drop_last`](Self::drop_last) its tail is left out instead. As in torch, shuffling is on by default, and a new
/// order in every epoch requires [`set_epoch`](Self::set_epoch) on all ranks.
///
/// Padding counts some items twice, and `set_epoch` is easily forgotten: [`Ddp::loader`](crate::Ddp::loader) has
/// neither problem. The shuffled order is our own [`permutation`], not torch's `randperm`.
///
/// ```
/// use burn_ddp::data::DistributedSampler;
///
/// let rank_1_of_3 = DistributedSampler::new(5, 1, 3)?.shuffle(false);
/// assert_eq!(rank_1_of_3.indices(0), [1, 4]);
/// let rank_2_of_3 = DistributedSampler::new(5, 2, 3)?.shuffle(false);
/// assert_eq!(rank_2_of_3.indices(0), [2, 0]); // padded by the first item
/// assert_eq!(rank_2_of_3.drop_last(true).indices(0), [2]);
///
/// let mut shuffled = DistributedSampler::new(6, 0, 2)?.seed(42);
/// for epoch in 0..3 {
///     shuffled.set_epoch(epoch); // on every rank
///     assert_eq!((shuffled.epoch(), shuffled.iter().count()), (epoch, 3));
/// }
/// assert_eq!((shuffled.dataset_len(), shuffled.num_samples()), (6, 3));
///
/// assert!(DistributedSampler::new(5, 3, 3).is_err());
/// # Ok::<(), burn_ddp::data::DataError>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DistributedSampler {
    len: usize,
    rank: usize,
    world: usize,
    shuffle: bool,
    seed: u64,
    drop_last: bool,
    epoch: u64,
}

impl DistributedSampler {
    /// The sampler of `rank` in a world of `world_size`, over a dataset of `len` items; shuffled with seed 0.
    ///
    /// # Errors
    /// [`DataError::NoSuchRank`] unless `rank < world_size`.
    pub fn new(len: usize, rank: usize, world_size: usize) -> Result<Self, DataError> {
        if rank >= world_size {
            return Err(DataError::NoSuchRank { rank, world: world_size });
        }
        Ok(Self { len, rank, world: world_size, shuffle: true, seed: 0, drop_last: false, epoch: 0 })
    }

    /// If true (the default), each epoch has an order of its own; else all epochs have the dataset's order.
    pub fn shuffle(mut self, shuffle: bool) -> Self {
        self.shuffle = shuffle;
        self
    }

    /// The seed from which, with the epoch, the order is derived; must be the same on all ranks.
    pub fn seed(mut self, seed: u64) -> Self {
        self.seed = seed;
        self
    }

    /// If true, the items at the end that do not give every rank one more are left out; else the order is padded.
    pub fn drop_last(mut self, drop_last: bool) -> Self {
        self.drop_last = drop_last;
        self
    }

    /// Sets the epoch whose order [`iter`](Self::iter) has. Call it on all ranks before each epoch.
    pub fn set_epoch(&mut self, epoch: u64) {
        self.epoch = epoch;
    }

    /// The epoch last set, 0 at first.
    pub fn epoch(&self) -> u64 {
        self.epoch
    }

    /// Length of the dataset that this sampler was made for.
    pub fn dataset_len(&self) -> usize {
        self.len
    }

    /// Items that every rank reads per epoch.
    pub fn num_samples(&self) -> usize {
        if self.drop_last {
            // torch: ceil((len - world) / world) if there is a remainder, else len / world. Both are the floor.
            self.len / self.world
        } else {
            self.len.div_ceil(self.world)
        }
    }

    /// Items that all ranks read per epoch, including repeated ones.
    pub fn total_size(&self) -> usize {
        self.num_samples() * self.world
    }

    /// The items this rank reads in `epoch`, in order.
    pub fn indices(&self, epoch: u64) -> Vec<usize> {
        let positions = (self.rank..self.total_size()).step_by(self.world);
        if self.shuffle {
            let order = permutation(self.len, self.seed, epoch);
            // Repeating the order from its start, as often as needed, is reading it modulo its length.
            positions.map(|position| order[position % self.len]).collect()
        } else {
            positions.map(|position| position % self.len).collect()
        }
    }

    /// The items this rank reads in the epoch last set.
    ///
    /// # Example
    ///
    /// ```
    /// use burn_ddp::data::DistributedSampler;
    ///
    /// let mut sampler = DistributedSampler::new(100, 0, 2)?.seed(42);
    /// let first: Vec<usize> = sampler.iter().collect();
    /// sampler.set_epoch(1); // or epoch 1 has the order of epoch 0
    /// let second: Vec<usize> = sampler.iter().collect();
    /// assert!(first != second && second == sampler.indices(1));
    /// assert_eq!((sampler.num_samples(), sampler.total_size()), (50, 100));
    /// # Ok::<(), burn_ddp::data::DataError>(())
    /// ```
    pub fn iter(&self) -> std::vec::IntoIter<usize> {
        self.indices(self.epoch).into_iter()
    }
}

impl IntoIterator for &DistributedSampler {
    type Item = usize;
    type IntoIter = std::vec::IntoIter<usize>;

    fn into_iter(self) -> Self::IntoIter {
        self.iter()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeSet;

    /// Written by `tests/torch_sampler.py`: `n world drop_last rank: indices…`.
    const TORCH: &str = include_str!("tests/torch_sampler.txt");

    struct Row {
        n: usize,
        world: usize,
        drop_last: bool,
        rank: usize,
        indices: Vec<usize>,
    }

    fn torch() -> Vec<Row> {
        let lines = TORCH.lines().filter(|line| !line.starts_with('#'));
        let rows = lines.map(|line| {
            let (arguments, indices) = line.split_once(':').unwrap();
            let [n, world, drop_last, rank] = arguments.split_whitespace().collect::<Vec<_>>()[..] else {
                panic!("{line}")
            };
            Row {
                n: n.parse().unwrap(),
                world: world.parse().unwrap(),
                drop_last: drop_last.parse().unwrap(),
                rank: rank.parse().unwrap(),
                indices: indices.split_whitespace().map(|word| word.parse().unwrap()).collect(),
            }
        });
        rows.collect()
    }

    #[test]
    fn reads_what_torch_reads() {
        let rows = torch();
        // 6 lengths, with and without drop_last, worlds of 1 to 8 with one row per rank.
        assert_eq!(rows.len(), 6 * 2 * 36);
        for Row { n, world, drop_last, rank, indices } in rows {
            let sampler = DistributedSampler::new(n, rank, world).unwrap().drop_last(drop_last);
            let what = format!("n {n}, rank {rank} of {world}, drop_last {drop_last}");
            assert_eq!(sampler.num_samples(), indices.len(), "{what}");
            assert_eq!(sampler.total_size(), indices.len() * world, "{what}");
            assert_eq!(sampler.clone().shuffle(false).indices(3), indices, "{what}");

            // Shuffled, torch does the same to positions of the epoch's order.
            let order = permutation(n, 9, 3);
            let shuffled: Vec<usize> = indices.iter().map(|position| order[*position]).collect();
            assert_eq!(sampler.seed(9).indices(3), shuffled, "{what}");
        }
    }

    #[test]
    fn set_epoch_changes_the_order() {
        let mut sampler = DistributedSampler::new(100, 1, 4).unwrap().seed(5);
        assert_eq!(sampler.epoch(), 0);
        let first: Vec<usize> = sampler.iter().collect();
        assert_eq!(first, sampler.indices(0));
        sampler.set_epoch(1);
        let second: Vec<usize> = (&sampler).into_iter().collect();
        assert_eq!(second, sampler.indices(1));
        assert_ne!(first, second);
    }

    #[test]
    fn a_rank_outside_the_world_is_an_error() {
        for (rank, world) in [(0, 0), (1, 1), (8, 8)] {
            let error = DistributedSampler::new(5, rank, world).unwrap_err();
            assert!(matches!(error, DataError::NoSuchRank { .. }), "{error}");
        }
    }

    proptest! {
        #[test]
        fn ranks_together_read_the_dataset(
            n in 0usize..500, world in 1usize..40, seed: u64, epoch: u64, shuffle: bool,
        ) {
            let of = |rank| DistributedSampler::new(n, rank, world).unwrap().seed(seed).shuffle(shuffle);
            let read: Vec<usize> = (0..world).flat_map(|rank| of(rank).indices(epoch)).collect();
            prop_assert_eq!(read.len(), of(0).total_size());
            prop_assert!(read.len() < n + world);
            let union: BTreeSet<usize> = read.into_iter().collect();
            prop_assert_eq!(union, (0..n).collect::<BTreeSet<_>>());
        }

        #[test]
        fn dropping_the_last_reads_nothing_twice(n in 0usize..500, world in 1usize..40, seed: u64, epoch: u64) {
            let of = |rank| DistributedSampler::new(n, rank, world).unwrap().seed(seed).drop_last(true);
            let read: Vec<usize> = (0..world).flat_map(|rank| of(rank).indices(epoch)).collect();
            let union: BTreeSet<usize> = read.iter().copied().collect();
            prop_assert_eq!(union.len(), read.len());
            prop_assert_eq!(read.len(), n - n % world);
        }
    }
}
