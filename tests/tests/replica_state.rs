//! Running statistics, and the comparison of replicas.

use burn::module::{ModuleMapper, ModuleVisitor, Param};
use burn::optim::{GradientsParams, SgdConfig};
use burn::prelude::*;
use burn::tensor::{DType, GradientCheckpointingStrategy, TensorData};
use burn_ddp::prelude::*;
use burn_ddp::{Error, WorldOptions};
use burn_ddp_tests::*;
use std::time::{Duration, Instant};

/// Mean and variance.
type Statistics = [Vec<f64>; 2];

fn step(ddp: &Ddp, model: Normed, start: usize, batch: usize, device: &Device) -> anyhow::Result<Normed> {
    step_on(ddp, model, rows(start, batch, 6, 1, DType::F32, device))
}

fn step_on(ddp: &Ddp, model: Normed, batch: Tensor<2>) -> anyhow::Result<Normed> {
    ddp.set_batch_items(batch.dims()[0] as f64)?;
    let grads = model.loss(batch).backward();
    let grads = GradientsParams::from_grads(grads, &model);
    Ok(SgdConfig::new().init().step(0.05, model, grads))
}

/// Where rank `r` starts and how many rows it has in a step: 4, 6, 8 …
fn share(rank: usize) -> (usize, usize) {
    ((0..rank).map(|r| 4 + 2 * r).sum(), 4 + 2 * rank)
}

/// One wrapped step on every rank, from one model that all ranks start from; then the statistics of each rank, and
/// those that each rank's part gives alone.
fn one_step(world: usize, policy: BufferPolicy) -> Vec<(Statistics, Statistics)> {
    let device = device().autodiff();
    let origin = Normed::new(&device);
    let _ = (origin.a.weight.val(), origin.b.weight.val());
    Ddp::spawn(world, |ddp| {
        let (start, batch) = share(ddp.rank());
        let alone = origin.valid().train();
        let _ = alone.loss(rows(start, batch, 6, 1, DType::F32, &device));
        let config = WrapConfig::new().with_buffers(policy);
        let model = step(&ddp, ddp.wrap_with(origin.clone(), &config)?, start, batch, &device)?;
        ddp.barrier()?;
        Ok((model.statistics(), alone.statistics()))
    })
    .unwrap()
}

#[test]
fn running_statistics_are_averaged_by_items() {
    for world in [2, 3] {
        let ranks = one_step(world, BufferPolicy::Average);
        let items: f64 = (0..world).map(|r| share(r).1 as f64).sum();
        for which in 0..2 {
            for i in 0..4 {
                let mean: f64 =
                    ranks.iter().enumerate().map(|(r, (_, alone))| alone[which][i] * share(r).1 as f64 / items).sum();
                assert!((ranks[0].0[which][i] - mean).abs() < 1e-6, "{which} {i}: {} {mean}", ranks[0].0[which][i]);
            }
        }
        assert!(ranks.iter().all(|(mine, _)| *mine == ranks[0].0), "the same bits on every rank");
    }
}

#[test]
fn running_statistics_are_those_of_rank_0_or_of_each_rank_if_wanted() {
    let ranks = one_step(3, BufferPolicy::Broadcast);
    assert!(ranks.iter().all(|(mine, _)| *mine == ranks[0].1));
    let ranks = one_step(3, BufferPolicy::Local);
    assert!(ranks.iter().all(|(mine, alone)| mine == alone), "threads that start from one model share nothing");
    assert_ne!(ranks[0].0, ranks[1].0);
}

#[test]
fn statistics_and_parameters_stay_alike_over_many_steps_and_the_last_bucket_overlaps() {
    for policy in [BufferPolicy::Average, BufferPolicy::Broadcast] {
        for accumulation in [1, 2] {
            let ranks = Ddp::spawn(2, |ddp| {
                let device = ddp.device()?.autodiff();
                let config = WrapConfig::new().with_buffers(policy).with_accumulation(accumulation).with_overlap(true);
                let mut model = ddp.wrap_with(Normed::new(&device), &config)?;
                for i in 0..6 * accumulation {
                    let start = 40 * i + 20 * ddp.rank();
                    model = step(&ddp, model, start, 5 + ddp.rank(), &device)?;
                }
                let stats = ddp.telemetry().stats();
                assert_eq!(stats.steps, 6);
                if accumulation == 1 {
                    assert_eq!(stats.overlapped, stats.collectives, "buffers hold no bucket back");
                }
                Ok((param_hash(&model)?, model.statistics()))
            })
            .unwrap();
            assert_eq!(ranks[0], ranks[1], "{policy:?}");
        }
    }
}

/// Running statistics, and a tensor that is no parameter.
#[derive(Module, Debug)]
struct Shifted {
    normed: Normed,
    shift: Tensor<2>,
}

impl Shifted {
    fn new(device: &Device) -> Self {
        Shifted { normed: Normed::new(device), shift: Tensor::ones([1, 6], device) }
    }

    /// Checks that all its tensors recompute activations (equality of devices ignores that), and trains one step: Burn
    /// panics where tensors with and without meet.
    fn assert_checkpointing(self, ddp: &Ddp, device: &Device) -> anyhow::Result<()> {
        struct Strategies(Vec<Option<GradientCheckpointingStrategy>>);
        impl ModuleVisitor for Strategies {
            fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
                self.0.push(param.base().gradient_checkpointing_strategy());
            }
        }
        let mut strategies = Strategies(vec![self.shift.gradient_checkpointing_strategy()]);
        self.visit(&mut strategies);
        assert_eq!(strategies.0, [Some(GradientCheckpointingStrategy::Balanced); 9]);
        assert!(self.normed.a.weight.is_require_grad());
        let shift = self.shift.clone();
        step_on(ddp, self.normed, rows(ddp.rank() * 5, 5, 6, 1, DType::F32, device) + shift)?;
        Ok(())
    }
}

#[test]
fn gradient_checkpointing_survives_wrapping() {
    for world in [1, 2] {
        let device = device().autodiff().gradient_checkpointing();
        let model = Ddp::spawn(world, |ddp| ddp.wrap(Shifted::new(&device))?.assert_checkpointing(&ddp, &device));
        model.unwrap();
    }
}

#[test]
fn gradient_checkpointing_survives_a_broadcast_and_loading() {
    let directory = tempfile::tempdir().unwrap();
    for world in [1, 2] {
        let device = device().autodiff().gradient_checkpointing();
        let ranks = Ddp::spawn(world, |ddp| {
            let model = ddp.broadcast_parameters(Shifted::new(&device), 0)?;
            let checkpoints = ddp.checkpoints(directory.path())?;
            checkpoints.save(world as u64, |c| c.model(&model))?;
            ddp.wrap(model)?.assert_checkpointing(&ddp, &device)?;
            let saved = checkpoints.latest()?.expect("it was saved");
            let loaded = saved.model(Shifted::new(&device))?;
            loaded.clone().assert_checkpointing(&ddp, &device)?;
            ddp.wrap(loaded)?.assert_checkpointing(&ddp, &device)?;
            saved.model(ddp.wrap(Shifted::new(&device))?)?.assert_checkpointing(&ddp, &device)
        });
        ranks.unwrap();
    }
}

#[test]
fn statistics_that_left_the_wrapped_model_are_an_error() {
    let error = Ddp::spawn(2, |ddp| {
        let device = ddp.device()?.autodiff();
        let model = ddp.wrap(Normed::new(&device))?;
        let model = model.valid().train();
        let loss = model.loss(rows(ddp.rank() * 5, 5, 6, 1, DType::F32, &device));
        let error = ddp.backward(&loss, &model).err().expect("an error");
        Ok(error.to_string())
    })
    .unwrap();
    assert!(error.iter().any(|e| e.contains("valid().train()") && e.contains("ddp.wrap")), "{error:?}");
}

/// Flips the lowest bit of the second number of a matrix. A mapper, since `Param::map` would make a parameter without a
/// tap.
struct Flip;

impl ModuleMapper for Flip {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        if D != 2 {
            return param;
        }
        param.map(|w| {
            let (device, tracked) = (w.device(), w.is_require_grad());
            let mut data = w.into_data();
            TensorData::with_bytes_mut([&mut data], |mut bytes| bytes[0][4] ^= 1 << 6);
            let w = Tensor::from_data(data, &device);
            if tracked { w.require_grad() } else { w }
        })
    }
}

/// Trains two ranks and flips a low bit (the rounding of a step can undo the lowest) of one weight on rank 1 after
/// `flip` steps; how many steps each rank did, and the error.
fn flipped(every: usize, flip: usize, frozen: bool) -> Vec<(usize, String)> {
    Ddp::spawn(2, |ddp| {
        let device = ddp.device()?.autodiff();
        let mut model = Mlp::new(&device);
        if frozen {
            model.b = model.b.no_grad();
        }
        let mut model = ddp.wrap_with(model, &WrapConfig::new().with_replica_check(every))?;
        let mut optim = SgdConfig::new().init();
        for done in 0..40 {
            if done == flip && ddp.rank() == 1 {
                model.b = model.b.map(&mut Flip);
            }
            let x = rows(ddp.rank() * 4 + done * 8, 4, 6, 1, DType::F32, &device);
            match ddp.backward(&model.forward(x).powf_scalar(2.0).mean(), &model) {
                Ok(grads) => model = optim.step(0.05, model.clone(), GradientsParams::from_grads(grads, &model)),
                Err(error) => return Ok((done, error.to_string())),
            }
        }
        Ok((40, String::new()))
    })
    .unwrap()
}

#[test]
fn a_flipped_bit_is_named_within_the_interval() {
    for frozen in [false, true] {
        for (done, error) in flipped(8, 10, frozen) {
            assert!((10..=17).contains(&done), "found after {done} steps, frozen: {frozen}");
            assert!(error.contains("replicas differ") && error.contains("b.weight"), "{error}");
            assert!(error.contains("b.weight differs between ranks 0, 1"), "{error}");
        }
    }
    assert!(flipped(0, 10, true).iter().all(|(done, error)| *done == 40 && error.is_empty()), "never, if unwanted");
    assert_eq!(flipped(100, 1, false)[0].0, 1, "the first steps are always compared");
}

#[test]
fn save_tells_that_replicas_differ_and_keeps_the_file() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("model");
    let errors = Ddp::spawn(3, |ddp| {
        let device = ddp.device()?.autodiff();
        let mut model = ddp.wrap(Mlp::new(&device))?;
        ddp.check_replicas(&model)?;
        ddp.save(&model, &path)?;
        if ddp.rank() == 2 {
            model.a.weight = model.a.weight.map(|w| (w + 1.0).detach().require_grad());
        }
        let error = ddp.save(&model, &path).unwrap_err();
        assert!(matches!(error, Error::ReplicasDiffer { .. }));
        ddp.barrier()?;
        Ok(error.to_string())
    })
    .unwrap();
    assert!(errors.iter().all(|e| e.contains("a.weight on rank 2 differs from the other ranks")), "{errors:?}");
    assert!(path.with_extension("bpk").exists());
}

#[test]
fn a_parameter_that_was_replaced_after_wrap_is_an_error() {
    for plain in [false, true] {
        let errors = Ddp::spawn(2, |ddp| {
            let device = ddp.device()?.autodiff();
            let mut model = ddp.wrap(Mlp::new(&device))?;
            let _copy = (!plain).then(|| model.clone());
            model.b.weight = model.b.weight.map(|w| w.clamp(-0.01, 0.01).detach().require_grad());
            let loss = model.forward(rows(ddp.rank() * 4, 4, 6, 1, DType::F32, &device)).mean();
            if plain {
                let panic = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| loss.backward())).err();
                return Ok(panic.and_then(|p| p.downcast_ref::<String>().cloned()).unwrap_or_default());
            }
            Ok(ddp.backward(&loss, &model).err().map(|e| e.to_string()).unwrap_or_default())
        })
        .unwrap();
        assert!(errors.iter().any(|e| e.contains("b.weight is no longer tapped")), "plain {plain}: {errors:?}");
        assert!(errors.iter().all(|e| !e.is_empty()), "{errors:?}");
    }
}

#[derive(Module, Debug)]
struct Careless {
    inner: Mlp,
}

impl Careless {
    /// `past`: where the second layer's weight is read: 0 through `val()`, 1 through `base()`, 2 through `Deref`, 3
    /// both ways.
    fn loss(&self, x: Tensor<2>, past: usize) -> Tensor<1> {
        let m = &self.inner;
        let b = match past {
            0 => m.b.weight.val(),
            1 => m.b.weight.base(),
            2 => (*m.b.weight).clone(),
            _ => m.b.weight.val() + m.b.weight.base(),
        };
        m.c.forward(m.a.forward(x).tanh().matmul(b).tanh()).powf_scalar(2.0).mean()
    }
}

#[test]
fn a_parameter_read_past_its_tap_is_an_error_at_once() {
    for past in 1..=3 {
        for plain in [false, true] {
            let errors = Ddp::spawn(2, |ddp| {
                let device = ddp.device()?.autodiff();
                let model = ddp.wrap(Careless { inner: Mlp::new(&device) })?;
                let loss = model.loss(rows(ddp.rank() * 4, 4, 6, 1, DType::F32, &device), past);
                if plain {
                    let panic = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| loss.backward())).err();
                    return Ok(panic.and_then(|p| p.downcast_ref::<String>().cloned()).unwrap_or_default());
                }
                Ok(ddp.backward(&loss, &model).err().map(|e| e.to_string()).unwrap_or_default())
            })
            .unwrap();
            assert!(
                errors.iter().any(|e| e.contains("inner.b.weight was read past its tap") && e.contains("val()")),
                "way {past}, plain {plain}: {errors:?}"
            );
            assert!(errors.iter().all(|e| !e.is_empty()));
        }
    }
}

#[test]
fn two_wrapped_models_in_one_loss_may_meet_in_any_order() {
    let options = WorldOptions { timeout: Duration::from_secs(20), ..WorldOptions::default() };
    let start = Instant::now();
    let hashes = Ddp::spawn_with(2, options, |ddp| {
        let device = ddp.device()?.autodiff();
        let mut first = ddp.wrap(Mlp::new(&device))?;
        let mut second = ddp.wrap(Mlp::new(&device))?;
        let (mut one, mut two) = (SgdConfig::new().init(), SgdConfig::new().init());
        for i in 0..20 {
            let x = rows(ddp.rank() * 4 + i * 8, 4, 6, 1, DType::F32, &device);
            let (a, b) = (first.forward(x.clone()), second.forward(x));
            let loss = if (ddp.rank() + i) % 2 == 0 { a.mean() + b.mean() } else { b.mean() + a.mean() };
            let mut grads = loss.backward();
            let grads_a = GradientsParams::from_module(&mut grads, &first);
            let grads_b = GradientsParams::from_module(&mut grads, &second);
            first = one.step(0.05, first, grads_a);
            second = two.step(0.05, second, grads_b);
        }
        Ok((param_hash(&first)?, param_hash(&second)?))
    })
    .unwrap();
    assert_eq!(hashes[0], hashes[1]);
    assert!(start.elapsed() < Duration::from_secs(20));
}
