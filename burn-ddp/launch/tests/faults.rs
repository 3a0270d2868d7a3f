//! Faults of the system around a rank: no job hangs, and the culprit and the cause are named. This test program
//! launches itself. Tests that need rights which this process lacks are skipped, with a line that says so.
#![cfg(target_os = "linux")]

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use burn_ddp_comm::{LaunchEnv, World, WorldOptions};
use burn_ddp_launch::{Launcher, Outcome, RankExit};
use rustix::process::{Resource, Rlimit, Signal, getpid, kill_process, setrlimit};

const AS_A_RANK: [&str; 4] = ["--exact", "as_a_rank", "--ignored", "--nocapture"];
/// Longest time from a fault to the end of the job: far below the deadline of a call, far above what it takes.
const LIMIT: Duration = Duration::from_secs(60);

/// Three ranks, of which rank 1 meets the fault; `place` is a control group or a directory that it needs.
fn launch(fault: &str, place: &Path) -> Outcome {
    launch_with(Duration::from_secs(4), fault, place)
}

fn launch_with(peer_timeout: Duration, fault: &str, place: &Path) -> Outcome {
    Launcher::new(std::env::current_exe().unwrap(), AS_A_RANK)
        .env("FAULT", fault)
        .env("PLACE", place)
        .env("RUST_BACKTRACE", "0")
        .env("BURN_DDP_TIMEOUT", "300")
        .env("BURN_DDP_HEARTBEAT", "0.5")
        .join_timeout(Duration::from_secs(300))
        .peer_timeout(peer_timeout)
        .nproc(3)
        .run()
        .unwrap()
}

/// The program of a launched rank.
#[test]
#[ignore = "started by the other tests"]
fn as_a_rank() {
    let (fault, place) = (std::env::var("FAULT").unwrap(), PathBuf::from(std::env::var("PLACE").unwrap()));
    let env = LaunchEnv::detect().unwrap().expect("the launcher's variables");
    let suffers = |when: &str| {
        if env.rank == 1 && fault == when {
            suffer(&fault, &place)
        }
    };
    suffers("no descriptors to join");
    let result = World::join(&env, WorldOptions::from_env().unwrap()).and_then(|world| {
        suffers("no descriptors to connect");
        let group = world.group()?;
        group.barrier()?;
        for fault in ["stopped", "frozen", "frozen for a while", "out of memory"] {
            suffers(fault);
        }
        group.barrier()?;
        Ok(())
    });
    if fault == "frozen for a while" {
        result.unwrap();
        return;
    }
    let error = result.expect_err("the fault has no effect").to_string();
    eprintln!("{error}");
    if env.rank != 1 {
        assert!(error.contains("rank 1"), "{error}");
        fs::write(place.join(format!("error-{}", env.rank)), error).ok();
    }
    std::process::exit(3);
}

fn suffer(fault: &str, place: &Path) {
    match fault {
        "stopped" => {
            kill_process(getpid(), Signal::STOP).unwrap();
            // Another thread of this process may be the first to stop.
            std::thread::sleep(Duration::from_secs(1));
        }
        "frozen" | "frozen for a while" => {
            let group = place.join("group");
            fs::write(group.join("cgroup.procs"), "0").unwrap();
            let freezer = Freezer::of(&group);
            fs::write(group.join(freezer.file), freezer.frozen).unwrap();
        }
        "out of memory" => {
            fs::write(place.join("cgroup.procs"), "0").unwrap();
            let bytes = std::hint::black_box(vec![1_u8; 256 << 20]);
            unreachable!("{} bytes in a group of 64 MiB", bytes.len());
        }
        _ => {
            let open = fs::read_dir("/proc/self/fd").unwrap().count() as u64;
            // The hard limit, too: a rank that joins raises its soft one.
            let limit = Some(open.min(16));
            setrlimit(Resource::Nofile, Rlimit { current: limit, maximum: limit }).unwrap();
            // Numbers below the limit that are free.
            while let Ok(file) = fs::File::open("/dev/null") {
                std::mem::forget(file);
            }
        }
    }
}

/// A control group of its own for this test; removed at the end.
struct Group(PathBuf);

impl Group {
    /// `None`, and a line that says so, if it cannot be made. `hierarchy` is a controller of version 1, or
    /// `unified`; `name` tells the groups of tests that run side by side apart.
    fn new(hierarchy: &str, name: &str) -> Option<Self> {
        let root = Path::new("/sys/fs/cgroup");
        // Where there is no version 1, version 2 is mounted alone.
        let is_alone = hierarchy == "unified" && root.join("cgroup.procs").exists();
        let root = if is_alone { root.to_owned() } else { root.join(hierarchy) };
        let path = root.join(format!("burn-ddp-{name}-{}", std::process::id()));
        match fs::create_dir(&path) {
            Ok(()) => Some(Self(path)),
            Err(error) => {
                println!("skipped: no control group at {}: {error}", path.display());
                None
            }
        }
    }

    fn thaw(&self) {
        let freezer = Freezer::of(&self.0);
        fs::write(self.0.join(freezer.file), freezer.thawed).unwrap();
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        let gone = Instant::now() + Duration::from_secs(10);
        while fs::remove_dir(&self.0).is_err() && Instant::now() < gone {
            std::thread::sleep(Duration::from_millis(20));
        }
    }
}

/// File of a control group by which its processes are frozen.
struct Freezer {
    file: &'static str,
    frozen: &'static str,
    thawed: &'static str,
}

impl Freezer {
    fn of(group: &Path) -> Self {
        match group.join("cgroup.freeze").exists() {
            true => Self { file: "cgroup.freeze", frozen: "1", thawed: "0" },
            false => Self { file: "freezer.state", frozen: "FROZEN", thawed: "THAWED" },
        }
    }
}

fn poll_until(what: &str, there: impl Fn() -> bool) {
    let started = Instant::now();
    while !there() {
        assert!(started.elapsed() < LIMIT, "gave up waiting: {what}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// The other ranks' errors about rank 1, without numbers of seconds.
fn said_of_rank_1(place: &Path) -> String {
    let error = fs::read_to_string(place.join("error-0")).unwrap();
    assert!(error.contains("rank 1") && error.contains("its process is stopped"), "{error}");
    let about = error.split(" silent for ").nth(1).unwrap();
    about.split_once(" s, ").unwrap().1.split(';').next().unwrap().to_owned()
}

#[test]
fn a_frozen_rank_is_named_like_a_stopped_one() {
    let stopped = tempfile::tempdir().unwrap();
    std::thread::scope(|scope| {
        let job = scope.spawn(|| launch("stopped", stopped.path()));
        let said: Vec<_> = ["freezer", "unified"].map(|hierarchy| scope.spawn(move || freeze(hierarchy))).into();
        let outcome = job.join().unwrap();
        assert!(outcome.exit_code != 0 && outcome.elapsed < LIMIT, "{outcome}");
        for said in said.into_iter().filter_map(|said| said.join().unwrap()) {
            assert_eq!(said, said_of_rank_1(stopped.path()));
        }
    });
}

/// The other ranks' errors about rank 1 in a job whose rank 1 is frozen by a control group of `hierarchy`.
fn freeze(hierarchy: &str) -> Option<String> {
    let group = Group::new(hierarchy, "frozen")?;
    let place = tempfile::tempdir().unwrap();
    std::os::unix::fs::symlink(&group.0, place.path().join("group")).unwrap();
    let outcome = std::thread::scope(|scope| {
        let outcome = scope.spawn(|| launch("frozen", place.path()));
        let has_error = |rank: usize| place.path().join(format!("error-{rank}")).exists();
        poll_until("the others wait for a frozen rank", || has_error(0) && has_error(2));
        // In control groups of version 1, not even SIGKILL ends a frozen process.
        group.thaw();
        outcome.join().unwrap()
    });
    assert!(outcome.exit_code != 0 && outcome.elapsed < LIMIT, "{hierarchy}: {outcome}");
    assert!(outcome.to_string().contains("rank 1"), "{hierarchy}: {outcome}");
    Some(said_of_rank_1(place.path()))
}

#[test]
fn a_rank_that_thaws_in_time_goes_on() {
    for hierarchy in ["freezer", "unified"] {
        let Some(group) = Group::new(hierarchy, "thawed") else { continue };
        let place = tempfile::tempdir().unwrap();
        std::os::unix::fs::symlink(&group.0, place.path().join("group")).unwrap();
        let outcome = std::thread::scope(|scope| {
            let outcome = scope.spawn(|| launch_with(Duration::from_secs(120), "frozen for a while", place.path()));
            let frozen = || {
                let state = fs::read_to_string(group.0.join("freezer.state")).unwrap_or_default();
                let events = fs::read_to_string(group.0.join("cgroup.events")).unwrap_or_default();
                state.trim() == "FROZEN" || events.contains("frozen 1")
            };
            poll_until("a frozen rank", frozen);
            // For longer than a heartbeat.
            std::thread::sleep(Duration::from_millis(700));
            group.thaw();
            outcome.join().unwrap()
        });
        assert_eq!(outcome.exit_code, 0, "{hierarchy}: {outcome}");
    }
}

#[test]
fn a_rank_that_the_kernel_kills_for_its_memory_is_the_cause() {
    let Some(group) = Group::new("memory", "memory") else { return };
    fs::write(group.0.join("memory.limit_in_bytes"), (64 << 20).to_string()).unwrap();
    let outcome = launch("out of memory", &group.0);
    let failure = outcome.failure.as_ref().unwrap();
    assert_eq!((failure.rank, failure.exit), (1, RankExit::Signal(9)), "{outcome}");
    assert!(outcome.to_string().contains("memory runs out"), "{outcome}");
    assert!(outcome.elapsed < LIMIT, "{outcome}");
}

#[test]
fn a_rank_without_free_descriptors_fails_and_says_so() {
    let dir = tempfile::tempdir().unwrap();
    for fault in ["no descriptors to join", "no descriptors to connect"] {
        let outcome = launch(fault, dir.path());
        let text = outcome.to_string();
        assert!(outcome.elapsed < LIMIT, "{fault}: {text}");
        let failure = outcome.failure.as_ref().unwrap();
        let codes: Vec<_> = outcome.also_failed.iter().map(|(_, exit)| *exit).collect();
        assert_eq!((failure.rank, failure.exit, &codes[..]), (1, RankExit::Code(3), &[failure.exit; 2][..]), "{text}");
        assert!(text.contains("open files"), "{fault}: {text}");
        assert!(outcome.stopped.is_empty(), "{fault}: nobody hangs: {text}");
    }
}

#[test]
fn a_full_disk_for_logs_is_reported_and_does_not_end_the_job() {
    let program = "head -c 300000 /dev/zero | tr '\\0' x; echo; exit $CODE";
    let mount = r#"mount -t tmpfs -o size=64k none "$DIR" || exit 99; exec "$@""#;
    let dir = tempfile::tempdir().unwrap();
    for code in [0, 7] {
        let mut command = Command::new("unshare");
        command.args([
            "--mount",
            "sh",
            "-c",
            mount,
            "sh",
            env!("CARGO_BIN_EXE_burnrun"),
            "-n",
            "1",
            "--redirects",
            "3",
        ]);
        command.arg("--log-dir").arg(dir.path()).args(["sh", "-c", program]);
        let ended = command.env("DIR", dir.path()).env("CODE", code.to_string()).output().unwrap();
        let stderr = String::from_utf8_lossy(&ended.stderr);
        if ended.status.code() == Some(99) || stderr.starts_with("unshare: ") {
            println!("skipped: a full disk needs the right to mount one: {stderr}");
            return;
        }
        assert_eq!(ended.status.code(), Some(code), "{stderr}");
        assert!(stderr.contains("the logs of local rank 0 are incomplete"), "{stderr}");
        assert!(stderr.contains("No space left"), "{stderr}");
    }
}
