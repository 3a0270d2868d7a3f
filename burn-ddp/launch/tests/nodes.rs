//! Jobs on several machines; in these tests, several launchers on one machine.
#![cfg(feature = "cli")]

#[allow(unreachable_pub, reason = "one module for several test files")]
mod common;
#[path = "../../comm/tests/common/free_port.rs"]
mod free_port;

use std::path::{Path, PathBuf};
use std::process::Command;
use std::thread;
use std::time::Duration;

use burn_ddp_comm::{LaunchEnv, ReduceOp, Secret, World, WorldOptions};
use burn_ddp_launch::{LaunchError, Launcher, Outcome, RankExit};
use common::{Finished, Job, assert_gone, burnrun};
use free_port::FreePort;
use rustix::process::Signal;
use tempfile::TempDir;

/// The address and secret of a job of two launchers.
struct Place {
    dir: TempDir,
    port: FreePort,
}

impl Place {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        Secret::generate().unwrap().write_new(&dir.path().join("secret")).unwrap();
        Self { dir, port: FreePort::reserve() }
    }

    fn secret(&self) -> PathBuf {
        self.dir.path().join("secret")
    }

    fn launcher(&self, node: usize, nproc: usize, script: &str) -> Launcher {
        self.with(Launcher::new("sh", ["-c", script]), node, nproc)
    }

    fn with(&self, launcher: Launcher, node: usize, nproc: usize) -> Launcher {
        launcher
            .nproc(nproc)
            .nodes(2, "127.0.0.1", self.port.port)
            .node_rank(node)
            .secret_file(self.secret())
            .join_timeout(Duration::from_secs(60))
            .peer_timeout(Duration::from_secs(60))
            .grace(Duration::from_millis(300))
    }

    fn burnrun(&self, node: usize, nproc: usize, script: &str) -> Command {
        self.burnrun_with("60", node, nproc, script)
    }

    /// A `burnrun` that gives up a machine that is silent for `peer_timeout` seconds.
    fn burnrun_with(&self, peer_timeout: &str, node: usize, nproc: usize, script: &str) -> Command {
        let (node, nproc, port) = (node.to_string(), nproc.to_string(), self.port.port.to_string());
        let mut command = burnrun(["--nnodes", "2", "--master-addr", "127.0.0.1", "--master-port", &port]);
        command.args(["--node-rank", &node, "-n", &nproc, "--join-timeout", "60", "--peer-timeout", peer_timeout]);
        command.arg("--secret-file").arg(self.secret()).args(["sh", "-c", script]);
        command
    }
}

/// Runs one launcher per machine.
fn run_all(launchers: impl IntoIterator<Item = Launcher>) -> Vec<Result<Outcome, LaunchError>> {
    let threads: Vec<_> = launchers.into_iter().map(|launcher| thread::spawn(move || launcher.run())).collect();
    threads.into_iter().map(|thread| thread.join().unwrap()).collect()
}

/// The program of a launched rank.
#[test]
#[ignore = "started by the other tests"]
fn as_a_rank() {
    let env = LaunchEnv::detect().unwrap().expect("the launcher's variables");
    let mut options = WorldOptions::from_env().unwrap();
    options.timeout = Duration::from_secs(60);
    let generation = env.restart_count;
    let world = World::join(&env, options).unwrap();
    let group = world.group().unwrap();
    let mut sum = [world.rank() as f32, generation as f32];
    group.all_reduce(&mut sum, ReduceOp::Sum).unwrap();
    assert_eq!(sum, [3.0, 3.0 * generation as f32]);
    let fails = world.rank() == 2 && generation == 0;
    if fails {
        panic!("the first time never works");
    }
    let done = group.barrier();
    assert_eq!(done.is_ok(), generation > 0, "{done:?}");
    done.unwrap();
}

#[test]
fn ranks_of_two_machines_meet_and_meet_again_after_a_restart() {
    let place = Place::new();
    let program = std::env::current_exe().unwrap();
    let launcher = |node, nproc| {
        let args = ["--exact", "as_a_rank", "--ignored", "--nocapture"];
        place.with(Launcher::new(&program, args), node, nproc).grace(Duration::from_secs(3)).max_restarts(1)
    };
    for outcome in run_all([launcher(0, 2), launcher(1, 1)]) {
        let outcome = outcome.unwrap();
        assert_eq!((outcome.exit_code, outcome.restarts, outcome.nproc, outcome.nnodes), (0, 1, 3, 2), "{outcome}");
    }
}

#[test]
fn ranks_are_numbered_machine_by_machine() {
    let place = Place::new();
    let out = place.dir.path().display().to_string();
    let script = r#"echo $RANK $WORLD_SIZE $LOCAL_RANK $LOCAL_WORLD_SIZE $BURN_DDP_NODE_RANK >"$OUT/$RANK""#;
    let launchers = [(1, 1), (0, 2)].map(|(node, nproc)| place.launcher(node, nproc, script).env("OUT", &out));
    for outcome in run_all(launchers) {
        assert_eq!(outcome.unwrap().exit_code, 0);
    }
    let said = ["0", "1", "2"].map(|rank| std::fs::read_to_string(place.dir.path().join(rank)).unwrap());
    assert_eq!(said, ["0 3 0 2 0\n", "1 3 1 2 0\n", "2 3 0 1 1\n"]);
}

#[test]
fn machines_without_a_number_are_numbered_as_they_come() {
    let place = Place::new();
    let launcher = || {
        Launcher::new("sh", ["-c", "exit $BURN_DDP_NODE_RANK"])
            .nodes(2, "127.0.0.1", place.port.port)
            .secret_file(place.secret())
            .join_timeout(Duration::from_secs(60))
    };
    for outcome in run_all([launcher(), launcher()]) {
        let failure = outcome.unwrap().failure.unwrap();
        assert_eq!((failure.rank, failure.exit), (1, RankExit::Code(1)));
    }
}

#[test]
fn a_failure_on_one_machine_ends_all_with_its_code_and_name() {
    for failing in [0, 2] {
        let place = Place::new();
        let script = format!("[ $RANK = {failing} ] && {{ echo why >&2; exit 7; }}; sleep 600");
        for outcome in run_all([place.launcher(0, 2, &script), place.launcher(1, 1, &script)]) {
            let outcome = outcome.unwrap();
            let failure = outcome.failure.as_ref().unwrap();
            assert_eq!((outcome.exit_code, failure.rank, &failure.last_lines[..]), (7, failing, &["why".into()][..]));
            assert_eq!(outcome.stopped.len(), 2, "{outcome}");
            assert!(outcome.elapsed < Duration::from_secs(45), "{:?}", outcome.elapsed);
        }
    }
}

#[test]
fn a_program_that_one_machine_lacks_ends_all() {
    let place = Place::new();
    let missing = place.with(Launcher::new("no-such-program-anywhere", [""; 0]), 1, 1);
    let launchers = [place.launcher(0, 1, "sleep 600"), missing];
    let outcomes = run_all(launchers.map(|launcher| launcher.meeting_id("of two programs")));
    for outcome in outcomes {
        let outcome = outcome.unwrap();
        let trouble = outcome.trouble.as_deref().unwrap_or_default();
        assert!(trouble.contains("node 1 (host ") && trouble.contains("no program of this name"), "{outcome}");
        assert_eq!(outcome.exit_code, 127);
    }
}

#[test]
fn a_machine_that_does_not_come_is_named() {
    let place = Place::new();
    let error = place.launcher(0, 1, "true").join_timeout(Duration::from_millis(300)).run().unwrap_err();
    assert!(error.to_string().contains("missing is node 1"), "{error}");
    let error = place.launcher(1, 1, "true").join_timeout(Duration::from_millis(300)).run().unwrap_err();
    assert!(error.to_string().contains("node 0's launcher was not reached"), "{error}");
    assert_eq!(error.to_string().matches(" within ").count(), 1, "one time, that of all attempts: {error}");
}

/// Starts two jobs with the same address, program and arguments: two of the four launchers form a job, and the others
/// get errors that name it.
#[test]
fn a_job_started_twice_is_one_job_and_errors() {
    let taken = ["node rank 1 is taken already (host ", "another job listens there: end it, or choose another"];
    let full = ["all 2 machines of this job are there already"; 2];
    for (nodes, expected) in [([Some(0), Some(0), Some(1), Some(1)], taken), ([None; 4], full)] {
        let place = Place::new();
        let go = place.dir.path().join("go");
        let script = "until [ -e \"$GO\" ]; do sleep 0.05; done";
        let (sender, ends) = std::sync::mpsc::channel();
        for node in nodes {
            let launcher = Launcher::new("sh", ["-c", script]).nodes(2, "127.0.0.1", place.port.port);
            let launcher = launcher.secret_file(place.secret()).join_timeout(Duration::from_secs(60));
            let launcher = launcher.env("GO", &go);
            let launcher = if let Some(node) = node { launcher.node_rank(node) } else { launcher };
            let sender = sender.clone();
            thread::spawn(move || drop(sender.send(launcher.run())));
        }
        let end = || ends.recv_timeout(Duration::from_secs(120)).unwrap();
        let errors = [end(), end()].map(|end| end.expect_err("the job waits").to_string());
        for part in expected {
            assert!(errors.iter().any(|error| error.contains(part)), "{part}: {errors:?}");
        }
        assert!(errors.iter().all(|error| expected.iter().any(|part| error.contains(part))), "{errors:?}");
        std::fs::write(&go, "").unwrap();
        for outcome in [end(), end()] {
            let outcome = outcome.unwrap();
            assert_eq!((outcome.exit_code, outcome.nnodes), (0, 2), "{outcome}");
        }
    }
}

#[test]
fn machines_that_do_not_fit_are_refused() {
    let place = Place::new();
    let first = place.launcher(0, 1, "true").join_timeout(Duration::from_secs(5));
    let stranger = place.dir.path().join("stranger");
    Secret::generate().unwrap().write_new(&stranger).unwrap();
    let others = [
        (place.launcher(1, 1, "true").secret_file(&stranger), "secret", false),
        (place.launcher(1, 1, "true").nodes(3, "127.0.0.1", place.port.port), "--nnodes 3 here, but 2 on node 0", true),
        (place.launcher(1, 1, "true").meeting_id("another"), "this is job \"another\"", false),
        (
            place.with(Launcher::new("/usr/bin/env", ["true"]), 1, 1),
            "another job or restart; this is job \"burnrun, program env\": give each job a --master-port or --rdzv-id",
            false,
        ),
        (place.launcher(1, 1, "true # --lr 0.1"), "the program has other arguments here than on node 0 (host ", true),
    ];
    thread::scope(|scope| {
        let host = scope.spawn(|| first.run());
        for (launcher, part, disagrees) in others {
            let error = launcher.run().expect_err(part);
            assert_eq!(matches!(error, LaunchError::Disagree(_)), disagrees, "{error}");
            assert_eq!(error.exit_code(), if disagrees { 2 } else { 1 }, "{error}");
            assert!(error.to_string().contains(part), "{part}: {error}");
        }
        let error = host.join().unwrap().unwrap_err().to_string();
        assert!(error.contains("missing is node 1; node 0 refused"), "{error}");
        for part in ["connection with another secret", "of another job or restart", "the last from 127.0.0.1"] {
            assert!(error.contains(part), "{error}");
        }
    });
}

#[test]
fn without_a_secret_it_is_said_how_to_get_one() {
    let error = Launcher::new("true", [""; 0]).nodes(2, "127.0.0.1", 1).run().unwrap_err();
    assert!(error.to_string().contains("burnrun secret FILE") && error.exit_code() == 2, "{error}");
    let open = tempfile::NamedTempFile::new().unwrap();
    std::fs::set_permissions(open.path(), std::os::unix::fs::PermissionsExt::from_mode(0o644)).unwrap();
    let launcher = Launcher::new("true", [""; 0]).nodes(2, "127.0.0.1", 1).secret_file(open.path());
    assert!(launcher.run().unwrap_err().to_string().contains("chmod 600"));
}

#[test]
fn an_interrupt_on_one_machine_stops_all() {
    let place = Place::new();
    let jobs = [0, 1].map(|node| Job::start(&mut place.burnrun(node, 1, "echo $$; exec sleep 600")));
    let pids = jobs.each_ref().map(|job| pid(&job.line()));
    jobs[1].signal(Signal::INT);
    for finished in jobs.map(Job::finish) {
        assert_eq!(finished.code(), 130, "{}", finished.stderr);
        assert!(finished.stderr.contains("burnrun: stopped by SIGINT after "), "{}", finished.stderr);
    }
    pids.into_iter().for_each(assert_gone);
}

/// Kills the launcher of node `killed` while the ranks run; returns the exit and output of the other node's launcher.
fn with_a_killed_launcher(killed: usize) -> Finished {
    let place = Place::new();
    let jobs = [0, 1].map(|node| Job::start(&mut place.burnrun_with("5", node, 1, "echo $$; exec sleep 600")));
    let pids = jobs.each_ref().map(|job| pid(&job.line()));
    jobs[killed].signal(Signal::KILL);
    let [first, second] = jobs;
    let left = if killed == 0 { second } else { first }.finish();
    pids.into_iter().for_each(assert_gone);
    left
}

#[test]
fn a_launcher_that_is_killed_is_missed_by_the_others() {
    for (killed, part) in [(0, "node 0's launcher cannot be reached any more"), (1, "node 1 is lost")] {
        let left = with_a_killed_launcher(killed);
        assert_eq!(left.code(), 1, "{}", left.stderr);
        assert!(left.stderr.contains(part), "{}", left.stderr);
    }
}

#[test]
fn the_first_machine_says_what_to_run_on_the_next() {
    let place = Place::new();
    let first = Job::start(&mut place.burnrun(0, 1, "echo $BURN_DDP_NODE_RANK"));
    let second = Job::start(&mut place.burnrun(1, 1, "echo $BURN_DDP_NODE_RANK"));
    assert_eq!(second.finish().code(), 0);
    let said = first.finish().stderr;
    let command = said
        .lines()
        .find_map(|line| line.strip_prefix("burnrun: on the other machine, with a copy of the secret file, run: "))
        .unwrap();
    let (port, secret) = (place.port.port, place.secret());
    let secret = Path::display(&secret);
    assert_eq!(
        command,
        format!(
            "burnrun --nproc-per-node 1 --nnodes 2 --master-addr 127.0.0.1 --master-port {port} \
             --join-timeout 60 --peer-timeout 60 --secret-file {secret} --node-rank 1 sh -c 'echo $BURN_DDP_NODE_RANK'"
        )
    );
}

fn pid(line: &str) -> u32 {
    line.rsplit("] ").next().unwrap().parse().expect("a pid")
}

/// A rank that can stop, like that of `preempt.rs`; the rank of node 1 fails when the other one is gone.
const SAVES: &str = r#"
say() { echo "{\"event\":\"$1\",\"rank\":$BURN_DDP_RANK,\"at\":1}" >> "$BURN_DDP_EVENTS"; }
trap 'stop=1' TERM
say can_stop
echo $$ > "$DIR/$BURN_DDP_RANK"
echo ready
while [ -z "$stop" ]; do sleep 0.05; done
say stopping
if [ "$BURN_DDP_RANK" = 0 ]; then sleep 600; fi
while kill -0 "$(cat "$DIR/0")" 2>/dev/null; do sleep 0.05; done
exit 1"#;

#[test]
fn a_further_signal_to_one_burnrun_ends_the_ranks_of_all_and_blames_none() {
    for second in [Signal::TERM, Signal::INT] {
        let place = Place::new();
        let jobs = [0, 1].map(|node| Job::start(place.burnrun(node, 1, SAVES).env("DIR", place.dir.path())));
        for job in &jobs {
            job.lines(1);
        }
        jobs[0].signal(Signal::TERM);
        std::thread::sleep(Duration::from_secs(3));
        jobs[0].signal(second);
        for job in jobs {
            let finished = job.finish();
            assert_eq!(finished.code(), 143, "{second:?}: {finished:?}");
            assert!(finished.stderr.contains("stopped by SIGTERM"), "{}", finished.stderr);
            assert!(finished.took < Duration::from_secs(30), "{:?}", finished.took);
        }
    }
}

#[test]
fn burnruns_with_different_signals_to_stop_refuse_each_other() {
    let place = Place::new();
    let mut other = place.burnrun(1, 1, "echo started");
    let commands = [place.burnrun(0, 1, "echo started"), {
        other.env("BURN_DDP_PREEMPT_SIGNAL", "SIGUSR1");
        other
    }];
    let [first, second] = commands.map(|mut command| Job::start(command.env("BURNRUN_JOIN_TIMEOUT", "3")));
    let finished = second.finish();
    assert!(finished.stderr.contains("--preempt-signal SIGUSR1 here, but SIGTERM on node 0"), "{}", finished.stderr);
    first.signal(Signal::INT);
    assert!(!first.finish().stdout.iter().any(|line| line.contains("started")));
}
