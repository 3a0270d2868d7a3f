//! Connections to ranks that this rank would hear of no more: between two machines of which no pair of counterparts is
//! left, ranks connect each to each.
//!
//! As always, the higher rank of a pair connects. The lower one only tries whether the other is still there: that
//! refuses it, or has ended, and then nothing listens at its port. How it ended is not known then: it may have said
//! goodbye where no rank heard it, or have died.

use std::collections::BTreeMap;
use std::io::{self, ErrorKind};
use std::sync::Arc;
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use super::Shared;
use crate::auth::handshake::{HANDSHAKE_DEADLINE, Purpose};
use crate::membership::Membership;
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

/// Most attempts at a time.
const DIALS_CAP: usize = 8;
/// Pause before the first attempt to connect to a rank, in heartbeats: most worlds end sooner.
const FIRST_PAUSE: u32 = 2;
/// Longest pause between two attempts to connect to a rank, in heartbeats.
const LONGEST_PAUSE: u32 = 32;

/// Connects to the ranks that are cut off.
pub(super) struct CutOff {
    directory: Arc<Directory>,
    schedule: Schedule,
    /// Attempts under way, by rank; true if the rank's machine has answered.
    threads: BTreeMap<usize, JoinHandle<bool>>,
    /// Time of the next look; `None` before the first.
    look_at: Option<Instant>,
}

impl CutOff {
    pub(super) fn new(directory: Directory, heartbeat: Duration) -> CutOff {
        let schedule = Schedule { heartbeat, attempts: BTreeMap::new() };
        CutOff { directory: Arc::new(directory), schedule, threads: BTreeMap::new(), look_at: None }
    }

    /// Begins the attempts that are due. Looks twice per heartbeat. Does not wait.
    pub(super) fn connect(&mut self, shared: &Arc<Shared>, membership: &Arc<Membership>, now: Instant) {
        if self.look_at.is_some_and(|at| now < at) {
            return;
        }
        self.look_at = Some(now + self.schedule.heartbeat / 2);
        for (peer, thread) in self.threads.extract_if(.., |_, thread| thread.is_finished()) {
            self.schedule.ended(peer, thread.join().unwrap_or(false), now);
        }
        for (peer, since) in self.schedule.due(&membership.cut_off(), now) {
            let (shared, membership, directory) = (shared.clone(), membership.clone(), self.directory.clone());
            let thread = thread::Builder::new().name(format!("burn-ddp rank {} dials", shared.rank));
            match thread.spawn(move || dial(&shared, &membership, &directory, peer, since)) {
                Ok(thread) => drop(self.threads.insert(peer, thread)),
                // Perhaps there is room for a thread at the next attempt.
                Err(_) => self.schedule.ended(peer, false, now),
            }
        }
    }
}

/// Times of attempts to connect. Takes the time as an argument, reads no clock.
struct Schedule {
    heartbeat: Duration,
    /// By rank.
    attempts: BTreeMap<usize, Attempt>,
}

struct Attempt {
    /// Time from which on its machine's silence counts: its last answer, or else the time at which it was cut off.
    since: Instant,
    /// Time of the next attempt; `None` while one is under way.
    next: Option<Instant>,
    /// Pause after that attempt. Each is twice the last.
    pause: Duration,
}

impl Schedule {
    /// Ranks to which attempts begin now, each with the time since which its machine has been silent. At most
    /// [`DIALS_CAP`] are under way; the rest follow, the longest due first.
    fn due(&mut self, cut_off: &[usize], now: Instant) -> Vec<(usize, Instant)> {
        self.attempts.retain(|peer, attempt| attempt.next.is_none() || cut_off.contains(peer));
        let pause = FIRST_PAUSE * self.heartbeat;
        for peer in cut_off {
            self.attempts.entry(*peer).or_insert_with(|| Attempt { since: now, next: Some(now + pause), pause });
        }
        let under_way = self.attempts.values().filter(|attempt| attempt.next.is_none()).count();
        let mut due: Vec<_> = self.attempts.iter_mut().filter(|(_, a)| a.next.is_some_and(|at| at <= now)).collect();
        due.sort_by_key(|(_, attempt)| attempt.next);
        let begin = |(peer, attempt): (&usize, &mut Attempt)| {
            attempt.next = None;
            (*peer, attempt.since)
        };
        due.into_iter().take(DIALS_CAP.saturating_sub(under_way)).map(begin).collect()
    }

    /// Notes the end of the attempt to connect to `peer`.
    fn ended(&mut self, peer: usize, answered: bool, now: Instant) {
        let Some(attempt) = self.attempts.get_mut(&peer) else { return };
        if answered {
            attempt.since = now;
        }
        attempt.next = Some(now + attempt.pause);
        attempt.pause = (2 * attempt.pause).min(LONGEST_PAUSE * self.heartbeat);
    }
}

/// True if the peer's machine, or the way to it, did not answer.
fn is_silence(e: &io::Error) -> bool {
    matches!(e.kind(), ErrorKind::TimedOut | ErrorKind::HostUnreachable | ErrorKind::NetworkUnreachable)
}

/// Connects to `peer`, whose machine has been silent since this time, or finds that it is gone; true if the machine has
/// answered.
fn dial(shared: &Shared, membership: &Arc<Membership>, directory: &Directory, peer: usize, since: Instant) -> bool {
    let Directory { addresses, via } = directory;
    let Some((host, port)) = addresses.get(peer) else { return false };
    let purpose = Purpose::Control { rank: shared.rank as u32 };
    let dial = Dial { to: (host, *port), via, key: &shared.key, peer, purpose };
    let until = Instant::now() + HANDSHAKE_DEADLINE;
    let cause = match dial.connect(until, until + HANDSHAKE_DEADLINE, Some(membership)) {
        Ok(stream) => {
            shared.links.put(Purpose::Control { rank: peer as u32 }, stream);
            shared.waker.wake();
            return true;
        }
        Err(cause) => cause,
    };
    match &cause {
        Undialled::Unconnected(e) if e.kind() == ErrorKind::ConnectionRefused => {
            tracing::warn!(rank = shared.rank, peer, "it has ended, like the ranks through which it was heard");
            membership.ended_unheard(peer);
        }
        Undialled::Unconnected(e) if is_silence(e) && since.elapsed() >= membership.options().machine_timeout() => {
            membership.peer_lost(peer, format!("its machine cannot be reached: {e}"));
        }
        // Of this rank's own troubles, such as too few descriptors, the peer is not to blame.
        cause => tracing::debug!(rank = shared.rank, peer, %cause, "it is cut off"),
    }
    matches!(cause, Undialled::Refused(_))
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;

    use super::super::tests::alone;
    use super::*;
    use crate::Error;
    use crate::membership::ControlMessage;

    const BEAT: Duration = Duration::from_secs(1);

    /// Schedule of attempts, and the time of its start.
    fn schedule() -> (Schedule, Instant) {
        (Schedule { heartbeat: BEAT, attempts: BTreeMap::new() }, Instant::now())
    }

    #[test]
    fn few_attempts_are_under_way_at_a_time_and_each_rank_has_its_turn() {
        let (mut schedule, start) = schedule();
        let peers: Vec<usize> = (0..20).collect();
        assert_eq!(schedule.due(&peers, start), [], "most worlds end sooner");
        let mut tried = Vec::new();
        for beat in 2..5 {
            let now = start + beat * BEAT;
            let begun: Vec<usize> = schedule.due(&peers, now).iter().map(|(peer, _)| *peer).collect();
            assert_eq!(begun.len(), 8);
            assert_eq!(schedule.due(&peers, now), [], "as many as may be are under way");
            begun.iter().for_each(|peer| schedule.ended(*peer, false, now));
            tried.extend(begun);
        }
        // The first ones are due again by now, and follow the others.
        assert_eq!(tried, [&peers[..], &peers[..4]].concat());
    }

    #[test]
    fn attempts_become_rarer() {
        let (mut schedule, start) = schedule();
        let begun = (0..400).filter(|second| {
            let now = start + *second * BEAT;
            let due = schedule.due(&[7], now);
            due.iter().for_each(|(peer, _)| schedule.ended(*peer, true, now));
            !due.is_empty()
        });
        let begun: Vec<u32> = begun.collect();
        let pauses: Vec<u32> = begun.windows(2).map(|two| two[1] - two[0]).collect();
        assert_eq!((begun[0], &pauses[..6]), (2, &[2, 4, 8, 16, 32, 32][..]));
        // Cut off anew, it begins anew.
        schedule.due(&[], start + 400 * BEAT);
        schedule.due(&[7], start + 401 * BEAT);
        assert_eq!(schedule.due(&[7], start + 403 * BEAT), [(7, start + 401 * BEAT)]);
    }

    #[test]
    fn silence_counts_from_the_last_answer() {
        let (mut schedule, start) = schedule();
        schedule.due(&[7], start);
        let at = |beat: u32| start + beat * BEAT;
        assert_eq!(schedule.due(&[7], at(2)), [(7, start)]);
        schedule.ended(7, false, at(3));
        assert_eq!(schedule.due(&[7], at(5)), [(7, start)]);
        schedule.ended(7, true, at(6));
        assert_eq!(schedule.due(&[7], at(10)), [(7, at(6))]);
    }

    #[test]
    fn a_closed_port_is_no_goodbye() {
        let (control, membership, _) = alone(&[0, 1]);
        let closed = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        let directory = Directory { addresses: vec![("127.0.0.1".to_owned(), closed); 2], via: Interface::default() };
        assert!(!dial(&control.shared, &membership, &directory, 1, Instant::now()));
        assert_eq!(membership.check(), Ok(()), "it may have left in peace");
        assert!(membership.has_left(1), "it takes part no more");
        let error = membership.left_error(1);
        assert!(matches!(&error, Error::PeerLost { peer, .. } if peer.rank == 1), "{error}");
        assert_eq!(membership.known_of(1), [], "nothing that other ranks could take for a goodbye");
        // A goodbye that comes later, through another rank, counts.
        membership.receive(1, ControlMessage::Goodbye);
        assert!(matches!(membership.left_error(1), Error::PeerLeft { .. }));
        assert_eq!(membership.known_of(1), [ControlMessage::Goodbye]);
    }
}
