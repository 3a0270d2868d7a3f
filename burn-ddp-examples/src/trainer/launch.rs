//! What the trainers' command lines have in common.

use std::io::{self, Write};
use std::path::Path;
use std::process::ExitCode;

use anyhow::{Result, ensure};
use burn_ddp::{Ddp, Error};

/// Runs `train` on every rank, and waits for all of them: those of the launcher that started this process, else `nproc` processes
/// on this machine; 2 unless it says so, since the examples are built for the CPU and there is no accelerator to count.
///
/// # Errors
///
/// What `train` returns; an `nproc` that contradicts the launcher; a rank that failed.
pub fn launch(nproc: Option<usize>, train: impl FnOnce(&Ddp) -> Result<()>) -> Result<()> {
    Ddp::launch(nproc.unwrap_or(2), |ddp| {
        let world_size = ddp.world_size();
        if let Some(ranks) = nproc {
            ensure!(
                ranks == world_size,
                "--nproc {ranks}, but the launcher started {world_size} rank(s): leave out --nproc"
            );
        }
        train(&ddp)?;
        Ok(ddp.finish()?)
    })
}

/// What `main` returns. Shows an error in one line: the launcher repeats a rank's last lines, and a backtrace would push it out.
pub fn exit_code(result: Result<()>) -> ExitCode {
    let Err(error) = result else { return ExitCode::SUCCESS };
    // In one write: other ranks may be writing theirs to the same place.
    let _ = io::stderr().write_all(format!("Error: {error:#}\n").as_bytes());
    match error.downcast_ref() {
        // As the rank that failed, or 130 after Ctrl-C.
        Some(Error::Job { exit_code, .. }) => ExitCode::from(u8::try_from(*exit_code).unwrap_or(1)),
        _ => ExitCode::FAILURE,
    }
}

/// Whether `file`, the value of `option`, can be written: better now than after the training.
///
/// # Errors
///
/// It is a folder, or its folder does not exist.
pub fn check_writable(option: &str, file: &Path) -> Result<()> {
    let shown = file.display();
    ensure!(!file.is_dir(), "{option} {shown}: this is a folder, not a file");
    let folder = file.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    ensure!(folder.is_dir(), "{option} {shown}: the folder {} does not exist", folder.display());
    Ok(())
}
