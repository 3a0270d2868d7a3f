//! What travels beside the buckets of a step: running statistics, digests of parameters, the order of the gradients.

use burn_ddp_comm::DType;

use super::worker::{Done, Finished, Job, Whose};
use super::{Buffer, Reducer};
use crate::Result;
use crate::telemetry::meter::Communication;
use crate::telemetry::straggler::REPORT_LEN;

/// What travels with the gradients of a step.
#[derive(Debug, Default)]
pub(crate) struct Beside {
    /// Running statistics, one buffer per dtype.
    pub buffers: Vec<(DType, Buffer)>,
    /// Replaced by those of the first rank that trains; else by the mean over the ranks, weighted by items.
    pub from_first: bool,
    /// Digests of the parameters, one per slot; sent in the steps for which [`Reducer::compares_replicas`] holds.
    pub digests: Option<Vec<i64>>,
}

/// What came of [`Beside`].
#[derive(Debug, Default)]
pub(crate) struct Settled {
    pub buffers: Vec<(DType, Buffer)>,
    /// By rank.
    pub digests: Vec<Vec<i64>>,
}

impl Reducer {
    /// Sends it off, behind the buckets.
    pub(super) fn send_beside(&mut self, beside: Beside) -> Result<()> {
        self.beside = (beside.buffers.len(), beside.digests.is_some());
        let whose = if beside.from_first { Whose::First { trains: !self.standing_in } } else { Whose::All(self.items) };
        for (dtype, buffer) in beside.buffers {
            self.submit(Job::Buffers { dtype, buffer, whose })?;
        }
        if let Some(mut digests) = beside.digests {
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
    pub(super) fn settle(&mut self) -> Result<Settled> {
        let (buffers, digests) = self.beside;
        let mut settled = Settled::default();
        let mut first_error = None;
        for _ in 0..buffers {
            match self.done("buffers") {
                Ok(Done::Buffers { result: Err(e), .. }) => {
                    first_error.get_or_insert(e);
                }
                Ok(Done::Buffers { dtype, buffer, .. }) => settled.buffers.push((dtype, buffer)),
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
                    settled.digests = all;
                }
                other => return Err(self.out_of_order(other.err())),
            }
        }
        first_error.map_or(Ok(settled), |e| Err(e.into()))
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
