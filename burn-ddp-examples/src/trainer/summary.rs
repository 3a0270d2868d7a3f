//! Results of a training over all ranks, for programs: `--summary`.

use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use burn::module::Module;
use burn::optim::ModuleOptimizer;
use burn_ddp::{Ddp, MemoryUse, param_hash};
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

/// Work of this rank in all epochs.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Work {
    /// Items of all steps.
    pub items: u64,
    /// Time to train, without evaluations.
    pub time: Duration,
}

/// Report of one rank at the end.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct RankReport {
    /// Items that the rank trained on.
    pub items: u64,
    /// Seconds of training, without evaluations.
    pub seconds: f64,
    /// Part of `seconds` during which backward waited for gradients of other ranks.
    pub wait_seconds: f64,
    /// Hash of the rank's parameters.
    pub param_hash: String,
    /// Memory of the model on the rank.
    pub memory: MemoryUse,
}

impl RankReport {
    /// Gathers the reports of all ranks, by rank. This rank's report holds its `work`, the hash of its `model`, and the
    /// memory of the model and, if given, of the `optimizer`. *Collective*.
    pub fn gather<M: Module>(
        ddp: &Ddp,
        model: &M,
        optimizer: Option<&ModuleOptimizer>,
        work: Work,
    ) -> Result<Vec<RankReport>> {
        let memory = ddp.telemetry().memory();
        let own = RankReport {
            items: work.items,
            seconds: work.time.as_secs_f64(),
            wait_seconds: ddp.telemetry().stats().wait.as_secs_f64(),
            param_hash: param_hash(model)?,
            memory: optimizer.map_or(Ok(memory), |optimizer| memory.with_optimizer(optimizer))?,
        };
        Ok(ddp.group().all_gather_object(&own)?)
    }
}

/// Results as `--summary` writes them.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Summary {
    /// Number of ranks.
    pub world_size: usize,
    /// Engine of the collectives.
    pub engine: String,
    /// Passes over the training data.
    pub epochs: usize,
    /// Items per step over all ranks.
    pub global_batch: usize,
    /// Training items per second over all ranks.
    pub samples_per_second: f64,
    /// Training items per second of each rank.
    pub samples_per_second_per_rank: Vec<f64>,
    /// Share of its training time that each rank waited for other ranks, 0–1.
    pub communication_wait: Vec<f64>,
    /// Share of the test items recognised at the end, 0–1.
    pub test_accuracy: f64,
    /// Mean loss over all items of all ranks, of each epoch.
    pub train_loss: Vec<f64>,
    /// Hash of the parameters of each rank: all equal.
    pub param_hash: Vec<String>,
    /// Memory of the model on each rank, without activations.
    pub memory: Vec<MemoryUse>,
}

impl Summary {
    /// Writes the summary to `file`, if there is one, on rank 0 alone; then checks that all ranks hold the same
    /// parameters.
    pub fn conclude(&self, ddp: &Ddp, file: Option<&Path>) -> Result<()> {
        if let Some(file) = file.filter(|_| ddp.is_main()) {
            self.write(file)?;
        }
        ensure!(
            self.param_hash.iter().all(|hash| *hash == self.param_hash[0]),
            "the ranks ended with different parameters: {:?}",
            self.param_hash
        );
        Ok(())
    }

    /// Summary of the results of all epochs and ranks. `global_batch`: items per optimizer step over all ranks.
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
            memory: ranks.iter().map(|rank| rank.memory).collect(),
        }
    }

    /// Writes the summary as JSON.
    pub fn write(&self, file: &Path) -> Result<()> {
        let mut text = serde_json::to_string_pretty(self)?;
        text.push('\n');
        std::fs::write(file, text).with_context(|| format!("cannot write the summary to {}", file.display()))
    }

    /// Lines under the table: speed of the job and of each rank in `items` (a plural noun) per second, and each rank's
    /// waiting time and memory.
    pub fn speed(&self, items: &str) -> String {
        let mut text = format!(
            "{:.0} {items}/s on {} rank(s), engine {}, {} items per step\n",
            self.samples_per_second, self.world_size, self.engine, self.global_batch
        );
        let ranks = self.samples_per_second_per_rank.iter().zip(&self.communication_wait).zip(&self.memory);
        for (rank, ((speed, wait), memory)) in ranks.enumerate() {
            text += &format!(
                "  rank {rank}: {speed:.0} {items}/s, {:.1} % of the time waiting for gradients; {memory}\n",
                wait * 100.0
            );
        }
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_summary_adds_up_and_survives_json() {
        let memory = MemoryUse::default();
        let rank =
            |items, seconds, wait_seconds| RankReport { items, seconds, wait_seconds, param_hash: "ab".into(), memory };
        let epoch = |train_loss, test_accuracy| Epoch { train_loss, test_accuracy, train_time: Duration::from_secs(1) };
        let summary =
            Summary::new("tcp", 64, &[epoch(0.5, 0.9), epoch(0.25, 0.975)], &[rank(101, 4.0, 1.0), rank(99, 5.0, 0.5)]);
        assert_eq!(summary.samples_per_second, 40.0);
        assert_eq!(summary.samples_per_second_per_rank, [25.25, 19.8]);
        assert_eq!(summary.communication_wait, [0.25, 0.1]);
        assert_eq!((summary.test_accuracy, summary.epochs, summary.world_size), (0.975, 2, 2));
        assert_eq!(summary.train_loss, [0.5, 0.25]);
        assert!(summary.speed("samples").contains("rank 1: 20 samples/s, 10.0 %"), "{summary:?}");

        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("s.json");
        summary.write(&file).unwrap();
        let read: Summary = serde_json::from_str(&std::fs::read_to_string(&file).unwrap()).unwrap();
        assert_eq!(read, summary);
        let error = format!("{:#}", summary.write(dir.path()).unwrap_err());
        assert!(error.contains("cannot write the summary to"), "{error}");
    }
}
