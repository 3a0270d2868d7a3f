//! Gradients that are not finite: overflows of a half, or a training that diverges.

use super::accumulation::GradientReduction;
use super::communication_worker::{Done, Finished, Job, Worker};
use super::reducer::Reducer;
use crate::telemetry::step_meter::Communication;
use crate::{Error, Result};

/// Gradients of any rank that are not finite, as the flags of a step say. The same on all ranks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct NotFinite {
    any: bool,
    /// The first slot that has one, unless it is sharded.
    slot: Option<usize>,
}

impl NotFinite {
    pub(super) fn note(&mut self, slot: Option<usize>) {
        self.any = true;
        self.slot = self.slot.or(slot);
    }
}

/// The first slot, and its leaf, with a gradient of this rank that is not finite.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct FirstNotFinite(Option<(usize, usize)>);

impl FirstNotFinite {
    /// Notes the gradient of a slot and a leaf, unless it is finite.
    pub(crate) fn note_unless(&mut self, is_finite: bool, slot: usize, leaf: usize) {
        if !is_finite {
            self.join(FirstNotFinite(Some((slot, leaf))));
        }
    }

    fn join(&mut self, other: FirstNotFinite) {
        self.0 = self.0.into_iter().chain(other.0).min();
    }

    /// True if there is one.
    pub(super) fn is_some(&self) -> bool {
        self.0.is_some()
    }
}

/// A gradient that is not finite.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Culprit {
    /// The world rank that has it; `None` for an average that is not finite though all gradients are.
    pub(crate) rank: Option<usize>,
    pub(crate) slot: Option<usize>,
    pub(crate) leaf: usize,
}

impl<T> Reducer<T> {
    /// Notes which gradient of this rank for a sharded slot is not finite, if one is.
    pub(crate) fn note_sharded(&mut self, not_finite: FirstNotFinite) {
        self.sharded_not_finite.join(not_finite);
    }

    /// True if a sum of gradients that are finite may be out of the range of the type in which it travels.
    pub(crate) fn sums_in_half(&self) -> bool {
        self.settings.reduction == GradientReduction::Sum && self.settings.reduce.is_some()
    }

    /// True if an average of the step that [`finish`](Self::finish) has reduced is not finite, as its flags say. Where
    /// gradients stay on their device they say nothing: with `reads_device` the averages are asked.
    ///
    /// # Errors
    ///
    /// The device's.
    pub(crate) fn is_not_finite(&mut self, reads_device: bool) -> Result<bool> {
        if !self.not_finite.any && (reads_device || self.store.packs()) {
            let slot = self.store.average_not_finite().map_err(|e| self.fault(e))?;
            if slot.is_some() {
                self.not_finite.note(slot);
            }
        }
        Ok(self.not_finite.any)
    }

    /// The first gradient that is not finite, by rank. *Collective*, after [`is_not_finite`](Self::is_not_finite).
    pub(crate) fn culprit(&mut self, ranks: &[usize]) -> Result<Culprit> {
        let own = (0..self.present.len()).find_map(|slot| Some((slot, self.store.not_finite(slot)?)));
        let mut first = self.sharded_not_finite;
        first.join(FirstNotFinite(own));
        let own = first.0.map_or([-1, -1], |(slot, leaf)| [slot as i64, leaf as i64]);
        self.worker.submit(Job::Digests(own.to_vec())).map_err(|e| self.fault(e))?;
        let Finished { done, time } = self.worker.next().map_err(|e| self.fault(e))?;
        self.meter.done(Communication::Other("not finite"), time);
        let Done::Digests(all) = done else { return Err(self.fault(Worker::out_of_order())) };
        let all = all.map_err(Error::from)?;
        let found = ranks.iter().zip(&all).find(|(_, row)| row[0] >= 0);
        Ok(match found {
            Some((&rank, row)) => Culprit { rank: Some(rank), slot: Some(row[0] as usize), leaf: row[1] as usize },
            None => Culprit { rank: None, slot: self.not_finite.slot, leaf: 0 },
        })
    }
}
