//! Reductions in which this rank takes part without a backward.

use super::piggyback::Piggyback;
use super::reducer::Reducer;
use crate::{Error, Result};

impl<T> Reducer<T> {
    /// Starts a reduction of what is held, without a backward.
    pub(crate) fn begin_flush(&mut self, skips: u64) -> Result<()> {
        self.refuse_broken()?;
        self.skips = skips;
        self.batches.begin_flush();
        self.start();
        self.begin_time();
        Ok(())
    }

    /// Takes part in a reduction of the other ranks without a backward: with the gradients that it holds of earlier
    /// micro-batches, or else with weight 0. Returns false if every rank did so and none had a gradient, which does not
    /// count as a step; if true, [`end_step`](Self::end_step) follows.
    pub(crate) fn shadow(&mut self, piggyback: Piggyback) -> Result<bool> {
        self.refuse_broken()?;
        self.batches.begin_flush();
        self.start();
        self.meter.begin();
        self.shadowing = true;
        let submitted = self.submit_rest(piggyback);
        self.shadowing = false;
        submitted?;
        let given = match self.finish() {
            Ok(_) => self.present.contains(&true) || self.wake,
            // All weights are 0: the only error here that all ranks see alike.
            Err(Error::Comm(e)) if e.group_usable() => false,
            Err(e) => return Err(e),
        };
        if !given {
            self.discard();
        }
        Ok(given)
    }
}
