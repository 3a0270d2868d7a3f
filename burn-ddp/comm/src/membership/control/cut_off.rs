//! Connections to ranks that this rank would hear of no more: between two machines of which no pair of counterparts is
//! left, ranks connect each to each.
//!
//! As always, the higher rank of a pair connects. The lower one only tries whether the other is still there: that
//! refuses it, or has left unheard, and then nothing listens at its port.

use std::collections::BTreeMap;
use std::io::{self, ErrorKind};
use std::sync::Arc;
use std::thread::{self, JoinHandle};
use std::time::Instant;

use super::Shared;
use crate::auth::handshake::{HANDSHAKE_DEADLINE, Purpose};
use crate::membership::{ControlMessage, Membership};
use crate::net::dial_rank::{Dial, Undialled};
use crate::net::interface::Interface;

/// Addresses of all ranks.
#[derive(Default)]
pub(crate) struct Directory {
    /// By rank.
    pub(crate) addresses: Vec<(String, u16)>,
    /// Local interface of outgoing connections.
    pub(crate) via: Interface,
}

/// Ranks that are cut off.
pub(super) struct CutOff {
    directory: Arc<Directory>,
    attempts: BTreeMap<usize, Attempt>,
    /// Time of the next look; `None` before the first.
    look_at: Option<Instant>,
}

struct Attempt {
    /// Time at which the rank was cut off.
    since: Instant,
    /// Time of the next attempt.
    next: Instant,
    /// The last one.
    thread: Option<JoinHandle<()>>,
}

impl CutOff {
    pub(super) fn new(directory: Directory) -> CutOff {
        CutOff { directory: Arc::new(directory), attempts: BTreeMap::new(), look_at: None }
    }

    /// Begins to connect to the ranks that have been cut off for two heartbeats: most worlds end sooner. Looks twice
    /// per heartbeat. Does not wait.
    pub(super) fn connect(&mut self, shared: &Arc<Shared>, membership: &Arc<Membership>, now: Instant) {
        let heartbeat = membership.options().heartbeat;
        if self.look_at.is_some_and(|at| now < at) {
            return;
        }
        self.look_at = Some(now + heartbeat / 2);
        let cut_off = membership.cut_off();
        self.attempts.retain(|peer, _| cut_off.contains(peer));
        let pause = 2 * heartbeat;
        for peer in cut_off {
            let begin = || Attempt { since: now, next: now + pause, thread: None };
            let attempt = self.attempts.entry(peer).or_insert_with(begin);
            if now < attempt.next || attempt.thread.as_ref().is_some_and(|thread| !thread.is_finished()) {
                continue;
            }
            attempt.next = now + pause;
            let (shared, membership, directory) = (shared.clone(), membership.clone(), self.directory.clone());
            let since = attempt.since;
            let thread = thread::Builder::new().name(format!("burn-ddp rank {} dials", shared.rank));
            // Without a thread now, perhaps with the next attempt.
            attempt.thread = thread.spawn(move || dial(&shared, &membership, &directory, peer, since)).ok();
        }
    }
}

/// True if the peer's machine, or the way to it, did not answer.
fn is_silence(e: &io::Error) -> bool {
    matches!(e.kind(), ErrorKind::TimedOut | ErrorKind::HostUnreachable | ErrorKind::NetworkUnreachable)
}

/// Connects to `peer`, which was cut off at this time, or finds that it is gone.
fn dial(shared: &Shared, membership: &Arc<Membership>, directory: &Directory, peer: usize, since: Instant) {
    let Directory { addresses, via } = directory;
    let Some((host, port)) = addresses.get(peer) else { return };
    let purpose = Purpose::Control { rank: shared.rank as u32 };
    let dial = Dial { to: (host, *port), via, key: &shared.key, peer, purpose };
    match dial.connect(Instant::now() + HANDSHAKE_DEADLINE, Some(membership)) {
        Ok(stream) => {
            shared.links.put(Purpose::Control { rank: peer as u32 }, stream);
            shared.waker.wake();
        }
        Err(Undialled::Unconnected(e)) if e.kind() == ErrorKind::ConnectionRefused => {
            tracing::warn!(rank = shared.rank, peer, "it has left, like the ranks through which it was heard");
            membership.receive(peer, ControlMessage::Goodbye);
        }
        Err(Undialled::Unconnected(e))
            if is_silence(&e) && since.elapsed() >= membership.options().machine_timeout() =>
        {
            membership.peer_lost(peer, format!("its machine cannot be reached: {e}"));
        }
        // Of this rank's own troubles, such as too few descriptors, the peer is not to blame.
        Err(cause) => tracing::debug!(rank = shared.rank, peer, %cause, "it is cut off"),
    }
}
