//! Jobs on several hosts from one burnrun. A script stands in for ssh: it runs the command here, as a machine of the
//! host's name, or fails as ssh does.
#![cfg(all(feature = "cli", target_os = "linux"))]

#[allow(unreachable_pub, reason = "one module for several test files")]
mod common;
#[path = "../../comm/tests/common/free_port.rs"]
mod free_port;

use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;

use burn_ddp_comm::{LaunchEnv, ReduceOp, Secret, World, WorldOptions};
use common::{Finished, Job, assert_gone, burnrun, child_of, poll_until, run};
use free_port::FreePort;
use rustix::process::{Pid, Signal, kill_process};
use tempfile::TempDir;

/// Stands in for ssh and takes its arguments: options, the host, the command. It records its arguments and environment,
/// which other users could see.
const SSH: &str = r#"#!/bin/sh
(printf '%s\n' "$@"; env) >"$0.seen.$$"
while :; do case $1 in -o) shift 2 ;; -*) shift ;; *) break ;; esac; done
host=$1 command=$2
case $host in
    stranger) echo "Host key verification failed." >&2; exit 255 ;;
    refused) echo "me@refused: Permission denied (publickey,password)." >&2; exit 255 ;;
    dead) echo "ssh: connect to host dead port 22: No route to host" >&2; exit 255 ;;
    nameless) echo "ssh: Could not resolve hostname nameless: Name or service not known" >&2; exit 255 ;;
    hanging) exec sleep 600 ;;
esac
echo "welcome to $host"
BURN_DDP_MACHINE=$host exec sh -c "exec $command"
"#;

struct Place {
    dir: TempDir,
    port: FreePort,
}

impl Place {
    fn new() -> Self {
        let place = Self { dir: tempfile::tempdir().unwrap(), port: FreePort::reserve() };
        std::fs::write(place.ssh(), SSH).unwrap();
        std::fs::set_permissions(place.ssh(), PermissionsExt::from_mode(0o755)).unwrap();
        place
    }

    fn ssh(&self) -> PathBuf {
        self.dir.path().join("ssh")
    }

    /// burnrun on the hosts `hosts`, with `options`.
    fn burnrun(&self, hosts: &str, options: &[&str]) -> Command {
        self.burnrun_on(&["--host", hosts], options)
    }

    fn burnrun_on(&self, hosts: &[&str], options: &[&str]) -> Command {
        let mut command = burnrun(hosts);
        command.args(["--master-addr", "127.0.0.1", "--join-timeout", "60"]);
        command.args(["--master-port", &self.port.port.to_string(), "--grace", "0.3"]);
        command
            .arg("--ssh")
            .arg(self.ssh())
            .env("BURNRUN_HOST_TIMEOUT", "60")
            .env("BURNRUN_REMOTE_BURNRUN", env!("CARGO_BIN_EXE_burnrun"))
            .args(options);
        command
    }

    fn script(&self, hosts: &str, options: &[&str], script: &str) -> Command {
        let mut command = self.burnrun(hosts, options);
        command.args(["sh", "-c", script]);
        command
    }

    /// The error line of a job that fails to start.
    fn failure(&self, hosts: &str, options: &[&str]) -> String {
        let Finished { status, stdout, stderr, .. } = run(&mut self.script(hosts, options, "sleep 600"));
        assert_eq!((status.code(), stdout), (Some(1), vec![]), "{stderr}");
        let said: Vec<_> = stderr.lines().filter_map(|line| line.strip_prefix("burnrun: ")).collect();
        assert_eq!(said.len(), 1, "one line: {stderr}");
        said[0].to_owned()
    }
}

/// Ranks of a job on the hosts a and b that print their pids and wait; the pids.
fn two_that_wait(place: &Place) -> (Job, Vec<u32>) {
    let job = Job::start(&mut place.script("a,b", &[], "echo $$; exec sleep 600"));
    let pids = job.lines(2).iter().map(|line| line.rsplit(' ').next().unwrap().parse().unwrap()).collect();
    (job, pids)
}

/// The program of a launched rank.
#[test]
#[ignore = "started by the other tests"]
fn as_a_rank() {
    let env = LaunchEnv::detect().unwrap().expect("the launcher's variables");
    let world = World::join(&env, WorldOptions::from_env().unwrap()).unwrap();
    let mut sum = [world.rank() as f32 + 1.0];
    world.group().unwrap().all_reduce(&mut sum, ReduceOp::Sum).unwrap();
    assert_eq!(sum, [6.0]);
}

#[test]
fn ranks_on_two_hosts_meet_and_the_secret_is_seen_nowhere() {
    let place = Place::new();
    let secret = place.dir.path().join("secret");
    Secret::generate().unwrap().write_new(&secret).unwrap();
    let digits = std::fs::read_to_string(&secret).unwrap();
    for options in [&["--secret-file", secret.to_str().unwrap()][..], &[]] {
        let mut command = place.burnrun("a:2,b", options);
        command.arg(std::env::current_exe().unwrap()).args(["--exact", "as_a_rank", "--ignored", "--nocapture"]);
        let finished = run(&mut command);
        assert_eq!(finished.code(), 0, "{finished:?}");
        assert!(finished.stderr.contains("[a] welcome to a"), "{}", finished.stderr);
    }
    let files = std::fs::read_dir(place.dir.path()).unwrap().map(|entry| entry.unwrap().path());
    let seen: Vec<_> = files.filter(|path| path.display().to_string().contains(".seen.")).collect();
    assert_eq!(seen.len(), 4);
    for path in seen {
        let seen = std::fs::read_to_string(path).unwrap();
        assert!(seen.contains("BatchMode=yes") && !seen.contains(digits.trim()), "{seen}");
    }
}

#[test]
fn each_host_has_its_slots_directory_and_variables() {
    let place = Place::new();
    let (dir, file) = (place.dir.path().join("own"), place.dir.path().join("hosts"));
    std::fs::create_dir(&dir).unwrap();
    std::fs::write(&file, format!("a slots=2\nme@b dir={} env=MINE=x=y\n", dir.display())).unwrap();
    let mut command = place.burnrun_on(&["--hostfile", file.to_str().unwrap()], &["-x", "OURS=it's", "-x", "HERE"]);
    command.args(["sh", "-c", r#"echo "$RANK $LOCAL_WORLD_SIZE $PWD $OURS $HERE $MINE""#]).env("HERE", "5");
    let job = Job::start(command.current_dir("/"));
    let lines = job.lines(3);
    let own = dir.display();
    assert_eq!(
        lines,
        [
            "[rank 0] 0 2 / it's 5 ".to_owned(),
            "[rank 1] 1 2 / it's 5 ".to_owned(),
            format!("[rank 2] 2 1 {own} it's 5 x=y"),
        ]
    );
    assert_eq!(job.finish().code(), 0);
}

#[test]
fn a_rank_that_fails_ends_all_hosts_with_one_report() {
    let place = Place::new();
    for failing in [0, 1] {
        let script = format!("[ $RANK = {failing} ] && {{ echo why >&2; exit 7; }}; exec sleep 600");
        let finished = run(&mut place.script("a,b", &[], &script));
        assert_eq!(finished.code(), 7, "{finished:?}");
        let reports = finished.stderr.matches(&format!("rank {failing} (")).count();
        assert_eq!(reports, 1, "{}", finished.stderr);
        assert!(finished.took < Duration::from_secs(45), "{:?}", finished.took);
    }
}

#[test]
fn a_host_that_cannot_take_part_is_named_with_the_remedy() {
    let place = Place::new();
    for (host, part) in [
        ("stranger", "host stranger: its host key is not known: run `ssh stranger true` once"),
        ("refused", "host refused: the login was refused"),
        ("dead", "host dead: not reached: does the machine run, and sshd on it? (ssh: connect"),
        ("nameless", "host nameless: no such host"),
    ] {
        let said = place.failure(&format!("a,{host}"), &[]);
        assert!(said.starts_with(part), "{host}: {said}");
    }
    let said = place.failure("a", &["--remote-burnrun", "/no/such/burnrun"]);
    assert!(said.starts_with("host a: no burnrun ") && said.contains("--remote-burnrun"), "{said}");
    let said = place.failure("a", &["--remote-burnrun", "true"]);
    assert!(said.starts_with("host a: `true` ended with code 0 before it was ready"), "{said}");
    let said = place.failure("hanging", &["--host-timeout", "0.5"]);
    assert!(said.starts_with("host hanging: no sign of burnrun within 0.5 s"), "{said}");
}

#[test]
fn a_launcher_that_cannot_start_ends_the_others() {
    let place = Place::new();
    let file = place.dir.path().join("hosts");
    std::fs::write(&file, "a\nb dir=/no/such/directory\n").unwrap();
    let mut command = place.burnrun_on(&["--hostfile", file.to_str().unwrap()], &["sleep", "600"]);
    let finished = run(&mut command);
    assert_eq!(finished.code(), 2, "{finished:?}");
    assert!(finished.stderr.contains("burnrun: host b: the working directory /no/such/directory"), "{finished:?}");
}

#[test]
fn signals_end_all_hosts() {
    for (signal, code) in [(Signal::INT, 130), (Signal::TERM, 143)] {
        let place = Place::new();
        let (job, pids) = two_that_wait(&place);
        job.signal(signal);
        let finished = job.finish();
        assert_eq!(finished.code(), code, "{finished:?}");
        pids.into_iter().for_each(assert_gone);
    }
}

#[test]
fn a_signal_ends_hosts_that_are_not_ready() {
    let place = Place::new();
    let job = Job::start(&mut place.script("hanging", &[], "true"));
    let ssh = poll_until("ssh runs", || child_of(job.pid(), "sleep"));
    job.signal(Signal::INT);
    let finished = job.finish();
    assert_eq!(finished.code(), 130, "{finished:?}");
    assert_gone(ssh.as_raw_nonzero().get().unsigned_abs());
}

#[test]
fn a_burnrun_that_is_killed_here_ends_all_hosts() {
    let place = Place::new();
    let (job, pids) = two_that_wait(&place);
    job.signal(Signal::KILL);
    pids.into_iter().for_each(assert_gone);
}

#[test]
fn a_burnrun_that_is_killed_on_a_host_ends_all_and_the_host_is_named() {
    let place = Place::new();
    let (job, pids) = two_that_wait(&place);
    // The script has executed the shell, and the shell burnrun, so the child of burnrun is the burnrun on the host.
    let machine = |pid: Pid| {
        let env = std::fs::read(format!("/proc/{}/environ", pid.as_raw_nonzero())).unwrap_or_default();
        env.split(|&byte| byte == 0).any(|variable| variable == b"BURN_DDP_MACHINE=b")
    };
    let of_b = poll_until("burnrun runs on host b", || children_of(job.pid()).into_iter().find(|pid| machine(*pid)));
    kill_process(of_b, Signal::KILL).unwrap();
    let finished = job.finish();
    assert_eq!(finished.code(), 1, "{finished:?}");
    assert!(finished.stderr.contains("burnrun: host b is lost"), "{}", finished.stderr);
    pids.into_iter().for_each(assert_gone);
}

fn children_of(parent: Pid) -> Vec<Pid> {
    let pid = parent.as_raw_nonzero();
    let tasks = std::fs::read_dir(format!("/proc/{pid}/task")).unwrap();
    let lists = tasks.map(|task| std::fs::read_to_string(task.unwrap().path().join("children")).unwrap_or_default());
    let pids: Vec<_> = lists.collect();
    pids.iter().flat_map(|list| list.split_whitespace()).filter_map(|pid| Pid::from_raw(pid.parse().ok()?)).collect()
}
