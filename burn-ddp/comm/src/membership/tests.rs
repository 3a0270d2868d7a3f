use std::sync::atomic::AtomicUsize;
use std::sync::{Mutex, OnceLock};
use std::time::Duration;

use super::*;
use crate::Error;
use crate::call::{Call, Collective, Members};

const TRACK: Track = Track::Batches { group: 1, loader: 4, run: 0 };

fn at(step: u32) -> Progress {
    Progress { epoch: 0, step }
}

#[derive(Default)]
struct Recorder {
    sent: Mutex<Vec<ControlMessage>>,
    wakes: AtomicUsize,
}

impl Outbox for Recorder {
    fn send_all(&self, message: &ControlMessage) {
        lock(&self.sent).push(message.clone());
    }
}

impl Wake for Recorder {
    fn wake(&self) {
        self.wakes.fetch_add(1, Ordering::Relaxed);
    }
}

fn peers(n: usize) -> Vec<PeerInfo> {
    (0..n).map(|rank| PeerInfo::here(rank, rank, 0)).collect()
}

/// Rank 0 of three, as in a process of its own.
fn rank_0() -> (Arc<Membership>, Arc<Recorder>) {
    let membership = Membership::new(0, peers(3), Machines::new(&[(); 3]), WorldOptions::default());
    let recorder = Arc::new(Recorder::default());
    let (outbox, waker) = (recorder.clone() as Arc<dyn Outbox>, recorder.clone() as Arc<dyn Wake>);
    membership.set_outbox(Arc::downgrade(&outbox));
    membership.add_waker(Arc::downgrade(&waker));
    (membership, recorder)
}

fn call(sequence: u64) -> Call {
    let info = CallInfo::bare(Collective::Barrier, 1, sequence, "a.rs:1:1");
    Call::new(info, Arc::new(Members::all(3)), 0, std::time::Duration::from_secs(1))
}

#[test]
fn the_first_cause_is_told_once_and_stays() {
    let (membership, recorder) = rank_0();
    membership.peer_lost(2, "connection reset");
    membership.peer_lost(1, "connection reset");
    membership.fail_self("me too".to_string());
    let cause = membership.check().unwrap_err();
    assert_eq!(cause.rank(), Some(2));
    assert_eq!(*lock(&recorder.sent), [ControlMessage::Fail { cause }]);
    assert_eq!(recorder.wakes.load(Ordering::Relaxed), 1);
}

#[test]
fn a_cause_that_came_from_a_peer_is_sent_on_once() {
    let (membership, recorder) = rank_0();
    let cause = membership.lost_error(2, "connection reset");
    membership.receive(1, ControlMessage::Fail { cause: cause.clone() });
    membership.receive(2, ControlMessage::Fail { cause: membership.lost_error(1, "connection reset") });
    assert_eq!(membership.check(), Err(cause.clone()));
    assert_eq!(*lock(&recorder.sent), [ControlMessage::Fail { cause }]);
}

/// Notes if the cause that is being sent is one that calls return already.
#[derive(Default)]
struct Early {
    membership: OnceLock<Weak<Membership>>,
    known: Mutex<Vec<bool>>,
}

impl Outbox for Early {
    fn send_all(&self, _: &ControlMessage) {
        let membership = self.membership.get().and_then(Weak::upgrade).unwrap();
        lock(&self.known).push(membership.check().is_err() || membership.advance(TRACK, at(1)).is_err());
        assert!(!membership.known_of(1).is_empty(), "a rank that connects just now is told");
    }
}

#[test]
fn calls_return_a_cause_only_after_it_was_sent() {
    for ends in [
        |membership: &Membership| membership.peer_lost(2, "gone"),
        |membership: &Membership| {
            membership.receive(1, ControlMessage::Fail { cause: membership.lost_error(2, "gone") })
        },
        |membership: &Membership| drop(membership.conclude(membership.lost_error(2, "gone"), &call(5))),
    ] {
        let membership = Membership::new(0, peers(3), Machines::new(&[(); 3]), WorldOptions::default());
        let early = Arc::new(Early::default());
        early.membership.set(Arc::downgrade(&membership)).unwrap();
        membership.set_outbox(Arc::downgrade(&(early.clone() as Arc<dyn Outbox>)));
        ends(&membership);
        assert!(membership.check().is_err());
        assert_eq!(*lock(&early.known), [false]);
    }
}

#[test]
fn a_failure_after_this_ranks_goodbye_ends_its_calls_and_is_no_event_of_it() {
    let directory = tempfile::tempdir().unwrap();
    let events = directory.path().join("events");
    std::fs::File::create_new(&events).unwrap();
    for leaves_first in [true, false] {
        let (membership, recorder) = rank_0();
        let meeting = crate::Meeting::Rank0 { host: "localhost".into(), port: 1 };
        let env = LaunchEnv { events: Some(events.clone()), ..LaunchEnv::new(0, 3, meeting, "job") };
        membership.report_to(&env);
        if leaves_first {
            membership.goodbye();
        }
        let wakes = recorder.wakes.load(Ordering::Relaxed);
        let cause = membership.lost_error(2, "connection reset");
        membership.receive(1, ControlMessage::Fail { cause: cause.clone() });
        assert_eq!(membership.check(), Err(cause));
        assert!(recorder.wakes.load(Ordering::Relaxed) > wakes);
        let written = std::fs::read_to_string(&events).unwrap();
        assert_eq!(written.is_empty(), leaves_first, "{written}");
    }
}

#[test]
fn a_goodbye_ends_nothing() {
    let (membership, recorder) = rank_0();
    membership.receive(1, ControlMessage::Goodbye);
    assert_eq!(membership.check(), Ok(()));
    assert!(membership.has_left(1) && !membership.has_left(2));
    assert_eq!(recorder.wakes.load(Ordering::Relaxed), 1);
    membership.goodbye();
    assert_eq!(*lock(&recorder.sent), [ControlMessage::Goodbye]);
}

#[test]
fn a_rank_without_a_connection_is_silent_by_report_and_unknown_behind_a_silent_one() {
    // Rank 3 is heard through rank 1, its counterpart on this machine.
    let machines = Machines::new(&[0, 0, 1, 1]);
    let options = WorldOptions { heartbeat: Duration::from_millis(100), ..WorldOptions::default() };
    let membership = Membership::new(0, peers(4), machines, options);
    membership.receive(3, ControlMessage::Silent { silent_ms: 60_000 });
    let activity = membership.activity(3).unwrap();
    assert_eq!((activity.hidden_by, activity.silent.map(|silent| silent.as_secs())), (None, Some(60)));
    assert!(matches!(membership.known_of(3)[..], [ControlMessage::Silent { silent_ms: 60_000.. }]));
    membership.receive(3, ControlMessage::Heartbeat(Heartbeat::default()));
    assert_eq!(membership.activity(3).unwrap().silent, None);
    assert_eq!(membership.known_of(3), []);

    let later = Instant::now() + Duration::from_secs(1);
    let silent: Vec<usize> = membership.look(later, Duration::ZERO).iter().map(|(peer, _)| *peer).collect();
    assert_eq!(silent, [1, 2], "neighbours alone are judged here");
    let activity = membership.activity(3).unwrap();
    assert_eq!((activity.hidden_by, activity.silent), (Some(1), None));
    membership.receive(1, ControlMessage::Goodbye);
    assert_eq!(membership.activity(3).unwrap().hidden_by, Some(2), "now its machine is heard through rank 2");
    assert_eq!(membership.known_of(1), [ControlMessage::Goodbye]);
}

#[test]
fn a_machine_of_which_no_rank_is_heard_is_named_as_a_whole() {
    let (heartbeat, peer_timeout) = (Duration::from_millis(100), Some(Duration::from_secs(1)));
    for whole in [true, false] {
        let options = WorldOptions { heartbeat, peer_timeout, ..WorldOptions::default() };
        let membership = Membership::new(0, peers(4), Machines::new(&[0, 0, 1, 1]), options);
        membership.receive(1, ControlMessage::Goodbye);
        if whole {
            membership.receive(3, ControlMessage::Silent { silent_ms: 500 });
        }
        membership.look(Instant::now() + Duration::from_secs(5), Duration::ZERO);
        let error = membership.check().unwrap_err();
        assert_eq!(error.rank(), Some(2));
        let named = error.to_string().contains("like all of its machine (ranks 2 and 3)");
        assert_eq!(named, whole, "{error}");
    }
}

#[test]
fn data_that_do_not_come_from_another_machine_while_heartbeats_do_are_blamed_on_the_way() {
    let in_call = |waiting_for: usize| {
        let pending = vec![PendingCall { call: call(5).info.clone(), since_ms: 9000, waiting_for: vec![waiting_for] }];
        ControlMessage::Heartbeat(Heartbeat { pending, ..Heartbeat::default() })
    };
    for (machines, blamed) in [([0, 0, 1, 1], true), ([0; 4], false)] {
        let membership = Membership::new(0, peers(4), Machines::new(&machines), WorldOptions::default());
        membership.receive(2, in_call(3));
        membership.receive(3, in_call(2));
        let error = membership.explained(call(5).timed_out(vec![2]), &call(5)).to_string();
        let way = "data from rank 2 do not reach rank 0: a firewall or NAT between their machines";
        assert_eq!(error.contains(way), blamed, "{error}");
        // A rank that has not come is the reason, whatever the network does.
        membership.receive(3, ControlMessage::Heartbeat(Heartbeat::default()));
        let error = membership.explained(call(5).timed_out(vec![2]), &call(5)).to_string();
        assert!(error.contains("rank 3 is in no collective") && !error.contains("NAT"), "{error}");
    }
}

#[test]
fn a_cause_is_sent_before_the_goodbye() {
    let (membership, recorder) = rank_0();
    let cause = membership.lost_error(2, "connection reset");
    membership.receive(1, ControlMessage::Fail { cause: cause.clone() });
    membership.goodbye();
    assert_eq!(*lock(&recorder.sent), [ControlMessage::Fail { cause }, ControlMessage::Goodbye]);
}

#[test]
fn a_rank_that_passes_a_stop_tells_the_others() {
    let (membership, recorder) = rank_0();
    membership.receive(1, ControlMessage::Stop { track: TRACK, at: at(3), what: "loader".to_string() });
    assert_eq!(membership.advance(TRACK, at(3)), Ok(()));
    let cause = membership.advance(TRACK, at(4)).unwrap_err();
    let Error::OutOfStep { ahead: 0, stopped_at, reached, .. } = &cause else { panic!("{cause}") };
    assert_eq!((*stopped_at, *reached), (at(3), at(4)), "{cause}");
    assert_eq!(*lock(&recorder.sent), [ControlMessage::Fail { cause }]);
}

#[test]
fn a_pending_stop_waits_for_a_step_a_goodbye_or_a_while_and_comes_after_an_error() {
    let stop = ControlMessage::Stop { track: TRACK, at: at(3), what: "loader".to_string() };
    let other = Track::Batches { group: 1, loader: 99, run: 0 };
    let announce: [fn(&Membership, Track); 3] = [
        |membership, other| membership.advance(other, at(1)).unwrap(),
        |membership, _| membership.goodbye(),
        |membership, _| drop(membership.look(Instant::now() + Duration::from_secs(1), Duration::ZERO)),
    ];
    for announce in announce {
        let (membership, recorder) = rank_0();
        membership.stop_with_next_call(TRACK, at(3), "loader");
        membership.look(Instant::now(), Duration::ZERO);
        assert_eq!(*lock(&recorder.sent), []);
        announce(&membership, other);
        assert_eq!(lock(&recorder.sent)[0], stop);
        announce(&membership, other);
        assert_eq!(lock(&recorder.sent).iter().filter(|message| **message == stop).count(), 1);
    }
    let (membership, recorder) = rank_0();
    membership.stop_with_next_call(TRACK, at(3), "loader");
    membership.fail_self("disk full".to_string());
    membership.goodbye();
    let ControlMessage::Fail { cause } = &lock(&recorder.sent)[0] else { panic!("the error comes first") };
    assert!(cause.to_string().contains("disk full"), "{cause}");
}

#[test]
fn the_first_call_that_meets_the_cause_is_shown_from_then_on() {
    let (membership, recorder) = rank_0();
    let first = membership.conclude(membership.lost_error(2, "gone"), &call(5));
    assert!(first.to_string().contains("died during barrier #5 of group 1 called at a.rs:1:1: gone"), "{first}");
    assert_eq!(membership.conclude(membership.left_error(1), &call(6)), first);
    let told = ControlMessage::Fail { cause: membership.lost_error(2, "gone") };
    assert_eq!(*lock(&recorder.sent), [told], "peers show their own calls");
}

#[test]
fn a_refusal_ends_nothing() {
    let (membership, _recorder) = rank_0();
    let refusal = Error::InvalidArgument { message: "no".to_string(), rank: None, during: None };
    assert_eq!(membership.conclude(refusal, &call(1)).to_string(), "no in barrier #1 of group 1 called at a.rs:1:1");
    assert_eq!(membership.check(), Ok(()));
}

#[test]
fn messages_are_small() {
    let (membership, recorder) = rank_0();
    membership.fail_self("ü".repeat(100_000));
    membership.stop(TRACK, at(1), &"x".repeat(100_000));
    for message in lock(&recorder.sent).iter() {
        assert!(postcard::to_stdvec(message).unwrap().len() < 16 * 1024);
    }
}

#[test]
fn ranks_of_one_process_share_the_cause() {
    let memberships = Membership::shared(peers(2), WorldOptions::default());
    memberships[1].fail_self("tired".to_string());
    assert_eq!(memberships[0].check(), memberships[1].check());
    assert_eq!(memberships[0].check().unwrap_err().rank(), Some(1));
}
