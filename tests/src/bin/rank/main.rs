//! One rank of a job under test: `rank SCENARIO`, started by the test files beside it.
#![forbid(unsafe_code)]

mod bits;
mod checkpoint;
mod dropout;
mod fault;
mod logical;
mod preempt;
mod sharded_fault;

use std::time::{Duration, Instant};

use burn::prelude::*;
use burn::tensor::DType;
use burn_ddp::comm::EngineChoice;
use burn_ddp::prelude::*;
use burn_ddp::{Error, WorldOptions};
use burn_ddp_tests::{Mlp, Optim, awkward, rows, split_training, to_f64, train, values};

pub(crate) fn main() -> anyhow::Result<()> {
    let scenario = std::env::args().nth(1).unwrap_or_default();
    if scenario == "preempt" {
        let code = preempt::run(Ddp::init()?)?;
        std::process::exit(code);
    }
    if scenario == "fault" {
        return fault::main();
    }
    if scenario == "config" {
        let options = DdpConfig::from_env()?.options()?;
        let (timeout, stall) = (options.timeout, options.stall);
        Ddp::init_with(options)?.finish()?;
        println!("timeout {timeout:?} stall {stall:?}");
        return Ok(());
    }
    let mut options = WorldOptions::from_env()?;
    options.timeout = Duration::from_secs(if scenario == "sharded-fault" { 60 } else { 20 });
    if scenario == "parts" {
        options.engine = match std::env::args().nth(2).as_deref() {
            Some("tcp") => Some(EngineChoice::Tcp),
            _ => Some(EngineChoice::Shm),
        };
    }
    let ddp = Ddp::init_with(options)?;
    match scenario.as_str() {
        "hello" => println!("rank {} of {} engine {}", ddp.rank(), ddp.world_size(), ddp.engine()),
        "train" => return run_training(&ddp),
        "kill" => {
            return fail_at_step(&ddp, || {
                rustix::process::kill_process(rustix::process::getpid(), rustix::process::Signal::KILL).unwrap()
            });
        }
        "exit" => return fail_at_step(&ddp, || std::process::exit(0)),
        "panic" => return fail_at_step(&ddp, || panic!("the third step is cursed")),
        "abort" => return fail_at_step(&ddp, || std::process::abort()),
        "break" => return break_early(&ddp),
        "case" => return run_case(&ddp),
        "bits" => bits::run(&ddp)?,
        "sharded-fault" => return sharded_fault::run(&ddp),
        "checkpoint" => return checkpoint::run(&ddp),
        "dropout" => return dropout::run(&ddp),
        "logical" => logical::run(&ddp)?,
        "draws" => dropout::draws(&ddp)?,
        "parts" => println!("part {}", serde_json::to_string(&split_training::train_in_parts(&ddp)?)?),
        "build" => {
            struct Keep;
            impl burn::data::dataloader::batcher::Batcher<usize, Vec<usize>> for Keep {
                fn batch(&self, items: Vec<usize>, _: &Device) -> Vec<usize> {
                    items
                }
            }
            let items = || burn::data::dataset::InMemDataset::new((0..10).collect());
            let said = |error: Option<Error>| error.map_or("none".to_string(), |error| error.to_string());
            println!("training {}", said(ddp.loader(Keep).build(items()).err()));
            println!("evaluation {}", said(ddp.eval_loader(Keep).build(items()).err()));
        }
        "differ" => {
            let device = ddp.device()?.autodiff();
            ddp.wrap(burn::nn::LinearConfig::new(2 + ddp.rank(), 1).init(&device))?;
        }
        other => anyhow::bail!("unknown scenario {other:?}"),
    }
    Ok(ddp.finish()?)
}

/// Prints the hash of the trained model and, on rank 0, all its values as JSON.
fn run_training(ddp: &Ddp) -> anyhow::Result<()> {
    let arg = |n: usize| std::env::args().nth(n).unwrap_or_default();
    let optim = if arg(2) == "adam" { Optim::Adam } else { Optim::Sgd };
    let device = ddp.device()?.autodiff();
    // Ranks start from different weights, which `wrap` makes equal. World 1 and rank 0 use the same seed.
    device.seed(7 + ddp.rank() as u64);
    let model = to_f64(Mlp::new(&device));
    let config = WrapConfig::new().with_bucket_cap_bytes(700).with_first_bucket_cap_bytes(200);
    let model = train(ddp, model, optim, 100, 12, &config)?;
    println!("hash {}", param_hash(&model)?);
    if ddp.is_main() {
        println!("values {}", serde_json::to_string(&values(&model))?);
    }
    ddp.barrier()?;
    Ok(())
}

/// Runs a case of `burn_ddp_tests::awkward` and prints its outcome, the values of the model on rank 0 only.
fn run_case(ddp: &Ddp) -> anyhow::Result<()> {
    let name = std::env::args().nth(2).unwrap_or_default();
    let mut outcome = awkward::run(&name, ddp).ok_or_else(|| anyhow::anyhow!("no case {name:?}"))??;
    if !ddp.is_main() {
        outcome.values.clear();
    }
    println!("outcome {}", serde_json::to_string(&outcome)?);
    Ok(())
}

/// Rank 1 calls `fault` in step 3; the others print the time until their error, and the error.
fn fail_at_step(ddp: &Ddp, fault: impl Fn()) -> anyhow::Result<()> {
    let device = ddp.device()?.autodiff();
    let model = ddp.wrap(Mlp::new(&device))?;
    let mut last = Instant::now();
    for step in 0..1000 {
        if ddp.rank() == 1 && step == 3 {
            println!("fault now");
            fault();
        }
        let x = rows(step * 8, 8, 6, 1, DType::F32, &device);
        if let Err(error) = ddp.backward(&model.forward(x).sum(), &model) {
            println!("error after {} ms in step {step}: {error}", last.elapsed().as_millis());
            // Later calls return the same error.
            let again = ddp.barrier().unwrap_err();
            println!("again {}", again.to_string() == error.to_string() || matches!(again, Error::Comm(_)));
            return Err(error.into());
        }
        last = Instant::now();
    }
    Ok(())
}

/// Rank 1 leaves its epoch early.
fn break_early(ddp: &Ddp) -> anyhow::Result<()> {
    use burn::data::dataloader::batcher::Batcher;
    struct Rows;
    impl Batcher<usize, Tensor<2>> for Rows {
        fn batch(&self, items: Vec<usize>, device: &Device) -> Tensor<2> {
            rows(items[0], items.len(), 6, 1, DType::F32, device)
        }
    }
    let device = ddp.device()?.autodiff();
    let model = ddp.wrap(Mlp::new(&device))?;
    let dataset = burn::data::dataset::InMemDataset::new((0..100).collect());
    let train = ddp.loader(Rows).batch_size(4).set_device(device).build(dataset)?;
    for epoch in train.epochs(0..1) {
        for (step, batch) in epoch.enumerate() {
            if ddp.rank() == 1 && step == 5 {
                break;
            }
            ddp.backward(&model.forward(batch?).sum(), &model)?;
        }
    }
    ddp.clone().finish()?;
    Ok(())
}
