//! Cause of the exit of a process on this machine. The kernel shows it until the parent has waited for the process.

use std::time::{Duration, Instant};

/// Time to wait for the exit, since a process closes its sockets a little before it has ended.
const PATIENCE: Duration = Duration::from_millis(300);

/// Cause of the exit of process `pid`, whose sockets are closed, if it can still be read.
pub(super) fn cause_of_exit(pid: u32) -> Option<String> {
    let end = Instant::now() + PATIENCE;
    while pid != std::process::id() {
        let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
        if let Some(text) = read(&stat) {
            return Some(text);
        }
        if Instant::now() >= end {
            break;
        }
        std::thread::sleep(Duration::from_millis(2));
    }
    None
}

/// Reads `/proc/PID/stat`: the state is the first field behind the name in parentheses, the exit code the last of 52.
fn read(stat: &str) -> Option<String> {
    let (_, fields) = stat.rsplit_once(')')?;
    let mut fields = fields.split_ascii_whitespace();
    // A process that runs has not exited yet, or is another one with the same id.
    fields.next().filter(|state| matches!(*state, "Z" | "X"))?;
    let status: i32 = fields.last()?.parse().ok()?;
    let (code, signal) = (status >> 8 & 0xff, status & 0x7f);
    Some(match (signal, code) {
        (0, 0) => "exited with code 0 without leaving the job: did it end before its work was done?".to_owned(),
        (0, code) => format!("exited with code {code}"),
        (signal, _) => format!("was killed by {}", name(signal)),
    })
}

fn name(signal: i32) -> String {
    let known = match signal {
        1 => "SIGHUP",
        2 => "SIGINT",
        4 => "SIGILL",
        6 => "SIGABRT",
        7 => "SIGBUS",
        8 => "SIGFPE",
        9 => "SIGKILL",
        11 => "SIGSEGV",
        13 => "SIGPIPE",
        15 => "SIGTERM",
        _ => return format!("signal {signal}"),
    };
    known.to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn stat(state: &str, status: i32) -> String {
        format!("7 (a (b) c) {state} {} {status}\n", ["0"; 48].join(" "))
    }

    #[test]
    fn the_end_is_told_by_code_or_signal() {
        for (status, expected) in [
            (0, "exited with code 0 without leaving the job"),
            (101 << 8, "exited with code 101"),
            (9, "was killed by SIGKILL"),
            (6 | 0x80, "was killed by SIGABRT"),
            (40, "was killed by signal 40"),
        ] {
            let text = read(&stat("Z", status)).unwrap();
            assert!(text.starts_with(expected), "{text}");
        }
    }

    #[test]
    fn a_process_that_runs_has_no_cause_of_exit() {
        assert_eq!(read(&stat("S", 0)), None);
        assert_eq!(read("nonsense"), None);
        assert_eq!(cause_of_exit(std::process::id()), None);
    }

    #[test]
    fn a_child_that_nobody_waited_for_can_be_asked() {
        let mut child = std::process::Command::new("false").spawn().unwrap();
        let start = std::time::Instant::now();
        let mut seen = None;
        while seen.is_none() && start.elapsed().as_secs() < 20 {
            seen = cause_of_exit(child.id());
            std::thread::sleep(std::time::Duration::from_millis(1));
        }
        child.wait().unwrap();
        assert_eq!(seen.as_deref(), Some("exited with code 1"));
    }
}
