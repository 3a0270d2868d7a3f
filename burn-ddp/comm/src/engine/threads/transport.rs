//! Exchanges of frames through the queues of a [`Hub`].

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::NAME;
use super::frame_queues::{Frame, Hub};
use crate::Result;
use crate::call::Call;
use crate::engine::{Incoming, Outgoing, Transport};
use crate::membership::{Membership, Watch};
use crate::poison_free_locks::{lock, wait_timeout};

/// Time after a rank has closed a group within which the membership may still learn why.
const GRACE: Duration = Duration::from_secs(1);

/// One rank's side of a group.
pub(super) struct ThreadsTransport {
    /// This rank in the group.
    pub(super) rank: usize,
    pub(super) hub: Arc<Hub>,
    pub(super) membership: Arc<Membership>,
}

impl Transport for ThreadsTransport {
    fn name(&self) -> &'static str {
        NAME
    }

    fn rank(&self) -> usize {
        self.rank
    }

    fn world_size(&self) -> usize {
        self.hub.inboxes.len()
    }

    fn exchange(&mut self, call: &Call, sends: &[Outgoing<'_>], receives: &mut [Incoming<'_>]) -> Result<()> {
        self.send(call, sends);
        let mut missing: Vec<&mut Incoming<'_>> = receives.iter_mut().collect();
        let mut watch = Watch::new(&self.membership, call);
        while !missing.is_empty() {
            for (nth, frame) in self.wait(call, &missing, &mut watch)? {
                let incoming = missing.swap_remove(nth);
                call.check_header(incoming.peer, &frame.header, incoming.payload.len())?;
                incoming.payload.copy_from_slice(&frame.payload);
                incoming.weight = frame.header.weight;
                self.hub.recycle(frame.payload);
            }
        }
        Ok(())
    }
}

impl ThreadsTransport {
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

    /// Waits for frames of `missing`; yields each with its index in `missing`, highest index first.
    fn wait(&self, call: &Call, missing: &[&mut Incoming<'_>], watch: &mut Watch<'_>) -> Result<Vec<(usize, Frame)>> {
        let inbox = &self.hub.inboxes[self.rank()];
        let peers = || missing.iter().map(|incoming| incoming.peer);
        let mut next_look = None;
        loop {
            let mut arrivals = lock(&inbox.arrivals);
            let take = |(nth, incoming): (usize, &&mut Incoming<'_>)| {
                arrivals.frames[incoming.peer].pop_front().map(|frame| (nth, frame))
            };
            let arrived: Vec<_> = missing.iter().enumerate().rev().filter_map(take).collect();
            if !arrived.is_empty() {
                return Ok(arrived);
            }
            self.membership.check()?;
            let now = Instant::now();
            let grace_end = peers().filter_map(|peer| arrivals.closed[peer]).min().map(|since| since + GRACE);
            let gone = |peer: &usize| {
                self.membership.has_left(call.world_rank(*peer))
                    || (arrivals.closed[*peer].is_some() && grace_end.is_some_and(|end| now >= end))
            };
            if let Some(peer) = peers().find(gone) {
                return Err(self.membership.left_error(call.world_rank(peer)));
            }
            match next_look {
                Some(at) if now < at => {
                    let until = grace_end.map_or(at, |end| end.min(at));
                    drop(wait_timeout(&inbox.changed, arrivals, until.saturating_duration_since(now)));
                }
                // Without the lock: `look` may end the world, which locks and wakes all inboxes.
                _ => {
                    drop(arrivals);
                    next_look = Some(watch.look(&peers().collect::<Vec<_>>())?);
                }
            }
        }
    }
}

/// Ends the waits of peers that still need something from this rank on this group.
impl Drop for ThreadsTransport {
    fn drop(&mut self) {
        for inbox in &self.hub.inboxes {
            lock(&inbox.arrivals).closed[self.rank()] = Some(Instant::now());
            inbox.changed.notify_all();
        }
    }
}
