//! The training loader: each rank's share of a dataset, epoch after epoch.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use burn::tensor::Device;

use super::deal::Place;
use super::epoch_cursor::EpochCursor;
use super::epoch_order::EpochOrder;
use super::prefetch::Pool;
use super::{DataError, EpochPlan, Position};
use crate::batch_weight::Leaf;
use crate::gradients::OwnRun;
use crate::{Ddp, batch_weight};

/// This rank's share of a training dataset, batch by batch, epoch after epoch; from [`Ddp::loader`].
///
/// All ranks go through each epoch in the same steps, cut by an [`EpochPlan`]: every item once, equally many steps on
/// every rank, batch sizes that differ by at most one. Each batch weighs its backwards by its number of items, or by
/// the function given to [`weigh`](super::LoaderBuilder::weigh), so that the averaged gradient is that of all items of
/// the step. Taking a batch makes no collective; with a sampler the first one of an epoch does, in which the ranks
/// compare what their samplers have drawn.
///
/// All ranks must leave an epoch at the same step. If one rank leaves alone, the other ranks do not hang: the job ends
/// with an error that names the rank.
///
/// It is also Burn's [`DataLoader`](burn::data::dataloader::DataLoader): each `iter()` is the next epoch; items and
/// progress are counted over all ranks. Clones are the same loader.
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
///         let _loss = ddp.mean(f64::from(batch?[0]))?; // what backward does: all ranks must come here
///         if ddp.rank() == 1 {
///             break; // a bug
///         }
///     }
///     Ok(ddp.finish()?)
/// });
/// let error = error.unwrap_err().to_string();
/// assert!(error.contains("stopped loader 0 (10 steps) at epoch 1, step 1"), "{error}");
/// ```
pub struct ShardedLoader<O> {
    inner: Arc<Inner<O>>,
}

/// The weight of a batch.
pub(super) type Weigh<O> = Arc<dyn Fn(&O) -> f64 + Send + Sync>;

struct Inner<O> {
    ddp: Ddp,
    id: u32,
    plan: EpochPlan,
    /// `None` for the number of items.
    weigh: Option<Weigh<O>>,
    order: EpochOrder,
    pool: Arc<Pool<O>>,
    /// Shared with the same loader on another device.
    cursor: Arc<Mutex<EpochCursor>>,
    /// This rank's leaves; without logical ranks, one per rank.
    run: OwnRun,
    /// True if the job has logical ranks.
    is_logical: bool,
}

impl<O> Clone for ShardedLoader<O> {
    fn clone(&self) -> Self {
        Self { inner: self.inner.clone() }
    }
}

impl<O> std::fmt::Debug for ShardedLoader<O> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Inner { id, plan, order, .. } = &*self.inner;
        let mut f = f.debug_struct("ShardedLoader");
        f.field("id", id).field("plan", plan).field("order", &order.digest()).finish_non_exhaustive()
    }
}

impl<O: Send + 'static> ShardedLoader<O> {
    pub(super) fn new(
        ddp: Ddp,
        id: u32,
        plan: EpochPlan,
        weigh: Option<Weigh<O>>,
        order: EpochOrder,
        pool: Arc<Pool<O>>,
    ) -> Self {
        let cursor = Arc::new(Mutex::new(EpochCursor::new(order.digest(), plan)));
        let (run, is_logical) = (ddp.run(), ddp.state().leaves.division().is_some());
        Self { inner: Arc::new(Inner { ddp, id, plan, weigh, order, pool, cursor, run, is_logical }) }
    }

    /// The epoch that [`iter`](Self::iter) begins next.
    pub fn epoch(&self) -> usize {
        self.cursor().next()
    }

    /// Makes [`iter`](Self::iter) begin `epoch` next. Call it on all ranks. To continue within an epoch, see
    /// [`resume`](Self::resume).
    pub fn set_epoch(&self, epoch: usize) {
        self.cursor().set_epoch(epoch);
    }

    /// Steps of an epoch, the same on every rank and in every epoch.
    pub fn steps_per_epoch(&self) -> usize {
        self.inner.plan.steps()
    }

    /// Items of a full step over all ranks. The last step of an epoch may have fewer, or more by less than one per
    /// rank, unless it is [dropped](super::LoaderBuilder::drop_last).
    pub fn items_per_step(&self) -> usize {
        self.inner.plan.global_batch()
    }

    /// Items of an epoch over all ranks; after [`max_batches`](super::LoaderBuilder::max_batches) those of its batches.
    pub fn num_items(&self) -> usize {
        self.inner.plan.items()
    }

    /// Steps and shares of an epoch.
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
    /// Ddp::spawn(2, |ddp| {
    ///     let train = ddp.loader(Together).batch_size(4).build(InMemDataset::new((0..20).collect()))?;
    ///     assert_eq!((train.num_items(), train.items_per_step(), train.steps_per_epoch()), (20, 8, 3));
    ///     assert_eq!(train.plan().share(2, ddp.rank()).len(), 2); // of the last step of 4 items
    ///     Ok(())
    /// })?;
    /// # Ok::<(), burn_ddp::Error>(())
    /// ```
    pub fn plan(&self) -> &EpochPlan {
        &self.inner.plan
    }

    /// True if the weight of a batch is not its number of items, but that of `weigh`.
    #[cfg(feature = "train")]
    pub(crate) fn has_weights(&self) -> bool {
        self.inner.weigh.is_some()
    }

    /// Weight of `batch`, the rank's `share` of a step; `name` names it in an error. It is 0 for a rank without a
    /// share, which has loaded an item of another rank.
    pub(super) fn weight(&self, batch: &O, share: usize, name: impl FnOnce() -> String) -> Result<f64, DataError> {
        let Some(weigh) = self.inner.weigh.as_ref().filter(|_| share > 0) else { return Ok(share as f64) };
        let weight = weigh(batch);
        match batch_weight::check(weight) {
            Ok(()) => Ok(weight),
            Err(reason) => Err(DataError::Weight { what: name(), reason }),
        }
    }

    /// This rank's leaves.
    pub(super) fn run(&self) -> OwnRun {
        self.inner.run
    }

    /// The leaf of a batch of this step, if the job has logical ranks.
    pub(super) fn leaf(&self, place: Place, epoch: usize, step: usize) -> Option<Leaf> {
        let Place { leaf, repeats, ends_step, .. } = place;
        let (group, division) = (self.inner.ddp.group().id(), self.inner.run.division);
        let step = (1 + u64::from(self.inner.id), epoch as u64, step as u64);
        self.inner.is_logical.then_some(Leaf { group, division, step, leaf, counts: !repeats, ends_step })
    }

    pub(super) fn ddp(&self) -> &Ddp {
        &self.inner.ddp
    }

    pub(super) fn id(&self) -> u32 {
        self.inner.id
    }

    pub(super) fn pool(&self) -> &Arc<Pool<O>> {
        &self.inner.pool
    }

    pub(super) fn order(&self) -> &EpochOrder {
        &self.inner.order
    }

    /// The plan of an epoch from `position` on, which ends where it would have without interruption.
    pub(super) fn plan_from(&self, position: &Position) -> EpochPlan {
        let plan = position.end.map_or(self.inner.plan, |end| self.inner.plan.of_first(end.min(position.order.items)));
        plan.after(position.consumed)
    }

    pub(super) fn cursor(&self) -> MutexGuard<'_, EpochCursor> {
        self.inner.cursor.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The same loader, counting the same epochs, with batches on `device`.
    pub(super) fn on_device(&self, device: &Device) -> Self {
        let Inner { ddp, id, plan, weigh, order, pool, cursor, run, is_logical } = &*self.inner;
        let (ddp, weigh, pool, cursor) = (ddp.clone(), weigh.clone(), pool.on_device(device), cursor.clone());
        let (id, plan, order, run, is_logical) = (*id, *plan, order.clone(), *run, *is_logical);
        Self { inner: Arc::new(Inner { ddp, id, plan, weigh, order, pool, cursor, run, is_logical }) }
    }

    /// A further loader for the items `start..end` of the dataset; with a sampler, for the items at these places of
    /// each epoch's order.
    pub(super) fn sliced(&self, start: usize, end: usize) -> Result<Self, DataError> {
        let Inner { ddp, plan, weigh, order, pool, .. } = &*self.inner;
        if start > end || end > plan.items() {
            return Err(DataError::SliceOutOfRange { start, end, items: plan.items() });
        }
        let plan = plan.of_items(end - start)?;
        let (ddp, id) = (ddp.clone(), ddp.state().next_loader_id(false));
        ddp.state().count_loader(false);
        let order = order.slice(start, plan.items());
        Ok(Self::new(ddp, id, plan, weigh.clone(), order, pool.clone()))
    }
}
