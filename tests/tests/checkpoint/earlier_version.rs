//! Files that an earlier version wrote load, and training goes on from them.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use burn::data::dataloader::batcher::Batcher;
use burn::data::dataset::InMemDataset;
use burn::lr_scheduler::linear::LinearLrSchedulerConfig;
use burn::lr_scheduler::module_lr_scheduler::ModuleLrScheduler;
use burn::optim::AdamConfig;
use burn::prelude::*;
use burn::tensor::DType;
use burn_ddp::data::ShardedLoader;
use burn_ddp::prelude::*;
use burn_ddp_tests::{Normed, device, distance, rows, values};

/// Directory of files that an earlier version wrote; see its README.
fn formats() -> PathBuf {
    match std::env::var_os("BURN_DDP_FORMATS") {
        Some(directory) => directory.into(),
        None => Path::new(env!("CARGO_MANIFEST_DIR")).join("fixtures/earlier_version"),
    }
}

struct Rows;

impl Batcher<usize, Tensor<2>> for Rows {
    fn batch(&self, items: Vec<usize>, device: &Device) -> Tensor<2> {
        let rows = items.iter().map(|item| rows(*item, 1, 6, 1, DType::F32, device)).collect();
        Tensor::cat(rows, 0)
    }
}

/// State of a training after a step.
#[derive(Debug, PartialEq, serde::Serialize, serde::Deserialize)]
struct TrainingState {
    step: u64,
    hash: String,
    values: Vec<Vec<f64>>,
    position: serde_json::Value,
    learning_rate: f64,
}

impl TrainingState {
    fn of(
        step: u64,
        model: &Normed,
        train: &ShardedLoader<Tensor<2>>,
        scheduler: &ModuleLrScheduler,
    ) -> anyhow::Result<Self> {
        let (hash, values) = (param_hash(model)?, values(model));
        let position = serde_json::to_value(train.position())?;
        Ok(TrainingState { step, hash, values, position, learning_rate: scheduler.clone().step().base() })
    }
}

/// Trains to step 7, in epochs of 3 steps, from the latest checkpoint in `directory` or from the start, and saves at
/// the step `save_at`. Returns the states in the beginning and at the end.
fn train_in(ddp: &Ddp, directory: &Path, save_at: Option<u64>) -> anyhow::Result<[TrainingState; 2]> {
    let device = ddp.device()?.autodiff();
    let mut model = ddp.wrap(Normed::new(&device))?;
    let mut optim = AdamConfig::new().init();
    let mut scheduler = LinearLrSchedulerConfig::new(0.02, 0.001, 20).init().map_err(anyhow::Error::msg)?;
    let train = ddp.loader(Rows).global_batch_size(4).shuffle(42).set_device(device.clone());
    let train = train.build(InMemDataset::new((0..12).collect()))?;
    let checkpoints = ddp.checkpoints(directory.join("checkpoints"))?;
    let mut step = 0;
    if let Some(found) = checkpoints.latest()? {
        model = found.model(model)?;
        optim = found.optimizer(optim, &model)?;
        scheduler = scheduler.load_record(found.scheduler()?);
        train.resume(&found.value("loader")?)?;
        step = found.step();
    }
    let begin = TrainingState::of(step, &model, &train, &scheduler)?;
    'steps: for epoch in train.epochs(0..3) {
        for batch in epoch {
            let grads = ddp.backward(&model.loss(batch?), &model)?.expect("averages");
            model = optim.step(scheduler.step(), model, grads);
            step += 1;
            if save_at == Some(step) {
                checkpoints.save(step, |c| {
                    c.model(&model)?;
                    c.optimizer(&optim, &model)?;
                    c.scheduler(scheduler.to_record())?;
                    c.value("loader", &train.position())
                })?;
                ddp.save(&model, directory.join("model"))?;
                write_json(ddp, &directory.join("saved.json"), &TrainingState::of(step, &model, &train, &scheduler)?)?;
            }
            if step == 7 {
                break 'steps;
            }
        }
    }
    Ok([begin, TrainingState::of(step, &model, &train, &scheduler)?])
}

/// Writes `state` on rank 0.
fn write_json(ddp: &Ddp, file: &Path, state: &TrainingState) -> anyhow::Result<()> {
    if ddp.is_main() {
        fs::write(file, serde_json::to_vec_pretty(state)?)?;
    }
    Ok(())
}

/// Writes the files of `tests/fixtures/earlier_version`; see its README.
#[test]
#[ignore = "writes the fixture: see tests/fixtures/earlier_version/README.md"]
fn write_formats() {
    let directory = formats();
    fs::create_dir_all(&directory).unwrap();
    let timeline = Some(directory.join("timeline.json"));
    let options = burn_ddp::WorldOptions { timeline, ..burn_ddp::WorldOptions::default() };
    Ddp::spawn_with(2, options, |ddp| {
        let [_, end] = train_in(&ddp, &directory, Some(4))?;
        write_json(&ddp, &directory.join("end.json"), &end)?;
        // Ranks write their parts of the timeline at intervals.
        std::thread::sleep(Duration::from_secs(3));
        ddp.barrier()?;
        ddp.barrier()?;
        if ddp.is_main() {
            // As a killed job leaves them: the last rank to end puts the parts together and removes them.
            for rank in 0..2 {
                let part = directory.join(format!("timeline.json.rank-{rank}"));
                fs::copy(part, directory.join(format!("killed.json.rank-{rank}")))?;
            }
        }
        Ok(ddp.finish()?)
    })
    .unwrap();
}

#[test]
fn files_of_an_earlier_version_load_and_training_goes_on() {
    let directory = formats();
    let state =
        |name: &str| -> TrainingState { serde_json::from_slice(&fs::read(directory.join(name)).unwrap()).unwrap() };
    let (saved, end) = (state("saved.json"), state("end.json"));
    for [loaded, ended] in Ddp::spawn(2, |ddp| train_in(&ddp, &directory, None)).unwrap() {
        assert_eq!(loaded, saved);
        assert_eq!((&ended.position, ended.learning_rate), (&end.position, end.learning_rate));
        // Kernels may round differently on another processor.
        assert!(distance(&ended.values, &end.values) < 1e-5, "{ended:?}, expected {end:?}");
        assert!(ended.hash == end.hash || std::env::var_os("BURN_DDP_FORMATS").is_none(), "written on this machine");
    }
    let model = Normed::new(&device().autodiff()).load_file(directory.join("model.bpk"));
    assert_eq!(param_hash(&model).unwrap(), saved.hash);
}
