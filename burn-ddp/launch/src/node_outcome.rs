//! How the ranks of one machine ended: what its launcher tells the others.

use std::path::PathBuf;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::event::Trouble;
use crate::exit::RankExit;

/// One machine's part of a generation.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct NodeOutcome {
    pub(crate) node: usize,
    pub(crate) host: String,
    pub(crate) ranks: Vec<RankOutcome>,
    /// The signal to this machine's launcher that stopped the job.
    pub(crate) interrupted_by: Option<i32>,
    /// This machine's launcher was told to end, be it after something else had ended the job.
    pub(crate) signalled: bool,
    pub(crate) output_lost: Option<String>,
    /// Why the job cannot go on, where that is not a rank's end: a machine that is lost, a program that cannot be started.
    pub(crate) trouble: Option<Trouble>,
    /// What this machine's ranks say ended their world, the first first.
    pub(crate) blames: Vec<Blame>,
    pub(crate) elapsed: Duration,
}

/// The end of one rank.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct RankOutcome {
    pub(crate) rank: usize,
    pub(crate) pid: u32,
    /// `None` if it did not even die when killed.
    #[serde(rename = "end")]
    pub(crate) exit: Option<RankExit>,
    pub(crate) after: Duration,
    /// It failed before it was told to stop.
    pub(crate) failed: bool,
    /// It still ran when the job was stopped, and so was told to end.
    pub(crate) stopped: bool,
    /// It did not end in time and was killed.
    pub(crate) killed: bool,
    pub(crate) last_lines: Vec<String>,
    pub(crate) panics: Vec<String>,
    pub(crate) log: Option<PathBuf>,
}

/// What a rank says ended its world.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Blame {
    /// Who says so.
    pub(crate) by: usize,
    pub(crate) culprit: Option<usize>,
    pub(crate) cause: String,
    /// Milliseconds since 1970.
    pub(crate) at: u64,
}
