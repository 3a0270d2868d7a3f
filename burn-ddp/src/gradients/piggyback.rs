//! What travels piggyback the buckets of a step: running statistics, digests of parameters, the order of the gradients.

use burn_ddp_comm::DType;

use super::accumulation::Buffer;
use super::reducer::Reducer;
use super::worker::{Done, Finished, Job, StatisticsSource};
use crate::Result;
use crate::telemetry::meter::Communication;
use crate::telemetry::REPORT_LEN;

/// What travels with the gradients of a step.
#[derive(Debug, Default)]
pub(crate) struct Piggyback {
    /// Running statistics, one buffer per dtype.
    pub buffers: Vec<(DType, Buffer)>,
    /// Replaced by those of the first rank that trains; else by the mean over the ranks, weighted by items.
    pub from_first: bool,
    /// Digests of the parameters, one per slot; sent in the steps for which [`Reducer::compares_replicas`] holds.
    pub digests: Option<Vec<i64>>,
}

/// What came of [`Piggyback`].
#[derive(Debug, Default)]
pub(crate) struct PiggybackResult {
    pub buffers: Vec<(DType, Buffer)>,
    /// By rank.
    pub digests: Vec<Vec<i64>>,
}

impl Reducer {
    /// Sends it off, behind the buckets.
    pub(super) fn send_piggyback(&mut self, piggyback: Piggyback) -> Result<()> {
        self.piggyback = (piggyback.buffers.len(), piggyback.digests.is_some());
        let source = if piggyback.from_first {
            StatisticsSource::First { trains: !self.shadowing }
        } else {
            StatisticsSource::All(self.items)
        };
        for (dtype, buffer) in piggyback.buffers {
            self.submit(Job::Buffers { dtype, buffer, source })?;
        }
        if let Some(mut digests) = piggyback.digests {
            // How the ranks get on travels with them.
            digests.extend(self.meter.report());
            self.submit(Job::Digests(digests))?;
        }
        if !self.order_agreed {
            self.submit(Job::AgreeOrder(self.arrived.clone()))?;
        }
        Ok(())
    }

    /// What became of it, once the buckets before it were collected.
    pub(super) fn receive_piggyback(&mut self) -> Result<PiggybackResult> {
        let (buffers, digests) = self.piggyback;
        let mut piggyback_result = PiggybackResult::default();
        let mut first_error = None;
        for _ in 0..buffers {
            match self.done("buffers") {
                Ok(Done::Buffers { result: Err(e), .. }) => {
                    first_error.get_or_insert(e);
                }
                Ok(Done::Buffers { dtype, buffer, .. }) => piggyback_result.buffers.push((dtype, buffer)),
                other => return Err(self.out_of_order(other.err())),
            }
        }
        if digests {
            match self.done("replica check") {
                Ok(Done::Digests(Err(e))) => {
                    first_error.get_or_insert(e);
                }
                Ok(Done::Digests(Ok(mut all))) => {
                    let reports = all.iter_mut().map(|row| row.split_off(row.len().saturating_sub(REPORT_LEN)));
                    let reports: Vec<Vec<i64>> = reports.collect();
                    self.meter.compare(&reports);
                    piggyback_result.digests = all;
                }
                other => return Err(self.out_of_order(other.err())),
            }
        }
        first_error.map_or(Ok(piggyback_result), |e| Err(e.into()))
    }

    /// What [`Job::AgreeOrder`] of this step yields, if there was one.
    pub(super) fn agreed_order(&mut self) -> Result<Option<Vec<usize>>> {
        if self.order_agreed {
            return Ok(None);
        }
        match self.done("order of buckets") {
            Ok(Done::Order(order)) => Ok(Some(order?.into_iter().map(|slot| slot as usize).collect())),
            other => Err(self.out_of_order(other.err())),
        }
    }

    /// The next finished job, which is not a reduction.
    fn done(&mut self, what: &'static str) -> Result<Done, String> {
        let Finished { done, time } = self.worker.next()?;
        self.meter.done(Communication::Other(what), time);
        Ok(done)
    }
}
