//! Ranks in one process: frames pass through queues in memory.

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Condvar, Mutex};
use std::time::{Duration, Instant};

use super::{Engine, Fabric, HostEngine, Incoming, Outgoing, Stall, Transport};
use crate::Result;
use crate::call::Call;
use crate::frame::Header;
use crate::membership::{Membership, Wake};
use crate::sync::lock;

/// How long after a rank has closed a group its world may take to tell why.
const GRACE: Duration = Duration::from_secs(1);

/// Makes the groups of one rank among threads.
pub(crate) struct ThreadsFabric {
    job: Arc<Job>,
    membership: Arc<Membership>,
}

/// What the ranks of a world have in common.
struct Job {
    /// Groups that not all ranks have opened yet, and how many have.
    opening: Mutex<HashMap<u64, (Arc<Hub>, usize)>>,
}

/// What the ranks of a group have in common.
struct Hub {
    inboxes: Vec<Arc<Inbox>>,
    /// Buffers that were read and can be filled again.
    spare: Mutex<Vec<Vec<u8>>>,
}

/// Where the frames for one rank arrive.
struct Inbox {
    arrivals: Mutex<Arrivals>,
    /// Notified by senders, by ranks that close, and by changes of membership. The owner waits.
    changed: Condvar,
}

struct Arrivals {
    /// By sender's group rank, oldest first. Never long: every collective waits for everybody.
    frames: Vec<VecDeque<Frame>>,
    /// Who will send no more, since when.
    closed: Vec<Option<Instant>>,
}

struct Frame {
    header: Header,
    /// Shared by all receivers of the same bytes.
    payload: Arc<Vec<u8>>,
}

impl ThreadsFabric {
    /// The fabrics of all ranks, one per membership.
    pub(crate) fn all(memberships: &[Arc<Membership>]) -> Vec<ThreadsFabric> {
        let job = Arc::new(Job { opening: Mutex::new(HashMap::new()) });
        memberships
            .iter()
            .map(|membership| ThreadsFabric { job: job.clone(), membership: membership.clone() })
            .collect()
    }
}

impl Fabric for ThreadsFabric {
    fn name(&self) -> &'static str {
        "threads"
    }

    fn open(&self, call: &Call) -> Result<Box<dyn Engine>> {
        let rank = call.group_rank()?;
        let hub = self.job.hub(call.info.group, call.members.count());
        let inbox = Arc::downgrade(&hub.inboxes[rank]);
        self.membership.add_waker(inbox);
        Ok(Box::new(HostEngine::new(Threads { rank, hub, membership: self.membership.clone() })))
    }
}

impl Job {
    fn hub(&self, group: u64, group_size: usize) -> Arc<Hub> {
        let mut opening = lock(&self.opening);
        let (hub, opened) = opening.entry(group).or_insert_with(|| (Arc::new(Hub::new(group_size)), 0));
        *opened += 1;
        let (hub, all_have_it) = (hub.clone(), *opened == group_size);
        if all_have_it {
            opening.remove(&group);
        }
        hub
    }
}

impl Hub {
    fn new(group_size: usize) -> Hub {
        let inbox = || {
            let frames = (0..group_size).map(|_| VecDeque::new()).collect();
            let arrivals = Arrivals { frames, closed: vec![None; group_size] };
            Arc::new(Inbox { arrivals: Mutex::new(arrivals), changed: Condvar::new() })
        };
        Hub { inboxes: (0..group_size).map(|_| inbox()).collect(), spare: Mutex::new(Vec::new()) }
    }

    fn copy(&self, payload: &[u8]) -> Arc<Vec<u8>> {
        let mut buffer = lock(&self.spare).pop().unwrap_or_default();
        buffer.extend_from_slice(payload);
        Arc::new(buffer)
    }

    fn recycle(&self, payload: Arc<Vec<u8>>) {
        if let Some(mut buffer) = Arc::into_inner(payload).filter(|buffer| buffer.capacity() > 0) {
            buffer.clear();
            lock(&self.spare).push(buffer);
        }
    }
}

/// One rank's side of a group.
struct Threads {
    /// This rank in the group.
    rank: usize,
    hub: Arc<Hub>,
    membership: Arc<Membership>,
}

impl Transport for Threads {
    fn name(&self) -> &'static str {
        "threads"
    }

    fn rank(&self) -> usize {
        self.rank
    }

    fn world_size(&self) -> usize {
        self.hub.inboxes.len()
    }

    fn exchange(&mut self, call: &Call, sends: &[Outgoing<'_>], receives: &mut [Incoming<'_>]) -> Result<()> {
        receives.iter().for_each(|receive| call.expect(receive.peer));
        self.send(call, sends);
        let mut missing: Vec<&mut Incoming<'_>> = receives.iter_mut().collect();
        let (deadline, mut stall) = (call.deadline(), Stall::new(call, self.membership.options().stall));
        while !missing.is_empty() {
            for (nth, frame) in self.wait(call, &missing, deadline, &mut stall)? {
                let incoming = missing.swap_remove(nth);
                call.arrived(incoming.peer);
                call.check_header(incoming.peer, &frame.header, incoming.payload.len())?;
                incoming.payload.copy_from_slice(&frame.payload);
                incoming.weight = frame.header.weight;
                self.hub.recycle(frame.payload);
            }
        }
        Ok(())
    }
}

impl Threads {
    fn send(&self, call: &Call, sends: &[Outgoing<'_>]) {
        let mut last: Option<(&[u8], Arc<Vec<u8>>)> = None;
        for send in sends {
            let payload = match &last {
                Some((bytes, copy)) if std::ptr::eq(*bytes, send.payload) => copy.clone(),
                _ => self.hub.copy(send.payload),
            };
            last = Some((send.payload, payload.clone()));
            let frame = Frame { header: call.header(send.peer, send.payload.len()), payload };
            let inbox = &self.hub.inboxes[send.peer];
            lock(&inbox.arrivals).frames[self.rank()].push_back(frame);
            inbox.changed.notify_all();
        }
    }

    /// Waits for frames of `missing`; yields them with their index there, highest index first.
    fn wait(
        &self,
        call: &Call,
        missing: &[&mut Incoming<'_>],
        deadline: Instant,
        stall: &mut Stall,
    ) -> Result<Vec<(usize, Frame)>> {
        let inbox = &self.hub.inboxes[self.rank()];
        let mut arrivals = lock(&inbox.arrivals);
        loop {
            let take = |(nth, incoming): (usize, &&mut Incoming<'_>)| {
                arrivals.frames[incoming.peer].pop_front().map(|frame| (nth, frame))
            };
            let arrived: Vec<_> = missing.iter().enumerate().rev().filter_map(take).collect();
            if !arrived.is_empty() {
                return Ok(arrived);
            }
            self.membership.check()?;
            let now = Instant::now();
            let peers = || missing.iter().map(|incoming| incoming.peer);
            let grace_end =
                peers().filter_map(|peer| arrivals.closed[peer]).min().map(|since| deadline.min(since + GRACE));
            let gone = |peer: &usize| {
                self.membership.has_left(call.world_rank(*peer))
                    || (arrivals.closed[*peer].is_some() && grace_end.is_some_and(|end| now >= end))
            };
            if let Some(peer) = peers().find(gone) {
                return Err(self.membership.left_error(call.world_rank(peer)));
            }
            let left = deadline.saturating_duration_since(now);
            if left.is_zero() {
                return Err(call.timed_out(waiting_for(missing)));
            }
            let until_stall = stall.at.saturating_duration_since(now);
            if until_stall.is_zero() && stall.is_due() {
                drop(arrivals);
                self.membership.stalled(call, waiting_for(missing));
                arrivals = lock(&inbox.arrivals);
                continue;
            }
            let until = grace_end.map_or(left, |end| end.saturating_duration_since(now)).min(until_stall);
            arrivals = match inbox.changed.wait_timeout(arrivals, until) {
                Ok((arrivals, _)) => arrivals,
                Err(poisoned) => poisoned.into_inner().0,
            };
        }
    }
}

fn waiting_for(missing: &[&mut Incoming<'_>]) -> Vec<usize> {
    missing.iter().map(|incoming| incoming.peer).collect()
}

/// Peers that still need something from this rank on this group wait in vain from now on.
impl Drop for Threads {
    fn drop(&mut self) {
        for inbox in &self.hub.inboxes {
            lock(&inbox.arrivals).closed[self.rank()] = Some(Instant::now());
            inbox.changed.notify_all();
        }
    }
}

impl Wake for Inbox {
    /// Takes the lock, so that no waiter is between its look at the membership and its wait.
    fn wake(&self) {
        drop(lock(&self.arrivals));
        self.changed.notify_all();
    }
}
