//! Weight of a backward: the number of items (or tokens, or whatever its loss is a mean over).
//!
//! A batch of a training loader is the weight of every backward from the moment it is handed out until its loader hands
//! out the next one or its epoch is over. A weight that the user sets meanwhile replaces it. Without either, a backward
//! has weight 1.

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use burn_ddp_comm::{Progress, Track};

use crate::{Error, Result};

/// Batches of training loaders without averaged gradients after which a warning is due.
const FORGOTTEN: u32 = 3;

/// Weights of the backwards of one rank. All handles of the rank share them: a batch may go through models of several
/// groups.
#[derive(Debug, Default)]
pub(crate) struct BatchWeight(Mutex<Inner>);

#[derive(Debug, Default)]
struct Inner {
    /// Set by the user since the last batch.
    explicit: Option<f64>,
    /// By loader: the last batch that was handed out, as long as it may be the weight of a backward.
    in_use: BTreeMap<LoaderKey, InUse>,
    /// Batches so far: those of all loaders, and one for each weight that the user set.
    count: u64,
    /// By loader: the last step whose batch had a backward.
    used: BTreeMap<LoaderKey, Step>,
    /// Batches that loaders handed out before gradients were averaged for the first time.
    before_averages: u32,
    /// True once gradients were averaged: in a backward of a wrapped model, or in front of an optimizer.
    averages: bool,
    /// Number of batches of a loader's epoch that had no backward before the next one was handed out.
    passed_over: BTreeMap<LoaderKey, u64>,
    /// Evidence that batches are read ahead of their backwards.
    read_ahead: ReadAhead,
}

/// Evidence that a loop takes each batch before the backward of the previous batch, as `peekable` does.
#[derive(Debug, Default, PartialEq)]
enum ReadAhead {
    #[default]
    Unknown,
    /// In the epoch that has ended, exactly one batch had no backward when the next was handed out. If a backward comes
    /// before any further batch, it is that of the epoch's last batch, and so the loop reads ahead.
    OneMissing,
    /// The warning is due, or given.
    Warned,
}

#[derive(Debug)]
struct InUse {
    batch: LoaderBatch,
    /// Number of the batch, over all loaders.
    number: u64,
    /// The batch had a backward.
    used: bool,
    /// Its epoch was dropped before the batch had a backward: it stays in use until any loader hands out a batch.
    taken_out: bool,
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
}

/// Batch of one backward.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Batch {
    /// Weight of the backward.
    pub(crate) items: f64,
    /// Batches so far, over all loaders.
    pub(crate) number: u64,
    /// Step of the batch, if it comes from a loader.
    pub(crate) step: Option<Step>,
    /// This is the first backward of that step.
    pub(crate) first: bool,
    /// The batch is the last of its epoch. False where the user set the weight: one batch may then be several
    /// micro-batches.
    pub(crate) last: bool,
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

impl Inner {
    /// The batch of the next backward. Batches that had no backward yet go first, batches of dropped epochs last; of
    /// several the newest.
    fn current(&mut self) -> Option<&mut InUse> {
        self.in_use.values_mut().max_by_key(|b| (!b.taken_out, !b.used, b.number))
    }

    fn items(&mut self) -> f64 {
        self.explicit.unwrap_or_else(|| self.current().map_or(1.0, |b| b.batch.weight))
    }
}

impl BatchWeight {
    /// Records that a loader hands out a batch. Returns true once, if [`FORGOTTEN`] batches were handed out and
    /// gradients were never averaged, as when `wrap` was forgotten.
    pub(crate) fn note_batch(&self, batch: LoaderBatch) -> bool {
        let mut w = self.lock();
        w.explicit = None;
        w.count += 1;
        let number = w.count;
        w.in_use.retain(|_, b| !b.taken_out);
        if w.read_ahead == ReadAhead::OneMissing {
            w.read_ahead = ReadAhead::Unknown;
        }
        let loader = batch.step.loader();
        let before = w.in_use.insert(loader, InUse { batch, number, used: false, taken_out: false });
        let passed_over = w.passed_over.entry(loader).or_default();
        match before.map(|b| b.used) {
            Some(used) => *passed_over += u64::from(!used),
            None => *passed_over = 0,
        }
        w.before_averages = w.before_averages.saturating_add(1);
        w.before_averages == FORGOTTEN && !w.averages
    }

    /// Records that gradients were averaged without a backward of a wrapped model.
    pub(crate) fn note_averages(&self) {
        self.lock().averages = true;
    }

    /// Records that `epoch` of a loader, on `track`, is over: it ran out of batches if `ended`, and was dropped before
    /// otherwise.
    pub(crate) fn end_epoch(&self, track: Track, epoch: usize, ended: bool) {
        let mut w = self.lock();
        // The loader may have begun another epoch meanwhile.
        let of_epoch = |b: &InUse| b.batch.step.track == track && b.batch.step.at.epoch as usize == epoch;
        let Some((&loader, batch)) = w.in_use.iter_mut().find(|(_, b)| of_epoch(b)) else { return };
        let all_used = batch.used;
        if ended || batch.used {
            w.in_use.remove(&loader);
            let one_missing = w.passed_over.remove(&loader) == Some(1) && all_used && w.explicit.is_none();
            if ended && one_missing && w.read_ahead == ReadAhead::Unknown {
                w.read_ahead = ReadAhead::OneMissing;
            }
            w.explicit = None;
        } else {
            batch.taken_out = true;
        }
    }

    /// The last step of `track` whose batch had a backward.
    pub(crate) fn used(&self, track: Track) -> Option<Progress> {
        self.lock().used.values().find(|step| step.track == track).map(|step| step.at)
    }

    /// True if a backward had a batch of a training loader.
    pub(crate) fn reads_loaders(&self) -> bool {
        !self.lock().used.is_empty()
    }

    /// Returns true once, in the first backward that shows that batches are read ahead of their backwards.
    pub(crate) fn shows_reading_ahead(&self) -> bool {
        let mut w = self.lock();
        let shows = w.read_ahead == ReadAhead::OneMissing && w.explicit.is_none() && w.in_use.is_empty();
        if shows {
            w.read_ahead = ReadAhead::Warned;
        }
        shows
    }

    /// Sets the weight of the following backwards, until a loader hands out its next batch or the epoch in use ends.
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`] if [`check`] refuses it.
    pub(crate) fn set(&self, items: f64) -> Result<()> {
        check(items).map_err(Error::invalid)?;
        let mut w = self.lock();
        w.explicit = Some(items);
        // The backwards that follow count as a batch of their own.
        w.count += 1;
        Ok(())
    }

    /// Weight of the running or next backward.
    pub(crate) fn items(&self) -> f64 {
        self.lock().items()
    }

    /// Takes the batch of the backward that begins.
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`] if several loaders handed out a batch for it and the user did not set the items.
    pub(crate) fn take(&self) -> Result<Batch> {
        let mut w = self.lock();
        w.averages = true;
        let unused = w.in_use.values().filter(|b| !b.used && !b.taken_out).count();
        if w.explicit.is_none() && unused > 1 {
            return Err(Error::invalid(format!(
                "{unused} training loaders were read for one backward, so its number of items is ambiguous: call \
                 `ddp.set_batch_items(items)` before the backward, or read evaluation data through `ddp.eval_loader`",
            )));
        }
        let (items, number, explicit) = (w.items(), w.count, w.explicit.is_some());
        let Some(current) = w.current() else {
            return Ok(Batch { items, number, step: None, first: false, last: false });
        };
        let (LoaderBatch { step, last, .. }, first) = (current.batch, !current.used);
        w.in_use.values_mut().for_each(|b| b.used = true);
        w.used.insert(step.loader(), step);
        Ok(Batch { items, number, step: Some(step), first, last: last && !explicit })
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
        w.note_batch(LoaderBatch { step: step(loader), weight, last: false });
    }

    fn backward(w: &BatchWeight) -> f64 {
        w.take().unwrap().items
    }

    #[test]
    fn a_batch_weighs_all_of_its_backwards() {
        let w = BatchWeight::default();
        assert_eq!(backward(&w), 1.0);
        hand_out(&w, 0, 7.0);
        assert_eq!(w.items(), 7.0, "and looking takes nothing");
        let batch = Batch { items: 7.0, number: 1, step: Some(step(0)), first: true, last: false };
        assert_eq!(w.take().unwrap(), batch);
        assert_eq!(w.used(track(0)), Some(step(0).at));
        assert_eq!(w.used(Track::Batches { group: 1, loader: 0, run: 2 }), None);
        assert_eq!(w.take().unwrap(), Batch { first: false, ..batch });
    }

    #[test]
    fn a_batch_weighs_nothing_after_its_epoch() {
        for ended in [true, false] {
            let w = BatchWeight::default();
            hand_out(&w, 0, 7.0);
            backward(&w);
            w.end_epoch(track(0), 0, ended);
            assert_eq!(backward(&w), 1.0, "after the loop");
            // The same with a weight set for the batch.
            hand_out(&w, 0, 7.0);
            w.set(5.0).unwrap();
            assert_eq!(backward(&w), 5.0);
            w.end_epoch(track(0), 0, ended);
            assert_eq!(backward(&w), 1.0, "after the loop");
        }
        let w = BatchWeight::default();
        hand_out(&w, 0, 7.0);
        w.end_epoch(track(0), 1, true);
        w.end_epoch(Track::Batches { group: 1, loader: 0, run: 0 }, 0, true);
        assert_eq!(backward(&w), 7.0, "the end of another epoch of the loader");
    }

    #[test]
    fn a_batch_taken_out_of_its_epoch_weighs_until_the_next() {
        let w = BatchWeight::default();
        hand_out(&w, 0, 7.0);
        w.end_epoch(track(0), 0, false); // `let batch = train.iter().next()`
        assert_eq!([backward(&w), backward(&w)], [7.0; 2]);
        hand_out(&w, 1, 3.0);
        assert_eq!(backward(&w), 3.0);
        w.end_epoch(track(1), 0, true);
        assert_eq!(backward(&w), 1.0);
    }

    #[test]
    fn batches_read_for_validation_weigh_nothing() {
        for ended in [true, false] {
            let w = BatchWeight::default();
            hand_out(&w, 0, 7.0);
            hand_out(&w, 1, 3.0);
            w.end_epoch(track(1), 0, ended);
            assert_eq!(backward(&w), 7.0, "validation before the backward");
            hand_out(&w, 1, 3.0);
            w.end_epoch(track(1), 0, ended);
            assert_eq!(backward(&w), 7.0, "and between two");
        }
        let w = BatchWeight::default();
        hand_out(&w, 1, 3.0);
        w.end_epoch(track(1), 0, true);
        assert_eq!(backward(&w), 1.0, "and beside a loader that is not ours");
    }

    #[test]
    fn two_loaders_are_ambiguous_until_said() {
        let w = BatchWeight::default();
        hand_out(&w, 0, 7.0);
        hand_out(&w, 1, 3.0);
        let e = w.take().unwrap_err().to_string();
        assert!(e.contains("2 training loaders") && e.contains("ddp.set_batch_items(items)"), "{e}");
        w.set(10.0).unwrap();
        assert_eq!(backward(&w), 10.0);
        hand_out(&w, 0, 7.0);
        assert_eq!(backward(&w), 7.0);
        hand_out(&w, 1, 3.0);
        w.end_epoch(track(1), 0, true);
        hand_out(&w, 0, 5.0);
        assert_eq!(backward(&w), 5.0);
    }

    #[test]
    fn the_last_batch_of_an_epoch_is_known_to_each_of_its_backwards_unless_it_is_cut() {
        let w = BatchWeight::default();
        w.note_batch(LoaderBatch { step: step(0), weight: 2.0, last: true });
        assert!(w.take().unwrap().last && w.take().unwrap().last);
        w.set(1.0).unwrap();
        assert!(!w.take().unwrap().last, "the batch may be several micro-batches");
    }

    /// Hands out `batches` of an epoch, calls `backward` after those that `has_backward` says, and ends the epoch.
    fn epoch(w: &BatchWeight, loader: u32, batches: usize, has_backward: impl Fn(usize) -> bool) {
        for nth in 0..batches {
            hand_out(w, loader, 7.0);
            if has_backward(nth) {
                backward(w);
            }
        }
        w.end_epoch(track(loader), 0, true);
    }

    #[test]
    fn reading_ahead_shows_in_the_backward_after_the_epoch() {
        // `peekable`: the first batch is handed out alone, and the last backward comes after the end.
        let w = BatchWeight::default();
        epoch(&w, 0, 3, |nth| nth > 0);
        assert!(w.shows_reading_ahead(), "the backward of the third batch");
        backward(&w);
        assert!(!w.shows_reading_ahead(), "once");
        epoch(&w, 0, 3, |nth| nth > 0);
        assert!(!w.shows_reading_ahead(), "once");

        let quiet = |prepare: &dyn Fn(&BatchWeight)| {
            let w = BatchWeight::default();
            prepare(&w);
            assert!(!w.shows_reading_ahead());
        };
        quiet(&|w| epoch(w, 0, 3, |_| true));
        quiet(&|w| epoch(w, 0, 4, |nth| nth > 1)); // two batches were skipped
        quiet(&|w| epoch(w, 0, 3, |nth| nth == 0)); // read for validation
        quiet(&|w| {
            epoch(w, 0, 3, |nth| nth > 0); // a batch was skipped
            hand_out(w, 0, 7.0); // the next epoch
        });
        quiet(&|w| {
            epoch(w, 0, 3, |nth| nth > 0);
            w.set(5.0).unwrap();
        });
    }

    #[test]
    fn nonsense_is_refused() {
        for bad in [f64::NAN, f64::INFINITY, -1.0, 1e39, 1e-46] {
            assert!(BatchWeight::default().set(bad).is_err());
        }
    }
}
