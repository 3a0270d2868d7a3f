//! How long to wait.

use std::time::Duration;

use crate::{Error, Result};

/// The waits of a [`World`](crate::World). All ranks should use the same.
///
/// ```
/// use burn_ddp_comm::Options;
/// use std::time::Duration;
///
/// let options = Options { timeout: Duration::from_secs(30), ..Options::default() };
/// assert_eq!(options.join_timeout, Duration::from_secs(300));
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Options {
    /// How long one collective may take, from the call on. 10 minutes by default.
    pub timeout: Duration,
    /// How long to wait for all ranks to come together. 5 minutes by default.
    pub join_timeout: Duration,
}

impl Default for Options {
    fn default() -> Self {
        Options { timeout: Duration::from_secs(600), join_timeout: Duration::from_secs(300) }
    }
}

impl Options {
    /// The defaults, changed by `BURN_DDP_TIMEOUT` and `BURN_DDP_JOIN_TIMEOUT` (seconds, fractions allowed).
    ///
    /// # Errors
    /// [`Error::Environment`] if a variable is set to something that is not a positive number of seconds.
    pub fn from_env() -> Result<Options> {
        Options::from_lookup(&|name| std::env::var_os(name).map(|value| value.to_string_lossy().into_owned()))
    }

    /// Like [`from_env`](Options::from_env), with the variables looked up by `lookup`.
    ///
    /// ```
    /// use burn_ddp_comm::Options;
    /// use std::time::Duration;
    ///
    /// let options = Options::from_lookup(&|name| (name == "BURN_DDP_TIMEOUT").then(|| "2.5".into()))?;
    /// assert_eq!(options.timeout, Duration::from_millis(2500));
    /// assert!(Options::from_lookup(&|_| Some("soon".into())).is_err());
    /// # Ok::<(), burn_ddp_comm::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::Environment`] if a variable is set to something that is not a positive number of seconds.
    pub fn from_lookup(lookup: &dyn Fn(&str) -> Option<String>) -> Result<Options> {
        let mut options = Options::default();
        if let Some(timeout) = seconds("BURN_DDP_TIMEOUT", lookup)? {
            options.timeout = timeout;
        }
        if let Some(timeout) = seconds("BURN_DDP_JOIN_TIMEOUT", lookup)? {
            options.join_timeout = timeout;
        }
        Ok(options)
    }
}

fn seconds(name: &str, lookup: &dyn Fn(&str) -> Option<String>) -> Result<Option<Duration>> {
    let Some(text) = lookup(name) else {
        return Ok(None);
    };
    text.trim()
        .parse::<f64>()
        .ok()
        .filter(|seconds| *seconds > 0.0)
        .and_then(|seconds| Duration::try_from_secs_f64(seconds).ok())
        .map(Some)
        .ok_or_else(|| Error::Environment {
            message: format!("{name}={text:?} is not a positive number of seconds (for example {name}=60)"),
        })
}
