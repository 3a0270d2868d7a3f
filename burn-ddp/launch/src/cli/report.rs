//! `burnrun report`: the report of a job, from its log directory.

use std::ffi::OsString;
use std::io::Write;
use std::path::PathBuf;

use clap::Parser;

/// Builds the report of a job from its log directory, writes it there as report.md, and prints it
///
/// Also works while the job runs, and if its burnrun was killed.
#[derive(Debug, Parser)]
#[command(name = "burnrun report", bin_name = "burnrun report")]
struct Args {
    /// The --log-dir of burnrun, for its latest job, or the directory of one job in it
    dir: PathBuf,
}

pub(super) fn main(words: &[OsString]) -> i32 {
    let args: Args = super::parse(words);
    match burn_ddp_launch::rebuild_report(&args.dir) {
        Ok((path, text)) => {
            // Fails if a pager was closed early, which is no error.
            let _ = std::io::stdout().write_all(text.as_bytes());
            super::say(&format!("written to {}", path.display()));
            0
        }
        Err(error) => {
            super::say(&error.to_string());
            1
        }
    }
}
