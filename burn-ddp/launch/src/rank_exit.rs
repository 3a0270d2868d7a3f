//! Exit of a rank's process.

use std::fmt;

use serde::{Deserialize, Serialize};

/// Exit of a rank's process.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub enum RankExit {
    /// Exit code.
    #[serde(rename = "Exit")]
    Code(i32),
    /// Signal that killed the process.
    Signal(i32),
    /// Exit with an unknown status, since other code in this process reaped the child.
    Unknown,
}

impl RankExit {
    /// Code by which a shell reports this exit: 128 + the number for a signal.
    ///
    /// # Example
    ///
    /// ```
    /// use burn_ddp_launch::RankExit;
    ///
    /// assert_eq!(RankExit::Code(7).exit_code(), 7);
    /// assert_eq!(RankExit::Signal(9).exit_code(), 137); // SIGKILL
    /// ```
    #[must_use]
    pub fn exit_code(self) -> i32 {
        match self {
            Self::Code(code) => code,
            Self::Signal(signal) => signal.saturating_add(128),
            Self::Unknown => 1,
        }
    }

    /// True for a signal that a program hardly sends to itself: such an exit is a cause, not the reaction to another
    /// rank's failure.
    pub(crate) fn is_sudden(self) -> bool {
        matches!(self, Self::Signal(libc::SIGKILL | libc::SIGSEGV | libc::SIGBUS | libc::SIGILL | libc::SIGFPE))
    }

    pub(crate) fn hint(self) -> Option<String> {
        let hint = match self {
            Self::Code(101) => "101 is the exit code of a Rust program that panicked",
            Self::Code(code @ 129..=159) => {
                return Some(format!(
                    "a shell ends with {code} when its program was killed by {}",
                    signal_name(code - 128)
                ));
            }
            Self::Signal(libc::SIGKILL) => {
                "the launcher did not send it; the kernel often does when memory runs out (see `dmesg`)"
            }
            Self::Signal(libc::SIGUSR1 | libc::SIGUSR2) => {
                "the launcher passes SIGUSR1 and SIGUSR2 on to all ranks; a program that does not handle them is killed"
            }
            Self::Signal(libc::SIGBUS) => {
                "SIGBUS often means that a memory-mapped file was truncated, or that its file system is full (see `df \
                 -h /dev/shm`, where NCCL has files; burn-ddp has none there)"
            }
            _ => return None,
        };
        Some(hint.to_owned())
    }
}

impl fmt::Display for RankExit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Code(code) => write!(f, "exited with code {code}"),
            Self::Signal(signal) => write!(f, "was killed by {}", signal_name(*signal)),
            Self::Unknown => f.write_str("ended in a way that could not be observed"),
        }
    }
}

/// Name of a signal: `SIGKILL` for 9.
pub(crate) fn signal_name(signal: i32) -> String {
    let name = match signal {
        libc::SIGHUP => "SIGHUP",
        libc::SIGINT => "SIGINT",
        libc::SIGQUIT => "SIGQUIT",
        libc::SIGILL => "SIGILL",
        libc::SIGTRAP => "SIGTRAP",
        libc::SIGABRT => "SIGABRT",
        libc::SIGBUS => "SIGBUS",
        libc::SIGFPE => "SIGFPE",
        libc::SIGKILL => "SIGKILL",
        libc::SIGUSR1 => "SIGUSR1",
        libc::SIGSEGV => "SIGSEGV",
        libc::SIGUSR2 => "SIGUSR2",
        libc::SIGPIPE => "SIGPIPE",
        libc::SIGALRM => "SIGALRM",
        libc::SIGTERM => "SIGTERM",
        libc::SIGXCPU => "SIGXCPU",
        libc::SIGXFSZ => "SIGXFSZ",
        libc::SIGSYS => "SIGSYS",
        libc::SIGSTOP => "SIGSTOP",
        libc::SIGTSTP => "SIGTSTP",
        libc::SIGTTIN => "SIGTTIN",
        libc::SIGTTOU => "SIGTTOU",
        _ => return format!("signal {signal}"),
    };
    name.to_owned()
}
