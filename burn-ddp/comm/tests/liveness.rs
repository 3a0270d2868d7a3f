//! Real processes that are stopped, cut off, slow or stuck: which ranks become suspects and culprits, which are not
//! accused, and the events and reports that ranks write.
//!
//! Each test starts this binary again, once per rank, with only itself to run; see [`common::Process`].

mod common;

use std::path::Path;
use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread::sleep;
use std::time::{Duration, Instant};

use burn_ddp_comm::post_mortem::{Event, PostMortem};
use burn_ddp_comm::{JobKey, LaunchEnv, Meeting, ProcessGroup, ReduceOp, Result, StoreServer, World, WorldOptions};
use common::{JOB, PATIENCE, Process, await_go, launcher_store, options, rank_at, role, say};
use rustix::process::Signal;

const BEAT: Duration = Duration::from_millis(100);

fn lively() -> WorldOptions {
    WorldOptions { heartbeat: BEAT, ..options() }
}

/// A job whose ranks are processes, and the directory of their events and reports.
struct Job {
    ranks: Vec<Process>,
    dir: tempfile::TempDir,
    _store: StoreServer,
}

impl Job {
    /// Ranks that run `test` in the roles given, once they are ready.
    fn start(test: &str, roles: &[&str]) -> Job {
        let store = launcher_store();
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("events"), "").unwrap();
        let start = |(rank, role): (usize, &&str)| {
            Process::start(test, role, &with_dir(rank_at(&store, rank, roles.len()), dir.path()))
        };
        let mut ranks: Vec<Process> = roles.iter().enumerate().map(start).collect();
        for rank in &mut ranks {
            assert_eq!(rank.hear(), "ready");
        }
        Job { ranks, dir, _store: store }
    }

    fn events(&self) -> Vec<Event> {
        let lines = std::fs::read_to_string(self.dir.path().join("events")).unwrap();
        lines.lines().map(|line| Event::parse(line).unwrap_or_else(|| panic!("no event: {line}"))).collect()
    }

    /// Waits for an event for which `wanted` holds.
    fn await_event(&self, wanted: impl Fn(&Event) -> bool) -> Event {
        let begin = Instant::now();
        while begin.elapsed() < PATIENCE {
            if let Some(event) = self.events().into_iter().find(&wanted) {
                return event;
            }
            sleep(Duration::from_millis(5));
        }
        panic!("it does not happen; what did: {:?}", self.events());
    }

    fn report(&self, rank: usize) -> PostMortem {
        PostMortem::read(&PostMortem::path(self.dir.path(), rank)).unwrap()
    }
}

impl Drop for Job {
    fn drop(&mut self) {
        // Before the directory is removed, into which the ranks write.
        self.ranks.clear();
    }
}

fn with_dir(env: LaunchEnv, dir: &Path) -> LaunchEnv {
    LaunchEnv { events: Some(dir.join("events")), report_dir: Some(dir.to_owned()), ..env }
}

/// In a child: its role, its world and a group.
fn join(options: WorldOptions) -> Option<(String, World, ProcessGroup)> {
    let (role, env) = role()?;
    let world = World::join(&env, options).unwrap();
    let group = world.group().unwrap();
    Some((role, world, group))
}

/// In a child: reports a result to the test.
fn tell(result: Result<()>) {
    match result {
        Ok(()) => say("fine"),
        Err(error) => say(&format!("{:?}: {error}", error.rank())),
    }
}

#[test]
fn a_stopped_rank_is_suspected_then_heard_again_and_the_job_goes_on() {
    const TEST: &str = "a_stopped_rank_is_suspected_then_heard_again_and_the_job_goes_on";
    if let Some((_, _world, group)) = join(lively()) {
        say("ready");
        await_go();
        return tell(group.barrier());
    }
    let mut job = Job::start(TEST, &["rank"; 3]);
    job.ranks[1].signal(Signal::STOP);
    for observer in [0, 2] {
        let event = job.await_event(|event| matches!(event, Event::Suspect { rank, peer: 1, .. } if *rank == observer));
        let Event::Suspect { silent_ms, .. } = event else { unreachable!() };
        assert!(silent_ms >= 2 * BEAT.as_millis() as u64, "{silent_ms} ms");
        job.ranks[observer].go();
    }
    job.ranks[1].signal(Signal::CONT);
    for observer in [0, 2] {
        job.await_event(|event| matches!(event, Event::Recovered { rank, peer: 1, .. } if *rank == observer));
    }
    // Not earlier: once the barrier is done, the other ranks leave and write no more events.
    job.ranks[1].go();
    for rank in &mut job.ranks {
        assert_eq!(rank.hear(), "fine");
    }
}

#[test]
fn a_stopped_rank_is_lost_once_the_user_says_when() {
    const TEST: &str = "a_stopped_rank_is_lost_once_the_user_says_when";
    let peer_timeout = Some(Duration::from_secs(1));
    if let Some((_, _world, group)) = join(WorldOptions { peer_timeout, ..lively() }) {
        say("ready");
        return tell(group.barrier().and_then(|()| group.barrier()));
    }
    let store = launcher_store();
    let mut ranks: Vec<_> = (0..2).map(|rank| Process::start(TEST, "rank", &rank_at(&store, rank, 3))).collect();
    let mut stopped = Process::start(TEST, "rank", &rank_at(&store, 2, 3));
    assert_eq!(stopped.hear(), "ready");
    // The first barrier may be done before the rank is stopped; the second cannot be.
    stopped.signal(Signal::STOP);
    for rank in &mut ranks {
        assert_eq!(rank.hear(), "ready");
    }
    for rank in &mut ranks {
        let said = rank.hear();
        if said != "fine" {
            assert!(said.starts_with("Some(2): rank 2") && said.contains("silent for 1."), "{said}");
        }
    }
}

#[test]
fn a_job_that_is_stopped_as_a_whole_goes_on_when_it_is_continued() {
    const TEST: &str = "a_job_that_is_stopped_as_a_whole_goes_on_when_it_is_continued";
    let peer_timeout = Some(Duration::from_secs(1));
    if let Some((_, _world, group)) = join(WorldOptions { peer_timeout, ..lively() }) {
        say("ready");
        await_go();
        return tell(group.barrier());
    }
    let mut job = Job::start(TEST, &["rank"; 3]);
    job.ranks.iter().for_each(|rank| rank.signal(Signal::STOP));
    sleep(Duration::from_millis(2500));
    job.ranks.iter().for_each(|rank| rank.signal(Signal::CONT));
    // No rank is accused afterwards either.
    sleep(Duration::from_millis(500));
    job.ranks.iter_mut().for_each(Process::go);
    for rank in &mut job.ranks {
        assert_eq!(rank.hear(), "fine");
    }
}

#[test]
fn a_stall_says_who_is_missing_and_what_it_does() {
    const TEST: &str = "a_stall_says_who_is_missing_and_what_it_does";
    if let Some((role, world, group)) = join(WorldOptions { stall: Duration::from_millis(300), ..lively() }) {
        say("ready");
        world.set_step(28);
        if role == "slow" {
            await_go();
        }
        return tell(group.all_reduce(&mut [1.0_f32; 7], ReduceOp::Sum));
    }
    let mut job = Job::start(TEST, &["rank", "slow", "rank"]);
    for observer in [0, 2] {
        // Stalls are reported repeatedly; at the first report another rank may not be in the call yet, or its heartbeat
        // may not have come.
        let event = job.await_event(|event| {
            matches!(event, Event::Stall { rank, waiting_for, call, .. }
                if *rank == observer && *waiting_for == [1] && call.contains("(step 28)"))
        });
        let Event::Stall { call, since_ms, .. } = event else { unreachable!() };
        assert!(since_ms >= 300, "{since_ms}");
        assert!(call.starts_with("all_reduce #0 of group 1 (f32, sum, 7 elements) in step 28 called at "), "{call}");
        assert!(call.contains("; rank 1 (step 28) is in no collective; the last it finished, "), "{call}");
        assert!(
            call.contains(" s ago, was World::group (group 1) called at burn-ddp/comm/tests/liveness.rs:"),
            "{call}"
        );
    }
    job.ranks[1].go();
    for rank in &mut job.ranks {
        assert_eq!(rank.hear(), "fine");
    }
}

#[test]
fn a_timeout_names_the_rank_that_keeps_all_others_waiting() {
    const TEST: &str = "a_timeout_names_the_rank_that_keeps_all_others_waiting";
    if let Some((role, world, group)) = join(WorldOptions { timeout: Duration::from_secs(3), ..lively() }) {
        // A chain: rank 0 waits for rank 1, which waits for rank 2, which is stuck.
        let one = group.split((world.rank() < 2).then_some(0), 0).unwrap();
        let other = group.split((world.rank() > 0).then_some(0), 0).unwrap();
        world.set_step(4);
        say("ready");
        await_go();
        return match role.as_str() {
            "first" => tell(one.unwrap().barrier()),
            "second" => tell(other.unwrap().barrier()),
            // The stuck rank learns soon that the world has ended, and which rank is the culprit.
            _ => {
                let deadline = Instant::now() + Duration::from_secs(5);
                while world.check().is_ok() && Instant::now() < deadline {
                    std::thread::sleep(Duration::from_millis(5));
                }
                tell(world.check())
            }
        };
    }
    let mut job = Job::start(TEST, &["first", "second", "stuck"]);
    job.ranks[0].go();
    job.ranks[1].go();
    let said = job.ranks[0].hear();
    assert!(said.starts_with("Some(2): rank "), "{said}");
    if said.starts_with("Some(2): rank 0 waited") {
        assert!(said.contains("waited 3 s for rank 1 in barrier #0 of group 0.1"), "{said}");
        assert!(said.contains("; rank 1 is in barrier #0 of group 1.2 in step 4 called at "), "{said}");
    }
    assert!(said.contains("rank 2 (step 4) is in no collective; the last it finished, "), "{said}");
    assert!(job.ranks[1].hear().starts_with("Some(2): rank "));
    job.ranks[2].go();
    assert!(job.ranks[2].hear().starts_with("Some(2): "));
    job.await_event(|event| matches!(event, Event::Failed { culprit: Some(2), .. }));
}

#[test]
fn whoever_survives_leaves_a_report() {
    const TEST: &str = "whoever_survives_leaves_a_report";
    if let Some((role, world, group)) = join(lively()) {
        world.set_step(3);
        (0..5).for_each(|_| group.barrier().unwrap());
        say("ready");
        await_go();
        if role == "dies" {
            std::process::abort();
        }
        return tell(group.broadcast(&mut [1_i32; 9], 2));
    }
    let mut job = Job::start(TEST, &["lives", "lives", "dies"]);
    let dead = job.ranks[2].id();
    job.ranks[0].go();
    job.ranks[1].go();
    // Time for some heartbeats, so that each of the two knows what the other does.
    sleep(20 * BEAT);
    job.ranks[2].go();
    for rank in 0..2 {
        let said = job.ranks[rank].hear();
        assert!(said.contains("it was killed by SIGABRT"), "{said}");
        let report = job.report(rank);
        assert_eq!((report.rank, report.world_size, report.job_id.as_str(), report.restart_count), (rank, 3, JOB, 0));
        assert_eq!((report.culprit, report.step, report.pid), (Some(2), Some(3), job.ranks[rank].id()));
        assert!(report.cause.starts_with("rank 2 (host "), "{}", report.cause);
        assert!(said.ends_with(report.cause.split(": ").last().unwrap()), "{said}");

        let [pending] = &report.pending[..] else { panic!("{:?}", report.pending) };
        assert!(pending.call.starts_with("broadcast #5 of group 1 (i32, root 2, 9 elements) in step 3 called at "));
        assert_eq!((pending.group, pending.sequence, &pending.waiting_for[..]), (1, 5, &[2][..]));

        let others: Vec<usize> = report.peers.iter().map(|peer| peer.rank).collect();
        assert_eq!(others, (0..3).filter(|other| *other != rank).collect::<Vec<_>>());
        let dead_one = report.peers.last().unwrap();
        assert_eq!((dead_one.pid, dead_one.step, dead_one.left), (dead, Some(3), false));
        assert!(dead_one.pending.is_empty() && dead_one.last_heard_ms.is_some(), "{dead_one:?}");
        let survivor = &report.peers[0];
        assert!(survivor.pending[0].starts_with("broadcast #5"), "{survivor:?}");

        let calls: Vec<&str> = report.history.iter().map(|record| record.call.as_str()).collect();
        assert_eq!(calls[..6], ["group", "barrier", "barrier", "barrier", "barrier", "barrier"]);
        assert_eq!(calls[6..], ["broadcast (i32, root 2, 9 elements)"]);
        assert!(report.history[..6].iter().all(|record| record.ok && record.took_us.is_some()));
        assert!(report.history.iter().all(|record| record.site.starts_with("burn-ddp/comm/tests/liveness.rs:")));
        assert!(report.history.windows(2).all(|pair| pair[0].started <= pair[1].started));
    }
    let failed = job.events().into_iter().filter_map(|event| match event {
        Event::Failed { culprit, .. } => Some(culprit),
        _ => None,
    });
    assert_eq!(failed.collect::<Vec<_>>(), [Some(2); 2]);
}

#[test]
fn who_leaves_in_peace_leaves_no_report() {
    const TEST: &str = "who_leaves_in_peace_leaves_no_report";
    if let Some((_, world, group)) = join(lively()) {
        group.barrier().unwrap();
        drop((group, world));
        return say("ready");
    }
    let mut job = Job::start(TEST, &["rank"; 2]);
    job.ranks.iter_mut().for_each(|rank| assert!(rank.end().success()));
    assert_eq!(job.events(), []);
    assert_eq!(std::fs::read_dir(job.dir.path()).unwrap().count(), 1, "the events only");
}

/// A machine of its own: a network namespace, joined to this one by a cable.
struct Machine {
    name: String,
    cable: String,
    /// The addresses of the two ends: this machine's, and its.
    here: String,
}

impl Machine {
    fn new() -> Machine {
        static MADE: AtomicU32 = AtomicU32::new(0);
        let id = (std::process::id() + 7919 * MADE.fetch_add(1, Ordering::Relaxed)) % 60_000;
        let (name, cable) = (format!("bddp-{id}"), format!("bd{id}"));
        let (net, host) = (id / 250, id % 250 * 4 % 250);
        let (here, there) = (format!("10.{}.{host}.1", 100 + net % 100), format!("10.{}.{host}.2", 100 + net % 100));
        ip(&["netns", "add", &name]);
        ip(&["link", "add", &cable, "type", "veth", "peer", "name", "eth0", "netns", &name]);
        ip(&["addr", "add", &format!("{here}/24"), "dev", &cable]);
        ip(&["link", "set", &cable, "up"]);
        ip(&["-n", &name, "addr", "add", &format!("{there}/24"), "dev", "eth0"]);
        ip(&["-n", &name, "link", "set", "eth0", "up"]);
        ip(&["-n", &name, "link", "set", "lo", "up"]);
        Machine { name, cable, here }
    }

    fn cut(&self) {
        // At the far end, so that this machine's own routes stay, as when a switch fails.
        ip(&["-n", &self.name, "link", "set", "eth0", "down"]);
    }
}

impl Drop for Machine {
    fn drop(&mut self) {
        let _ = Command::new("ip").args(["link", "del", &self.cable]).status();
        let _ = Command::new("ip").args(["netns", "del", &self.name]).status();
    }
}

fn ip(args: &[&str]) {
    assert!(Command::new("ip").args(args).status().unwrap().success(), "ip {args:?}");
}

/// Runs a job of three ranks, the last on a machine of its own that is cut off; errors of the first two, and when.
fn cut_off(test: &str, role: &str) -> Vec<(String, Duration)> {
    let machine = Machine::new();
    let store = StoreServer::bind(format!("{}:0", machine.here), &JobKey::trusting_network(JOB, 0)).unwrap();
    let meeting = Meeting::Launcher { host: machine.here.clone(), port: store.local_addr().port() };
    let env = |rank| {
        let (local_rank, local_world_size, node_rank) = if rank == 2 { (0, 1, 1) } else { (rank, 2, 0) };
        LaunchEnv { local_rank, local_world_size, node_rank, ..common::rank_of(meeting.clone(), rank, 3) }
    };
    let mut ranks: Vec<_> = (0..2).map(|rank| Process::start(test, role, &env(rank))).collect();
    let mut far = Command::new("ip");
    far.args(["netns", "exec", &machine.name]).arg(std::env::current_exe().unwrap());
    let mut far = Process::start_by(far, test, role, &env(2));
    for rank in ranks.iter_mut().chain([&mut far]) {
        assert_eq!(rank.hear(), "ready");
    }
    machine.cut();
    let begin = Instant::now();
    ranks[0].go();
    ranks[1].go();
    let said = ranks.iter_mut().map(|rank| (rank.hear(), begin.elapsed())).collect();
    // The other side finds out as well.
    far.go();
    let lost = far.hear();
    assert!(lost.starts_with("Some(0)") || lost.starts_with("Some(1)"), "{lost}");
    said
}

#[test]
#[ignore = "needs root, and `ip netns`"]
fn a_machine_that_is_cut_off_is_lost_after_the_peer_timeout() {
    const TEST: &str = "a_machine_that_is_cut_off_is_lost_after_the_peer_timeout";
    let peer_timeout = Some(Duration::from_secs(3));
    if let Some((_, _world, group)) = join(WorldOptions { peer_timeout, ..lively() }) {
        say("ready");
        await_go();
        return tell(group.barrier());
    }
    for (said, after) in cut_off(TEST, "rank") {
        println!("after {after:?}: {said}");
        assert!(said.starts_with("Some(2): rank 2") && after < Duration::from_secs(10), "{said}, {after:?}");
    }
}

#[test]
#[ignore = "needs root, and `ip netns`; takes half a minute"]
fn a_machine_that_is_cut_off_is_lost_by_itself() {
    const TEST: &str = "a_machine_that_is_cut_off_is_lost_by_itself";
    if let Some((_, _world, group)) = join(options()) {
        say("ready");
        await_go();
        return tell(group.barrier());
    }
    for (said, after) in cut_off(TEST, "rank") {
        println!("after {after:?}: {said}");
        assert!(said.starts_with("Some(2): rank 2") && said.contains("has not answered for 30 s"), "{said}");
        assert!(after > Duration::from_secs(25) && after < Duration::from_secs(50), "{after:?}");
    }
}

#[test]
fn all_of_this_on_two_machines() {
    common::again_on_two_machines();
}
