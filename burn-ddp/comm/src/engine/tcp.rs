//! The tcp engine: between processes, on one machine or several.
//!
//! Each group has a mesh of its own, one connection per pair of ranks, so no group waits behind another's bytes. An exchange makes
//! progress on all peers at once, both ways, on the calling thread: what can be written or read now is, then `poll` waits for any of it,
//! for the health, or for the deadline. Payloads are written from and read into the caller's memory.

mod link;

use std::net::TcpStream;
use std::os::fd::AsFd;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags};

use self::link::{End, Link, Receiving, Sending};
use super::{Engine, Fabric, HostEngine, Incoming, Outgoing, Stall, Transport};
use crate::call::Call;
use crate::control::Links;
use crate::health::{Health, Wake};
use crate::job_key::LinkKey;
use crate::net::handshake::Purpose;
use crate::net::interface::Interface;
use crate::net::wait::{Waker, wait};
use crate::rendezvous::dial;
use crate::{Error, Result};

const NAME: &str = "tcp";
/// How long after the end of a data connection the control connections may take to tell why.
const GRACE: Duration = Duration::from_secs(1);

/// How a rank and its peers reach each other.
pub(crate) struct Reach {
    pub(crate) rank: usize,
    /// Where each rank listens.
    pub(crate) addresses: Vec<(String, u16)>,
    /// What both ends of a connection prove to know.
    pub(crate) key: LinkKey,
    /// From where this rank connects.
    pub(crate) via: Interface,
    /// Where connections from higher ranks arrive.
    pub(crate) links: Arc<Links>,
}

/// Makes a rank's transports.
pub(crate) struct TcpFabric {
    reach: Reach,
    health: Arc<Health>,
}

impl TcpFabric {
    pub(crate) fn new(reach: Reach, health: Arc<Health>) -> Self {
        Self { reach, health }
    }

    /// Whether `peer` can still be waited for.
    fn check(&self, peer: usize) -> Result<()> {
        self.health.check()?;
        if self.health.has_left(peer) { Err(self.health.left_error(peer)) } else { Ok(()) }
    }

    /// The connection to `peer` for the group that `call` makes. The higher rank of a pair connects.
    fn connect(&self, call: &Call, peer: usize) -> Result<TcpStream> {
        let Reach { rank, addresses, key, via, links } = &self.reach;
        let (rank, group) = (*rank, call.info.group);
        if peer > rank {
            let purpose = Purpose::Data { rank: peer as u32, group };
            let mut stall = Stall::new(call, self.health.options().stall);
            loop {
                if let Some(stream) = links.claim(purpose, stall.at.min(call.deadline), || self.check(peer))? {
                    return Ok(stream);
                }
                if Instant::now() >= call.deadline {
                    return Err(call.timed_out(vec![peer]));
                }
                if stall.is_due() {
                    self.health.stalled(call, vec![peer]);
                }
            }
        }
        let (host, port) = &addresses[peer];
        let purpose = Purpose::Data { rank: rank as u32, group };
        dial((host, *port), via, key, peer, purpose, call.deadline).or_else(|cause| {
            if Instant::now() >= call.deadline {
                return Err(call.timed_out(vec![peer]));
            }
            links.watch(call.deadline.min(Instant::now() + GRACE), || self.check(peer))?;
            Err(self.health.lost_error(peer, format!("it could not be reached for a new group: {cause}")))
        })
    }
}

impl Fabric for TcpFabric {
    fn name(&self) -> &'static str {
        NAME
    }

    fn open(&self, call: &Call) -> Result<Box<dyn Engine>> {
        let mut links = Vec::with_capacity(self.reach.addresses.len());
        let others = (0..self.reach.addresses.len()).filter(|peer| *peer != self.reach.rank);
        others.for_each(|peer| call.expect(peer));
        for peer in 0..self.reach.addresses.len() {
            links.push(if peer == self.reach.rank {
                None
            } else {
                let stream = self.connect(call, peer)?;
                Some(Link::new(stream).map_err(|e| self.health.lost_error(peer, e.to_string()))?)
            });
        }
        let transport = TcpTransport::new(self.reach.rank, links, self.health.clone())?;
        Ok(Box::new(HostEngine::new(transport)))
    }
}

/// One group's connections on one rank.
pub(crate) struct TcpTransport {
    rank: usize,
    /// By rank; `None` for this one.
    links: Vec<Option<Link>>,
    health: Arc<Health>,
    bell: Arc<Bell>,
    /// Memory for headers, kept.
    headers: Vec<u8>,
}

/// Rung by the health, polled by the exchange.
struct Bell(Waker);

impl Wake for Bell {
    fn wake(&self) {
        self.0.wake();
    }
}

impl TcpTransport {
    fn new(rank: usize, links: Vec<Option<Link>>, health: Arc<Health>) -> Result<Self> {
        let waker = Waker::new()
            .map_err(|e| Error::Environment { message: format!("this process cannot have another socket: {e}") })?;
        let bell = Arc::new(Bell(waker));
        let weak: Weak<dyn Wake> = Arc::downgrade(&bell) as Weak<dyn Wake>;
        health.add_waker(weak);
        Ok(Self { rank, links, health, bell, headers: Vec::new() })
    }
}

impl Transport for TcpTransport {
    fn name(&self) -> &'static str {
        NAME
    }

    fn rank(&self) -> usize {
        self.rank
    }

    fn world_size(&self) -> usize {
        self.links.len()
    }

    fn exchange(&mut self, call: &Call, sends: &[Outgoing<'_>], receives: &mut [Incoming<'_>]) -> Result<()> {
        let mut headers = std::mem::take(&mut self.headers);
        headers.clear();
        let mut ends = Vec::with_capacity(sends.len());
        for send in sends {
            call.header(send.payload.len()).encode(&mut headers);
            ends.push(headers.len());
        }
        let mut exchange = Exchange {
            call,
            health: &self.health,
            bell: &self.bell.0,
            sending: Vec::with_capacity(sends.len()),
            receiving: Vec::with_capacity(receives.len()),
            ended: None,
            stall: Stall::new(call, self.health.options().stall),
        };
        receives.iter().for_each(|receive| call.expect(receive.peer));
        let mut start = 0;
        for (send, end) in sends.iter().zip(ends) {
            exchange.sending.push((send.peer, Sending::new(&headers[start..end], send.payload)));
            start = end;
        }
        exchange.receiving.extend(receives.iter_mut().map(Receiving::new));
        let result = exchange.run(&mut self.links);
        self.headers = headers;
        result
    }
}

/// One exchange under way.
struct Exchange<'a, 'b> {
    call: &'a Call,
    health: &'a Health,
    bell: &'a Waker,
    /// What is still to be written, and to whom.
    sending: Vec<(usize, Sending<'a>)>,
    /// What is still to be read.
    receiving: Vec<Receiving<'a, 'b>>,
    /// The first peer whose connection ended too early, when, and how.
    ended: Option<(usize, Instant, End)>,
    stall: Stall,
}

impl Exchange<'_, '_> {
    fn run(&mut self, links: &mut [Option<Link>]) -> Result<()> {
        loop {
            self.progress(links)?;
            if self.sending.is_empty() && self.receiving.is_empty() {
                return Ok(());
            }
            self.wait(links)?;
        }
    }

    /// Writes and reads what can be now.
    fn progress(&mut self, links: &mut [Option<Link>]) -> Result<()> {
        let Self { call, sending, receiving, ended, .. } = self;
        let mut end = |peer: usize, cause: End| {
            ended.get_or_insert_with(|| (peer, Instant::now(), cause));
        };
        let mut nth = 0;
        while let Some((peer, send)) = sending.get_mut(nth) {
            match link(links, *peer)?.write(send) {
                Ok(true) => drop(sending.swap_remove(nth)),
                Ok(false) => nth += 1,
                Err(cause) => {
                    end(*peer, cause);
                    nth += 1;
                }
            }
        }
        let mut nth = 0;
        while let Some(receive) = receiving.get_mut(nth) {
            let peer = receive.peer();
            match link(links, peer)?.read(receive, call) {
                Ok(true) => {
                    call.arrived(peer);
                    receiving.swap_remove(nth);
                }
                Ok(false) => nth += 1,
                Err(link::ReadError::Ended(cause)) => {
                    end(peer, cause);
                    nth += 1;
                }
                Err(link::ReadError::Wrong(error)) => return Err(error),
            }
        }
        Ok(())
    }

    /// Waits until something can be written or read; ends by an error if nothing more will come.
    fn wait(&mut self, links: &[Option<Link>]) -> Result<()> {
        // Once a connection has ended only the reason is missing, and it may be known already.
        if self.ended.is_some() {
            self.explain()?;
        }
        let mut interest = vec![PollFlags::empty(); links.len()];
        for (peer, _) in &self.sending {
            interest[*peer] |= PollFlags::OUT;
        }
        for receive in &self.receiving {
            interest[receive.peer()] |= PollFlags::IN;
        }
        let mut fds = vec![PollFd::new(self.bell, PollFlags::IN)];
        for (link, interest) in links.iter().zip(interest) {
            if let Some(link) = link
                && let Some(interest) = link.open(interest)
            {
                fds.push(PollFd::from_borrowed_fd(link.as_fd(), interest));
            }
        }
        let grace_end = self.ended.as_ref().map(|(_, at, _)| *at + GRACE);
        let until = self.call.deadline.min(self.stall.at);
        let until = grace_end.map_or(until, |at| at.min(until));
        let woken = wait(&mut fds, Some(until)).map_err(|e| Error::Internal { message: format!("poll: {e}") })?;
        if !fds[0].revents().is_empty() {
            self.bell.clear();
            self.explain()?;
        }
        if woken {
            return Ok(());
        }
        if let Some((peer, at, cause)) = &self.ended
            && at.elapsed() >= GRACE
        {
            return Err(self.unexplained(*peer, cause));
        }
        if Instant::now() >= self.call.deadline {
            return Err(self.call.timed_out(self.waiting_for()));
        }
        if self.stall.is_due() {
            self.health.stalled(self.call, self.waiting_for());
        }
        Ok(())
    }

    fn waiting_for(&self) -> Vec<usize> {
        let sending = self.sending.iter().map(|(peer, _)| *peer);
        let mut waiting: Vec<usize> = sending.chain(self.receiving.iter().map(Receiving::peer)).collect();
        waiting.sort_unstable();
        waiting.dedup();
        waiting
    }

    /// The error, if the health knows one.
    fn explain(&self) -> Result<()> {
        self.health.check()?;
        match &self.ended {
            Some((peer, ..)) if self.health.has_left(*peer) => Err(self.health.left_error(*peer)),
            _ => Ok(()),
        }
    }

    /// The error for a connection that ended although its rank neither died nor left the world.
    fn unexplained(&self, peer: usize, end: &End) -> Error {
        match end {
            End::Closed => self.health.left_error(peer),
            End::Broken(cause) => self.health.lost_error(peer, format!("its data connection broke: {cause}")),
        }
    }
}

fn link(links: &mut [Option<Link>], peer: usize) -> Result<&mut Link> {
    links.get_mut(peer).and_then(Option::as_mut).ok_or_else(|| Error::Internal {
        message: format!("an exchange with rank {peer}, to which there is no connection"),
    })
}
