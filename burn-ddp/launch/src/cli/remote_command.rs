//! `burnrun remote`: this host's part of a job that `burnrun --hostfile` or `--host` on another machine starts.

use std::ffi::OsString;

use burn_ddp_launch::hosts::{Answer, Remote};

use super::options::Cli;
use super::say;

/// Runs one launcher, whose command line and secret come on stdin. Its answers are for burnrun, not for a person.
pub(super) fn main() -> i32 {
    let (report, answer, code) = match run() {
        Ok(None) => return 1,
        Ok(Some((report, code))) => (report, Answer::Ended(code), code),
        Err((report, code)) => (report, Answer::Failed(code), code),
    };
    answer.say_with(&report);
    code
}

/// The report and the exit code; `None` if stdin ended before an order came.
fn run() -> Result<Option<(String, i32)>, (String, i32)> {
    let failed = |error: burn_ddp_launch::LaunchError| (error.to_string(), error.exit_code());
    let Some(remote) = Remote::report_for_duty().map_err(failed)? else { return Ok(None) };
    let words: Vec<OsString> = remote.words().iter().map(OsString::from).collect();
    let read = Cli::try_read(&words).map_err(|error| (error.to_string(), error.exit_code()))?;
    let launcher = read.launcher().and_then(|launcher| remote.complete(launcher)).map_err(failed)?;
    let outcome = launcher.notices(say).run().map_err(failed)?;
    Ok(Some((outcome.to_string(), outcome.exit_code)))
}
