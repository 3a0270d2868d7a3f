//! Starts burnrun on every host over ssh and follows it: one connection per host, from the start to the exit code.

use std::ffi::OsString;
use std::io::{self, Read};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus};
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

use burn_ddp_comm::Secret;

use super::hostfile::Host;
use super::remote_messages::{Answer, ORDER_CAP, Order, Signalled};
use super::ssh_connection::{Connection, News};
use super::ssh_failure;
use crate::error::LaunchError;
use crate::event::Event;
use crate::rank_exit::signal_name;
use crate::signals;

/// Interval between two looks at ssh's processes and at the signals.
const LOOK: Duration = Duration::from_millis(50);
/// Time for stderr that is still on its way when ssh has ended: a master connection of ssh may hold it open.
const LAST_OUTPUT: Duration = Duration::from_secs(2);
/// Interval at which a signal is repeated when the grace time is over. A launcher whose ranks have ended takes it as a
/// reason to wait no longer for those of hosts that are lost.
const REPEAT: Duration = Duration::from_secs(1);
/// Longest time from the first launcher's end to the last, beside the grace time and the peer timeout.
const LAST_END: Duration = Duration::from_secs(30);
/// Time after a second Ctrl-C in which the hosts may end.
const IMPATIENT: Duration = Duration::from_secs(5);

/// A job that is started on several hosts from here. Node 0 is the first host.
pub struct FanOut {
    /// The machines, by node rank.
    pub hosts: Vec<Host>,
    /// ssh or a program that takes its arguments, with arguments of its own.
    pub ssh: Vec<OsString>,
    /// Command that starts burnrun on a host: a path, or a name on the host's `PATH`.
    pub burnrun: String,
    /// Longest time until burnrun reports from a host.
    pub host_timeout: Duration,
    /// Time that ranks have to end after a signal.
    pub grace: Duration,
    /// Silence after which the launchers take another for lost.
    pub peer_timeout: Duration,
    /// Working directory of hosts without one of their own.
    pub directory: PathBuf,
    /// Variables of all ranks.
    pub env: Vec<(String, String)>,
    /// File with the job's secret; without one a new secret is made.
    pub secret_file: Option<PathBuf>,
    /// Command line of the launcher of each host, with its name.
    pub words: Vec<Vec<String>>,
}

/// Progress of one host.
enum State {
    Starting,
    Running,
    /// It has said how its part ended.
    Ended(i32),
    /// ssh has ended without that.
    Gone,
}

struct Node {
    name: String,
    connection: Connection,
    order: String,
    state: State,
    report: Vec<String>,
    /// stdout and stderr: true until they have ended.
    open: [bool; 2],
    exit: Option<(ExitStatus, Instant)>,
    /// True if nothing more is expected.
    given_up: bool,
}

struct Job<'a> {
    fan_out: &'a FanOut,
    nodes: Vec<Node>,
    /// First host that failed, in a line, and the exit code.
    cause: Option<(String, i32)>,
    /// First signal to this process, and how many there were.
    signals: (Option<i32>, usize),
    /// Signal that is repeated, and when.
    again: Option<(i32, Instant)>,
    /// Time at which hosts that have not ended are given up.
    until: Option<Instant>,
}

impl FanOut {
    /// Runs the job; returns its report, as of one machine, and its exit code. Blocks.
    ///
    /// Output of the ranks goes to this process's stdout and stderr. SIGINT, SIGTERM and SIGHUP to this process go to
    /// the launchers on all hosts instead; a second one gives hosts that do not end 5 s more.
    ///
    /// # Errors
    ///
    /// If nothing could be started: no ssh, or no readable secret.
    pub fn run(&self) -> Result<(String, i32), LaunchError> {
        let (sender, events) = channel();
        let system = |doing| move |source| LaunchError::System { doing, source };
        let _listening = signals::listen(sender).map_err(system("handle signals"))?;
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
        let mut job = Job { fan_out: self, nodes, cause: None, signals: (None, 0), again: None, until: None };
        job.follow(&news, &events);
        Ok(job.outcome())
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
                let text = format!("host {}: burnrun {version} there, {own} here: install the same", node.name);
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

    /// Notes that ssh has ended, once its output is read.
    fn look_at(&mut self, nth: usize) {
        let node = &mut self.nodes[nth];
        if let (None, Ok(Some(status))) = (node.exit, node.connection.child.try_wait()) {
            node.exit = Some((status, Instant::now()));
            // Where ssh was a script, its burnrun may still run.
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

    /// Ends the job since a host failed. What fails later fails for that reason.
    fn fail(&mut self, text: String, code: i32) {
        if self.cause.is_none() && self.signals.1 == 0 {
            self.cause = Some((text, code));
        }
        self.stop(libc::SIGTERM);
    }

    fn signalled(&mut self, signal: i32) {
        self.signals = (self.signals.0.or(Some(signal)), self.signals.1 + 1);
        self.stop(signal);
        if self.signals.1 > 1 {
            self.until = None;
            self.hurry(IMPATIENT);
        }
    }

    /// Hosts that have no order get none; the others get the signal.
    fn stop(&mut self, signal: i32) {
        for node in self.nodes.iter_mut().filter(|node| matches!(node.state, State::Starting)) {
            node.give_up();
        }
        self.send(signal);
        self.again.get_or_insert((signal, Instant::now() + self.fan_out.grace + REPEAT));
        self.hurry(self.fan_out.grace + REPEAT + LAST_END);
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
                let text = format!("host {} does not end: look for processes of the job there", node.name);
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
        match (self.cause, self.signals.0) {
            (Some((text, code)), _) => (text, code),
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

/// The line of the secret's file. With no file, of a new secret, which only the launchers and ranks of this job see.
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
