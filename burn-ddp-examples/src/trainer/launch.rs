//! Starts the ranks of a trainer, and turns its errors into an exit code.

use std::io::{self, Write};
use std::process::ExitCode;

use anyhow::{Result, ensure};
use burn_ddp::{Ddp, Error};

/// Runs `train` on every rank and waits for all of them. Under a launcher the ranks are the launcher's; otherwise they
/// are `nproc` processes on this machine, by default 2: examples run on the CPU, so there are no accelerators to count.
///
/// # Errors
///
/// An error of `train`, an `nproc` that contradicts the launcher, a rank that failed.
pub fn launch(nproc: Option<usize>, train: impl FnOnce(&Ddp) -> Result<()>) -> Result<ExitCode> {
    let mut code = ExitCode::SUCCESS;
    Ddp::launch(nproc.unwrap_or(2), |ddp| {
        let world_size = ddp.world_size();
        if let Some(ranks) = nproc {
            ensure!(
                ranks == world_size,
                "--nproc {ranks}, but the launcher started {world_size} rank(s): leave out --nproc"
            );
        }
        train(&ddp)?;
        code = ddp.exit_code();
        Ok(ddp.finish()?)
    })?;
    Ok(code)
}

/// Exit code of `main`. Prints an error in one line: the launcher repeats a rank's last lines, and a backtrace would
/// push the error out.
pub fn exit_code(result: Result<ExitCode>) -> ExitCode {
    let error = match result {
        Ok(code) => return code,
        Err(error) => error,
    };
    // In one write: other ranks may be writing their errors to the same terminal.
    let _ = io::stderr().write_all(format!("Error: {error:#}\n").as_bytes());
    match error.downcast_ref() {
        // The code of the rank that failed; 130 after Ctrl-C, 75 if the ranks have saved and stopped at a signal.
        Some(Error::Job { exit_code, .. }) => ExitCode::from(u8::try_from(*exit_code).unwrap_or(1)),
        _ => ExitCode::FAILURE,
    }
}
