//! The signal that asks a job to save and end.

use std::fmt;
use std::str::FromStr;

use rustix::process::Signal;

/// Variable that names the signal, for ranks and their launcher.
const VARIABLE: &str = "BURN_DDP_PREEMPT_SIGNAL";

/// A signal that asks a job to save and end, instead of killing it: a scheduler sends one before it takes the machine
/// away. The default is SIGTERM.
///
/// ```
/// use burn_ddp_comm::StopSignal;
///
/// let signal: StopSignal = "USR1".parse().unwrap(); // as SIGUSR1
/// assert_eq!(signal.to_string(), "SIGUSR1");
/// assert_eq!(StopSignal::default().number(), 15); // SIGTERM
/// assert!("SIGINT".parse::<StopSignal>().is_err()); // Ctrl-C ends a job
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StopSignal {
    number: i32,
    name: &'static str,
}

/// Signals that may ask a job to stop.
const ALL: [StopSignal; 7] = [
    StopSignal { number: Signal::TERM.as_raw(), name: "SIGTERM" },
    StopSignal { number: Signal::USR1.as_raw(), name: "SIGUSR1" },
    StopSignal { number: Signal::USR2.as_raw(), name: "SIGUSR2" },
    StopSignal { number: Signal::HUP.as_raw(), name: "SIGHUP" },
    StopSignal { number: Signal::QUIT.as_raw(), name: "SIGQUIT" },
    StopSignal { number: Signal::ALARM.as_raw(), name: "SIGALRM" },
    StopSignal { number: Signal::XCPU.as_raw(), name: "SIGXCPU" },
];

impl StopSignal {
    /// Exit code of a rank that has stopped because it was asked to, and of its launcher: `EX_TEMPFAIL` of
    /// `sysexits.h`, try again later.
    pub const EXIT_CODE: u8 = 75;

    /// The signal's number on this system.
    #[must_use]
    pub fn number(self) -> i32 {
        self.number
    }

    /// The signal that the variable BURN_DDP_PREEMPT_SIGNAL names; `None` if it is not set.
    ///
    /// # Errors
    /// A description of a value that is no such signal.
    ///
    /// ```
    /// assert_eq!(burn_ddp_comm::StopSignal::from_env(), Ok(None)); // SIGTERM counts
    /// ```
    pub fn from_env() -> Result<Option<StopSignal>, String> {
        match std::env::var(VARIABLE) {
            Ok(value) => value.parse().map(Some).map_err(|error| format!("{VARIABLE}: {error}")),
            Err(std::env::VarError::NotPresent) => Ok(None),
            Err(error) => Err(format!("{VARIABLE}: {error}")),
        }
    }

    /// The variable by which [`from_env`](Self::from_env) finds this signal in a child process.
    #[must_use]
    pub fn variable(self) -> (&'static str, &'static str) {
        (VARIABLE, self.name)
    }
}

impl Default for StopSignal {
    fn default() -> StopSignal {
        ALL[0]
    }
}

impl fmt::Display for StopSignal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name)
    }
}

impl FromStr for StopSignal {
    type Err = String;

    fn from_str(text: &str) -> Result<StopSignal, String> {
        let wanted = text.trim().to_ascii_uppercase();
        let is_wanted = |signal: &&StopSignal| {
            signal.name == wanted || signal.name[3..] == wanted || signal.number.to_string() == wanted
        };
        ALL.iter().find(is_wanted).copied().ok_or_else(|| {
            let names: Vec<_> = ALL.iter().map(|signal| signal.name).collect();
            format!("{text:?} is not a signal that asks a job to stop; these are: {}", names.join(", "))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn signals_have_names_and_numbers() {
        for signal in ALL {
            for text in [signal.name, &signal.name[3..], &signal.number.to_string(), &signal.name.to_lowercase()] {
                assert_eq!(text.parse(), Ok(signal));
            }
        }
        for wrong in ["", "SIGKILL", "9", "INT", "SIG", "usr3"] {
            assert!(wrong.parse::<StopSignal>().unwrap_err().contains("SIGUSR1"), "{wrong}");
        }
    }
}
