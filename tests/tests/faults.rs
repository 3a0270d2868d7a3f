//! Every fault in every phase, with real processes under a launcher: no rank hangs, every error names the faulty rank
//! in time, and no process or file is left.
//!
//! `BURN_DDP_SOAK=SECONDS cargo test --test faults -- --ignored --nocapture soak` draws cause, phase, engine,
//! placement and encryption at random; `BURN_DDP_SOAK_SEED` repeats a run. The other tests take the engine from
//! `BURN_DDP_ENGINE`.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Read};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use burn_ddp_tests::job;
use rustix::process::{Pid, Signal, kill_process, test_kill_process};

const PHASES: [&str; 5] = ["rendezvous", "wrap", "backward", "barrier", "idle"];
/// Longest time from the death of a rank to the last survivor's error.
const DEATH: Duration = Duration::from_secs(3);
/// `BURN_DDP_PEER_TIMEOUT` and `BURN_DDP_JOIN_TIMEOUT` of the jobs.
const PEER_TIMEOUT: Duration = Duration::from_secs(3);
const JOIN_TIMEOUT: Duration = Duration::from_secs(6);
/// Extra time for a busy machine; more if the job was slow to reach its fault.
const SLACK: Duration = Duration::from_secs(10);
/// Longest time of a job until its fault, and again from its fault to its end.
const END: Duration = Duration::from_secs(50);

#[derive(Clone, Copy, Debug)]
struct Case<'a> {
    world: usize,
    victim: usize,
    phase: &'a str,
    cause: &'a str,
    /// Engine instead of that of `BURN_DDP_ENGINE`.
    engine: Option<&'a str>,
    placement: Placement,
    /// True to encrypt data between processes.
    encrypted: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Placement {
    OneMachine,
    /// Ranks alternate between two machine names of this host, so that groups span machines.
    TwoMachines,
    /// One core for all ranks and their launcher.
    OneCore,
}

/// A job and its output so far.
struct Job {
    launcher: Child,
    lines: Receiver<String>,
    seen: Vec<String>,
    stderr: JoinHandle<String>,
    temp: tempfile::TempDir,
    started: Instant,
    /// Time of the fault.
    fault: Option<Instant>,
}

impl Job {
    fn start(case: Case<'_>, cause: &str) -> Job {
        let temp = tempfile::tempdir().unwrap();
        let program = env!("CARGO_BIN_EXE_rank");
        let mut command = Command::new(if case.placement == Placement::OneCore { "taskset" } else { program });
        for (name, _) in std::env::vars().filter(|(name, _)| name.starts_with("BURN_DDP_") || name.contains("RANK")) {
            if name != "BURN_DDP_ENGINE" {
                command.env_remove(name);
            }
        }
        match case.placement {
            Placement::OneMachine => {}
            Placement::TwoMachines => drop(command.env("FAULT_MACHINES", "2")),
            Placement::OneCore => drop(command.args(["-c", "0", program])),
        }
        command.envs(case.engine.map(|engine| ("BURN_DDP_ENGINE", engine)));
        command.envs(case.encrypted.then_some(("BURN_DDP_ENCRYPT", "data")));
        let mut launcher = command
            .args(["fault", &case.world.to_string(), &case.victim.to_string(), case.phase, cause])
            .env("TMPDIR", temp.path())
            .env("BURN_DDP_TIMEOUT", "20")
            .env("BURN_DDP_HEARTBEAT", "0.5")
            .env("BURN_DDP_PEER_TIMEOUT", PEER_TIMEOUT.as_secs().to_string())
            .env("BURN_DDP_JOIN_TIMEOUT", JOIN_TIMEOUT.as_secs().to_string())
            .env("RAYON_NUM_THREADS", "1")
            .env("RUST_BACKTRACE", "0")
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let (sender, lines) = channel();
        let stdout = BufReader::new(launcher.stdout.take().unwrap());
        std::thread::spawn(move || stdout.lines().map_while(Result::ok).try_for_each(|line| sender.send(line)));
        let mut pipe = launcher.stderr.take().unwrap();
        let stderr = std::thread::spawn(move || {
            let mut bytes = Vec::new();
            let _ = pipe.read_to_end(&mut bytes);
            String::from_utf8_lossy(&bytes).into_owned()
        });
        Job { launcher, lines, seen: Vec::new(), stderr, temp, started: Instant::now(), fault: None }
    }

    /// Reads lines until one contains `text`; `false` at the end of the output or of patience.
    fn read_until(&mut self, text: &str) -> bool {
        loop {
            let Ok(line) = self.lines.recv_timeout(self.patience()) else { return false };
            if line.contains("FAULT ") {
                self.fault = Some(Instant::now());
            }
            let found = line.contains(text);
            self.seen.push(line);
            if found {
                return true;
            }
        }
    }

    /// Time left until the fault must have come or, after it, until the job must have ended.
    fn patience(&self) -> Duration {
        END.saturating_sub(self.fault.unwrap_or(self.started).elapsed())
    }

    /// The rest of each line that contains `key`, after the key.
    fn told(&self, key: &str) -> Vec<&str> {
        self.seen.iter().filter_map(|line| line.split_once(key).map(|(_, rest)| rest)).collect()
    }

    /// Waits until all processes of the job are gone and have left nothing.
    fn end(mut self) -> Result<Ended, String> {
        use std::os::unix::process::ExitStatusExt;
        self.read_until("no line has this");
        let status = loop {
            if let Some(status) = self.launcher.try_wait().map_err(|e| e.to_string())? {
                break status;
            }
            if self.patience().is_zero() {
                let _ = self.launcher.kill();
                return Err(format!("the launcher did not end: {:?}", self.seen));
            }
            std::thread::sleep(Duration::from_millis(5));
        };
        let pids: Vec<Pid> =
            self.told("PID ").iter().filter_map(|pid| pid.trim().parse().ok().and_then(Pid::from_raw)).collect();
        let patience = Instant::now() + Duration::from_secs(10);
        while pids.iter().any(|pid| is_running(*pid)) {
            if Instant::now() > patience {
                return Err(format!("processes are left: {pids:?}"));
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        let left = || -> Vec<_> {
            std::fs::read_dir(self.temp.path()).into_iter().flatten().flatten().map(|entry| entry.path()).collect()
        };
        // After a killed launcher its guardian needs a moment to clean up.
        while !left().is_empty() {
            if Instant::now() > patience {
                return Err(format!("files are left: {:?}", left()));
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        let code = status.code().unwrap_or_else(|| -status.signal().unwrap_or(0));
        let slack = SLACK + self.fault.map_or(Duration::ZERO, |fault| fault - self.started);
        Ok(Ended { code, stderr: self.stderr.join().unwrap_or_default(), seen: self.seen, slack })
    }
}

/// A job that has ended.
struct Ended {
    /// Exit code; negative: the signal.
    code: i32,
    stderr: String,
    /// Lines of the output.
    seen: Vec<String>,
    slack: Duration,
}

/// True if a process exists and is no zombie.
fn is_running(pid: Pid) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{}/stat", pid.as_raw_nonzero())).unwrap_or_default();
    let state = stat.rsplit(')').next().unwrap_or_default().trim_start().chars().next();
    test_kill_process(pid).is_ok() && !matches!(state, None | Some('Z' | 'X'))
}

/// Runs one case to its end; an error describes the first expectation that did not hold.
fn try_case(case: Case<'_>) -> Result<(), String> {
    match case.cause {
        "term launcher" | "kill launcher" => launcher_dies(case),
        _ => rank_fails(case),
    }
    .map_err(|problem| format!("{case:?}: {problem}"))
}

fn rank_fails(case: Case<'_>) -> Result<(), String> {
    let Ended { code, stderr, seen, slack } = Job::start(case, case.cause).end()?;
    let ensure = |holds: bool, what: String| if holds { Ok(()) } else { Err(format!("{what}\n{seen:#?}\n{stderr}")) };
    let of = |key: &str| seen.iter().filter_map(|line| line.split_once(key).map(|(_, rest)| rest)).collect::<Vec<_>>();
    let ms = |text: &str| text.split(' ').next().and_then(|n| n.parse::<u64>().ok()).unwrap_or(0);

    let faults = of("FAULT ");
    ensure(faults.len() == 1, format!("{} faults", faults.len()))?;
    let errors = of("ERROR ");
    ensure(errors.len() == case.world - 1, format!("{} of {} survivors have an error", errors.len(), case.world - 1))?;
    let limit = match (case.cause, case.phase) {
        ("stop", "rendezvous") => JOIN_TIMEOUT,
        ("stop", _) => PEER_TIMEOUT + Duration::from_secs(1),
        _ => DEATH,
    };
    for error in &errors {
        let took = Duration::from_millis(ms(error).saturating_sub(ms(faults[0])));
        ensure(took <= limit + slack, format!("an error after {took:?}: {error}"))?;
        ensure(error.contains(&format!("rank {}", case.victim)), format!("the culprit is not named: {error}"))?;
        // A survivor may still be in the call before the victim's.
        let in_call = matches!(case.phase, "backward" | "barrier");
        let named = error.contains("called at") || error.contains("of the model wrapped at");
        ensure(!in_call || named, format!("the operation is not named: {error}"))?;
        if case.cause == "panic" && case.phase != "rendezvous" {
            ensure(error.contains("the fault is here") && error.contains("fault.rs:"), format!("no message: {error}"))?;
        }
    }
    ensure(code != 0, "the job succeeded".into())?;
    ensure(stderr.contains(&format!("rank {}", case.victim)), "the report does not name the culprit".into())
}

fn launcher_dies(case: Case<'_>) -> Result<(), String> {
    let mut job = Job::start(case, "hang");
    if !job.read_until("FAULT ") {
        return Err(format!("no fault: {:?}", job.seen));
    }
    let pid = Pid::from_child(&job.launcher);
    // The program that launched itself returns the launcher's report as an error, so it exits with 1.
    let (signal, expected) = if case.cause == "kill launcher" { (Signal::KILL, -9) } else { (Signal::TERM, 1) };
    kill_process(pid, signal).map_err(|e| e.to_string())?;
    let Ended { code, stderr, .. } = job.end()?;
    if code == expected { Ok(()) } else { Err(format!("exit code {code}, not {expected}: {stderr}")) }
}

/// Runs a fault in each phase with ranks on one machine and, unless the environment names an engine, on two.
fn in_every_phase(cause: &str) {
    let of = |(world, placement)| {
        PHASES.map(|phase| Case { world, victim: 1, phase, cause, engine: None, placement, encrypted: false })
    };
    let two = (4, Placement::TwoMachines);
    let two = std::env::var_os("BURN_DDP_ENGINE").is_none().then_some(two);
    let cases = [(3, Placement::OneMachine)].into_iter().chain(two).flat_map(of);
    let problems: Vec<String> = cases.filter_map(|case| try_case(case).err()).collect();
    assert!(problems.is_empty(), "{}", problems.join("\n"));
}

#[test]
fn killed() {
    in_every_phase("kill");
}

#[test]
fn panicked() {
    in_every_phase("panic");
}

#[test]
fn aborted() {
    in_every_phase("abort");
}

#[test]
fn stopped() {
    in_every_phase("stop");
}

#[test]
fn exited_too_early() {
    in_every_phase("exit");
}

#[test]
fn launcher_terminated() {
    in_every_phase("term launcher");
}

#[test]
fn launcher_killed() {
    in_every_phase("kill launcher");
}

/// Without a launcher rank 0 hosts the store.
#[test]
fn store_host_killed() {
    for phase in PHASES {
        let port = job::FreePort::reserve();
        let args = ["fault", "3", "0", phase, "kill"];
        let started = Instant::now();
        let ranks: Vec<_> = (0..3)
            .map(|rank| {
                let mut command = job::rank(env!("CARGO_BIN_EXE_rank"), rank, 3, port.port, &args);
                command.env("BURN_DDP_JOIN_TIMEOUT", JOIN_TIMEOUT.as_secs().to_string()).env("BURN_DDP_TIMEOUT", "20");
                std::thread::spawn(move || command.output().unwrap())
            })
            .collect();
        let outputs: Vec<_> = ranks.into_iter().map(|rank| rank.join().unwrap()).collect();
        // A rank that has not joined yet waits for rank 0's store until the join timeout.
        let limit = if phase == "rendezvous" { JOIN_TIMEOUT } else { DEATH };
        assert!(started.elapsed() < limit + SLACK + SLACK, "{phase}: {:?}", started.elapsed());
        for survivor in &outputs[1..] {
            let text = job::stdout(survivor);
            let error = job::line(&text, "ERROR ");
            let named = if phase == "rendezvous" { "is rank 0 running there" } else { "rank 0 (host" };
            assert!(!survivor.status.success() && error.contains(named), "{phase}: {error}");
        }
    }
}

#[test]
#[ignore = "runs for BURN_DDP_SOAK seconds"]
fn soak() {
    let number = |name: &str| std::env::var(name).ok().and_then(|text| text.parse::<u64>().ok());
    let duration = Duration::from_secs(number("BURN_DDP_SOAK").unwrap_or(60));
    let seed = number("BURN_DDP_SOAK_SEED").unwrap_or_else(|| std::process::id().into());
    println!("seed {seed}, {} s", duration.as_secs());
    let mut state = seed;
    let mut below = |n: usize| {
        // SplitMix64.
        state = state.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = state;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        ((z ^ (z >> 31)) % n as u64) as usize
    };
    let causes = ["kill", "panic", "abort", "stop", "exit", "term launcher", "kill launcher"];
    let (start, mut counts, mut problems) = (Instant::now(), BTreeMap::new(), Vec::new());
    let placements = [Placement::OneMachine, Placement::TwoMachines, Placement::OneCore];
    while start.elapsed() < duration {
        let world = 2 + below(3);
        let placement = placements[below(placements.len())];
        let engine = if placement == Placement::TwoMachines { "tcp" } else { ["shm", "tcp"][below(2)] };
        let case = Case {
            world,
            victim: below(world),
            phase: PHASES[below(PHASES.len())],
            cause: causes[below(causes.len())],
            // `None`: chosen for each group.
            engine: (below(3) > 0).then_some(engine),
            placement,
            encrypted: below(2) == 0,
        };
        let Case { phase, cause, engine, encrypted, .. } = case;
        for drawn in [format!("{cause} in {phase}"), format!("{placement:?}, engine {engine:?}, encrypted {encrypted}")]
        {
            *counts.entry(drawn).or_insert(0_usize) += 1;
        }
        if let Err(problem) = try_case(case) {
            println!("after {:?}: {problem}", start.elapsed());
            problems.push(problem);
        }
    }
    // Each case is counted twice: by its fault and by its placement.
    println!("{} cases, {} problems: {counts:#?}", counts.values().sum::<usize>() / 2, problems.len());
    assert!(problems.is_empty(), "{}", problems.join("\n"));
}
