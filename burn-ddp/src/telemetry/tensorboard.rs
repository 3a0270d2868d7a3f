//! `Telemetry::tensorboard`: curves in TensorBoard's event files.

use std::fs::{self, OpenOptions};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use super::Telemetry;
use super::tensorboard_encoding::{scalar, version};
use crate::checkpoint::scheme;
use crate::file_failure::FileFailure;
use crate::{Error, Result, main_first};

/// Writes curves of a run for TensorBoard; from [`Telemetry::tensorboard`]. Rank 0 writes; on other ranks the methods
/// do nothing.
#[derive(Debug)]
pub struct TensorBoard {
    telemetry: Telemetry,
    /// Rank 0's event file.
    file: Option<PathBuf>,
}

impl Telemetry {
    /// Begins an event file in `directory` (created on rank 0's machine if missing) for `tensorboard --logdir
    /// directory`. *Collective*. Costs one small all-gather.
    ///
    /// # Errors
    ///
    /// [`Error::File`] on every rank if rank 0 cannot write to the directory.
    ///
    /// # Example
    ///
    /// ```
    /// # use burn_ddp::prelude::*;
    /// # let directory = tempfile::tempdir()?;
    /// # let directory = directory.path();
    /// Ddp::spawn(2, |ddp| {
    ///     let board = ddp.telemetry().tensorboard(directory)?;
    ///     for step in 0..3 {
    ///         let loss = ddp.mean(1.0 / (step + 1) as f32)?; // on every rank
    ///         board.scalar("loss", loss, step)?;
    ///         board.telemetry(step)?;
    ///     }
    ///     Ok(())
    /// })?;
    /// # anyhow::Ok(())
    /// ```
    #[track_caller]
    pub fn tensorboard(&self, directory: impl AsRef<Path>) -> Result<TensorBoard> {
        let directory = directory.as_ref();
        let file = main_first::on_main(self.ddp.group(), || {
            begin(directory).map_err(|e| FileFailure::of("could not begin an event file in", directory, e))
        })?;
        Ok(TensorBoard { telemetry: self.clone(), file: self.ddp.is_main().then_some(file) })
    }
}

impl TensorBoard {
    /// Adds rank 0's value of `tag` at `step`. Not collective: for a mean over the ranks, call
    /// [`Ddp::mean`](crate::Ddp::mean) first. The value is in the file when this returns.
    ///
    /// # Errors
    ///
    /// [`Error::File`] on rank 0 if it cannot write.
    ///
    /// # Example
    ///
    /// As in [`Telemetry::tensorboard`].
    pub fn scalar(&self, tag: &str, value: f32, step: u64) -> Result<()> {
        self.write(|| scalar(tag, value, step, now()))
    }

    /// Adds rank 0's times of the last step, in milliseconds: `step/time`, and its parts `step/backward`, `step/wait`,
    /// `step/data`, `step/calls`; and `step/per_second`. With a [loss scale](crate::WrapConfig::with_loss_scaling) also
    /// `step/loss_scale` and `step/skipped`, the number of skipped steps so far. See [`Stats`](crate::Stats). Not
    /// collective.
    ///
    /// # Errors
    ///
    /// Those of [`scalar`](Self::scalar).
    ///
    /// # Example
    ///
    /// As in [`Telemetry::tensorboard`].
    pub fn telemetry(&self, step: u64) -> Result<()> {
        let last = self.telemetry.last_step();
        let seconds = last.time().as_secs_f64();
        if seconds == 0.0 {
            return Ok(());
        }
        self.write(|| {
            let parts = [("time", last.time()), ("backward", last.backward), ("wait", last.wait)];
            let parts = parts.into_iter().chain([("data", last.data), ("calls", last.calls)]);
            let values = parts.map(|(tag, time)| (tag, time.as_secs_f64() * 1e3));
            let values = values.chain([("per_second", 1.0 / seconds)]);
            let now = now();
            let scale = self.telemetry.loss_scale().into_iter();
            let skipped = self.telemetry.stats().skipped as f64;
            let values = values.chain(scale.flat_map(|scale| [("loss_scale", scale), ("skipped", skipped)]));
            values.flat_map(|(tag, value)| scalar(&format!("step/{tag}"), value as f32, step, now)).collect()
        })
    }

    /// Appends records on rank 0, in one write, so that readers never see part of a record.
    fn write(&self, records: impl FnOnce() -> Vec<u8>) -> Result<()> {
        let Some(file) = &self.file else { return Ok(()) };
        let written = OpenOptions::new().append(true).open(file).and_then(|mut file| file.write_all(&records()));
        written.map_err(|e| Error::file(FileFailure::of("could not write to", file, e)))
    }
}

/// A new event file in `directory`. TensorBoard reads the files of a directory in the order of their names.
fn begin(directory: &Path) -> std::io::Result<PathBuf> {
    if scheme(directory).is_some() {
        return Err(std::io::Error::other("a URL is not a folder"));
    }
    fs::create_dir_all(directory)?;
    let (time, pid) = (now(), std::process::id());
    // Two files that a process begins in the same second differ in the fraction of the time.
    let path = directory.join(format!("events.out.tfevents.{time:017.6}.{pid}"));
    OpenOptions::new().write(true).create_new(true).open(&path)?.write_all(&version(time))?;
    Ok(path)
}

/// Seconds since 1970.
fn now() -> f64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs_f64()
}
