//! A rank's share of any dataset, as a dataset itself.

use std::error::Error;

use burn::data::dataset::Dataset;

use super::epoch_plan::share;
use super::{DataError, DistributedSampler};
use crate::Ddp;

/// One rank's share of a [`Dataset`], itself a [`Dataset`].
///
/// Shares are not padded: their sizes differ by at most one, and together they are the dataset, so that an evaluation
/// counts every item once. A rank's share may be empty. Only [`from_sampler`](Self::from_sampler) pads, as torch does.
///
/// ```
/// use burn::data::dataset::{Dataset, InMemDataset};
/// use burn_ddp::data::ShardedDataset;
///
/// let rank_0 = ShardedDataset::contiguous(InMemDataset::new(vec!['a', 'b', 'c', 'd', 'e']), 0, 2)?;
/// let rank_1 = ShardedDataset::contiguous(InMemDataset::new(vec!['a', 'b', 'c', 'd', 'e']), 1, 2)?;
/// assert_eq!(rank_0.iter().collect::<Result<Vec<_>, _>>()?, ['a', 'b', 'c']);
/// assert_eq!(rank_1.iter().collect::<Result<Vec<_>, _>>()?, ['d', 'e']);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone)]
pub struct ShardedDataset<D> {
    dataset: D,
    share: Share,
}

#[derive(Debug, Clone)]
enum Share {
    /// `len` items: `start`, `start + stride`, …
    Every { start: usize, stride: usize, len: usize },
    /// The items with these indices.
    Listed(Vec<usize>),
}

impl Ddp {
    /// This rank's contiguous share of `dataset`, without padding; see [`ShardedDataset`] for other shares.
    ///
    /// ```
    /// use burn::data::dataset::{Dataset, InMemDataset};
    /// use burn_ddp::prelude::*;
    ///
    /// let shares = Ddp::spawn(2, |ddp| Ok(ddp.shard(InMemDataset::new(vec![1, 2, 3])).len()))?;
    /// assert_eq!(shares, [2, 1]);
    /// # Ok::<(), burn_ddp::Error>(())
    /// ```
    pub fn shard<I, D: Dataset<I>>(&self, dataset: D) -> ShardedDataset<D> {
        ShardedDataset::of_rank(dataset, self.rank(), self.world_size())
    }
}

impl<D> std::fmt::Debug for ShardedDataset<D> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ShardedDataset").field("share", &self.share).finish_non_exhaustive()
    }
}

impl<D> ShardedDataset<D> {
    /// The share of `rank` if `world_size` ranks split `dataset` into contiguous parts, in rank order.
    ///
    /// # Errors
    /// [`DataError::NoSuchRank`] unless `rank < world_size`.
    pub fn contiguous<I, E>(dataset: D, rank: usize, world_size: usize) -> Result<Self, DataError>
    where
        D: Dataset<I, E>,
        E: Error + Send + Sync + 'static,
    {
        check(rank, world_size)?;
        Ok(Self::of_rank(dataset, rank, world_size))
    }

    /// [`contiguous`](Self::contiguous) for a rank that is known to exist.
    pub(crate) fn of_rank<I, E>(dataset: D, rank: usize, world_size: usize) -> Self
    where
        D: Dataset<I, E>,
        E: Error + Send + Sync + 'static,
    {
        let part = share(dataset.len(), rank, world_size);
        let share = Share::Every { start: part.start, stride: 1, len: part.len() };
        Self { dataset, share }
    }

    /// The items `rank`, `rank + world_size`, … of `dataset`: each rank's share runs through the whole dataset.
    ///
    /// # Errors
    /// [`DataError::NoSuchRank`] unless `rank < world_size`.
    ///
    /// # Example
    ///
    /// ```
    /// use burn::data::dataset::{Dataset, InMemDataset};
    /// use burn_ddp::data::ShardedDataset;
    ///
    /// let rank_1 = ShardedDataset::strided(InMemDataset::new(vec!['a', 'b', 'c', 'd', 'e']), 1, 2)?;
    /// assert_eq!(rank_1.iter().collect::<Result<Vec<_>, _>>()?, ['b', 'd']);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn strided<I, E>(dataset: D, rank: usize, world_size: usize) -> Result<Self, DataError>
    where
        D: Dataset<I, E>,
        E: Error + Send + Sync + 'static,
    {
        check(rank, world_size)?;
        // Position r + k·world is an item for as many k as a contiguous share of rank r has items.
        let len = share(dataset.len(), rank, world_size).len();
        let share = Share::Every { start: rank, stride: world_size, len };
        Ok(Self { dataset, share })
    }

    /// The items that `sampler` reads in the epoch last set on it, with torch's padding or dropping.
    ///
    /// # Errors
    /// [`DataError::SamplerMismatch`] if the sampler was made for another number of items.
    ///
    /// # Example
    ///
    /// ```
    /// use burn::data::dataset::{Dataset, InMemDataset};
    /// use burn_ddp::data::{DistributedSampler, ShardedDataset};
    ///
    /// let sampler = DistributedSampler::new(5, 1, 2)?.shuffle(false);
    /// let rank_1 = ShardedDataset::from_sampler(InMemDataset::new(vec!['a', 'b', 'c', 'd', 'e']), &sampler)?;
    /// assert_eq!(rank_1.iter().collect::<Result<Vec<_>, _>>()?, ['b', 'd', 'a']); // padded by the first item
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn from_sampler<I, E>(dataset: D, sampler: &DistributedSampler) -> Result<Self, DataError>
    where
        D: Dataset<I, E>,
        E: Error + Send + Sync + 'static,
    {
        if sampler.dataset_len() != dataset.len() {
            return Err(DataError::SamplerMismatch { sampler: sampler.dataset_len(), dataset: dataset.len() });
        }
        let share = Share::Listed(sampler.iter().collect());
        Ok(Self { dataset, share })
    }

    /// The dataset of all ranks.
    ///
    /// # Example
    ///
    /// ```
    /// use burn::data::dataset::{Dataset, InMemDataset};
    /// use burn_ddp::data::ShardedDataset;
    ///
    /// let rank_0 = ShardedDataset::contiguous(InMemDataset::new(vec!['a', 'b', 'c', 'd']), 0, 2)?;
    /// assert_eq!((rank_0.len(), rank_0.dataset().len()), (2, 4));
    /// assert_eq!(rank_0.into_inner().get(3)?, 'd');
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn dataset(&self) -> &D {
        &self.dataset
    }

    /// Gives back the dataset of all ranks.
    pub fn into_inner(self) -> D {
        self.dataset
    }

    fn len(&self) -> usize {
        match &self.share {
            Share::Every { len, .. } => *len,
            Share::Listed(indices) => indices.len(),
        }
    }

    fn index(&self, index: usize) -> usize {
        // As the trait requires, an index outside of the share panics.
        assert!(index < self.len(), "index {index} is out of bounds for a share of {} item(s)", self.len());
        match &self.share {
            Share::Every { start, stride, .. } => start + index * stride,
            Share::Listed(indices) => indices[index],
        }
    }
}

impl<D, I, E> Dataset<I, E> for ShardedDataset<D>
where
    D: Dataset<I, E>,
    E: Error + Send + Sync + 'static,
{
    fn get(&self, index: usize) -> Result<I, E> {
        self.dataset.get(self.index(index))
    }

    fn get_many(&self, indexes: Vec<usize>) -> Result<Vec<I>, E> {
        self.dataset.get_many(indexes.into_iter().map(|index| self.index(index)).collect())
    }

    fn len(&self) -> usize {
        ShardedDataset::len(self)
    }
}

fn check(rank: usize, world: usize) -> Result<(), DataError> {
    if rank < world { Ok(()) } else { Err(DataError::NoSuchRank { rank, world }) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use burn::data::dataset::InMemDataset;
    use proptest::prelude::*;

    fn numbers(n: usize) -> InMemDataset<usize> {
        InMemDataset::new((0..n).collect())
    }

    fn items(dataset: &impl Dataset<usize>) -> Vec<usize> {
        (0..dataset.len()).map(|index| dataset.get(index).unwrap()).collect()
    }

    #[test]
    fn shares_of_five_over_two() {
        assert_eq!(items(&ShardedDataset::contiguous(numbers(5), 0, 2).unwrap()), [0, 1, 2]);
        assert_eq!(items(&ShardedDataset::contiguous(numbers(5), 1, 2).unwrap()), [3, 4]);
        assert_eq!(items(&ShardedDataset::strided(numbers(5), 0, 2).unwrap()), [0, 2, 4]);
        assert_eq!(items(&ShardedDataset::strided(numbers(5), 1, 2).unwrap()), [1, 3]);
        let many = ShardedDataset::strided(numbers(5), 1, 2).unwrap().get_many(vec![1, 0]).unwrap();
        assert_eq!(many, [3, 1]);
        assert!(ShardedDataset::contiguous(numbers(5), 2, 2).is_err());
        assert!(ShardedDataset::strided(numbers(5), 0, 0).is_err());
    }

    #[test]
    fn a_sampler_brings_its_padding_and_its_epoch() {
        let mut sampler = DistributedSampler::new(5, 1, 4).unwrap();
        sampler.set_epoch(2);
        let share = ShardedDataset::from_sampler(numbers(5), &sampler).unwrap();
        assert_eq!(items(&share), sampler.indices(2));
        assert_eq!(share.len(), 2);
        let error = ShardedDataset::from_sampler(numbers(6), &sampler).unwrap_err();
        assert!(matches!(error, DataError::SamplerMismatch { sampler: 5, dataset: 6 }), "{error}");
    }

    #[test]
    #[should_panic(expected = "index 2 is out of bounds for a share of 2 item(s)")]
    fn the_other_ranks_items_are_out_of_bounds() {
        let _ = ShardedDataset::contiguous(numbers(5), 1, 2).unwrap().get(2);
    }

    proptest! {
        #[test]
        fn shares_are_the_dataset(n in 0usize..300, world in 1usize..40) {
            let contiguous: Vec<Vec<usize>> =
                (0..world).map(|rank| items(&ShardedDataset::contiguous(numbers(n), rank, world).unwrap())).collect();
            let strided: Vec<Vec<usize>> =
                (0..world).map(|rank| items(&ShardedDataset::strided(numbers(n), rank, world).unwrap())).collect();
            for shares in [&contiguous, &strided] {
                let sizes = shares.iter().map(Vec::len);
                prop_assert!(sizes.clone().max().unwrap() - sizes.min().unwrap() <= 1);
            }
            prop_assert_eq!(contiguous.concat(), (0..n).collect::<Vec<_>>());
            let mut union = strided.concat();
            union.sort_unstable();
            prop_assert_eq!(union, (0..n).collect::<Vec<_>>());
        }
    }
}
