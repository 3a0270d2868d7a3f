//! Outcome of a generation on one machine, as its launcher publishes it.

use std::path::PathBuf;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::event::Trouble;
use crate::rank_exit::RankExit;

/// One machine's part of a generation.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct NodeOutcome {
    pub(crate) node: usize,
    pub(crate) host: String,
    pub(crate) ranks: Vec<RankOutcome>,
    /// The signal to this machine's launcher that stopped the job.
    pub(crate) interrupted_by: Option<i32>,
    /// True if this machine's launcher was sent a signal to end, even after something else had ended the job.
    pub(crate) signalled: bool,
    /// True if its ranks were sent the signal that asks to stop, by this or another launcher.
    pub(crate) asked: bool,
    /// True if after that a further signal ended the job at once.
    pub(crate) hurried: bool,
    /// True if a further signal came when all of its ranks had ended.
    pub(crate) insisted: bool,
    /// True if a rank had caught the signal that asks to stop.
    pub(crate) can_stop: bool,
    /// True if all ranks had agreed to stop, as a rank of this machine reports.
    pub(crate) stopping: bool,
    /// The last checkpoint that a rank of this machine reports.
    pub(crate) checkpoint: Option<String>,
    pub(crate) output_lost: Option<String>,
    /// Reason other than a rank's exit why the job cannot go on: a machine is lost, or the program cannot be started.
    pub(crate) trouble: Option<Trouble>,
    /// Causes that this machine's ranks report, oldest first.
    pub(crate) blames: Vec<Blame>,
    pub(crate) elapsed: Duration,
}

/// Outcome of one rank.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct RankOutcome {
    pub(crate) rank: usize,
    pub(crate) pid: u32,
    /// `None` if the process did not exit even after SIGKILL.
    #[serde(rename = "end")]
    pub(crate) exit: Option<RankExit>,
    pub(crate) after: Duration,
    /// True if it failed before it was sent a signal to end.
    pub(crate) failed: bool,
    /// True if it still ran when the job was stopped, and so was sent a signal to end.
    pub(crate) stopped: bool,
    /// True if it did not end in time and was killed.
    pub(crate) killed: bool,
    pub(crate) last_lines: Vec<String>,
    pub(crate) panics: Vec<String>,
    pub(crate) log: Option<PathBuf>,
}

/// Cause that a rank reports for the end of its world.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Blame {
    /// Rank that reports it.
    pub(crate) by: usize,
    pub(crate) culprit: Option<usize>,
    pub(crate) cause: String,
    /// Milliseconds since 1970.
    pub(crate) at: u64,
}
