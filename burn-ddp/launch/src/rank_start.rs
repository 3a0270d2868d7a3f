//! Starting the ranks of one machine: their commands, variables, pipes and log files.

use std::path::{Path, PathBuf};
use std::process::Child;
use std::sync::mpsc::Sender;

use burn_ddp_comm::{LaunchEnv, Meeting};

use crate::binding::Binding;
use crate::cgroup::ControlGroup;
use crate::error::LaunchError;
use crate::event::Event;
use crate::guardian::Guardian;
use crate::job_authentication::Trust;
use crate::job_spec::{JobSpec, Stdio};
use crate::leftover_processes::MARK;
use crate::nodes::{GenerationPlan, Link};
use crate::output::log_dir;
use crate::output::relay::{Output, Relay, Source};
use crate::rank_processes::Processes;
use crate::report::event_file::EventFile;
use crate::signals::Listening;
use crate::start_watch::StartWatch;
use crate::unix_child_spawn;

/// The settings and resources from which the ranks of this machine are started.
pub(crate) struct RankStart<'a> {
    pub(crate) spec: &'a JobSpec,
    pub(crate) trust: &'a Trust,
    pub(crate) binding: &'a Binding,
    pub(crate) signals: &'a Listening,
    pub(crate) plan: &'a GenerationPlan,
    pub(crate) generation: u32,
    /// Number of this machine.
    pub(crate) node: usize,
    /// Link to the other launchers, if there are any.
    pub(crate) link: Option<&'a Link>,
    pub(crate) report_dir: &'a Path,
    /// Mark of this generation's processes on this machine.
    pub(crate) mark: &'a str,
    /// Control group of this generation's processes on this machine, if there is one.
    pub(crate) group: Option<&'a ControlGroup>,
    /// File for the ranks' events.
    pub(crate) event_file: Option<&'a EventFile>,
}

impl RankStart<'_> {
    /// Starts all ranks, and the relay of their output if any of it is relayed. After an error `processes` holds the
    /// ranks that were started.
    pub(crate) fn start_all(
        &self,
        processes: &mut Processes<'_>,
        guardian: &mut Guardian,
        sender: Sender<Event>,
    ) -> Result<Option<Relay>, LaunchError> {
        let watch = StartWatch::begin(self.spec, self.mark, self.signals, self.link, self.generation)
            .map_err(|source| LaunchError::System { doing: "watch the start of the ranks", source })?;
        let mut sources = Vec::new();
        for local_rank in 0..self.spec.nproc {
            let rank = self.first_rank() + local_rank;
            let mut child = self.spawn(local_rank)?;
            guardian.watch(child.id());
            let pipes = [
                (Output::Stdout, child.stdout.take().map(Into::into)),
                (Output::Stderr, child.stderr.take().map(Into::into)),
            ];
            // `processes` owns the child from here on, and ends it if a later step fails.
            let stderr_log = self.log_path(local_rank, Output::Stderr).filter(|_| !self.keeps_terminal(local_rank));
            processes.add(child, stderr_log).map_err(|source| LaunchError::Spawn { rank, source })?;
            for (output, pipe) in pipes {
                let Some(pipe) = pipe else { continue };
                let plain = self.spec.stdio == Stdio::Plain;
                let prefix = if plain { String::new() } else { format!("[rank {rank}] ") };
                let shown = self.spec.output.to_console(local_rank, output);
                let log = self.log_path(local_rank, output);
                let log =
                    log.map(|path| log_dir::create_log(&path).map_err(|source| LaunchError::LogDir { path, source }));
                let log = log.transpose()?;
                sources.push(Source { local_rank, output, pipe, prefix: shown.then_some(prefix), log });
            }
        }
        drop(watch);
        if sources.is_empty() {
            return Ok(None);
        }
        let relay = Relay::start(self.spec.nproc, sources, sender);
        relay.map(Some).map_err(|source| LaunchError::System { doing: "pass on the ranks' output", source })
    }

    fn spawn(&self, local_rank: usize) -> Result<Child, LaunchError> {
        let (program, rank) = (&self.spec.program, self.first_rank() + local_rank);
        let keeps_terminal = self.keeps_terminal(local_rank);
        let threads = self.binding.threads(local_rank);
        let mut command = program.command(threads, self.variables(local_rank), keeps_terminal);
        let inherited = [self.trust.fd(), self.event_file.and_then(EventFile::fd)];
        let group = self.group.map(ControlGroup::entrance);
        let processors = self.binding.processors(local_rank);
        unix_child_spawn::spawn(&mut command, inherited, group, processors)
            .map_err(|source| program.spawn_error(rank, source))
    }

    fn first_rank(&self) -> usize {
        self.plan.first_rank(self.node)
    }

    fn keeps_terminal(&self, local_rank: usize) -> bool {
        local_rank == 0 && self.spec.stdio == Stdio::FirstRankInherits
    }

    /// Path of the log of one output of a rank; `None` if that output is not logged.
    fn log_path(&self, local_rank: usize, output: Output) -> Option<PathBuf> {
        let rank = self.first_rank() + local_rank;
        let logged = self.spec.output.to_file(local_rank, output);
        logged.then(|| log_dir::log_path(self.report_dir, rank, output))
    }

    /// Environment variables of a rank: its number, the world, and the address of the store in which ranks meet.
    fn variables(&self, local_rank: usize) -> Vec<(String, String)> {
        let plan = self.plan;
        let meeting = Meeting::Launcher { host: plan.host.clone(), port: plan.port };
        let mut env = LaunchEnv::new(self.first_rank() + local_rank, plan.world_size(), meeting, &plan.job_id);
        env.local_rank = local_rank;
        env.local_world_size = self.spec.nproc;
        env.node_rank = self.node;
        env.restart_count = self.generation;
        env.events = self.event_file.map(|file| file.path().to_owned());
        env.report_dir = Some(self.report_dir.to_owned());
        self.trust.describe(&mut env);
        let mut variables = env.variables();
        variables.push((MARK.to_owned(), self.mark.to_owned()));
        // Otherwise the default holds there, too, and a launcher among the ranks must not take it for chosen.
        if self.spec.preemption.is_chosen {
            let (name, value) = self.spec.preemption.signal.variable();
            variables.push((name.to_owned(), value.to_owned()));
        }
        variables
    }
}
