//! The training loader: one dataset, all ranks, epoch after epoch.

use std::sync::{Arc, Mutex, PoisonError};

use burn::data::dataloader::{DataLoader, DataLoaderIterator};
use burn::tensor::Device;

use super::epoch::{AsBurn, Epoch, Epochs};
use super::burn_data_loader::Unreadable;
use super::prefetch::{Pool, Reading};
use super::{DataError, EpochPlan, permutation};
use crate::Ddp;

/// This rank's share of a training dataset, batch by batch, epoch after epoch; from [`Ddp::loader`].
///
/// All ranks read each epoch in the same steps, as an [`EpochPlan`] cuts it: every item once, equally many steps on every
/// rank, sizes that differ by at most one. Each batch sets the weight of the following backwards to its number of items,
/// which makes the averaged gradient that of all items of the step.
///
/// Ranks must leave an epoch at the same step. A rank that leaves alone ends the job with an error that says so, instead
/// of leaving the others waiting.
///
/// It is also Burn's [`DataLoader`]: each `iter()` is the next epoch; items and progress are counted over all ranks.
/// Clones are the same loader.
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
/// let error = Ddp::spawn(2, |ddp| {
///     let train = ddp.loader(Together).batch_size(1).shuffle(42).build(InMemDataset::new(vec![0; 20]))?;
///     for batch in train.iter() {
///         let _loss = ddp.mean(batch?[0])?; // what backward does: all ranks must come here
///         if ddp.rank() == 1 {
///             break; // a bug
///         }
///     }
///     Ok(ddp.finish()?)
/// });
/// let error = error.unwrap_err().to_string();
/// assert!(error.contains("stopped loader 0 (10 steps) at epoch 0, step 1"), "{error}");
/// ```
pub struct ShardedLoader<O> {
    inner: Arc<Inner<O>>,
}

struct Inner<O> {
    ddp: Ddp,
    id: u64,
    plan: EpochPlan,
    /// The item of the dataset where a slice begins; 0 otherwise.
    first: usize,
    seed: Option<u64>,
    pool: Arc<Pool<O>>,
    /// Shared with the same loader on another device.
    count: Arc<Mutex<Count>>,
}

/// Which epochs were read, and how far. Written when an epoch begins, with each batch, and by `set_epoch` and `resume`.
#[derive(Default)]
pub(super) struct Count {
    /// The epoch that `iter` reads next.
    next: usize,
    /// The epoch that is read, and how many of its items were handed out over all ranks.
    pub(super) at: (usize, usize),
    /// `at` is where an earlier run was, and no epoch was begun since.
    resumed: bool,
    /// The epoch that was begun last.
    last: Option<usize>,
    /// How often the numbers did not grow: two readings of one epoch must not be taken for one.
    repeats: u64,
}

impl Count {
    pub(super) fn resume(&mut self, epoch: usize, read: usize) {
        *self = Count { next: epoch, at: (epoch, read), resumed: true, ..*self };
    }

    /// The epoch `number` begins. Yields how many of its items were read before.
    fn begin(&mut self, number: usize) -> usize {
        let read = if self.resumed && self.at.0 == number { self.at.1 } else { 0 };
        let repeats = self.repeats + u64::from(self.last.is_some_and(|last| number <= last));
        *self =
            Count { next: number.saturating_add(1), at: (number, read), resumed: false, last: Some(number), repeats };
        read
    }
}

impl<O> Clone for ShardedLoader<O> {
    fn clone(&self) -> Self {
        Self { inner: self.inner.clone() }
    }
}

impl<O> std::fmt::Debug for ShardedLoader<O> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Inner { id, plan, seed, .. } = &*self.inner;
        f.debug_struct("ShardedLoader").field("id", id).field("plan", plan).field("seed", seed).finish_non_exhaustive()
    }
}

impl<O: Send + 'static> ShardedLoader<O> {
    pub(super) fn new(ddp: Ddp, id: u64, plan: EpochPlan, seed: Option<u64>, pool: Arc<Pool<O>>) -> Self {
        Self { inner: Arc::new(Inner { ddp, id, plan, first: 0, seed, pool, count: Arc::default() }) }
    }

    /// The epochs with these numbers, one after the other: `train.epochs(0..10)`. All ranks must ask for the same. After a
    /// [`resume`](Self::resume) numbers before the interrupted epoch are passed over.
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
    /// Ddp::spawn(2, |ddp| {
    ///     let train = ddp.loader(Together).batch_size(4).shuffle(42).build(InMemDataset::new((0..100).collect()))?;
    ///     let mut orders = Vec::new();
    ///     for epoch in train.epochs(0..2) {
    ///         assert_eq!(epoch.len(), 13);
    ///         orders.push(epoch.collect::<Result<Vec<_>, _>>()?.concat());
    ///     }
    ///     assert_ne!(orders[0], orders[1]); // no `set_epoch` to forget
    ///     Ok(())
    /// })?;
    /// # Ok::<(), burn_ddp::Error>(())
    /// ```
    pub fn epochs<E: IntoIterator<Item = usize>>(&self, epochs: E) -> Epochs<O, E::IntoIter> {
        Epochs::new(self.clone(), epochs.into_iter())
    }

    /// The next epoch: the one after the last that was begun, or the one that [`set_epoch`](Self::set_epoch) said.
    ///
    /// As Burn's `DataLoader::iter`, with our errors.
    pub fn iter(&self) -> Epoch<O> {
        let mut count = self.count();
        let number = count.next;
        self.begin_with(&mut count, number)
    }

    /// The first of `numbers` that is not before where an earlier run was.
    pub(super) fn begin_next(&self, numbers: &mut impl Iterator<Item = usize>) -> Option<Epoch<O>> {
        let mut count = self.count();
        let first = if count.resumed { count.at.0 } else { 0 };
        let number = numbers.find(|number| *number >= first)?;
        Some(self.begin_with(&mut count, number))
    }

    fn begin_with(&self, count: &mut Count, number: usize) -> Epoch<O> {
        let plan = self.inner.plan.after(count.begin(number));
        Epoch::new(self.clone(), number, self.track(count), plan)
    }

    /// One track per loader and run of growing epochs; both numbers are far from 32 bits.
    fn track(&self, count: &Count) -> u64 {
        count.repeats << 32 | self.inner.id
    }

    /// The first `read` items of an epoch are handed out.
    pub(super) fn note_read(&self, track: u64, epoch: usize, read: usize) {
        let mut count = self.count();
        // Not for an epoch that another one was begun after.
        if count.last == Some(epoch) && self.track(&count) == track && !count.resumed {
            count.at = if read < self.inner.plan.items() { (epoch, read) } else { (count.next, 0) };
        }
    }

    /// The epoch that [`iter`](Self::iter) reads next.
    pub fn epoch(&self) -> usize {
        self.count().next
    }

    /// Makes [`iter`](Self::iter) read `epoch` next, from its beginning. On all ranks. See [`resume`](Self::resume) to go on
    /// within an epoch.
    pub fn set_epoch(&self, epoch: usize) {
        let mut count = self.count();
        *count = Count { next: epoch, at: (epoch, 0), resumed: false, ..*count };
    }

    /// Steps of an epoch, the same on every rank and in every epoch.
    pub fn steps_per_epoch(&self) -> usize {
        self.inner.plan.steps()
    }

    /// Items of a full step over all ranks. The last step of an epoch may have fewer, or up to one per rank more.
    pub fn items_per_step(&self) -> usize {
        self.inner.plan.global_batch()
    }

    /// How an epoch is cut.
    pub fn plan(&self) -> &EpochPlan {
        &self.inner.plan
    }

    /// What this rank reads in `epoch`, as `plan` cuts it.
    pub(super) fn reading(&self, epoch: usize, plan: EpochPlan) -> Reading {
        let (rank, first) = (self.inner.ddp.rank(), self.inner.first);
        let Some(seed) = self.inner.seed else {
            let indices = move |step| plan.reads(step, rank).map(|position| first + position).collect();
            return Reading { batches: plan.steps(), indices: Arc::new(indices) };
        };
        // Of the whole order only this rank's part is kept.
        let order = permutation(plan.items(), seed, epoch as u64);
        let own: Vec<usize> =
            (0..plan.steps()).flat_map(|step| plan.reads(step, rank)).map(|position| first + order[position]).collect();
        // All steps but the last have as many items as the first.
        let before = move |step: usize| step * plan.reads(0, rank).len();
        let indices = move |step| own[before(step)..before(step) + plan.reads(step, rank).len()].to_vec();
        Reading { batches: plan.steps(), indices: Arc::new(indices) }
    }

    pub(super) fn ddp(&self) -> &Ddp {
        &self.inner.ddp
    }

    pub(super) fn id(&self) -> u64 {
        self.inner.id
    }

    pub(super) fn pool(&self) -> &Arc<Pool<O>> {
        &self.inner.pool
    }

    pub(super) fn seed(&self) -> Option<u64> {
        self.inner.seed
    }

    pub(super) fn count(&self) -> std::sync::MutexGuard<'_, Count> {
        self.inner.count.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn sliced(&self, start: usize, end: usize) -> Result<Self, DataError> {
        let Inner { ddp, plan, first, seed, pool, .. } = &*self.inner;
        if start > end || end > plan.items() {
            return Err(DataError::SliceOutOfRange { start, end, items: plan.items() });
        }
        let plan = EpochPlan::new(end - start, plan.world_size(), plan.global_batch())?;
        let (ddp, id) = (ddp.clone(), ddp.state().next_loader_id());
        let (first, seed, pool) = (first + start, *seed, pool.clone());
        Ok(Self { inner: Arc::new(Inner { ddp, id, plan, first, seed, pool, count: Arc::default() }) })
    }
}

impl<O: Send + 'static> DataLoader<O> for ShardedLoader<O> {
    fn iter<'a>(&'a self) -> Box<dyn DataLoaderIterator<O> + 'a> {
        Box::new(AsBurn(ShardedLoader::iter(self)))
    }

    /// Items of the dataset, over all ranks.
    fn num_items(&self) -> usize {
        self.inner.plan.items()
    }

    /// The same loader, counting the same epochs, with batches on `device`.
    fn to_device(&self, device: &Device) -> Arc<dyn DataLoader<O>> {
        let Inner { ddp, id, plan, first, seed, pool, count } = &*self.inner;
        let (ddp, id, plan, first, seed, count) = (ddp.clone(), *id, *plan, *first, *seed, count.clone());
        let pool = Pool::new(pool.source.clone(), device.clone(), pool.num_workers);
        Arc::new(Self { inner: Arc::new(Inner { ddp, id, plan, first, seed, pool, count }) })
    }

    /// A loader of its own for the items `start..end` of the dataset, shared by all ranks as this one. All ranks must
    /// make the same slices; that is not checked. A slice that cannot be read yields the error as its only batch.
    fn slice(&self, start: usize, end: usize) -> Arc<dyn DataLoader<O>> {
        match self.sliced(start, end) {
            Ok(slice) => Arc::new(slice),
            Err(error) => Arc::new(Unreadable(error)),
        }
    }
}
