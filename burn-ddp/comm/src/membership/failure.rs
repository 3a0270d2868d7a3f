//! How a world ends: the first cause is kept, told to everybody, and returned by every call from then on.

use std::sync::atomic::Ordering;

use super::{ControlMessage, Membership};
use crate::call::Call;
use crate::post_mortem::{self, Event};
use crate::sync::lock;
use crate::{Error, LaunchEnv};

impl Membership {
    /// Ends the world with `cause`, on this rank at once and on all others as soon as they hear of it. If it has already
    /// ended, nothing changes. Never blocks.
    pub fn fail(&self, cause: Error) {
        self.end(cause, true);
    }

    /// Ends the world because this rank gave up.
    pub(crate) fn fail_self(&self, cause: String) {
        self.fail(Error::PeerFailed { peer: self.shared.peers[self.rank].clone(), cause: capped(cause), during: None });
    }

    /// Ends the world because the connection to `rank` broke without a goodbye.
    pub fn peer_lost(&self, rank: usize, cause: impl Into<String>) {
        self.fail(self.lost_error(rank, cause));
    }

    /// The error of a wait for `rank` after it left or closed its side of a group.
    pub fn left_error(&self, rank: usize) -> Error {
        Error::PeerLeft { peer: self.shared.peers[rank].clone(), during: None }
    }

    /// The error of a wait for `rank` after its connection broke.
    pub fn lost_error(&self, rank: usize, cause: impl Into<String>) -> Error {
        Error::PeerLost { peer: self.shared.peers[rank].clone(), cause: capped(cause.into()), during: None }
    }

    /// What a collective returns instead of `error`: the root cause, with the first call of this rank that met it.
    pub(crate) fn conclude(&self, error: Error, call: &Call) -> Error {
        if error.group_usable() {
            return error.noticed_by(&call.info);
        }
        self.fail(self.explained(error.clone(), call));
        self.report();
        let cause = self.check().err().unwrap_or(error);
        let first = self.noticed_by.get_or_init(|| Box::new(call.info.clone()));
        cause.noticed_by(first)
    }

    pub(super) fn end(&self, cause: Error, tell: bool) {
        let cause = cause.root_cause();
        {
            let mut state = lock(&self.shared.state);
            if state.cause.is_some() {
                return;
            }
            state.cause = Some(cause.clone());
            self.shared.ended.store(true, Ordering::Release);
        }
        // Before the others hear of it, and so before any of them can end because of it.
        self.note(&Event::Failed {
            rank: self.rank,
            culprit: cause.culprit(),
            cause: cause.to_string(),
            at: post_mortem::now_ms(),
        });
        tracing::error!(rank = self.rank, %cause, "the world ends");
        if tell {
            self.tell(&ControlMessage::Fail { cause });
        }
        self.report();
        self.wake_all();
    }

    /// Leaves this rank's report where the launcher wants it, once the world has ended.
    fn report(&self) {
        self.reported.get_or_init(|| {
            let Some(LaunchEnv { report_dir: Some(dir), .. }) = self.shared.launch.get() else { return };
            let Some(report) = self.post_mortem() else { return };
            if let Err(error) = report.write(dir) {
                tracing::warn!(%error, dir = %dir.display(), "cannot leave a report");
            }
        });
    }

    /// Tells the launcher.
    pub(super) fn note(&self, event: &Event) {
        let Some(LaunchEnv { events: Some(file), .. }) = self.shared.launch.get() else { return };
        if let Err(error) = post_mortem::append(file, event) {
            tracing::warn!(%error, file = %file.display(), "cannot tell the launcher what happens");
        }
    }
}

/// Keeps what travels in a control message small.
pub(super) fn capped(mut text: String) -> String {
    const MAX_BYTES: usize = 4096;
    if text.len() > MAX_BYTES {
        let end = (0..=MAX_BYTES).rev().find(|at| text.is_char_boundary(*at)).unwrap_or(0);
        text.truncate(end);
        text.push('…');
    }
    text
}
