//! Small payloads behind the buckets of a step: running statistics, digests of parameters, the order of the gradients.

use burn_ddp_comm::DType;

use super::aligned_bytes::AlignedBytes;
use super::communication_worker::{Done, Finished, Job, StatisticsSource, Worker};
use crate::model::digest::differing;
use crate::model::parameter_movement::{Movement, from_row, to_row};
use crate::telemetry::REPORT_LEN;
use crate::telemetry::step_meter::{Communication, StepMeter};
use crate::{Error, Result};

/// Payload of a step.
#[derive(Debug, Default)]
pub(crate) struct Piggyback {
    /// Running statistics, one buffer per dtype.
    pub statistics: Vec<(DType, AlignedBytes)>,
    /// True if all ranks get the statistics of the first rank that trains; if false, they get the mean over the ranks,
    /// weighted by items.
    pub from_first: bool,
    /// Digests of the parameters, one per slot, in the steps for which [`Reducer::compares_replicas`](super::Reducer)
    /// holds.
    pub digests: Option<Vec<i64>>,
    /// Movements of the parameters, one per slot, to judge digests that differ. Empty to compare bit by bit.
    pub movements: Vec<Movement>,
    /// Digest of this rank's own gradients, which travels with `digests`; 0 for none.
    pub own_gradients: i64,
}

/// The payloads of all ranks after the collectives.
#[derive(Debug, Default)]
pub(crate) struct PiggybackResult {
    pub statistics: Vec<(DType, AlignedBytes)>,
    /// Digests by rank.
    pub digests: Vec<Vec<i64>>,
    /// Movements by rank of the slots whose digests differ.
    pub movements: Vec<Vec<Movement>>,
    /// Digest of each rank's own gradients, if digests were compared.
    pub own_gradients: Vec<i64>,
    /// Rank 0's order of gradients, if the ranks had not agreed on one.
    pub(super) order: Option<Vec<usize>>,
}

/// Payloads whose results the worker has not returned.
#[derive(Debug, Default)]
pub(super) struct Submitted {
    statistics: usize,
    digests: bool,
    order: bool,
    movements: Vec<Movement>,
}

impl Piggyback {
    /// Submits the payload behind the buckets, with the `order` of this rank's gradients if the ranks have not agreed
    /// on one.
    pub(super) fn submit(
        self,
        worker: &mut Worker,
        meter: &mut StepMeter,
        source: StatisticsSource,
        order: Option<Vec<u32>>,
    ) -> Result<Submitted, String> {
        let (statistics, digests) = (self.statistics.len(), self.digests.is_some());
        let submitted = Submitted { statistics, digests, order: order.is_some(), movements: self.movements };
        for (dtype, buffer) in self.statistics {
            worker.submit(Job::Statistics { dtype, buffer, source: source.clone() })?;
        }
        if let Some(mut digests) = self.digests {
            digests.push(self.own_gradients);
            // The times of this rank's steps travel with them.
            digests.extend(meter.report());
            worker.submit(Job::Digests(digests))?;
        }
        if let Some(order) = order {
            worker.submit(Job::AgreeOrder(order))?;
        }
        Ok(submitted)
    }
}

impl Submitted {
    /// Waits for the results, after all buckets were collected. `fault` turns a text into an error.
    pub(super) fn receive(
        self,
        worker: &mut Worker,
        meter: &mut StepMeter,
        fault: impl Fn(String) -> Error,
    ) -> Result<PiggybackResult> {
        let mut results = PiggybackResult::default();
        let mut first_error = None;
        let mut next = |meter: &mut StepMeter, name| {
            let Finished { done, time } = worker.next().map_err(&fault)?;
            meter.done(Communication::Other(name), time);
            Ok::<_, Error>(done)
        };
        // All results are taken before an error is returned: the rest would be taken for results of the next step.
        for _ in 0..self.statistics {
            match next(meter, "buffers")? {
                Done::Statistics { result: Err(e), .. } => {
                    first_error.get_or_insert(e);
                }
                Done::Statistics { dtype, buffer, .. } => results.statistics.push((dtype, buffer)),
                _ => return Err(fault(Worker::out_of_order())),
            }
        }
        if self.digests {
            match next(meter, "replica check")? {
                Done::Digests(Err(e)) => {
                    first_error.get_or_insert(e);
                }
                Done::Digests(Ok(mut all)) => {
                    let reports = all.iter_mut().map(|row| row.split_off(row.len().saturating_sub(REPORT_LEN)));
                    let reports: Vec<Vec<i64>> = reports.collect();
                    meter.compare(&reports);
                    results.own_gradients = all.iter_mut().filter_map(Vec::pop).collect();
                    results.digests = all;
                }
                _ => return Err(fault(Worker::out_of_order())),
            }
        }
        if self.order {
            match next(meter, "order of buckets")? {
                Done::Order(Err(e)) => {
                    first_error.get_or_insert(e);
                }
                Done::Order(Ok(order)) => results.order = Some(order.into_iter().map(|slot| slot as usize).collect()),
                _ => return Err(fault(Worker::out_of_order())),
            }
        }
        if let Some(error) = first_error {
            return Err(error.into());
        }
        if !self.movements.is_empty() {
            results.movements = exchange(&self.movements, &results.digests, worker, meter, fault)?;
        }
        Ok(results)
    }
}

/// Movements by rank of the slots whose digests differ. All ranks have the same `digests`, so all enter this second
/// round or none.
fn exchange(
    movements: &[Movement],
    digests: &[Vec<i64>],
    worker: &mut Worker,
    meter: &mut StepMeter,
    fault: impl Fn(String) -> Error,
) -> Result<Vec<Vec<Movement>>> {
    let differing = differing(digests);
    if differing.is_empty() {
        return Ok(Vec::new());
    }
    let own = to_row(differing.into_iter().map(|slot| movements[slot]));
    worker.submit(Job::Digests(own)).map_err(&fault)?;
    let Finished { done, time } = worker.next().map_err(&fault)?;
    meter.done(Communication::Other("movements"), time);
    match done {
        Done::Digests(all) => Ok(all?.iter().map(|row| from_row(row)).collect()),
        _ => Err(fault(Worker::out_of_order())),
    }
}
