//! Steps that are given up: their gradients and results are dropped.

use super::not_finite::FirstNotFinite;
use super::not_finite::NotFinite;
use super::reducer::Reducer;

impl<T> Reducer<T> {
    /// Drops gradients of micro-batches that were not reduced yet. Unless all ranks do, the next reduction is an error.
    pub(crate) fn discard_held(&mut self) {
        self.note_lost();
        self.discard();
    }

    /// Drops the gradients and results of the running step.
    pub(crate) fn discard(&mut self) {
        for (bucket, buffer) in self.worker.recall() {
            self.ring.put_back(bucket, buffer);
        }
        if self.broken.is_none() && !self.ring.is_complete() {
            self.broken = Some(self.fault(
                "an earlier backward ended half-way (an error or a panic) with buckets under way; the ranks cannot \
                get back in step: restart the job".into(),
            ));
        }
        self.batches.clear();
        self.store.clear();
        self.sharded_not_finite = FirstNotFinite::default();
        self.failed = None;
        self.forget_arrivals();
    }

    /// Notes that a batch of this rank is lost: the next reduction is an error, unless all ranks have lost one.
    pub(crate) fn note_lost(&mut self) {
        self.discards += 1;
    }

    /// Gives up the running backward and the micro-batches before it, `alike` on all ranks or alone. A rank that gives
    /// up alone may make the backward again, unless it counted towards a step of several.
    pub(crate) fn abandon(&mut self, alike: bool) {
        match !alike && (self.settings.accumulation > 1 || self.batches.count() > 1) {
            true => self.discard_held(),
            false => self.discard(),
        }
    }

    /// Forgets the gradients that arrived in the last backward.
    pub(super) fn forget_arrivals(&mut self) {
        self.filled.iter_mut().for_each(|f| *f = 0);
        self.arrived.clear();
        self.next = 0;
        self.collected = 0;
        self.present.iter_mut().for_each(|present| *present = false);
        self.not_finite = NotFinite::default();
        self.wake = false;
        self.stop = false;
    }
}
