//! The description of a job, as [`Launcher`](crate::Launcher) builds it.

use std::path::PathBuf;
use std::time::Duration;

use burn_ddp_comm::{Secret, StopSignal};

use crate::binding::BindTo;
use crate::error::LaunchError;
use crate::output::settings::OutputSettings;
use crate::preemption::Preemption;
use crate::rank_command::Program;
use crate::report::user_notices::NoticeSink;

/// Largest number of ranks on one machine; a larger number is refused as a typing error.
const MAX_RANKS: usize = 4096;

/// Name of a job that the user has not named.
pub(crate) const DEFAULT_MEETING_ID: &str = "burnrun";

/// Destination of the ranks' stdout and stderr, and source of their stdin.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Stdio {
    /// Each line of each rank goes to this process's stdout or stderr, behind `[rank 0] `; stdin is `/dev/null`.
    #[default]
    Prefixed,
    /// As [`Prefixed`](Self::Prefixed), without the prefix.
    Plain,
    /// This machine's first rank keeps this process's stdin, stdout and stderr, so that its progress bar works; the
    /// others are as in [`Prefixed`](Self::Prefixed).
    FirstRankInherits,
}

/// Settings of a job, as far as this machine's launcher needs them.
#[derive(Clone, Debug)]
pub(crate) struct JobSpec {
    pub(crate) program: Program,
    pub(crate) nproc: usize,
    pub(crate) bind_to: BindTo,
    pub(crate) stdio: Stdio,
    pub(crate) grace: Duration,
    pub(crate) preemption: Preemption,
    pub(crate) max_restarts: u32,
    pub(crate) output: OutputSettings,
    pub(crate) timeline: Option<PathBuf>,
    pub(crate) nnodes: usize,
    pub(crate) node_rank: Option<usize>,
    /// Address at which the launchers of several machines meet.
    pub(crate) master: Option<(String, u16)>,
    pub(crate) meeting_id: String,
    pub(crate) invitation: Option<String>,
    pub(crate) secret_file: Option<PathBuf>,
    /// The secret itself, if it was not given as a file.
    pub(crate) secret: Option<Secret>,
    pub(crate) join_timeout: Duration,
    pub(crate) peer_timeout: Duration,
    pub(crate) notices: NoticeSink,
    /// True if every child of this process that it did not start itself is an orphan of the job.
    pub(crate) adopts_orphans: bool,
}

impl JobSpec {
    /// Name under which the launchers meet. The name of a job that the user has not named is made from its program's.
    pub(crate) fn meeting_name(&self) -> String {
        let program = std::path::Path::new(&self.program.program).file_name().unwrap_or_default();
        match self.meeting_id == DEFAULT_MEETING_ID {
            true => format!("{DEFAULT_MEETING_ID}, program {}", program.to_string_lossy()),
            false => self.meeting_id.clone(),
        }
    }

    /// Fingerprint of the program's arguments, which must be the same on all machines if the user has not named the
    /// job.
    pub(crate) fn compared_arguments(&self) -> Option<u64> {
        (self.meeting_id == DEFAULT_MEETING_ID).then(|| self.program.fingerprint_of_arguments())
    }

    /// Refuses settings that contradict each other.
    pub(crate) fn check(&self) -> Result<(), LaunchError> {
        if !(1..=MAX_RANKS).contains(&self.nproc) {
            return Err(LaunchError::BadRankCount { nproc: self.nproc, max: MAX_RANKS });
        }
        self.output.check()?;
        let usage = |message: String| Err(LaunchError::Usage(message));
        if let Err(message) = StopSignal::from_env() {
            return usage(message);
        }
        // With several machines, one command line may serve machines with different numbers of ranks: not checked.
        if let Some(rank) = self.output.missing_rank(self.nproc).filter(|_| self.nnodes == 1) {
            let ranks = if self.nproc == 1 { "0 alone".into() } else { format!("0 to {}", self.nproc - 1) };
            return usage(format!(
                "there is no local rank {rank}, which the output settings name: this machine has {ranks}"
            ));
        }
        if self.nnodes == 0 {
            return usage("a job has at least one machine".into());
        }
        if let Some(node) = self.node_rank.filter(|node| *node >= self.nnodes) {
            let last = self.nnodes - 1;
            return usage(format!(
                "there is no node rank {node} in a job of {} machines: they are numbered from 0 to {last}",
                self.nnodes
            ));
        }
        Ok(())
    }
}
