//! Checks that every wait of a call makes while its data have not come: end of the world, deadline, stall.

use std::time::{Duration, Instant};

use super::Membership;
use crate::Result;
use crate::call::Call;
use crate::net::wait::deadline_in;

/// Wait of a call for its peers. It ends with the world and at the deadline, is reported as a stall when it takes long,
/// and has the heartbeats name the ranks that it waits for.
///
/// The caller repeats three steps: it looks whether its data have come, calls [`look`](Self::look), and blocks until
/// more data come, the membership changes (see [`Membership::add_waker`]), or the time that `look` returned is there.
pub struct Watch<'a> {
    membership: &'a Membership,
    call: &'a Call,
    /// `None` before the first look: most waits end without one, and need no times.
    times: Option<Times>,
    /// Group ranks that the call waits for, as of the last look.
    awaited: Vec<usize>,
    failed: bool,
}

struct Times {
    deadline: Instant,
    /// Time of the next report of a stall.
    report: Instant,
    /// Time from that report to the one after it. Doubles with each report.
    interval: Duration,
    /// Time of the next look for a deadlock; `None` if the ranks are processes, where the monitor thread looks.
    circle: Option<Instant>,
}

impl<'a> Watch<'a> {
    /// Watches a wait of `call` that begins now.
    pub fn new(membership: &'a Membership, call: &'a Call) -> Watch<'a> {
        Watch { membership, call, times: None, awaited: Vec::new(), failed: false }
    }

    /// Checks that it makes sense to go on waiting for these group ranks. Returns the latest time for the next look.
    ///
    /// # Errors
    /// The cause that ended the world; [`Call::timed_out`] once the deadline has passed.
    pub fn look(&mut self, waiting_for: &[usize]) -> Result<Instant> {
        let looked = self.check(waiting_for);
        self.failed |= looked.is_err();
        looked
    }

    fn check(&mut self, waiting_for: &[usize]) -> Result<Instant> {
        let Watch { membership, call, awaited, .. } = self;
        if awaited != waiting_for {
            awaited.iter().filter(|peer| !waiting_for.contains(peer)).for_each(|peer| call.arrived(*peer));
            waiting_for.iter().for_each(|peer| call.expect(*peer));
            awaited.clear();
            awaited.extend(waiting_for);
        }
        membership.check()?;
        let now = Instant::now();
        let times = self.times.get_or_insert_with(|| Times::new(membership, call, now));
        if now >= times.deadline {
            return Err(call.timed_out(waiting_for.to_vec()));
        }
        if now >= times.report {
            membership.stalled(call, waiting_for.to_vec());
            times.report = deadline_in(times.interval);
            times.interval = times.interval.saturating_mul(2);
        }
        if let Some(at) = &mut times.circle
            && now >= *at
        {
            membership.look_for_circle(now);
            membership.check()?;
            *at = now + membership.options().heartbeat;
        }
        Ok(times.circle.into_iter().fold(times.deadline.min(times.report), Instant::min))
    }
}

impl Times {
    fn new(membership: &Membership, call: &Call, now: Instant) -> Times {
        let (deadline, interval) = (call.deadline(), membership.options().stall);
        // A report too far in the future for the clock is set to the deadline, at which the wait ends without it.
        let report = call.started().checked_add(interval).unwrap_or(deadline);
        let circle = membership.is_local().then(|| now + membership.options().heartbeat);
        Times { deadline, report, interval, circle }
    }
}

/// Ends the wait: heartbeats name its ranks no more. A wait that failed, or that the world's end ended, stays in the
/// post-mortem report of this rank.
impl Drop for Watch<'_> {
    fn drop(&mut self) {
        if !self.failed && !self.awaited.is_empty() && self.membership.check().is_ok() {
            self.awaited.iter().for_each(|peer| self.call.arrived(*peer));
        }
    }
}
