//! Stops that a rank announces with its next call, so that an error of its own can come first.

use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use super::Membership;
use super::step_position::{Progress, Track};
use crate::poison_free_locks::lock;

/// Time after which the monitor announces a stop although the rank has made no call.
const GRACE: Duration = Duration::from_secs(1);

/// Stops that are not announced yet.
#[derive(Default)]
pub(super) struct PendingStops {
    /// True if there are some. Read by every call.
    any: AtomicBool,
    stops: Mutex<Vec<PendingStop>>,
}

struct PendingStop {
    since: Instant,
    track: Track,
    at: Progress,
    /// The rank's name for the track.
    what: String,
}

impl Membership {
    /// See [`World::stop_with_next_call`](crate::World::stop_with_next_call).
    pub(crate) fn stop_with_next_call(&self, track: Track, at: Progress, what: &str) {
        let stop = PendingStop { since: Instant::now(), track, at, what: what.to_string() };
        lock(&self.pending_stops.stops).push(stop);
        self.pending_stops.any.store(true, Ordering::Release);
    }

    /// Announces the stops that are pending. If this rank has failed since, its error has ended the world before them.
    #[inline]
    pub(crate) fn announce_stops(&self) {
        if self.pending_stops.any.load(Ordering::Acquire) {
            self.announce(|_| true);
        }
    }

    /// Announces the stops that have waited for a call for [`GRACE`].
    pub(super) fn announce_old_stops(&self, now: Instant) {
        self.announce(|stop| now.saturating_duration_since(stop.since) >= GRACE);
    }

    fn announce(&self, due: impl Fn(&PendingStop) -> bool) {
        let due: Vec<PendingStop> = {
            let mut stops = lock(&self.pending_stops.stops);
            let due = stops.extract_if(.., |stop| due(stop)).collect();
            self.pending_stops.any.store(!stops.is_empty(), Ordering::Release);
            due
        };
        due.into_iter().for_each(|stop| self.stop(stop.track, stop.at, &stop.what));
    }
}
