//! The end of a world by a failure: its first cause is kept, sent to all ranks, and returned by every later call.

use std::sync::MutexGuard;
use std::sync::atomic::Ordering;

use super::{ControlMessage, Membership};
use crate::Error;
use crate::call::Call;
use crate::poison_free_locks::lock;
use crate::post_mortem::{self, Event};

impl Membership {
    /// Ends the world with `cause`: on this rank at once, on all others as soon as they hear of it. Does nothing if the
    /// world has ended already. Waits for no peer.
    pub fn fail(&self, cause: Error) {
        self.end(cause, false);
    }

    /// Ends the world because of a failure of this rank.
    pub(crate) fn fail_self(&self, cause: String) {
        self.fail(self.own_error(cause));
    }

    /// Error of this rank, which cannot go on.
    pub(crate) fn own_error(&self, cause: String) -> Error {
        Error::PeerFailed { peer: self.shared.peers[self.rank].clone(), cause: capped(cause), during: None }
    }

    /// Ends the world because `rank` is lost: it died, or cannot be reached.
    pub fn peer_lost(&self, rank: usize, cause: impl Into<String>) {
        self.fail(self.lost_error(rank, cause));
    }

    /// Error of a wait for `rank` after it left or closed its side of a group, or ended unheard.
    pub fn left_error(&self, rank: usize) -> Error {
        if self.is_unannounced(rank) {
            return self.lost_error(rank, "its process has ended, and no goodbye was received");
        }
        Error::PeerLeft { peer: self.shared.peers[rank].clone(), during: None }
    }

    /// Error of a wait for `rank`, which is lost.
    pub fn lost_error(&self, rank: usize, cause: impl Into<String>) -> Error {
        Error::PeerLost { peer: self.shared.peers[rank].clone(), cause: capped(cause.into()), during: None }
    }

    /// The error that `call` returns for `error`: the root cause, with the first call of this rank that returned it.
    /// Ends the world, unless `error` leaves the group usable.
    pub(crate) fn conclude(&self, error: Error, call: &Call) -> Error {
        if error.group_usable() {
            return error.noticed_by(&call.info);
        }
        self.fail(self.explained(error.clone(), call));
        self.report();
        let cause = self.cause().err().unwrap_or(error);
        let first = self.noticed_by.get_or_init(|| Box::new(call.info.clone()));
        cause.noticed_by(first)
    }

    /// Ends the world with `cause`, which another rank has sent if `heard`.
    ///
    /// Each rank sends the cause to all its neighbours, and only then do its calls return it. So if its program exits
    /// at once with this error, the neighbours, which meet the end of its control connections, do not take it for the
    /// cause.
    pub(super) fn end(&self, cause: Error, heard: bool) {
        let cause = cause.root_cause();
        let ended = Ended { membership: self, _sending: lock(&self.shared.ending) };
        {
            let mut state = lock(&self.shared.state);
            if state.cause.is_some() {
                return;
            }
            state.cause = Some(cause.clone());
        }
        let text = cause.to_string();
        // If this rank has left in peace, and another thread is in a call, that call returns the cause and reports it.
        let reports = !heard || !self.has_left(self.rank);
        if reports {
            // Written before the others hear of the failure, and so before any of them can end because of it.
            self.append_event(&Event::Failed {
                rank: self.rank,
                culprit: cause.culprit().or_else(|| cause.is_of_this_process().then_some(self.rank)),
                cause: text.clone(),
                at: post_mortem::now_ms(),
            });
            self.send_all(&ControlMessage::Fail { cause: self.for_others(cause) });
        }
        drop(ended);
        if reports {
            // A subscriber of the program's may call this library.
            tracing::error!(rank = self.rank, cause = text, "a failure ends the world");
            self.report();
        }
        self.wake_all();
    }

    /// The error that other ranks return for `cause`: an error about this process then names this rank.
    pub(super) fn for_others(&self, cause: Error) -> Error {
        if !cause.is_of_this_process() {
            return cause;
        }
        let peer = self.shared.peers[self.rank].clone();
        Error::PeerFailed { peer, cause: capped(cause.to_string()), during: None }
    }
}

/// Publishes the cause of the end when it is dropped: also if sending panicked.
struct Ended<'a> {
    membership: &'a Membership,
    _sending: MutexGuard<'a, ()>,
}

impl Drop for Ended<'_> {
    fn drop(&mut self) {
        self.membership.shared.ended.store(true, Ordering::Release);
    }
}

/// Shortens `text` so that it fits into a control message.
pub(super) fn capped(mut text: String) -> String {
    const MAX_BYTES: usize = 4096;
    if text.len() > MAX_BYTES {
        let end = (0..=MAX_BYTES).rev().find(|at| text.is_char_boundary(*at)).unwrap_or(0);
        text.truncate(end);
        text.push('…');
    }
    text
}
