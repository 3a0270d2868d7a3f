//! The links of a group on one rank: each is connected when an exchange first needs it, and all close with the group.
//!
//! The higher rank of a pair dials. The lower one need not be in a call: its monitor thread answers. An exchange dials
//! its lower peers one after the other before it moves frames. That takes a few round trips; it takes longer only if a
//! peer's process is stopped or cannot be reached, and then the exchange would lack that peer's frame, too. A higher
//! rank dials when it enters the exchange; until its connection arrives, the exchange goes on with all other peers.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::connector::Connector;
use super::exchange::GRACE;
use super::link::Link;
use crate::call::Call;
use crate::net::wait::Waker;
use crate::{Error, Result};

/// Most ranks that are asked at a time if they have closed the group.
const QUESTIONS_CAP: usize = 32;

/// Links of one rank of a group.
pub(super) struct GroupLinks {
    connector: Arc<Connector>,
    group: u64,
    /// By group rank; `None` for this rank, and for those that are not connected.
    links: Vec<Option<Link>>,
    /// Higher ranks that exchanges need and that have not dialled yet.
    awaited: Vec<Awaited>,
}

struct Awaited {
    /// Group rank of the awaited peer.
    at: usize,
    /// Time to ask the peer if it has closed the group. The next time is `pause` later, and each pause twice the last.
    ask_at: Instant,
    pause: Duration,
}

impl GroupLinks {
    /// Links of a group of `count` ranks, none of them connected. A connection that arrives wakes `waker`.
    pub(super) fn new(connector: Arc<Connector>, group: u64, count: usize, waker: &Arc<Waker>) -> GroupLinks {
        connector.reach.links.open_group(group, Arc::downgrade(waker));
        GroupLinks { connector, group, links: (0..count).map(|_| None).collect(), awaited: Vec::new() }
    }

    pub(super) fn count(&self) -> usize {
        self.links.len()
    }

    /// The link to a group rank; `None` if it is not connected.
    pub(super) fn get(&mut self, at: usize) -> Option<&mut Link> {
        self.links.get_mut(at).and_then(Option::as_mut)
    }

    /// Like [`get`](Self::get), for a peer of an exchange.
    ///
    /// # Errors
    /// [`Error::Internal`] if it is neither connected nor awaited: no connection would ever come.
    pub(super) fn get_or_await(&mut self, at: usize) -> Result<Option<&mut Link>> {
        let is_awaited = || self.awaited.iter().any(|peer| peer.at == at);
        match self.links.get_mut(at).and_then(Option::as_mut) {
            None if !is_awaited() => {
                let message = format!("no connection with rank {at} of a group exists or is awaited");
                Err(Error::Internal { message })
            }
            link => Ok(link),
        }
    }

    /// All links, by group rank.
    pub(super) fn all(&mut self) -> &mut [Option<Link>] {
        &mut self.links
    }

    /// Connects to the lower ranks among `peers`, and awaits the connections of the higher ones; `peers` are group
    /// ranks. Both ends of a link do so in the exchange that needs it first.
    ///
    /// # Errors
    /// Those of [`Connector::dial`].
    pub(super) fn connect(&mut self, call: &Call, peers: impl Iterator<Item = usize>) -> Result<()> {
        for at in peers {
            let is_new = matches!(self.links.get(at), Some(None)) && self.awaited.iter().all(|peer| peer.at != at);
            if !is_new {
                continue;
            }
            if call.world_rank(at) < self.connector.reach.rank {
                self.links[at] = Some(self.connector.dial(call, self.group, at)?);
            } else {
                self.awaited.push(Awaited { at, ask_at: Instant::now() + GRACE, pause: GRACE });
            }
        }
        Ok(())
    }

    /// Takes the connections that have arrived, and returns the group ranks that made them.
    ///
    /// # Errors
    /// A connection that has arrived is broken already.
    pub(super) fn take_arrived(&mut self, call: &Call) -> Result<Vec<usize>> {
        let mut arrived = Vec::new();
        for Awaited { at, .. } in &self.awaited {
            if let Some(link) = self.connector.arrived(call, self.group, *at)? {
                self.links[*at] = Some(link);
                arrived.push(*at);
            }
        }
        self.awaited.retain(|peer| !arrived.contains(&peer.at));
        Ok(arrived)
    }

    /// A higher rank that has not connected and never will, since it has left the world or closed the group. Late ranks
    /// are asked if they have closed it. Takes at most [`GRACE`], however many ranks are asked.
    pub(super) fn find_gone(&mut self, call: &Call) -> Option<usize> {
        let Self { connector, group, awaited, .. } = self;
        let membership = &connector.membership;
        if let Some(peer) = awaited.iter().find(|peer| membership.has_left(call.world_rank(peer.at))) {
            return Some(peer.at);
        }
        let now = Instant::now();
        let due = awaited.iter_mut().filter(|peer| peer.ask_at <= now).take(QUESTIONS_CAP);
        let mut asked: Vec<&mut Awaited> = due.collect();
        if asked.is_empty() {
            return None;
        }
        let ranks: Vec<usize> = asked.iter().map(|peer| peer.at).collect();
        let closed = connector.closed(call, *group, &ranks);
        let longest = membership.options().stall.max(GRACE);
        for peer in &mut asked {
            peer.pause = (peer.pause * 2).min(longest);
            peer.ask_at = Instant::now() + peer.pause;
        }
        closed.first().copied()
    }

    /// Closes the links, also those that arrive later. Peers read what was sent before, and then the end of the
    /// connection.
    pub(super) fn close(&mut self) {
        self.awaited.clear();
        self.links.fill_with(|| None);
        self.connector.reach.links.close_group(self.group);
    }

    /// Time of the next question of [`find_gone`](Self::find_gone).
    pub(super) fn next_question(&self) -> Option<Instant> {
        self.awaited.iter().map(|peer| peer.ask_at).min()
    }
}

impl Drop for GroupLinks {
    fn drop(&mut self) {
        self.close();
    }
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;

    use super::super::connector::tests::{barrier, connector};
    use super::*;

    #[test]
    fn stopped_ranks_are_asked_at_the_same_time() {
        // The kernel of a stopped rank accepts the connection, and the rank never answers.
        let listeners: Vec<_> = (0..9).map(|_| TcpListener::bind("127.0.0.1:0").unwrap()).collect();
        let addresses: Vec<_> = listeners.iter().map(|listener| listener.local_addr().unwrap()).collect();
        let (call, waker) = (barrier(0, 9), Arc::new(Waker::new().unwrap()));
        let mut links = GroupLinks::new(connector(0, &addresses), 7, 9, &waker);
        links.connect(&call, 1..9).unwrap();
        let begin = Instant::now();
        links.awaited.iter_mut().for_each(|peer| peer.ask_at = begin);
        assert_eq!(links.find_gone(&call), None);
        let took = begin.elapsed();
        assert!(took < 5 * GRACE, "{took:?} for eight ranks, one after the other");
        assert!(links.next_question().unwrap() >= begin + 2 * GRACE, "all have been asked");
    }
}
