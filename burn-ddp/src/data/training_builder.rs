//! Settings of training loaders, and building one.

use std::sync::Arc;

use burn::data::dataset::Dataset;
use burn::tensor::Device;

use super::loader_builder::BatchSize;
use super::{DataError, EpochPlan, LoaderBuilder, Sampler, ShardedLoader, Training};
use crate::Result;

impl<I: 'static, O: Send + 'static> LoaderBuilder<I, O, Training> {
    /// Items of *all ranks together* per step, instead of [`batch_size`](Self::batch_size); the last of the two calls
    /// counts. The number need not be divisible by the world size. Steps then hold the same items at any world size,
    /// with one exception: a last step of fewer items than ranks joins the step before.
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
    /// for ranks in [2, 3] {
    ///     Ddp::spawn(ranks, |ddp| {
    ///         let dataset = InMemDataset::new((0..20).collect());
    ///         let train = ddp.loader(Together).global_batch_size(10).build(dataset)?;
    ///         Ok(assert_eq!(train.steps_per_epoch(), 2)) // of the same ten items
    ///     })?;
    /// }
    /// # Ok::<(), burn_ddp::Error>(())
    /// ```
    pub fn global_batch_size(mut self, global_batch_size: usize) -> Self {
        self.batch = BatchSize::Global(global_batch_size);
        self
    }

    /// Takes the items of each epoch from `sampler`, the same one on all ranks. If both this and
    /// [`shuffle`](Self::shuffle) are called, the last call counts. `build` compares the order of the first epoch
    /// between the ranks.
    ///
    /// # Example
    ///
    /// As in [`Sampler`].
    pub fn sampler(mut self, sampler: impl Sampler + 'static) -> Self {
        self.sampler = Some(Arc::new(sampler));
        self.seed = None;
        self
    }

    /// Leaves out the items at the end of each epoch's order that do not fill a step; if the loader shuffles, these are
    /// different items in every epoch. By default no item is left out, and the last step may give a rank as few as one
    /// item.
    ///
    /// Use it for layers that need full batches (BatchNorm cannot train on one item); averaged gradients are exact
    /// without it.
    pub fn drop_last(mut self) -> Self {
        self.drops_last = true;
        self
    }

    /// Ends each epoch after `max_batches` batches of each rank (with logical ranks: steps), or with its last item:
    /// Lightning's `limit_train_batches`, Keras' `steps_per_epoch`. The same on all ranks. By default an epoch has all
    /// items.
    ///
    /// Each epoch has the first items of its order, so with [`shuffle`](Self::shuffle) other items in every epoch. The
    /// last batch completes an accumulation. An epoch that is [resumed](ShardedLoader::resume) has the same items as
    /// without interruption, on any number of ranks and with any batch size; later epochs have `max_batches` batches of
    /// the present size. `epoch.take(n)` instead takes n batches after the resume, too.
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
    /// let train = |ddp: &Ddp| {
    ///     let train = ddp.loader(Together).batch_size(2).max_batches(5);
    ///     train.build(InMemDataset::new((0..100).collect()))
    /// };
    /// let positions = Ddp::spawn(2, |ddp| {
    ///     let train = train(&ddp)?;
    ///     assert_eq!((train.steps_per_epoch(), train.num_items()), (5, 20));
    ///     let _interrupted = train.iter().take(2).collect::<Result<Vec<_>, _>>()?; // 8 items
    ///     Ok(train.position())
    /// })?;
    /// Ddp::spawn(3, |ddp| {
    ///     let train = train(&ddp)?;
    ///     train.resume(&positions[0])?;
    ///     let batches: Vec<usize> = train.epochs(0..2).map(|epoch| epoch.count()).collect();
    ///     Ok(assert_eq!(batches, [2, 5])) // the other 12 of 20 items; then 30
    /// })?;
    /// # Ok::<(), burn_ddp::Error>(())
    /// ```
    #[doc(alias = "limit_train_batches")]
    #[doc(alias = "steps_per_epoch")]
    pub fn max_batches(mut self, max_batches: usize) -> Self {
        self.max_batches = Some(max_batches);
        self
    }

    /// Weighs each batch by the result of `weight` instead of its number of items: for a loss that is a mean over
    /// tokens, by its number of *tokens*. All ranks must call it, or none.
    ///
    /// The averaged gradient is then that of the mean over all tokens of a step, over ranks and micro-batches, as on
    /// one rank. `weight` runs when the batch is handed out, on the caller's thread: return a number that the batcher
    /// counted, since reading one from a tensor waits for the device. A batch of weight 0 (all padding) does not count
    /// in the average; other weights must be between 1e-6 and 1e15, or the batch is the error [`DataError::Weight`].
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
    ///         let loss = model.forward(x).mean(); // over this rank's tokens
    ///         let Some(grads) = ddp.backward(&loss, &model)? else { continue };
    ///         gradients.push(grads.get::<2>(model.weight.id).unwrap().into_scalar::<f32>());
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
    /// Each rank passes the same dataset, or its own copy of it, and the same settings except workers and device. It
    /// gets a loader for its share. Costs two small all-gathers; blocks until all ranks have called it.
    ///
    /// # Errors
    ///
    /// On every rank alike, and the job can go on: [`DataError::LoadersDiffer`] with the settings that differ;
    /// [`DataError::EmptyDataset`], [`DataError::DatasetTooSmall`] and [`DataError::BatchTooSmall`] where a rank would
    /// be without an item; [`DataError::NoFullStep`] after [`drop_last`](Self::drop_last);
    /// [`DataError::SamplerMismatch`] and [`DataError::Sampler`] for a sampler of a dataset of another length;
    /// [`DataError::ItemChanges`] after [`check_items`](Self::check_items); [`DataError::NoBatches`] for a
    /// [`max_batches`](Self::max_batches) of 0; [`Error::Invalid`](crate::Error::Invalid) that names the rank if one
    /// has no device. [`DataError::Comm`] if a peer failed.
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
        let ddp = self.ddp.clone();
        let weights = if self.weigh.is_some() { "the batch" } else { "its number of items" };
        let last_step = if self.drops_last { "dropped" } else { "loaded" };
        let max_batches = self.max_batches.map_or("not set".to_string(), |batches| batches.to_string());
        let more = [
            ("`max_batches`", max_batches),
            ("the source of a batch's weight", weights.to_string()),
            ("a last step that is not full", last_step.to_string()),
        ];
        let leaves = ddp.logical_ranks();
        let (id, device, order) = self.agree("training", "loader", &*dataset, Device::autodiff, more)?;
        let items = order.digest().items;

        // All ranks have the same settings: from here on they get the same errors.
        check_max_batches(self.max_batches)?;
        let global_batch = match self.batch {
            BatchSize::PerRank(items) => items.saturating_mul(leaves),
            BatchSize::Global(items) => items,
        };
        let plan = EpochPlan::new(items, leaves, global_batch)?;
        ddp.state().leaves.note_nominal(global_batch as f64 / leaves as f64);
        let plan = if self.drops_last { plan.drop_last()? } else { plan };
        let plan = self.max_batches.map_or(plan, |steps| plan.limit(steps));
        let weigh = self.weigh.take();
        let order = if order.is_sampled() { order.compared_in(ddp.state().new_group()?) } else { order };
        Ok(ShardedLoader::new(ddp, id, plan, weigh, order, self.pool(dataset, device)))
    }
}

/// Checks the number given to `max_batches`, the same on all ranks.
pub(super) fn check_max_batches(max_batches: Option<usize>) -> std::result::Result<(), DataError> {
    if max_batches == Some(0) { Err(DataError::NoBatches) } else { Ok(()) }
}
