//! A rank whose program does not begin does not block the launcher.
#![cfg(all(feature = "cli", target_os = "linux"))]

#[allow(unreachable_pub, reason = "one module for several test files")]
mod common;
#[path = "../../comm/tests/common/free_port.rs"]
mod free_port;

use std::fs::{self, File};
use std::os::fd::AsRawFd;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use common::{Job, assert_gone, burnrun, child_of, poll_until};
use free_port::FreePort;
use rustix::process::Signal;

/// Far below the 45 seconds for which the kernel lets a lease delay a program.
const LIMIT: Duration = Duration::from_secs(30);
/// Of Linux; `libc` lacks it.
const F_SETSIG: libc::c_int = 10;

/// A program that does not begin, as on a file system that does not answer: the kernel first asks this process to give
/// its lease of the file back.
struct Leased {
    path: PathBuf,
    _lease: File,
}

impl Leased {
    /// `None`, and a line that says so, if the system has no leases.
    fn new(directory: &Path) -> Option<Self> {
        let path = directory.join("program");
        fs::copy("/bin/true", &path).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
        let lease = File::open(&path).unwrap();
        // SAFETY: both calls take integers, and the descriptor is open.
        let taken = unsafe {
            // Not SIGIO, which would end this process.
            libc::fcntl(lease.as_raw_fd(), F_SETSIG, libc::SIGURG);
            libc::fcntl(lease.as_raw_fd(), libc::F_SETLEASE, libc::F_WRLCK)
        };
        if taken != 0 {
            println!("skipped: no lease of a file: {}", std::io::Error::last_os_error());
            return None;
        }
        Some(Self { path, _lease: lease })
    }
}

#[test]
fn an_interrupt_ends_a_launcher_whose_rank_has_not_begun() {
    for (interrupts, grace) in [(1, "0.2"), (2, "600")] {
        let dir = tempfile::tempdir().unwrap();
        let Some(program) = Leased::new(dir.path()) else { return };
        let job = Job::start(burnrun(["-n", "2", "--grace", grace]).arg(&program.path));
        let name = program.path.to_str().unwrap();
        let rank = poll_until("a rank is started", || child_of(job.pid(), name));
        for _ in 0..interrupts {
            job.signal(Signal::INT);
            // The kernel merges signals of one kind that come at the same moment.
            std::thread::sleep(Duration::from_millis(100));
        }
        let interrupted = Instant::now();
        let finished = job.finish();
        assert_eq!(finished.code(), 130, "{}", finished.stderr);
        assert!(interrupted.elapsed() < LIMIT, "{:?}: {}", interrupted.elapsed(), finished.stderr);
        assert!(finished.stderr.contains("has not begun the program of its rank"), "{}", finished.stderr);
        assert_gone(rank.as_raw_nonzero().get() as u32);
    }
}

#[test]
fn an_interrupt_of_another_machine_ends_a_launcher_whose_rank_has_not_begun() {
    let (dir, port) = (tempfile::tempdir().unwrap(), FreePort::reserve());
    let Some(program) = Leased::new(dir.path()) else { return };
    let secret = dir.path().join("secret");
    burn_ddp_comm::Secret::generate().unwrap().write_new(&secret).unwrap();
    let (name, port) = (program.path.to_str().unwrap(), port.port.to_string());
    let start = |node| {
        let mut command = burnrun(["--nnodes", "2", "--node-rank", node, "-n", "1", "--grace", "0.2"]);
        command.args(["--master-addr", "127.0.0.1", "--master-port", &port]).arg("--secret-file").arg(&secret);
        Job::start(command.arg(name))
    };
    let jobs = ["0", "1"].map(start);
    for job in &jobs {
        poll_until("a rank is started", || child_of(job.pid(), name));
    }
    let interrupted = Instant::now();
    jobs[1].signal(Signal::INT);
    for finished in jobs.map(Job::finish) {
        assert_eq!(finished.code(), 130, "{}", finished.stderr);
        assert!(finished.stderr.contains("has not begun the program of its rank"), "{}", finished.stderr);
    }
    assert!(interrupted.elapsed() < LIMIT, "{:?}", interrupted.elapsed());
}

#[test]
fn a_rank_that_does_not_begin_within_the_time_to_meet_is_killed() {
    let dir = tempfile::tempdir().unwrap();
    let Some(program) = Leased::new(dir.path()) else { return };
    let finished = common::run(burnrun(["-n", "1", "--join-timeout", "0.5"]).arg(&program.path));
    assert_eq!(finished.code(), 137, "{}", finished.stderr);
    assert!(finished.took < LIMIT, "{:?}: {}", finished.took, finished.stderr);
    assert!(finished.stderr.contains("has not begun the program of its rank"), "{}", finished.stderr);
}
