//! Number of items that a backward stands for.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Mutex, PoisonError};

use burn_ddp_comm::{Progress, Track};

use crate::{Error, Result};

/// Weight of the next backward: items of the last batch that a loader handed out, or what the user set.
#[derive(Debug, Default)]
pub(crate) struct BatchWeight(Mutex<Inner>);

#[derive(Debug, Default)]
struct Inner {
    /// Set by the user since the last batch.
    explicit: Option<f64>,
    /// Items of the last batch.
    items: Option<usize>,
    /// Loaders that handed out a batch since the last backward and have not ended their epoch.
    loaders: BTreeSet<u32>,
    /// Batches so far, over all loaders.
    batches: u64,
    /// The step of the last batch, if it has had no backward yet.
    unused: Option<Step>,
    /// By loader: the last step whose batch had a backward.
    used: BTreeMap<u32, Step>,
}

/// A step of a loader, as the world's tracks know it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Step {
    pub(crate) loader: u32,
    pub(crate) track: Track,
    pub(crate) at: Progress,
}

/// Batch of one backward.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Batch {
    /// Weight of the backward.
    pub(crate) items: f64,
    /// Batches so far, over all loaders.
    pub(crate) number: u64,
    /// The step that has its first backward now.
    pub(crate) step: Option<Step>,
}

impl Inner {
    fn items(&self) -> f64 {
        self.explicit.unwrap_or_else(|| self.items.map_or(1.0, |n| n as f64))
    }
}

impl BatchWeight {
    /// Records that a loader hands out a batch of `items`.
    pub(crate) fn note_batch(&self, step: Step, items: usize) {
        let mut w = self.lock();
        w.explicit = None;
        w.items = Some(items);
        w.loaders.insert(step.loader);
        w.batches += 1;
        w.unused = Some(step);
    }

    /// The last step of `track` whose batch had a backward.
    pub(crate) fn used(&self, loader: u32, track: Track) -> Option<Progress> {
        self.lock().used.get(&loader).filter(|s| s.track == track).map(|s| s.at)
    }

    /// Records that a loader has ended its epoch: its batches no longer compete with those of others.
    pub(crate) fn done(&self, loader: u32) {
        self.lock().loaders.remove(&loader);
    }

    /// Sets the weight of the following backwards, until a loader hands out its next batch.
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`] if `items` is negative, not finite, or outside the range that sums in f32 can hold.
    pub(crate) fn set(&self, items: f64) -> Result<()> {
        // The range keeps weighted sums in f32 from overflowing and vanishing.
        if items != 0.0 && !(1e-6..=1e15).contains(&items) {
            return Err(Error::invalid(format!("the items of a batch are 0, or between 1e-6 and 1e15: got {items}")));
        }
        let mut w = self.lock();
        w.explicit = Some(items);
        w.loaders.clear();
        // What follows counts as a batch of its own.
        w.batches += 1;
        Ok(())
    }

    /// Items of the running or next backward.
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
        if w.explicit.is_none() && w.loaders.len() > 1 {
            return Err(Error::invalid(format!(
                "{} training loaders were read for one backward, so its number of items is ambiguous: call \
                 `ddp.set_batch_items(items)` before the backward, or read evaluation data through `ddp.eval_loader`",
                w.loaders.len()
            )));
        }
        w.loaders.clear();
        let step = w.unused.take();
        if let Some(step) = step {
            w.used.insert(step.loader, step);
        }
        Ok(Batch { items: w.items(), number: w.batches, step })
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Inner> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const AT: Progress = Progress { epoch: 0, step: 3 };

    fn track(loader: u32) -> Track {
        Track::Batches { loader, run: 1 }
    }

    fn step(loader: u32) -> Step {
        Step { loader, track: track(loader), at: AT }
    }

    #[test]
    fn one_without_anything_items_of_the_last_batch_with_a_loader() {
        let w = BatchWeight::default();
        assert_eq!(w.take().unwrap().items, 1.0);
        w.note_batch(step(0), 7);
        assert_eq!(w.items(), 7.0, "and looking takes nothing");
        assert_eq!(w.take().unwrap(), Batch { items: 7.0, number: 1, step: Some(step(0)) });
        assert_eq!((w.used(0, track(0)), w.used(0, track(1))), (Some(AT), None));
        assert_eq!(w.take().unwrap().items, 7.0, "a second backward on the same batch has the same weight");
    }

    #[test]
    fn two_loaders_are_ambiguous_until_said() {
        let w = BatchWeight::default();
        w.note_batch(step(0), 7);
        w.note_batch(step(1), 3);
        let e = w.take().unwrap_err().to_string();
        assert!(e.contains("ddp.set_batch_items(items)"), "{e}");
        w.set(10.0).unwrap();
        assert_eq!(w.take().unwrap().items, 10.0);
        w.note_batch(step(0), 7);
        assert_eq!(w.take().unwrap().items, 7.0);
        w.note_batch(step(1), 3);
        w.done(1);
        w.note_batch(step(0), 5);
        assert_eq!(w.take().unwrap().items, 5.0);
    }

    #[test]
    fn nonsense_is_refused() {
        for bad in [f64::NAN, f64::INFINITY, -1.0, 1e39, 1e-46] {
            assert!(BatchWeight::default().set(bad).is_err());
        }
    }
}
