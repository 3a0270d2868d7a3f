//! The loader of sources that are read from front to back: all ranks make steps until the last rank has read its part.

use std::num::NonZeroUsize;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use burn::data::dataloader::batcher::Batcher;
use burn::tensor::Device;
use burn_ddp_comm::ProcessGroup;
use serde::{Deserialize, Serialize};

use super::DataError;
use super::left_early::{LeftEarly, log_resume};
use super::sharded_loader::Weigh;
use super::stream::StreamSource;
use super::stream_epoch::StreamEpoch;
use super::training_builder::check_max_batches;
use crate::{Ddp, Error, Result, agreement};

impl Ddp {
    /// Begins a training loader over a source without random access: each worker of each rank reads a part of it from
    /// front to back.
    ///
    /// Ranks may have different numbers of items. In every step a small all-gather tells the ranks how many items each
    /// has. A rank that has read its whole part repeats an item with weight 0 until the other ranks have read theirs.
    /// So every item is loaded once per epoch with its true weight, and all ranks make equally many steps.
    ///
    /// ```
    /// use burn::data::{dataloader::batcher::Batcher, dataset::DatasetError};
    /// use burn::tensor::Device;
    /// use burn_ddp::data::{Stream, StreamShard, StreamSource};
    /// use burn_ddp::prelude::*;
    ///
    /// /// Files of lines; here each is a vector.
    /// struct Files(Vec<Vec<u32>>);
    ///
    /// impl StreamSource<u32> for Files {
    ///     fn open(&self, shard: StreamShard) -> Result<Stream<u32>, DatasetError> {
    ///         let own = self.0.iter().enumerate().filter(|(nth, _)| shard.has(*nth));
    ///         Ok(Box::new(own.flat_map(|(_, file)| file.clone()).map(Ok).collect::<Vec<_>>().into_iter()))
    ///     }
    /// }
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
    ///     let files = Files(vec![vec![1, 2, 3], vec![10]]);
    ///     let train = ddp.stream(files, Together).batch_size(2).build()?;
    ///     let mut batches = Vec::new();
    ///     for epoch in train.epochs(0..1) {
    ///         for batch in epoch {
    ///             batches.push((batch?, ddp.batch_items()));
    ///         }
    ///     }
    ///     Ok(batches)
    /// })?;
    /// assert_eq!(batches[0], [(vec![1, 2], 2.0), (vec![3], 1.0)]);
    /// assert_eq!(batches[1], [(vec![10], 1.0), (vec![10], 0.0)]); // as many steps
    /// # Ok::<(), burn_ddp::Error>(())
    /// ```
    pub fn stream<I, O>(
        &self,
        source: impl StreamSource<I> + 'static,
        batcher: impl Batcher<I, O> + 'static,
    ) -> StreamBuilder<I, O> {
        StreamBuilder {
            ddp: self.clone(),
            source: Arc::new(source),
            batcher: Arc::new(batcher),
            batch_size: 1,
            max_batches: None,
            weigh: None,
            num_workers: 0,
            device: None,
        }
    }
}

/// Builds a [`StreamLoader`]; from [`Ddp::stream`].
///
/// # Example
///
/// Texts without end, each weighed by its number of words, which two threads per rank read ahead:
///
/// ```
/// # use burn::data::{dataloader::batcher::Batcher, dataset::DatasetError};
/// # use burn::tensor::Device;
/// # struct Together;
/// # impl Batcher<String, Vec<String>> for Together {
/// #     fn batch(&self, items: Vec<String>, _: &Device) -> Vec<String> {
/// #         items
/// #     }
/// # }
/// use burn_ddp::data::{Stream, StreamShard, StreamSource};
/// use burn_ddp::prelude::*;
///
/// struct Texts;
///
/// impl StreamSource<String> for Texts {
///     fn open(&self, shard: StreamShard) -> Result<Stream<String>, DatasetError> {
///         let own = (0..).filter(move |nth| shard.has(*nth));
///         Ok(Box::new(own.map(|nth| Ok(format!("text number {nth}")))))
///     }
/// }
///
/// let batches = Ddp::spawn(2, |ddp| {
///     let train = ddp
///         .stream(Texts, Together)
///         .batch_size(2)
///         .max_batches(2)
///         .num_workers(2)
///         .weigh(|texts: &Vec<String>| texts.iter().map(|text| text.split(' ').count()).sum::<usize>() as f64)
///         .set_device(ddp.device()?.autodiff())
///         .build()?;
///     let mut batches = Vec::new();
///     for mut epoch in train.epochs(0..1) {
///         while let Some(batch) = epoch.next() {
///             batches.push((epoch.number(), epoch.step(), batch?.len(), ddp.batch_items()));
///         }
///     }
///     Ok(batches)
/// })?;
/// assert_eq!(batches[0], [(0, 1, 2, 6.0), (0, 2, 2, 6.0)]); // epoch, steps so far, texts, words
/// # Ok::<(), burn_ddp::Error>(())
/// ```
#[must_use = "nothing is loaded before `build`"]
pub struct StreamBuilder<I, O> {
    ddp: Ddp,
    source: Arc<dyn StreamSource<I>>,
    batcher: Arc<dyn Batcher<I, O>>,
    batch_size: usize,
    /// Largest number of batches of an epoch.
    max_batches: Option<usize>,
    /// Weights of batches; `None` for their numbers of items.
    weigh: Option<Weigh<O>>,
    num_workers: usize,
    device: Option<Device>,
}

impl<I: Clone + Send + 'static, O: Send + 'static> StreamBuilder<I, O> {
    /// Items of each rank's batches; 1 by default. The last ones of a worker's part may be fewer.
    pub fn batch_size(mut self, batch_size: usize) -> Self {
        self.batch_size = batch_size;
        self
    }

    /// Ends each epoch after `max_batches` batches of each rank, or with the last item: for sources without end. The
    /// same on all ranks; see [`LoaderBuilder::max_batches`](super::LoaderBuilder::max_batches).
    ///
    /// # Example
    ///
    /// As in [`StreamBuilder`].
    pub fn max_batches(mut self, max_batches: usize) -> Self {
        self.max_batches = Some(max_batches);
        self
    }

    /// Weighs each batch by the result of `weight` (its number of tokens), as
    /// [`LoaderBuilder::weigh`](super::LoaderBuilder::weigh) does. All ranks must call it, or none.
    pub fn weigh(mut self, weight: impl Fn(&O) -> f64 + Send + Sync + 'static) -> Self {
        self.weigh = Some(Arc::new(weight));
        self
    }

    /// Number of threads per rank, each of which reads a part of its own ahead of the loop; the loop takes their
    /// batches in turn. With 0, the default, the rank has one part, and reads it when a batch is asked for. So an epoch
    /// that ends early loses no items of a source such as a queue. Threads live as long as their epoch.
    ///
    /// For memory, and for batchers that draw random numbers, see
    /// [`LoaderBuilder::num_workers`](super::LoaderBuilder::num_workers).
    pub fn num_workers(mut self, num_workers: usize) -> Self {
        self.num_workers = num_workers;
        self
    }

    /// The device of the batches. The default is that of a training
    /// [`LoaderBuilder`](super::LoaderBuilder::set_device).
    pub fn set_device(mut self, device: Device) -> Self {
        self.device = Some(device);
        self
    }

    /// Builds the loader. *Collective*: all ranks build the same loaders in the same order, with the same batch size,
    /// `max_batches` and number of workers (0 and 1 count as the same).
    ///
    /// Costs two small all-gathers and what [`World::group`](crate::comm::World::group) costs: connections and a
    /// barrier.
    ///
    /// # Errors
    ///
    /// On every rank alike, and the job can go on: [`DataError::LoadersDiffer`] with the settings that differ;
    /// [`DataError::BatchTooSmall`] for a batch size of 0; [`DataError::NoBatches`] for a `max_batches` of 0;
    /// [`Error::Invalid`](crate::Error::Invalid) that names the rank if one has no device. [`DataError::Comm`] if a
    /// peer failed.
    #[track_caller]
    pub fn build(self) -> Result<StreamLoader<I, O>> {
        let Self { ddp, source, batcher, batch_size, max_batches, weigh, num_workers, device } = self;
        let division = ddp.state().leaves.used_by("a streaming loader");
        if division.is_some_and(|division| !division.count().is_multiple_of(ddp.world_size())) {
            return Err(Error::invalid(format!(
                "{} logical ranks on {} processes: a stream gives each process equally many batches, so the number of \
                processes must divide that of leaves",
                ddp.logical_ranks(),
                ddp.world_size()
            )));
        }
        let weights = if weigh.is_some() { "the batch" } else { "its number of items" };
        let default = || ddp.state().model_device().map_or_else(|| ddp.device(), Ok).map(Device::autodiff);
        let device = agreement::on_outcome(ddp.group(), "build its loader", device.map_or_else(default, Ok))?;
        let id = ddp.state().next_loader_id(false);
        let settings = [
            ("the kind of loader", "streaming".to_string()),
            ("the number of the loader", id.to_string()),
            ("the batch size", batch_size.to_string()),
            ("`max_batches`", max_batches.map_or("not set".to_string(), |batches| batches.to_string())),
            ("the number of parts of a rank", num_workers.max(1).to_string()),
            ("the source of a batch's weight", weights.to_string()),
        ];
        let settings = settings.map(|(name, value)| (name.to_string(), value)).to_vec();
        if let Some(difference) = agreement::on_settings(ddp.group(), &settings).map_err(DataError::from)? {
            return Err(DataError::LoadersDiffer { loader: format!("streaming loader {id}"), difference }.into());
        }
        ddp.state().count_loader(false);
        check_max_batches(max_batches)?;
        let too_small = || DataError::BatchTooSmall { global_batch: 0, world: ddp.world_size() };
        let batch_size = NonZeroUsize::new(batch_size).ok_or_else(too_small)?;
        let group = ddp.state().new_group()?;
        let cursor = Mutex::default();
        let inner =
            Inner { ddp, group, id, source, batcher, batch_size, max_batches, weigh, num_workers, device, cursor };
        Ok(StreamLoader { inner: Arc::new(inner) })
    }
}

/// This rank's part of a source that is read from front to back, batch by batch, epoch after epoch; from
/// [`Ddp::stream`]. Clones are the same loader.
///
/// As with other training loaders, a batch weighs its backwards by its number of items, or by the function given to
/// [`weigh`](StreamBuilder::weigh), and all ranks must leave an epoch at the same step.
pub struct StreamLoader<I, O> {
    inner: Arc<Inner<I, O>>,
}

pub(super) struct Inner<I, O> {
    pub(super) ddp: Ddp,
    /// Group in which the ranks exchange their numbers of items.
    pub(super) group: ProcessGroup,
    pub(super) id: u32,
    pub(super) source: Arc<dyn StreamSource<I>>,
    pub(super) batcher: Arc<dyn Batcher<I, O>>,
    pub(super) batch_size: NonZeroUsize,
    /// Largest number of batches of an epoch.
    pub(super) max_batches: Option<usize>,
    /// `None` for the number of items.
    pub(super) weigh: Option<Weigh<O>>,
    pub(super) num_workers: usize,
    pub(super) device: Device,
    cursor: Mutex<Cursor>,
}

/// The present epoch, or the next one between two.
#[derive(Default)]
struct Cursor {
    epoch: usize,
    taken: Taken,
    /// The epoch before, if it was left early.
    left_early: Option<LeftEarly>,
    /// True after `resume`, until an epoch begins.
    resumed: bool,
    /// Number of epochs begun so far, by which two passes over the same epoch differ.
    begun: u32,
}

/// Batches of an epoch that a rank has taken.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Taken {
    /// Steps, the same on every rank.
    pub(super) steps: u32,
    /// Worker whose batch comes next.
    pub(super) turn: usize,
    /// Batches of each worker's part; empty at the beginning of an epoch.
    pub(super) batches: Vec<usize>,
}

/// Number of batches that each rank has taken of its parts: the state of a [`StreamLoader`] in a checkpoint. It is the
/// same on every rank, and can be resumed by the same number of ranks and workers only. Serialize it with serde.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct StreamPosition {
    epoch: usize,
    batch_size: usize,
    /// By rank; empty between two epochs.
    taken: Vec<Taken>,
    /// The epoch before, if it was left early.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    left_early: Option<LeftEarly>,
}

impl StreamPosition {
    /// The present epoch, or, between two epochs, the next one.
    ///
    /// # Example
    ///
    /// As in [`StreamLoader::resume`].
    #[must_use]
    pub fn epoch(&self) -> usize {
        self.epoch
    }

    /// Steps of that epoch that were taken.
    ///
    /// # Example
    ///
    /// As in [`StreamLoader::resume`].
    #[must_use]
    pub fn steps(&self) -> usize {
        self.taken.first().map_or(0, |taken| taken.steps as usize)
    }
}

impl<I, O> Clone for StreamLoader<I, O> {
    fn clone(&self) -> Self {
        Self { inner: self.inner.clone() }
    }
}

impl<I: Clone + Send + 'static, O: Send + 'static> StreamLoader<I, O> {
    /// The epochs with these numbers, one after the other. All ranks must pass the same numbers. After a
    /// [`resume`](Self::resume), numbers before the interrupted epoch are skipped.
    pub fn epochs(&self, epochs: impl IntoIterator<Item = usize>) -> impl Iterator<Item = StreamEpoch<I, O>> {
        let (loader, mut numbers) = (self.clone(), epochs.into_iter());
        std::iter::from_fn(move || {
            let first = Some(loader.cursor()).filter(|cursor| cursor.resumed).map_or(0, |cursor| cursor.epoch);
            Some(loader.begin(numbers.find(|number| *number >= first)?))
        })
    }

    fn begin(&self, number: usize) -> StreamEpoch<I, O> {
        let mut cursor = self.cursor();
        if !cursor.resumed {
            let batches = cursor.taken.steps as usize;
            cursor.left_early = LeftEarly::note(cursor.left_early, cursor.epoch, batches, number);
        }
        if !cursor.resumed || cursor.epoch != number {
            cursor.taken = Taken::default();
        }
        cursor.taken.batches.resize(self.workers(), 0);
        (cursor.epoch, cursor.resumed) = (number, false);
        cursor.begun += 1;
        StreamEpoch::new(self.clone(), number, cursor.begun, cursor.taken.clone())
    }

    /// The position of all ranks. *Collective*: call it after the optimizer step, on every rank. Costs one small
    /// all-gather.
    ///
    /// # Errors
    ///
    /// [`DataError::Comm`] if a peer failed.
    ///
    /// # Example
    ///
    /// As in [`resume`](Self::resume).
    #[track_caller]
    pub fn position(&self) -> Result<StreamPosition> {
        let (epoch, taken, left_early) = {
            let cursor = self.cursor();
            (cursor.epoch, cursor.taken.clone(), cursor.left_early)
        };
        let taken = self.inner.ddp.group().all_gather_object(&taken).map_err(DataError::from)?;
        let taken = if taken.iter().all(|taken| taken.steps == 0) { Vec::new() } else { taken };
        Ok(StreamPosition { epoch, batch_size: self.inner.batch_size.get(), taken, left_early })
    }

    /// Makes the loader continue from `position`, with the rest of the interrupted epoch. *Collective*: all ranks pass
    /// the same position. Costs one small all-gather. The stream of each worker skips the batches that were taken
    /// before, by its `nth`.
    ///
    /// # Errors
    ///
    /// On every rank: [`DataError::PositionMismatch`] if the batch size, the number of ranks or the number of workers
    /// has changed, unless the position lies between two epochs; [`DataError::LoadersDiffer`] if the ranks pass
    /// different positions.
    ///
    /// # Example
    ///
    /// Two ranks that read numbers stop after a step, and go on:
    ///
    /// ```
    /// # use burn::{data::dataloader::batcher::Batcher, data::dataset::DatasetError, tensor::Device};
    /// # use burn_ddp::data::{Stream, StreamLoader, StreamShard, StreamSource};
    /// # use burn_ddp::prelude::*;
    /// # struct Numbers;
    /// # impl StreamSource<usize> for Numbers {
    /// #     fn open(&self, shard: StreamShard) -> Result<Stream<usize>, DatasetError> {
    /// #         Ok(Box::new((0..6).filter(move |number| shard.has(*number)).map(Ok)))
    /// #     }
    /// # }
    /// # struct Together;
    /// # impl Batcher<usize, Vec<usize>> for Together {
    /// #     fn batch(&self, items: Vec<usize>, _: &Device) -> Vec<usize> {
    /// #         items
    /// #     }
    /// # }
    /// let read = |loader: &StreamLoader<usize, Vec<usize>>, steps| {
    ///     let batches = loader.epochs(0..1).flat_map(|epoch| epoch.take(steps));
    ///     batches.collect::<Result<Vec<_>, _>>().map(|batches| batches.concat())
    /// };
    /// let rests = Ddp::spawn(2, |ddp| {
    ///     let train = ddp.stream(Numbers, Together).batch_size(1).build()?;
    ///     assert_eq!(read(&train, 1)?, [ddp.rank()]);
    ///     let position = train.position()?; // for a checkpoint
    ///     assert_eq!((position.epoch(), position.steps()), (0, 1));
    ///
    ///     let resumed = ddp.stream(Numbers, Together).batch_size(1).build()?;
    ///     resumed.resume(&position)?;
    ///     Ok(read(&resumed, 10)?)
    /// })?;
    /// assert_eq!(rests, [[2, 4], [3, 5]]);
    /// # Ok::<(), burn_ddp::Error>(())
    /// ```
    #[track_caller]
    pub fn resume(&self, position: &StreamPosition) -> Result<()> {
        let Inner { ddp, id, batch_size, max_batches, .. } = &*self.inner;
        let settings = vec![("the position".to_string(), format!("{position:?}"))];
        if let Some(difference) = agreement::on_settings(ddp.group(), &settings).map_err(DataError::from)? {
            let loader = format!("streaming loader {id} (resumed)");
            return Err(DataError::LoadersDiffer { loader, difference }.into());
        }
        let workers = self.workers();
        let of_this_job = position.batch_size == batch_size.get()
            && position.taken.len() == ddp.world_size()
            && position.taken.iter().all(|taken| taken.batches.len() == workers);
        if !position.taken.is_empty() && !of_this_job {
            let parts = |ranks, workers, batch| format!("{ranks} rank(s), {workers} worker(s), batches of {batch}");
            let before = parts(position.taken.len(), position.taken[0].batches.len(), position.batch_size);
            let now = parts(ddp.world_size(), workers, batch_size.get());
            let difference = format!("it was of {before}, this one has {now}");
            return Err(DataError::PositionMismatch { difference }.into());
        }
        let taken = position.taken.get(ddp.rank()).cloned().unwrap_or_default();
        // A loader with `max_batches` ends its epochs as the program means it.
        let left_early = position.left_early.filter(|_| max_batches.is_none());
        if taken.steps > 0 {
            let progress = format!("{} batch(es) were read before", taken.steps);
            log_resume(ddp, &format!("streaming loader {id}"), position.epoch, &progress, left_early);
        }
        let mut cursor = self.cursor();
        (cursor.epoch, cursor.taken, cursor.left_early, cursor.resumed) = (position.epoch, taken, left_early, true);
        Ok(())
    }

    pub(super) fn inner(&self) -> &Inner<I, O> {
        &self.inner
    }

    /// Notes the batches that this rank has taken of the epoch `number`, in the pass `begun`; `None` for all batches.
    pub(super) fn note_taken(&self, number: usize, begun: u32, taken: Option<&Taken>) {
        let mut cursor = self.cursor();
        if cursor.begun == begun && !cursor.resumed {
            (cursor.epoch, cursor.taken, cursor.left_early) = match taken {
                Some(taken) => (number, taken.clone(), cursor.left_early),
                None => (number.saturating_add(1), Taken::default(), None),
            };
        }
    }

    /// Parts that this rank reads.
    pub(super) fn workers(&self) -> usize {
        self.inner.num_workers.max(1)
    }

    fn cursor(&self) -> MutexGuard<'_, Cursor> {
        self.inner.cursor.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
