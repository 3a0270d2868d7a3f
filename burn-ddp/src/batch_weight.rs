//! Weight of a backward: the number of items (or tokens, or whatever its loss is a mean over).
//!
//! A batch of a training loader is the weight of every call from the moment it is handed out until a loader hands out
//! the next one. A call may give another weight. Without a loader a call weighs 1.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::{Mutex, MutexGuard, PoisonError};

use burn_ddp_comm::{LogicalRanks, Progress, Track};

use crate::{Error, Result};

/// Batches of training loaders without averaged gradients after which a warning is due.
const FORGOTTEN: u32 = 3;

/// Weights of the backwards of one rank. All handles of the rank share them: a batch may go through models of several
/// groups.
#[derive(Debug, Default)]
pub(crate) struct BatchWeight(Mutex<Inner>);

#[derive(Debug, Default)]
struct Inner {
    /// The last batch that a training loader handed out.
    last: Option<LoaderBatch>,
    /// Number of batches so far, over all loaders.
    count: u64,
    /// Number of batches that were handed out since the last call or skip.
    waiting: u64,
    /// By loader: the last step whose batch had a call or a skip.
    used: BTreeMap<LoaderKey, Step>,
    /// Batches that loaders handed out before gradients were averaged for the first time.
    before_averages: u32,
    /// True once gradients were averaged: in a backward of a wrapped model, or in front of an optimizer.
    averages: bool,
    /// Weight of the batches whose gradients are averaged in front of an optimizer; `None` without a batch.
    of_optimizer: Option<f64>,
    /// True if the next batch is the first one of such an average.
    optimizer_stepped: bool,
    /// Leaf of the last training batch, or of the last `next_leaf`.
    leaf: Option<Leaf>,
}

/// A logical rank of a handle.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Leaf {
    /// Number of the handle's group.
    pub(crate) group: u64,
    pub(crate) division: LogicalRanks,
    /// The step: of a loader its number, epoch and step, of `next_leaf` 0, 0 and the number of steps so far.
    pub(crate) step: (u64, u64, u64),
    pub(crate) leaf: usize,
    /// False if the batch repeats a leaf that counts already.
    pub(crate) counts: bool,
    /// True if the batch is the last one of its step on this rank.
    pub(crate) ends_step: bool,
}

/// A step of a loader, as the world's tracks know it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Step {
    pub(crate) track: Track,
    pub(crate) at: Progress,
}

/// A loader of this rank: the number of the group that shares it, and its number there.
type LoaderKey = (u64, u32);

impl Step {
    fn loader(&self) -> LoaderKey {
        let (Track::Batches { group, loader, .. } | Track::Backwards { group, loader, .. }) = self.track;
        (group, loader)
    }
}

/// A batch that a loader hands out.
#[derive(Clone, Copy, Debug)]
pub(crate) struct LoaderBatch {
    pub(crate) step: Step,
    pub(crate) weight: f64,
    /// No further batch of the epoch follows.
    pub(crate) last: bool,
    /// With logical ranks.
    pub(crate) leaf: Option<Leaf>,
}

/// Batch of one call.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Batch {
    /// Weight of the call.
    pub(crate) items: f64,
    /// True if the program gave the weight. One batch may then be several micro-batches.
    pub(crate) weighted: bool,
    /// Batches so far, over all loaders.
    pub(crate) number: u64,
    /// Step of the batch, if it comes from a loader.
    pub(crate) step: Option<Step>,
    /// This is the first call of that step.
    pub(crate) first: bool,
    /// The batch is the last of its epoch.
    pub(crate) last: bool,
    /// Leaf of the batch, if it comes from a loader with logical ranks or from `next_leaf`.
    pub(crate) leaf: Option<Leaf>,
}

/// Checks the weight of a batch.
///
/// # Errors
///
/// The reason, if it is negative, not finite, or outside the range that sums in f32 can hold.
pub(crate) fn check(weight: f64) -> Result<(), String> {
    // The range keeps weighted sums in f32 from overflowing and vanishing.
    match weight == 0.0 || (1e-6..=1e15).contains(&weight) {
        true => Ok(()),
        false => Err(format!("the items of a batch are 0, or between 1e-6 and 1e15: got {weight}")),
    }
}

impl BatchWeight {
    /// Records that a loader hands out a batch. Returns true once, if [`FORGOTTEN`] batches were handed out and
    /// gradients were never averaged, as when `wrap` was forgotten.
    pub(crate) fn note_batch(&self, batch: LoaderBatch) -> bool {
        let mut w = self.lock();
        w.count += 1;
        w.waiting += 1;
        w.last = Some(batch);
        w.leaf = batch.leaf;
        let earlier = w.of_optimizer.filter(|_| !std::mem::take(&mut w.optimizer_stepped));
        w.of_optimizer = Some(earlier.unwrap_or_default() + batch.weight);
        w.before_averages = w.before_averages.saturating_add(1);
        w.before_averages == FORGOTTEN && !w.averages
    }

    /// Leaf of the last training batch, or of the last [`next_leaf`](Self::next_leaf).
    pub(crate) fn leaf(&self) -> Option<Leaf> {
        self.lock().leaf
    }

    /// Begins a batch without a loader, of a handle with this group: that of the leaf after the last one of `own`, or
    /// of the first.
    pub(crate) fn next_leaf(&self, group: u64, division: LogicalRanks, own: Range<usize>) -> Leaf {
        let mut w = self.lock();
        let last = w.leaf.filter(|last| (last.group, last.division) == (group, division));
        let (_, _, steps) = last.map_or((0, 0, 0), |last| last.step);
        let next = last.map(|last| last.leaf + 1).filter(|next| own.contains(next));
        let (leaf, steps) = next.map_or((own.start, steps + 1), |next| (next, steps));
        let leaf = Leaf { group, division, step: (0, 0, steps), leaf, counts: true, ends_step: leaf + 1 == own.end };
        w.leaf = Some(leaf);
        w.count += 1;
        leaf
    }

    /// Records that an optimizer averages the gradients of all batches since the last step with a batch of its own.
    /// Returns false if they do not count, since all of these batches have weight 0.
    pub(crate) fn note_optimizer_step(&self) -> bool {
        let mut w = self.lock();
        (w.averages, w.optimizer_stepped) = (true, true);
        w.of_optimizer != Some(0.0)
    }

    /// The last step of `track` whose batch had a call.
    pub(crate) fn used(&self, track: Track) -> Option<Progress> {
        self.lock().used.values().find(|step| step.track == track).map(|step| step.at)
    }

    /// True if a call had a batch of a training loader.
    pub(crate) fn reads_loaders(&self) -> bool {
        !self.lock().used.is_empty()
    }

    /// Weight of the last batch; 1 without one.
    pub(crate) fn items(&self) -> f64 {
        self.lock().last.map_or(1.0, |batch| batch.weight)
    }

    /// Takes the batch of the call that begins, to which the program gave the weight `items` or none.
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`] if [`check`] refuses the weight, or several batches were handed out for one call.
    pub(crate) fn take(&self, items: Option<f64>) -> Result<Batch> {
        items.map_or(Ok(()), check).map_err(Error::invalid)?;
        let mut w = self.lock();
        w.averages = true;
        if items.is_none() && w.waiting > 1 {
            return Err(Error::invalid(format!(
                "{} batches of training loaders were handed out since the last backward (read ahead, zipped, or left \
                out), so the weight of this one is not known: call `ddp.weighted(items).backward(..)`, with 0 for a \
                batch that must not count; or `ddp.skip_batch()?`, on every rank, for each batch that gets no \
                backward; or read data for evaluation through `ddp.eval_loader`",
                w.waiting
            )));
        }
        if w.waiting > 1 && w.leaf.is_some() {
            return Err(Error::invalid(format!(
                "{} batches of training loaders were handed out since the last backward; with logical ranks each has \
                its own place in the step: take a batch when it is used, and give one that must not count a backward \
                by `ddp.weighted(0.0)`",
                w.waiting
            )));
        }
        let first = w.waiting > 0;
        w.waiting = 0;
        // A repeated item never counts, whatever weight the program gives it.
        let items = items.map(|items| if w.leaf.is_none_or(|leaf| leaf.counts) { items } else { 0.0 });
        let of_loader = w.last.map_or(1.0, |batch| batch.weight);
        let (items, weighted) = (items.unwrap_or(of_loader), items.is_some());
        let (step, last) = (w.last.map(|batch| batch.step), w.last.is_some_and(|batch| batch.last));
        if let Some(step) = step {
            w.used.insert(step.loader(), step);
        }
        Ok(Batch { items, weighted, number: w.count, step, first, last, leaf: w.leaf })
    }

    /// Records that the last batch gets no backward. Returns its step.
    pub(crate) fn skip(&self) -> Option<Step> {
        let mut w = self.lock();
        w.waiting = w.waiting.saturating_sub(1);
        w.of_optimizer = None;
        let step = w.last.map(|batch| batch.step)?;
        w.used.insert(step.loader(), step);
        Some(step)
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn track(loader: u32) -> Track {
        Track::Batches { group: 1, loader, run: 1 }
    }

    fn step(loader: u32) -> Step {
        Step { track: track(loader), at: Progress { epoch: 0, step: 3 } }
    }

    fn hand_out(w: &BatchWeight, loader: u32, weight: f64) {
        w.note_batch(LoaderBatch { step: step(loader), weight, last: false, leaf: None });
    }

    fn call(w: &BatchWeight) -> f64 {
        w.take(None).unwrap().items
    }

    #[test]
    fn a_batch_weighs_all_of_its_calls_until_the_next_batch() {
        let w = BatchWeight::default();
        assert_eq!(call(&w), 1.0);
        hand_out(&w, 0, 7.0);
        assert_eq!(w.items(), 7.0, "and looking takes nothing");
        let step = Some(step(0));
        let batch = Batch { items: 7.0, weighted: false, number: 1, step, first: true, last: false, leaf: None };
        assert_eq!(w.take(None).unwrap(), batch);
        assert_eq!(w.used(track(0)), step.map(|step| step.at));
        assert_eq!(w.used(Track::Batches { group: 1, loader: 0, run: 2 }), None);
        assert_eq!(w.take(None).unwrap(), Batch { first: false, ..batch });
        let weighted = Batch { items: 0.5, weighted: true, first: false, ..batch };
        assert_eq!(w.take(Some(0.5)).unwrap(), weighted);
        assert_eq!([w.items(), call(&w)], [7.0; 2]);
    }

    #[test]
    fn batches_without_a_call_are_an_error_until_something_is_said_of_them() {
        let w = BatchWeight::default();
        let two = |other: u32| {
            hand_out(&w, 0, 7.0);
            hand_out(&w, other, 3.0);
            let e = w.take(None).unwrap_err().to_string();
            assert!(
                e.contains("2 batches") && e.contains("ddp.weighted(items)") && e.contains("ddp.skip_batch()"),
                "{e}"
            );
        };
        for other in [0, 1] {
            two(other);
            assert_eq!(w.take(Some(10.0)).unwrap().items, 10.0);
            assert_eq!(call(&w), 3.0);
            two(other);
            w.skip();
            assert_eq!(call(&w), 3.0);
            hand_out(&w, 0, 2.0);
            w.skip();
            hand_out(&w, 0, 5.0);
            assert_eq!(call(&w), 5.0);
        }
    }

    #[test]
    fn nonsense_is_refused() {
        for bad in [f64::NAN, f64::INFINITY, -1.0, 1e39, 1e-46] {
            assert!(BatchWeight::default().take(Some(bad)).is_err());
        }
    }
}
