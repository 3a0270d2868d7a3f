//! Ranks that join over TCP, as threads or as processes.

// Each test binary uses only some of these functions.
#![allow(dead_code, unreachable_pub, missing_docs)]

mod free_port;
pub mod recording_relay;

use std::io::{BufRead, BufReader, Write};
use std::net::SocketAddr;
use std::process::{Child, ChildStdout, Command, ExitStatus, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use burn_ddp_comm::{EngineChoice, JobKey, LaunchEnv, Meeting, Result, Secret, StoreServer, World, WorldOptions};
pub use free_port::FreePort;

/// Long enough never to pass in a test that goes well.
pub const PATIENCE: Duration = Duration::from_secs(60);

/// The id of the jobs of these tests.
pub const JOB: &str = "test";

/// Number of machines between which ranks are divided in blocks, to run these tests over the engine of groups that span
/// machines: `BURN_DDP_TEST_MACHINES=2 cargo test --test faults`. If not set, all ranks are on one machine and use tcp.
fn machines() -> Option<usize> {
    Some(std::env::var("BURN_DDP_TEST_MACHINES").ok()?.parse().expect("BURN_DDP_TEST_MACHINES is a number"))
}

/// Runs all tests of this binary again, with their ranks on two machines: over the engine of groups that span machines.
pub fn again_on_two_machines() {
    if machines().is_some() {
        return;
    }
    let this = Command::new(std::env::current_exe().unwrap())
        .args(["--skip", "on_two_machines"])
        .env("BURN_DDP_TEST_MACHINES", "2")
        .output()
        .unwrap();
    let (out, err) = (String::from_utf8_lossy(&this.stdout), String::from_utf8_lossy(&this.stderr));
    assert!(this.status.success(), "{out}\n{err}");
}

pub fn options() -> WorldOptions {
    WorldOptions {
        timeout: PATIENCE,
        join_timeout: PATIENCE,
        engine: if machines().is_none() { Some(EngineChoice::Tcp) } else { None },
        ..WorldOptions::default()
    }
}

/// A rank on this machine, of a job that meets at `store`.
pub fn rank_at(store: &StoreServer, rank: usize, world_size: usize) -> LaunchEnv {
    rank_of(Meeting::Launcher { host: "127.0.0.1".into(), port: store.local_addr().port() }, rank, world_size)
}

pub fn rank_of(meeting: Meeting, rank: usize, world_size: usize) -> LaunchEnv {
    let machine = machines().map(|machines| (rank * machines / world_size).to_string());
    LaunchEnv { trust_network: true, machine, ..LaunchEnv::new(rank, world_size, meeting, JOB) }
}

pub fn launcher_store() -> StoreServer {
    StoreServer::bind("127.0.0.1:0", &JobKey::trusting_network(JOB, 0)).unwrap()
}

/// A secret in a file, until it is dropped.
pub struct SecretFile {
    pub secret: Secret,
    directory: tempfile::TempDir,
}

impl SecretFile {
    pub fn new() -> SecretFile {
        let directory = tempfile::tempdir().unwrap();
        let secret = Secret::generate().unwrap();
        secret.write_new(&directory.path().join("secret")).unwrap();
        SecretFile { secret, directory }
    }

    pub fn told(&self, env: LaunchEnv) -> LaunchEnv {
        LaunchEnv { secret_file: Some(self.directory.path().join("secret")), trust_network: false, ..env }
    }
}

/// A meeting point: rank 0 hosts the store at `port`.
pub fn meeting_at(port: &FreePort) -> Meeting {
    Meeting::Rank0 { host: "localhost".into(), port: port.port }
}

/// Joins with all of `envs` at the same time, each on a thread. Returns their results in order.
pub fn join_all(envs: Vec<LaunchEnv>, options: &WorldOptions) -> Vec<Result<World>> {
    thread::scope(|s| {
        let joining: Vec<_> = envs.into_iter().map(|env| s.spawn(move || World::join(&env, options.clone()))).collect();
        joining.into_iter().map(|rank| rank.join().unwrap()).collect()
    })
}

/// A world over TCP.
pub fn world(n: usize, options: &WorldOptions) -> Vec<World> {
    let store = launcher_store();
    let envs = (0..n).map(|rank| rank_at(&store, rank, n)).collect();
    join_all(envs, options).into_iter().map(|world| world.unwrap()).collect()
}

/// Runs `rank_main` on each rank of a world over TCP.
pub fn on_tcp<R: Send>(n: usize, rank_main: impl Fn(World) -> R + Sync) -> Vec<R> {
    on_world(world(n, &options()), rank_main)
}

/// Runs `rank_main` on each rank of `world`.
pub fn on_world<R: Send>(world: Vec<World>, rank_main: impl Fn(World) -> R + Sync) -> Vec<R> {
    thread::scope(|s| {
        let rank_main = &rank_main;
        let ranks: Vec<_> = world.into_iter().map(|world| s.spawn(move || rank_main(world))).collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    })
}

/// The addresses this process listens on, all tests' together.
#[cfg(target_os = "linux")]
pub fn listening() -> Vec<SocketAddr> {
    let mine: Vec<String> = std::fs::read_dir("/proc/self/fd")
        .unwrap()
        .filter_map(|fd| Some(std::fs::read_link(fd.ok()?.path()).ok()?.to_string_lossy().into_owned()))
        .collect();
    let table = std::fs::read_to_string("/proc/self/net/tcp").unwrap();
    let listeners = table.lines().skip(1).map(|line| line.split_whitespace().collect::<Vec<_>>()).filter(|columns| {
        const LISTEN: &str = "0A";
        columns[3] == LISTEN && mine.contains(&format!("socket:[{}]", columns[9]))
    });
    listeners
        .map(|columns| {
            let (_, port) = columns[1].split_once(':').unwrap();
            SocketAddr::from(([127, 0, 0, 1], u16::from_str_radix(port, 16).unwrap()))
        })
        .collect()
}

/// Ends of connections over TCP that this process has.
#[cfg(target_os = "linux")]
pub fn connections() -> usize {
    let open = std::fs::read_dir("/proc/self/fd").unwrap();
    let mine: std::collections::HashSet<String> =
        open.filter_map(|fd| Some(std::fs::read_link(fd.ok()?.path()).ok()?.to_string_lossy().into_owned())).collect();
    let table = std::fs::read_to_string("/proc/self/net/tcp").unwrap();
    let columns = table.lines().skip(1).map(|line| line.split_whitespace().collect::<Vec<_>>());
    const ESTABLISHED: &str = "01";
    columns.filter(|row| row[3] == ESTABLISHED && mine.contains(&format!("socket:[{}]", row[9]))).count()
}

/// In a child: waits until this process has this many connections over TCP.
#[cfg(target_os = "linux")]
pub fn await_connections(wanted: usize) {
    let begin = Instant::now();
    while connections() != wanted {
        assert!(begin.elapsed() < PATIENCE, "{} connections", connections());
        thread::sleep(Duration::from_millis(5));
    }
}

/// Worlds of this process's threads, by rank, on the machines given.
pub fn placed(machines: &[usize], options: &WorldOptions) -> Vec<World> {
    let store = launcher_store();
    let at = |(rank, machine): (usize, &usize)| LaunchEnv {
        machine: Some(machine.to_string()),
        ..rank_at(&store, rank, machines.len())
    };
    let envs = machines.iter().enumerate().map(at).collect();
    join_all(envs, &WorldOptions { engine: None, ..options.clone() }).into_iter().map(|world| world.unwrap()).collect()
}

/// This test binary again, as one rank of a job: runs the test `test`, which finds `ROLE` set to `role`.
pub struct Process {
    child: Child,
    lines: BufReader<ChildStdout>,
}

/// Set for ranks that are processes.
pub const ROLE: &str = "BURN_DDP_TEST_ROLE";

/// Prefix of the lines that a child writes for the test, since libtest writes lines of its own.
const MARK: &str = "@rank ";

impl Process {
    pub fn start(test: &str, role: &str, env: &LaunchEnv) -> Process {
        Process::start_by(Command::new(std::env::current_exe().unwrap()), test, role, env)
    }

    /// Starts a rank by a command that runs this binary with the arguments appended to it.
    pub fn start_by(mut command: Command, test: &str, role: &str, env: &LaunchEnv) -> Process {
        command.env(ROLE, role).envs(env.variables());
        Process::start_plain(command, test)
    }

    /// Like [`start_by`](Self::start_by), with a command that has its rank's variables already.
    pub fn start_plain(mut command: Command, test: &str) -> Process {
        let mut child = command
            .args(["--exact", test, "--nocapture", "--test-threads=1", "--include-ignored"])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap());
        Process { child, lines }
    }

    pub fn id(&self) -> u32 {
        self.child.id()
    }

    /// The next line the rank [says](say); panics if it ended without one.
    pub fn hear(&mut self) -> String {
        let mut line = String::new();
        loop {
            line.clear();
            let n = self.lines.read_line(&mut line).unwrap();
            assert!(n > 0, "process {} ended without saying what was expected", self.child.id());
            if let Some((_, said)) = line.split_once(MARK) {
                return said.trim_end().to_owned();
            }
        }
    }

    /// Lets the rank go on that [waits](await_go).
    pub fn go(&mut self) {
        self.child.stdin.as_mut().unwrap().write_all(b"go\n").unwrap();
    }

    pub fn signal(&self, signal: rustix::process::Signal) {
        let pid = rustix::process::Pid::from_raw(self.child.id() as i32).unwrap();
        rustix::process::kill_process(pid, signal).unwrap();
    }

    pub fn kill(&mut self) {
        self.child.kill().unwrap();
    }

    /// Waits until the process has ended.
    pub fn end(&mut self) -> ExitStatus {
        let deadline = Instant::now() + PATIENCE;
        while Instant::now() < deadline {
            if let Some(status) = self.child.try_wait().unwrap() {
                return status;
            }
            thread::sleep(Duration::from_millis(2));
        }
        panic!("process {} does not end", self.child.id());
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// In a child: its role, and its rank's variables. `None` in the test itself.
pub fn role() -> Option<(String, LaunchEnv)> {
    let role = std::env::var(ROLE).ok()?;
    Some((role, LaunchEnv::detect().unwrap().expect("a child is told its rank")))
}

/// In a child: sends a line to the test.
pub fn say(text: &str) {
    let mut out = std::io::stdout().lock();
    writeln!(out, "\n{MARK}{}", text.replace('\n', " ")).unwrap();
    out.flush().unwrap();
}

/// In a child: waits until the test says [`go`](Process::go).
pub fn await_go() {
    let mut line = String::new();
    std::io::stdin().read_line(&mut line).unwrap();
    assert_eq!(line, "go\n");
}
