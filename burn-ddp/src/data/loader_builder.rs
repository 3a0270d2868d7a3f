//! The builder of training and evaluation loaders: Burn's `DataLoaderBuilder` for all ranks together.

use std::fmt::Debug;
use std::marker::PhantomData;
use std::sync::Arc;

use burn::data::dataloader::batcher::Batcher;
use burn::data::dataset::Dataset;
use burn::tensor::Device;

use super::epoch_order::EpochOrder;
use super::item_check::{Describe, Items, describe_by};
use super::prefetch::{DEFAULT_WORKERS, Pool, Source};
use super::sharded_loader::Weigh;
use super::{DataError, EvalLoader, Sampler};
use crate::{Ddp, Result, agreement};

impl Ddp {
    /// Begins a training loader: all ranks together load every item once per epoch, in equally many steps.
    ///
    /// The loader sets the weight of each backward to the number of items in this rank's batch, so that averaged
    /// gradients are exact even if the ranks' batches differ in size.
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
    /// let batches = Ddp::spawn(2, |ddp| {
    ///     let dataset = InMemDataset::new(vec![10, 11, 12, 13, 14, 15, 16]);
    ///     let train = ddp.loader(Together).batch_size(2).build(dataset)?;
    ///     let mut batches = Vec::new();
    ///     for epoch in train.epochs(0..1) {
    ///         for batch in epoch {
    ///             batches.push(batch?);
    ///         }
    ///     }
    ///     Ok(batches)
    /// })?;
    /// assert_eq!(batches[0], [vec![10, 11], vec![14, 15]]); // rank 0
    /// assert_eq!(batches[1], [vec![12, 13], vec![16]]); // rank 1: as many steps
    /// # Ok::<(), burn_ddp::Error>(())
    /// ```
    pub fn loader<I, O, B>(&self, batcher: B) -> LoaderBuilder<I, O>
    where
        B: Batcher<I, O> + 'static,
    {
        LoaderBuilder::new(self, batcher)
    }

    /// Begins an evaluation loader: each rank loads its contiguous share, without padding and, unless the loader
    /// shuffles, in order.
    ///
    /// Ranks may have different numbers of batches, or none: weight sums over ranks by items. The loader does not
    /// change the weights of backwards, and a rank may stop reading at any point.
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
    ///     Ok(f64::from(ddp.sum(sum)?) / f64::from(ddp.sum(items)?)) // rank 3 had no item
    /// })?;
    /// assert_eq!(means, [3.0; 4]);
    /// # Ok::<(), burn_ddp::Error>(())
    /// ```
    pub fn eval_loader<I, O, B>(&self, batcher: B) -> LoaderBuilder<I, O, Evaluation>
    where
        B: Batcher<I, O> + 'static,
    {
        LoaderBuilder::new(self, batcher)
    }
}

/// Builds a loader: a [`ShardedLoader`](super::ShardedLoader) for [`Training`], from [`Ddp::loader`]; an
/// [`EvalLoader`] for [`Evaluation`], from [`Ddp::eval_loader`].
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
/// let steps = Ddp::spawn(2, |ddp| {
///     let train = ddp.loader(Together).batch_size(3).shuffle(42).num_workers(2).drop_last();
///     let train = train.set_device(ddp.device()?.autodiff()).build(InMemDataset::new((0..20).collect()))?;
///     Ok(train.steps_per_epoch())
/// })?;
/// assert_eq!(steps, [3, 3]); // of 6 items each; two items are left out
/// # Ok::<(), burn_ddp::Error>(())
/// ```
#[must_use = "nothing is loaded before `build`"]
pub struct LoaderBuilder<I, O, K = Training> {
    pub(super) ddp: Ddp,
    batcher: Arc<dyn Batcher<I, O>>,
    pub(super) batch: BatchSize,
    /// Weights of batches, for training.
    pub(super) weigh: Option<Weigh<O>>,
    num_workers: usize,
    /// Seed of the order of the items; `None` for the dataset's order.
    pub(super) seed: Option<u64>,
    /// Sampler of the items, for training.
    pub(super) sampler: Option<Arc<dyn Sampler>>,
    /// True if items that do not fill a training step are left out.
    pub(super) drops_last: bool,
    /// Largest number of batches of an epoch, for training.
    pub(super) max_batches: Option<usize>,
    device: Option<Device>,
    /// Text by which the ranks compare items, if they do.
    describe: Option<Describe<I>>,
    kind: PhantomData<K>,
}

/// Marks a loader that goes through a dataset epoch after epoch, in equally many steps on every rank.
#[derive(Debug)]
pub struct Training;

/// Marks a loader that goes through each rank's share once.
#[derive(Debug)]
pub struct Evaluation;

/// Items of a step.
#[derive(Debug, Clone, Copy)]
pub(super) enum BatchSize {
    PerRank(usize),
    Global(usize),
}

impl std::fmt::Display for BatchSize {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            BatchSize::PerRank(items) => write!(f, "{items} per rank"),
            BatchSize::Global(items) => write!(f, "{items} over all ranks"),
        }
    }
}

impl<I, O, K> LoaderBuilder<I, O, K> {
    fn new(ddp: &Ddp, batcher: impl Batcher<I, O> + 'static) -> Self {
        LoaderBuilder {
            ddp: ddp.clone(),
            batcher: Arc::new(batcher),
            batch: BatchSize::PerRank(1),
            weigh: None,
            num_workers: DEFAULT_WORKERS,
            seed: None,
            sampler: None,
            drops_last: false,
            max_batches: None,
            device: None,
            describe: None,
            kind: PhantomData,
        }
    }

    /// Items of each rank's batches; 1 by default. In training a step has this number times the world size, or times
    /// the [logical ranks](crate::Ddp::set_logical_ranks); in evaluation a rank's last batch may have fewer.
    pub fn batch_size(mut self, batch_size: usize) -> Self {
        self.batch = BatchSize::PerRank(batch_size);
        self
    }

    /// Threads that load batches ahead of the loop, in order; 1 by default, and with 0 each batch is loaded when it is
    /// asked for.
    ///
    /// Memory: each worker holds up to three batches that were not yet taken, on the device of the batches. All epochs
    /// use the same threads, which end with the loader. A panic of the dataset or the batcher becomes the error
    /// [`DataError::WorkerPanicked`] of its batch; with 0 workers it unwinds through the loop.
    ///
    /// A batcher on a worker that draws from the device's random generator shares it with the model, so random numbers
    /// do not repeat between runs: derive random numbers from the item, or use 0 workers.
    pub fn num_workers(mut self, num_workers: usize) -> Self {
        self.num_workers = num_workers;
        self
    }

    /// Shuffles the items over all ranks. By default they have the dataset's order. In training every epoch has an
    /// order of its own, which depends on `seed` and the epoch's number; in evaluation each pass has the same order.
    pub fn shuffle(mut self, seed: u64) -> Self {
        self.seed = Some(seed);
        self.sampler = None;
        self
    }

    /// The device of the batches. By default the device of the model that was wrapped last; before the first `wrap`,
    /// [`Ddp::device`].
    ///
    /// In training use a device with autodiff, as the default is: BatchNorm and Dropout as first layers take a batch
    /// without autodiff for inference. In evaluation use one without autodiff.
    pub fn set_device(mut self, device: Device) -> Self {
        self.device = Some(device);
        self
    }

    /// Makes `build` compare the results of `value` for up to 8 items, spread over the dataset: between the ranks, and
    /// between two reads on the same rank. All ranks must call it, or none.
    ///
    /// It finds datasets that draw at random (a split or an order of each rank's own, augmentation inside of `get`),
    /// and files that differ between machines.
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
    ///     let items = if ddp.is_main() { vec![7, 8, 9] } else { vec![7, 9, 8] }; // shuffled by each rank alone
    ///     let error = ddp.loader(Together).check_items(|item| *item).build(InMemDataset::new(items)).err();
    ///     Ok(error.unwrap().to_string())
    /// })?;
    /// assert!(errors[0].contains("item 1 is 8 on rank 0 and 9 on rank 1"), "{}", errors[0]);
    /// # Ok::<(), burn_ddp::Error>(())
    /// ```
    pub fn check_items<E: Debug>(mut self, value: impl Fn(&I) -> E + Send + Sync + 'static) -> Self {
        self.describe = Some(describe_by(value));
        self
    }
}

/// Kind of an evaluation loader, as ranks compare it.
const EVALUATION: &str = "evaluation";

impl<I: 'static, O: Send + 'static, K> LoaderBuilder<I, O, K> {
    /// Compares the settings of all ranks, and returns the number of the loader, the device of its batches and the
    /// order of its items. *Collective*.
    #[track_caller]
    pub(super) fn agree<const N: usize>(
        &mut self,
        kind: &str,
        loader: &str,
        dataset: &dyn Dataset<I>,
        default_of: fn(Device) -> Device,
        more: [(&str, String); N],
    ) -> Result<(u32, Device, EpochOrder)> {
        self.ddp.state().leaves.used_by("a loader");
        let order = EpochOrder::new(dataset.len(), self.seed, self.sampler.take());
        let order_text = order.as_ref().map_or_else(DataError::to_string, |order| order.digest().to_string());
        let default = || self.ddp.state().model_device().map_or_else(|| self.ddp.device(), Ok).map(default_of);
        let device = self.device.take().map_or_else(default, Ok);
        let device = agreement::on_outcome(self.ddp.group(), "build its loader", device)?;
        let items = self.describe.take().map_or_else(Items::default, |describe| Items::read(dataset, &describe));
        let id = self.ddp.state().next_loader_id(kind == EVALUATION);
        let common = [
            ("the kind of loader", kind.to_string()),
            ("the number of the loader", id.to_string()),
            ("the dataset length", dataset.len().to_string()),
            ("the world size", self.ddp.world_size().to_string()),
            ("the number of logical ranks", self.ddp.logical_ranks().to_string()),
            ("the batch size", self.batch.to_string()),
            ("the order of the items", order_text),
        ];
        let settings = common.into_iter().chain(more).map(|(name, value)| (name.to_string(), value));
        let settings: Vec<_> = settings.chain(items.settings).collect();
        match agreement::on_settings(self.ddp.group(), &settings).map_err(DataError::from)? {
            // First reads are equal on all ranks, so that a change in the second read is taken to be on all of them.
            // An error of the sampler is the same on all ranks, too.
            None => match items.changing {
                Some(changing) => Err(changing.into()),
                None => {
                    let order = order?;
                    self.ddp.state().count_loader(kind == EVALUATION);
                    Ok((id, device, order))
                }
            },
            Some(difference) => Err(DataError::LoadersDiffer { loader: format!("{loader} {id}"), difference }.into()),
        }
    }

    pub(super) fn pool(self, dataset: Arc<dyn Dataset<I>>, device: Device) -> Arc<Pool<O>> {
        let source = Source { dataset, batcher: self.batcher };
        Pool::new(Arc::new(source), device, self.num_workers)
    }
}

impl<I: 'static, O: Send + 'static> LoaderBuilder<I, O, Evaluation> {
    /// Builds the loader. *Collective*: all ranks build the same loaders in the same order.
    ///
    /// Each rank passes the same dataset, or its own copy of it. It gets a loader for its share, which may be empty.
    /// Costs two small all-gathers; blocks until all ranks have called it.
    ///
    /// # Errors
    ///
    /// On every rank alike, and the job can go on: [`DataError::LoadersDiffer`] with the settings that differ;
    /// [`DataError::BatchTooSmall`] for a batch size of 0; [`Error::Invalid`](crate::Error::Invalid) that names the
    /// rank if one has no device. [`DataError::Comm`] if a peer failed.
    #[track_caller]
    pub fn build<D: Dataset<I> + 'static>(mut self, dataset: D) -> Result<EvalLoader<O>> {
        let dataset: Arc<dyn Dataset<I>> = Arc::new(dataset);
        let (ddp, items, seed) = (self.ddp.clone(), dataset.len(), self.seed);
        let inference = Device::without_autodiff;
        let (id, device, _) = self.agree(EVALUATION, "evaluation loader", &*dataset, inference, [])?;

        let (BatchSize::PerRank(batch_size) | BatchSize::Global(batch_size)) = self.batch;
        if batch_size == 0 {
            return Err(DataError::BatchTooSmall { global_batch: 0, world: ddp.world_size() }.into());
        }
        Ok(EvalLoader::new(ddp, id, 0..items, batch_size, seed, self.pool(dataset, device)))
    }
}
