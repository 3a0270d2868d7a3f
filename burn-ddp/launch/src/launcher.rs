//! [`Launcher`]: builder of a job.

use std::ffi::OsString;
use std::path::PathBuf;
use std::time::Duration;

use burn_ddp_comm::{Secret, StopSignal};

use crate::binding::BindTo;
use crate::error::LaunchError;
use crate::generations;
use crate::job_spec::{DEFAULT_MEETING_ID, JobSpec, Stdio};
use crate::output::settings::{OutputSettings, Streams};
use crate::preemption::Preemption;
use crate::rank_command::Program;
use crate::report::outcome::Outcome;
use crate::report::user_notices::NoticeSink;

/// Upper limit of the durations that callers set; longer ones are cut to it, since centuries would overflow the clock.
const MAX_GRACE: Duration = Duration::from_secs(30 * 24 * 3600);

/// Starts the ranks of a job and watches them until the last one has ended.
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
///
/// Output, restarts and cores:
///
/// ```
/// use burn_ddp_launch::{BindTo, Launcher, Stdio};
/// use std::time::Duration;
///
/// let logs = tempfile::tempdir()?;
/// let outcome = Launcher::new("sh", ["-c", "echo $GREETING; exit $((1 - BURN_DDP_RESTART_COUNT))"])
///     .nproc(2)
///     .env("GREETING", "hello")
///     .bind_to(BindTo::None) // `Core`: a part of the cores for each rank
///     .stdio(Stdio::Plain) // no rank before each line
///     .max_restarts(1)
///     .grace(Duration::from_millis(100)) // from SIGTERM to SIGKILL
///     .preempt_signal("SIGUSR1".parse()?) // asks the ranks to save
///     .preempt_grace(Duration::from_secs(120)) // for which they have two minutes
///     .preempt_exit_code(99)
///     .restart_preempted() // with `max_restarts`
///     .log_dir(logs.path())
///     .redirects("2".parse()?) // stderr of all ranks: only into the logs
///     .tee("1".parse()?) // stdout: there and here
///     .local_ranks_filter([0]) // shows rank 0's
///     .timeline(logs.path().join("trace.json"))
///     .notices(|line| eprintln!("{line}"))
///     .run()?;
/// assert_eq!(outcome.exit_code, 0); // of the second start
/// let printed = std::fs::read_to_string(logs.path().join("latest/generation-0/rank-1.stdout.log"))?;
/// assert_eq!(printed, "hello\n");
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// Two machines, each of which calls this:
///
/// ```no_run
/// # // Not run: it waits for the other machine.
/// use burn_ddp_launch::{LaunchError, Launcher, Outcome, available_cores};
/// use std::time::Duration;
///
/// fn start(node: usize) -> Result<Outcome, LaunchError> {
///     Launcher::new("./train", ["--epochs", "10"])
///         .nproc(available_cores())
///         .nodes(2, "node0", 29500)
///         .node_rank(node)
///         .meeting_id("experiment-7") // the same on both
///         .secret_file("/home/me/.burn-ddp-secret") // or the secret itself: `secret(Secret::read(…)?)`
///         .invitation("start the same program on node1")
///         .join_timeout(Duration::from_secs(60))
///         .peer_timeout(Duration::from_secs(10))
///         .adopt_orphans() // this process starts nothing else
///         .run()
/// }
/// ```
#[derive(Clone, Debug)]
pub struct Launcher {
    spec: JobSpec,
}

impl Launcher {
    /// Default of [`grace`](Self::grace).
    pub const DEFAULT_GRACE: Duration = Duration::from_secs(3);
    /// Default of [`preempt_grace`](Self::preempt_grace).
    pub const DEFAULT_PREEMPT_GRACE: Duration = Preemption::GRACE;
    /// Default of [`preempt_exit_code`](Self::preempt_exit_code).
    pub const DEFAULT_PREEMPT_EXIT_CODE: u8 = StopSignal::EXIT_CODE;
    /// Default of [`join_timeout`](Self::join_timeout).
    pub const DEFAULT_JOIN_TIMEOUT: Duration = Duration::from_secs(300);
    /// Default of [`peer_timeout`](Self::peer_timeout).
    pub const DEFAULT_PEER_TIMEOUT: Duration = Duration::from_secs(30);

    /// A job of one rank that runs `program` with `args`. The program is looked up as by a shell; each line of its
    /// output is shown behind `[rank 0] `.
    pub fn new<A: Into<OsString>>(program: impl Into<OsString>, args: impl IntoIterator<Item = A>) -> Self {
        let args = args.into_iter().map(Into::into).collect();
        let spec = JobSpec {
            program: Program { program: program.into(), args, env: Vec::new() },
            nproc: 1,
            bind_to: BindTo::None,
            stdio: Stdio::default(),
            grace: Self::DEFAULT_GRACE,
            preemption: Preemption::new(),
            max_restarts: 0,
            output: OutputSettings::default(),
            timeline: std::env::var_os("BURN_DDP_TIMELINE").map(PathBuf::from),
            nnodes: 1,
            node_rank: None,
            master: None,
            meeting_id: DEFAULT_MEETING_ID.into(),
            invitation: None,
            secret_file: None,
            secret: None,
            join_timeout: Self::DEFAULT_JOIN_TIMEOUT,
            peer_timeout: Self::DEFAULT_PEER_TIMEOUT,
            notices: NoticeSink::default(),
            adopts_orphans: false,
        };
        Self { spec }
    }

    /// The number of ranks on this machine.
    #[must_use]
    pub fn nproc(mut self, ranks: usize) -> Self {
        self.spec.nproc = ranks;
        self
    }

    /// Binds each rank to a part of the cores that this process may use, leaving out cores to which another launcher on
    /// this machine has bound its ranks. The default is [`BindTo::None`].
    #[must_use]
    pub fn bind_to(mut self, to: BindTo) -> Self {
        self.spec.bind_to = to;
        self
    }

    /// Destination of the ranks' output, and source of their input.
    #[must_use]
    pub fn stdio(mut self, stdio: Stdio) -> Self {
        self.spec.stdio = stdio;
        self
    }

    /// Time that ranks have to end between the signal to end (SIGTERM, or the signal sent to this process) and SIGKILL.
    ///
    /// After a rank has failed, the other ranks have the same time, but at most three seconds, to end by themselves
    /// before they get SIGTERM.
    #[must_use]
    pub fn grace(mut self, grace: Duration) -> Self {
        self.spec.grace = grace.min(MAX_GRACE);
        self
    }

    /// The signal that asks the ranks to save and end, if one of the job's launchers or ranks gets it. The ranks find
    /// its name in BURN_DDP_PREEMPT_SIGNAL. The default is the signal that this variable names, or SIGTERM.
    ///
    /// A job that it ends was [preempted](Outcome::preempted), if its program can stop: a program of burn-ddp tells so
    /// when it first looks (`Ddp::stop_requested`), and any program counts as such if the signal is set here or by the
    /// variable. A second signal, at least 1.5 s later, ends the job at once.
    #[must_use]
    pub fn preempt_signal(mut self, signal: StopSignal) -> Self {
        (self.spec.preemption.signal, self.spec.preemption.is_chosen) = (signal, true);
        self
    }

    /// Time that ranks have to end after the signal that asks to stop; [`grace`](Self::grace) if the program cannot
    /// stop.
    #[must_use]
    pub fn preempt_grace(mut self, grace: Duration) -> Self {
        self.spec.preemption.grace = grace.min(MAX_GRACE);
        self
    }

    /// The [exit code](Outcome::exit_code) of a preempted job, 75 by default.
    #[must_use]
    pub fn preempt_exit_code(mut self, code: u8) -> Self {
        self.spec.preemption.exit_code = code.into();
        self
    }

    /// Lets [restarts](Self::max_restarts) follow after a preemption, too.
    #[must_use]
    pub fn restart_preempted(mut self) -> Self {
        self.spec.preemption.restarts = true;
        self
    }

    /// A further environment variable for every rank. The variables that describe the job take precedence.
    #[must_use]
    pub fn env(mut self, name: impl Into<OsString>, value: impl Into<OsString>) -> Self {
        self.spec.program.env.push((name.into(), value.into()));
        self
    }

    /// Number of times that the job is started anew after a rank has failed. A new generation starts when all ranks of
    /// the last one are dead; the ranks find its number in `BURN_DDP_RESTART_COUNT`.
    ///
    /// The job is not restarted after a signal (except by [`restart_preempted`](Self::restart_preempted)), after the
    /// loss of a machine, or if the rank that failed first exited
    /// with 2 (wrong usage).
    #[must_use]
    pub fn max_restarts(mut self, times: u32) -> Self {
        self.spec.max_restarts = times;
        self
    }

    /// Stores output, events and reports of this job in a new directory below `dir`; the link `dir/latest` leads to it.
    #[must_use]
    pub fn log_dir(mut self, dir: impl Into<PathBuf>) -> Self {
        self.spec.output.dir = Some(dir.into());
        self
    }

    /// Records a trace of all ranks' work in `file`, which Perfetto and Chrome open; see [`burn_ddp_comm::timeline`].
    /// The default is the file that `BURN_DDP_TIMELINE` names, if it is set. A restart overwrites the trace.
    #[must_use]
    pub fn timeline(mut self, file: impl Into<PathBuf>) -> Self {
        let file = file.into();
        self.spec.timeline = Some(file.clone());
        self.env("BURN_DDP_TIMELINE", file)
    }

    /// Streams that go to the log directory instead of the console.
    #[must_use]
    pub fn redirects(mut self, streams: Streams) -> Self {
        self.spec.output.redirects = Some(streams);
        self
    }

    /// Streams that go to the log directory and the console: all of them if neither this nor
    /// [`redirects`](Self::redirects) is set.
    #[must_use]
    pub fn tee(mut self, streams: Streams) -> Self {
        self.spec.output.tee = Some(streams);
        self
    }

    /// The local ranks that the console shows.
    #[must_use]
    pub fn local_ranks_filter(mut self, local_ranks: impl Into<Vec<usize>>) -> Self {
        self.spec.output.filter = Some(local_ranks.into());
        self
    }

    /// The job spans `nnodes` machines, each with a launcher of its own. The launchers meet at `host:port`, where node
    /// 0's launcher listens.
    ///
    /// All launchers must have the same [secret](Self::secret_file).
    #[must_use]
    pub fn nodes(mut self, nnodes: usize, host: impl Into<String>, port: u16) -> Self {
        self.spec.nnodes = nnodes;
        self.spec.master = Some((host.into(), port));
        self
    }

    /// The number of this machine. Without it, the machine that can listen at the address of [`nodes`](Self::nodes) is
    /// 0, and the others are numbered as they arrive.
    #[must_use]
    pub fn node_rank(mut self, node: usize) -> Self {
        self.spec.node_rank = Some(node);
        self
    }

    /// Name of the job, the same on all of its machines. It keeps apart jobs that use one address by mistake.
    #[must_use]
    pub fn meeting_id(mut self, name: impl Into<String>) -> Self {
        self.spec.meeting_id = name.into();
        self
    }

    /// Notice that node 0 shows, through [`notices`](Self::notices), before it waits for the other machines.
    #[must_use]
    pub fn invitation(mut self, text: impl Into<String>) -> Self {
        self.spec.invitation = Some(text.into());
        self
    }

    /// The file with the job's secret. Needed for several machines. Without it, a job on one machine makes a new secret
    /// that only its ranks see.
    #[must_use]
    pub fn secret_file(mut self, path: impl Into<PathBuf>) -> Self {
        self.spec.secret_file = Some(path.into());
        self
    }

    /// The job's secret itself, instead of a file that holds it (Linux). The ranks inherit it.
    #[must_use]
    pub fn secret(mut self, secret: Secret) -> Self {
        self.spec.secret = Some(secret);
        self
    }

    /// Longest time that launchers, and then ranks, wait for each other when the job starts.
    #[must_use]
    pub fn join_timeout(mut self, timeout: Duration) -> Self {
        self.spec.join_timeout = timeout.min(MAX_GRACE);
        self.env("BURN_DDP_JOIN_TIMEOUT", timeout.as_secs_f64().to_string())
    }

    /// Silence after which another machine's launcher, or a rank, counts as lost.
    #[must_use]
    pub fn peer_timeout(mut self, timeout: Duration) -> Self {
        self.spec.peer_timeout = timeout.min(MAX_GRACE);
        self.env("BURN_DDP_PEER_TIMEOUT", timeout.as_secs_f64().to_string())
    }

    /// Calls `show` with notices while the job runs: a rank that is stopped or silent, a restart, a machine that is
    /// waited for. Each notice is one line without a newline. Without this, notices only go to `tracing`.
    #[must_use]
    pub fn notices(mut self, show: fn(&str)) -> Self {
        self.spec.notices = NoticeSink(Some(show));
        self
    }

    /// Makes this process the parent of the ranks' orphans: processes that ranks started and whose parents have exited
    /// (Linux). So the launcher can end and reap all of them. Without this it finds orphans by their sessions and
    /// environments, and a daemon that has changed both survives the job.
    ///
    /// Only for a process such as `burnrun` that starts no other children while a job runs: every child that is not a
    /// rank counts as the job's and is ended with it.
    #[must_use]
    pub fn adopt_orphans(mut self) -> Self {
        self.spec.adopts_orphans = true;
        self
    }

    /// Starts the ranks, waits until all have ended and returns the outcome. Blocks.
    ///
    /// While it runs, SIGINT, SIGTERM, SIGHUP (if it was not ignored), SIGQUIT, SIGALRM and SIGXCPU to this process are
    /// passed on to all ranks and end the job, one of them perhaps [after a checkpoint](Self::preempt_signal); a second
    /// SIGINT kills them. SIGUSR1 and SIGUSR2 are passed on. Of
    /// SIGQUIT and those behind it a handler of the program stays. SIGTSTP (Ctrl-Z) stops the ranks and this process
    /// until it is continued. The ranks die with the calling thread, even if this process is killed.
    ///
    /// # Errors
    ///
    /// Only if the job could not be started; the ranks started so far are killed. Failures of started ranks are in the
    /// [`Outcome`].
    pub fn run(&self) -> Result<Outcome, LaunchError> {
        self.spec.check()?;
        generations::run(&self.spec)
    }
}
