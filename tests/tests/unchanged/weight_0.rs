//! A batch of weight 0 is absent, whatever its rows hold: a table of everything that takes data into account.

use burn::data::dataloader::batcher::Batcher;
use burn::data::dataset::InMemDataset;
use burn::optim::{GradientsParams, SgdConfig};
use burn::tensor::TensorData;
use burn_ddp::{DistributedOptimizer, GradientReduction, Sharding};

use super::*;

#[derive(Clone, Copy, Debug, PartialEq)]
enum Consumer {
    /// Averages, or sums, of gradients; and running statistics.
    Model(Norm, GradientReduction),
    /// Gradients of parameters that are sharded.
    Sharded(Norm),
    /// Gradients of parameters that each rank keeps for itself.
    Local,
    /// The gradient that a rank's loss sends to the inputs of other ranks.
    Differentiable,
}

const CONSUMERS: [Consumer; 10] = [
    Consumer::Model(Norm::None, GradientReduction::Mean),
    Consumer::Model(Norm::None, GradientReduction::Sum),
    Consumer::Model(Norm::Own(BufferPolicy::Average), GradientReduction::Mean),
    Consumer::Model(Norm::Own(BufferPolicy::Broadcast), GradientReduction::Mean),
    Consumer::Model(Norm::Own(BufferPolicy::Local), GradientReduction::Sum),
    Consumer::Model(Norm::Synced, GradientReduction::Mean),
    Consumer::Model(Norm::Synced, GradientReduction::Sum),
    Consumer::Sharded(Norm::Own(BufferPolicy::Average)),
    Consumer::Local,
    Consumer::Differentiable,
];

/// Values of the rows that do not count; `None`: there is no such micro-batch.
type Junk = Option<f32>;

const ROWS: usize = 3;
const MICRO_BATCHES: usize = 8;

/// Trains. Micro-batches 2 and 5 of rank `absent` have weight 0. Returns all values of the model.
fn train(
    ddp: &Ddp,
    consumer: Consumer,
    accumulation: usize,
    absent: usize,
    junk: Junk,
) -> anyhow::Result<Vec<TensorData>> {
    let device = ddp.device()?.autodiff();
    let mut config = WrapConfig::new().with_accumulation(accumulation);
    let norm = match consumer {
        Consumer::Model(norm, _) | Consumer::Sharded(norm) => norm,
        _ => Norm::None,
    };
    if let Norm::Own(policy) = norm {
        config = config.with_buffers(policy);
    }
    config = match consumer {
        Consumer::Model(_, reduction) => config.with_reduction(reduction),
        Consumer::Sharded(_) => config.with_sharding(Sharding::Parameters).with_sharding_above(1),
        Consumer::Local => config.with_local_parameters(["last"]),
        Consumer::Differentiable => config,
    };
    let mut net = ddp.wrap_with(Net::new(norm, &device), &config)?;
    let mut optim = ddp.optimizer(SgdConfig::new().init(), &net)?;
    for nth in 0..MICRO_BATCHES {
        let counts = ddp.rank() != absent || ![2, 5].contains(&nth);
        let x = match (counts, junk) {
            (true, _) => rows_of(ddp.rank(), nth, ROWS, &device),
            (false, Some(junk)) => Tensor::full([ROWS + 1, 3], junk, &device),
            (false, None) => continue,
        };
        let call = ddp.weighted(if counts { ROWS as f64 } else { 0.0 });
        let grads = match consumer {
            Consumer::Differentiable => {
                // The junk is in the rank's loss alone.
                let own = net.forward(rows_of(ddp.rank(), nth, ROWS, &device));
                let all = ddp.differentiable().all_gather(own)?.powi_scalar(2).mean();
                let loss = all * x.slice([0..1, 0..1]).reshape([1]);
                call.backward(&loss, &net)?
            }
            _ if norm == Norm::Synced => call.scope(&net, || net.loss(x).backward())?.1,
            _ => call.backward(&net.loss(x), &net)?,
        };
        if let Some(grads) = grads {
            net = optim.step(0.1, net, grads);
        }
    }
    if let Some(grads) = ddp.flush(&net)? {
        net = optim.step(0.1, net, grads);
    }
    drop(net.valid());
    Ok(visited(&ddp.unwrap(net)?))
}

fn is_finite(values: &[TensorData]) -> bool {
    values.iter().all(|data| data.iter::<f32>().all(f32::is_finite))
}

#[test]
fn rows_of_weight_0_change_no_consumer_even_if_they_are_nan() {
    for consumer in CONSUMERS {
        // Without accumulation one rank alone has nothing to step by.
        for (world, accumulation) in [(1, 2), (2, 1), (2, 2), (3, 2)] {
            if accumulation > 1 && consumer == Consumer::Local {
                continue; // refused
            }
            for absent in 0..world.min(2) {
                let run = |junk| Ddp::spawn(world, |ddp| train(&ddp, consumer, accumulation, absent, junk)).unwrap();
                let ranks = run(Some(0.5));
                let case = format!("{consumer:?}, rank {absent} of {world}, accumulation {accumulation}");
                assert!(ranks.iter().all(|rank| is_finite(rank)), "{case}");
                for junk in [-7.0, f32::NAN, f32::INFINITY] {
                    assert!(run(Some(junk)) == ranks, "{case}: rows of {junk}");
                }
            }
        }
    }
}

/// Micro-batches are counted, so only `accumulate` can compare with a run that has none in that place.
#[test]
fn a_micro_batch_of_weight_0_is_as_none() {
    let train = |junk: Junk| {
        let train = |ddp: Ddp| {
            let device = ddp.device()?.autodiff();
            let mut net = ddp.wrap(Net::new(Norm::Own(BufferPolicy::Average), &device))?;
            let mut optim = SgdConfig::new().init();
            for nth in 0..4 {
                for rows in [1, 2, 3] {
                    let x = rows_of(ddp.rank(), 10 * nth + rows, rows, &device);
                    ddp.weighted(rows as f64).accumulate(&net.loss(x), &net)?;
                    if let Some(junk) = junk {
                        let x = Tensor::full([2, 3], junk, &device);
                        ddp.weighted(0.0).accumulate(&net.loss(x), &net)?;
                    }
                }
                let grads = ddp.flush(&net)?.expect("held gradients");
                net = optim.step(0.1, net, grads);
            }
            Ok(param_hash(&net)?)
        };
        Ddp::spawn(2, train).unwrap()
    };
    let none = train(None);
    assert_eq!(train(Some(2.0)), none);
    assert_eq!(train(Some(f32::NAN)), none);
}

#[derive(Clone)]
struct Rows;

impl Batcher<f32, Tensor<2>> for Rows {
    fn batch(&self, items: Vec<f32>, device: &Device) -> Tensor<2> {
        let row = |item: f32| Tensor::<2>::full([1, 3], item, device);
        Tensor::cat(items.into_iter().map(row).collect(), 0)
    }
}

/// The loader's weight is known before the forward.
#[test]
fn a_batch_that_the_loader_weighs_0_is_left_out_of_a_synced_norm() {
    let train = |junk: f32| {
        let train = |ddp: Ddp| {
            let device = ddp.device()?.autodiff();
            let mut net = ddp.wrap(Net::new(Norm::Synced, &device))?;
            let mut optim = SgdConfig::new().init();
            let items = InMemDataset::new(vec![0.1, 0.9, junk, 0.3, 0.7, 0.2, 0.6, junk]);
            let weigh = |x: &Tensor<2>| match x.clone().sum().into_scalar::<f32>() / 3.0 {
                sum if sum.is_nan() || sum > 100.0 => 0.0,
                _ => 1.0,
            };
            let train = ddp.loader(Rows).batch_size(1).set_device(device).weigh(weigh).build(items)?;
            for batch in train.iter() {
                let grads = ddp.backward(&net.loss(batch?), &net)?.expect("a step");
                net = optim.step(0.1, net, grads);
            }
            Ok((param_hash(&net)?, is_finite(&visited(&net.valid()))))
        };
        Ddp::spawn(2, train).unwrap()
    };
    let ranks = train(1e3);
    assert!(ranks.iter().all(|(hash, is_finite)| *hash == ranks[0].0 && *is_finite));
    assert_eq!(train(f32::NAN), ranks);
}

#[test]
fn a_micro_batch_that_counts_on_no_rank_leaves_a_synced_norm_alone() {
    let train = |ddp: Ddp| {
        let device = ddp.device()?.autodiff();
        let config = WrapConfig::new().with_accumulation(2);
        let net = ddp.wrap_with(Net::new(Norm::Synced, &device), &config)?;
        let call = |weight: f64, x: Tensor<2>| ddp.weighted(weight).scope(&net, || net.loss(x).backward());
        call(1.0, rows_of(ddp.rank(), 0, 2, &device))?;
        let before = param_hash(&net)?;
        let grads = call(0.0, Tensor::full([2, 3], f32::NAN, &device))?.1.expect("a step");
        assert_eq!(param_hash(&net)?, before);
        let gradient = grads.get::<2>(net.first.weight.id).unwrap();
        Ok(gradient.sum().into_scalar::<f32>().is_finite())
    };
    assert_eq!(Ddp::spawn(2, train).unwrap(), [true, true]);
}

#[test]
fn a_weight_that_a_synced_norm_did_not_know_is_an_error_on_every_rank() {
    let errors = Ddp::spawn(2, |ddp| {
        let device = ddp.device()?.autodiff();
        let net = ddp.wrap(Net::new(Norm::Synced, &device))?;
        let loss = net.loss(rows_of(ddp.rank(), 0, 2, &device));
        Ok(ddp.weighted(ddp.rank() as f64).backward(&loss, &net).err().unwrap().to_string())
    })
    .unwrap();
    for error in errors {
        assert!(error.contains("the backward weighs 0") && error.contains("ddp.weighted(0).scope("), "{error}");
    }
}

/// Behind a second collective a gradient holds parts of other ranks' losses.
#[test]
fn a_weight_0_behind_two_differentiable_collectives_is_an_error_on_every_rank() {
    let errors = Ddp::spawn(2, |ddp| {
        let device = ddp.device()?.autodiff();
        let net = ddp.wrap(Net::new(Norm::None, &device))?;
        let own = net.forward(rows_of(ddp.rank(), 0, 2, &device));
        let all = ddp.differentiable().all_gather(own)?;
        let loss = ddp.differentiable().all_gather(all.tanh())?.sum();
        Ok(ddp.weighted(ddp.rank() as f64).backward(&loss, &net).err().unwrap().to_string())
    });
    for error in errors.unwrap() {
        assert!(error.contains("passes several differentiable collectives"), "{error}");
    }
}

/// A critic that the step of a generator reaches, and does not train.
#[test]
fn statistics_of_models_that_the_call_does_not_train_forget_the_batch_too() {
    let train = |junk: f32| {
        let train = |ddp: Ddp| {
            let device = ddp.device()?.autodiff();
            let generator = ddp.wrap(Net::new(Norm::None, &device))?;
            let critic = ddp.wrap(Net::new(Norm::Own(BufferPolicy::Average), &device))?;
            let criticised = |x: Tensor<2>| {
                let fake = generator.forward(x);
                critic.loss(Tensor::cat(vec![fake.clone(), fake.slice([0..2, 0..1])], 1))
            };
            for nth in 0..3 {
                let counts = ddp.rank() == 0 || nth != 1;
                let x = if counts { rows_of(ddp.rank(), nth, 2, &device) } else { Tensor::full([2, 3], junk, &device) };
                let weight = if counts { 2.0 } else { 0.0 };
                ddp.weighted(weight).backward(&criticised(x), &generator)?;
                ddp.backward(&critic.loss(rows_of(ddp.rank(), 7 + nth, 2, &device)), &critic)?;
            }
            Ok((param_hash(&critic)?, is_finite(&visited(&critic.valid()))))
        };
        Ddp::spawn(2, train).unwrap()
    };
    let ranks = train(0.5);
    assert!(ranks.iter().all(|rank| *rank == (ranks[0].0.clone(), true)));
    assert_eq!(train(f32::NAN), ranks);
}

#[test]
fn an_optimizer_that_averages_leaves_out_a_rank_whose_batches_all_weigh_0() {
    let train = |junk: f32| {
        let train = |ddp: Ddp| {
            let device = ddp.device()?.autodiff();
            let mut nets = [Net::new(Norm::None, &device), Net::new(Norm::None, &device)];
            let optim = || DistributedOptimizer::new(&ddp, SgdConfig::new().init());
            let mut optims = [optim(), optim()];
            // The third step weighs 0 on all ranks, which then count alike.
            let items = InMemDataset::new(vec![0.1, junk, 0.9, 0.3, 1e3, 1e3]);
            let weigh = |x: &Tensor<2>| f64::from(u8::from(x.clone().sum().into_scalar::<f32>() < 100.0));
            let train = ddp.loader(Rows).batch_size(1).set_device(device).weigh(weigh).build(items)?;
            for batch in train.iter() {
                let batch = batch?;
                for (net, optim) in nets.iter_mut().zip(&mut optims) {
                    let grads = GradientsParams::from_grads(net.loss(batch.clone()).backward(), net);
                    *net = optim.try_step(1e-3, net.clone(), grads)?;
                }
            }
            let hashes = [param_hash(&nets[0])?, param_hash(&nets[1])?];
            assert_eq!(hashes[0], hashes[1]);
            Ok((hashes[0].clone(), is_finite(&visited(&nets[1]))))
        };
        Ddp::spawn(2, train).unwrap()
    };
    let ranks = train(1e3);
    assert!(ranks.iter().all(|rank| *rank == (ranks[0].0.clone(), true)));
    assert_eq!(train(f32::NAN), ranks);
}
