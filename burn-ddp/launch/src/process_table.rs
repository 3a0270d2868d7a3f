//! The processes of this machine, as `/proc` lists them. The list is empty if there is no `/proc`, or if it is the
//! `/proc` of another PID namespace, whose pids mean other processes here (`unshare --pid` without `--mount-proc`).

use std::fs;

use rustix::process::Pid;

/// One process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Process {
    pub(crate) pid: Pid,
    /// `R`, `S`, `Z` …, as `ps` shows it.
    pub(crate) state: char,
    /// Pid of its parent; 0 if the parent is in another PID namespace.
    pub(crate) parent: i32,
    /// Id of its session: the pid of the process that created the session.
    pub(crate) session: i32,
    /// Start time of the process, in ticks since the boot. Pid and start time together identify a process, also after
    /// the pid was used again.
    pub(crate) started: u64,
}

impl Process {
    /// The process `pid`, unless it is gone.
    pub(crate) fn read(pid: i32) -> Option<Self> {
        Self::parse(&fs::read(format!("/proc/{pid}/stat")).ok()?)
    }

    /// Parses `pid (name) state parent group session …`. The name may contain anything.
    fn parse(stat: &[u8]) -> Option<Self> {
        let text = String::from_utf8_lossy(stat);
        let (pid, rest) = text.split_once(' ')?;
        let fields: Vec<&str> = rest[rest.rfind(')')? + 1..].split_ascii_whitespace().collect();
        Some(Self {
            pid: Pid::from_raw(pid.parse().ok()?)?,
            state: fields.first()?.chars().next()?,
            parent: fields.get(1)?.parse().ok()?,
            session: fields.get(3)?.parse().ok()?,
            started: fields.get(19)?.parse().ok()?,
        })
    }

    pub(crate) fn raw_pid(&self) -> i32 {
        self.pid.as_raw_nonzero().get()
    }

    /// False for a process that has ended and that its parent has not reaped.
    pub(crate) fn is_running(&self) -> bool {
        !matches!(self.state, 'Z' | 'X' | 'x')
    }

    /// True if its environment had `entry` (`NAME=value`) when its program started. False if the environment belongs to
    /// another user.
    pub(crate) fn was_started_with(&self, entry: &str) -> bool {
        let environment = fs::read(format!("/proc/{}/environ", self.raw_pid())).unwrap_or_default();
        environment.split(|&byte| byte == 0).any(|variable| variable == entry.as_bytes())
    }
}

/// All processes that this one sees.
pub(crate) fn processes() -> Vec<Process> {
    let me = rustix::process::getpid().as_raw_nonzero().to_string();
    if fs::read_link("/proc/self").is_ok_and(|shown| shown.as_os_str() != me.as_str()) {
        return Vec::new();
    }
    let entries = fs::read_dir("/proc").into_iter().flatten().flatten();
    let pids = entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok());
    pids.filter_map(Process::read).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_of_stat_is_parsed_whatever_the_name() {
        let rest = "4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20 21 22 23";
        for name in ["sh", "a b", ") Z 1 2 3 (", "new\nline", "\u{fffd}"] {
            let parsed = Process::parse(format!("42 ({name}) S 3 {rest}\n").as_bytes()).unwrap();
            let expected = Process { pid: Pid::from_raw(42).unwrap(), state: 'S', parent: 3, session: 5, started: 21 };
            assert_eq!(parsed, expected, "{name}");
        }
        for broken in ["", "42", "42 (sh", "42 (sh)", "42 (sh) S 3 4 5", "x (sh) S 3 4 5 6", "0 (sh) S 1 1 1"] {
            assert_eq!(Process::parse(broken.as_bytes()), None, "{broken:?}");
        }
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn this_process_is_in_the_table() {
        let me = rustix::process::getpid();
        let found = processes().into_iter().find(|process| process.pid == me).unwrap();
        assert!(found.is_running());
        assert_eq!(Process::read(found.raw_pid()).unwrap().started, found.started);
        let (name, value) = std::env::vars().next().unwrap();
        assert!(found.was_started_with(&format!("{name}={value}")));
        assert!(!found.was_started_with("BURNRUN_MARK=no such value"));
    }
}
