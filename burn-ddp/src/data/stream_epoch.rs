//! One epoch of a streaming loader: all ranks make steps until no rank has an item left.

use std::sync::{Arc, Mutex};
use std::time::Instant;

use burn_ddp_comm::{Progress, Track};

use super::DataError;
use super::batch_stream::BatchStream;
use super::epoch::announce_stop;
use super::prefetch::{BatchList, Pool};
use super::stream::{Opened, Portion, StreamShard, Streams};
use super::stream_loader::{StreamLoader, Taken};
use crate::batch_weight::{self, LoaderBatch, Step};

/// The batches of one epoch on this rank, until no rank has an item left; from
/// [`StreamLoader::epochs`](StreamLoader::epochs).
///
/// Before each step the ranks exchange their numbers of items, by a small all-gather. A read that fails on one rank is
/// an error on all ranks at the same step, and ends the epoch. Take a batch when it is used, see
/// [`Epoch`](super::Epoch).
///
/// # Example
///
/// As in [`StreamBuilder`](super::StreamBuilder).
#[must_use = "all ranks go through an epoch together"]
pub struct StreamEpoch<I: Clone + Send + 'static, O: Send + 'static> {
    loader: StreamLoader<I, O>,
    number: usize,
    /// Number of this pass among the passes over all epochs.
    begun: u32,
    streams: Arc<Streams<I, O>>,
    batches: BatchStream<Portion<O>>,
    /// Worker of the first batch of this pass.
    first_turn: usize,
    /// Batches that were handed out, including those before a resume.
    taken: Taken,
    /// Number of parts found at their end in a row since the last batch.
    ended: usize,
    ahead: Option<Ahead<O>>,
    over: bool,
}

/// The next step.
struct Ahead<O> {
    /// This rank's batch, its items and its worker; `None` if the rank has read its whole part.
    own: Option<(O, usize, usize)>,
    /// True if any rank has items; or the error of a rank.
    comes: Result<bool, DataError>,
}

impl<I: Clone + Send + 'static, O: Send + 'static> StreamEpoch<I, O> {
    pub(super) fn new(loader: StreamLoader<I, O>, number: usize, begun: u32, taken: Taken) -> Self {
        let (inner, workers) = (loader.inner(), loader.workers());
        let (rank, of) = (inner.ddp.rank(), inner.ddp.world_size() * workers);
        let shard = |worker| StreamShard { index: rank * workers + worker, of, epoch: number };
        let streams = Arc::new(Streams {
            source: inner.source.clone(),
            batcher: inner.batcher.clone(),
            batch_size: inner.batch_size,
            streams: (0..workers).map(|worker| Opened::new(shard(worker), taken.batches[worker])).collect(),
            spare: Mutex::new(None),
        });
        let batches = BatchStream::new(Pool::new(streams.clone(), inner.device.clone(), inner.num_workers));
        let first_turn = taken.turn;
        Self { loader, number, begun, streams, batches, first_turn, taken, ended: 0, ahead: None, over: false }
    }

    /// The epoch's number.
    ///
    /// # Example
    ///
    /// As in [`StreamBuilder`](super::StreamBuilder).
    pub fn number(&self) -> usize {
        self.number
    }

    /// Steps that were taken so far, including those before a [resume](StreamLoader::resume).
    ///
    /// # Example
    ///
    /// As in [`StreamBuilder`](super::StreamBuilder).
    pub fn step(&self) -> usize {
        self.taken.steps as usize
    }

    /// True if no step follows.
    #[cfg(test)]
    pub(super) fn ahead_is_none(&self) -> bool {
        self.ahead.as_ref().is_some_and(|ahead| matches!(ahead.comes, Ok(false)))
    }

    fn track(&self) -> Track {
        let group = self.loader.inner().ddp.group().id();
        Track::Batches { group, loader: self.loader.inner().id, run: self.begun }
    }

    fn at(&self, step: u32) -> Result<Progress, DataError> {
        let epoch = u32::try_from(self.number.saturating_add(1));
        Ok(Progress { epoch: epoch.map_err(|_| DataError::EpochTooLarge { epoch: self.number })?, step })
    }

    /// The name of a step, from 1, in errors.
    fn name(&self, step: u32) -> String {
        let (inner, epoch) = (self.loader.inner(), self.number.saturating_add(1));
        format!("step {step} of epoch {epoch} of streaming loader {} on rank {}", inner.id, inner.ddp.world().rank())
    }

    /// Reads this rank's batch of the step `step`, and exchanges with the other ranks whether one has items. No step
    /// comes after `max_batches`.
    fn look_ahead(&mut self, step: u32) -> Ahead<O> {
        if self.loader.inner().max_batches.is_some_and(|most| step as usize > most) {
            return Ahead { own: None, comes: Ok(false) };
        }
        let read = self.read(step);
        let mine = read.as_ref().map(|own| own.as_ref().map_or(0, |(_, items, _)| *items)).ok();
        let comes = self.loader.inner().group.all_gather_object(&mine).map_err(DataError::from);
        let (own, failed) = match read {
            Ok(own) => (own, None),
            Err(error) => (None, Some(error)),
        };
        let comes = match (failed, comes) {
            (Some(error), _) | (None, Err(error)) => Err(error),
            (None, Ok(of_ranks)) => match of_ranks.iter().position(Option::is_none) {
                Some(nth) => {
                    let rank = self.loader.inner().group.ranks()[nth];
                    Err(DataError::StreamFailed { what: self.name(step), rank })
                }
                None => Ok(of_ranks.into_iter().flatten().any(|items| items > 0)),
            },
        };
        Ahead { own, comes }
    }

    /// The next batch of the workers in turn, without those whose parts have ended.
    fn read(&mut self, step: u32) -> Result<Option<(O, usize, usize)>, DataError> {
        let (workers, first) = (self.loader.workers(), self.first_turn);
        let list = || {
            let indices = Arc::new(move |batch: usize| vec![batch.wrapping_add(first)]);
            Ok(BatchList { batches: usize::MAX, indices })
        };
        while self.ended < workers {
            let worker = (first + self.batches.taken()) % workers;
            let name = self.name(step);
            match self.batches.take(self.loader.inner().ddp.world(), list, || name)? {
                Some((batch, items)) => {
                    self.ended = 0;
                    return Ok(Some((batch, items, worker)));
                }
                None => self.ended += 1,
            }
        }
        Ok(None)
    }

    fn take_next(&mut self) -> Result<Option<O>, DataError> {
        let step = self.taken.steps.saturating_add(1);
        let (track, at) = (self.track(), self.at(step)?);
        let Ahead { own, comes } = match self.ahead.take() {
            Some(ahead) => ahead,
            None => self.look_ahead(step),
        };
        if !comes? {
            return Ok(None);
        }
        // Before the next exchange, so that a rank that has left the epoch is noticed here.
        self.loader.inner().ddp.world().advance(track, at)?;
        let next = self.look_ahead(step.saturating_add(1));
        let last = matches!(next.comes, Ok(false));
        self.ahead = Some(next);
        let (batch, items) = match own {
            Some((batch, items, worker)) => {
                self.taken.batches[worker] += 1;
                self.taken.turn = (worker + 1) % self.loader.workers();
                (batch, items)
            }
            None => {
                let source = |error| DataError::Dataset { what: self.name(step), source: Arc::new(error) };
                let spare = self.streams.spare_batch(&self.loader.inner().device).map_err(source)?;
                (spare.ok_or_else(|| DataError::EmptyPart { what: self.name(step) })?, 0)
            }
        };
        self.taken.steps = step;
        let weight = self.weight(&batch, items, step)?;
        let ddp = &self.loader.inner().ddp;
        ddp.state().batch_weight.note_batch(LoaderBatch { step: Step { track, at }, weight, last, leaf: None });
        ddp.state().seed_batch(None, self.loader.inner().id, self.number, step as usize);
        self.loader.note_taken(self.number, self.begun, Some(&self.taken).filter(|_| !last));
        Ok(Some(batch))
    }

    /// Weight of a batch of `items` items; a batch that the rank repeats counts as 0 items.
    fn weight(&self, batch: &O, items: usize, step: u32) -> Result<f64, DataError> {
        let Some(weigh) = self.loader.inner().weigh.as_ref().filter(|_| items > 0) else { return Ok(items as f64) };
        let weight = weigh(batch);
        let checked = batch_weight::check(weight);
        checked.map(|()| weight).map_err(|reason| DataError::Weight { what: self.name(step), reason })
    }

    fn end(&mut self) {
        self.over = true;
        self.batches.end();
    }
}

impl<I: Clone + Send + 'static, O: Send + 'static> Iterator for StreamEpoch<I, O> {
    type Item = Result<O, DataError>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.over {
            return None;
        }
        let asked = Instant::now();
        let taken = self.take_next();
        let inner = self.loader.inner();
        inner.ddp.state().meter.batch(inner.id, asked);
        match taken {
            Ok(Some(batch)) => Some(Ok(batch)),
            Ok(None) => {
                self.loader.note_taken(self.number, self.begun, None);
                self.end();
                None
            }
            Err(error) => {
                self.end();
                Some(Err(error))
            }
        }
    }
}

impl<I: Clone + Send + 'static, O: Send + 'static> Drop for StreamEpoch<I, O> {
    fn drop(&mut self) {
        if self.over || std::thread::panicking() {
            return;
        }
        // Tells the other ranks at which step this rank leaves the epoch, as other loaders do.
        if let (Ok(begin), Ok(reached)) = (self.at(0), self.at(self.taken.steps)) {
            let inner = self.loader.inner();
            let name = format!("streaming loader {}", inner.id);
            announce_stop(&inner.ddp, self.track(), (begin, reached), self.taken.steps > 1, &name);
        }
        self.end();
    }
}
