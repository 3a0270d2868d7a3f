//! A job from its first generation (start of all ranks) to its last: agree with the other launchers, start the ranks,
//! watch them, conclude, and restart them if that may help.

use std::sync::mpsc::{self, Receiver, Sender};
use std::time::{Duration, SystemTime};

use burn_ddp_comm::post_mortem::PostMortem;
use burn_ddp_comm::timeline;

use crate::binding::Binding;
use crate::cgroup::ControlGroup;
use crate::error::LaunchError;
use crate::event::{Event, Stop, Trouble};
use crate::generation_context::GenerationContext;
use crate::guardian::Guardian;
use crate::job_authentication::{Trust, random_id};
use crate::job_spec::{JobSpec, Stdio};
use crate::leftover_processes::{self, Leftovers};
use crate::node_outcome::NodeOutcome;
use crate::nodes::{GenerationPlan, Interrupted, Meet, Node, Nodes, Verdict, meet};
use crate::output::log_dir::{JobDir, job_name};
use crate::preemption::Preemption;
use crate::rank_processes::Processes;
use crate::rank_report_dir::ReportDir;
use crate::rank_start::RankStart;
use crate::rank_store::{JoinAbort, RankStore};
use crate::report::event_file::EventFile;
use crate::report::outcome::Outcome;
use crate::report::report_files::{self, GenerationRecord};
use crate::report::user_notices::Notices;
use crate::signals::{self, Listening};
use crate::supervisor::Settings;

/// Exit code of a program with wrong arguments: a restart would fail in the same way.
const WRONG_USAGE: i32 = 2;
/// Longest time, in addition to the grace time, that a launcher whose ranks have ended waits for the other launchers,
/// which may still have to kill and reap theirs.
const CONCLUDE: Duration = Duration::from_secs(45);

/// Runs a job to its end. Blocks.
pub(crate) fn run(spec: &JobSpec) -> Result<Outcome, LaunchError> {
    let (sender, events) = mpsc::channel();
    let signals = signals::listen(sender.clone(), spec.preemption.signal)
        .map_err(|source| LaunchError::System { doing: "listen for signals", source })?;
    if spec.adopts_orphans {
        leftover_processes::become_parent_of_orphans();
    }
    let job = Job { spec, trust: Trust::of(spec)?, binding: Binding::of(spec)?, signals, sender, events };
    let mut nodes = match job.meet() {
        Ok(nodes) => nodes,
        Err(interrupted) => return interrupted.into_result(&spec.preemption),
    };
    let outcome = job.run(&mut nodes);
    nodes.part();
    outcome
}

struct Job<'a> {
    spec: &'a JobSpec,
    trust: Trust,
    /// Cores of this machine's ranks, for all generations.
    binding: Binding,
    signals: Listening,
    sender: Sender<Event>,
    events: Receiver<Event>,
}

/// A generation that this machine is about to start.
struct Generation {
    number: u32,
    plan: GenerationPlan,
    /// Store of the ranks of all machines, on node 0.
    _store: Option<RankStore>,
    dir: ReportDir,
}

impl Job<'_> {
    /// Meets the other launchers, if there are any.
    fn meet(&self) -> Result<Nodes, Interrupted> {
        let spec = self.spec;
        let own_host = rustix::system::uname().nodename().to_string_lossy().into_owned();
        let Some((host, port)) = spec.master.as_ref().filter(|_| spec.nnodes > 1) else {
            return Ok(Nodes::alone(own_host));
        };
        let job = spec.meeting_name();
        let place = Meet {
            nnodes: spec.nnodes,
            node: spec.node_rank,
            host,
            port: *port,
            job: &job,
            arguments: spec.compared_arguments(),
            stop_signal: spec.preemption.signal.to_string(),
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
        for number in 0.. {
            let generation = match self.plan(nodes, number, &mut job_dir) {
                Ok(generation) => generation,
                Err(interrupted) => return interrupted.into_result(&spec.preemption),
            };
            let verdict = self.run_generation(nodes, &generation, job_dir.as_ref())?;
            if !verdict.restart {
                let report = verdict.outcome.report.filter(|report| report.exists());
                return Ok(Outcome { report, ..verdict.outcome });
            }
            if verdict.outcome.preempted {
                self.signals.forget();
            }
            let headline = verdict.outcome.to_string();
            spec.notices.show(headline.lines().next().unwrap_or_default());
            spec.notices.show(&format!("restart {} of at most {}", number + 1, spec.max_restarts));
        }
        Err(LaunchError::Nodes("more restarts than can be counted".into()))
    }

    /// Agrees with the other launchers on the plan of a generation.
    fn plan(&self, nodes: &Nodes, number: u32, job_dir: &mut Option<JobDir>) -> Result<Generation, Interrupted> {
        let (plan, store) = if nodes.decides() {
            let (plan, store) = self.new_plan(nodes, number).map_err(Interrupted::Error)?;
            nodes.announce(number, &plan)?;
            (plan, Some(store))
        } else {
            (nodes.await_plan(number, &self.events)?, None)
        };
        if let (None, Some(dir)) = (&job_dir, &self.spec.output.dir) {
            *job_dir = Some(JobDir::create(dir, &plan.job_name).map_err(Interrupted::Error)?);
        }
        let dir = ReportDir::create(job_dir.as_ref(), number, nodes.node, &plan.job_id).map_err(Interrupted::Error)?;
        Ok(Generation { number, plan, _store: store, dir })
    }

    fn new_plan(&self, nodes: &Nodes, number: u32) -> Result<(GenerationPlan, RankStore), LaunchError> {
        let spec = self.spec;
        let job_id = random_id();
        let all = match nodes.all() {
            [] => vec![self.only_node(nodes)],
            all => all.to_vec(),
        };
        let host = spec.master.as_ref().filter(|_| all.len() > 1).map_or("127.0.0.1", |(host, _)| host);
        let store = RankStore::open(host, &job_id, number, &self.trust)?;
        let seconds = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default().as_secs();
        let job_name = job_name(seconds, &job_id);
        let port = store.port();
        Ok((GenerationPlan { job_id, job_name, host: host.to_owned(), port, nodes: all }, store))
    }

    fn only_node(&self, nodes: &Nodes) -> Node {
        Node {
            node: 0,
            host: nodes.host.clone(),
            pid: std::process::id(),
            nproc: self.spec.nproc,
            nnodes: 1,
            version: env!("CARGO_PKG_VERSION").into(),
            arguments: None,
            stop_signal: self.spec.preemption.signal.to_string(),
        }
    }

    /// One generation, on all machines: from the start of its ranks to the verdict.
    fn run_generation(
        &self,
        nodes: &mut Nodes,
        generation: &Generation,
        job_dir: Option<&JobDir>,
    ) -> Result<Verdict, LaunchError> {
        let Generation { number, plan, dir, .. } = generation;
        let ended = self.run_ranks(nodes, generation);
        self.conclude_timeline(nodes, plan);
        let own = match ended {
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
        let reports = report_files::read_reports(dir.path(), &own);
        let preemption = &self.spec.preemption;
        let decide = |all: &[NodeOutcome], reports: &[PostMortem], first: Option<usize>| {
            let mut outcome = Outcome::of(all, *number, first, preemption);
            outcome.waiting = report_files::long_waits(&outcome, reports);
            let restart = *number < self.spec.max_restarts
                && match outcome.preempted {
                    true => preemption.restarts_after(all, &outcome),
                    false => may_help(all, &outcome),
                };
            if let Some(dir) = job_dir {
                let record = GenerationRecord { generation: *number, plan: plan.clone(), nodes: all.to_vec(), outcome };
                let report = report_files::store(dir, &record, reports);
                outcome = Outcome { report, ..record.outcome };
            }
            Verdict { outcome, restart }
        };
        let saves = own.asked && (own.can_stop || preemption.is_chosen);
        let patience = CONCLUDE + if saves { self.spec.grace.max(preemption.grace) } else { self.spec.grace };
        let (verdict, signal) =
            nodes.conclude(*number, (own, reports), (patience, preemption.signal), &self.events, decide);
        if let Some(signal) = signal {
            // Sent again so that it ends the next generation, if there is one. Cannot fail: `self` owns the receiver.
            let _ = self.sender.send(Event::Signal(signal));
        }
        Ok(verdict)
    }

    /// Starts this machine's ranks and watches them to their end.
    fn run_ranks(&self, nodes: &Nodes, generation: &Generation) -> Result<NodeOutcome, LaunchError> {
        let (spec, Generation { number, plan, dir, .. }) = (self.spec, generation);
        let first_rank = plan.first_rank(nodes.node);
        if let Some(file) = &spec.timeline {
            let cleared = timeline::clear(file, first_rank..first_rank + spec.nproc);
            cleared.map_err(|source| LaunchError::LogDir { path: file.clone(), source })?;
        }
        let logs = spec.output.dir.is_some().then(|| dir.path());
        let event_file = EventFile::create(logs, nodes.node)
            .inspect_err(|error| tracing::warn!(%error, "ranks cannot report which failed first"))
            .ok();
        // New for each launcher, since several launchers of one job may run on this machine.
        let mark = random_id();
        let group = ControlGroup::create(&mark);
        let mut guardian = Guardian::start(dir.temporary(), &mark, group.as_ref().map(ControlGroup::path));
        let leftovers = Leftovers::new(&mark, group.as_ref(), guardian.pid(), spec.adopts_orphans);
        let settings = Settings {
            generation: *number,
            grace: spec.grace,
            preemption: spec.preemption,
            first_rank,
            first_rank_has_terminal: spec.stdio == Stdio::FirstRankInherits,
            // Of the launchers that one burnrun has started (they have `secret`, no file), only the first shows it.
            shows_grace: spec.secret.is_none() || first_rank == 0,
        };
        let mut processes = Processes::new(settings, leftovers, self.sender.clone(), &self.events);
        let start = RankStart {
            spec,
            trust: &self.trust,
            binding: &self.binding,
            signals: &self.signals,
            plan,
            generation: *number,
            node: nodes.node,
            link: nodes.link(),
            report_dir: dir.path(),
            mark: &mark,
            group: group.as_ref(),
            event_file: event_file.as_ref(),
        };
        let relay = match start.start_all(&mut processes, &mut guardian, self.sender.clone()) {
            Ok(relay) => relay,
            Err(error) => {
                processes.abort(spec.notices);
                guardian.dismiss();
                return Err(error);
            }
        };
        let mut context = GenerationContext {
            generation: *number,
            plan,
            nodes,
            join_abort: JoinAbort::new(&plan.host, plan.port, &plan.job_id, *number, &self.trust),
            event_file,
            notices: Notices::default(),
            sink: spec.notices,
        };
        let outcome = processes.supervise(relay, &mut context);
        guardian.dismiss();
        Ok(outcome)
    }

    /// Merges the traces of this machine's ranks, all of which have ended.
    fn conclude_timeline(&self, nodes: &Nodes, plan: &GenerationPlan) {
        let Some(file) = &self.spec.timeline else { return };
        let first_rank = plan.first_rank(nodes.node);
        let local = first_rank..first_rank + self.spec.nproc;
        if let Err(error) = timeline::conclude(file, local, plan.world_size()) {
            self.spec.notices.show(&format!("the timeline {} cannot be written: {error}", file.display()));
        }
    }
}

/// True if a restart may help: a rank failed, not because of wrong usage, and the job was ended neither by the loss of
/// a machine nor by a signal.
fn may_help(all: &[NodeOutcome], outcome: &Outcome) -> bool {
    outcome.exit_code != 0
        && outcome.exit_code != WRONG_USAGE
        && outcome.failure.is_some()
        && outcome.trouble.is_none()
        && outcome.left_over.is_empty()
        && !all.iter().any(|node| node.signalled)
}

impl Interrupted {
    /// Result of a job of which no rank was started.
    fn into_result(self, preemption: &Preemption) -> Result<Outcome, LaunchError> {
        match self {
            Self::Signal(signal) => {
                let preempted = preemption.is_chosen && preemption.is_by(signal);
                let exit_code = if preempted { preemption.exit_code } else { 128 + signal };
                Ok(Outcome { exit_code, preempted, interrupted_by: Some(signal), ..Outcome::default() })
            }
            Self::Error(error) => Err(error),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::node_outcome::RankOutcome;
    use crate::rank_exit::RankExit;

    fn node(exit: Option<RankExit>) -> NodeOutcome {
        let rank = RankOutcome {
            rank: 0,
            pid: 7,
            exit,
            after: Duration::ZERO,
            failed: exit != Some(RankExit::Code(0)),
            stopped: false,
            killed: false,
            last_lines: Vec::new(),
            panics: Vec::new(),
            log: None,
        };
        NodeOutcome { ranks: vec![rank], ..NodeOutcome::default() }
    }

    fn restarts(node: NodeOutcome) -> bool {
        may_help(std::slice::from_ref(&node), &Outcome::of(std::slice::from_ref(&node), 0, None, &Preemption::new()))
    }

    #[test]
    fn a_restart_follows_a_rank_s_failure_alone() {
        let failed = || node(Some(RankExit::Code(9)));
        let trouble = Trouble { message: "node 1 is lost".into(), exit_code: 1 };
        assert!(restarts(failed()));
        assert!(restarts(node(Some(RankExit::Signal(libc::SIGKILL)))));
        assert!(!restarts(node(Some(RankExit::Code(0)))), "it succeeded");
        assert!(!restarts(node(Some(RankExit::Code(WRONG_USAGE)))), "it would be called wrongly again");
        assert!(!restarts(node(None)), "the rank still lives, stuck in the kernel");
        assert!(!restarts(NodeOutcome { signalled: true, ..failed() }), "Ctrl-C while the others settled");
        assert!(!restarts(NodeOutcome { trouble: Some(trouble), ..failed() }), "a machine is lost");
        let interrupted = NodeOutcome { interrupted_by: Some(libc::SIGINT), signalled: true, ..failed() };
        assert!(!restarts(interrupted));
    }
}
