//! The launcher: what to start, and starting it.

use std::ffi::{OsStr, OsString};
use std::fs;
use std::hash::{BuildHasher, Hasher, RandomState};
use std::io;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::{Child, Command};
use std::sync::mpsc;
use std::time::Duration;

use crate::error::LaunchError;
use crate::guardian::Guardian;
use crate::relay::{Output, Relay, Source};
use crate::report::Outcome;
use crate::store::JobStore;
use crate::supervise::Job;
use crate::{child, signals};

/// More ranks on one machine are taken for a slip of the finger.
const MAX_RANKS: usize = 4096;
/// A longer grace time is taken as this; some hundred years would overflow the clock.
const MAX_GRACE: Duration = Duration::from_secs(30 * 24 * 3600);

/// Where the ranks' stdin, stdout and stderr lead.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Stdio {
    /// Each line of each rank goes to this process's stdout or stderr, behind `[rank 0] `; stdin is `/dev/null`.
    #[default]
    Prefixed,
    /// The same without the prefix.
    Plain,
    /// Rank 0 keeps this process's stdin, stdout and stderr, so that its progress bar works; the others are as in
    /// [`Prefixed`](Self::Prefixed).
    FirstRankInherits,
}

/// Starts the ranks of a job on this machine and watches them until the last one has ended.
///
/// # Example
///
/// ```
/// use burn_ddp_launch::Launcher;
///
/// let outcome = Launcher::new("sh", ["-c", "echo I am $BURN_DDP_RANK of $BURN_DDP_WORLD_SIZE"]).nproc(2).run()?;
/// assert_eq!(outcome.exit_code, 0);
///
/// // A rank that fails decides the outcome.
/// let outcome = Launcher::new("sh", ["-c", "exit $BURN_DDP_RANK"]).nproc(2).run()?;
/// let failure = outcome.failure.expect("rank 1 failed");
/// assert_eq!((failure.rank, outcome.exit_code), (1, 1));
/// # Ok::<(), burn_ddp_launch::LaunchError>(())
/// ```
#[derive(Clone, Debug)]
pub struct Launcher {
    program: OsString,
    args: Vec<OsString>,
    nproc: usize,
    stdio: Stdio,
    grace: Duration,
    env: Vec<(OsString, OsString)>,
}

impl Launcher {
    /// The grace time where none is set.
    pub const DEFAULT_GRACE: Duration = Duration::from_secs(3);

    /// One rank that runs `program` with `args`, its output prefixed. The program is looked up as by a shell.
    pub fn new<A: Into<OsString>>(program: impl Into<OsString>, args: impl IntoIterator<Item = A>) -> Self {
        Self {
            program: program.into(),
            args: args.into_iter().map(Into::into).collect(),
            nproc: 1,
            stdio: Stdio::default(),
            grace: Self::DEFAULT_GRACE,
            env: Vec::new(),
        }
    }

    /// The number of ranks.
    #[must_use]
    pub fn nproc(mut self, ranks: usize) -> Self {
        self.nproc = ranks;
        self
    }

    /// Where the ranks' input and output lead.
    #[must_use]
    pub fn stdio(mut self, stdio: Stdio) -> Self {
        self.stdio = stdio;
        self
    }

    /// How long a rank that was told to stop (SIGTERM, or the signal sent to this process) may take before SIGKILL.
    ///
    /// It also bounds, up to three seconds, the time that the others have after a failure to end by themselves.
    #[must_use]
    pub fn grace(mut self, grace: Duration) -> Self {
        self.grace = grace.min(MAX_GRACE);
        self
    }

    /// A further variable for every rank. The variables that describe the job take precedence.
    #[must_use]
    pub fn env(mut self, name: impl Into<OsString>, value: impl Into<OsString>) -> Self {
        self.env.push((name.into(), value.into()));
        self
    }

    /// Starts the ranks, waits until all have ended and tells how. Blocks.
    ///
    /// While it runs, SIGINT, SIGTERM and SIGHUP to this process go to all ranks instead (SIGHUP only if it was not ignored);
    /// a second SIGINT kills them. The ranks die with the calling thread, even if this process is killed.
    ///
    /// # Errors
    ///
    /// Only if the job could not be started; ranks started so far are killed. Whatever happens later is in the [`Outcome`].
    pub fn run(&self) -> Result<Outcome, LaunchError> {
        if !(1..=MAX_RANKS).contains(&self.nproc) {
            return Err(LaunchError::BadRankCount { nproc: self.nproc, max: MAX_RANKS });
        }
        let job_id = format!("{:016x}", RandomState::new().build_hasher().finish());
        let store = JobStore::open(job_id, self.nproc)?;
        let (sender, events) = mpsc::channel();
        let _signals = signals::listen(sender.clone())
            .map_err(|source| LaunchError::System { doing: "listen for signals", source })?;
        let mut guardian = Guardian::start();
        let first_rank_inherits = self.stdio == Stdio::FirstRankInherits;
        let mut job = Job::new(sender.clone(), events, self.grace, first_rank_inherits);

        let mut sources = Vec::new();
        for rank in 0..self.nproc {
            let mut command = self.command(rank, store.variables(rank));
            let started =
                child::spawn(&mut command).map_err(|source| self.spawn_error(rank, source)).and_then(|mut child| {
                    guardian.watch(child.id());
                    sources.extend(outputs(rank, &mut child));
                    job.add(child).map_err(|source| LaunchError::Spawn { rank, source })
                });
            if let Err(error) = started {
                job.abort();
                guardian.dismiss();
                return Err(error);
            }
        }
        let relay = if sources.is_empty() {
            None
        } else {
            match Relay::start(self.nproc, self.stdio != Stdio::Plain, sources, sender) {
                Ok(relay) => Some(relay),
                Err(source) => {
                    job.abort();
                    guardian.dismiss();
                    return Err(LaunchError::System { doing: "pass on the ranks' output", source });
                }
            }
        };
        let outcome = job.supervise(relay, || store.culprit());
        guardian.dismiss();
        Ok(outcome)
    }

    fn command(&self, rank: usize, job: Vec<(String, String)>) -> Command {
        let mut command = Command::new(&self.program);
        command.args(&self.args);
        let threads = threads_per_rank(self.nproc).to_string();
        for name in ["RAYON_NUM_THREADS", "OMP_NUM_THREADS"] {
            if std::env::var_os(name).is_none() {
                command.env(name, &threads);
            }
        }
        // A rank is not torchrun's, even if the launcher is.
        for name in ["TORCHELASTIC_USE_AGENT_STORE", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT"] {
            command.env_remove(name);
        }
        command.envs(self.env.iter().map(|(name, value)| (name, value))).envs(job);
        if rank > 0 || self.stdio != Stdio::FirstRankInherits {
            command
                .stdin(std::process::Stdio::null())
                .stdout(std::process::Stdio::piped())
                .stderr(std::process::Stdio::piped());
        }
        command
    }

    fn spawn_error(&self, rank: usize, source: io::Error) -> LaunchError {
        let program = self.program.clone();
        match source.raw_os_error() {
            Some(libc::ENOENT | libc::ENOTDIR) => {
                LaunchError::ProgramNotFound { reason: why_not_found(&program), program }
            }
            Some(libc::EACCES | libc::ENOEXEC) => {
                LaunchError::ProgramNotExecutable { reason: why_not_executable(&program, &source), program }
            }
            _ => LaunchError::Spawn { rank, source },
        }
    }
}

/// The processors this process may use: affinity and container limits count.
#[must_use]
pub fn available_cores() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}

/// Ranks on one machine share its cores.
fn threads_per_rank(nproc: usize) -> usize {
    (available_cores() / nproc).max(1)
}

fn outputs(rank: usize, child: &mut Child) -> impl Iterator<Item = Source> {
    let stdout = child.stdout.take().map(|pipe| Source { rank, output: Output::Stdout, pipe: pipe.into() });
    let stderr = child.stderr.take().map(|pipe| Source { rank, output: Output::Stderr, pipe: pipe.into() });
    stdout.into_iter().chain(stderr)
}

fn why_not_found(program: &OsStr) -> String {
    let path = Path::new(program);
    let has_slash = program.as_encoded_bytes().contains(&b'/');
    if has_slash && path.exists() {
        return "the file exists, but the interpreter in its first line (`#!…`) or its dynamic loader does not".into();
    }
    if has_slash {
        return "there is no such file".into();
    }
    if path.is_file() {
        return format!("no program of this name in PATH; for the file in this directory write ./{}", path.display());
    }
    "no program of this name in PATH".into()
}

fn why_not_executable(program: &OsStr, source: &io::Error) -> String {
    let path = Path::new(program);
    match fs::metadata(path) {
        Ok(file) if file.is_dir() => "it is a directory".into(),
        Ok(file) if file.permissions().mode() & 0o111 == 0 => match path.extension().and_then(OsStr::to_str) {
            Some("py") => format!("it is a script without execute permission; write `python {}`", path.display()),
            Some("sh") => format!("it is a script without execute permission; write `sh {}`", path.display()),
            _ => "it has no execute permission (see `chmod +x`)".into(),
        },
        _ if source.raw_os_error() == Some(libc::ENOEXEC) => "it is not a program for this machine".into(),
        _ => source.to_string(),
    }
}
