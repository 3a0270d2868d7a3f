//! Errors of a job that could not be started. The end of a started job is an [`Outcome`](crate::Outcome), not an error.

use std::ffi::OsString;
use std::io;
use std::path::PathBuf;

/// The job did not start; no rank is left running.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LaunchError {
    /// The number of ranks makes no sense.
    #[error("cannot start {nproc} ranks on one machine: the number must be between 1 and {max}")]
    BadRankCount {
        /// The number asked for.
        nproc: usize,
        /// The largest number accepted.
        max: usize,
    },

    /// The program does not exist, or its interpreter or loader does not.
    #[error("cannot start `{}`: {reason}", program.display())]
    ProgramNotFound {
        /// The program as given.
        program: OsString,
        /// Kind of file that is missing, and a hint.
        reason: String,
    },

    /// The program exists but the system refuses to execute it.
    #[error("cannot start `{}`: {reason}", program.display())]
    ProgramNotExecutable {
        /// The program as given.
        program: OsString,
        /// Fault of the file, and a hint.
        reason: String,
    },

    /// The system refused a process or a thread.
    #[error("cannot start rank {rank}: {source}{}", hint(source))]
    Spawn {
        /// The rank that could not be started; lower ranks were stopped again.
        rank: usize,
        /// Error of the system.
        source: io::Error,
    },

    /// A setting is wrong, or settings contradict each other.
    #[error("{0}")]
    Usage(String),

    /// The hostfile cannot be read, or one of its lines is wrong.
    #[error("the hostfile {} cannot be used: {reason}", path.display())]
    Hostfile {
        /// The hostfile.
        path: PathBuf,
        /// Error of the system, or the wrong line and its mistake.
        reason: String,
    },

    /// The launchers of the job's machines were started with settings that do not fit together: different numbers of
    /// machines, versions of burnrun or program arguments, one node rank twice, or more launchers than machines.
    #[error("{0}")]
    Disagree(String),

    /// The ranks cannot be bound to cores as asked.
    #[error("{0}")]
    Binding(String),

    /// The rendezvous store could not be opened.
    #[error("cannot open the rendezvous store: {0}")]
    Store(#[source] Box<dyn std::error::Error + Send + Sync>),

    /// The launchers of several machines could not meet, lost each other before the ranks were started, or got a
    /// message that they cannot parse.
    #[error("{0}")]
    Nodes(String),

    /// Logs, reports or the timeline cannot be written there.
    #[error("cannot write to {}: {source}", path.display())]
    LogDir {
        /// The directory or file.
        path: PathBuf,
        /// Error of the system.
        source: io::Error,
    },

    /// The log directory holds no job, or the job has no failed rank to report.
    #[error("{}: {reason}", path.display())]
    NoReport {
        /// Directory that was searched.
        path: PathBuf,
        /// Reason why there is no report.
        reason: String,
    },

    /// The system refused a resource that the launcher itself needs.
    #[error("cannot {doing}: {source}{}", hint(source))]
    System {
        /// Action that failed.
        doing: &'static str,
        /// Error of the system.
        source: io::Error,
    },
}

impl LaunchError {
    /// The exit code a shell user expects: 127 not found, 126 not executable, 2 wrong usage, 1 otherwise.
    ///
    /// # Example
    ///
    /// ```
    /// use burn_ddp_launch::Launcher;
    ///
    /// let error = Launcher::new("./no-such-program", [""; 0]).run().unwrap_err();
    /// assert_eq!(error.exit_code(), 127);
    /// ```
    #[must_use]
    pub fn exit_code(&self) -> i32 {
        match self {
            Self::ProgramNotFound { .. } => 127,
            Self::ProgramNotExecutable { .. } => 126,
            Self::BadRankCount { .. } | Self::Usage(_) | Self::Hostfile { .. } | Self::Disagree(_) => 2,
            Self::Spawn { .. }
            | Self::Binding(_)
            | Self::Store(_)
            | Self::Nodes(_)
            | Self::LogDir { .. }
            | Self::NoReport { .. }
            | Self::System { .. } => 1,
        }
    }
}

fn hint(source: &io::Error) -> &'static str {
    match source.raw_os_error() {
        Some(libc::EAGAIN) => " (the limit on processes is reached: see `ulimit -u` and the container's pids limit)",
        Some(libc::EMFILE) => " (the limit on open files is reached: see `ulimit -n`; a rank needs two)",
        _ => "",
    }
}
