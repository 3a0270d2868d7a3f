//! Ranks that are stopped, and Ctrl-Z.
#![cfg(feature = "cli")]

#[allow(unreachable_pub, reason = "one module for several test files")]
mod common;

use std::io::{BufRead, BufReader};
use std::os::unix::process::CommandExt;
use std::process::{Child, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::time::Duration;

use common::{DEADLINE, Job, assert_gone, poll_until, script};
use rustix::process::{Pid, Signal, kill_process};

fn state(pid: u32) -> char {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap();
    stat[stat.rfind(')').unwrap() + 1..].split_whitespace().next().unwrap().chars().next().unwrap()
}

fn pid_of(line: &str) -> u32 {
    line.rsplit("] ").next().unwrap().parse().unwrap()
}

fn to(pid: u32, signal: Signal) {
    kill_process(Pid::from_raw(pid as i32).unwrap(), signal).unwrap();
}

/// The lines of a child's stderr.
fn stderr_of(child: &mut Child) -> Receiver<String> {
    let (sender, lines) = channel();
    let stderr = BufReader::new(child.stderr.take().unwrap());
    std::thread::spawn(move || stderr.lines().map_while(Result::ok).try_for_each(|line| sender.send(line)));
    lines
}

#[test]
fn a_stopped_rank_is_named_and_so_is_its_going_on() {
    let mut child =
        script(2, &[], "echo $RANK $$ >&2; while :; do sleep 0.05; done").stderr(Stdio::piped()).spawn().unwrap();
    let lines = stderr_of(&mut child);
    let next = || lines.recv_timeout(DEADLINE).expect("a line");
    let said: Vec<String> = (0..2).map(|_| next()).collect();
    let pid: u32 = said.iter().find_map(|line| line.strip_prefix("[rank 1] 1 ")).unwrap().parse().unwrap();
    to(pid, Signal::STOP);
    assert_eq!(
        next(),
        format!(
            "burnrun: rank 1 (pid {pid}) is stopped (SIGSTOP), the others wait for it; `kill -CONT {pid}` lets it go on"
        )
    );
    to(pid, Signal::CONT);
    assert_eq!(next(), format!("burnrun: rank 1 (pid {pid}) goes on"));
    // A stopped rank handles the signal to end.
    to(pid, Signal::STOP);
    assert!(next().contains("is stopped"));
    kill_process(Pid::from_child(&child), Signal::TERM).unwrap();
    assert_eq!(child.wait().unwrap().code(), Some(143));
    assert!(!lines.iter().any(|line| line.contains("killed")), "it ended by SIGTERM, within the grace time");
}

#[test]
fn ctrl_z_stops_the_whole_job_and_fg_lets_it_go_on() {
    // A process group of its own, whose parent is in another group of the session, as under a shell: otherwise the
    // kernel would not stop it.
    let mut command = script(2, &["--grace", "1"], "echo $$; exec sleep 100");
    let job = Job::start(command.process_group(0));
    let pids: Vec<u32> = job.lines(2).iter().map(|line| pid_of(line)).collect();
    let launcher = job.pid().as_raw_nonzero().get() as u32;
    let all = [&pids[..], &[launcher]].concat();
    for _ in 0..5 {
        job.signal(Signal::TSTP);
        poll_until("all are stopped", || all.iter().all(|&pid| state(pid) == 'T').then_some(()));
        std::thread::sleep(Duration::from_millis(100));
        job.signal(Signal::CONT);
        poll_until("all go on", || all.iter().all(|&pid| state(pid) != 'T').then_some(()));
    }
    job.signal(Signal::INT);
    let finished = job.finish();
    assert_eq!(finished.code(), 130, "{}", finished.stderr);
    assert!(!finished.stderr.contains("is stopped"), "one's own Ctrl-Z is no news: {}", finished.stderr);
    pids.into_iter().for_each(assert_gone);
}
