//! Training of the MNIST network through Burn's `SupervisedTraining`.

use std::path::PathBuf;
use std::str::FromStr;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use burn::lr_scheduler::cosine::CosineAnnealingLrSchedulerConfig;
use burn::module::Module;
use burn::nn::loss::CrossEntropyLossConfig;
use burn::optim::AdamConfig;
use burn::train::metric::{AccuracyMetric, LossMetric};
use burn::train::{ClassificationOutput, InferenceStep, Learner, LearnerSummary, TrainOutput, TrainStep};
use burn_ddp::prelude::*;
use clap::Parser;

use super::train_digits::DigitArgs;
use super::{Cnn, MnistBatch};
use crate::trainer::summary::{Epoch, RankReport, Summary, Work};

/// Trains a small convolutional network on handwritten digits with Burn's trainer, data-parallel.
///
/// Without a launcher, the program starts its ranks itself; under burnrun or torchrun it joins their job.
#[derive(Parser, Debug, Clone)]
#[command(version)]
pub struct LearnerArgs {
    /// Options of both MNIST trainers.
    #[command(flatten)]
    pub digits: DigitArgs,

    /// Folder for metrics, logs and checkpoints; rank 0 writes it
    #[arg(long, default_value = "mnist-artifacts", value_name = "DIR")]
    pub artifacts: PathBuf,

    /// Micro-batches per optimizer step; their gradients are added, as everywhere in Burn's trainer
    #[arg(long, default_value_t = 1, value_name = "K")]
    pub accumulate: usize,

    /// Go on from the checkpoint of this epoch; `last`: of the last one in --artifacts, if there is one
    #[arg(long, value_name = "EPOCH|last")]
    pub resume: Option<Resume>,
}

/// Epoch from whose checkpoint a training goes on.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Resume {
    /// The epoch with this number, from 1.
    After(usize),
    /// The last epoch that has a checkpoint.
    Last,
}

impl FromStr for Resume {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "last" => Ok(Resume::Last),
            _ => text.parse().map(Resume::After).map_err(|_| "the number of an epoch, or `last`".into()),
        }
    }
}

impl LearnerArgs {
    /// Refuses values that cannot work, before any rank is started.
    pub fn check(&self) -> Result<()> {
        ensure!(self.accumulate > 0, "--accumulate 0: a step needs at least one micro-batch");
        self.digits.check()
    }
}

impl Cnn {
    fn classify(&self, batch: MnistBatch) -> ClassificationOutput {
        let logits = self.forward(batch.images);
        let loss = CrossEntropyLossConfig::new().init(&logits.device()).forward(logits.clone(), batch.labels.clone());
        ClassificationOutput::new(loss, logits, batch.labels)
    }
}

impl TrainStep for Cnn {
    type Input = MnistBatch;
    type Output = ClassificationOutput;

    fn step(&self, batch: MnistBatch) -> TrainOutput<ClassificationOutput> {
        let output = self.classify(batch);
        TrainOutput::new(self, output.loss.backward(), output)
    }
}

impl InferenceStep for Cnn {
    type Input = MnistBatch;
    type Output = ClassificationOutput;

    fn step(&self, batch: MnistBatch) -> ClassificationOutput {
        self.classify(batch)
    }
}

/// Trains and reports. *Collective*: every rank calls it with the same arguments.
///
/// # Errors
///
/// If data cannot be read, a peer fails, a file cannot be written, or the training is interrupted.
pub fn run(ddp: &Ddp, args: &LearnerArgs) -> Result<()> {
    let LearnerArgs { digits, artifacts, accumulate, resume } = args;
    let options = &digits.options;
    let device = ddp.device()?;
    let (train, test) = digits.loaders(ddp, &device)?;

    let device = device.autodiff();
    ddp.seed(&device, options.seed);
    let model = digits.model(&device);
    let steps = options.epochs * train.steps_per_epoch().div_ceil(*accumulate);
    let schedule = CosineAnnealingLrSchedulerConfig::new(digits.lr(), steps).init();
    let schedule = schedule.map_err(|reason| anyhow::anyhow!("--lr {}: {reason}", digits.lr()))?;

    let start = Instant::now();
    let mut training = ddp
        .training(artifacts, train.clone(), test)
        .metrics((ddp.metric(AccuracyMetric::new()), ddp.metric(LossMetric::new())))
        .with_default_checkpointers()
        .num_epochs(options.epochs)
        .summary();
    if *accumulate > 1 {
        training = training.grads_accumulation(*accumulate);
    }
    let resume = match resume {
        Some(Resume::Last) => ddp.last_epoch(artifacts)?,
        Some(Resume::After(epoch)) => Some(*epoch),
        None => None,
    };
    if let Some(epoch) = resume {
        training = training.checkpoint(epoch);
    }
    let result = training.launch(Learner::new(model, AdamConfig::new().init(), schedule));
    if let Some(error) = result.error {
        bail!("{error}");
    }
    if ddp.stop_requested() {
        return Ok(());
    }
    if let Some(interruption) = result.interrupted {
        bail!("interrupted: {}", interruption.reason.as_deref().unwrap_or("no reason was given"));
    }

    if let Some(file) = &options.save {
        ddp.save(&result.model.clone().train(), file)?;
    }
    let time = start.elapsed();
    let epochs_run = options.epochs - resume.unwrap_or(0);
    let share = |step| train.plan().share(step, ddp.rank()).len();
    let items = epochs_run * (0..train.steps_per_epoch()).map(share).sum::<usize>();
    let ranks = RankReport::gather(ddp, &result.model, None, Work { items: items as u64, time })?;
    // Only rank 0 has Burn's logs.
    let written = options.summary.is_some() && ddp.is_main();
    let epochs = if written { epochs(args, time)? } else { Vec::new() };
    let summary = Summary::new(ddp.engine(), train.items_per_step(), &epochs, &ranks);
    summary.conclude(ddp, options.summary.as_deref())
}

/// Results of all epochs, also of those before a resume, from Burn's logs. `time`: duration of this run with its
/// evaluations.
fn epochs(args: &LearnerArgs, time: Duration) -> Result<Vec<Epoch>> {
    let summary = LearnerSummary::new(&args.artifacts, &["Accuracy", "Loss"]).map_err(anyhow::Error::msg)?;
    let curve = |splits: &[burn::train::MetricSummary], name: &str| -> Result<Vec<f64>> {
        let metric = splits.iter().find(|metric| metric.name == name);
        let metric = metric.with_context(|| format!("{} has no {name}", args.artifacts.display()))?;
        Ok(metric.entries.iter().map(|entry| entry.value).collect())
    };
    let losses = curve(&summary.metrics.train, "Loss")?;
    let accuracies = curve(&summary.metrics.valid, "Accuracy")?;
    let epoch = |(train_loss, percent): (f64, f64)| Epoch {
        train_loss,
        test_accuracy: percent / 100.0,
        train_time: time / args.digits.options.epochs as u32,
    };
    Ok(losses.into_iter().zip(accuracies).map(epoch).collect())
}
