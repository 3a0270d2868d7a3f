//! The evaluation loader: each rank loads its part of the dataset, once.

use std::ops::Range;
use std::sync::Arc;

use burn::tensor::Device;

use super::DataError;
use super::batch_stream::BatchStream;
use super::epoch_plan::share;
use super::permutation;
use super::prefetch::{BatchList, Pool};
use crate::Ddp;

/// This rank's share of an evaluation dataset, batch by batch; from [`Ddp::eval_loader`].
///
/// Shares are contiguous and in rank order, so results gathered from all ranks are in the order of the dataset, or in
/// the [shuffled](super::LoaderBuilder::shuffle) one. No item is repeated; a rank may have fewer batches than another,
/// or none. Taking a batch makes no collective. It is also Burn's [`DataLoader`](burn::data::dataloader::DataLoader).
/// Clones are the same loader.
///
/// # Example
///
/// ```
/// # use burn::{data::dataloader::batcher::Batcher, data::dataset::InMemDataset, tensor::Device};
/// # struct Together;
/// # impl Batcher<u32, Vec<u32>> for Together {
/// #     fn batch(&self, items: Vec<u32>, _: &Device) -> Vec<u32> {
/// #         items
/// #     }
/// # }
/// # use burn_ddp::prelude::*;
/// let own = Ddp::spawn(2, |ddp| {
///     let test = ddp.eval_loader(Together).batch_size(3).build(InMemDataset::new((0..7).collect()))?;
///     let items = test.iter().collect::<Result<Vec<_>, _>>()?.concat();
///     Ok((test.num_items(), test.len(), test.is_empty(), items))
/// })?;
/// assert_eq!(own, [(7, 2, false, vec![0, 1, 2, 3]), (7, 1, false, vec![4, 5, 6])]);
/// # Ok::<(), burn_ddp::Error>(())
/// ```
pub struct EvalLoader<O> {
    inner: Arc<Inner<O>>,
}

struct Inner<O> {
    ddp: Ddp,
    id: u32,
    /// Items of the dataset that all ranks together load.
    items: Range<usize>,
    /// Positions in the order of the items that this rank loads.
    own: Range<usize>,
    /// Positions of each batch of this rank. Each leaf has a part of its own; without logical ranks a rank is a leaf.
    batches: Arc<[Range<usize>]>,
    batch_size: usize,
    /// `None` for the dataset's order.
    seed: Option<u64>,
    pool: Arc<Pool<O>>,
}

impl<O> Clone for EvalLoader<O> {
    fn clone(&self) -> Self {
        Self { inner: self.inner.clone() }
    }
}

impl<O> std::fmt::Debug for EvalLoader<O> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Inner { id, items, own, batch_size, seed, .. } = &*self.inner;
        let mut f = f.debug_struct("EvalLoader");
        f.field("id", id)
            .field("items", items)
            .field("own", own)
            .field("batch_size", batch_size)
            .field("seed", seed)
            .finish_non_exhaustive()
    }
}

impl<O: Send + 'static> EvalLoader<O> {
    pub(super) fn new(
        ddp: Ddp,
        id: u32,
        items: Range<usize>,
        batch_size: usize,
        seed: Option<u64>,
        pool: Arc<Pool<O>>,
    ) -> Self {
        let run = ddp.run();
        let chunk = |leaf| {
            let share = share(items.len(), leaf, run.division.count());
            items.start + share.start..items.start + share.end
        };
        let leaves = run.leaves();
        let own = chunk(leaves.start).start..chunk(leaves.end - 1).end;
        let of_leaf = |leaf| {
            let chunk = chunk(leaf);
            let count = chunk.len().div_ceil(batch_size);
            (0..count).map(move |batch| batch_of(&chunk, batch_size, batch))
        };
        let batches = leaves.flat_map(of_leaf).collect();
        Self { inner: Arc::new(Inner { ddp, id, items, own, batches, batch_size, seed, pool }) }
    }

    /// This rank's batches, from the first on.
    ///
    /// # Example
    ///
    /// As in [`Ddp::eval_loader`].
    pub fn iter(&self) -> EvalBatches<O> {
        EvalBatches { loader: self.clone(), batches: BatchStream::new(self.inner.pool.clone()), over: false }
    }

    /// Items over all ranks.
    pub fn num_items(&self) -> usize {
        self.inner.items.len()
    }

    /// Number of this rank's batches; may be 0.
    pub fn len(&self) -> usize {
        self.inner.batches.len()
    }

    /// True if this rank has no batch.
    pub fn is_empty(&self) -> bool {
        self.inner.own.is_empty()
    }

    /// The items of the dataset that this rank loads; if the loader shuffles, their positions in the shuffled order.
    ///
    /// # Example
    ///
    /// ```
    /// # use burn::{data::dataloader::batcher::Batcher, data::dataset::InMemDataset, tensor::Device};
    /// # struct Together;
    /// # impl Batcher<u32, Vec<u32>> for Together {
    /// #     fn batch(&self, items: Vec<u32>, _: &Device) -> Vec<u32> {
    /// #         items
    /// #     }
    /// # }
    /// # use burn_ddp::prelude::*;
    /// let shares = Ddp::spawn(2, |ddp| {
    ///     let test = ddp.eval_loader(Together).batch_size(2).build(InMemDataset::new(vec![7; 5]))?;
    ///     assert_eq!(test.num_items(), 5);
    ///     Ok((test.share(), test.len()))
    /// })?;
    /// assert_eq!(shares, [(0..3, 2), (3..5, 1)]); // items, and batches of up to 2
    /// # Ok::<(), burn_ddp::Error>(())
    /// ```
    pub fn share(&self) -> Range<usize> {
        self.inner.own.clone()
    }

    fn batch_list(&self) -> BatchList {
        let Inner { items, own, seed, .. } = &*self.inner;
        let (first, own, of_rank) = (items.start, own.clone(), self.inner.batches.clone());
        let Some(seed) = *seed else {
            let indices = move |batch: usize| of_rank[batch].clone().collect();
            return BatchList { batches: self.len(), indices: Arc::new(indices) };
        };
        // Only this rank's part of the order is kept.
        let order = permutation(items.len(), seed, 0);
        let order: Vec<usize> = own.clone().map(|position| first + order[position - first]).collect();
        let indices = move |batch: usize| {
            let Range { start, end } = of_rank[batch].clone();
            order[start - own.start..end - own.start].to_vec()
        };
        BatchList { batches: self.len(), indices: Arc::new(indices) }
    }

    /// The same loader with batches on `device`.
    pub(super) fn on_device(&self, device: &Device) -> Self {
        let Inner { ddp, id, items, batch_size, seed, pool, .. } = &*self.inner;
        Self::new(ddp.clone(), *id, items.clone(), *batch_size, *seed, pool.on_device(device))
    }

    /// A loader for the items `start..end`.
    pub(super) fn sliced(&self, start: usize, end: usize) -> Result<Self, DataError> {
        let Inner { ddp, id, items, batch_size, seed, pool, .. } = &*self.inner;
        if start > end || end > items.len() {
            return Err(DataError::SliceOutOfRange { start, end, items: items.len() });
        }
        let items = items.start + start..items.start + end;
        Ok(Self::new(ddp.clone(), *id, items, *batch_size, *seed, pool.clone()))
    }
}

/// The items of a batch; past the last batch, the empty range at the end.
fn batch_of(own: &Range<usize>, batch_size: usize, batch: usize) -> Range<usize> {
    let at = |batch: usize| own.start.saturating_add(batch.saturating_mul(batch_size)).min(own.end);
    at(batch)..at(batch + 1)
}

/// The batches of an [`EvalLoader`] on this rank, in order.
///
/// Yields an error in the place of a batch that could not be loaded.
pub struct EvalBatches<O: Send + 'static> {
    loader: EvalLoader<O>,
    batches: BatchStream<O>,
    /// True after an error that does not concern a single batch.
    over: bool,
}

impl<O: Send + 'static> EvalBatches<O> {
    fn take_next(&mut self) -> Result<O, DataError> {
        let (loader, batches, nth) = (&self.loader, self.loader.len(), self.batches.taken() + 1);
        let Inner { ddp, id, .. } = &*loader.inner;
        let name = || format!("batch {nth} of {batches} of evaluation loader {id} on rank {}", ddp.world().rank());
        self.batches.take(ddp.world(), || Ok(loader.batch_list()), name)
    }

    /// Items that all ranks have taken, estimated from this rank's progress; and all items.
    pub(super) fn progress_in_items(&self) -> (usize, usize) {
        let Inner { items, own, batches, .. } = &*self.loader.inner;
        let last = self.batches.taken().checked_sub(1).and_then(|last| batches.get(last));
        let done = last.map_or(0, |last| last.end - own.start);
        let (total, done) = (items.len() as u128, done as u128);
        let processed = (total * done).checked_div(own.len() as u128).unwrap_or(total);
        (processed as usize, items.len())
    }
}

impl<O: Send + 'static> Iterator for EvalBatches<O> {
    type Item = Result<O, DataError>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.over || self.batches.taken() == self.loader.len() {
            self.batches.end();
            return None;
        }
        let taken = self.take_next();
        self.over = taken.as_ref().is_err_and(|error| !error.is_skippable());
        Some(taken)
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        let left = if self.over { 0 } else { self.loader.len() - self.batches.taken() };
        (left.min(1), Some(left))
    }
}
