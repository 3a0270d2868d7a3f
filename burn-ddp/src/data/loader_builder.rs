//! `ddp.loader(batcher)` and `ddp.eval_loader(batcher)`: as Burn's `DataLoaderBuilder`, for all ranks together.

use std::sync::Arc;

use burn::data::dataloader::batcher::Batcher;
use burn::data::dataset::Dataset;
use burn::tensor::Device;

use super::agree::{Facts, agree};
use super::eval_loader::EvalLoader;
use super::sharded_loader::ShardedLoader;
use super::epoch_plan::EpochPlan;
use super::prefetch::{Pool, Source};
use super::{DataError, ShardedDataset};
use crate::{Ddp, Result};

impl Ddp {
    /// Begins a training loader: all ranks together read every item once per epoch, in equally many steps.
    ///
    /// It sets the weight of each backward to the items of this rank's batch, so that gradients are exact however the
    /// items divide.
    ///
    /// ```
    /// use burn::data::{dataloader::batcher::Batcher, dataset::InMemDataset};
    /// use burn::tensor::Device;
    /// use burn_ddp::prelude::*;
    ///
    /// struct Together;
    ///
    /// impl Batcher<u32, Vec<u32>> for Together {
    ///     fn batch(&self, items: Vec<u32>, _device: &Device) -> Vec<u32> {
    ///         items
    ///     }
    /// }
    ///
    /// let read = Ddp::spawn(2, |ddp| {
    ///     let dataset = InMemDataset::new(vec![10, 11, 12, 13, 14, 15, 16]);
    ///     let train = ddp.loader(Together).batch_size(2).build(dataset)?;
    ///     let mut read = Vec::new();
    ///     for epoch in train.epochs(0..1) {
    ///         for batch in epoch {
    ///             read.push(batch?);
    ///         }
    ///     }
    ///     Ok(read)
    /// })?;
    /// assert_eq!(read[0], [vec![10, 11], vec![14, 15]]); // rank 0
    /// assert_eq!(read[1], [vec![12, 13], vec![16]]); // rank 1: as many steps
    /// # Ok::<(), burn_ddp::Error>(())
    /// ```
    pub fn loader<I, O, B>(&self, batcher: B) -> LoaderBuilder<I, O>
    where
        B: Batcher<I, O> + 'static,
    {
        LoaderBuilder { common: Common::new(self, batcher), batch: Batch::PerRank(1), seed: None }
    }

    /// Begins an evaluation loader: each rank reads its contiguous share, in order and without padding.
    ///
    /// Ranks may have different numbers of batches, or none: whatever is summed over them must be weighted by items.
    /// It leaves the weights of backwards alone, and ranks may leave it at any point.
    ///
    /// ```
    /// # use burn::{data::dataloader::batcher::Batcher, data::dataset::InMemDataset, tensor::Device};
    /// # struct Together;
    /// # impl Batcher<u32, Vec<u32>> for Together {
    /// #     fn batch(&self, items: Vec<u32>, _: &Device) -> Vec<u32> {
    /// #         items
    /// #     }
    /// # }
    /// use burn_ddp::prelude::*;
    ///
    /// let means = Ddp::spawn(4, |ddp| {
    ///     let test = ddp.eval_loader(Together).batch_size(2).build(InMemDataset::new(vec![1, 2, 6]))?;
    ///     let (mut sum, mut items) = (0, 0);
    ///     for batch in test.iter() {
    ///         let batch = batch?;
    ///         sum += batch.iter().sum::<u32>();
    ///         items += batch.len() as u32;
    ///     }
    ///     Ok(ddp.sum(sum)? / ddp.sum(items)?) // rank 3 had nothing to read
    /// })?;
    /// assert_eq!(means, [3.0; 4]);
    /// # Ok::<(), burn_ddp::Error>(())
    /// ```
    pub fn eval_loader<I, O, B>(&self, batcher: B) -> EvalLoaderBuilder<I, O>
    where
        B: Batcher<I, O> + 'static,
    {
        EvalLoaderBuilder { common: Common::new(self, batcher), batch_size: 1 }
    }

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

/// What both kinds of loader have.
struct Common<I, O> {
    ddp: Ddp,
    batcher: Arc<dyn Batcher<I, O>>,
    num_workers: usize,
    device: Option<Device>,
}

impl<I, O> Common<I, O> {
    fn new(ddp: &Ddp, batcher: impl Batcher<I, O> + 'static) -> Self {
        Common { ddp: ddp.clone(), batcher: Arc::new(batcher), num_workers: 0, device: None }
    }

    fn device(&self) -> Result<Device> {
        self.device.clone().map_or_else(|| self.ddp.device(), Ok)
    }
}

impl<I: 'static, O: Send + 'static> Common<I, O> {
    fn pool(self, dataset: Arc<dyn Dataset<I>>) -> Result<Arc<Pool<O>>> {
        let device = self.device()?;
        let source = Source { dataset, batcher: self.batcher };
        Ok(Pool::new(Arc::new(source), device, self.num_workers))
    }
}

/// How large a step is.
#[derive(Debug, Clone, Copy)]
enum Batch {
    PerRank(usize),
    Global(usize),
}

impl std::fmt::Display for Batch {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Batch::PerRank(items) => write!(f, "{items} per rank"),
            Batch::Global(items) => write!(f, "{items} over all ranks"),
        }
    }
}

/// Builds a [`ShardedLoader`]; from [`Ddp::loader`].
#[must_use = "nothing is loaded before `build`"]
pub struct LoaderBuilder<I, O> {
    common: Common<I, O>,
    batch: Batch,
    seed: Option<u64>,
}

impl<I: 'static, O: Send + 'static> LoaderBuilder<I, O> {
    /// How many items *each rank* reads per step; a step is this many times the world size. 1 unless set.
    pub fn batch_size(mut self, batch_size: usize) -> Self {
        self.batch = Batch::PerRank(batch_size);
        self
    }

    /// How many items *all ranks together* read per step, instead of [`batch_size`](Self::batch_size); the last of the
    /// two calls counts. It need not divide by the world size. Steps then hold the same items at any world size.
    pub fn global_batch_size(mut self, global_batch_size: usize) -> Self {
        self.batch = Batch::Global(global_batch_size);
        self
    }

    /// Gives every epoch an order of its own, over all ranks, that depends on `seed` and the epoch's number. Without,
    /// every epoch has the dataset's order.
    pub fn shuffle(mut self, seed: u64) -> Self {
        self.seed = Some(seed);
        self
    }

    /// How many threads load batches ahead, in order. 0, the default, loads each when it is asked for. A worker holds up
    /// to three batches that were not yet taken.
    pub fn num_workers(mut self, num_workers: usize) -> Self {
        self.common.num_workers = num_workers;
        self
    }

    /// Where batches are made; [`Ddp::device`] unless set.
    pub fn set_device(mut self, device: Device) -> Self {
        self.common.device = Some(device);
        self
    }

    /// Builds the loader. *Collective*: all ranks build the same loaders in the same order.
    ///
    /// Each rank passes the same dataset, or its own copy of it, and the same settings but for workers and device. Each
    /// holds a loader for its share after. One small all-gather; blocks until all ranks have come.
    ///
    /// # Errors
    ///
    /// On every rank alike, and the job can go on:
    /// [`DataError::LoadersDiffer`] names what the ranks set differently; [`DataError::EmptyDataset`],
    /// [`DataError::DatasetTooSmall`] and [`DataError::BatchTooSmall`] where some rank would be without an item.
    /// [`DataError::Comm`] if a peer failed.
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
    /// let errors = Ddp::spawn(2, |ddp| {
    ///     let items = vec![0; 10 + ddp.rank()]; // a bug: each rank has another dataset
    ///     let error = ddp.loader(Together).batch_size(2).build(InMemDataset::new(items)).err();
    ///     Ok(error.unwrap().to_string())
    /// })?;
    /// assert!(errors[0].contains("the dataset length is 10 on rank 0 and 11 on rank 1"));
    /// assert_eq!(errors[0], errors[1]);
    /// # Ok::<(), burn_ddp::Error>(())
    /// ```
    #[track_caller]
    pub fn build<D: Dataset<I> + 'static>(self, dataset: D) -> Result<ShardedLoader<O>> {
        let dataset: Arc<dyn Dataset<I>> = Arc::new(dataset);
        let ddp = self.common.ddp.clone();
        let (world, id, items) = (ddp.world_size(), ddp.state().next_loader_id(), dataset.len());
        let seed = self.seed.map_or("off".to_string(), |seed| format!("with seed {seed}"));
        let facts = facts("training", id, items, world, self.batch, [("shuffling", seed)]);
        agree(&ddp, &format!("loader {id}"), &facts)?;

        // From here on all ranks know the same, so an error is everybody's.
        let global_batch = match self.batch {
            Batch::PerRank(items) => items.saturating_mul(world),
            Batch::Global(items) => items,
        };
        let plan = EpochPlan::new(items, world, global_batch).map_err(crate::Error::from)?;
        Ok(ShardedLoader::new(ddp, id, plan, self.seed, self.common.pool(dataset)?))
    }
}

/// Builds an [`EvalLoader`]; from [`Ddp::eval_loader`].
#[must_use = "nothing is loaded before `build`"]
pub struct EvalLoaderBuilder<I, O> {
    common: Common<I, O>,
    batch_size: usize,
}

impl<I: 'static, O: Send + 'static> EvalLoaderBuilder<I, O> {
    /// How many items each rank's batches have, but for its last one. 1 unless set.
    pub fn batch_size(mut self, batch_size: usize) -> Self {
        self.batch_size = batch_size;
        self
    }

    /// How many threads load batches ahead, in order. 0, the default, loads each when it is asked for.
    pub fn num_workers(mut self, num_workers: usize) -> Self {
        self.common.num_workers = num_workers;
        self
    }

    /// Where batches are made; [`Ddp::device`] unless set.
    pub fn set_device(mut self, device: Device) -> Self {
        self.common.device = Some(device);
        self
    }

    /// Builds the loader. *Collective*: all ranks build the same loaders in the same order.
    ///
    /// Each rank passes the same dataset, or its own copy of it. Each holds a loader for its share after, which may be
    /// empty. One small all-gather; blocks until all ranks have come.
    ///
    /// # Errors
    ///
    /// On every rank alike, and the job can go on: [`DataError::LoadersDiffer`] names what the ranks set differently;
    /// [`DataError::BatchTooSmall`] for batches of no item. [`DataError::Comm`] if a peer failed.
    #[track_caller]
    pub fn build<D: Dataset<I> + 'static>(self, dataset: D) -> Result<EvalLoader<O>> {
        let dataset: Arc<dyn Dataset<I>> = Arc::new(dataset);
        let ddp = self.common.ddp.clone();
        let (world, id, items) = (ddp.world_size(), ddp.state().next_loader_id(), dataset.len());
        let facts = facts("evaluation", id, items, world, Batch::PerRank(self.batch_size), []);
        agree(&ddp, &format!("evaluation loader {id}"), &facts)?;

        if self.batch_size == 0 {
            return Err(DataError::BatchTooSmall { global_batch: 0, world }.into());
        }
        let batch_size = self.batch_size;
        Ok(EvalLoader::new(ddp, id, 0..items, batch_size, self.common.pool(dataset)?))
    }
}

fn facts<const N: usize>(
    kind: &str,
    id: u64,
    items: usize,
    world: usize,
    batch: Batch,
    more: [(&str, String); N],
) -> Facts {
    let common = [
        ("the kind of loader", kind.to_string()),
        ("the number of the loader", id.to_string()),
        ("the dataset length", items.to_string()),
        ("the world size", world.to_string()),
        ("the batch size", batch.to_string()),
    ];
    common.into_iter().chain(more).map(|(name, value)| (name.to_string(), value)).collect()
}
