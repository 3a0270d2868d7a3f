//! Each wait of a rank while a peer dies, is stopped, or gives up: the wait ends at once and names that peer.

mod common;

use std::thread;
use std::time::{Duration, Instant};

use burn_ddp_comm::{EngineChoice, LaunchEnv, ReduceOp, Result, World, WorldOptions};
use common::{Process, await_go, launcher_store, options, rank_at, role, say};
use rustix::process::Signal;

/// Half of the deadline of a call.
const AT_ONCE: Duration = Duration::from_secs(30);
/// Silence after which a stopped rank counts as lost.
const SILENCE: Duration = Duration::from_secs(2);

/// The waits: what a rank waits in, and for which engine.
const WAITS: [(&str, EngineChoice); 13] = [
    ("group", EngineChoice::Tcp),
    ("group", EngineChoice::Shm),
    ("barrier", EngineChoice::Tcp),
    ("barrier", EngineChoice::Shm),
    ("receive", EngineChoice::Tcp),
    ("receive", EngineChoice::Shm),
    ("pending", EngineChoice::Tcp),
    ("shared buffers", EngineChoice::Shm),
    ("large broadcast", EngineChoice::Tcp),
    ("large send", EngineChoice::Tcp),
    ("large send", EngineChoice::Shm),
    ("split", EngineChoice::Tcp),
    ("split", EngineChoice::Shm),
];

/// In a child: joins; when the test says go, enters the wait that its role names. The faulty rank does not.
fn rank_main() -> bool {
    let Some((role, env)) = role() else { return false };
    let mut words = role.split('/');
    let (wait, engine) = (words.next().unwrap(), words.next().unwrap());
    let faulty: usize = words.next().unwrap().parse().unwrap();
    let world_options = WorldOptions {
        // No choice of an engine if `common` divides the ranks between machines.
        engine: options().engine.and(Some(engine.parse().unwrap())),
        heartbeat: Duration::from_millis(100),
        peer_timeout: words.next().map(|_| SILENCE),
        ..options()
    };
    let world = World::join(&env, world_options).unwrap();
    let group = world.group().unwrap();
    say("ready");
    await_go();
    if world.rank() == faulty {
        world.fail("the disk is full");
        // Stays until its peers have ended, so that they learn of the failure and not of a closed connection.
        await_go();
        return true;
    }
    let waited: Result<()> = match wait {
        "group" => world.group().map(drop),
        "barrier" => group.barrier(),
        "receive" => group.recv(&mut [0_u8; 4], faulty),
        "pending" => group.all_reduce_async(vec![1.0_f32; 4], ReduceOp::Sum).wait().map(drop),
        "shared buffers" => group.shared_buffers(&[1 << 20]).map(drop),
        "large broadcast" => group.broadcast(&mut vec![0_u8; 32 << 20], 0),
        "large send" => group.send(&vec![0_u8; 32 << 20], faulty),
        "split" => group.split(Some(0), 0).map(drop),
        other => panic!("{other}"),
    };
    let error = waited.unwrap_err();
    say(&format!("{:?}: {error}", error.rank()));
    true
}

/// Runs three ranks per wait. One of them is faulty: `harm` is done to it while the others wait for it. The three tests
/// that call this pass different `turn`s, so that each rank is the faulty one of each wait in one test.
fn check(test: &str, turn: usize, peer_timeout: &str, harm: impl Fn(&mut Process) + Sync, expected: &str) {
    let harm = &harm;
    thread::scope(|scope| {
        for (nth, (wait, engine)) in WAITS.into_iter().enumerate() {
            let faulty = (nth + turn) % 3;
            let others = move || (0..3).filter(move |rank| *rank != faulty);
            scope.spawn(move || {
                let store = launcher_store();
                let role = format!("{wait}/{}/{faulty}{peer_timeout}", engine.name());
                let start = |rank| Process::start(test, &role, &rank_at(&store, rank, 3));
                let mut ranks: Vec<Process> = (0..3).map(start).collect();
                ranks.iter_mut().for_each(|rank| assert_eq!(rank.hear(), "ready"));
                others().for_each(|rank| ranks[rank].go());
                // Most ranks are in their waits by then; the rest notice when they begin.
                thread::sleep(Duration::from_millis(200));
                let begin = Instant::now();
                harm(&mut ranks[faulty]);
                for rank in others() {
                    let said = ranks[rank].hear();
                    let named = said.starts_with(&format!("Some({faulty}): rank {faulty} (host "));
                    assert!(named && said.contains(expected), "{wait}, {engine:?}, rank {rank}: {said}");
                }
                assert!(begin.elapsed() < AT_ONCE, "{wait}, {engine:?}: {:?}", begin.elapsed());
            });
        }
    });
}

#[test]
fn each_wait_ends_when_a_peer_is_killed() {
    if !rank_main() {
        check("each_wait_ends_when_a_peer_is_killed", 0, "", Process::kill, "it was killed by SIGKILL");
    }
}

#[test]
fn each_wait_ends_when_a_peer_gives_up() {
    if !rank_main() {
        check("each_wait_ends_when_a_peer_gives_up", 1, "", Process::go, "failed: the disk is full");
    }
}

#[test]
fn each_wait_ends_when_a_peer_is_silent_for_longer_than_the_user_allows() {
    const TEST: &str = "each_wait_ends_when_a_peer_is_silent_for_longer_than_the_user_allows";
    if !rank_main() {
        check(TEST, 2, "/peer timeout", |rank| rank.signal(Signal::STOP), "silent for ");
    }
}

#[test]
fn a_rank_that_connects_to_a_stopped_one_hears_that_another_dies() {
    const TEST: &str = "a_rank_that_connects_to_a_stopped_one_hears_that_another_dies";
    if rank_main() {
        return;
    }
    let store = launcher_store();
    let role = |rank| Process::start(TEST, "group/tcp/0", &rank_at(&store, rank, 3));
    let mut ranks: Vec<Process> = (0..3).map(role).collect();
    ranks.iter_mut().for_each(|rank| assert_eq!(rank.hear(), "ready"));
    // Rank 2 connects to rank 0 first. Rank 0's kernel accepts the connection, and rank 2 waits for the greeting.
    ranks[0].signal(Signal::STOP);
    ranks[2].go();
    thread::sleep(Duration::from_millis(200));
    let begin = Instant::now();
    ranks[1].kill();
    let said = ranks[2].hear();
    assert!(said.starts_with("Some(1): rank 1 (host ") && said.contains("World::group (group 2)"), "{said}");
    assert!(begin.elapsed() < AT_ONCE, "{:?}", begin.elapsed());
}

#[test]
fn a_handshake_that_takes_long_is_reported() {
    if let Some((_, env)) = role() {
        let stall = Duration::from_millis(200);
        let world = World::join(&env, WorldOptions { stall, ..options() }).unwrap();
        world.group().unwrap();
        say("ready");
        await_go();
        world.group().unwrap();
        return say("done");
    }
    let store = launcher_store();
    let directory = tempfile::tempdir().unwrap();
    let events = directory.path().join("events");
    std::fs::File::create_new(&events).unwrap();
    let start = |rank| {
        let env = LaunchEnv { events: Some(events.clone()), ..rank_at(&store, rank, 2) };
        Process::start("a_handshake_that_takes_long_is_reported", "rank", &env)
    };
    let mut ranks = [start(0), start(1)];
    ranks.iter_mut().for_each(|rank| assert_eq!(rank.hear(), "ready"));
    // The kernel of a stopped rank still accepts connections for it.
    ranks[0].signal(Signal::STOP);
    ranks[1].go();
    let deadline = Instant::now() + AT_ONCE;
    while !std::fs::read_to_string(&events).unwrap_or_default().contains("\"stall\"") {
        assert!(Instant::now() < deadline, "{:?}", std::fs::read_to_string(&events));
        thread::sleep(Duration::from_millis(20));
    }
    ranks[0].signal(Signal::CONT);
    ranks[0].go();
    ranks.iter_mut().for_each(|rank| assert_eq!(rank.hear(), "done"));
}

#[test]
fn all_of_this_on_two_machines() {
    common::again_on_two_machines();
}
