//! What a user of a trainer sees: progress while it runs, a table, a summary for programs.

use std::io::IsTerminal;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use burn::module::Module;
use burn_ddp::{Ddp, param_hash};
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use serde::{Deserialize, Serialize};

/// Results of one epoch, over all ranks.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Epoch {
    /// Mean loss over all items of all ranks.
    pub train_loss: f64,
    /// Share of the test items that were recognised after this epoch, 0–1.
    pub test_accuracy: f64,
    /// Time to train, without the evaluation.
    pub train_time: Duration,
}

/// What this rank trained on, in all epochs.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Work {
    /// Items of all steps.
    pub items: u64,
    /// Time to train, without evaluations.
    pub time: Duration,
}

/// Gathers what all ranks did, shows the last lines, and writes the summary to `file`, on rank 0. *Collective*.
///
/// # Errors
///
/// A peer that failed, a file that cannot be written, ranks that do not hold the same parameters.
pub fn conclude<M: Module>(ddp: &Ddp, model: &M, display: &Display, run: Run<'_>, file: Option<&Path>) -> Result<()> {
    let own = RankReport {
        items: run.work.items,
        seconds: run.work.time.as_secs_f64(),
        wait_seconds: ddp.telemetry().stats().wait.as_secs_f64(),
        param_hash: param_hash(model)?,
    };
    let ranks = ddp.group().all_gather_object(&own)?;
    let summary = Summary::new(ddp.engine(), run.global_batch, run.epochs, &ranks);
    display.finish(&summary.speed());
    if let Some(file) = file.filter(|_| ddp.is_main()) {
        summary.write(file)?;
    }
    ensure!(
        ranks.iter().all(|rank| rank.param_hash == own.param_hash),
        "the ranks ended with different parameters: {:?}",
        summary.param_hash
    );
    Ok(())
}

/// What a training has to show.
#[derive(Debug, Clone, Copy)]
pub struct Run<'a> {
    /// Of all ranks.
    pub epochs: &'a [Epoch],
    /// Items per optimizer step over all ranks.
    pub global_batch: usize,
    /// Of this rank.
    pub work: Work,
}

/// What each rank tells at the end.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct RankReport {
    /// Items that this rank trained on.
    pub items: u64,
    /// Seconds that it trained, without evaluations.
    pub seconds: f64,
    /// Seconds of those that backward stood still for gradients of other ranks.
    pub wait_seconds: f64,
    /// Hash of its parameters.
    pub param_hash: String,
}

/// What `--summary` writes.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Summary {
    /// Number of ranks.
    pub world_size: usize,
    /// What carried the collectives.
    pub engine: String,
    /// Passes over the training data.
    pub epochs: usize,
    /// Items per step over all ranks.
    pub global_batch: usize,
    /// Training items per second over all ranks.
    pub samples_per_second: f64,
    /// The same, of each rank.
    pub samples_per_second_per_rank: Vec<f64>,
    /// Share of its training time that each rank waited for others, 0–1.
    pub communication_wait: Vec<f64>,
    /// Share of the test items recognised at the end, 0–1.
    pub test_accuracy: f64,
    /// Mean loss over all items of all ranks, of each epoch.
    pub train_loss: Vec<f64>,
    /// Hash of the parameters of each rank: all equal.
    pub param_hash: Vec<String>,
}

impl Summary {
    /// Puts together what the ranks and epochs yielded.
    pub fn new(engine: &str, global_batch: usize, epochs: &[Epoch], ranks: &[RankReport]) -> Self {
        let slowest = ranks.iter().map(|rank| rank.seconds).fold(0.0, f64::max);
        let items: u64 = ranks.iter().map(|rank| rank.items).sum();
        Self {
            world_size: ranks.len(),
            engine: engine.to_string(),
            epochs: epochs.len(),
            global_batch,
            samples_per_second: items as f64 / slowest,
            samples_per_second_per_rank: ranks.iter().map(|rank| rank.items as f64 / rank.seconds).collect(),
            communication_wait: ranks.iter().map(|rank| rank.wait_seconds / rank.seconds).collect(),
            test_accuracy: epochs.last().map_or(0.0, |epoch| epoch.test_accuracy),
            train_loss: epochs.iter().map(|epoch| epoch.train_loss).collect(),
            param_hash: ranks.iter().map(|rank| rank.param_hash.clone()).collect(),
        }
    }

    /// Writes the summary as JSON.
    ///
    /// # Errors
    ///
    /// The file cannot be written.
    pub fn write(&self, file: &Path) -> Result<()> {
        let mut text = serde_json::to_string_pretty(self)?;
        text.push('\n');
        std::fs::write(file, text).with_context(|| format!("cannot write the summary to {}", file.display()))
    }

    /// The lines under the table: speed and waiting, in total and of each rank.
    pub fn speed(&self) -> String {
        let mut text = format!(
            "{:.0} samples/s on {} rank(s), engine {}, {} items per step\n",
            self.samples_per_second, self.world_size, self.engine, self.global_batch
        );
        for (rank, (speed, wait)) in self.samples_per_second_per_rank.iter().zip(&self.communication_wait).enumerate() {
            text += &format!(
                "  rank {rank}: {speed:.0} samples/s, {:.1} % of the time waiting for gradients\n",
                wait * 100.0
            );
        }
        text
    }
}

/// Rank 0's display for the whole job: a bar on a terminal, and the table, a row per epoch as it ends.
#[derive(Debug)]
pub struct Display {
    bar: ProgressBar,
    main: bool,
    epochs: usize,
}

impl Display {
    /// `main`: whether this rank shows anything. `steps`: of one epoch.
    pub fn new(main: bool, epochs: usize, steps: usize) -> Self {
        let shown = main && std::io::stderr().is_terminal();
        let target = if shown { ProgressDrawTarget::stderr() } else { ProgressDrawTarget::hidden() };
        let style = ProgressStyle::with_template("{prefix} {wide_bar} {pos}/{len} steps, {eta} left")
            .unwrap_or_else(|_| ProgressStyle::default_bar());
        let bar = ProgressBar::with_draw_target(Some((epochs * steps) as u64), target).with_style(style);
        let display = Self { bar, main, epochs };
        display.line(&format!("{:>5}  {:>10}  {:>13}  {:>8}", "epoch", "train loss", "test accuracy", "time"));
        display.begin(0);
        display
    }

    /// An epoch begins, counted from 0.
    pub fn begin(&self, epoch: usize) {
        self.bar.set_prefix(format!("epoch {}/{}", epoch + 1, self.epochs));
    }

    /// A step was made.
    pub fn step(&self) {
        self.bar.inc(1);
    }

    /// An epoch has ended, counted from 0.
    pub fn end(&self, number: usize, epoch: &Epoch) {
        self.line(&format!(
            "{:>5}  {:>10.4}  {:>11.2} %  {:>6.1} s",
            number + 1,
            epoch.train_loss,
            epoch.test_accuracy * 100.0,
            epoch.train_time.as_secs_f64()
        ));
    }

    /// Removes the bar and prints the last lines.
    pub fn finish(&self, text: &str) {
        self.bar.finish_and_clear();
        self.line(text.trim_end());
    }

    fn line(&self, text: &str) {
        if self.main {
            self.bar.suspend(|| println!("{text}"));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_summary_adds_up_and_survives_json() {
        let rank = |items, seconds, wait_seconds| RankReport { items, seconds, wait_seconds, param_hash: "ab".into() };
        let epoch = |train_loss, test_accuracy| Epoch { train_loss, test_accuracy, train_time: Duration::from_secs(1) };
        let summary =
            Summary::new("tcp", 64, &[epoch(0.5, 0.9), epoch(0.25, 0.975)], &[rank(101, 4.0, 1.0), rank(99, 5.0, 0.5)]);
        assert_eq!(summary.samples_per_second, 40.0);
        assert_eq!(summary.samples_per_second_per_rank, [25.25, 19.8]);
        assert_eq!(summary.communication_wait, [0.25, 0.1]);
        assert_eq!((summary.test_accuracy, summary.epochs, summary.world_size), (0.975, 2, 2));
        assert_eq!(summary.train_loss, [0.5, 0.25]);
        assert!(summary.speed().contains("rank 1: 20 samples/s, 10.0 %"), "{}", summary.speed());

        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("s.json");
        summary.write(&file).unwrap();
        let read: Summary = serde_json::from_str(&std::fs::read_to_string(&file).unwrap()).unwrap();
        assert_eq!(read, summary);
        let error = format!("{:#}", summary.write(dir.path()).unwrap_err());
        assert!(error.contains("cannot write the summary to"), "{error}");
    }
}
