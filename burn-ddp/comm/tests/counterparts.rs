//! Ranks on machines that are connected through counterparts only (the ranks of the same number on each machine): all
//! ranks learn of a rank's fault, and ranks that pass messages on accuse no other rank.
#![cfg(target_os = "linux")]

mod common;

use std::collections::BTreeSet;
use std::fmt::Debug;
use std::sync::Mutex;
use std::time::{Duration, Instant};

use burn_ddp_comm::post_mortem::Event;
use burn_ddp_comm::{LaunchEnv, StoreServer, World, WorldOptions};
use common::{PATIENCE, Process, await_connections, await_go, launcher_store, options, rank_at, role, say};
use rustix::process::Signal;
use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id, Record};
use tracing::{Metadata, Subscriber};

/// Half of the deadline of a call.
const AT_ONCE: Duration = Duration::from_secs(30);
const BEAT: Duration = Duration::from_millis(100);

/// Ranks in these roles, as processes that run `test`.
struct Job {
    ranks: Vec<Process>,
    dir: tempfile::TempDir,
    _store: StoreServer,
}

impl Job {
    /// Starts a job with two ranks on each machine.
    fn start(test: &str, roles: &[&str]) -> Job {
        let machines: Vec<usize> = (0..roles.len()).map(|rank| rank / 2).collect();
        Job::start_on(&machines, test, roles)
    }

    /// Starts a job with rank `r` on machine `machines[r]`.
    fn start_on(machines: &[usize], test: &str, roles: &[&str]) -> Job {
        let store = launcher_store();
        let dir = tempfile::tempdir().unwrap();
        let events = dir.path().join("events");
        std::fs::write(&events, "").unwrap();
        let start = |(rank, role): (usize, &&str)| {
            let machine = Some(machines[rank].to_string());
            let env = rank_at(&store, rank, roles.len());
            Process::start(test, role, &LaunchEnv { machine, events: Some(events.clone()), ..env })
        };
        let ranks = roles.iter().enumerate().map(start).collect();
        Job { ranks, dir, _store: store }
    }

    fn hear_all(&mut self, said: &str) {
        self.ranks.iter_mut().for_each(|rank| assert_eq!(rank.hear(), said));
    }

    fn events(&self) -> Vec<Event> {
        let lines = std::fs::read_to_string(self.dir.path().join("events")).unwrap();
        lines.lines().filter_map(Event::parse).collect()
    }

    fn await_event(&self, wanted: impl Fn(&Event) -> bool) {
        let begin = Instant::now();
        while !self.events().iter().any(&wanted) {
            assert!(begin.elapsed() < PATIENCE, "it does not happen; these did: {:?}", self.events());
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}

impl Drop for Job {
    fn drop(&mut self) {
        // Before the directory is removed, into which the ranks write.
        self.ranks.clear();
    }
}

fn lively() -> WorldOptions {
    WorldOptions { heartbeat: BEAT, ..options() }
}

/// In a child: waits, outside of any call, until the world has ended, and reports the cause.
fn say_cause(world: &World) {
    let deadline = Instant::now() + PATIENCE;
    let cause = loop {
        match world.check() {
            Ok(()) => assert!(Instant::now() < deadline, "the world goes on"),
            Err(cause) => break cause,
        }
        std::thread::sleep(Duration::from_millis(1));
    };
    say(&format!("{:?}: {cause}", cause.rank()));
}

#[test]
fn a_killed_rank_is_named_by_ranks_without_a_connection_to_it() {
    const TEST: &str = "a_killed_rank_is_named_by_ranks_without_a_connection_to_it";
    if let Some((_, env)) = role() {
        let world = World::join(&env, options()).unwrap();
        // Connections to the other rank of its machine and to two counterparts; that to the store is closed by then.
        await_connections(3);
        say("ready");
        return say_cause(&world);
    }
    let mut job = Job::start(TEST, &["rank"; 6]);
    job.hear_all("ready");
    let begin = Instant::now();
    job.ranks[3].kill();
    for rank in [0, 1, 2, 4, 5] {
        let said = job.ranks[rank].hear();
        assert!(said.starts_with("Some(3): rank 3 (host "), "rank {rank}: {said}");
        assert!(said.contains("was killed by SIGKILL"), "rank {rank}: {said}");
    }
    assert!(begin.elapsed() < AT_ONCE, "{:?}", begin.elapsed());
}

/// Plays a role: leaves at once, or reports the cause that ends its world, which for "fails" is its own failure.
fn play(role: &str, world: World) {
    match role {
        "leaves" => return drop(world),
        "fails" => {
            await_go();
            world.fail("the disk is full");
        }
        _ => {}
    }
    say_cause(&world);
}

#[test]
fn a_cause_is_heard_by_all_though_the_rank_that_passed_messages_on_has_left() {
    const TEST: &str = "a_cause_is_heard_by_all_though_the_rank_that_passed_messages_on_has_left";
    if let Some((role, env)) = role() {
        let world = World::join(&env, options()).unwrap();
        say("ready");
        return play(&role, world);
    }
    for culprit in ["fails", "waits"] {
        // Rank 0 is the counterpart of rank 2.
        let mut job = Job::start(TEST, &["leaves", "waits", culprit, "waits"]);
        job.hear_all("ready");
        assert!(job.ranks[0].end().success());
        let begin = Instant::now();
        let expected = if culprit == "fails" {
            job.ranks[2].go();
            "the disk is full"
        } else {
            job.ranks[2].kill();
            "was killed by SIGKILL"
        };
        for rank in [1, 3] {
            let said = job.ranks[rank].hear();
            assert!(said.starts_with("Some(2): rank 2 (host ") && said.contains(expected), "rank {rank}: {said}");
        }
        assert!(begin.elapsed() < AT_ONCE, "{:?}", begin.elapsed());
    }
}

#[test]
fn a_stopped_rank_is_suspected_by_all_and_those_behind_it_are_unknown() {
    const TEST: &str = "a_stopped_rank_is_suspected_by_all_and_those_behind_it_are_unknown";
    if let Some((role, env)) = role() {
        let world = World::join(&env, WorldOptions { timeout: Duration::from_secs(3), ..lively() }).unwrap();
        let group = world.group().unwrap();
        let pair = group.split([0, 3].contains(&world.rank()).then_some(0), 0).unwrap();
        say("ready");
        if role == "calls" {
            await_go();
            let error = pair.unwrap().barrier().unwrap_err();
            return say(&format!("{:?}: {error}", error.rank()));
        }
        // Stays until the test ends.
        return await_go();
    }
    // Rank 3 hears rank 0 through rank 2.
    let mut job = Job::start(TEST, &["waits", "waits", "waits", "calls"]);
    job.hear_all("ready");
    job.ranks[2].signal(Signal::STOP);
    for observer in [0, 1, 3] {
        job.await_event(|event| matches!(event, Event::Suspect { rank, peer: 2, .. } if *rank == observer));
    }
    job.ranks[2].signal(Signal::CONT);
    for observer in [0, 1, 3] {
        job.await_event(|event| matches!(event, Event::Recovered { rank, peer: 2, .. } if *rank == observer));
    }
    job.ranks[2].signal(Signal::STOP);
    let suspected_again = |events: &[Event]| {
        let of_rank_3 = |event: &&Event| matches!(event, Event::Suspect { rank: 3, peer: 2, .. });
        events.iter().filter(of_rank_3).count() > 1
    };
    let begin = Instant::now();
    while !suspected_again(&job.events()) {
        assert!(begin.elapsed() < PATIENCE, "{:?}", job.events());
        std::thread::sleep(Duration::from_millis(5));
    }
    job.ranks[3].go();
    let said = job.ranks[3].hear();
    assert!(said.starts_with("Some(2): ") && said.contains("waited 3 s for rank 0"), "{said}");
    let expected = "rank 0 is out of sight, since its messages come through rank 2; rank 2 has been silent for ";
    assert!(said.contains(expected), "{said}");
}

/// Ranks from which this process has heard on a connection that was made after the world began, by the library's logs.
static HEARD: Mutex<BTreeSet<u64>> = Mutex::new(BTreeSet::new());

/// Adds these ranks to [`HEARD`].
struct Listener;

/// Fields of a log event: the peer, and true if the event says that this process heard from it.
#[derive(Default)]
struct Fields(u64, bool);

impl Visit for Fields {
    fn record_u64(&mut self, field: &Field, value: u64) {
        if field.name() == "peer" {
            self.0 = value;
        }
    }

    fn record_debug(&mut self, field: &Field, value: &dyn Debug) {
        self.1 |= field.name() == "message" && format!("{value:?}") == "first message on the fallback connection";
    }
}

impl Subscriber for Listener {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        metadata.is_event()
    }

    fn new_span(&self, _: &Attributes<'_>) -> Id {
        Id::from_u64(1)
    }

    fn event(&self, event: &tracing::Event<'_>) {
        let mut fields = Fields::default();
        event.record(&mut fields);
        if let Fields(peer, true) = fields {
            HEARD.lock().unwrap().insert(peer);
        }
    }

    fn record(&self, _: &Id, _: &Record<'_>) {}
    fn record_follows_from(&self, _: &Id, _: &Id) {}
    fn enter(&self, _: &Id) {}
    fn exit(&self, _: &Id) {}
}

/// In a child: waits until exactly these ranks have been heard on connections that were made since the world began.
fn await_heard(ranks: &[u64]) {
    let (begin, wanted) = (Instant::now(), BTreeSet::from_iter(ranks.iter().copied()));
    while *HEARD.lock().unwrap() != wanted {
        assert!(begin.elapsed() < PATIENCE, "heard {:?}", HEARD.lock().unwrap());
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Three ranks on one machine and two on the other, of which ranks 1 and 3 leave: no pair of counterparts is left.
const UNEVEN: [usize; 5] = [0, 0, 0, 1, 1];

/// In a child of a job on [`UNEVEN`] machines: leaves, or waits until it is connected to the two other ranks that do
/// not leave.
fn cut_off() -> Option<(String, World)> {
    let (role, env) = role()?;
    tracing::subscriber::set_global_default(Listener).unwrap();
    let world = World::join(&env, lively()).unwrap();
    say("ready");
    await_go();
    if role != "leaves" {
        await_heard(if world.rank() == 4 { &[0, 2] } else { &[4] });
        say("connected");
    }
    Some((role, world))
}

fn start_cut_off(test: &str, roles: &[&str; 5]) -> Job {
    let mut job = Job::start_on(&UNEVEN, test, roles);
    job.hear_all("ready");
    for rank in [1, 3] {
        job.ranks[rank].go();
        assert!(job.ranks[rank].end().success());
    }
    for rank in [0, 2, 4] {
        job.ranks[rank].go();
        assert_eq!(job.ranks[rank].hear(), "connected");
    }
    job
}

#[test]
fn a_rank_is_named_on_a_machine_to_which_no_counterparts_are_left() {
    const TEST: &str = "a_rank_is_named_on_a_machine_to_which_no_counterparts_are_left";
    if let Some((role, world)) = cut_off() {
        return play(&role, world);
    }
    for (culprit, role) in [(4, "waits"), (0, "waits"), (2, "fails")] {
        let mut roles = ["waits", "leaves", "waits", "leaves", "waits"];
        roles[culprit] = role;
        let mut job = start_cut_off(TEST, &roles);
        let begin = Instant::now();
        let expected = if role == "fails" {
            job.ranks[culprit].go();
            "the disk is full"
        } else {
            job.ranks[culprit].kill();
            "was killed by SIGKILL"
        };
        for rank in [0, 2, 4].into_iter().filter(|rank| *rank != culprit) {
            let (said, name) = (job.ranks[rank].hear(), format!("Some({culprit}): rank {culprit} (host "));
            assert!(said.starts_with(&name) && said.contains(expected), "rank {rank}: {said}");
        }
        assert!(begin.elapsed() < AT_ONCE, "{:?}", begin.elapsed());
    }
}

#[test]
fn a_stopped_rank_is_suspected_where_no_counterparts_are_left_and_leaving_is_no_death() {
    const TEST: &str = "a_stopped_rank_is_suspected_where_no_counterparts_are_left_and_leaving_is_no_death";
    if let Some((role, world)) = cut_off() {
        if role == "leaves" {
            return drop(world);
        }
        await_go();
        assert_eq!(world.check(), Ok(()));
        return drop(world);
    }
    let mut job = start_cut_off(TEST, &["waits", "leaves", "waits", "leaves", "waits"]);
    job.ranks[4].signal(Signal::STOP);
    for observer in [0, 2] {
        job.await_event(|event| matches!(event, Event::Suspect { rank, peer: 4, .. } if *rank == observer));
    }
    job.ranks[4].signal(Signal::CONT);
    for observer in [0, 2] {
        job.await_event(|event| matches!(event, Event::Recovered { rank, peer: 4, .. } if *rank == observer));
    }
    for rank in [4, 0, 2] {
        job.ranks[rank].go();
        assert!(job.ranks[rank].end().success());
    }
    assert!(!job.events().iter().any(|event| matches!(event, Event::Failed { .. })), "{:?}", job.events());
}

#[test]
fn a_rank_that_dies_where_no_rank_is_connected_to_it_is_named_by_a_call() {
    const TEST: &str = "a_rank_that_dies_where_no_rank_is_connected_to_it_is_named_by_a_call";
    if let Some((role, env)) = role() {
        let world = World::join(&env, lively()).unwrap();
        let group = world.group().unwrap();
        say("ready");
        await_go();
        if role == "leaves" {
            return drop((group, world));
        }
        let error = group.recv(&mut [0_u8; 4], 4).unwrap_err();
        return say(&format!("{:?}: {error}", error.rank()));
    }
    let mut job = Job::start_on(&UNEVEN, TEST, &["waits", "leaves", "waits", "leaves", "dies"]);
    job.hear_all("ready");
    // A stopped process connects to no rank.
    job.ranks[4].signal(Signal::STOP);
    for rank in [1, 3] {
        job.ranks[rank].go();
        assert!(job.ranks[rank].end().success());
    }
    let begin = Instant::now();
    job.ranks[4].kill();
    for rank in [0, 2] {
        job.ranks[rank].go();
        let said = job.ranks[rank].hear();
        assert!(said.starts_with("Some(4): rank 4 (host ") && said.contains("its process has ended"), "{said}");
    }
    assert!(begin.elapsed() < AT_ONCE, "{:?}", begin.elapsed());
}
