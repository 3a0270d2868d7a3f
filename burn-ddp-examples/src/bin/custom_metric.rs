//! A metric of your own in Burn's trainer, over all ranks: the share of items that the model is sure of and mistaken
//! about. Needs the crate feature `train`.
//!
//! ```sh
//! cargo run --bin custom_metric --features train -- DIRECTORY   # two ranks; Burn's logs go to the directory
//! ```
//!
//! A metric whose value is a mean over items needs one line more than in plain Burn: `impl MeanMetric`. Then
//! `ddp.metric(…)` makes it exact over all ranks. In torch: a torchmetrics class with `dist_reduce_fx="sum"` states.
#![forbid(unsafe_code)]

use anyhow::Context;
use burn::nn::loss::CrossEntropyLossConfig;
use burn::nn::{Linear, LinearConfig};
use burn::optim::AdamConfig;
use burn::prelude::*;
use burn::tensor::TensorReadError;
use burn::tensor::activation::softmax;
use burn::train::metric::state::{FormatOptions, NumericMetricState};
use burn::train::metric::{
    Adaptor, LossMetric, Metric, MetricMetadata, MetricName, Numeric, NumericEntry, SerializedEntry,
};
use burn::train::{ClassificationOutput, InferenceStep, Learner, LearnerSummary, TrainOutput, TrainStep};
use burn_ddp::prelude::*;
use burn_ddp::train::MeanMetric;
use burn_ddp_examples::mnist::{MnistBatch, MnistBatcher, MnistDataset, Split};

const NAME: &str = "Confident mistakes";

/// Input of the metric.
struct Answers {
    logits: Tensor<2>,
    targets: Tensor<1, Int>,
}

impl Adaptor<Answers> for ClassificationOutput {
    fn adapt(&self) -> Answers {
        Answers { logits: self.output.clone(), targets: self.targets.clone() }
    }
}

#[derive(Clone, Default)]
struct ConfidentMistakes(NumericMetricState);

impl ConfidentMistakes {
    fn format(&self) -> FormatOptions {
        FormatOptions::new(self.name()).unit("%").precision(2)
    }
}

impl Metric for ConfidentMistakes {
    type Input = Answers;

    fn name(&self) -> MetricName {
        MetricName::new(NAME.into())
    }

    fn update(&mut self, item: &Answers, _: &MetricMetadata) -> Result<SerializedEntry, TensorReadError> {
        let [items, _] = item.logits.dims();
        let (certainty, answers) = softmax(item.logits.clone(), 1).max_dim_with_indices(1);
        let mistaken = answers.reshape([items]).not_equal(item.targets.clone());
        let sure = certainty.reshape([items]).greater_scalar(0.9);
        let both = mistaken.int().mul(sure.int()).sum().try_into_scalar::<f64>()?;
        self.0.update(100.0 * both / items as f64, items);
        Ok(self.0.compute_update(self.format()))
    }

    fn compute(&mut self) -> Result<SerializedEntry, TensorReadError> {
        Ok(self.0.compute_final(self.format()))
    }

    fn clear(&mut self) {
        self.0.reset();
    }
}

impl Numeric for ConfidentMistakes {
    fn value(&self) -> Option<NumericEntry> {
        Some(self.0.current_value())
    }

    fn running_value(&self) -> Option<NumericEntry> {
        Some(self.0.running_value())
    }

    fn final_value(&self) -> NumericEntry {
        self.0.final_value()
    }
}

/// The value over several batches is their mean weighted by items, which is what `ddp.metric` needs to know.
impl MeanMetric for ConfidentMistakes {}

#[derive(Module, Debug)]
struct Model {
    linear: Linear,
}

impl Model {
    fn classify(&self, batch: MnistBatch) -> ClassificationOutput {
        let logits = self.linear.forward(batch.images.flatten(1, 3));
        let loss = CrossEntropyLossConfig::new().init(&logits.device()).forward(logits.clone(), batch.labels.clone());
        ClassificationOutput::new(loss, logits, batch.labels)
    }
}

impl TrainStep for Model {
    type Input = MnistBatch;
    type Output = ClassificationOutput;

    fn step(&self, batch: MnistBatch) -> TrainOutput<ClassificationOutput> {
        let output = self.classify(batch);
        TrainOutput::new(self, output.loss.backward(), output)
    }
}

impl InferenceStep for Model {
    type Input = MnistBatch;
    type Output = ClassificationOutput;

    fn step(&self, batch: MnistBatch) -> ClassificationOutput {
        self.classify(batch)
    }
}

fn main() -> anyhow::Result<()> {
    burn_ddp_examples::help(include_str!("custom_metric.rs"));
    let directory = std::env::args_os().nth(1).context("usage: custom_metric DIRECTORY")?;
    Ddp::launch(2, |ddp| {
        let device = ddp.device()?.autodiff();
        ddp.seed(&device, 42);
        let model = Model { linear: LinearConfig::new(28 * 28, 10).init(&device) };
        let train = ddp.loader(MnistBatcher).batch_size(32).shuffle(42).build(MnistDataset::sample(Split::Train)?)?;
        let valid = ddp.eval_loader(MnistBatcher).batch_size(32).build(MnistDataset::sample(Split::Test)?)?;
        let result = ddp
            .training(&directory, train, valid)
            .metrics((ddp.metric(ConfidentMistakes::default()), ddp.metric(LossMetric::new())))
            .num_epochs(2)
            .launch(Learner::new(model, AdamConfig::new().init(), 1e-3));
        if let Some(error) = result.error {
            anyhow::bail!("{error}");
        }
        if ddp.is_main() {
            let summary = LearnerSummary::new(&directory, &[NAME]).map_err(anyhow::Error::msg)?;
            for epoch in summary.metrics.valid.iter().flat_map(|metric| &metric.entries) {
                // The share of 1,000 test items is a whole number of items: each item counts once.
                println!("epoch {}: {:.1} of 1000 test items", epoch.step, 10.0 * epoch.value);
            }
        }
        Ok(ddp.finish()?)
    })
}
