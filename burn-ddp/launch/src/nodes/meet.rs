//! Meeting of the launchers of a job, in a store that node 0 hosts.

use std::io::ErrorKind;
use std::net::{IpAddr, SocketAddr, ToSocketAddrs};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender};
use std::time::{Duration, Instant};

use burn_ddp_comm::{Store, StoreServer};

use super::launcher_messages::{Node, put_new, take};
use super::{Interrupted, LOOK, Link, Nodes, Others, look};
use crate::error::LaunchError;
use crate::event::{Event, Stop};
use crate::job_authentication::Trust;
use crate::rank_exit::signal_name;
use crate::report::user_notices::NoticeSink;

/// Time after which a notice names the missing launchers; doubled after each notice.
const COMMENT: Duration = Duration::from_secs(10);
/// Key under which the end of generation 0 is published, also if a signal ends the job before that generation starts.
const STOP: &str = "0/stop";
/// Limit of the first attempt to reach node 0; doubled for each further attempt, since the network may be slow. The
/// attempts begin short because signals are handled only between two attempts.
const FIRST_ATTEMPT: Duration = Duration::from_millis(500);
/// Longest time until the meeting's host name resolves to an address.
const NAME: Duration = Duration::from_secs(30);
/// Largest limit of an attempt.
const ATTEMPT: Duration = Duration::from_secs(4);

/// Place and participants of the meeting.
pub(crate) struct Meet<'a> {
    pub(crate) nnodes: usize,
    /// Node rank; `None`: the machine that owns the meeting's address is 0, the others are numbered as they arrive.
    pub(crate) node: Option<usize>,
    pub(crate) host: &'a str,
    pub(crate) port: u16,
    pub(crate) job: &'a str,
    /// See [`Node::arguments`].
    pub(crate) arguments: Option<u64>,
    /// See [`Node::stop_signal`].
    pub(crate) stop_signal: String,
    pub(crate) nproc: usize,
    pub(crate) own_host: String,
    pub(crate) join_timeout: Duration,
    /// Silence after which another launcher is lost.
    pub(crate) patience: Duration,
    /// Notice of node 0: the command to run on the other machines.
    pub(crate) invitation: Option<&'a str>,
    pub(crate) trust: &'a Trust,
    pub(crate) notices: NoticeSink,
}

/// Blocks until all launchers of the job have registered.
pub(crate) fn meet(meet: &Meet<'_>, sender: &Sender<Event>, events: &Receiver<Event>) -> Result<Nodes, Interrupted> {
    let deadline = Instant::now() + meet.join_timeout;
    let server = meet.host_store(deadline, events)?;
    if let (Some(_), Some(invitation)) = (&server, meet.invitation) {
        meet.notices.show(invitation);
    }
    let store = meet.connect(deadline, events)?;
    let node = meet.take_seat(&*store, server.is_some(), deadline, events)?;
    let nodes = meet.await_all(&*store, node, server.as_ref(), deadline, events)?;
    let link = Link::start(store, node, meet.nnodes, meet.patience, sender.clone())
        .map_err(|source| Interrupted::Error(LaunchError::System { doing: "start a thread", source }))?;
    Ok(Nodes { node, host: meet.own_host.clone(), others: Some(Others { nodes, link, server }) })
}

impl Meet<'_> {
    /// Hosts the store, if this is node 0.
    fn host_store(&self, deadline: Instant, events: &Receiver<Event>) -> Result<Option<StoreServer>, Interrupted> {
        if self.node.is_some_and(|node| node > 0) {
            return Ok(None);
        }
        let addresses = self.addresses(deadline, events)?;
        if addresses[0].ip().is_unspecified() {
            let advice = "that means every address: give the one at which the other machines reach node 0";
            return Err(self.failed(advice));
        }
        let own = addresses.iter().all(|address| address.ip().is_loopback()) && !is_loopback_name(self.host);
        if own {
            return Err(self.failed(&format!(
                "on this machine that name means {}, which no other machine can reach; give an address instead",
                addresses[0].ip()
            )));
        }
        match self.trust.serve(&addresses, self.job) {
            Ok(server) => Ok(Some(server)),
            // The address is another machine's, or another launcher of the job on this machine already listens there:
            // this launcher is not node 0.
            Err(error)
                if self.node.is_none()
                    && matches!(error.kind(), ErrorKind::AddrNotAvailable | ErrorKind::AddrInUse) =>
            {
                Ok(None)
            }
            Err(error) => {
                let advice = match error.kind() {
                    ErrorKind::AddrInUse => "; another job listens there: end it, or choose another --master-port",
                    ErrorKind::AddrNotAvailable => {
                        "; that is no address of this machine: \
                         --node-rank 0 belongs on the machine that --master-addr names"
                    }
                    ErrorKind::PermissionDenied => "; ports below 1024 are reserved: choose another --master-port",
                    _ => "",
                };
                Err(self.failed(&format!("{error}{advice}")))
            }
        }
    }

    /// Addresses of the meeting, at least one. Waits for the name to resolve: a Kubernetes pod's name resolves late.
    fn addresses(&self, deadline: Instant, events: &Receiver<Event>) -> Result<Vec<SocketAddr>, Interrupted> {
        let deadline = deadline.min(Instant::now() + NAME);
        let mut shown = false;
        loop {
            let failure = match self.resolve() {
                Ok(found) if !found.is_empty() => return Ok(found),
                Ok(_) => "the name has no address".to_owned(),
                Err(error) => error.to_string(),
            };
            if Instant::now() >= deadline {
                return Err(self.failed(&failure));
            }
            if !std::mem::replace(&mut shown, true) {
                let seconds = NAME.as_secs();
                self.notices.show(&format!("waiting up to {seconds} s for an address of {}: {failure}", self.host));
            }
            interruption(events)?;
        }
    }

    fn resolve(&self) -> std::io::Result<Vec<SocketAddr>> {
        if self.host.eq_ignore_ascii_case("localhost") {
            return Ok(vec![SocketAddr::from(([127, 0, 0, 1], self.port))]);
        }
        Ok((self.host, self.port).to_socket_addrs()?.collect())
    }

    fn connect(&self, deadline: Instant, events: &Receiver<Event>) -> Result<Arc<dyn Store>, Interrupted> {
        let mut comment = Comment::new();
        let mut attempt = FIRST_ATTEMPT;
        loop {
            let failure = match self.trust.connect(self.host, self.port, self.job, attempt, self.patience) {
                Ok(store) => return Ok(store),
                Err(error) if is_refusal(&error) => return Err(self.refused(&error)),
                // Without the time of this attempt: the message below states the time of all attempts.
                Err(error) => error.to_string().rsplit("last attempt: ").next().unwrap_or_default().to_owned(),
            };
            let place = format!("{}:{}", self.host, self.port);
            if Instant::now() >= deadline {
                let waited = self.join_timeout.as_secs_f64();
                return Err(Interrupted::Error(LaunchError::Nodes(format!(
                    "node 0's launcher was not reached at {place} within {waited:.0} s ({failure}); \
                     does it run there, and is the port open?"
                ))));
            }
            if comment.is_due() {
                self.notices.show(&format!("waiting for node 0's launcher at {place}: {failure}"));
            }
            interruption(events)?;
            attempt = (attempt * 2).min(ATTEMPT);
        }
    }

    /// Registers this launcher and returns its node rank.
    fn take_seat(
        &self,
        store: &dyn Store,
        hosts: bool,
        deadline: Instant,
        events: &Receiver<Event>,
    ) -> Result<usize, Interrupted> {
        let me = |node| Node {
            node,
            host: self.own_host.clone(),
            pid: std::process::id(),
            nproc: self.nproc,
            nnodes: self.nnodes,
            version: env!("CARGO_PKG_VERSION").into(),
            arguments: self.arguments,
            stop_signal: self.stop_signal.clone(),
        };
        if hosts {
            put_new(store, &key(0), &me(0))?;
            return Ok(0);
        }
        // Node 0's entry holds the settings that this launcher must share.
        let first = loop {
            if let Some(first) = take::<Node>(store, &key(0), LOOK)? {
                break first;
            }
            if Instant::now() >= deadline {
                let message = "node 0's launcher hosts the store but did not register in time";
                return Err(Interrupted::Error(LaunchError::Nodes(message.into())));
            }
            interruption(events)?;
        };
        let difference = if first.nnodes != self.nnodes {
            Some(format!("--nnodes {} here, but {} on node 0 (host {})", self.nnodes, first.nnodes, first.host))
        } else if first.version != env!("CARGO_PKG_VERSION") {
            Some(format!("burnrun {} here, but {} on node 0", env!("CARGO_PKG_VERSION"), first.version))
        } else if first.stop_signal != self.stop_signal {
            let (here, there) = (&self.stop_signal, &first.stop_signal);
            Some(format!("--preempt-signal {here} here, but {there} on node 0 (host {})", first.host))
        } else if first.arguments != self.arguments {
            Some(format!(
                "the program has other arguments here than on node 0 (host {}): give each job a --master-port, and \
                 machines of one job whose arguments differ the same --rdzv-id",
                first.host
            ))
        } else {
            None
        };
        if let Some(difference) = difference {
            let message = format!("the machines were started with different settings: {difference}");
            return Err(Interrupted::Error(LaunchError::Disagree(message)));
        }
        let wanted = self.node.map_or(1..self.nnodes, |node| node..node + 1);
        for node in wanted.clone() {
            if put_new(store, &key(node), &me(node))? {
                return Ok(node);
            }
        }
        let there = take::<Node>(store, &key(wanted.start), Duration::ZERO)?;
        let there = there.map(|node| format!("host {}, pid {}", node.host, node.pid)).unwrap_or_default();
        Err(Interrupted::Error(LaunchError::Disagree(match self.node {
            Some(node) => {
                format!("node rank {node} is taken already ({there}): each machine needs its own --node-rank")
            }
            None => format!("all {} machines of this job are there already", self.nnodes),
        })))
    }

    fn await_all(
        &self,
        store: &dyn Store,
        own: usize,
        server: Option<&StoreServer>,
        deadline: Instant,
        events: &Receiver<Event>,
    ) -> Result<Vec<Node>, Interrupted> {
        let mut comment = Comment::new();
        let mut nodes: Vec<Option<Node>> = vec![None; self.nnodes];
        loop {
            for (node, seat) in nodes.iter_mut().enumerate().filter(|(_, seat)| seat.is_none()) {
                *seat = take(store, &key(node), Duration::ZERO)?;
            }
            let missing: Vec<_> = (0..self.nnodes).filter(|&node| nodes[node].is_none()).collect();
            if missing.is_empty() {
                return Ok(nodes.into_iter().flatten().collect());
            }
            let list = missing.iter().map(usize::to_string).collect::<Vec<_>>().join(", ");
            let refused = || server.and_then(StoreServer::refused).map(|refused| format!("; node 0 refused {refused}"));
            if Instant::now() >= deadline {
                let came: Vec<_> = nodes.iter().flatten().map(|n| format!("{} (host {})", n.node, n.host)).collect();
                let waited = self.join_timeout.as_secs_f64();
                return Err(Interrupted::Error(LaunchError::Nodes(format!(
                    "not all {} machines came within {waited:.0} s: node {} came; missing is node {list}{}",
                    self.nnodes,
                    came.join(", "),
                    refused().unwrap_or_default()
                ))));
            }
            if own == 0 && comment.is_due() {
                let refused = refused().unwrap_or_default();
                self.notices.show(&format!("still waiting for node {list} of {}{refused}", self.nnodes));
            }
            if let Some(Stop::Interrupted { host, signal }) = take(store, STOP, Duration::ZERO)? {
                self.notices.show(&format!("burnrun on host {host} was stopped by {}", signal_name(signal)));
                return Err(Interrupted::Signal(signal));
            }
            interruption(events).inspect_err(|interrupted| {
                if let Interrupted::Signal(signal) = interrupted {
                    // This launcher is registered: without this entry, the others would wait for it or start with it.
                    let _ = put_new(store, STOP, &Stop::Interrupted { host: self.own_host.clone(), signal: *signal });
                }
            })?;
        }
    }

    /// Error of this launcher after node 0's store has refused it.
    fn refused(&self, error: &burn_ddp_comm::Error) -> Interrupted {
        let advice = if error.to_string().contains("of another job") {
            format!(
                "; this is job {:?}: give each job a --master-port or --rdzv-id of its own; machines of one job whose \
                 programs have different names need the same --rdzv-id",
                self.job
            )
        } else {
            String::new()
        };
        Interrupted::Error(LaunchError::Nodes(format!("{error}{advice}")))
    }

    fn failed(&self, reason: &str) -> Interrupted {
        let message = format!("cannot host the meeting of the machines at {}:{}: {reason}", self.host, self.port);
        Interrupted::Error(LaunchError::Nodes(message))
    }
}

/// Waits [`LOOK`] for a signal. Every signal but SIGWINCH and SIGTSTP ends the meeting.
fn interruption(events: &Receiver<Event>) -> Result<(), Interrupted> {
    match look(events, LOOK) {
        Some(Event::Signal(libc::SIGWINCH)) => Ok(()),
        Some(Event::Signal(libc::SIGTSTP)) => crate::signals::stop_here()
            .map_err(|source| Interrupted::Error(LaunchError::System { doing: "stop", source })),
        Some(Event::Signal(signal)) => Err(Interrupted::Signal(signal)),
        _ => Ok(()),
    }
}

/// True if the store refused this process, so that another attempt would fail too.
fn is_refusal(error: &burn_ddp_comm::Error) -> bool {
    error.to_string().contains("refused this process")
}

/// True if `host` can only mean this machine.
pub(crate) fn is_loopback_name(host: &str) -> bool {
    host.eq_ignore_ascii_case("localhost") || host.parse::<IpAddr>().is_ok_and(|ip| ip.is_loopback())
}

struct Comment {
    at: Instant,
    next: Duration,
}

impl Comment {
    fn new() -> Self {
        Self { at: Instant::now() + COMMENT, next: COMMENT }
    }

    fn is_due(&mut self) -> bool {
        let due = Instant::now() >= self.at;
        if due {
            self.next *= 2;
            self.at += self.next;
        }
        due
    }
}

fn key(node: usize) -> String {
    format!("node/{node}")
}
