//! The evaluation loader: each rank its part, once, in order.

use std::ops::Range;
use std::sync::Arc;

use burn::data::dataloader::{DataLoader, DataLoaderIterator, Progress};
use burn::data::dataset::DatasetError;
use burn::tensor::Device;

use super::DataError;
use super::epoch_plan::share;
use super::burn_data_loader::Unreadable;
use super::prefetch::{Pass, Pool, Reading};
use crate::Ddp;

/// This rank's share of an evaluation dataset, batch by batch; from [`Ddp::eval_loader`].
///
/// Shares are contiguous and in rank order, so results gathered from all ranks are in the order of the dataset. No item
/// is repeated; a rank may have fewer batches than another, or none. It is also Burn's [`DataLoader`]. Clones are the
/// same loader.
pub struct EvalLoader<O> {
    inner: Arc<Inner<O>>,
}

struct Inner<O> {
    ddp: Ddp,
    id: u64,
    /// The items of the dataset that all ranks together read.
    items: Range<usize>,
    /// Those that this rank reads.
    own: Range<usize>,
    batch_size: usize,
    pool: Arc<Pool<O>>,
}

impl<O> Clone for EvalLoader<O> {
    fn clone(&self) -> Self {
        Self { inner: self.inner.clone() }
    }
}

impl<O> std::fmt::Debug for EvalLoader<O> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Inner { id, items, own, batch_size, .. } = &*self.inner;
        let mut f = f.debug_struct("EvalLoader");
        f.field("id", id)
            .field("items", items)
            .field("own", own)
            .field("batch_size", batch_size)
            .finish_non_exhaustive()
    }
}

impl<O: Send + 'static> EvalLoader<O> {
    pub(super) fn new(ddp: Ddp, id: u64, items: Range<usize>, batch_size: usize, pool: Arc<Pool<O>>) -> Self {
        let share = share(items.len(), ddp.rank(), ddp.world_size());
        let own = items.start + share.start..items.start + share.end;
        Self { inner: Arc::new(Inner { ddp, id, items, own, batch_size, pool }) }
    }

    /// This rank's batches, from the first on.
    pub fn iter(&self) -> EvalBatches<O> {
        EvalBatches { loader: self.clone(), pass: None, taken: 0, over: false }
    }

    /// How many batches this rank has; may be 0.
    pub fn len(&self) -> usize {
        self.inner.own.len().div_ceil(self.inner.batch_size)
    }

    /// Whether this rank has no batch.
    pub fn is_empty(&self) -> bool {
        self.inner.own.is_empty()
    }

    /// The items of the dataset that this rank reads.
    pub fn share(&self) -> Range<usize> {
        self.inner.own.clone()
    }

    fn reading(&self) -> Reading {
        let (own, batch_size) = (self.inner.own.clone(), self.inner.batch_size);
        let indices = move |batch| batch_of(&own, batch_size, batch).collect();
        Reading { batches: self.len(), indices: Arc::new(indices) }
    }
}

/// The items of a batch; empty, at the end, past the last.
fn batch_of(own: &Range<usize>, batch_size: usize, batch: usize) -> Range<usize> {
    let at = |batch: usize| own.start.saturating_add(batch.saturating_mul(batch_size)).min(own.end);
    at(batch)..at(batch + 1)
}

/// The batches of an [`EvalLoader`] on this rank, in order.
///
/// Yields an error in the place of a batch that could not be loaded.
pub struct EvalBatches<O: Send + 'static> {
    loader: EvalLoader<O>,
    /// Begun with the first batch.
    pass: Option<Pass<O>>,
    taken: usize,
    over: bool,
}

impl<O: Send + 'static> EvalBatches<O> {
    fn load(&mut self) -> Result<O, DataError> {
        let batch = self.taken;
        self.taken += 1;
        let pass = match &mut self.pass {
            Some(pass) => pass,
            None => {
                let started = self.loader.inner.pool.start(self.loader.reading());
                let pass =
                    started.map_err(|(worker, error)| DataError::WorkerNotStarted { worker, source: error.into() })?;
                self.pass.insert(pass)
            }
        };
        let Inner { ddp, id, .. } = &*self.loader.inner;
        let timeout = ddp.world().options().timeout;
        match pass.next(timeout, || ddp.world().check()) {
            Some(loaded) => loaded.map_err(|failure| {
                let (batches, rank) = (self.loader.len(), ddp.rank());
                let what = format!("batch {} of {batches} of evaluation loader {id} on rank {rank}", batch + 1);
                DataError::from_failure(what, failure, timeout)
            }),
            None => unreachable!("a pass has as many batches as its loader"),
        }
    }
}

impl<O: Send + 'static> Iterator for EvalBatches<O> {
    type Item = Result<O, DataError>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.over || self.taken == self.loader.len() {
            self.pass = None; // The workers are free for the next reading.
            return None;
        }
        let loaded = self.load();
        self.over = match &loaded {
            Ok(_) | Err(DataError::Dataset { .. } | DataError::WorkerPanicked { .. }) => false,
            Err(_) => true,
        };
        Some(loaded)
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        let left = if self.over { 0 } else { self.loader.len() - self.taken };
        (left.min(1), Some(left))
    }
}

impl<O: Send + 'static> DataLoader<O> for EvalLoader<O> {
    fn iter<'a>(&'a self) -> Box<dyn DataLoaderIterator<O> + 'a> {
        Box::new(AsBurn(EvalLoader::iter(self)))
    }

    /// Items of the dataset, over all ranks.
    fn num_items(&self) -> usize {
        self.inner.items.len()
    }

    fn to_device(&self, device: &Device) -> Arc<dyn DataLoader<O>> {
        let Inner { ddp, id, items, batch_size, pool, .. } = &*self.inner;
        let pool = Pool::new(pool.source.clone(), device.clone(), pool.num_workers);
        Arc::new(Self::new(ddp.clone(), *id, items.clone(), *batch_size, pool))
    }

    /// A loader for the items `start..end` of the dataset, shared by all ranks as this one. A slice beyond the dataset
    /// yields the error as its only batch.
    fn slice(&self, start: usize, end: usize) -> Arc<dyn DataLoader<O>> {
        let Inner { ddp, id, items, batch_size, pool, .. } = &*self.inner;
        if start > end || end > items.len() {
            return Arc::new(Unreadable(DataError::SliceOutOfRange { start, end, items: items.len() }));
        }
        let items = items.start + start..items.start + end;
        Arc::new(Self::new(ddp.clone(), *id, items, *batch_size, pool.clone()))
    }
}

/// For Burn's `DataLoader`: the same batches with errors as Burn's.
struct AsBurn<O: Send + 'static>(EvalBatches<O>);

impl<O: Send + 'static> Iterator for AsBurn<O> {
    type Item = Result<O, DatasetError>;

    fn next(&mut self) -> Option<Self::Item> {
        self.0.next().map(|batch| batch.map_err(DataError::into_burn))
    }
}

impl<O: Send + 'static> DataLoaderIterator<O> for AsBurn<O> {
    /// Over all ranks, as if the others were as far as this one.
    fn progress(&self) -> Progress {
        let Inner { items, own, batch_size, .. } = &*self.0.loader.inner;
        let done = batch_of(own, *batch_size, self.0.taken).start - own.start;
        let (total, done) = (items.len() as u128, done as u128);
        let processed = (total * done).checked_div(own.len() as u128).unwrap_or(total);
        Progress::new(processed as usize, items.len(), Some("items".to_string()))
    }
}
