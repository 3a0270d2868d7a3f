//! Jobs that are asked to stop at random moments, and started again each time: no step is lost, and the last bits are
//! those of an undisturbed run.

use std::io::{BufRead, BufReader, Read};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

use burn_ddp_tests::{job, number};
use rustix::process::{Pid, Signal, kill_process};

const RANK: &str = env!("CARGO_BIN_EXE_rank");
const DEADLINE: Duration = Duration::from_secs(60);

/// Start of a job, and receiver of the signal.
#[derive(Clone, Copy, Debug)]
enum Way {
    /// Starts one burnrun; the signal goes to it.
    Burnrun,
    /// Starts one burnrun with `--preempt-signal SIGUSR1`.
    Chosen,
    /// Starts a burnrun for each of two machines; the signal goes to one of them.
    TwoNodes,
    /// Starts one burnrun; the signal goes to one rank.
    OneRank,
    /// Sets plain variables, without burnrun; the signal goes to one rank.
    Plain,
}

const WAYS: [Way; 5] = [Way::Burnrun, Way::Chosen, Way::TwoNodes, Way::OneRank, Way::Plain];

/// The processes of a job that the test has started, and the lines of their output.
struct Job {
    way: Way,
    started: Vec<Child>,
    lines: Receiver<String>,
    stderr: Vec<std::thread::JoinHandle<String>>,
    _port: job::FreePort,
}

/// Exit codes and output of a job.
#[derive(Debug)]
struct Ended {
    codes: Vec<i32>,
    lines: Vec<String>,
    stderr: String,
}

impl Ended {
    /// The rest of each line with this beginning.
    fn said<'a>(&'a self, key: &'a str) -> Vec<&'a str> {
        self.lines.iter().filter_map(|line| line.split_once(key).map(|(_, rest)| rest)).collect()
    }
}

impl Job {
    fn start(way: Way, directory: &Path) -> Job {
        let port = job::FreePort::reserve();
        let program = [RANK, "preempt", directory.to_str().unwrap()];
        let secret = directory.join("secret");
        let burnrun = |options: &[&str]| {
            let mut command = Command::new(PathBuf::from(RANK).with_file_name("burnrun"));
            for (name, _) in std::env::vars().filter(|(name, _)| name.starts_with("BURN")) {
                command.env_remove(name);
            }
            command.args(options).args(program);
            command
        };
        let at = port.port.to_string();
        let node = |number: &str| {
            let mut command =
                burnrun(&["--nnodes", "2", "--node-rank", number, "--rdzv-endpoint", &format!("127.0.0.1:{at}")]);
            command.env("BURN_DDP_MACHINE", number).env("BURN_DDP_SECRET_FILE", &secret);
            command
        };
        let mut commands = match way {
            Way::Burnrun | Way::OneRank => vec![burnrun(&["-n", "2"])],
            Way::Chosen => vec![burnrun(&["-n", "2", "--preempt-signal", "SIGUSR1"])],
            Way::TwoNodes => {
                if !secret.exists() {
                    let made =
                        Command::new(PathBuf::from(RANK).with_file_name("burnrun")).arg("secret").arg(&secret).output();
                    assert!(made.unwrap().status.success());
                }
                vec![node("0"), node("1")]
            }
            Way::Plain => (0..2).map(|rank| job::rank(RANK, rank, 2, port.port, &program[1..])).collect(),
        };
        let (sender, lines) = channel();
        let mut started = Vec::new();
        let mut stderr = Vec::new();
        for command in &mut commands {
            let mut child = command
                .stdout(Stdio::piped())
                .stderr(Stdio::piped())
                .spawn()
                .expect("build it with `cargo build --bins`");
            let (out, mut err, sender) = (child.stdout.take().unwrap(), child.stderr.take().unwrap(), sender.clone());
            std::thread::spawn(move || {
                BufReader::new(out).lines().map_while(Result::ok).for_each(|line| drop(sender.send(line)));
            });
            stderr.push(std::thread::spawn(move || {
                let mut text = String::new();
                let _ = err.read_to_string(&mut text);
                text
            }));
            started.push(child);
        }
        Job { way, started, lines, stderr, _port: port }
    }

    /// Sends the signal after `pause`, or once the ranks have caught it if it is for one of them. Returns the output so
    /// far.
    fn ask(&self, pause: Duration, choice: usize) -> Vec<String> {
        let until = Instant::now() + pause;
        let (for_rank, mut lines) = (matches!(self.way, Way::OneRank | Way::Plain), Vec::new());
        let ready = |lines: &[String]| lines.iter().filter(|line| line.contains("ready ")).count() == 2;
        loop {
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() && (!for_rank || ready(&lines)) {
                break;
            }
            match self.lines.recv_timeout(left.max(Duration::from_millis(5))) {
                Ok(line) => lines.push(line),
                Err(std::sync::mpsc::RecvTimeoutError::Timeout) => {}
                Err(_) => break,
            }
        }
        let signal = if matches!(self.way, Way::Chosen) { Signal::USR1 } else { Signal::TERM };
        let pids: Vec<i32> = match for_rank {
            true => lines.iter().filter_map(|line| line.split_once("ready ")?.1.parse().ok()).collect(),
            false => self.started.iter().map(|child| child.id() as i32).collect(),
        };
        // A burnrun that ends before it has met the other one is waited for: such a signal goes to both.
        let have_met = !lines.is_empty();
        let chosen = choice % pids.len();
        for (nth, pid) in pids.into_iter().enumerate() {
            if nth == chosen || !have_met {
                // The job may have ended.
                let _ = kill_process(Pid::from_raw(pid).unwrap(), signal);
            }
        }
        lines
    }

    fn end(mut self, mut lines: Vec<String>) -> Ended {
        let deadline = Instant::now() + DEADLINE;
        let mut codes = Vec::new();
        for child in &mut self.started {
            codes.push(loop {
                match child.try_wait().unwrap() {
                    Some(status) => break status.code().unwrap_or(-1),
                    None if Instant::now() > deadline => {
                        let _ = child.kill();
                        panic!("{:?} does not end: {lines:?}", self.way);
                    }
                    None => std::thread::sleep(Duration::from_millis(2)),
                }
            });
        }
        let stderr = std::mem::take(&mut self.stderr);
        let stderr = stderr.into_iter().map(|thread| thread.join().unwrap()).collect();
        lines.extend(self.lines.iter());
        Ended { codes, lines, stderr }
    }
}

/// Processes that work in `directory`.
fn left_over(directory: &Path) -> usize {
    let own = std::process::id().to_string();
    let entries = std::fs::read_dir("/proc").unwrap().flatten();
    let pids = entries.filter(|entry| entry.file_name().to_str().is_some_and(|name| name != own));
    let lines = pids.filter_map(|entry| std::fs::read(entry.path().join("cmdline")).ok());
    let wanted = directory.to_str().unwrap().as_bytes();
    lines.filter(|line| line.windows(wanted.len()).any(|window| window == wanted)).count()
}

/// Asks jobs to stop `times` times at random moments, starts them again until they end, and compares the ends.
fn preempt(times: usize, salt: u64) {
    let began = Instant::now();
    let undisturbed = {
        let directory = tempfile::tempdir().unwrap();
        let ended = Job::start(Way::Burnrun, directory.path()).end(Vec::new());
        assert_eq!(ended.codes, [0], "{ended:?}");
        let hashes: Vec<String> = ended.said("hash ").into_iter().map(str::to_owned).collect();
        assert!(hashes.len() == 2 && hashes[0] == hashes[1], "{ended:?}");
        hashes[0].clone()
    };
    let whole = began.elapsed();
    let (mut asked, mut in_time) = (0, 0);
    for (nth, way) in WAYS.into_iter().cycle().enumerate() {
        if asked >= times {
            break;
        }
        let directory = tempfile::tempdir().unwrap();
        let mut stopped_at: Option<u64> = None;
        for start in 0.. {
            let draw = |purpose: u64| (number(nth * 1000 + start, salt ^ purpose) + 1.0) / 2.0;
            let job = Job::start(way, directory.path());
            // Not for ever: a job that is stopped before its first step each time makes no progress.
            let ended = match start < 6 {
                true => {
                    let lines = job.ask(whole.mul_f64(draw(1)), (draw(2) * 8.0) as usize);
                    asked += 1;
                    job.end(lines)
                }
                false => job.end(Vec::new()),
            };
            let what = format!("{way:?}, start {start}: {ended:?}");
            let (ready, stopped) = (ended.said("ready ").len(), ended.said("stopped "));
            if let Some(at) = stopped_at {
                let resumed = ended.said("resumed ");
                assert!(resumed.iter().all(|step| *step == at.to_string()), "stopped at {at}, {what}");
            }
            if ended.codes.iter().all(|code| *code == 0) {
                assert_eq!(ended.said("hash "), [undisturbed.as_str(); 2], "{what}");
                break;
            }
            let expected = match (way, ready) {
                // A rank that has not looked yet ends as any other program.
                (Way::Burnrun | Way::TwoNodes, 0 | 1) if stopped.is_empty() => &[75, 143][..],
                _ => &[75],
            };
            assert!(ended.codes.iter().all(|code| expected.contains(code)), "{what}");
            assert!(ended.codes.iter().all(|code| *code == ended.codes[0]), "{what}");
            if !stopped.is_empty() {
                assert!(stopped.len() == 2 && stopped[0] == stopped[1], "{what}");
                stopped_at = Some(stopped[0].parse().unwrap());
                in_time += 1;
                let says = matches!(way, Way::Plain) || ended.stderr.contains("the last checkpoint is ");
                assert!(says, "{what}");
            }
            assert_eq!(left_over(directory.path()), 0, "{what}");
        }
    }
    println!("{asked} times asked, {in_time} times saved");
    assert!(in_time * 8 > times, "the signals came at moments in which nothing is to be saved: {in_time} of {asked}");
}

#[test]
fn asked_to_stop_at_random_moments_no_step_is_lost() {
    preempt(20, 1);
}

#[test]
#[ignore = "takes minutes: 200 signals"]
fn asked_to_stop_two_hundred_times() {
    preempt(200, 2);
}
