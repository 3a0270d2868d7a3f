//! Fallback connections: between two machines of which no pair of counterparts is left, and whose ranks would hear of
//! each other no more, each rank of one connects with each rank of the other.
//!
//! As always, the higher rank of a pair connects. The lower rank only probes whether the higher one is still there. If
//! it is, it refuses the probe. If it has ended, no process listens at its port, or another process does. Then it is
//! not known how it ended: it may have said goodbye where no rank heard it, or have died. A firewall may also block
//! connections in one direction only, so a rank that seems to have ended but connects takes part again.
//!
//! A machine is lost if attempts to reach it go unanswered for the machine timeout. That time begins with the first
//! unanswered attempt; pauses before it, in which no rank asked, do not count.

use std::collections::BTreeMap;
use std::io::{self, ErrorKind};
use std::sync::Arc;
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use super::Shared;
use crate::auth::handshake::{HANDSHAKE_DEADLINE, Purpose, by};
use crate::membership::Membership;
use crate::net::dial_rank::{Dial, Undialled};
use crate::net::interface::Interface;
use crate::net::peer_addresses::PeerAddresses;

/// Addresses of all ranks, and the interface from which to connect to them.
#[derive(Default)]
pub(crate) struct Directory {
    pub(crate) addresses: PeerAddresses,
    /// Local interface of outgoing connections.
    pub(crate) via: Interface,
}

/// Most attempts at a time.
const DIALS_CAP: usize = 8;
/// Pause before the first attempt to connect to a rank, in heartbeats: most worlds end sooner. Also the pause after an
/// attempt without an answer.
const FIRST_PAUSE: u32 = 2;
/// Longest pause between two attempts to connect to a rank, in heartbeats.
const LONGEST_PAUSE: u32 = 32;

/// Connects to the ranks that are cut off.
pub(super) struct CutOff {
    directory: Arc<Directory>,
    schedule: Schedule,
    /// Attempts under way, by rank.
    threads: BTreeMap<usize, JoinHandle<Outcome>>,
    /// Time of the next look; `None` before the first.
    look_at: Option<Instant>,
}

/// Outcome of an attempt to connect.
#[derive(Clone, Debug, PartialEq)]
enum Outcome {
    /// The peer's machine answered: it accepted or refused the connection.
    Answered,
    /// No answer came from the machine or the network to it; the error's text.
    Silent(String),
    /// This rank could not try, for lack of a descriptor, a thread or the address of a name.
    NotAsked,
}

impl CutOff {
    pub(super) fn new(directory: Directory, heartbeat: Duration) -> CutOff {
        let schedule = Schedule { heartbeat, attempts: BTreeMap::new() };
        CutOff { directory: Arc::new(directory), schedule, threads: BTreeMap::new(), look_at: None }
    }

    /// Judges the attempts that have ended, and begins those that are due. Acts twice per heartbeat. Never blocks.
    pub(super) fn connect(&mut self, shared: &Arc<Shared>, membership: &Arc<Membership>, now: Instant) {
        if self.look_at.is_some_and(|at| now < at) {
            return;
        }
        self.look_at = Some(now + self.schedule.heartbeat / 2);
        let cut_off = membership.cut_off();
        for (peer, thread) in self.threads.extract_if(.., |_, thread| thread.is_finished()) {
            let outcome = thread.join().unwrap_or(Outcome::NotAsked);
            let silent = self.schedule.ended(peer, &outcome, now);
            if let Outcome::Silent(cause) = outcome
                && silent >= membership.options().machine_timeout()
                && cut_off.contains(&peer)
            {
                membership.peer_lost(peer, format!("its machine cannot be reached: {cause}"));
            }
        }
        for peer in self.schedule.due(&cut_off, now) {
            let (shared, membership, directory) = (shared.clone(), membership.clone(), self.directory.clone());
            let thread = thread::Builder::new().name(format!("burn-ddp rank {} dials", shared.rank));
            match thread.spawn(move || dial(&shared, &membership, &directory, peer)) {
                Ok(thread) => drop(self.threads.insert(peer, thread)),
                // The next attempt may get a thread.
                Err(_) => {
                    self.schedule.ended(peer, &Outcome::NotAsked, now);
                }
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
    /// Start of the attempt under way, or of the last one.
    begun: Instant,
    /// Silence of the peer's machine since its last answer: durations of unanswered attempts and of pauses between
    /// them.
    silent: Duration,
    /// End of the time that `silent` counts; `None` if the last attempt was answered or could not be made.
    silent_until: Option<Instant>,
    /// Time of the next attempt; `None` while one is under way.
    next: Option<Instant>,
    /// Pause after the next attempt. Each is twice the one before it; an unanswered attempt resets it to the shortest.
    pause: Duration,
}

impl Schedule {
    /// Ranks to which attempts begin now. At most [`DIALS_CAP`] are under way; the rest follow, the longest due first.
    fn due(&mut self, cut_off: &[usize], now: Instant) -> Vec<usize> {
        self.attempts.retain(|peer, attempt| attempt.next.is_none() || cut_off.contains(peer));
        let pause = self.first_pause();
        let first =
            || Attempt { begun: now, silent: Duration::ZERO, silent_until: None, next: Some(now + pause), pause };
        for peer in cut_off {
            self.attempts.entry(*peer).or_insert_with(first);
        }
        let under_way = self.attempts.values().filter(|attempt| attempt.next.is_none()).count();
        let mut due: Vec<_> = self.attempts.iter_mut().filter(|(_, a)| a.next.is_some_and(|at| at <= now)).collect();
        due.sort_by_key(|(_, attempt)| attempt.next);
        let begin = |(peer, attempt): (&usize, &mut Attempt)| {
            (attempt.begun, attempt.next) = (now, None);
            *peer
        };
        due.into_iter().take(DIALS_CAP.saturating_sub(under_way)).map(begin).collect()
    }

    /// Notes the end of an attempt to connect to `peer`. Returns for how long its machine has not answered.
    fn ended(&mut self, peer: usize, outcome: &Outcome, now: Instant) -> Duration {
        let (first, longest) = (self.first_pause(), LONGEST_PAUSE * self.heartbeat);
        let Some(attempt) = self.attempts.get_mut(&peer) else { return Duration::ZERO };
        match outcome {
            Outcome::Answered => (attempt.silent, attempt.silent_until) = (Duration::ZERO, None),
            Outcome::Silent(_) => {
                attempt.silent += now.saturating_duration_since(attempt.silent_until.unwrap_or(attempt.begun));
                attempt.silent_until = Some(now);
                attempt.pause = first;
            }
            Outcome::NotAsked => attempt.silent_until = None,
        }
        attempt.next = Some(now + attempt.pause);
        attempt.pause = (2 * attempt.pause).min(longest);
        attempt.silent
    }

    fn first_pause(&self) -> Duration {
        FIRST_PAUSE * self.heartbeat
    }
}

/// True if the peer's machine, or the way to it, did not answer.
fn is_silence(e: &io::Error) -> bool {
    matches!(e.kind(), ErrorKind::TimedOut | ErrorKind::HostUnreachable | ErrorKind::NetworkUnreachable)
}

/// Connects to `peer`, or finds that it has ended.
fn dial(shared: &Shared, membership: &Arc<Membership>, directory: &Directory, peer: usize) -> Outcome {
    let Directory { addresses, via } = directory;
    let Some(to) = addresses.get(peer) else { return Outcome::NotAsked };
    let purpose = Purpose::Control { rank: shared.rank as u32 };
    let dial = Dial { to, via, key: &shared.key, peer, purpose };
    let until = Instant::now() + HANDSHAKE_DEADLINE;
    let cause = match dial.connect(until, by(until + HANDSHAKE_DEADLINE), Some(membership)) {
        Ok(stream) => {
            shared.links.put(Purpose::Control { rank: peer as u32 }, stream);
            shared.waker.wake();
            return Outcome::Answered;
        }
        Err(cause) => cause,
    };
    if cause.is_gone() {
        tracing::warn!(rank = shared.rank, peer, %cause, "the peer and the ranks that relayed its messages have ended");
        membership.ended_unheard(peer);
        return Outcome::Answered;
    }
    let what = "no fallback connection by this attempt (a living peer refuses mere probes); more follow";
    tracing::debug!(rank = shared.rank, peer, %cause, "{what}");
    match cause {
        Undialled::Refused(_) => Outcome::Answered,
        Undialled::Unconnected(e) if is_silence(&e) => Outcome::Silent(e.to_string()),
        // Failures of this rank itself, such as a lack of descriptors, say nothing about the peer.
        Undialled::Unconnected(_) | Undialled::Unresolved(_) => Outcome::NotAsked,
    }
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;

    use super::super::tests::{alone, directory, key};
    use super::super::{Control, MESSAGE_CAP, listen};
    use super::*;
    use crate::Error;
    use crate::membership::{ControlMessage, Envelope};
    use crate::net::encrypted_messages::Wire;
    use crate::net::peer_addresses::PeerAddress;

    const BEAT: Duration = Duration::from_secs(1);
    const NONE: [usize; 0] = [];

    /// Machines of four ranks. With ranks 1 and 2 gone, ranks 0 and 3 are cut off from each other.
    const MACHINES: [usize; 4] = [0, 0, 1, 1];

    /// Schedule of attempts, and the time of its start.
    fn schedule() -> (Schedule, Instant) {
        (Schedule { heartbeat: BEAT, attempts: BTreeMap::new() }, Instant::now())
    }

    fn silent() -> Outcome {
        Outcome::Silent("no answer".to_owned())
    }

    #[test]
    fn few_attempts_are_under_way_at_a_time_and_each_rank_has_its_turn() {
        let (mut schedule, start) = schedule();
        let peers: Vec<usize> = (0..20).collect();
        assert_eq!(schedule.due(&peers, start), NONE, "most worlds end sooner");
        let mut tried = Vec::new();
        for beat in 2..5 {
            let now = start + beat * BEAT;
            let begun = schedule.due(&peers, now);
            assert_eq!(begun.len(), 8);
            assert_eq!(schedule.due(&peers, now), NONE, "as many as may be are under way");
            for peer in &begun {
                schedule.ended(*peer, &Outcome::NotAsked, now);
            }
            tried.extend(begun);
        }
        // The first ones are due again by now, and follow the others.
        assert_eq!(tried, [&peers[..], &peers[..4]].concat());
    }

    #[test]
    fn attempts_become_rarer_while_they_are_answered() {
        let (mut schedule, start) = schedule();
        let begun = (0..400).filter(|second| {
            let now = start + *second * BEAT;
            let due = schedule.due(&[7], now);
            for peer in &due {
                schedule.ended(*peer, &Outcome::Answered, now);
            }
            !due.is_empty()
        });
        let begun: Vec<u32> = begun.collect();
        let pauses: Vec<u32> = begun.windows(2).map(|two| two[1] - two[0]).collect();
        assert_eq!((begun[0], &pauses[..6]), (2, &[2, 4, 8, 16, 32, 32][..]));
        // When the rank is cut off again, the pauses begin anew.
        schedule.due(&[], start + 400 * BEAT);
        schedule.due(&[7], start + 401 * BEAT);
        assert_eq!(schedule.due(&[7], start + 402 * BEAT), NONE);
        assert_eq!(schedule.due(&[7], start + 403 * BEAT), [7]);
    }

    #[test]
    fn silence_counts_from_the_first_attempt_without_an_answer() {
        let (mut schedule, start) = schedule();
        schedule.due(&[7], start);
        let at = |beat: u32| start + beat * BEAT;
        let mut attempt = |begin: u32, end: u32, outcome: Outcome| {
            assert_eq!(schedule.due(&[7], at(begin) - Duration::from_millis(1)), NONE);
            assert_eq!(schedule.due(&[7], at(begin)), [7], "beat {begin}");
            schedule.ended(7, &outcome, at(end))
        };
        // All attempts are answered, so the pauses become long.
        for (begin, end) in [(2, 2), (4, 4), (8, 8), (16, 16), (32, 32), (64, 64)] {
            assert_eq!(attempt(begin, end, Outcome::Answered), Duration::ZERO);
        }
        assert_eq!(attempt(96, 101, silent()), 5 * BEAT, "no rank asked in the pause before");
        // From now on the pauses are short, and count as silence.
        assert_eq!(attempt(103, 108, silent()), 12 * BEAT);
        assert_eq!(attempt(110, 115, silent()), 19 * BEAT);
        assert_eq!(attempt(117, 117, Outcome::Answered), Duration::ZERO);
        assert_eq!(attempt(121, 126, silent()), 5 * BEAT);
    }

    #[test]
    fn own_troubles_neither_start_nor_extend_silence() {
        let (mut schedule, start) = schedule();
        schedule.due(&[7], start);
        let at = |beat: u32| start + beat * BEAT;
        let mut attempt = |begin: u32, end: u32, outcome: Outcome| {
            assert_eq!(schedule.due(&[7], at(begin)), [7], "beat {begin}");
            schedule.ended(7, &outcome, at(end))
        };
        assert_eq!(attempt(2, 3, Outcome::NotAsked), Duration::ZERO);
        assert_eq!(attempt(50, 55, silent()), 5 * BEAT);
        assert_eq!(attempt(60, 90, Outcome::NotAsked), 5 * BEAT);
        assert_eq!(attempt(100, 103, silent()), 8 * BEAT);
        assert_eq!(attempt(105, 110, silent()), 15 * BEAT);
    }

    /// Rank 0, cut off from rank 3.
    fn cut_off() -> (Arc<Control>, Arc<Membership>, std::net::SocketAddr) {
        let rank_0 = alone(&MACHINES);
        [1, 2].iter().for_each(|rank| rank_0.1.receive(*rank, ControlMessage::Goodbye));
        assert_eq!(rank_0.1.cut_off(), [3]);
        rank_0
    }

    fn closed_port() -> u16 {
        TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port()
    }

    #[test]
    fn a_closed_port_is_no_goodbye() {
        let (control, membership, _) = cut_off();
        assert_eq!(dial(&control.shared, &membership, &directory(closed_port()), 3), Outcome::Answered);
        assert_eq!(membership.check(), Ok(()), "it may have left in peace");
        assert!(membership.has_left(3), "it takes part no more");
        let error = membership.left_error(3);
        assert!(matches!(&error, Error::PeerLost { peer, .. } if peer.rank == 3), "{error}");
        assert_eq!(membership.known_of(3), [], "nothing that other ranks could take for a goodbye");
        // A goodbye that comes later, through another rank, counts.
        membership.receive(3, ControlMessage::Goodbye);
        assert!(matches!(membership.left_error(3), Error::PeerLeft { .. }));
        assert_eq!(membership.known_of(3), [ControlMessage::Goodbye]);
        // A probe that fails after that changes nothing.
        membership.ended_unheard(3);
        assert!(matches!(membership.left_error(3), Error::PeerLeft { .. }));
    }

    #[test]
    fn a_port_that_another_process_has_is_a_closed_one() {
        // A rank of this job, or a rank of another job, listens there.
        let (_other, _, of_this_job) = alone(&MACHINES);
        let (listener, of_another) = listen([127, 0, 0, 1].into(), &Interface::default()).unwrap();
        let key = crate::JobKey::trusting_network("another", 0).links(&[1; crate::auth::hmac_key::KEY_BYTES]);
        let _another = Control::start(listener, 3, MACHINES.len(), key).unwrap();
        for address in [of_this_job, of_another] {
            let (control, membership, _) = cut_off();
            assert_eq!(dial(&control.shared, &membership, &directory(address.port()), 3), Outcome::Answered);
            assert!(membership.has_left(3) && membership.check().is_ok(), "{address}");
        }
    }

    #[test]
    fn a_rank_that_seemed_to_have_ended_and_connects_takes_part() {
        let (control, membership, address) = cut_off();
        // As behind a firewall that lets rank 3 connect, and refuses connections to it.
        dial(&control.shared, &membership, &directory(closed_port()), 3);
        assert!(membership.has_left(3));
        let to = PeerAddress::new("127.0.0.1", address.port());
        let purpose = Purpose::Control { rank: 3 };
        let dialled = Dial { to: &to, via: &Interface::default(), key: &key(), peer: 0, purpose };
        let deadline = Instant::now() + 60 * BEAT;
        let Ok(connection) = dialled.connect(deadline, by(deadline), None) else { panic!("no connection") };
        let mut wire = Wire::new(connection, MESSAGE_CAP).unwrap();
        // Rank 3 sends a heartbeat, and gets those of rank 0.
        let beat = ControlMessage::Heartbeat(crate::membership::Heartbeat::default());
        wire.send(&Envelope { origin: 3, message: beat }, deadline).unwrap();
        let heard: Envelope<ControlMessage> = loop {
            let heard: Envelope<ControlMessage> = wire.recv(deadline).unwrap();
            if matches!(heard.message, ControlMessage::Heartbeat(_)) {
                break heard;
            }
        };
        assert_eq!(heard.origin, 0);
        assert!(!membership.has_left(3), "it takes part");
        // A probe that began before the connection came ends only now, without effect.
        dial(&control.shared, &membership, &directory(closed_port()), 3);
        assert!(!membership.has_left(3) && membership.check().is_ok());
        assert_eq!(membership.cut_off(), NONE);
    }

    #[test]
    fn a_host_name_that_cannot_be_looked_up_is_no_silence() {
        let (control, membership, _) = cut_off();
        let addresses = PeerAddresses::new(vec![("no such host".to_owned(), 7); 4]);
        let directory = Directory { addresses, via: Interface::default() };
        assert_eq!(dial(&control.shared, &membership, &directory, 3), Outcome::NotAsked);
        assert!(!membership.has_left(3));
    }
}
