//! Starts burnrun on every host over ssh and follows it: one connection per host, from the start to the exit code.

use std::ffi::OsString;
use std::io::{self, Read};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus};
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

use burn_ddp_comm::{Secret, StopSignal};

use super::hostfile::Host;
use super::remote_messages::{Answer, ORDER_CAP, Order, Signalled};
use super::ssh_connection::{Connection, News};
use super::ssh_failure;
use crate::error::LaunchError;
use crate::event::Event;
use crate::preemption::SAME_WISH;
use crate::rank_exit::signal_name;
use crate::signals;

/// Interval between two looks at ssh's processes and at the signals.
const LOOK: Duration = Duration::from_millis(50);
/// Longest time to read the rest of stderr after ssh has ended: a shared connection of ssh (`ControlMaster`) may keep
/// the pipe open.
const LAST_OUTPUT: Duration = Duration::from_secs(2);
/// Interval at which a signal is repeated when the grace time is over. On a repeated signal, a launcher whose ranks
/// have ended stops waiting for the launchers of lost hosts.
const REPEAT: Duration = Duration::from_secs(1);
/// Longest time from the first launcher's end to the last, in addition to the grace time and the peer timeout.
const LAST_END: Duration = Duration::from_secs(30);
/// Time that the hosts have to end after a second Ctrl-C.
const IMPATIENT: Duration = Duration::from_secs(5);

/// A job that is started on several hosts from here. Node 0 is the first host.
pub struct FanOut {
    /// The machines, by node rank.
    pub hosts: Vec<Host>,
    /// ssh, or a program that understands ssh's arguments, followed by further arguments for it.
    pub ssh: Vec<OsString>,
    /// Command that starts burnrun on a host: a path, or a name on the host's `PATH`.
    pub burnrun: String,
    /// Longest time until burnrun on a host reports that it runs.
    pub host_timeout: Duration,
    /// Time that ranks have to end after a signal.
    pub grace: Duration,
    /// The signal that asks the ranks to save and end; `None` for SIGTERM where the program can stop.
    pub preempt_signal: Option<StopSignal>,
    /// Time that ranks have to end after that signal.
    pub preempt_grace: Duration,
    /// Exit code of the launchers if that signal ended the job.
    pub preempt_exit_code: u8,
    /// Silence after which a launcher counts as lost for the others.
    pub peer_timeout: Duration,
    /// Working directory on hosts whose [`Host::directory`] is `None`.
    pub directory: PathBuf,
    /// Variables of all ranks.
    pub env: Vec<(String, String)>,
    /// File with the job's secret; without one a new secret is made.
    pub secret_file: Option<PathBuf>,
    /// Command line of the launcher of each host, by node rank, each beginning with the name of the command.
    pub words: Vec<Vec<String>>,
}

/// Progress of one host.
enum State {
    Starting,
    Running,
    /// The launcher has sent the exit code of its part.
    Ended(i32),
    /// ssh has ended before the launcher sent an exit code.
    Gone,
}

struct Node {
    name: String,
    connection: Connection,
    order: String,
    state: State,
    report: Vec<String>,
    /// For stdout and stderr of ssh: true until the stream has ended.
    open: [bool; 2],
    exit: Option<(ExitStatus, Instant)>,
    /// True if the connection was cut, so that no output and no answer of this host is waited for.
    given_up: bool,
}

struct Job<'a> {
    fan_out: &'a FanOut,
    nodes: Vec<Node>,
    /// The first failure of a host, as one line, and the exit code.
    cause: Option<(String, i32)>,
    /// The first signal to this process, and the number of signals so far.
    signals: (Option<i32>, usize),
    /// Time of the first signal that asks to stop.
    asked: Option<Instant>,
    /// The signal to repeat, and the time of the next repetition.
    again: Option<(i32, Instant)>,
    /// Time after which hosts that have not ended are given up.
    until: Option<Instant>,
}

impl FanOut {
    /// Runs the job; returns one report for all hosts, and the exit code. Blocks.
    ///
    /// Output of the ranks goes to this process's stdout and stderr. Signals that end a job, SIGUSR1 and SIGUSR2 are
    /// passed on to the launchers on all hosts; after a second signal, hosts that have not ended within 5 s are given
    /// up.
    ///
    /// # Errors
    ///
    /// If the job could not be started: ssh or the secret is missing, or the command line is too long.
    pub fn run(&self) -> Result<(String, i32), LaunchError> {
        let (sender, events) = channel();
        let system = |doing| move |source| LaunchError::System { doing, source };
        let stop = self.preempt_signal.unwrap_or_default();
        let _listening = signals::listen(sender, stop).map_err(system("handle signals"))?;
        let (news_sender, news) = channel();
        let secret = secret_line(self.secret_file.as_deref())?;
        let mut nodes = Vec::new();
        for (node, (host, words)) in self.hosts.iter().zip(&self.words).enumerate() {
            let env = self.env.iter().chain(&host.env).cloned().collect();
            let directory = host.directory.as_ref().unwrap_or(&self.directory).clone();
            let order = Order { secret: secret.clone(), directory, env, words: words.clone() }.line();
            if order.len() > ORDER_CAP {
                return Err(LaunchError::Usage(format!(
                    "the command and its variables are too long for host {}: {} bytes, at most {ORDER_CAP}",
                    host.name,
                    order.len()
                )));
            }
            let connection = Connection::start(self.command(host), &host.name, node, &news_sender)
                .map_err(|error| LaunchError::Usage(format!("cannot start `{}`: {error}", self.ssh[0].display())))?;
            let name = host.name.clone();
            let (state, report) = (State::Starting, Vec::new());
            nodes.push(Node { name, connection, order, state, report, open: [true; 2], exit: None, given_up: false });
        }
        let mut job =
            Job { fan_out: self, nodes, cause: None, signals: (None, 0), asked: None, again: None, until: None };
        job.follow(&news, &events);
        Ok(job.outcome())
    }

    /// True for the signal that asks the ranks to stop.
    fn asks_to_stop(&self, signal: i32) -> bool {
        signal == self.preempt_signal.unwrap_or_default().number()
    }

    fn command(&self, host: &Host) -> Command {
        let seconds = (self.host_timeout.as_secs_f64() * 0.7).ceil().max(1.0);
        let mut command = Command::new(&self.ssh[0]);
        command.args(&self.ssh[1..]).arg("-T");
        for option in
            ["BatchMode=yes", &format!("ConnectTimeout={seconds}"), "ServerAliveInterval=10", "ServerAliveCountMax=3"]
        {
            command.args(["-o", option]);
        }
        command.arg(&host.name).arg(format!("'{}' remote", self.burnrun.replace('\'', r"'\''")));
        command
    }
}

impl Job<'_> {
    fn follow(&mut self, news: &Receiver<News>, events: &Receiver<Event>) {
        let deadline = Instant::now() + self.fan_out.host_timeout;
        while self.nodes.iter().any(|node| node.is_open()) {
            match news.recv_timeout(LOOK) {
                Ok(News::Answer(node, answer)) => self.answered(node, answer),
                Ok(News::Closed(node, output)) => self.nodes[node].open[output as usize] = false,
                Err(_) => {}
            }
            for event in events.try_iter() {
                match event {
                    Event::Signal(libc::SIGWINCH) => {}
                    Event::Signal(libc::SIGTSTP) => {
                        let _ = signals::stop_here();
                    }
                    Event::Signal(signal) => self.signalled(signal),
                    Event::PassOn(signal) => self.send(signal),
                    _ => {}
                }
            }
            for node in 0..self.nodes.len() {
                self.look_at(node);
            }
            if Instant::now() >= deadline {
                self.give_up_starting();
            }
            if let Some((signal, _)) = self.again.take_if(|(_, at)| Instant::now() >= *at) {
                self.send(signal);
                self.again = Some((signal, Instant::now() + REPEAT));
            }
            if self.until.is_some_and(|until| Instant::now() >= until) {
                self.give_up_ending();
            }
        }
    }

    fn answered(&mut self, nth: usize, answer: Answer) {
        let node = &mut self.nodes[nth];
        match answer {
            Answer::Ready { version } if version != env!("CARGO_PKG_VERSION") => {
                let own = env!("CARGO_PKG_VERSION");
                let text = format!("host {}: has burnrun {version}, this machine {own}: install the same", node.name);
                node.give_up();
                self.fail(text, 1);
            }
            Answer::Ready { .. } => {
                node.state = State::Running;
                let order = std::mem::take(&mut node.order);
                node.connection.send(&order);
            }
            Answer::Report(line) => node.report.push(line),
            Answer::Ended(code) => {
                node.state = State::Ended(code);
                self.hurry(self.fan_out.grace + self.fan_out.peer_timeout + LAST_END);
            }
            Answer::Failed(code) => {
                node.state = State::Ended(code);
                let text = format!("host {}: {}", node.name, node.report.join("\n"));
                self.fail(text, code);
            }
        }
    }

    /// Checks whether ssh has ended; once its output is read too, an end without an exit code fails the job.
    fn look_at(&mut self, nth: usize) {
        let node = &mut self.nodes[nth];
        if let (None, Ok(Some(status))) = (node.exit, node.connection.child.try_wait()) {
            node.exit = Some((status, Instant::now()));
            // If `ssh` is a script, the burnrun that it started may still run: the end of stdin ends it.
            node.connection.close();
        }
        let Some((status, _)) = node.exit.filter(|_| !node.is_open()) else { return };
        let (code, said) = (status.code(), node.connection.said());
        let text = match node.state {
            State::Starting => ssh_failure::before_ready(&node.name, &self.fan_out.burnrun, code, &said),
            State::Running => ssh_failure::lost(&node.name, &said),
            State::Ended(_) | State::Gone => return,
        };
        node.state = State::Gone;
        self.fail(text, 1);
    }

    /// Ends the job because a host failed. Later failures are consequences and are not reported.
    fn fail(&mut self, text: String, code: i32) {
        if self.cause.is_none() && self.signals.1 == 0 {
            self.cause = Some((text, code));
        }
        self.stop(libc::SIGTERM);
    }

    fn signalled(&mut self, signal: i32) {
        // What comes twice at a time, by two ways, is one wish to stop.
        let stops = self.fan_out.asks_to_stop(signal);
        if stops && self.asked.get_or_insert_with(Instant::now).elapsed() < SAME_WISH && self.signals.1 > 0 {
            return;
        }
        self.signals = (self.signals.0.or(Some(signal)), self.signals.1 + 1);
        self.stop(signal);
        if self.signals.1 > 1 {
            self.until = None;
            self.hurry(IMPATIENT);
        }
    }

    /// Gives up the hosts that have not received their order, and sends the signal to the others.
    fn stop(&mut self, signal: i32) {
        for node in self.nodes.iter_mut().filter(|node| matches!(node.state, State::Starting)) {
            node.give_up();
        }
        self.send(signal);
        let FanOut { grace, preempt_grace, .. } = self.fan_out;
        let grace = match self.fan_out.asks_to_stop(signal) {
            true => *grace.max(preempt_grace),
            false => *grace,
        };
        self.again.get_or_insert((signal, Instant::now() + grace + REPEAT));
        self.hurry(grace + REPEAT + LAST_END);
    }

    fn send(&mut self, signal: i32) {
        for node in self.nodes.iter_mut().filter(|node| matches!(node.state, State::Running)) {
            node.connection.send(&Signalled { signal }.line());
        }
    }

    fn hurry(&mut self, within: Duration) {
        self.until.get_or_insert(Instant::now() + within);
    }

    fn give_up_starting(&mut self) {
        let starting = self.nodes.iter_mut().filter(|node| matches!(node.state, State::Starting));
        let mut names = Vec::new();
        for node in starting {
            node.give_up();
            names.push(node.name.as_str());
        }
        let Some(first) = names.first() else { return };
        let text = format!(
            "host {}: no sign of burnrun within {} s: does `ssh -o BatchMode=yes {first} true` end? \
             --host-timeout waits longer",
            names.join(", "),
            self.fan_out.host_timeout.as_secs_f64(),
        );
        self.fail(text, 1);
    }

    fn give_up_ending(&mut self) {
        for nth in 0..self.nodes.len() {
            let node = &mut self.nodes[nth];
            if node.is_open() && !matches!(node.state, State::Gone) {
                let text = format!("host {} did not end in time: look for processes of the job there", node.name);
                let has_ended = matches!(node.state, State::Ended(_));
                node.give_up();
                if !has_ended {
                    self.fail(text, 1);
                }
            }
        }
    }

    fn outcome(mut self) -> (String, i32) {
        let ended = |node: &Node| matches!(node.state, State::Ended(_));
        let first = self.nodes.iter_mut().find(|node| ended(node));
        let (report, code) = match first {
            Some(Node { state: State::Ended(code), report, .. }) => (report.join("\n"), *code),
            _ => (String::new(), 1),
        };
        let FanOut { preempt_signal, preempt_exit_code, .. } = self.fan_out;
        let preempts = |signal| preempt_signal.is_some() && self.fan_out.asks_to_stop(signal);
        match (self.cause, self.signals.0) {
            (Some((text, code)), _) => (text, code),
            // The launchers on the hosts know whether the program could stop.
            (None, Some(_)) if code == i32::from(*preempt_exit_code) => (report, code),
            (None, Some(signal)) if report.is_empty() && code != 0 && preempts(signal) => {
                let text = format!("preempted by {} before the job ran on all hosts", signal_name(signal));
                (text, (*preempt_exit_code).into())
            }
            (None, Some(signal)) if report.is_empty() && code != 0 => {
                (format!("stopped by {} before the job ran on all hosts", signal_name(signal)), 128 + signal)
            }
            (None, Some(signal)) if code != 0 => (report, 128 + signal),
            (None, _) => (report, code),
        }
    }
}

impl Node {
    fn is_open(&self) -> bool {
        let [stdout, stderr] = self.open;
        let Some((_, at)) = self.exit else { return true };
        !self.given_up && (stdout || stderr && at.elapsed() < LAST_OUTPUT)
    }

    fn give_up(&mut self) {
        self.connection.cut();
        self.given_up = true;
        if !matches!(self.state, State::Ended(_)) {
            self.state = State::Gone;
        }
    }
}

/// The secret in `file` as a line of text; without a file, a new secret, known to this job's launchers and ranks only.
fn secret_line(file: Option<&Path>) -> Result<String, LaunchError> {
    let secret = match file {
        Some(path) => Secret::read(path).map_err(|error| LaunchError::Usage(error.to_string()))?,
        None => Secret::generate().map_err(|error| LaunchError::Store(error.into()))?,
    };
    let line = || -> io::Result<String> {
        let (mut reader, writer) = io::pipe()?;
        secret.write_to(std::os::fd::OwnedFd::from(writer).into())?;
        let mut line = String::new();
        reader.read_to_string(&mut line)?;
        Ok(line.trim_end().to_owned())
    };
    line().map_err(|source| LaunchError::System { doing: "pass on the job's secret", source })
}
