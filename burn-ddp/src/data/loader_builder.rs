//! The builder of both loaders, as Burn's `DataLoaderBuilder` for all ranks together.

use std::sync::Arc;

use burn::data::dataloader::batcher::Batcher;
use burn::data::dataset::Dataset;
use burn::tensor::Device;

use super::prefetch::{Pool, Source};
use super::sharded_loader::Weigh;
use super::{DataError, EpochPlan, EvalLoader, ShardedLoader};
use crate::{Ddp, Result, agreement};

impl Ddp {
    /// Begins a training loader: all ranks together load every item once per epoch, in equally many steps.
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
        LoaderBuilder::new(self, batcher, Training { seed: None })
    }

    /// Begins an evaluation loader: each rank loads its contiguous share, in order and without padding.
    ///
    /// Ranks may have different numbers of batches, or none: weight by items what is summed over ranks.
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
    ///     Ok(ddp.sum(sum)? / ddp.sum(items)?) // rank 3 had no item
    /// })?;
    /// assert_eq!(means, [3.0; 4]);
    /// # Ok::<(), burn_ddp::Error>(())
    /// ```
    pub fn eval_loader<I, O, B>(&self, batcher: B) -> LoaderBuilder<I, O, Evaluation>
    where
        B: Batcher<I, O> + 'static,
    {
        LoaderBuilder::new(self, batcher, Evaluation)
    }
}

/// Builds a loader: a [`ShardedLoader`] for [`Training`], from [`Ddp::loader`]; an [`EvalLoader`] for [`Evaluation`],
/// from [`Ddp::eval_loader`].
#[must_use = "nothing is loaded before `build`"]
pub struct LoaderBuilder<I, O, K = Training> {
    ddp: Ddp,
    batcher: Arc<dyn Batcher<I, O>>,
    batch: BatchSize,
    /// Weights of batches, for training.
    weigh: Option<Weigh<O>>,
    num_workers: usize,
    device: Option<Device>,
    kind: K,
}

/// The kind of loader that goes through a dataset epoch after epoch, in equally many steps on every rank.
#[derive(Debug)]
pub struct Training {
    seed: Option<u64>,
}

/// The kind of loader that goes through each rank's share once, in order.
#[derive(Debug)]
pub struct Evaluation;

/// Items of a step.
#[derive(Debug, Clone, Copy)]
enum BatchSize {
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
    fn new(ddp: &Ddp, batcher: impl Batcher<I, O> + 'static, kind: K) -> Self {
        let (ddp, batcher, batch) = (ddp.clone(), Arc::new(batcher), BatchSize::PerRank(1));
        LoaderBuilder { ddp, batcher, batch, weigh: None, num_workers: 0, device: None, kind }
    }

    /// Items of each rank's batches; 1 by default. In training a step has this many times the world size; in evaluation
    /// a rank's last batch may have fewer.
    pub fn batch_size(mut self, batch_size: usize) -> Self {
        self.batch = BatchSize::PerRank(batch_size);
        self
    }

    /// Threads that load batches ahead, in order; with 0, the default, each batch is loaded when it is asked for. A
    /// worker holds up to three batches that were not yet taken.
    pub fn num_workers(mut self, num_workers: usize) -> Self {
        self.num_workers = num_workers;
        self
    }

    /// The device of the batches; [`Ddp::device`] by default.
    pub fn set_device(mut self, device: Device) -> Self {
        self.device = Some(device);
        self
    }
}

impl<I: 'static, O: Send + 'static, K> LoaderBuilder<I, O, K> {
    /// Compares the settings of all ranks, and returns the number of the loader and the device of its batches.
    /// *Collective*.
    #[track_caller]
    fn agree<const N: usize>(
        &mut self,
        kind: &str,
        loader: &str,
        items: usize,
        more: [(&str, String); N],
    ) -> Result<(u32, Device)> {
        let device = self.device.take().map_or_else(|| self.ddp.device(), Ok);
        let device = agreement::on_outcome(self.ddp.group(), "build its loader", device)?;
        let id = self.ddp.state().next_loader_id();
        let common = [
            ("the kind of loader", kind.to_string()),
            ("the number of the loader", id.to_string()),
            ("the dataset length", items.to_string()),
            ("the world size", self.ddp.world_size().to_string()),
            ("the batch size", self.batch.to_string()),
        ];
        let settings: Vec<_> = common.into_iter().chain(more).map(|(name, value)| (name.to_string(), value)).collect();
        match agreement::on_settings(self.ddp.group(), &settings).map_err(DataError::from)? {
            None => Ok((id, device)),
            Some(difference) => Err(DataError::LoadersDiffer { loader: format!("{loader} {id}"), difference }.into()),
        }
    }

    fn pool(self, dataset: Arc<dyn Dataset<I>>, device: Device) -> Arc<Pool<O>> {
        let source = Source { dataset, batcher: self.batcher };
        Pool::new(Arc::new(source), device, self.num_workers)
    }
}

impl<I: 'static, O: Send + 'static> LoaderBuilder<I, O, Training> {
    /// Items of *all ranks together* per step, instead of [`batch_size`](Self::batch_size); the last of the two calls
    /// counts. It need not divide by the world size. Steps then hold the same items at any world size, but that a
    /// last step of fewer items than ranks joins the one before.
    pub fn global_batch_size(mut self, global_batch_size: usize) -> Self {
        self.batch = BatchSize::Global(global_batch_size);
        self
    }

    /// Gives every epoch an order of its own, over all ranks, that depends on `seed` and the epoch's number. By default
    /// every epoch has the dataset's order.
    pub fn shuffle(mut self, seed: u64) -> Self {
        self.kind.seed = Some(seed);
        self
    }

    /// Weighs each batch by what `weight` returns for it, instead of by its number of items: its number of *tokens*
    /// where the loss is a mean over tokens. On all ranks.
    ///
    /// The averaged gradient is then that of the mean over all tokens of a step, over ranks and micro-batches, as on
    /// one rank. `weight` runs when the batch is handed out, on the caller's thread: return a number that the batcher
    /// counted, since reading one from a tensor waits for the device. 0 means that the batch counts nothing (it is all
    /// padding); other weights are between 1e-6 and 1e15, or the batch is the error [`DataError::Weight`].
    ///
    /// ```
    /// use burn::data::{dataloader::batcher::Batcher, dataset::InMemDataset};
    /// use burn::nn::{Linear, LinearConfig};
    /// use burn::prelude::*;
    /// use burn_ddp::prelude::*;
    ///
    /// struct Padded;
    /// struct Texts {
    ///     tokens: usize,
    /// }
    ///
    /// impl Batcher<usize, Texts> for Padded {
    ///     fn batch(&self, lengths: Vec<usize>, _device: &Device) -> Texts {
    ///         Texts { tokens: lengths.iter().sum() } // and the padded tensor
    ///     }
    /// }
    ///
    /// let gradients = Ddp::spawn(2, |ddp| {
    ///     let device = ddp.device()?.autodiff();
    ///     let model: Linear = ddp.wrap(LinearConfig::new(1, 1).init(&device))?;
    ///     let train = ddp.loader(Padded).weigh(|texts: &Texts| texts.tokens as f64);
    ///     let train = train.build(InMemDataset::new(vec![3, 1]))?; // rank 0 has 3 tokens, rank 1 has 1
    ///     let mut gradients = Vec::new();
    ///     for texts in train.iter() {
    ///         let x = Tensor::<2>::full([texts?.tokens, 1], ddp.rank() as f64, &device);
    ///         let grads = model.forward(x).mean().backward(); // a mean over this rank's tokens
    ///         gradients.push(model.weight.base().grad(&grads).unwrap().into_scalar::<f32>());
    ///     }
    ///     Ok(gradients)
    /// })?;
    /// assert_eq!(gradients, [[0.25], [0.25]]); // of four tokens one has x = 1
    /// # Ok::<(), burn_ddp::Error>(())
    /// ```
    pub fn weigh(mut self, weight: impl Fn(&O) -> f64 + Send + Sync + 'static) -> Self {
        self.weigh = Some(Arc::new(weight));
        self
    }

    /// Builds the loader. *Collective*: all ranks build the same loaders in the same order.
    ///
    /// Each rank passes the same dataset, or its own copy of it, and the same settings but for workers and device.
    /// After it each has a loader for its share. Two small all-gathers; blocks until all ranks have called it.
    ///
    /// # Errors
    ///
    /// On every rank alike, and the job can go on: [`DataError::LoadersDiffer`] with the settings that differ;
    /// [`DataError::EmptyDataset`], [`DataError::DatasetTooSmall`] and [`DataError::BatchTooSmall`] where a rank would
    /// be without an item; [`Error::Invalid`](crate::Error::Invalid) that names the rank if one has no device.
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
    pub fn build<D: Dataset<I> + 'static>(mut self, dataset: D) -> Result<ShardedLoader<O>> {
        let dataset: Arc<dyn Dataset<I>> = Arc::new(dataset);
        let (ddp, items, seed) = (self.ddp.clone(), dataset.len(), self.kind.seed);
        let shuffling = seed.map_or("off".to_string(), |seed| format!("with seed {seed}"));
        let weights = if self.weigh.is_some() { "the batch" } else { "its number of items" };
        let more = [("shuffling", shuffling), ("the source of a batch's weight", weights.to_string())];
        let (id, device) = self.agree("training", "loader", items, more)?;

        // All ranks have the same settings: from here on they get the same errors.
        let global_batch = match self.batch {
            BatchSize::PerRank(items) => items.saturating_mul(ddp.world_size()),
            BatchSize::Global(items) => items,
        };
        let plan = EpochPlan::new(items, ddp.world_size(), global_batch)?;
        let weigh = self.weigh.take();
        Ok(ShardedLoader::new(ddp, id, plan, weigh, seed, self.pool(dataset, device)))
    }
}

impl<I: 'static, O: Send + 'static> LoaderBuilder<I, O, Evaluation> {
    /// Builds the loader. *Collective*: all ranks build the same loaders in the same order.
    ///
    /// Each rank passes the same dataset, or its own copy of it. After it each has a loader for its share, which may be
    /// empty. Two small all-gathers; blocks until all ranks have called it.
    ///
    /// # Errors
    ///
    /// On every rank alike, and the job can go on: [`DataError::LoadersDiffer`] with the settings that differ;
    /// [`DataError::BatchTooSmall`] for a batch size of 0; [`Error::Invalid`](crate::Error::Invalid) that names the
    /// rank if one has no device. [`DataError::Comm`] if a peer failed.
    #[track_caller]
    pub fn build<D: Dataset<I> + 'static>(mut self, dataset: D) -> Result<EvalLoader<O>> {
        let dataset: Arc<dyn Dataset<I>> = Arc::new(dataset);
        let (ddp, items) = (self.ddp.clone(), dataset.len());
        let (id, device) = self.agree("evaluation", "evaluation loader", items, [])?;

        let (BatchSize::PerRank(batch_size) | BatchSize::Global(batch_size)) = self.batch;
        if batch_size == 0 {
            return Err(DataError::BatchTooSmall { global_batch: 0, world: ddp.world_size() }.into());
        }
        Ok(EvalLoader::new(ddp, id, 0..items, batch_size, self.pool(dataset, device)))
    }
}
