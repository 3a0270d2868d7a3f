//! Joining: ranks that come, ranks that do not come, and the errors of both.

mod common;

use std::io::{Read, Write};
use std::net::TcpListener;
use std::time::{Duration, Instant};

use burn_ddp_comm::{
    Error, JobKey, LaunchEnv, Meeting, ReduceOp, Store, StoreClient, StoreServer, World, WorldOptions, fail_join,
};
use common::{
    FreePort, JOB, Process, SecretFile, await_go, join_all, launcher_store, meeting_at, options, rank_at, rank_of,
    role, say,
};

const AT_ONCE: Duration = Duration::from_secs(5);

fn join_within(seconds: f64) -> WorldOptions {
    WorldOptions { join_timeout: Duration::from_secs_f64(seconds), ..options() }
}

/// Each of the worlds works, and they are one world.
fn work_together(worlds: Vec<World>) {
    let n = worlds.len();
    std::thread::scope(|s| {
        for (rank, world) in worlds.into_iter().enumerate() {
            s.spawn(move || {
                assert_eq!((world.rank(), world.world_size(), world.engine()), (rank, n, "tcp"));
                assert_eq!(world.peers().iter().map(|peer| peer.rank).collect::<Vec<_>>(), (0..n).collect::<Vec<_>>());
                assert!(world.peers().iter().all(|peer| peer.pid == std::process::id() && !peer.host.is_empty()));
                let mut x = [1_i64 << rank];
                world.group().unwrap().all_reduce(&mut x, ReduceOp::Sum).unwrap();
                assert_eq!(x, [(1 << n) - 1]);
            });
        }
    });
}

fn joined(envs: Vec<LaunchEnv>) -> Vec<World> {
    join_all(envs, &options()).into_iter().map(|world| world.unwrap()).collect()
}

fn errors(envs: Vec<LaunchEnv>, options: &WorldOptions) -> Vec<Error> {
    join_all(envs, options).into_iter().map(|world| world.expect_err("no world")).collect()
}

fn says(error: &Error, parts: &[&str]) {
    let text = error.to_string();
    for part in parts {
        assert!(text.contains(part), "{text:?} does not say {part:?}");
    }
}

#[test]
fn ranks_meet_at_the_launchers_store() {
    for n in [1, 2, 5] {
        let store = launcher_store();
        work_together(joined((0..n).map(|rank| rank_at(&store, rank, n)).collect()));
    }
}

#[test]
fn ranks_meet_at_rank_0_whoever_comes_first() {
    let port = FreePort::reserve();
    work_together(joined((0..3).map(|rank| rank_of(meeting_at(&port), rank, 3)).collect()));

    let port = FreePort::reserve();
    let at = meeting_at(&port);
    std::thread::scope(|s| {
        let early = s.spawn({
            let at = at.clone();
            move || World::join(&rank_of(at, 1, 2), options()).unwrap()
        });
        // Time for several attempts that find no store.
        std::thread::sleep(Duration::from_millis(200));
        let late = World::join(&rank_of(at, 0, 2), options()).unwrap();
        work_together(vec![late, early.join().unwrap()]);
    });
}

#[test]
fn ranks_meet_above_a_port_that_is_taken_among_ports_that_are_taken() {
    // The launcher's own store, a stranger that never answers, another job's store: rank 0 takes the next port, and
    // its peers find it.
    let (agent, _silent, _other) = loop {
        let agent = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = agent.local_addr().unwrap().port();
        let near = |above: u16| TcpListener::bind(("127.0.0.1", port.saturating_add(above)));
        if let (Ok(silent), Ok(other)) = (near(1), near(2)) {
            let address = other.local_addr().unwrap();
            drop(other);
            if let Ok(other) = StoreServer::bind(address, &JobKey::trusting_network("another job", 0)) {
                break (agent, silent, other);
            }
        }
    };
    let at = Meeting::Rank0Above { host: "127.0.0.1".into(), port: agent.local_addr().unwrap().port() };
    work_together(joined((0..2).map(|rank| rank_of(at.clone(), rank, 2)).collect()));
}

#[test]
fn a_process_can_leave_and_join_again() {
    let store = launcher_store();
    for _ in 0..3 {
        work_together(joined((0..2).map(|rank| rank_at(&store, rank, 2)).collect()));
    }
    let port = FreePort::reserve();
    for _ in 0..3 {
        work_together(joined((0..2).map(|rank| rank_of(meeting_at(&port), rank, 2)).collect()));
    }
}

#[test]
fn jobs_in_one_store_do_not_mix() {
    let store = launcher_store();
    std::thread::scope(|s| {
        for job in ["one", "two", "three"] {
            store.admit(&JobKey::trusting_network(job, 0));
            let envs = (0..2).map(|rank| LaunchEnv { job_id: job.into(), ..rank_at(&store, rank, 2) }).collect();
            s.spawn(move || work_together(joined(envs)));
        }
    });
}

#[test]
fn jobs_at_neighbouring_ports_do_not_mix() {
    let port = FreePort::reserve();
    let at = |base: u16| Meeting::Rank0Above { host: "127.0.0.1".into(), port: base };
    // The two jobs search nearly the same ports, and both have the default id.
    let (one, other) = (at(port.port - 1), at(port.port));
    std::thread::scope(|s| {
        let join = |meeting: &Meeting, rank, number: i64| {
            let env = rank_of(meeting.clone(), rank, 2);
            s.spawn(move || {
                let world = World::join(&env, options()).unwrap();
                let mut x = [number];
                world.group().unwrap().all_reduce(&mut x, ReduceOp::Sum).unwrap();
                assert_eq!(x, [2 * number], "ranks of two jobs met");
            })
        };
        let mut ranks = vec![join(&other, 0, 100)];
        std::thread::sleep(Duration::from_millis(100));
        // This rank's store does not exist yet, and it finds the store of the other job.
        ranks.push(join(&one, 1, 1));
        std::thread::sleep(Duration::from_millis(300));
        ranks.extend([join(&one, 0, 1), join(&other, 1, 100)]);
        ranks.into_iter().for_each(|rank| rank.join().unwrap());
    });
}

#[test]
fn those_who_came_are_told_who_came_and_who_did_not() {
    let store = launcher_store();
    let begin = Instant::now();
    let errors = errors([0, 1, 3].map(|rank| rank_at(&store, rank, 5)).into(), &join_within(2.0));
    assert!(begin.elapsed() < AT_ONCE, "{:?}", begin.elapsed());
    let me = format!("pid {}", std::process::id());
    for error in &errors {
        let Error::Rendezvous { came, missing, .. } = error else { panic!("{error:?}") };
        assert_eq!(came.iter().map(|peer| peer.rank).collect::<Vec<_>>(), [0, 1, 3]);
        assert_eq!(missing, &[2, 4]);
        says(error, &["5 ranks", "came: rank 0 (host", &me, "missing: ranks 2 and 4"]);
        assert_eq!(error, &errors[0], "all are told the same");
    }
}

#[test]
fn a_rank_that_comes_after_the_others_gave_up_is_told_so() {
    let store = launcher_store();
    let early = errors(vec![rank_at(&store, 0, 2)], &join_within(0.2));
    let begin = Instant::now();
    let late = errors(vec![rank_at(&store, 1, 2)], &options());
    assert!(begin.elapsed() < AT_ONCE);
    assert_eq!(early, late);
}

#[test]
fn a_rank_started_twice_is_named_with_both_processes() {
    let store = launcher_store();
    let begin = Instant::now();
    let errors = errors([0, 1, 1, 2].map(|rank| rank_at(&store, rank, 4)).into(), &options());
    assert!(begin.elapsed() < AT_ONCE, "nobody waits for the deadline: {:?}", begin.elapsed());
    let me = std::process::id();
    for error in errors {
        says(&error, &["rank 1 was started twice", &format!("pid {me}"), &format!("process {me}")]);
    }
}

#[test]
fn ranks_that_disagree_about_the_world_size_are_named() {
    let store = launcher_store();
    let begin = Instant::now();
    let errors = errors(vec![rank_at(&store, 0, 2), rank_at(&store, 1, 3)], &options());
    assert!(begin.elapsed() < AT_ONCE);
    for error in errors {
        says(&error, &["world size", "rank 0", "says 2", "rank 1", "says 3"]);
    }
}

#[test]
fn a_master_that_is_not_there_is_named_with_time_and_cause() {
    let reserved = FreePort::reserve();
    let port = reserved.port;
    let at = Meeting::Rank0 { host: "127.0.0.1".into(), port };
    let begin = Instant::now();
    let error = errors(vec![rank_of(at, 1, 2)], &join_within(0.4)).remove(0);
    assert!(
        begin.elapsed() >= Duration::from_millis(300) && begin.elapsed() < AT_ONCE,
        "{:?}: {error}",
        begin.elapsed()
    );
    assert!(matches!(error, Error::Environment { .. }), "{error:?}");
    says(&error, &["rank 1", &format!("127.0.0.1:{port}"), "within ", "refused", "rank 0"]);

    let at = Meeting::Launcher { host: "no.such.host.invalid".into(), port };
    let error = errors(vec![rank_of(at, 0, 1)], &join_within(0.4)).remove(0);
    says(&error, &["no.such.host.invalid", "the launcher"]);
}

#[test]
fn a_master_port_in_use_is_named_with_the_remedy() {
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = taken.local_addr().unwrap().port();
    let at = Meeting::Rank0 { host: "127.0.0.1".into(), port };
    let error = errors(vec![rank_of(at, 0, 1)], &options()).remove(0);
    assert!(matches!(error, Error::Environment { .. }), "{error:?}");
    says(&error, &[&format!("127.0.0.1:{port}"), "in use", "MASTER_PORT"]);
}

#[test]
fn a_master_elsewhere_cannot_be_hosted_here() {
    // TEST-NET-1: an address that no machine has.
    let at = Meeting::Rank0 { host: "192.0.2.1".into(), port: 29500 };
    let error = errors(vec![rank_of(at, 0, 1)], &options()).remove(0);
    says(&error, &["192.0.2.1:29500", "rank 0 must run on the master"]);
}

#[test]
fn a_masters_address_may_lead_to_rank_0_without_being_its_own() {
    for (masters, bind) in [("192.0.2.1", "127.0.0.1"), ("localhost", "0.0.0.0")] {
        let port = FreePort::reserve();
        let at = |host: &str| Meeting::Rank0 { host: host.into(), port: port.port };
        // Rank 1 is on the side of the router on which that address is rank 0's.
        let first = LaunchEnv { bind: Some(bind.into()), ..rank_of(at(masters), 0, 2) };
        work_together(joined(vec![first, rank_of(at("127.0.0.1"), 1, 2)]));
    }
}

#[test]
fn ranks_connect_where_a_rank_says_that_it_is_reached() {
    let store = launcher_store();
    let rank = |advertise: &str| LaunchEnv { advertise: Some(advertise.into()), ..rank_at(&store, 0, 2) };
    work_together(joined(vec![rank("localhost"), rank_at(&store, 1, 2)]));

    let store = launcher_store();
    let port = store.local_addr().port();
    let meeting = Meeting::Launcher { host: "127.0.0.1".into(), port };
    let first = LaunchEnv { advertise: Some("no.such.host.invalid".into()), ..rank_of(meeting, 0, 2) };
    // Waits for rank 1 until after the test has ended.
    std::thread::spawn(move || World::join(&first, options()));
    let error = errors(vec![rank_at(&store, 1, 2)], &options()).remove(0);
    says(&error, &["rank 0 (host", "could not be reached at no.such.host.invalid:"]);
}

#[test]
fn a_master_on_loopback_is_no_master_for_other_machines() {
    let at = Meeting::Rank0 { host: "localhost".into(), port: 29500 };
    let env = LaunchEnv { local_world_size: 2, local_rank: 0, ..rank_of(at, 2, 4) };
    let error = errors(vec![env], &options()).remove(0);
    says(&error, &["localhost", "2 of 4 ranks"]);
}

#[test]
fn the_store_of_another_job_is_told_apart() {
    let store = StoreServer::bind("127.0.0.1:0", &JobKey::trusting_network("theirs", 0)).unwrap();
    let begin = Instant::now();
    let error = errors(vec![rank_at(&store, 0, 1)], &options()).remove(0);
    assert!(begin.elapsed() < AT_ONCE);
    says(&error, &["another job", &format!("{JOB:?}"), &store.local_addr().to_string()]);
}

/// A rank of a job without a job id, in a process of its own.
#[test]
#[ignore = "started by another test"]
fn as_a_rank() {
    let world = World::join(&LaunchEnv::detect().unwrap().unwrap(), options());
    say(&world.map_or_else(|error| error.to_string(), |world| format!("joined as rank {}", world.rank())));
}

#[test]
fn two_programs_at_one_port_are_two_jobs() {
    let this = std::env::current_exe().unwrap();
    // In the same file system, as a hard link needs.
    let directory = tempfile::tempdir_in(this.parent().unwrap()).unwrap();
    let other = directory.path().join("other-program");
    std::fs::hard_link(&this, &other).unwrap();
    let port = FreePort::reserve();
    let start = |program: &std::path::Path, rank: &str, more: &[(&str, &str)]| {
        let mut command = std::process::Command::new(program);
        command.env("RANK", rank).env("WORLD_SIZE", "2").envs(more.iter().copied());
        command.env("MASTER_ADDR", "127.0.0.1").env("MASTER_PORT", port.port.to_string());
        Process::start_plain(command, "as_a_rank")
    };
    let mut first = start(&this, "0", &[]);
    let refused = start(&other, "1", &[]).hear();
    for part in ["another job", "program other-program", "BURN_DDP_JOB_ID", "MASTER_PORT"] {
        assert!(refused.contains(part), "{refused}");
    }
    assert_eq!(start(&this, "1", &[]).hear(), "joined as rank 1", "the job was not disturbed");
    assert_eq!(first.hear(), "joined as rank 0");

    let one = [("BURN_DDP_JOB_ID", "mixed")];
    let mut first = start(&this, "0", &one);
    assert_eq!(start(&other, "1", &one).hear(), "joined as rank 1");
    assert_eq!(first.hear(), "joined as rank 0");
}

/// The ranks of the second job find their places taken: the ranks of two jobs cannot mix unnoticed.
#[test]
fn a_job_started_twice_ends_with_errors_and_leaves_the_first_alone() {
    const TEST: &str = "a_job_started_twice_ends_with_errors_and_leaves_the_first_alone";
    if let Some((_, env)) = role() {
        match World::join(&env, options()) {
            Err(error) => say(&error.to_string()),
            Ok(world) => {
                say(&format!("joined as rank {}", world.rank()));
                await_go();
                world.group().unwrap().barrier().unwrap();
                say("done");
            }
        }
        return;
    }
    let port = FreePort::reserve();
    let start = |rank| Process::start(TEST, "rank", &rank_of(meeting_at(&port), rank, 2));
    let mut first = [start(0), start(1)];
    first.iter_mut().enumerate().for_each(|(rank, it)| assert_eq!(it.hear(), format!("joined as rank {rank}")));
    let mut second = [start(0), start(1)];
    let said = second.each_mut().map(Process::hear);
    let expected = [
        vec!["another job, or what is left of an earlier one, listens there".to_owned()],
        vec![
            "rank 1 was started twice: by rank 1 (host ".to_owned(),
            format!("pid {})", first[1].id()),
            format!("and by process {} on ", second[1].id()),
        ],
    ];
    for (said, parts) in said.iter().zip(expected) {
        assert!(parts.iter().all(|part| said.contains(part)), "{parts:?}: {said}");
    }
    first.iter_mut().for_each(Process::go);
    first.iter_mut().for_each(|rank| assert_eq!(rank.hear(), "done"));
}

#[test]
fn ranks_with_the_secret_meet_and_one_without_does_not() {
    let file = SecretFile::new();
    let store = StoreServer::bind("127.0.0.1:0", &JobKey::new(&file.secret, JOB, 2)).unwrap();
    let rank = |rank| LaunchEnv { restart_count: 2, ..file.told(rank_at(&store, rank, 3)) };
    work_together(joined((0..3).map(rank).collect()));

    let other = SecretFile::new();
    let begin = Instant::now();
    for stranger in [other.told(rank(0)), LaunchEnv { secret_file: None, trust_network: true, ..rank(0) }] {
        says(&errors(vec![stranger], &options())[0], &["rank 0", "another secret"]);
    }
    says(&errors(vec![LaunchEnv { restart_count: 1, ..rank(0) }], &options())[0], &["another job", "restart 1"]);
    assert!(begin.elapsed() < AT_ONCE);
}

#[test]
fn rank_0_says_that_it_refused_a_wrong_secret() {
    let (file, other, port) = (SecretFile::new(), SecretFile::new(), FreePort::reserve());
    let rank = |rank| rank_of(meeting_at(&port), rank, 2);
    let errors = errors(vec![file.told(rank(0)), other.told(rank(1))], &join_within(2.0));
    says(
        &errors[0],
        &["missing: rank 1", "its store refused 1 connection with another secret, the last from 127.0.0.1"],
    );
    says(&errors[1], &["refused rank 1", "another secret"]);
}

#[test]
fn where_strangers_could_come_a_secret_is_asked_for() {
    let store = launcher_store();
    let far = Meeting::Rank0 { host: "192.0.2.1".into(), port: 29500 };
    for env in [rank_at(&store, 0, 2), LaunchEnv { local_world_size: 1, ..rank_of(far, 0, 2) }] {
        let error = errors(vec![LaunchEnv { trust_network: false, ..env }], &options()).remove(0);
        says(&error, &["burnrun secret FILE", "BURN_DDP_SECRET_FILE", "BURN_DDP_TRUST_NETWORK=1"]);
    }
}

#[test]
#[cfg(target_os = "linux")]
fn ranks_on_one_machine_need_no_port_and_no_secret() {
    let unique = format!("test {} local", std::process::id());
    let at = Meeting::Local { name: unique.clone() };
    let local = |at: &Meeting, rank| LaunchEnv { trust_network: false, ..rank_of(at.clone(), rank, 3) };
    for _ in 0..2 {
        work_together(joined((0..3).map(|rank| local(&at, rank)).collect()));
    }
    // Ranks of one machine use a local socket, and the port only in its name: another program may have the port.
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = taken.local_addr().unwrap().port();
    for at in
        [Meeting::Rank0 { host: "localhost".into(), port }, Meeting::Rank0Above { host: "127.0.0.1".into(), port }]
    {
        work_together(joined((0..3).map(|rank| local(&at, rank)).collect()));
    }
    // Two jobs of the same name at once: the second gets an error.
    let _worlds = joined((0..3).map(|rank| local(&at, rank)).collect());
    says(&errors(vec![local(&at, 0)], &options())[0], &[&unique, "started twice"]);
    let far = LaunchEnv { local_world_size: 2, ..local(&at, 0) };
    says(&errors(vec![far], &options())[0], &[&unique, "1 of 3 run on other machines"]);
    let nobody = Meeting::Local { name: format!("{unique}, nobody there") };
    says(&errors(vec![local(&nobody, 1)], &join_within(0.3))[0], &["nobody there", "is rank 0 running there?"]);
}

#[test]
fn ranks_with_other_settings_are_told_before_the_first_step() {
    let config = |value: &str| WorldOptions { config: vec![("model".into(), value.into())], ..options() };
    let with = |options: [WorldOptions; 3]| {
        let store = launcher_store();
        let begin = Instant::now();
        let errors: Vec<Error> = std::thread::scope(|s| {
            let ranks: Vec<_> = options
                .into_iter()
                .enumerate()
                .map(|(rank, options)| {
                    let env = rank_at(&store, rank, 3);
                    s.spawn(move || World::join(&env, options).expect_err("no world"))
                })
                .collect();
            ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
        });
        assert!(begin.elapsed() < AT_ONCE, "{:?}", begin.elapsed());
        assert!(errors.iter().all(|error| *error == errors[0]), "all are told the same: {errors:?}");
        errors.into_iter().next().unwrap()
    };
    let error = with([config("resnet18"), config("resnet18"), config("resnet34")]);
    says(&error, &["disagree about model", "rank 0 (host", "has resnet18", "rank 2 (host", "has resnet34"]);
    let error = with([options(), WorldOptions { timeout: Duration::from_secs(7), ..options() }, options()]);
    says(&error, &["disagree about timeout", "rank 1 (host", "has 7s"]);
}

#[test]
fn ranks_that_wait_for_one_that_ended_are_told_at_once() {
    let job = JobKey::trusting_network(JOB, 0);
    let store = launcher_store();
    let launcher = StoreClient::connect(&store.local_addr().to_string(), &job, AT_ONCE).unwrap();
    let cause = "rank 2 ended before it joined: exit code 3";
    let early = std::thread::scope(|s| {
        let waiting: Vec<_> = [0, 1]
            .map(|rank| {
                let env = rank_at(&store, rank, 3);
                s.spawn(move || World::join(&env, options()).expect_err("no world"))
            })
            .into();
        // Until both ranks wait.
        let begin = Instant::now();
        while launcher.keys(&format!("{JOB}/0/rank/")).unwrap().len() < 2 {
            assert!(begin.elapsed() < AT_ONCE);
            std::thread::sleep(Duration::from_millis(5));
        }
        let begin = Instant::now();
        fail_join(&launcher, &job, &[2], cause).unwrap();
        let errors: Vec<Error> = waiting.into_iter().map(|rank| rank.join().unwrap()).collect();
        assert!(begin.elapsed() < Duration::from_secs(2), "{:?}", begin.elapsed());
        errors
    });
    says(&early[0], &[cause, "came: rank 0 (host", ", rank 1 (host", "missing: rank 2"]);
    assert_eq!(early[0], early[1]);
    // A rank that joins later gets the same error, and a second `fail_join` changes nothing.
    fail_join(&launcher, &job, &[1], "another cause").unwrap();
    assert_eq!(errors(vec![rank_at(&store, 2, 3)], &options())[0], early[0]);
}

#[test]
fn ranks_that_have_joined_do_not_notice_a_failed_join() {
    let job = JobKey::trusting_network(JOB, 0);
    let store = launcher_store();
    let worlds = joined((0..2).map(|rank| rank_at(&store, rank, 2)).collect());
    let launcher = StoreClient::connect(&store.local_addr().to_string(), &job, AT_ONCE).unwrap();
    fail_join(&launcher, &job, &[1], "too late").unwrap();
    work_together(worlds);
    // A later join of the same job gets the error, since it would wait for that rank in vain.
    says(&errors(vec![rank_at(&store, 0, 2)], &options())[0], &["too late"]);
}

#[test]
fn ranks_listen_on_the_interface_they_are_told() {
    let store = launcher_store();
    let on = |rank, interface: &str| LaunchEnv { interface: Some(interface.into()), ..rank_at(&store, rank, 2) };
    work_together(joined(vec![on(0, "127.0.0.2"), on(1, "lo")]));
    let error = errors(vec![on(0, "no-such0")], &options()).remove(0);
    assert!(matches!(error, Error::Environment { .. }), "{error:?}");
    says(&error, &["no-such0", "it has lo (127.0.0.1)"]);
}

#[test]
fn every_rank_knows_the_machines_and_a_host_can_be_cut_into_several() {
    let store = launcher_store();
    let on = |rank, machine: &str| LaunchEnv { machine: Some(machine.into()), ..rank_at(&store, rank, 4) };
    let envs = vec![on(0, "left"), on(1, "right"), on(2, "left"), on(3, "right")];
    let worlds = join_all(envs, &WorldOptions { engine: None, ..options() });
    std::thread::scope(|scope| {
        for world in worlds {
            scope.spawn(move || {
                let world = world.unwrap();
                let machines = world.machines();
                assert_eq!(
                    (machines.count(), machines.ranks_of(0), machines.ranks_of(1)),
                    (2, &[0, 2][..], &[1, 3][..])
                );
                assert_eq!(world.engine(), "shm+tcp", "memory is shared inside machines alone");
                let group = world.group().unwrap();
                let local = group.split(Some(machines.machine_of(world.rank()) as u64), 0).unwrap().unwrap();
                assert_eq!(local.ranks(), machines.ranks_of(world.rank() % 2));
                group.barrier().unwrap();
            });
        }
    });
}

/// Listens at `port` like a store of another version of the protocol, for one client.
fn store_of_another_version(port: u16) -> std::thread::JoinHandle<()> {
    let listener = TcpListener::bind(("127.0.0.1", port)).unwrap();
    std::thread::spawn(move || {
        let mut client = listener.accept().unwrap().0;
        // Magic, version, role.
        let mut greeting = [0; 48];
        greeting[..11].copy_from_slice(b"burn-ddp\x4d\0\x01");
        client.write_all(&greeting).unwrap();
        // Waits until the client has closed the connection.
        let _ = client.read(&mut [0]);
    })
}

#[test]
fn another_version_is_named_at_once_and_behind_a_port_of_many_at_the_deadline() {
    let port = FreePort::reserve();
    let store = store_of_another_version(port.port);
    let begin = Instant::now();
    let far = |env: LaunchEnv| LaunchEnv { local_world_size: 1, local_rank: 0, ..env };
    let launcher = Meeting::Launcher { host: "127.0.0.1".into(), port: port.port };
    let error = World::join(&far(rank_of(launcher, 1, 2)), options()).unwrap_err();
    says(&error, &[", 77 there: all ranks and the launcher must be built with the same burn-ddp"]);
    assert!(begin.elapsed() < AT_ONCE * 3, "{:?}", begin.elapsed());
    store.join().unwrap();

    let store = store_of_another_version(port.port);
    let above = Meeting::Rank0Above { host: "127.0.0.1".into(), port: port.port - 3 };
    let env = LaunchEnv { local_world_size: 2, ..rank_of(above, 1, 2) };
    let error = World::join(&env, join_within(1.0)).unwrap_err();
    // The other ports are closed, or belong to other programs on this machine; none gives a better reason.
    let text = error.to_string();
    assert!(text.contains(" there: all ranks") || text.contains("of another job"), "{text}");
    store.join().unwrap();
}

/// A link-local address of this machine, with its link.
fn link_local() -> String {
    let table = std::fs::read_to_string("/proc/net/if_inet6").unwrap();
    let row = table.lines().find(|row| row.starts_with("fe80")).expect("an interface with a link-local address");
    let (digits, link) = (&row[..32], row.rsplit(' ').next().unwrap());
    let groups: Vec<&str> = (0..8).map(|nth| &digits[4 * nth..4 * nth + 4]).collect();
    format!("{}%{link}", groups.join(":"))
}

#[test]
#[ignore = "needs a network interface with a link-local IPv6 address"]
fn ranks_meet_at_an_address_of_a_link() {
    let port = FreePort::reserve();
    let meeting = || Meeting::Rank0 { host: link_local(), port: port.port };
    work_together(joined((0..3).map(|rank| rank_of(meeting(), rank, 3)).collect()));
    let above = || Meeting::Rank0Above { host: link_local(), port: port.port };
    work_together(joined((0..2).map(|rank| rank_of(above(), rank, 2)).collect()));
}

#[test]
fn ranks_meet_on_the_other_kind_of_loopback_and_on_all_addresses() {
    if std::net::TcpListener::bind("[::1]:0").is_err() {
        return eprintln!("skipped: no IPv6 here");
    }
    for (bind, host) in [("::1", "::1"), ("::", "::1"), ("::", "127.0.0.1")] {
        let port = FreePort::reserve();
        let meeting = || Meeting::Rank0 { host: host.into(), port: port.port };
        let env = |rank| LaunchEnv { bind: Some(bind.into()), ..rank_of(meeting(), rank, 2) };
        work_together(joined((0..2).map(env).collect()));
    }
}

#[test]
fn a_rank_that_dies_before_all_have_come_is_named_within_seconds() {
    const TEST: &str = "a_rank_that_dies_before_all_have_come_is_named_within_seconds";
    if let Some((_, env)) = role() {
        say("joins");
        let world = World::join(&env, options());
        return drop(world);
    }
    let port = FreePort::reserve();
    let env = |rank| rank_of(meeting_at(&port), rank, 4);
    // Ranks 0 and 2 are threads, rank 1 is a process, and rank 3 never comes.
    std::thread::scope(|s| {
        let waiting = [0, 2].map(|rank| {
            let env = env(rank);
            s.spawn(move || (World::join(&env, options()).expect_err("rank 3 never comes"), Instant::now()))
        });
        let mut dies = Process::start(TEST, "dies", &env(1));
        assert_eq!(dies.hear(), "joins");
        let job = JobKey::trusting_network(JOB, 0);
        let store = StoreClient::connect(&format!("127.0.0.1:{}", port.port), &job, options().join_timeout).unwrap();
        let begin = Instant::now();
        while store.add("test/0/arrived", 0).unwrap() < 3 {
            assert!(begin.elapsed() < options().join_timeout, "three ranks do not come");
            std::thread::sleep(Duration::from_millis(5));
        }
        dies.kill();
        let died = Instant::now();
        for rank in waiting {
            let (error, at) = rank.join().unwrap();
            says(&error, &["rank 1 (host ", "ended, or lost its connection", "missing: rank 1"]);
            let waited = at.saturating_duration_since(died);
            assert!(waited < options().join_timeout / 2, "{waited:?}: {error}");
        }
    });
}

#[test]
fn a_job_for_which_no_port_is_free_says_which_it_tried() {
    const PORTS: u16 = 64;
    let all = |base: u16| (1..=PORTS).map(|above| TcpListener::bind(("127.0.0.1", base + above))).collect();
    let begin = Instant::now();
    let (base, _taken) = loop {
        let base = FreePort::reserve().port;
        let taken: Result<Vec<TcpListener>, _> = if base < u16::MAX - PORTS { all(base) } else { continue };
        if let Ok(taken) = taken {
            break (base, taken);
        }
        assert!(begin.elapsed() < options().join_timeout, "no {PORTS} free ports in a row");
    };
    let env = rank_of(Meeting::Rank0Above { host: "127.0.0.1".into(), port: base }, 0, 2);
    let error = World::join(&env, options()).expect_err("no port is free");
    let ports = format!("127.0.0.1, ports {}-{}", base + 1, base + PORTS);
    says(&error, &["rank 0 cannot host the store", &ports, "in use", "choose another port for MASTER_PORT"]);
}
