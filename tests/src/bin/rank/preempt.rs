//! A training that saves and ends when it is asked to stop, and goes on with the bits of an undisturbed one.

use std::process::ExitCode;
use std::time::Duration;

use burn::data::dataloader::batcher::Batcher;
use burn::data::dataset::InMemDataset;
use burn::optim::{AdamConfig, ModuleOptimizer};
use burn::prelude::*;
use burn::tensor::DType;
use burn_ddp::prelude::*;
use burn_ddp_tests::{Mlp, rows};
use serde::{Deserialize, Serialize};

struct Rows;

impl Batcher<usize, Tensor<2>> for Rows {
    fn batch(&self, items: Vec<usize>, device: &Device) -> Tensor<2> {
        Tensor::cat(items.into_iter().map(|item| rows(item, 1, 6, 1, DType::F32, device)).collect(), 0)
    }
}

/// Steps and measurements of the training.
#[derive(Default, Serialize, Deserialize)]
struct Progress {
    step: u64,
    /// Loss of each evaluation.
    evaluations: Vec<f64>,
}

const EPOCHS: usize = 3;

/// `rank preempt DIRECTORY [PAUSE]`: three epochs of 40 steps, each with an evaluation of 20 batches, and a pause of so
/// many milliseconds, 2 by default, in each step and batch. Prints `ready` once the signal is caught, `resumed STEP`,
/// `stopped STEP`, and at the end `hash …`.
pub(crate) fn run(ddp: Ddp) -> anyhow::Result<i32> {
    let directory = std::env::args().nth(2).unwrap_or_default();
    let pause = std::env::args().nth(3).map_or(Ok(2), |pause| pause.parse())?;
    let pause = || std::thread::sleep(Duration::from_millis(pause));
    let device = ddp.device()?.autodiff();
    ddp.seed(&device, 5);
    let _ = ddp.stop_requested(); // from here on
    println!("ready {}", std::process::id());
    let mut model = ddp.wrap(Mlp::new(&device))?;
    let mut optim = AdamConfig::new().init();
    let items = InMemDataset::new((0..80 * ddp.world_size()).collect());
    let train = ddp.loader(Rows).batch_size(2).shuffle(3).build(items)?;
    let checkpoints = ddp.checkpoints(directory)?.keep_last(2);
    let mut progress = Progress::default();
    if let Some(found) = checkpoints.latest()? {
        model = found.model(model)?;
        optim = found.optimizer(optim, &model)?;
        train.resume(&found.value("loader")?)?;
        progress = found.value("progress")?;
        println!("resumed {}", progress.step);
    }
    let save = |progress: &Progress, model: &Mlp, optim: &_| {
        checkpoints.save(progress.step, |c| {
            c.model(model)?;
            c.optimizer(optim, model)?;
            c.value("loader", &train.position())?;
            c.value("progress", progress)
        })
    };
    // Returns false if the ranks stop: the evaluation is made again when the training goes on.
    let evaluate = |progress: &mut Progress, model: &Mlp, optim: &_| {
        let mut sum = 0.0;
        for batch in 0..20 {
            if ddp.stop_wished() {
                break;
            }
            pause();
            let x = rows(1000 + batch, 1, 6, 1, DType::F32, &device);
            sum += model.forward(x).powf_scalar(2.0).mean().into_scalar::<f64>();
        }
        let loss = ddp.mean(sum)?;
        if !ddp.stop_requested() {
            progress.evaluations.push(loss);
        }
        save(progress, model, optim)?;
        anyhow::Ok(!ddp.stop_requested())
    };
    let train_all = |progress: &mut Progress, mut model: Mlp, mut optim: ModuleOptimizer| {
        if progress.evaluations.len() < train.epoch() && !evaluate(progress, &model, &optim)? {
            return anyhow::Ok(model);
        }
        for epoch in train.epochs(0..EPOCHS) {
            let last = epoch.len();
            for (nth, batch) in epoch.enumerate() {
                pause();
                let loss = model.forward(batch?).powf_scalar(2.0).mean();
                let Some(grads) = ddp.backward(&loss, &model)? else { continue };
                model = optim.step(0.01, model, grads);
                progress.step += 1;
                let stops = ddp.stop_requested();
                if stops || nth + 1 < last && progress.step.is_multiple_of(15) {
                    save(progress, &model, &optim)?;
                }
                if stops {
                    return Ok(model);
                }
            }
            if !evaluate(progress, &model, &optim)? {
                break;
            }
        }
        Ok(model)
    };
    model = train_all(&mut progress, model, optim)?;
    match ddp.stop_requested() {
        true => println!("stopped {}", progress.step),
        false => println!("hash {} {:?}", param_hash(&model)?, progress.evaluations),
    }
    let code = if ddp.exit_code() == ExitCode::SUCCESS { 0 } else { 75 };
    ddp.finish()?;
    Ok(code)
}
