//! Events that the threads of a launcher send to its main thread: exits of ranks, signals, output, news of other
//! launchers.

use std::time::Instant;

use serde::{Deserialize, Serialize};

use crate::rank_exit::RankExit;
use crate::report::stderr_tail::StderrSummary;

/// Event for the main thread. Ranks are local ranks here.
#[derive(Debug)]
pub(crate) enum Event {
    /// From a rank's waiter thread.
    Exited { rank: usize, exit: RankExit, at: Instant },
    /// From a rank's waiter thread: the rank was stopped by a signal such as SIGSTOP.
    Stopped { rank: usize, signal: i32 },
    /// From a rank's waiter thread: the stopped rank runs again.
    Continued { rank: usize },
    /// From the signal thread: this process was sent a signal to end, SIGTSTP or SIGWINCH.
    Signal(i32),
    /// From the signal thread: a signal that means nothing to a launcher, for the ranks.
    PassOn(i32),
    /// From the relay: all output is passed on.
    Relayed(Relayed),
    /// From the link to the other launchers: a launcher has published the end of the generation.
    Ordered { generation: u32, stop: Stop },
    /// From the link to the other launchers: node 0's store cannot be reached any more.
    Cut(Trouble),
}

/// Reason for the end of a generation, published by the first launcher that sees it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Stop {
    Failed {
        rank: usize,
        host: String,
        pid: u32,
        #[serde(rename = "end")]
        exit: RankExit,
    },
    Interrupted {
        host: String,
        signal: i32,
    },
    Trouble(Trouble),
    /// A further signal after the one that asked the ranks to stop, published beside it: they end at once.
    Hurried {
        signal: i32,
    },
}

/// Reason for the end of a job other than a rank's exit.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Trouble {
    pub(crate) message: String,
    pub(crate) exit_code: i32,
}

/// Result of the relay, once all output is passed on.
#[derive(Debug, Default)]
pub(crate) struct Relayed {
    /// End of each rank's stderr, by local rank.
    pub(crate) tails: Vec<StderrSummary>,
    /// Reason why output was lost, if it was.
    pub(crate) lost: Option<String>,
}
