//! A job from its first generation to its last.

use std::fs;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{self, Receiver, Sender};
use std::time::{Duration, SystemTime};

use burn_ddp_comm::post_mortem::PostMortem;
use burn_ddp_comm::{LaunchEnv, Meeting, timeline};

use crate::error::LaunchError;
use crate::event::{Event, Stop, Trouble};
use crate::generation::GenerationContext;
use crate::guardian::Guardian;
use crate::node_outcome::NodeOutcome;
use crate::nodes::{Interrupted, Meet, Node, Nodes, Plan, Start, Verdict, meet};
use crate::output::log_dir::{self, JobDir};
use crate::output::relay::{Output, Relay, Source};
use crate::process_group;
use crate::rank_store::{JoinAbort, RankStore};
use crate::report::archive::{self, GenerationRecord};
use crate::report::event_file::EventFile;
use crate::report::notices::Notices;
use crate::report::outcome::Outcome;
use crate::signals;
use crate::spec::{JobSpec, Stdio};
use crate::supervisor;
use crate::trust::{self, Trust};

/// A program that exits with this was called wrongly, and would be again.
const WRONG_USAGE: i32 = 2;
/// What launchers wait for each other at the end of a generation, beyond the grace time: others may have to kill, and to reap.
const CONCLUDE: Duration = Duration::from_secs(45);

pub(crate) fn run(spec: &JobSpec) -> Result<Outcome, LaunchError> {
    let (sender, events) = mpsc::channel();
    let _signals = signals::listen(sender.clone())
        .map_err(|source| LaunchError::System { doing: "listen for signals", source })?;
    let job = Job { spec, trust: Trust::of(spec)?, sender, events };
    let mut nodes = match job.meet() {
        Ok(nodes) => nodes,
        Err(interrupted) => return interrupted.told(),
    };
    let outcome = job.run(&mut nodes);
    nodes.part();
    outcome
}

struct Job<'a> {
    spec: &'a JobSpec,
    trust: Trust,
    sender: Sender<Event>,
    events: Receiver<Event>,
}

/// A generation as this machine is to start it.
struct Part {
    generation: u32,
    start: Start,
    /// On node 0, for all.
    _store: Option<RankStore>,
    /// Its directory, in the log directory or for the time being.
    dir: ReportDir,
}

impl Job<'_> {
    fn meet(&self) -> Result<Nodes, Interrupted> {
        let spec = self.spec;
        let own_host = rustix::system::uname().nodename().to_string_lossy().into_owned();
        let Some((host, port)) = spec.master.as_ref().filter(|_| spec.nnodes > 1) else {
            return Ok(Nodes::alone(own_host));
        };
        let place = Meet {
            nnodes: spec.nnodes,
            node: spec.node_rank,
            host,
            port: *port,
            job: &spec.meeting_id,
            nproc: spec.nproc,
            own_host,
            join_timeout: spec.join_timeout,
            patience: spec.peer_timeout,
            invitation: spec.invitation.as_deref(),
            trust: &self.trust,
            notices: spec.notices,
        };
        meet(&place, &self.sender, &self.events)
    }

    fn run(&self, nodes: &mut Nodes) -> Result<Outcome, LaunchError> {
        let spec = self.spec;
        let mut job_dir = None;
        for generation in 0.. {
            let part = match self.plan(nodes, generation, &mut job_dir) {
                Ok(part) => part,
                Err(interrupted) => return interrupted.told(),
            };
            let seen = self.start(nodes, &part);
            self.conclude_timeline(nodes, &part.start);
            let own = match seen {
                Ok(own) => own,
                Err(error) => {
                    let Some(link) = nodes.link() else { return Err(error) };
                    let message = format!("node {} (host {}): {error}", nodes.node, nodes.host);
                    let trouble = Trouble { message, exit_code: error.exit_code() };
                    link.stop(Stop::Trouble(trouble.clone()));
                    let host = nodes.host.clone();
                    NodeOutcome { node: nodes.node, host, trouble: Some(trouble), ..NodeOutcome::default() }
                }
            };
            let reports = kept::read_reports(part.dir.path(), &own);
            let decide = |seen: &[NodeOutcome], reports: &[PostMortem]| {
                let mut outcome = Outcome::of(seen, generation);
                outcome.waiting = kept::waiting(&outcome, reports);
                let restart = self.is_restarted(generation, seen, &outcome);
                if let Some(dir) = &job_dir {
                    let kept = GenerationRecord { generation, start: part.start.clone(), seen: seen.to_vec(), outcome };
                    let report = kept::keep(dir, &kept, reports);
                    outcome = Outcome { report, ..kept.outcome };
                }
                Verdict { outcome, restart }
            };
            let patience = spec.grace + CONCLUDE;
            let (verdict, signal) = nodes.conclude(generation, (own, reports), patience, &self.events, decide);
            if let Some(signal) = signal {
                // For the next generation, which it prevents. The receiver lives as long as this.
                let _ = self.sender.send(Event::Signal(signal));
            }
            if !verdict.restart {
                let report = verdict.outcome.report.filter(|report| report.exists());
                return Ok(Outcome { report, ..verdict.outcome });
            }
            let headline = verdict.outcome.to_string();
            let headline = headline.lines().next().unwrap_or_default();
            spec.notices.say(headline);
            spec.notices.say(&format!("restart {} of at most {}", generation + 1, spec.max_restarts));
        }
        Err(LaunchError::Nodes("more restarts than can be counted".into()))
    }

    fn is_restarted(&self, generation: u32, seen: &[NodeOutcome], outcome: &Outcome) -> bool {
        generation < self.spec.max_restarts
            && outcome.exit_code != 0
            && outcome.exit_code != WRONG_USAGE
            && outcome.failure.is_some()
            && outcome.trouble.is_none()
            && outcome.left_over.is_empty()
            && !seen.iter().any(|node| node.signalled)
    }

    /// Agrees with the other launchers on what to start.
    fn plan(&self, nodes: &Nodes, generation: u32, job_dir: &mut Option<JobDir>) -> Result<Part, Interrupted> {
        let spec = self.spec;
        let (start, store) = if nodes.decides() {
            let job_id = store::random_id();
            let all = match nodes.all() {
                [] => vec![self.itself(nodes)],
                all => all.to_vec(),
            };
            let host = spec.master.as_ref().filter(|_| all.len() > 1).map_or("127.0.0.1", |(host, _)| host);
            let rank_store = RankStore::open(host, &job_id, generation, &self.trust).map_err(Interrupted::Error)?;
            let seconds = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default().as_secs();
            let job_name = logs::job_name(seconds, &job_id);
            let port = rank_store.port();
            let start = Start { job_id, job_name, host: host.to_owned(), port, nodes: all };
            nodes.announce(generation, &Plan::Start(start.clone()))?;
            (start, Some(rank_store))
        } else {
            match nodes.await_plan(generation, &self.events)? {
                Plan::Start(start) => (start, None),
                Plan::Over(trouble) => return Err(Interrupted::Error(LaunchError::Nodes(trouble.message))),
            }
        };
        if let (None, Some(dir)) = (&job_dir, &spec.output.dir) {
            *job_dir = Some(JobDir::create(dir, &start.job_name).map_err(Interrupted::Error)?);
        }
        let dir =
            ReportDir::create(job_dir.as_ref(), generation, nodes.node, &start.job_id).map_err(Interrupted::Error)?;
        Ok(Part { generation, start, _store: store, dir })
    }

    fn itself(&self, nodes: &Nodes) -> Node {
        Node {
            node: 0,
            host: nodes.host.clone(),
            pid: std::process::id(),
            nproc: self.spec.nproc,
            nnodes: 1,
            version: env!("CARGO_PKG_VERSION").into(),
        }
    }

    /// Starts this machine's ranks and watches them to their end.
    fn start(&self, nodes: &Nodes, part: &Part) -> Result<NodeOutcome, LaunchError> {
        let (spec, Part { start, dir, .. }) = (self.spec, part);
        let first_rank = start.first_rank(nodes.node);
        if let Some(file) = &spec.timeline {
            let cleared = timeline::clear(file, first_rank..first_rank + spec.nproc);
            cleared.map_err(|source| LaunchError::LogDir { path: file.clone(), source })?;
        }
        let first_inherits = spec.stdio == Stdio::FirstRankInherits;
        let logs = spec.output.dir.is_some().then(|| dir.path());
        let events = EventFile::create(logs, nodes.node, &start.job_id);
        let events = events.inspect_err(|error| tracing::warn!(%error, "ranks cannot report who failed first")).ok();
        let mut guardian = Guardian::start(dir.temporary());
        let mut job = supervisor::Job::new(self.sender.clone(), &self.events, spec.grace, first_rank, first_inherits);

        let mut sources = Vec::new();
        let mut start_rank = |local_rank: usize, job: &mut supervisor::Job<'_>| {
            let rank = first_rank + local_rank;
            let keeps_terminal = local_rank == 0 && first_inherits;
            let variables = self.variables(nodes, part, local_rank, events.as_ref());
            let mut command = spec.program.command(spec.nproc, variables, keeps_terminal);
            let mut child = child::spawn(&mut command).map_err(|source| spec.program.spawn_error(rank, source))?;
            guardian.watch(child.id());
            let pipes = [
                (Output::Stdout, child.stdout.take().map(Into::into)),
                (Output::Stderr, child.stderr.take().map(Into::into)),
            ];
            // From here on the job owns the child, and ends it on any error.
            let stderr_log = logs.map(|dir| logs::log_path(dir, rank, Output::Stderr));
            let kept = stderr_log.filter(|_| !keeps_terminal && spec.output.to_file(local_rank, Output::Stderr));
            job.add(child, kept).map_err(|source| LaunchError::Spawn { rank, source })?;
            for (output, pipe) in pipes {
                let Some(pipe) = pipe else { continue };
                let shown = spec.output.to_console(local_rank, output);
                let prefix = if spec.stdio == Stdio::Plain { String::new() } else { format!("[rank {rank}] ") };
                let path = logs.filter(|_| spec.output.to_file(local_rank, output));
                let path = path.map(|dir| logs::log_path(dir, rank, output));
                let log =
                    path.map(|path| logs::create_log(&path).map_err(|source| LaunchError::LogDir { path, source }));
                sources.push(Source {
                    local_rank,
                    output,
                    pipe,
                    prefix: shown.then_some(prefix),
                    log: log.transpose()?,
                });
            }
            Ok(())
        };
        let started = (0..spec.nproc).try_for_each(|local_rank| start_rank(local_rank, &mut job));
        let relay = started.and_then(|()| {
            if sources.is_empty() {
                return Ok(None);
            }
            let relay = Relay::start(spec.nproc, sources, self.sender.clone());
            relay.map(Some).map_err(|source| LaunchError::System { doing: "pass on the ranks' output", source })
        });
        let relay = match relay {
            Ok(relay) => relay,
            Err(error) => {
                job.abort();
                guardian.dismiss();
                return Err(error);
            }
        };
        let mut outside = GenerationContext {
            generation: part.generation,
            notices: spec.notices,
            nodes,
            start,
            absence: JoinAbort::new(&start.host, start.port, &start.job_id, part.generation, &self.trust),
            events,
            told: Notices::default(),
        };
        let outcome = job.supervise(relay, &mut outside);
        guardian.dismiss();
        Ok(outcome)
    }
}

impl Job<'_> {
    /// All ranks of this machine have ended, however: what they recorded is put together.
    fn conclude_timeline(&self, nodes: &Nodes, start: &Start) {
        let Some(file) = &self.spec.timeline else { return };
        let first_rank = start.first_rank(nodes.node);
        let local = first_rank..first_rank + self.spec.nproc;
        if let Err(error) = timeline::conclude(file, local, start.world_size()) {
            self.spec.notices.say(&format!("the timeline {} cannot be written: {error}", file.display()));
        }
    }

    /// What tells a rank who it is and where the others are.
    fn variables(
        &self,
        nodes: &Nodes,
        part: &Part,
        local_rank: usize,
        events: Option<&EventFile>,
    ) -> Vec<(String, String)> {
        let start = &part.start;
        let meeting = Meeting::Launcher { host: start.host.clone(), port: start.port };
        let rank = start.first_rank(nodes.node) + local_rank;
        let mut env = LaunchEnv::new(rank, start.world_size(), meeting, &start.job_id);
        env.local_rank = local_rank;
        env.local_world_size = self.spec.nproc;
        env.node_rank = nodes.node;
        env.restart_count = part.generation;
        env.events = events.map(|events| events.path().to_owned());
        env.report_dir = Some(part.dir.path().to_owned());
        self.trust.describe(&mut env);
        env.variables()
    }
}

/// Where the ranks of a generation leave their reports. A temporary one is removed in the end, by whoever is left.
enum ReportDir {
    GenerationRecord(PathBuf),
    Temporary(PathBuf),
}

impl ReportDir {
    fn create(job_dir: Option<&JobDir>, generation: u32, node: usize, job_id: &str) -> Result<Self, LaunchError> {
        if let Some(dir) = job_dir {
            let made = dir.generation(generation);
            return made
                .map(Self::GenerationRecord)
                .map_err(|source| LaunchError::LogDir { path: dir.path().to_owned(), source });
        }
        let path = std::env::temp_dir().join(format!("burn-ddp-{job_id}-{node}"));
        let made = fs::DirBuilder::new().mode(0o700).create(&path);
        made.map(|()| Self::Temporary(path.clone())).map_err(|source| LaunchError::LogDir { path, source })
    }

    fn path(&self) -> &Path {
        match self {
            Self::GenerationRecord(path) | Self::Temporary(path) => path,
        }
    }

    /// What is to be removed if this process cannot.
    fn temporary(&self) -> Option<&Path> {
        match self {
            Self::GenerationRecord(_) => None,
            Self::Temporary(path) => Some(path),
        }
    }
}

impl Drop for ReportDir {
    fn drop(&mut self) {
        if let Some(path) = self.temporary()
            && let Err(error) = fs::remove_dir_all(path)
        {
            tracing::warn!(%error, path = %path.display(), "a temporary directory stays behind");
        }
    }
}

impl Interrupted {
    /// Nothing was started.
    fn told(self) -> Result<Outcome, LaunchError> {
        match self {
            Self::Signal(signal) => {
                Ok(Outcome { exit_code: 128 + signal, interrupted_by: Some(signal), ..Outcome::default() })
            }
            Self::Error(error) => Err(error),
        }
    }
}
