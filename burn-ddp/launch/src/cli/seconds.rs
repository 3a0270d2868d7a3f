//! Durations on the command line, in seconds.

use std::time::Duration;

/// Parses zero or more seconds.
pub(super) fn parse_seconds(text: &str) -> Result<Duration, String> {
    let seconds = text.parse().ok().and_then(|seconds| Duration::try_from_secs_f64(seconds).ok());
    seconds.ok_or_else(|| "expected a number of seconds, 0 or more, such as 10 or 0.5".to_owned())
}

/// Parses more than zero seconds.
pub(super) fn parse_positive_seconds(text: &str) -> Result<Duration, String> {
    let seconds = parse_seconds(text).ok().filter(|seconds| !seconds.is_zero());
    seconds.ok_or_else(|| "expected a number of seconds above 0, such as 10 or 0.5".to_owned())
}
