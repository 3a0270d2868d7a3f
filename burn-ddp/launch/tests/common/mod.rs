//! Running `burnrun` on shell scripts, with a deadline on every wait.
#![allow(dead_code, reason = "not every test file uses all of it")]

use std::ffi::OsStr;
use std::io::{BufRead, BufReader, Read};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStderr, ChildStdout, Command, ExitStatus, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::thread;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};

/// Longest wait of a test.
pub const DEADLINE: Duration = Duration::from_secs(60);

/// Variables of glibc's allocator that ranks get.
pub const ALLOCATOR: [&str; 3] = ["MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "MALLOC_ARENA_MAX"];

/// `burnrun`, without variables of this process that would change the test.
pub fn burnrun<S: AsRef<OsStr>>(args: impl IntoIterator<Item = S>) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_burnrun"));
    for (name, _) in std::env::vars().filter(|(name, _)| name.starts_with("BURNRUN_") || name.starts_with("BURN_DDP_"))
    {
        command.env_remove(name);
    }
    for name in ["RAYON_NUM_THREADS", "OMP_NUM_THREADS"].into_iter().chain(ALLOCATOR) {
        command.env_remove(name);
    }
    command.args(args);
    command
}

/// `burnrun -n nproc` and the options, on a shell script.
pub fn script(nproc: usize, options: &[&str], script: &str) -> Command {
    let mut command = burnrun(["-n", &nproc.to_string()]);
    command.args(options).args(["sh", "-c", script]);
    command
}

/// A running `burnrun`; killed when dropped.
pub struct Job {
    child: Child,
    lines: Receiver<String>,
    stderr: Receiver<Vec<u8>>,
    pub started: Instant,
}

/// Exit and output of a finished `burnrun`.
#[derive(Debug)]
pub struct Finished {
    pub status: ExitStatus,
    pub stdout: Vec<String>,
    pub stderr: String,
    pub took: Duration,
}

impl Finished {
    pub fn code(&self) -> i32 {
        self.status.code().unwrap_or_else(|| panic!("burnrun itself was killed: {self:?}"))
    }
}

impl Job {
    pub fn start(command: &mut Command) -> Self {
        let mut child =
            command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("burnrun starts");
        let lines = read_lines(child.stdout.take().unwrap());
        let stderr = read_all(child.stderr.take().unwrap());
        Self { child, lines, stderr, started: Instant::now() }
    }

    pub fn pid(&self) -> Pid {
        Pid::from_child(&self.child)
    }

    pub fn signal(&self, signal: Signal) {
        kill_process(self.pid(), signal).expect("burnrun still runs");
    }

    /// The next line on its stdout.
    pub fn line(&self) -> String {
        self.lines.recv_timeout(DEADLINE).expect("a line before the deadline")
    }

    /// The next `count` lines, sorted.
    pub fn lines(&self, count: usize) -> Vec<String> {
        let mut lines: Vec<_> = (0..count).map(|_| self.line()).collect();
        lines.sort();
        lines
    }

    pub fn finish(mut self) -> Finished {
        let status = poll_until("burnrun ends", || self.child.try_wait().unwrap());
        let took = self.started.elapsed();
        let stdout = std::iter::from_fn(|| self.lines.recv_timeout(DEADLINE).ok()).collect();
        let stderr = self.stderr.recv_timeout(DEADLINE).expect("stderr ends");
        Finished { status, stdout, stderr: String::from_utf8_lossy(&stderr).into_owned(), took }
    }
}

impl Drop for Job {
    fn drop(&mut self) {
        if let Ok(None) = self.child.try_wait() {
            let _ = self.child.kill();
            let _ = self.child.wait();
        }
    }
}

/// Runs to the end.
pub fn run(command: &mut Command) -> Finished {
    Job::start(command).finish()
}

/// Waits until the process has ended (it may remain as a zombie that an init has yet to reap).
pub fn assert_gone(pid: u32) {
    poll_until(&format!("process {pid} is gone"), || (!is_running(pid)).then_some(()));
}

pub fn is_running(pid: u32) -> bool {
    !matches!(state_and_parent(pid), None | Some(('Z' | 'X', _)))
}

/// The running child of `parent` whose command line contains `text`.
pub fn child_of(parent: Pid, text: &str) -> Option<Pid> {
    let parent = u32::try_from(parent.as_raw_nonzero().get()).unwrap();
    let pids =
        std::fs::read_dir("/proc").unwrap().filter_map(|entry| entry.unwrap().file_name().to_str()?.parse().ok());
    let found = pids.filter(|&pid| state_and_parent(pid).is_some_and(|(_, of)| of == parent)).find(|pid| {
        let line = std::fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        String::from_utf8_lossy(&line).contains(text)
    });
    Pid::from_raw(i32::try_from(found?).unwrap())
}

/// Directory of the control group that `burnrun` made for a running process and others; `None` if it may not.
pub fn control_group(pid: u32) -> Option<PathBuf> {
    let all = std::fs::read_to_string(format!("/proc/{pid}/cgroup")).ok()?;
    let own = all.lines().find_map(|line| line.strip_prefix("0::/")).filter(|own| own.contains("burnrun-"))?;
    let mounts = ["/sys/fs/cgroup", "/sys/fs/cgroup/unified"].map(|mount| Path::new(mount).join(own));
    mounts.into_iter().find(|directory| directory.exists())
}

/// From `/proc`, so these tests run on Linux only.
fn state_and_parent(pid: u32) -> Option<(char, u32)> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // `pid (name) state parent …`; the name may contain anything.
    let mut words = stat[stat.rfind(')')? + 1..].split_whitespace();
    Some((words.next()?.chars().next()?, words.next()?.parse().ok()?))
}

/// The number in a file, once it was written.
pub fn pid_in(file: &Path) -> u32 {
    poll_until("a pid is written", || {
        let text = std::fs::read_to_string(file).ok()?;
        text.strip_suffix('\n')?.parse().ok()
    })
}

pub fn poll_until<T>(what: &str, mut check: impl FnMut() -> Option<T>) -> T {
    let start = Instant::now();
    loop {
        if let Some(value) = check() {
            return value;
        }
        assert!(start.elapsed() < DEADLINE, "gave up waiting: {what}");
        thread::sleep(Duration::from_millis(10));
    }
}

fn read_lines(stdout: ChildStdout) -> Receiver<String> {
    let (sender, lines) = channel();
    thread::spawn(move || {
        for line in BufReader::new(stdout).split(b'\n').map_while(Result::ok) {
            if sender.send(String::from_utf8_lossy(&line).into_owned()).is_err() {
                return;
            }
        }
    });
    lines
}

fn read_all(mut stderr: ChildStderr) -> Receiver<Vec<u8>> {
    let (sender, bytes) = channel();
    thread::spawn(move || {
        let mut all = Vec::new();
        let _ = stderr.read_to_end(&mut all);
        sender.send(all)
    });
    bytes
}
