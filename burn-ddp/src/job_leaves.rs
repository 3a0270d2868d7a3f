//! The number of logical ranks of a job, set once.

use std::sync::{Mutex, MutexGuard, PoisonError};

use burn_ddp_comm::LogicalRanks;

use crate::{Error, Result};

/// The logical ranks of a handle, as one rank knows them.
#[derive(Debug, Default)]
pub(crate) struct JobLeaves(Mutex<Inner>);

#[derive(Debug, Default)]
struct Inner {
    division: Option<LogicalRanks>,
    /// What has asked for the division first: from then on it cannot change.
    used_by: Option<&'static str>,
    /// Items of a full leaf, those of the first training loader: leaves count relative to it.
    nominal: Option<f64>,
    /// True if what breaks the promise is an error.
    exact: bool,
}

impl JobLeaves {
    /// The division, which cannot change from now on, because `what` depends on it.
    pub(crate) fn used_by(&self, what: &'static str) -> Option<LogicalRanks> {
        let mut inner = self.lock();
        inner.used_by.get_or_insert(what);
        inner.division
    }

    /// Fails if a step has several leaves on a process, in which `what` has no meaning.
    pub(crate) fn refuse_several(&self, what: &str, help: &str) -> Result<()> {
        match self.division().filter(|division| division.of_rank(0).len() > 1) {
            Some(division) => Err(Error::invalid(format!(
                "{what} with {} logical ranks on {} processes: {help}",
                division.count(),
                division.ranks()
            ))),
            None => Ok(()),
        }
    }

    /// The division as it is now.
    pub(crate) fn division(&self) -> Option<LogicalRanks> {
        self.lock().division
    }

    /// Notes the items of a full leaf of a training loader; the first one counts.
    pub(crate) fn note_nominal(&self, items: f64) {
        self.lock().nominal.get_or_insert(items);
    }

    /// Items of a full leaf; 1 without a training loader.
    pub(crate) fn nominal(&self) -> f64 {
        self.lock().nominal.unwrap_or(1.0)
    }

    /// Makes what breaks the promise an error from now on.
    pub(crate) fn make_exact(&self) {
        self.lock().exact = true;
    }

    /// Fails, if bits must not depend on the number of processes, because they do by `what`.
    pub(crate) fn refuse_if_exact(&self, what: &str, help: &str) -> Result<()> {
        if self.lock().exact { Err(inexact(what, help)) } else { Ok(()) }
    }

    /// Sets the division of `count` leaves between `ranks`.
    pub(crate) fn set(&self, count: usize, ranks: usize) -> Result<()> {
        let Some(division) = LogicalRanks::new(count, ranks) else {
            return Err(Error::invalid(format!(
                "{count} logical ranks for {ranks} processes: each process needs one at least"
            )));
        };
        let mut inner = self.lock();
        match (inner.division, inner.used_by) {
            (Some(known), _) if known != division => Err(Error::invalid(format!(
                "{count} logical ranks, but the job has {}: they are set once, by one of `burnrun --logical-ranks`, \
                the config file and `ddp.set_logical_ranks`",
                known.count()
            ))),
            (None, Some(what)) => Err(Error::invalid(format!(
                "set the number of logical ranks before {what} depends on it: right after `Ddp::init`"
            ))),
            _ => {
                inner.division = Some(division);
                Ok(())
            }
        }
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The error of `what`, which would make bits depend on the number of processes.
pub(crate) fn inexact(what: &str, help: &str) -> Error {
    Error::invalid(format!("`exact`: the bits would depend on the number of processes, because of {what}; {help}"))
}
