//! One epoch of a training loader: handing out its batches, and announcing an early end to the other ranks.

use std::ops::Range;
use std::sync::Arc;
use std::time::Instant;

use burn_ddp_comm::{Progress, Track};

use super::batch_stream::BatchStream;
use super::deal::{Deal, Place};
use super::epoch_cursor::EpochCursor;
use super::epoch_order::OrderDigest;
use super::prefetch::BatchList;
use super::{DataError, EpochPlan, ShardedLoader};
use crate::batch_weight::{LoaderBatch, Step};
use crate::{Ddp, agreement};

impl<O: Send + 'static> ShardedLoader<O> {
    /// The epochs with these numbers, one after the other: `train.epochs(0..10)`. All ranks must pass the same numbers.
    /// After a [`resume`](Self::resume), numbers before the interrupted epoch are skipped.
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
        Epochs { loader: self.clone(), numbers: epochs.into_iter() }
    }

    /// The next epoch: the one after the epoch begun last, or the one given to [`set_epoch`](Self::set_epoch).
    ///
    /// Like Burn's `DataLoader::iter`, but its errors are [`DataError`].
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
    ///     let train = ddp.loader(Together).batch_size(1).shuffle(42).build(InMemDataset::new((0..20).collect()))?;
    ///     train.set_epoch(3);
    ///     let batches = train.iter().collect::<Result<Vec<_>, _>>()?; // of epoch 3
    ///     assert_eq!((batches.len(), train.epoch()), (10, 4));
    ///     Ok(())
    /// })?;
    /// # Ok::<(), burn_ddp::Error>(())
    /// ```
    pub fn iter(&self) -> Epoch<O> {
        let mut cursor = self.cursor();
        let number = cursor.next();
        self.begin(&mut cursor, number)
    }

    fn begin(&self, cursor: &mut EpochCursor, number: usize) -> Epoch<O> {
        let position = cursor.begin(number);
        let plan = self.plan_from(&position);
        Epoch::new(self.clone(), (number, cursor.repeats()), plan, Deal::new(plan, self.run(), position.part))
    }

    /// Compares what the ranks' samplers have drawn for an epoch. *Collective* with a sampler.
    fn compare_orders(&self, drawn: &Result<Option<(Vec<usize>, OrderDigest)>, DataError>) -> Result<(), DataError> {
        let Some(group) = self.order().group() else { return Ok(()) };
        let text = match drawn {
            Ok(drawn) => drawn.as_ref().map_or(String::new(), |(_, digest)| digest.to_string()),
            Err(error) => error.to_string(),
        };
        let settings = vec![("the order of the items".to_string(), text)];
        match agreement::on_settings(group, &settings)? {
            Some(difference) => Err(DataError::LoadersDiffer { loader: format!("loader {}", self.id()), difference }),
            None => Ok(()),
        }
    }

    /// The batches of `deal` in the epoch `number`.
    fn batch_list(&self, number: usize, repeats: u32, deal: Deal) -> Result<BatchList, DataError> {
        let (batches, first) = (deal.len(), self.order().first());
        let drawn = self.order().indices(number);
        self.compare_orders(&drawn)?;
        let Some((order, digest)) = drawn? else {
            let indices = move |batch| deal.loads(batch).map(|position| first + position).collect();
            return Ok(BatchList { batches, indices: Arc::new(indices) });
        };
        self.cursor().note_order(number, repeats, digest);
        // Only this rank's part of the order is kept.
        let (mut own, mut ends) = (Vec::new(), Vec::with_capacity(batches));
        for batch in 0..batches {
            own.extend(deal.loads(batch).map(|position| order[position]));
            ends.push(own.len());
        }
        let indices =
            move |batch: usize| own[batch.checked_sub(1).map_or(0, |before| ends[before])..ends[batch]].to_vec();
        Ok(BatchList { batches, indices: Arc::new(indices) })
    }
}

/// The epochs of a [`ShardedLoader`], one after the other; from [`ShardedLoader::epochs`].
pub struct Epochs<O, E> {
    loader: ShardedLoader<O>,
    numbers: E,
}

impl<O: Send + 'static, E: Iterator<Item = usize>> Iterator for Epochs<O, E> {
    type Item = Epoch<O>;

    fn next(&mut self) -> Option<Epoch<O>> {
        let mut cursor = self.loader.cursor();
        let first = cursor.first();
        let number = self.numbers.find(|number| *number >= first)?;
        Some(self.loader.begin(&mut cursor, number))
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        // After a resume, earlier epochs are skipped.
        (0, self.numbers.size_hint().1)
    }
}

/// The batches of one epoch on this rank, in order.
///
/// Yields an error in the place of a batch that could not be loaded. A program that returns the error ends the job on
/// all ranks with this cause; to continue instead, all ranks must agree to skip the step. After an error that concerns
/// the whole job the epoch is over.
///
/// A batch weighs each [`Ddp::backward`](crate::Ddp::backward) until the next batch is taken, so take it when it is
/// used, and not ahead (`peekable`): after two batches the next backward is an error, since its weight is not known.
/// [`Ddp::skip_batch`](crate::Ddp::skip_batch), on every rank, says that a batch gets no backward, and
/// [`Ddp::weighted`](crate::Ddp::weighted) gives the weight in loops that read ahead. A rank that drops an epoch before
/// its end announces it to the other ranks, which must drop it at the same step.
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
///     for mut epoch in train.epochs(0..2) {
///         assert_eq!((epoch.len(), epoch.step()), (3, 0)); // steps of the epoch, steps taken
///         while let Some(batch) = epoch.next() {
///             assert_eq!(batch?.len(), epoch.batch_items()); // 4, 4, and 2 of the last 4 items
///         }
///         println!("epoch {}: {} steps", epoch.number(), epoch.step());
///     }
///     Ok(())
/// })?;
/// # Ok::<(), burn_ddp::Error>(())
/// ```
#[must_use = "an epoch that is dropped before its end ends the job, unless all ranks drop it"]
pub struct Epoch<O: Send + 'static> {
    loader: ShardedLoader<O>,
    number: usize,
    /// Value of the cursor's `repeats` when this epoch began.
    repeats: u32,
    /// The steps to take: those of the whole epoch, or those that an earlier run left.
    plan: EpochPlan,
    /// This rank's batches of these steps.
    deal: Deal,
    /// Steps that an earlier run took, converted to steps of the present size.
    before: usize,
    /// Batches that were asked for.
    batches: BatchStream<O>,
    /// Number of the last batch that was handed out, from 1.
    reached: usize,
    /// The error of the step that was asked for last.
    failure: Option<String>,
    /// True if the iterator has ended.
    over: bool,
    /// True if the job has ended, so that no announcement is due.
    job_over: bool,
}

impl<O: Send + 'static> Epoch<O> {
    fn new(loader: ShardedLoader<O>, (number, repeats): (usize, u32), plan: EpochPlan, deal: Deal) -> Self {
        let (before, batches) = (plan.consumed() / plan.global_batch(), BatchStream::new(loader.pool().clone()));
        let (reached, failure, over, job_over) = (0, None, false, false);
        Self { loader, number, repeats, plan, deal, before, batches, reached, failure, over, job_over }
    }

    /// The epoch's number, on which its order depends.
    pub fn number(&self) -> usize {
        self.number
    }

    /// Steps of the whole epoch, the same on every rank. In a [resumed](ShardedLoader::resume) epoch: the steps that
    /// are left, plus the steps that the items consumed before would have made at the present size.
    #[allow(clippy::len_without_is_empty)] // never empty
    pub fn len(&self) -> usize {
        self.before + self.plan.steps()
    }

    /// Steps that were taken so far, including those before a [resume](ShardedLoader::resume). With [logical
    /// ranks](crate::Ddp::set_logical_ranks) a step has several batches, and counts with its last one.
    pub fn step(&self) -> usize {
        self.before + self.last_place().map_or(0, |place| place.step + usize::from(place.ends_step))
    }

    /// The place of the batch that was asked for last.
    fn last_place(&self) -> Option<Place> {
        self.batches.taken().checked_sub(1).map(|batch| self.deal.at(batch))
    }

    /// Items of the batch that this rank took last; 0 before the first batch. They are the weight of its backwards,
    /// unless [`weigh`](super::LoaderBuilder::weigh) gives another: see [`Ddp::batch_items`](crate::Ddp::batch_items).
    pub fn batch_items(&self) -> usize {
        let taken = self.batches.taken();
        taken.checked_sub(1).map_or(0, |batch| self.deal.items(batch))
    }

    /// Items of this epoch that all ranks have taken, and all its items.
    pub(super) fn progress_in_items(&self) -> (usize, usize) {
        let processed = match self.last_place() {
            None => self.plan.consumed(),
            Some(Place { step, ends_step: true, .. }) => self.plan.step(step).end,
            // The items before the next leaf, as if all ranks were as far in the step as this one.
            Some(Place { step, leaf, .. }) => {
                let (all, run) = (self.plan.step(step), self.loader.run().leaves());
                all.start + (all.len() - 1) * (leaf + 1 - run.start) / run.len()
            }
        };
        (processed, self.plan.items())
    }

    /// The epoch's number in messages, from 1.
    fn ordinal(&self) -> usize {
        self.number.saturating_add(1)
    }

    /// The track on which the world compares the steps of this epoch between ranks.
    fn track(&self) -> Track {
        let group = self.loader.ddp().group().id();
        Track::Batches { group, loader: self.loader.id(), run: self.repeats }
    }

    /// Batches of the steps before the first one of this run. All ranks have equally many.
    fn batches_before(&self) -> usize {
        self.before * self.deal.in_step()
    }

    /// This rank's progress once it has taken so many batches of the epoch.
    fn at(&self, steps: usize) -> Result<Progress, DataError> {
        let too_large = || DataError::EpochTooLarge { epoch: self.number };
        let epoch = u32::try_from(self.ordinal()).map_err(|_| too_large())?;
        let step = u32::try_from(steps).map_err(|_| DataError::TooManySteps { steps })?;
        Ok(Progress { epoch, step })
    }

    fn take_next(&mut self) -> Result<O, DataError> {
        let (loader, number, plan, nth_batch) = (&self.loader, self.number, self.plan, self.batches.taken());
        let place @ Place { step, ends_step, .. } = self.deal.at(nth_batch);
        let (ddp, id, nth, steps) = (loader.ddp(), loader.id(), self.before + step + 1, self.len());
        let (track, at) = (self.track(), self.at(self.batches_before() + nth_batch + 1)?);
        let list = || loader.batch_list(number, self.repeats, self.deal.clone());
        let epoch = self.ordinal();
        let name = || format!("step {nth} of {steps} in epoch {epoch} of loader {id} on rank {}", ddp.world().rank());
        let batch = self.batches.take(ddp.world(), list, name)?;
        let weight = loader.weight(&batch, self.deal.items(nth_batch), name)?;
        // Only after loading, since a rank that could not load a step must not count as having reached it.
        ddp.world().advance(track, at)?;
        let (last, logical) = (ends_step && step + 1 == plan.steps(), loader.leaf(place, number, nth));
        let batch_of = LoaderBatch { step: Step { track, at }, weight, last, leaf: logical };
        let forgotten = ddp.state().batch_weight.note_batch(batch_of);
        if forgotten && ddp.is_main() && ddp.world_size() > 1 {
            tracing::warn!(
                target: "burn_ddp::data",
                "a training loader has handed out batches, but no backward of a wrapped model has come: each rank \
                trains a model of its own unless it went through `ddp.wrap`"
            );
        }
        let Range { start, end } = plan.step(step);
        // After the last step no item is left, though some may have been dropped.
        let end = if last { plan.items() } else { end };
        let consumed = if ends_step { (end, None) } else { (start, self.deal.part_with(place)) };
        loader.cursor().consume(number, self.repeats, consumed, plan.items());
        ddp.state().seed_batch(logical.map(|leaf| leaf.leaf), id, number, start);
        self.reached = nth_batch + 1;
        Ok(batch)
    }

    /// Tells the other ranks at which step this rank leaves the epoch. The message goes out with this rank's next call
    /// and not at once, since the program may be about to return an error, which is then the cause that all ranks get.
    fn announce(&self) {
        let before = self.batches_before();
        let (Ok(begin), Ok(reached)) = (self.at(before), self.at(before + self.reached)) else { return };
        let (id, steps) = (self.loader.id(), self.len());
        let name = match &self.failure {
            Some(failure) => format!("loader {id} ({failure})"),
            None => format!("loader {id} ({steps} steps)"),
        };
        announce_stop(self.loader.ddp(), self.track(), (begin, reached), self.reached > 1, &name);
    }
}

/// Tells the other ranks, with this rank's next call, that it leaves an epoch at the step `reached`. The epoch began at
/// the step `begin`; `several` is true if this rank has taken more than one batch of it.
pub(super) fn announce_stop(
    ddp: &Ddp,
    track: Track,
    (begin, reached): (Progress, Progress),
    several: bool,
    name: &str,
) {
    // If the last batch had no backward on this rank, other ranks may wait in theirs. But the backward of a single
    // batch may still follow: `loader.iter().next()` drops the epoch before the batch is used.
    let used = ddp.state().batch_weight.used(track).unwrap_or(begin);
    if used < reached && several {
        let unused = format!("{name}, with a batch read but no backward");
        ddp.world().stop_with_next_call(track.backwards(), used.max(begin), &unused);
    }
    ddp.world().stop_with_next_call(track, reached, name);
}

impl<O: Send + 'static> Iterator for Epoch<O> {
    type Item = Result<O, DataError>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.over {
            return None;
        }
        if self.batches.taken() == self.deal.len() {
            self.over = true;
            self.failure = None; // The program continued after the failure, as all ranks must have agreed to.
            let items = self.plan.items();
            self.loader.cursor().consume(self.number, self.repeats, (items, None), items);
            self.batches.end();
            return None;
        }
        let asked = Instant::now();
        let taken = self.take_next();
        self.loader.ddp().state().meter.batch(self.loader.id(), asked);
        self.failure = taken.as_ref().err().map(ToString::to_string);
        if let Err(error) = &taken
            && !error.is_skippable()
        {
            self.over = true;
            self.job_over = matches!(error, DataError::Comm(_));
        }
        Some(taken)
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        let left = if self.over { 0 } else { self.deal.len() - self.batches.taken() };
        // An error that concerns the job ends the epoch early.
        (left.min(1), Some(left))
    }
}

impl<O: Send + 'static> Drop for Epoch<O> {
    fn drop(&mut self) {
        let complete = self.batches.taken() == self.deal.len() && self.failure.is_none();
        // A panic is announced by the world itself, with its cause.
        if !complete && !self.job_over && !std::thread::panicking() {
            self.announce();
        }
    }
}
