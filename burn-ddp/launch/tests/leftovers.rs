//! Processes that ranks start end with the job, also those that have left the rank's group or session, or have lost
//! their parent.
#![cfg(all(feature = "cli", target_os = "linux"))]

#[allow(unreachable_pub, reason = "one module for several test files")]
mod common;

use std::fs;
use std::path::Path;
use std::process::Command;
use std::sync::LazyLock;

use burn_ddp_launch::Launcher;
use common::{Finished, Job, assert_gone, burnrun, control_group, is_running, pid_in, poll_until, run};
use rustix::process::Signal;

/// A shell's job in a group of its own, as under job control.
const GROUP: &str = r#"set -m; sleep 600 >/dev/null 2>&1 & echo $! >"$FILE""#;
/// A process in a session of its own.
const SESSION: &str =
    r#"setsid sh -c 'echo $$ >"$FILE.new"; mv "$FILE.new" "$FILE"; exec sleep 600' >/dev/null 2>&1 &"#;
/// A daemon: in a session of its own, without a parent in the job, its environment empty.
const DAEMON: &str = r#"(setsid env -i FILE="$FILE" \
    sh -c 'echo $$ >"$FILE.new"; mv "$FILE.new" "$FILE"; exec sleep 600' \
    >/dev/null 2>&1 &)"#;
/// Waits for the pid in the file, so that the rest of a script runs after the process has started.
const STARTED: &str = r#"while [ ! -s "$FILE" ]; do sleep 0.01; done"#;

fn bash(nproc: &str, script: &str, file: &Path) -> Command {
    let mut command = burnrun(["-n", nproc, "bash", "-c", script]);
    command.env("FILE", file);
    command
}

#[test]
fn processes_outside_of_the_rank_s_group_end_with_the_job() {
    let dir = tempfile::tempdir().unwrap();
    for (kind, start) in [("group", GROUP), ("session", SESSION), ("daemon", DAEMON)] {
        for code in [0, 3] {
            let file = dir.path().join(format!("{kind}-{code}"));
            let finished = run(&mut bash("1", &format!("{start}\n{STARTED}; exit {code}"), &file));
            assert_eq!(finished.code(), code, "{}", finished.stderr);
            assert!(!is_running(pid_in(&file)), "{kind}: gone before burnrun is");
        }
    }
}

#[test]
fn processes_outside_of_the_rank_s_group_end_with_a_killed_launcher() {
    let dir = tempfile::tempdir().unwrap();
    for (kind, start) in [("group", GROUP), ("session", SESSION)] {
        let file = dir.path().join(kind);
        let job = Job::start(&mut bash("1", &format!("{start}\n{STARTED}; echo here; sleep 600"), &file));
        job.line();
        let pid = pid_in(&file);
        assert!(is_running(pid), "{kind}");
        job.signal(Signal::KILL);
        assert_gone(pid);
    }
}

#[test]
fn a_program_that_launches_itself_ends_what_its_ranks_started() {
    let dir = tempfile::tempdir().unwrap();
    // A child of this process that does not belong to the job.
    let mut other = Command::new("sleep").arg("600").spawn().unwrap();
    for (kind, start) in [("group", GROUP), ("session", SESSION)] {
        let file = dir.path().join(kind);
        let launcher = Launcher::new("bash", ["-c", &format!("{start}\n{STARTED}")]).env("FILE", &file);
        assert_eq!(launcher.run().unwrap().exit_code, 0);
        assert!(!is_running(pid_in(&file)), "{kind}");
    }
    assert!(other.try_wait().unwrap().is_none(), "it runs on");
    other.kill().unwrap();
    other.wait().unwrap();
}

/// Makes orphans that end at once, and waits until burnrun has reaped them all.
const ORPHANS: &str = r#"
    for i in 1 2 3 4 5 6 7 8; do (setsid env -i true &); done
    sleep 0.2
    for i in $(seq 300); do
        zombies=0
        for stat in /proc/[0-9]*/stat; do
            read -r line 2>/dev/null <$stat || continue
            set -- ${line##*) }
            [ "$1 $2" = "Z $PPID" ] && zombies=$((zombies + 1))
        done
        [ $zombies = 0 ] && exit 0
        sleep 0.1
    done
    echo "$zombies zombies"; exit 1"#;

/// True if this process may make control groups of version 2; a line that says so if not.
fn control_groups() -> bool {
    // The name of the trial group comes from the process, so tests that run side by side must not try at the same time.
    static POSSIBLE: LazyLock<bool> = LazyLock::new(try_control_groups);
    *POSSIBLE
}

fn try_control_groups() -> bool {
    let all = fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
    let own = all.lines().find_map(|line| line.strip_prefix("0::/")).unwrap_or_default();
    let mounts = ["/sys/fs/cgroup", "/sys/fs/cgroup/unified"].map(|mount| Path::new(mount).join(own));
    let Some(parent) = mounts.iter().find(|parent| parent.join("cgroup.subtree_control").exists()) else {
        println!("skipped: no control groups of version 2");
        return false;
    };
    let probe = parent.join(format!("burn-ddp-probe-{}", std::process::id()));
    match fs::create_dir(&probe).and_then(|()| fs::write(probe.join("cgroup.procs"), "")) {
        Err(error) if error.kind() != std::io::ErrorKind::InvalidInput => {
            println!("skipped: no right to make control groups: {error}");
            let _ = fs::remove_dir(&probe);
            false
        }
        _ => {
            fs::remove_dir(&probe).unwrap();
            true
        }
    }
}

#[test]
fn a_daemon_of_a_rank_ends_with_a_killed_launcher() {
    if !control_groups() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("daemon");
    let job = Job::start(&mut bash("1", &format!("{DAEMON}\n{STARTED}; echo here; sleep 600"), &file));
    job.line();
    let pid = pid_in(&file);
    let group = control_group(pid).unwrap();
    assert!(is_running(pid));
    job.signal(Signal::KILL);
    assert_gone(pid);
    poll_until("the guardian removes the control group", || (!group.exists()).then_some(()));
}

#[test]
fn a_daemon_of_a_rank_ends_with_a_program_that_launches_itself() {
    if !control_groups() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("daemon");
    // The rank makes a group below the job's.
    let below = r#"for mount in /sys/fs/cgroup /sys/fs/cgroup/unified; do
        group=$mount$(sed -n 's/^0:://p' /proc/self/cgroup)
        [ -e "$group/cgroup.kill" ] || continue
        mkdir "$group/below"
        echo "$group" >"$FILE.group"
        echo $$ >"$group/below/cgroup.procs"
    done"#;
    let launcher = Launcher::new("bash", ["-c", &format!("{below}\n{DAEMON}\n{STARTED}")]).env("FILE", &file);
    assert_eq!(launcher.run().unwrap().exit_code, 0);
    assert!(!is_running(pid_in(&file)));
    let group = fs::read_to_string(dir.path().join("daemon.group")).unwrap();
    assert!(group.contains("burnrun-") && !Path::new(group.trim()).exists(), "{group}");
}

#[test]
fn orphans_are_collected_while_the_job_runs() {
    let args = ["-n", "1", "bash", "-c", ORPHANS];
    let finished = run(&mut burnrun(args));
    assert_eq!(finished.code(), 0, "{:?}", finished.stdout);
    // As the first process of a container, where orphans have no other parent.
    let Some(finished) = run_as_first_process(&["--mount-proc"], &args) else { return };
    assert_eq!(finished.code(), 0, "{:?} {}", finished.stdout, finished.stderr);
}

/// The first process of a PID namespace is process 1, and so is the parent of most daemons of the machine, which the
/// machine's `/proc` shows.
#[test]
fn processes_of_another_pid_namespace_are_none_of_the_job_s() {
    let Some(finished) = run_as_first_process(&[], &["-n", "1", "sh", "-c", "exit 3"]) else { return };
    assert_eq!(finished.code(), 3, "{}", finished.stderr);
    assert!(!finished.stderr.contains("survives the job"), "{}", finished.stderr);
}

/// Runs burnrun as the first process of a PID namespace; `None`, and a line that says so, if that is not allowed.
fn run_as_first_process(options: &[&str], args: &[&str]) -> Option<Finished> {
    let mut first = Command::new("unshare");
    first.args(["--pid", "--fork"]).args(options).arg(env!("CARGO_BIN_EXE_burnrun")).args(args);
    let finished = run(&mut first);
    let refused = finished.stderr.starts_with("unshare: ");
    if refused {
        println!("skipped: burnrun as process 1, since {}", finished.stderr);
    }
    (!refused).then_some(finished)
}
