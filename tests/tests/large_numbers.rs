//! Every path over parameters and items at 10⁵ of them: nothing takes time that grows with their square, which would be
//! minutes to hours here. `-- --nocapture` prints the times.

use std::path::Path;
use std::time::{Duration, Instant};

use burn::data::dataloader::batcher::Batcher;
use burn::data::dataset::InMemDataset;
use burn::module::{Module, Param};
use burn::optim::{AdamConfig, GradientsParams, ModuleOptimizer, SgdConfig};
use burn::prelude::*;
use burn_ddp::data::WeightedSampler;
use burn_ddp::prelude::*;
use burn_ddp::{Collectives, DistributedOptimizer, Sharding, clip_grad_norm, grad_norm};

const ITEMS: usize = 1_000_000;

/// What one call may take at most. It takes a few seconds for 10⁵ parameters, and minutes where their square counts.
const DEADLINE: Duration = Duration::from_secs(60);

/// Runs `f`, which must end in time.
fn timed<R>(ddp: &Ddp, what: &str, f: impl FnOnce() -> anyhow::Result<R>) -> anyhow::Result<R> {
    let begin = Instant::now();
    let result = f()?;
    let took = begin.elapsed();
    if ddp.is_main() {
        println!("{what:<40} {:>8.2} s", took.as_secs_f64());
    }
    anyhow::ensure!(took < DEADLINE, "{what} took {took:?}");
    Ok(result)
}

/// Parameters of two elements each, in a list.
#[derive(Module, Debug)]
struct Many {
    list: Vec<Param<Tensor<1>>>,
}

impl Many {
    fn new(len: usize, device: &Device) -> Many {
        let parameter = |n: usize| Param::from_tensor(Tensor::full([2], n as f64 * 1e-6, device).require_grad());
        Many { list: (0..len).map(parameter).collect() }
    }

    fn loss(&self, x: f64) -> Tensor<1> {
        let values = self.list.iter().map(Param::val).collect();
        (Tensor::cat(values, 0) - x).powi_scalar(2).sum()
    }
}

fn train(ddp: &Ddp, len: usize, optim: &ModuleOptimizer, config: &WrapConfig, dir: &Path) -> anyhow::Result<()> {
    let device = ddp.device()?.autodiff();
    let model = timed(ddp, "make", || Ok(Many::new(len, &device)))?;
    let mut model = timed(ddp, "wrap", || Ok(ddp.wrap_with(model, config)?))?;
    let mut optim = timed(ddp, "optimizer", || Ok(ddp.optimizer(optim.clone(), &model)?))?;
    for step in 0..3 {
        let loss = timed(ddp, "forward", || Ok(model.loss(step as f64)))?;
        let grads = timed(ddp, "backward", || Ok(ddp.backward(&loss, &model)?))?;
        let grads = timed(ddp, "clip", || Ok(clip_grad_norm(grads.expect("a step"), &model, 1.0)?.0))?;
        timed(ddp, "norm", || Ok(grad_norm(&grads, &model)?))?;
        model = timed(ddp, "step", || Ok(optim.step(1e-3, model, grads)))?;
    }
    let loss = model.loss(1.0);
    timed(ddp, "accumulate", || Ok(ddp.accumulate(&loss, &model)?))?;
    let hash = timed(ddp, "param_hash", || Ok(param_hash(&model)?))?;
    timed(ddp, "check_replicas", || Ok(ddp.check_replicas(&model)?))?;
    timed(ddp, "sync_buffers", || Ok(ddp.sync_buffers(&model)?))?;
    timed(ddp, "save", || Ok(ddp.save(&model, dir.join("model"))?))?;
    timed(ddp, "save_safetensors", || Ok(ddp.save_safetensors(&model, dir.join("model"))?))?;
    let checkpoints = ddp.checkpoints(dir.join("checkpoints"))?;
    checkpoints.save(3, |c| {
        // The errors are those of this test.
        timed(ddp, "checkpoint: save the model", || Ok(c.model(&model)?)).unwrap();
        timed(ddp, "checkpoint: save the optimizer", || Ok(c.optimizer(&optim, &model)?)).unwrap();
        Ok(())
    })?;
    let saved = timed(ddp, "checkpoint: find", || Ok(checkpoints.latest()?.expect("saved")))?;
    model = timed(ddp, "checkpoint: load the model", || Ok(saved.model(model)?))?;
    optim = timed(ddp, "checkpoint: load the optimizer", || Ok(saved.optimizer(optim, &model)?))?;
    assert_eq!(param_hash(&model)?, hash);
    let grads = timed(ddp, "flush", || Ok(ddp.flush(&model)?.expect("held gradients")))?;
    model = optim.step(1e-3, model, grads);
    let whole = timed(ddp, "unwrap", || Ok(ddp.unwrap(model)?))?;
    let _ = timed(ddp, "visit", || Ok(whole.num_params()))?;
    Ok(())
}

fn with(len: usize, optim: &ModuleOptimizer, config: &WrapConfig) {
    let dir = tempfile::tempdir().unwrap();
    Ddp::spawn(2, |ddp| train(&ddp, len, optim, config, dir.path())).unwrap();
}

fn whole() -> WrapConfig {
    WrapConfig::new().with_replica_check(2)
}

fn sharded() -> WrapConfig {
    WrapConfig::new().with_sharding(Sharding::Parameters).with_sharding_above(1)
}

#[test]
fn twenty_thousand_parameters() {
    with(20_000, &AdamConfig::new().init(), &whole());
}

#[test]
#[ignore = "takes two minutes: -- --ignored hundred_thousand"]
fn a_hundred_thousand_parameters() {
    with(100_000, &SgdConfig::new().init(), &whole());
}

#[test]
#[ignore = "takes two minutes: -- --ignored hundred_thousand"]
fn an_optimizer_with_a_state_of_a_hundred_thousand_tensors() {
    with(50_000, &AdamConfig::new().init(), &whole());
}

#[test]
#[ignore = "takes minutes: -- --ignored hundred_thousand"]
fn a_hundred_thousand_sharded_parameters() {
    with(100_000, &SgdConfig::new().init(), &sharded());
}

#[test]
fn an_optimizer_whose_state_burn_could_not_load_is_not_saved() {
    let dir = tempfile::tempdir().unwrap();
    let device = Device::default().autodiff();
    Ddp::spawn(1, |ddp| {
        let (model, mut optim) = (Many::new(50_001, &device), AdamConfig::new().init());
        let grads = GradientsParams::from_grads(model.loss(1.0).backward(), &model);
        let model = optim.step(1e-3, model, grads);
        let saved = ddp.checkpoints(dir.path())?.save(1, |c| c.optimizer(&optim, &model));
        let error = saved.unwrap_err().to_string();
        assert!(error.contains("100002 tensors, and Burn loads at most 100000"), "{error}");
        Ok(())
    })
    .unwrap();
}

#[test]
#[ignore = "takes half a minute: -- --ignored hundred_thousand"]
fn a_hundred_thousand_parameters_that_are_not_wrapped() {
    Ddp::spawn(2, |ddp| {
        let device = ddp.device()?.autodiff();
        let model = Many::new(100_000, &device);
        let mut model = timed(&ddp, "broadcast_parameters", || Ok(ddp.broadcast_parameters(model, 0)?))?;
        let mut optim = DistributedOptimizer::new(&ddp, SgdConfig::new().init());
        for _ in 0..2 {
            let grads = GradientsParams::from_grads(model.loss(1.0).backward(), &model);
            model = timed(&ddp, "DistributedOptimizer", || Ok(optim.step(1e-3, model, grads)))?;
        }
        timed(&ddp, "check_replicas", || Ok(ddp.check_replicas(&model)?))
    })
    .unwrap();
}

#[derive(Module, Debug)]
struct Both {
    shared: Param<Tensor<1>>,
    local: Many,
}

#[test]
fn twenty_thousand_local_parameters_selected_one_by_one() {
    Ddp::spawn(2, |ddp| {
        let device = ddp.device()?.autodiff();
        let shared = Param::from_tensor(Tensor::ones([2], &device).require_grad());
        let model = Both { shared, local: Many::new(20_000, &device) };
        let config = WrapConfig::new().with_local_parameters_where(&model, |path| path.starts_with("local"))?;
        let mut model = timed(&ddp, "wrap", || Ok(ddp.wrap_with(model, &config)?))?;
        let mut optim = SgdConfig::new().init();
        for _ in 0..2 {
            let loss = model.local.loss(1.0) + model.shared.val().sum();
            let grads = timed(&ddp, "backward", || Ok(ddp.backward(&loss, &model)?.expect("a step")))?;
            model = timed(&ddp, "step", || Ok(optim.step(1e-3, model, grads)))?;
        }
        timed(&ddp, "check_replicas", || Ok(ddp.check_replicas(&model)?))
    })
    .unwrap();
}

#[derive(Clone)]
struct Count;

impl Batcher<u32, usize> for Count {
    fn batch(&self, items: Vec<u32>, _: &Device) -> usize {
        items.len()
    }
}

#[test]
fn a_million_items() {
    Ddp::spawn(2, |ddp| {
        let items = || InMemDataset::new((0..ITEMS as u32).collect());
        let weights: Vec<f64> = (0..ITEMS).map(|n| 1.0 + (n % 7) as f64).collect();
        let sampler = timed(&ddp, "WeightedSampler", || Ok(WeightedSampler::new(&weights, ITEMS, 1)?))?;
        for sampled in [false, true] {
            let build = || {
                let loader = ddp.loader(Count).batch_size(4).num_workers(0);
                Ok(match sampled {
                    true => loader.sampler(sampler.clone()).build(items())?,
                    false => loader.shuffle(1).build(items())?,
                })
            };
            let loader = timed(&ddp, "loader", build)?;
            timed(&ddp, "epoch", || {
                let mut read = 0;
                for batch in loader.iter() {
                    read += batch?;
                    if read > ITEMS / 4 {
                        break;
                    }
                }
                Ok(())
            })?;
            let position = timed(&ddp, "position", || Ok(loader.position()))?;
            let loader = build()?;
            timed(&ddp, "resume", || Ok(loader.resume(&position)?))?;
            timed(&ddp, "rest of the epoch", || {
                for batch in loader.iter() {
                    batch?;
                }
                Ok(())
            })?;
        }
        Ok(())
    })
    .unwrap();
}
