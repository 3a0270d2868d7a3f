//! `burnrun report`: the report of a job, from its log directory.

use std::ffi::OsString;
use std::io::Write;
use std::path::PathBuf;

use clap::Parser;

/// Builds the report of a job from its log directory, writes it there as report.md, and prints it
///
/// Works also for a job that still runs, or whose burnrun was killed.
#[derive(Debug, Parser)]
#[command(name = "burnrun report", bin_name = "burnrun report")]
struct Args {
    /// What was given as --log-dir (then of its latest job), or the directory of one job in it
    dir: PathBuf,
}

pub(super) fn main(words: &[OsString]) -> i32 {
    let args: Args = super::parse(words);
    match burn_ddp_launch::rebuild_report(&args.dir) {
        Ok((path, text)) => {
            // A pager that was closed early has seen enough.
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
