//! One reading of a training loader.

use std::ops::Range;
use std::time::Instant;

use burn::data::dataloader::{DataLoaderIterator, Progress};
use burn::data::dataset::DatasetError;

use super::sharded_loader::ShardedLoader;
use super::prefetch::{Failure, Pass};
use super::{DataError, EpochPlan};
use crate::batch_weight::Step;
use crate::batch_weight::backward_track;

/// The epochs of a [`ShardedLoader`], one after the other; from [`ShardedLoader::epochs`].
pub struct Epochs<O, E> {
    loader: ShardedLoader<O>,
    numbers: E,
}

impl<O, E> Epochs<O, E> {
    pub(super) fn new(loader: ShardedLoader<O>, numbers: E) -> Self {
        Self { loader, numbers }
    }
}

impl<O: Send + 'static, E: Iterator<Item = usize>> Iterator for Epochs<O, E> {
    type Item = Epoch<O>;

    fn next(&mut self) -> Option<Epoch<O>> {
        self.loader.begin_next(&mut self.numbers)
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        // After a resume earlier epochs are passed over.
        (0, self.numbers.size_hint().1)
    }
}

/// The batches of one epoch on this rank, in order.
///
/// Yields an error in the place of a batch that could not be loaded. A program that returns it ends the job on all ranks
/// with this cause. To go on instead, all ranks must agree to skip the step. After an error that concerns the whole job
/// the epoch is over.
///
/// Take a batch when it is used: each sets the weight of the following backwards. Dropping an epoch before its end is
/// announced to the other ranks, which must do the same.
#[must_use = "an epoch that is dropped unread ends the job unless all ranks drop it"]
pub struct Epoch<O: Send + 'static> {
    loader: ShardedLoader<O>,
    number: usize,
    /// What the world knows this reading of the loader as.
    track: u64,
    /// What this reading has to read: the whole epoch, or what an earlier run left of it.
    plan: EpochPlan,
    /// Steps that an earlier run took, by the present size of steps.
    before: usize,
    /// Begun with the first batch.
    pass: Option<Pass<O>>,
    /// Steps of `plan` that were asked for.
    taken: usize,
    /// Steps of `plan` whose batch was handed out, up to and including the last.
    reached: usize,
    /// Why the step asked for last has no batch.
    failure: Option<String>,
    /// Nothing follows.
    over: bool,
    /// The job has ended: nothing is left to announce.
    job_over: bool,
}

impl<O: Send + 'static> Epoch<O> {
    pub(super) fn new(loader: ShardedLoader<O>, number: usize, track: u64, plan: EpochPlan) -> Self {
        let before = plan.read() / plan.global_batch();
        let (taken, reached, failure, over, job_over) = (0, 0, None, false, false);
        Self { loader, number, track, plan, before, pass: None, taken, reached, failure, over, job_over }
    }

    /// The epoch's number, which its order depends on.
    pub fn number(&self) -> usize {
        self.number
    }

    /// Steps of the whole epoch, the same on every rank. In an epoch that was [resumed](ShardedLoader::resume), those that
    /// the items read before would have made at the present size of steps, and those that are left.
    #[allow(clippy::len_without_is_empty)] // never empty
    pub fn len(&self) -> usize {
        self.before + self.plan.steps()
    }

    /// Steps that were taken so far, those before a [resume](ShardedLoader::resume) included.
    pub fn step(&self) -> usize {
        self.before + self.taken
    }

    fn load(&mut self) -> Result<O, DataError> {
        let number = u32::try_from(self.number).map_err(|_| DataError::EpochTooLarge { epoch: self.number })?;
        let step = self.taken;
        self.taken += 1;
        let pass = match &mut self.pass {
            Some(pass) => pass,
            None => {
                let started = self.loader.pool().start(self.loader.reading(self.number, self.plan));
                let pass =
                    started.map_err(|(worker, error)| DataError::WorkerNotStarted { worker, source: error.into() })?;
                self.pass.insert(pass)
            }
        };
        let world = self.loader.ddp().world();
        let timeout = world.options().timeout;
        let loaded = match pass.next(timeout, || world.check()) {
            Some(loaded) => loaded.map_err(|failure| self.explain(step, failure))?,
            None => unreachable!("a pass has as many batches as its plan has steps"),
        };
        // Only now: a rank that could not load a step must not count as being there.
        let position = position(number, self.before + step + 1);
        world.advance(self.track, position)?;
        let (ddp, id) = (self.loader.ddp(), self.loader.id());
        let items = self.plan.share(step, ddp.rank()).len();
        ddp.state().batch_weight.batch_read(Step { loader: id, track: self.track, position }, items);
        let Range { start, end } = self.plan.step(step);
        self.loader.note_read(self.track, self.number, end);
        ddp.state().seed_batch(id, self.number, start);
        self.reached = step + 1;
        Ok(loaded)
    }

    fn explain(&self, step: usize, failure: Failure<burn_ddp_comm::Error>) -> DataError {
        let (steps, rank) = (self.len(), self.loader.ddp().rank());
        let what = format!(
            "step {} of {steps} in epoch {} of loader {} on rank {rank}",
            self.before + step + 1,
            self.number,
            self.loader.id()
        );
        let timeout = self.loader.ddp().world().options().timeout;
        DataError::from_failure(what, failure, timeout)
    }

    /// What other ranks hear if this one leaves now.
    fn announce(&self) {
        let Ok(number) = u32::try_from(self.number) else { return };
        let (id, steps) = (self.loader.id(), self.len());
        let what = match &self.failure {
            Some(failure) => format!("loader {id} ({failure})"),
            None => format!("loader {id} ({steps} steps)"),
        };
        let ddp = self.loader.ddp();
        // A batch that was read but never trained on: the others may be waiting in its backward.
        let begin = position(number, self.before);
        let used = ddp.state().batch_weight.used(id, self.track).unwrap_or(begin);
        let unused = format!("{what}, with a batch read but no backward");
        ddp.world().stop(backward_track(self.track), used.max(begin), &unused);
        ddp.world().stop(self.track, position(number, self.before + self.reached), &what);
    }
}

/// Steps count from 1 here: position 0 of an epoch is before its first step.
fn position(epoch: u32, steps: usize) -> u64 {
    u64::from(epoch) << 32 | steps as u64
}

impl<O: Send + 'static> Iterator for Epoch<O> {
    type Item = Result<O, DataError>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.over {
            return None;
        }
        if self.taken == self.plan.steps() {
            self.over = true;
            self.failure = None; // The program went on, as all ranks must have agreed to.
            self.loader.note_read(self.track, self.number, self.plan.items());
            self.pass = None; // The workers are free for the next epoch.
            self.loader.ddp().state().batch_weight.done(self.loader.id());
            return None;
        }
        let asked = Instant::now();
        let loaded = self.load();
        self.loader.ddp().state().meter.batch(self.loader.id(), asked);
        self.failure = loaded.as_ref().err().map(ToString::to_string);
        match &loaded {
            Ok(_) | Err(DataError::Dataset { .. } | DataError::WorkerPanicked { .. }) => {}
            Err(error) => {
                self.over = true;
                self.job_over = matches!(error, DataError::Comm(_));
            }
        }
        Some(loaded)
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        let left = if self.over { 0 } else { self.plan.steps() - self.taken };
        // An error that concerns the job ends the epoch early.
        (left.min(1), Some(left))
    }
}

impl<O: Send + 'static> Drop for Epoch<O> {
    fn drop(&mut self) {
        let complete = self.taken == self.plan.steps() && self.failure.is_none();
        // A panic is announced by the world itself, with its cause.
        if !complete && !self.job_over && !std::thread::panicking() {
            self.announce();
        }
        self.loader.ddp().state().batch_weight.done(self.loader.id());
    }
}

/// For Burn's `DataLoader`: the same batches with errors as Burn's.
pub(super) struct AsBurn<O: Send + 'static>(pub(super) Epoch<O>);

impl<O: Send + 'static> Iterator for AsBurn<O> {
    type Item = Result<O, DatasetError>;

    fn next(&mut self) -> Option<Self::Item> {
        self.0.next().map(|batch| batch.map_err(DataError::into_burn))
    }
}

impl<O: Send + 'static> DataLoaderIterator<O> for AsBurn<O> {
    fn progress(&self) -> Progress {
        let Epoch { plan, taken, .. } = &self.0;
        let processed = if *taken == 0 { plan.read() } else { plan.step(taken - 1).end };
        Progress::new(processed, plan.items(), Some("items".to_string()))
    }
}
