//! Burn's trainer over several ranks: the same curves, counts and decisions as Burn's own on one device.
#![cfg(feature = "train")]

mod halves;
mod killed;
mod sharded;
mod stopped;

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::{Arc, Mutex};

use burn::data::dataloader::DataLoaderBuilder;
use burn::data::dataloader::batcher::Batcher;
use burn::data::dataset::{Dataset, DatasetError};
use burn::lr_scheduler::linear::LinearLrSchedulerConfig;
use burn::lr_scheduler::module_lr_scheduler::{ModuleLearningRate, ModuleLrScheduler};
use burn::module::{ModuleMapper, Param};
use burn::nn::loss::CrossEntropyLossConfig;
use burn::nn::{BatchNorm, BatchNormConfig, Linear, LinearConfig};
use burn::optim::momentum::MomentumConfig;
use burn::optim::{AdamConfig, GradientsParams, ModuleOptimizer, SgdConfig};
use burn::prelude::*;
use burn::tensor::DType;
use burn::tensor::activation::log_softmax;
use burn::train::checkpoint::KeepLastNCheckpoints;
use burn::train::logger::{InMemoryMetricLogger, MetricLogger};
use burn::train::metric::store::{Aggregate, Direction, EpochSummary, MetricsUpdate, Split};
use burn::train::metric::{
    AccuracyMetric, ClassReduction, FBetaScoreMetric, LossMetric, MetricDefinition, NumericEntry,
};
use burn::train::{
    ClassificationOutput, InferenceStep, Interrupter, Learner, LearningResult, MetricEarlyStoppingStrategy,
    StoppingCondition, SupervisedTraining, TrainOutput, TrainStep,
};
use burn_ddp::nn::SyncBatchNorm;
use burn_ddp::prelude::*;
use burn_ddp::scale_loss;
use burn_ddp::train::SilentRenderer;
use burn_ddp_tests::{device, distance, number, values};

const FEATURES: usize = 5;
const CLASSES: usize = 3;
/// Items per step over all ranks.
const BATCH: usize = 12;

#[derive(Clone, Debug)]
struct Item {
    features: [f32; FEATURES],
    class: i64,
}

/// Points in space, whose class depends on their place, with some noise. Item `broken` cannot be read.
#[derive(Clone)]
struct Points {
    salt: u64,
    items: usize,
    broken: Option<usize>,
}

impl Points {
    fn new(salt: u64, items: usize) -> Self {
        Points { salt, items, broken: None }
    }
}

impl Dataset<Item> for Points {
    fn get(&self, index: usize) -> Result<Item, DatasetError> {
        if self.broken == Some(index) {
            return Err(DatasetError::new(std::io::Error::other(format!("item {index} is torn"))));
        }
        let features = std::array::from_fn(|i| number(index * FEATURES + i, self.salt) as f32);
        let score = features[0] + 0.5 * features[1] * features[2];
        let class = if score > 0.3 { 2 } else { i64::from(score > -0.3) };
        Ok(Item { features, class })
    }

    fn len(&self) -> usize {
        self.items
    }
}

#[derive(Clone, Debug)]
struct Batch {
    x: Tensor<2>,
    classes: Tensor<1, Int>,
    /// Number of rows, at the beginning, that go through the model's rare branch, if it has one.
    rare: usize,
}

/// Batches whose rare items come first.
#[derive(Clone)]
struct Together;

impl Batcher<Item, Batch> for Together {
    fn batch(&self, mut items: Vec<Item>, device: &Device) -> Batch {
        let (n, is_rare) = (items.len(), |item: &Item| item.features[0] > 0.4);
        items.sort_by_key(|item| !is_rare(item));
        let x: Vec<f32> = items.iter().flat_map(|item| item.features).collect();
        let classes: Vec<i64> = items.iter().map(|item| item.class).collect();
        Batch {
            x: Tensor::from_data(TensorData::new(x, [n, FEATURES]), device),
            classes: Tensor::from_data(TensorData::new(classes, [n]), device),
            rare: items.iter().filter(|item| is_rare(item)).count(),
        }
    }
}

#[derive(Module, Debug)]
struct Net {
    a: Linear,
    norm: Option<BatchNorm>,
    sync_norm: Option<SyncBatchNorm>,
    /// Layer whose output is added to that of the first layer for rare items.
    rare: Option<Linear>,
    b: Linear,
    /// Maps the model between backward and step.
    shrinks: bool,
    /// Computes the output twice more after the backward, as a program that logs may do.
    looks_again: bool,
    /// Computes in f16.
    halves: bool,
    /// Leaves the loss as it is, whatever its scale.
    forgets_scale: bool,
    /// Panics in this split: `training`, `validation` or none.
    panics_in: String,
}

impl Net {
    fn new(norm: bool, device: &Device) -> Self {
        Net {
            a: LinearConfig::new(FEATURES, 16).init(device),
            norm: norm.then(|| BatchNormConfig::new(16).init(device)),
            sync_norm: None,
            rare: None,
            b: LinearConfig::new(16, CLASSES).init(device),
            shrinks: false,
            looks_again: false,
            halves: false,
            forgets_scale: false,
            panics_in: String::new(),
        }
    }

    fn forward(&self, x: Tensor<2>, rare: usize) -> Tensor<2> {
        let x = if self.halves { x.cast(DType::F16) } else { x };
        let mut h = self.a.forward(x.clone());
        if let Some(branch) = self.rare.as_ref().filter(|_| rare > 0) {
            let rows = h.dims()[0];
            let first = h.clone().narrow(0, 0, rare) + branch.forward(x.narrow(0, 0, rare));
            h = if rare < rows { Tensor::cat(vec![first, h.narrow(0, rare, rows - rare)], 0) } else { first };
        }
        h = h.tanh();
        if let Some(norm) = &self.norm {
            h = norm.forward::<2>(h);
        }
        if let Some(norm) = &self.sync_norm {
            h = norm.forward(h);
        }
        self.b.forward(h).cast(DType::F32)
    }
}

impl TrainStep for Net {
    type Input = Batch;
    type Output = ClassificationOutput;

    fn step(&self, batch: Batch) -> TrainOutput<ClassificationOutput> {
        assert_ne!(self.panics_in, "training");
        killed::killed_in_this_step();
        stopped::count(true);
        let output = self.forward(batch.x.clone(), batch.rare);
        let loss = CrossEntropyLossConfig::new().init(&output.device()).forward(output.clone(), batch.classes.clone());
        let grads = if self.forgets_scale { loss.backward() } else { scale_loss(&loss).backward() };
        if self.looks_again {
            (0..2).for_each(|_| drop(self.forward(batch.x.clone(), batch.rare)));
        }
        TrainOutput::new(self, grads, ClassificationOutput::new(loss, output, batch.classes))
    }

    fn optimize(self, optim: &mut ModuleOptimizer, lr: ModuleLearningRate, grads: GradientsParams) -> Self {
        halves::count_step();
        let model = if self.shrinks { self.map(&mut Shrink) } else { self };
        optim.step(lr, model, grads)
    }
}

/// A weight decay that the user's program applies itself.
struct Shrink;

impl ModuleMapper for Shrink {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        param.map(|t| match t.is_require_grad() {
            true => (t * 0.98).detach().require_grad(),
            false => t,
        })
    }
}

impl InferenceStep for Net {
    type Input = Batch;
    type Output = ClassificationOutput;

    /// With the loss of each item, so that the mean counts items.
    fn step(&self, batch: Batch) -> ClassificationOutput {
        assert_ne!(self.panics_in, "validation");
        stopped::count(false);
        let output = self.forward(batch.x, batch.rare);
        let loss =
            log_softmax(output.clone(), 1).gather(1, batch.classes.clone().unsqueeze_dim(1)).neg().squeeze_dim(1);
        ClassificationOutput::new(loss, output, batch.classes)
    }
}

/// Values of splits, by split, metric and epoch.
type Finals = BTreeMap<(String, String, usize), f64>;

/// A logger that keeps the values that Burn stores at the end of splits.
#[derive(Clone, Default)]
struct Recorder {
    finals: Arc<Mutex<Finals>>,
    memory: Arc<Mutex<InMemoryMetricLogger>>,
}

impl MetricLogger for Recorder {
    fn log(&mut self, update: MetricsUpdate, epoch: usize, split: &Split) {
        for numeric in &update.entries_numeric {
            // The value that `find_metric` compares, not the text that the metric also logs.
            if let Ok(NumericEntry::Final(value)) =
                NumericEntry::deserialize(&numeric.entry.serialized_entry.serialized)
            {
                let name = format!("{:?}", numeric.entry.metric_id);
                let name = name.split('"').nth(1).unwrap().to_string();
                self.finals.lock().unwrap().insert((split.to_string(), name, epoch), value);
            }
        }
        self.memory.lock().unwrap().log(update, epoch, split);
    }

    fn read_numeric(&mut self, name: &str, epoch: usize, split: &Split) -> Result<Vec<NumericEntry>, String> {
        self.memory.lock().unwrap().read_numeric(name, epoch, split)
    }

    fn log_metric_definition(&mut self, definition: MetricDefinition) {
        self.memory.lock().unwrap().log_metric_definition(definition);
    }

    fn log_epoch_summary(&mut self, summary: EpochSummary) {
        self.memory.lock().unwrap().log_epoch_summary(summary);
    }
}

/// A training, for any number of ranks.
#[derive(Clone)]
struct Job {
    train: Points,
    valid: Points,
    epochs: usize,
    accumulation: Option<usize>,
    optim: fn() -> ModuleOptimizer,
    shuffle: bool,
    /// Settings under which parameters are sharded.
    sharding: Option<WrapConfig>,
}

impl Job {
    fn new() -> Self {
        let sgd = || SgdConfig::new().with_momentum(Some(MomentumConfig::new())).init();
        let (train, valid) = (Points::new(1, 96), Points::new(2, 50));
        Job { train, valid, epochs: 3, accumulation: None, optim: sgd, shuffle: false, sharding: None }
    }

    fn configure(&self, training: SupervisedTraining<Net>, recorder: &Recorder) -> SupervisedTraining<Net> {
        let training = training
            .num_epochs(self.epochs)
            .renderer(Box::new(SilentRenderer))
            .with_metric_logger(recorder.clone())
            .with_application_logger(None);
        match self.accumulation {
            Some(k) => training.grads_accumulation(k),
            None => training,
        }
    }

    fn learner(&self, model: Net) -> Learner<Net> {
        Learner::new(model, (self.optim)(), Self::lr())
    }

    /// Learning rate that falls with each optimizer step, so that the curve depends on the number of steps.
    fn lr() -> ModuleLrScheduler {
        LinearLrSchedulerConfig::new(0.1, 0.01, 30).init().unwrap()
    }

    /// Burn's own trainer on one device.
    fn alone(&self, model: Net) -> Outcome {
        let recorder = Recorder::default();
        let train = DataLoaderBuilder::new(Together).batch_size(BATCH).build(self.train.clone());
        let valid = DataLoaderBuilder::new(Together).batch_size(BATCH).build(self.valid.clone());
        let training =
            SupervisedTraining::new("unused", train, valid).metrics((AccuracyMetric::new(), LossMetric::new()));
        let result = self.configure(training, &recorder).launch(self.learner(model));
        Outcome::new(&recorder, &result)
    }

    /// Runs the training on this rank and returns its outcome; `set` may change the settings of the trainer.
    fn on_rank(
        &self,
        ddp: &Ddp,
        model: Net,
        directory: &Path,
        set: impl FnOnce(SupervisedTraining<Net>) -> SupervisedTraining<Net>,
    ) -> anyhow::Result<Outcome> {
        let recorder = Recorder::default();
        let loader = ddp.loader(Together).global_batch_size(BATCH);
        let loader = if self.shuffle { loader.shuffle(7) } else { loader };
        let train = loader.build(self.train.clone())?;
        let valid = ddp.eval_loader(Together).batch_size(5).build(self.valid.clone())?;
        let (config, learner) = match &self.sharding {
            Some(config) => (config.clone(), ddp.learner(model, (self.optim)(), Self::lr(), config)?),
            None => (WrapConfig::new(), self.learner(model)),
        };
        let training = ddp
            .training_with(directory, train, valid, &config)
            .metrics((ddp.metric(AccuracyMetric::new()), ddp.metric(LossMetric::new())));
        let training = set(self.configure(training, &recorder));
        let mut result = training.launch(learner);
        if self.sharding.is_some() {
            // After an error the other ranks' parts cannot be gathered.
            result.model = if result.error.is_none() { ddp.unwrap(result.model)? } else { self::model() };
        }
        Ok(Outcome::new(&recorder, &result))
    }

    /// Trains on `world` ranks from `model`; checks that they agree, and returns the outcome.
    fn together(&self, world: usize, model: &Net) -> Outcome {
        let all = Ddp::spawn(world, |ddp| self.on_rank(&ddp, model.clone(), Path::new("unused"), |t| t)).unwrap();
        for other in &all {
            assert_eq!(other.error, None);
            assert_eq!(other.finals, all[0].finals, "world {world}");
            assert_eq!(other.hash, all[0].hash, "world {world}");
        }
        all.into_iter().next().unwrap()
    }
}

#[derive(Debug)]
struct Outcome {
    finals: Finals,
    values: Vec<Vec<f64>>,
    hash: String,
    error: Option<String>,
    interrupted: Option<Option<String>>,
}

impl Outcome {
    fn new(recorder: &Recorder, result: &LearningResult<Net>) -> Self {
        Outcome {
            finals: recorder.finals.lock().unwrap().clone(),
            values: values(&result.model),
            hash: param_hash(&result.model).unwrap(),
            error: result.error.as_ref().map(|error| error.to_string()),
            interrupted: result.interrupted.as_ref().map(|interruption| interruption.reason.clone()),
        }
    }

    fn epochs(&self) -> usize {
        self.finals.keys().map(|(_, _, epoch)| *epoch).max().unwrap_or(0)
    }

    #[track_caller]
    fn follows(&self, reference: &Outcome, what: &str) {
        assert_eq!(self.finals.len(), reference.finals.len(), "{what}");
        for (key, value) in &reference.finals {
            let mine = self.finals[key];
            let tolerance = if key.1 == "Accuracy" { 1e-12 } else { 2e-5 };
            assert!((mine - value).abs() <= tolerance * value.abs(), "{what}: {key:?} is {mine}, not {value}");
        }
        let d = distance(&self.values, &reference.values);
        assert!(d <= 1e-5, "{what}: parameters are {d:e} apart");
    }
}

fn model() -> Net {
    Net::new(false, &device().autodiff())
}

#[test]
fn all_worlds_follow_burns_trainer() {
    let (job, model) = (Job::new(), model());
    let alone = job.alone(model.clone());
    let loss = |epoch| alone.finals[&("train".into(), "Loss".into(), epoch)];
    assert!(loss(3) < 0.8 * loss(1), "nothing is learned: {:?}", alone.finals);
    let worlds: Vec<Outcome> = [1, 2, 4].map(|world| job.together(world, &model)).into();
    for (outcome, world) in worlds.iter().zip([1, 2, 4]) {
        outcome.follows(&alone, &format!("world {world}"));
        for (key, accuracy) in outcome.finals.iter().filter(|(key, _)| key.1 == "Accuracy") {
            assert_eq!(*accuracy, worlds[0].finals[key], "counts do not depend on the number of ranks");
        }
    }
}

#[test]
fn logical_ranks_train_and_measure_the_same_bits_on_any_number_of_ranks() {
    let (job, model) = (Job { train: Points::new(1, 90), ..Job::new() }, model());
    let run = |world: usize| {
        let all = Ddp::spawn(world, |ddp| {
            ddp.set_logical_ranks(6)?;
            job.on_rank(&ddp, model.clone(), Path::new("unused"), |t| t)
        });
        let all = all.unwrap();
        assert!(all.iter().all(|rank| rank.error.is_none()), "{:?}", all[0].error);
        (all[0].hash.clone(), all[0].finals.clone())
    };
    let one = run(1);
    for world in [2, 3, 4, 6] {
        assert_eq!(run(world), one, "{world} ranks");
    }
    let refused = Ddp::spawn(2, |ddp| {
        ddp.set_logical_ranks(4)?;
        let job = Job { accumulation: Some(2), ..Job::new() };
        Ok(job.on_rank(&ddp, model.clone(), Path::new("unused"), |t| t)?.error)
    });
    let text = refused.unwrap().remove(0).expect("an error");
    assert!(text.contains("`grads_accumulation(2)`, but the job has 4 logical ranks"), "{text}");
}

#[test]
fn accumulation_and_its_tail_are_burns() {
    // 9 batches, the last of 4 items: steps after 4, 8 and, at the end of the epoch, 9.
    let job = Job { train: Points::new(1, 100), accumulation: Some(4), ..Job::new() };
    let model = model();
    let alone = job.alone(model.clone());
    for world in [1, 2, 4] {
        job.together(world, &model).follows(&alone, &format!("world {world}"));
    }
    let steps = Ddp::spawn(2, |ddp| {
        job.on_rank(&ddp, model.clone(), Path::new("unused"), |t| t)?;
        Ok(ddp.telemetry().stats().steps)
    });
    assert_eq!(steps.unwrap(), [3 * 3; 2], "one reduction per optimizer step");
}

/// The features of `feature_combinations.rs` that a model and its device bring into the trainer: with and without
/// accumulation, in every world and resumed in another one, compared with Burn's trainer alone.
#[test]
fn what_a_model_brings_along_is_as_alone() {
    let plain = device().autodiff();
    let rare = |net: Net| Net { rare: Some(LinearConfig::new(FEATURES, 16).init(&plain)), ..net };
    let norm = |net: Net| Net { sync_norm: Some(BatchNormConfig::new(16).init(&plain).into()), ..net };
    let models = [
        ("unused parameters", rare(model())),
        ("SyncBatchNorm", norm(model())),
        ("both", norm(rare(model()))),
        ("a mapper", Net { shrinks: true, ..model() }),
        ("a mapper and all others", Net { shrinks: true, ..norm(rare(model())) }),
        ("gradient checkpointing", Net::new(false, &plain.clone().gradient_checkpointing())),
    ];
    // Clones share running statistics.
    let unshared = |model: &Net| if model.sync_norm.is_some() { norm(model.clone()) } else { model.clone() };
    for (what, model) in &models {
        for accumulation in [None, Some(4)] {
            let job = Job { train: Points::new(1, 100), accumulation, ..Job::new() };
            let alone = job.alone(unshared(model));
            for world in [1, 2, 4] {
                let what = format!("{what}, accumulation {accumulation:?}, world {world}");
                job.together(world, &unshared(model)).follows(&alone, &what);
            }
            for worlds in [[2, 3], [3, 1]] {
                let directory = tempfile::tempdir().unwrap();
                let epochs = [2, job.epochs].into_iter().zip(worlds);
                let mut ranks = Vec::new();
                for (number, (epochs, world)) in epochs.enumerate() {
                    let (job, model) = (Job { epochs, ..job.clone() }, unshared(model));
                    let resumed = Ddp::spawn(world, |ddp| {
                        job.on_rank(&ddp, model.clone(), directory.path(), |training| {
                            let training = training.with_default_checkpointers();
                            if number == 0 { training } else { training.checkpoint(2) }
                        })
                    });
                    ranks = resumed.unwrap();
                }
                let what = format!("{what}, accumulation {accumulation:?}, worlds {worlds:?}");
                assert_eq!(ranks[0].error, None, "{what}");
                let d = distance(&ranks[0].values, &alone.values);
                assert!(d <= 1e-5, "{what}: parameters are {d:e} apart");
            }
        }
    }
}

/// A loss that is a mean over the items whose class is not 0, which is padding.
#[derive(Module, Debug)]
struct Padded {
    net: Net,
}

impl TrainStep for Padded {
    type Input = Batch;
    type Output = ClassificationOutput;

    fn step(&self, batch: Batch) -> TrainOutput<ClassificationOutput> {
        let output = self.net.forward(batch.x, batch.rare);
        let loss = CrossEntropyLossConfig::new().with_pad_tokens(Some(vec![0])).init(&output.device());
        let loss = loss.forward(output.clone(), batch.classes.clone());
        let grads = loss.backward();
        TrainOutput::new(self, grads, ClassificationOutput::new(loss, output, batch.classes))
    }
}

impl InferenceStep for Padded {
    type Input = Batch;
    type Output = ClassificationOutput;

    fn step(&self, batch: Batch) -> ClassificationOutput {
        InferenceStep::step(&self.net, batch)
    }
}

/// Steps of k micro-batches are k times the mean over all items that count, on any number of ranks.
#[test]
fn weights_of_batches_make_the_step_of_one_rank() {
    let model = Padded { net: model() };
    let counted = |batch: &Batch| batch.classes.clone().not_equal_elem(0).int().sum().into_scalar::<i64>() as f64;
    let train = |world, global_batch, k, lr: f64| {
        let ranks = Ddp::spawn(world, |ddp| {
            let train = ddp.loader(Together).global_batch_size(global_batch).weigh(counted);
            let train = train.build(Points::new(1, 96))?;
            let valid = ddp.eval_loader(Together).build(Points::new(2, 3))?;
            let training = ddp
                .training("unused", train, valid)
                .num_epochs(3)
                .renderer(Box::new(SilentRenderer))
                .with_metric_logger(Recorder::default())
                .with_application_logger(None)
                .grads_accumulation(k);
            let result = training.launch(Learner::new(model.clone(), SgdConfig::new().init(), lr));
            assert!(result.error.is_none(), "{:?}", result.error);
            Ok((values(&result.model), param_hash(&result.model)?))
        });
        let ranks = ranks.unwrap();
        assert!(ranks.iter().all(|(_, hash)| *hash == ranks[0].1));
        ranks.into_iter().next().unwrap().0
    };
    for k in [1, 4] {
        let alone = train(1, BATCH * k, 1, 0.1 * k as f64);
        for world in [1, 2, 3] {
            let d = distance(&train(world, BATCH, k, 0.1), &alone);
            assert!(d <= 1e-5, "{k} micro-batches on {world} ranks: {d:e} away from one rank");
        }
    }
}

#[test]
fn ranks_without_a_batch_add_nothing_to_metrics() {
    let job = Job { valid: Points::new(2, 3), epochs: 1, ..Job::new() };
    let model = model();
    let one = job.together(1, &model);
    let four = job.together(4, &model);
    for metric in ["Accuracy", "Loss"] {
        let key = ("valid".to_string(), metric.to_string(), 1);
        assert!((one.finals[&key] - four.finals[&key]).abs() < 1e-5, "{one:?} {four:?}");
        assert!(one.finals[&key].is_finite());
    }
}

#[test]
fn metrics_that_are_not_means_see_all_items() {
    let model = model();
    let run = |world: usize| {
        let all = Ddp::spawn(world, |ddp| {
            let job = Job { epochs: 1, ..Job::new() };
            let f_beta = FBetaScoreMetric::multiclass(1.0, 1, ClassReduction::Macro);
            job.on_rank(&ddp, model.clone(), Path::new("unused"), |training| {
                training.metric_valid_numeric(ddp.gathered_metric(f_beta))
            })
        });
        all.unwrap().into_iter().map(|outcome| outcome.finals).collect::<Vec<_>>()
    };
    let (one, three) = (run(1), run(3));
    let key = one[0].keys().find(|(split, name, _)| split == "valid" && name.contains("Beta")).unwrap().clone();
    for rank in &three {
        assert!((rank[&key] - one[0][&key]).abs() < 1e-9, "{rank:?} {one:?}");
    }
}

#[test]
fn early_stopping_is_one_decision() {
    let model = model();
    let all = Ddp::spawn(3, |ddp| {
        let job = Job { epochs: 9, ..Job::new() };
        job.on_rank(&ddp, model.clone(), Path::new("unused"), |training| {
            // A loss that should rise, but falls: over after the second epoch.
            training.early_stopping(MetricEarlyStoppingStrategy::new(
                &LossMetric::new(),
                Aggregate::Mean,
                Direction::Highest,
                Split::Valid,
                StoppingCondition::NoImprovementSince { n_epochs: 1 },
            ))
        })
    });
    for outcome in all.unwrap() {
        assert_eq!(outcome.epochs(), 2);
        assert_eq!((outcome.error, outcome.interrupted), (None, None));
    }
}

/// Interrupts its trainer when it makes its first batch.
#[derive(Clone)]
struct Interrupting(Interrupter);

impl Batcher<Item, Batch> for Interrupting {
    fn batch(&self, items: Vec<Item>, device: &Device) -> Batch {
        self.0.stop(Some("enough"));
        Together.batch(items, device)
    }
}

#[test]
fn an_interruption_on_one_rank_ends_all_after_the_same_step() {
    let all = Ddp::spawn(3, |ddp| {
        let interrupter = Interrupter::new();
        // Only rank 1 is stopped.
        let stopped = if ddp.rank() == 1 { interrupter.clone() } else { Interrupter::new() };
        let train = ddp.loader(Interrupting(stopped)).global_batch_size(BATCH).build(Points::new(1, 96))?;
        let valid = ddp.eval_loader(Together).batch_size(5).build(Points::new(2, 50))?;
        let recorder = Recorder::default();
        let job = Job::new();
        let training = job.configure(ddp.training("unused", train, valid), &recorder).with_interrupter(interrupter);
        let outcome = Outcome::new(&recorder, &training.launch(job.learner(model())));
        ddp.barrier()?; // the job is still usable
        Ok((outcome, ddp.telemetry().stats().steps))
    });
    for (outcome, steps) in all.unwrap() {
        assert_eq!(outcome.error, None);
        assert_eq!(outcome.interrupted, Some(Some("enough".into())));
        assert_eq!(steps, 1);
    }
}

#[test]
fn an_item_that_cannot_be_read_ends_all_ranks_with_the_reason() {
    // Each rank has 6 items of the third step, and half of the validation data.
    for (in_training, rank, item) in [(true, 0, 25), (true, 1, 31), (false, 0, 3), (false, 1, 40)] {
        let mut job = Job::new();
        let split = if in_training { &mut job.train } else { &mut job.valid };
        split.broken = Some(item);
        let all = Ddp::spawn(2, |ddp| job.on_rank(&ddp, model(), Path::new("unused"), |t| t));
        for outcome in all.unwrap() {
            let error = outcome.error.unwrap();
            assert!(error.contains(&format!("item {item} is torn")), "{error}");
            assert!(error.contains(&format!("rank {rank}")) && !error.contains("stopped"), "{error}");
        }
    }
}

#[test]
fn models_that_differ_are_an_error_and_so_is_a_wrapped_one() {
    let all = Ddp::spawn(2, |ddp| {
        let model = Net::new(ddp.rank() == 1, &ddp.device()?.autodiff());
        Job::new().on_rank(&ddp, model, Path::new("unused"), |t| t)
    });
    for outcome in all.unwrap() {
        let error = outcome.error.unwrap();
        assert!(error.contains("the ranks do not hold the same model"), "{error}");
    }
    let all = Ddp::spawn(2, |ddp| {
        let model = ddp.wrap(model())?;
        Job::new().on_rank(&ddp, model, Path::new("unused"), |t| t)
    });
    for outcome in all.unwrap() {
        let error = outcome.error.unwrap();
        assert!(error.contains("wrapped already"), "{error}");
    }
}

/// Nothing holds the gradients of local parameters until the last micro-batch.
#[test]
fn local_parameters_are_trained_without_accumulation_only() {
    let model = model();
    let errors = |k| {
        let errors = Ddp::spawn(2, |ddp| {
            let train = ddp.loader(Together).batch_size(BATCH).build(Points::new(1, 96))?;
            let valid = ddp.eval_loader(Together).build(Points::new(2, 3))?;
            let training = ddp
                .training_with("unused", train, valid, &WrapConfig::new().with_local_parameters(["b"]))
                .num_epochs(1)
                .renderer(Box::new(SilentRenderer))
                .with_metric_logger(Recorder::default())
                .with_application_logger(None)
                .grads_accumulation(k);
            let result = training.launch(Learner::new(model.clone(), SgdConfig::new().init(), 0.1));
            Ok(result.error.map(|error| error.to_string()))
        });
        errors.unwrap()
    };
    assert_eq!(errors(1), [None, None]);
    for error in errors(2) {
        let error = error.expect("2 micro-batches");
        assert!(error.contains("`grads_accumulation(2)` with local parameters (b.weight, b.bias)"), "{error}");
    }
}

#[test]
fn running_statistics_are_those_of_all_ranks() {
    let all = Ddp::spawn(2, |ddp| {
        let model = Net::new(true, &ddp.device()?.autodiff());
        Job::new().on_rank(&ddp, model, Path::new("unused"), |t| t)
    });
    let all = all.unwrap();
    assert_eq!(all[0].error, None);
    assert_eq!(all[0].hash, all[1].hash, "hashes include running statistics");
}

/// Two epochs, then two more from the checkpoint, end with the bits of four epochs without interruption.
fn resumes(shared: bool) {
    let model = model();
    let job = |epochs| Job { epochs, shuffle: true, optim: || AdamConfig::new().init(), ..Job::new() };
    let straight = job(4).together(2, &model);
    let directory = tempfile::tempdir().unwrap();
    let run = |epochs: usize, from: Option<usize>| {
        let all = Ddp::spawn(2, |ddp| {
            // The other ranks have no files, as on other machines.
            let directory =
                if shared { directory.path().to_path_buf() } else { directory.path().join(format!("{}", ddp.rank())) };
            // Ids of parameters differ between ranks and runs.
            let model = if from.is_some() { self::model() } else { model.clone() };
            job(epochs).on_rank(&ddp, model, &directory, |training| {
                let training = if shared {
                    training.with_default_checkpointers()
                } else {
                    let files = |name| ddp.checkpointer(directory.join("checkpoint"), name);
                    training.with_custom_checkpointers(files("model"), files("optim"), files("scheduler"))
                };
                let training = training.with_checkpointing_strategy(KeepLastNCheckpoints::new(2));
                match from {
                    Some(epoch) => training.checkpoint(epoch),
                    None => training,
                }
            })
        });
        let all = all.unwrap();
        assert_eq!(all[0].error, None);
        assert_eq!(all[0].hash, all[1].hash);
        all.into_iter().next().unwrap()
    };
    run(2, None);
    let resumed = run(4, Some(2));
    if !shared {
        assert!(!directory.path().join("1").exists(), "rank 1 writes nothing");
    }
    assert_eq!(resumed.hash, straight.hash);
    for epoch in [3, 4] {
        let key = ("train".to_string(), "Loss".to_string(), epoch);
        assert_eq!(resumed.finals[&key], straight.finals[&key], "epoch {epoch}");
    }
}

#[test]
fn a_training_resumes_from_burns_checkpoint() {
    resumes(true);
}

#[test]
fn a_training_resumes_from_files_that_only_rank_0_has() {
    resumes(false);
}

/// Two parts of a job train different models at the same time, each like a job of its own.
#[test]
fn parts_of_a_job_train_for_themselves() {
    let jobs = [Job::new(), Job { train: Points::new(7, 61), epochs: 2, shuffle: true, ..Job::new() }];
    let models = [model(), model()];
    let own = [0, 1].map(|color| jobs[color].together(2, &models[color]));
    let directory = tempfile::tempdir().unwrap();
    let parts = Ddp::spawn(4, |job| {
        let color = job.rank() / 2;
        let ddp = job.split(Some(color as u64), 0)?.unwrap();
        let directory = directory.path().join(color.to_string());
        jobs[color].on_rank(&ddp, models[color].clone(), &directory, |t| t.with_default_checkpointers())
    });
    for (rank, outcome) in parts.unwrap().iter().enumerate() {
        assert_eq!(outcome.error, None);
        assert_eq!((&outcome.hash, &outcome.finals), (&own[rank / 2].hash, &own[rank / 2].finals), "rank {rank}");
    }
    assert!(directory.path().join("0/checkpoint").exists() && directory.path().join("1/checkpoint").exists());
}

/// If a peer fails, the error shows the line that began the training.
#[test]
fn errors_show_the_line_of_the_training() {
    let said = Mutex::new(String::new());
    let result = Ddp::spawn(2, |ddp| {
        let train = ddp.loader(Together).global_batch_size(BATCH).build(Points::new(1, 96))?;
        let valid = ddp.eval_loader(Together).batch_size(5).build(Points::new(2, 50))?;
        if ddp.rank() == 1 {
            anyhow::bail!("out of memory");
        }
        while ddp.world().check().is_ok() {
            std::thread::yield_now();
        }
        let (training, line) = (ddp.training("unused", train, valid), line!());
        let training = training.renderer(Box::new(SilentRenderer)).with_application_logger(None);
        let result = training.with_metric_logger(Recorder::default()).launch(Job::new().learner(model()));
        *said.lock().unwrap() = format!("line {line}: {}", result.error.unwrap());
        Ok(())
    });
    assert!(result.is_err());
    let said = said.into_inner().unwrap();
    let line = said.strip_prefix("line ").unwrap().split(':').next().unwrap();
    assert!(said.contains(&format!("trainer/main.rs:{line}:")) && said.contains("out of memory"), "{said}");
}
