//! Running statistics, and the comparison of replicas.

use burn::grad_clipping::GradientClippingConfig;
use burn::module::{ModuleMapper, ModuleVisitor, Param};
use burn::nn::{Linear, LinearConfig};
use burn::optim::{AdamConfig, GradientsParams, SgdConfig};
use burn::prelude::*;
use burn::tensor::{DType, GradientCheckpointingStrategy, TensorData};
use burn_ddp::prelude::*;
use burn_ddp::{Error, WorldOptions};
use burn_ddp_tests::*;
use std::time::{Duration, Instant};

/// Mean and variance.
type Statistics = [Vec<f64>; 2];

fn step(ddp: &Ddp, model: Normed, start: usize, batch: usize, device: &Device) -> anyhow::Result<Normed> {
    step_on(Some(ddp), model, rows(start, batch, 6, 1, DType::F32, device))
}

/// A step of a wrapped model; without `ddp` one of plain Burn.
fn step_on(ddp: Option<&Ddp>, model: Normed, batch: Tensor<2>) -> anyhow::Result<Normed> {
    let items = batch.dims()[0] as f64;
    let loss = model.loss(batch);
    let grads = match ddp {
        Some(ddp) => ddp.weighted(items).backward(&loss, &model)?,
        None => Some(GradientsParams::from_grads(loss.backward(), &model)),
    };
    Ok(match grads {
        Some(grads) => SgdConfig::new().init().step(0.05, model, grads),
        None => model,
    })
}

/// The first row of a rank and its number of rows in a step, which is 4, 6, 8 …
fn share(rank: usize) -> (usize, usize) {
    ((0..rank).map(|r| 4 + 2 * r).sum(), 4 + 2 * rank)
}

/// Makes one step with equal wrapped models. Returns for each rank its statistics after the step, and the statistics
/// that its own rows alone would give.
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

/// Statistics of each rank after a step and a detached forward of its own data, before and after `call`.
fn detached(
    policy: BufferPolicy,
    call: impl Fn(&Ddp, &Normed) -> anyhow::Result<()> + Sync,
) -> Vec<(Statistics, Statistics)> {
    Ddp::spawn(3, |ddp| {
        let device = ddp.device()?.autodiff();
        let config = WrapConfig::new().with_buffers(policy);
        let model = step(&ddp, ddp.wrap_with(Normed::new(&device), &config)?, ddp.rank() * 5, 5, &device)?;
        let _ = model.loss(rows(100 + ddp.rank() * 5, 5, 6, 1, DType::F32, &device)).detach();
        let before = model.statistics();
        call(&ddp, &model)?;
        Ok((before, model.statistics()))
    })
    .unwrap()
}

/// True if these are the statistics that a policy makes of those of the ranks before.
fn are_agreed(statistics: &Statistics, policy: BufferPolicy, ranks: &[(Statistics, Statistics)]) -> bool {
    (0..2).flat_map(|which| (0..4).map(move |i| (which, i))).all(|(which, i)| {
        let expected = match policy {
            BufferPolicy::Average => ranks.iter().map(|(before, _)| before[which][i]).sum::<f64>() / 3.0,
            BufferPolicy::Broadcast | BufferPolicy::Local => ranks[0].0[which][i],
        };
        (statistics[which][i] - expected).abs() < 1e-6
    })
}

#[test]
fn statistics_that_a_detached_forward_moved_are_brought_together_in_files_and_on_demand() {
    let dir = tempfile::tempdir().unwrap();
    for policy in [BufferPolicy::Average, BufferPolicy::Broadcast, BufferPolicy::Local] {
        let file = dir.path().join(format!("{policy:?}.bpk"));
        let checkpoints = dir.path().join(format!("{policy:?}"));
        let synced = detached(policy, |ddp, model| Ok(ddp.sync_buffers(model)?));
        assert_ne!(synced[0].0, synced[1].0, "the forward moved them apart");
        assert!(are_agreed(&synced[0].1, policy, &synced), "{policy:?}");
        match policy {
            BufferPolicy::Local => assert!(synced.iter().all(|(before, after)| before == after)),
            _ => assert!(synced.iter().all(|(_, after)| *after == synced[0].1), "the same bits"),
        }
        let looks = [
            detached(policy, |ddp, model| Ok(ddp.check_replicas(model)?)),
            detached(policy, |ddp, model| ddp.save(model, &file).map(drop).map_err(Into::into)),
            detached(policy, |ddp, model| Ok(ddp.checkpoints(&checkpoints)?.save(1, |c| c.model(model))?)),
        ];
        assert!(looks.iter().flatten().all(|(before, after)| before == after), "{policy:?}");
        let saved = Normed::new(&device().autodiff()).load_file(&file).statistics();
        assert!(are_agreed(&saved, policy, &looks[1]), "{policy:?}");
        let saved = Ddp::spawn(1, |ddp| {
            let saved = ddp.checkpoints(&checkpoints)?.latest()?.expect("saved");
            Ok(saved.model(Normed::new(&ddp.device()?.autodiff()))?.statistics())
        });
        assert!(are_agreed(&saved.unwrap()[0], policy, &looks[2]), "{policy:?}");
    }
}

#[test]
fn a_copy_for_validation_gets_statistics_that_were_brought_together() {
    let means = Ddp::spawn(2, |ddp| {
        let device = ddp.device()?.autodiff();
        let model = step(&ddp, ddp.wrap(Normed::new(&device))?, ddp.rank() * 5, 5, &device)?;
        let _ = model.loss(rows(100 + ddp.rank() * 5, 5, 6, 1, DType::F32, &device)).detach();
        let copy = model.valid();
        let apart = copy.statistics();
        ddp.sync_buffers(&copy)?;
        assert_eq!(model.statistics(), apart, "the model itself was not passed");
        Ok(copy.statistics())
    })
    .unwrap();
    assert_eq!(means[0], means[1]);
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

    /// Checks that all its tensors recompute activations (equality of devices ignores that), and trains one step, on
    /// `ddp` if the model is wrapped: Burn panics if an operation combines tensors with and without checkpointing.
    fn assert_checkpointing(self, ddp: Option<&Ddp>, device: &Device) -> anyhow::Result<()> {
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
        let start = ddp.map_or(0, Ddp::rank) * 5;
        step_on(ddp, self.normed, rows(start, 5, 6, 1, DType::F32, device) + shift)?;
        Ok(())
    }
}

#[test]
fn gradient_checkpointing_survives_wrapping() {
    for world in [1, 2] {
        let device = device().autodiff().gradient_checkpointing();
        let model = Ddp::spawn(world, |ddp| ddp.wrap(Shifted::new(&device))?.assert_checkpointing(Some(&ddp), &device));
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
            ddp.wrap(model)?.assert_checkpointing(Some(&ddp), &device)?;
            let saved = checkpoints.latest()?.expect("it was saved");
            let loaded = saved.model(Shifted::new(&device))?;
            loaded.clone().assert_checkpointing(None, &device)?;
            ddp.wrap(loaded)?.assert_checkpointing(Some(&ddp), &device)?;
            saved.model(ddp.wrap(Shifted::new(&device))?)?.assert_checkpointing(Some(&ddp), &device)
        });
        ranks.unwrap();
    }
}

#[test]
fn ranks_that_trained_without_wrap_hear_of_it() {
    let directory = tempfile::tempdir().unwrap();
    let errors = Ddp::spawn(2, |ddp| {
        let device = ddp.device()?.autodiff();
        let model = ddp.broadcast_parameters(Normed::new(&device), 0)?;
        let loss = model.loss(rows(ddp.rank() * 5, 5, 6, 1, DType::F32, &device));
        let grads = GradientsParams::from_grads(loss.backward(), &model);
        let model = SgdConfig::new().init().step(0.1, model, grads);
        let saved = ddp.save(&model, directory.path().join("model"));
        Ok([ddp.check_replicas(&model).unwrap_err(), saved.unwrap_err()].map(|error| error.to_string()))
    })
    .unwrap();
    for error in errors.iter().flatten() {
        assert!(error.contains("the model is not wrapped") && error.contains("ddp.wrap"), "{error}");
    }
}

#[test]
fn statistics_that_left_the_wrapped_model_are_an_error() {
    let error = Ddp::spawn(2, |ddp| {
        let device = ddp.device()?.autodiff();
        let model = ddp.wrap(Normed::new(&device))?;
        let model = model.valid().train();
        let loss = model.loss(rows(ddp.rank() * 5, 5, 6, 1, DType::F32, &device));
        let error = ddp.backward(&loss, &model).map(drop).expect_err("an error");
        Ok(error.to_string())
    })
    .unwrap();
    assert!(error.iter().any(|e| e.contains("valid().train()") && e.contains("ddp.wrap")), "{error:?}");
}

/// Flips bits of the second number of each matrix: the index of the byte, and the bits. This is a mapper, since
/// `Param::map` would make a parameter that burn-ddp does not intercept.
struct Flip(usize, u8);

/// A bit far below the movement of a step, but not the lowest, which the rounding of a step can restore.
const LOW: Flip = Flip(0, 1 << 6);
const SIGN: Flip = Flip(3, 1 << 7);

impl ModuleMapper for Flip {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        if D != 2 {
            return param;
        }
        param.map(|w| {
            let (device, tracked) = (w.device(), w.is_require_grad());
            let mut data = w.into_data();
            TensorData::with_bytes_mut([&mut data], |mut bytes| bytes[0][4 + self.0] ^= self.1);
            let w = Tensor::from_data(data, &device);
            if tracked { w.require_grad() } else { w }
        })
    }
}

/// Trains two ranks and flips a bit of one weight on rank 1 after `flip` steps. Returns the number of steps and the
/// error of each rank.
fn flipped(config: &WrapConfig, flip: usize, bit: Flip, frozen: bool) -> Vec<(usize, String)> {
    Ddp::spawn(2, |ddp| {
        let device = ddp.device()?.autodiff();
        let mut model = Mlp::new(&device);
        if frozen {
            model.b = model.b.no_grad();
        }
        let mut model = ddp.wrap_with(model, config)?;
        let mut optim = SgdConfig::new().init();
        for done in 0..40 {
            if done == flip && ddp.rank() == 1 {
                model.b = model.b.map(&mut Flip(bit.0, bit.1));
            }
            let x = rows(ddp.rank() * 4 + done * 8, 4, 6, 1, DType::F32, &device);
            match ddp.backward(&model.forward(x).powf_scalar(2.0).mean(), &model) {
                Ok(grads) => model = optim.step(0.05, model, grads.expect("averages")),
                Err(error) => return Ok((done, error.to_string())),
            }
        }
        Ok((40, String::new()))
    })
    .unwrap()
}

#[test]
fn a_flipped_bit_is_named_within_the_interval() {
    let every = |steps| WrapConfig::new().with_replica_check(steps);
    let exact = every(8).with_exact_replicas(true);
    for (config, bit, frozen) in
        [(&exact, LOW, false), (&exact, LOW, true), (&every(8), LOW, true), (&every(8), SIGN, false)]
    {
        for (done, error) in flipped(config, 10, bit, frozen) {
            assert!((10..=17).contains(&done), "found after {done} steps, frozen: {frozen}");
            assert!(error.contains("replicas differ") && error.contains("b.weight"), "{error}");
            assert!(error.contains("b.weight differs between ranks 0, 1"), "{error}");
        }
    }
    let unwanted = flipped(&every(0), 10, LOW, true);
    assert!(unwanted.iter().all(|(done, error)| *done == 40 && error.is_empty()), "never, if unwanted");
    for (flip, found) in [(1, 1), (5, 8), (17, 32)] {
        let ranks = flipped(&WrapConfig::new(), flip, SIGN, false);
        assert_eq!(ranks.iter().map(|(done, _)| *done).collect::<Vec<_>>(), [found; 2], "flipped before step {flip}");
    }
}

/// A rank's fault in a step, given the model and the step's number.
type Fault = fn(&Ddp, Mlp, &mut f64, usize) -> anyhow::Result<(Mlp, Option<GradientsParams>)>;

fn loss(model: &Mlp, rank: usize, step: usize, device: &Device) -> Tensor<1> {
    model.forward(rows(rank * 4 + step * 8, 4, 6, 1, DType::F32, device)).powf_scalar(2.0).mean()
}

/// Trains two ranks for 40 steps. Before each optimizer step `fault` may change the model and the learning rate on
/// rank 1, or give gradients in place of the averages. Returns each rank's number of comparisons that found rounding
/// differences, and its error with the step.
fn faulty(config: &WrapConfig, fault: Fault) -> Vec<(u64, Option<(usize, String)>)> {
    Ddp::spawn(2, |ddp| {
        let device = ddp.device()?.autodiff();
        let mut model = ddp.wrap_with(Mlp::new(&device), config)?;
        let mut optim = AdamConfig::new().init();
        for step in 0..40 {
            let mut grads = match ddp.backward(&loss(&model, ddp.rank(), step, &device), &model) {
                Ok(grads) => grads.expect("averages"),
                Err(error) => return Ok((ddp.telemetry().stats().rounded, Some((step, error.to_string())))),
            };
            let mut lr = 0.01;
            if ddp.rank() == 1 {
                let (changed, other) = fault(&ddp, model, &mut lr, step)?;
                model = changed;
                grads = other.unwrap_or(grads);
            }
            model = optim.step(lr, model, grads);
        }
        ddp.check_replicas(&model)?;
        Ok((ddp.telemetry().stats().rounded, None))
    })
    .unwrap()
}

#[test]
fn ranks_that_round_differently_train_on_and_count_it() {
    let last_bit: Fault = |_, model, lr, _| {
        *lr = f64::from(f32::from_bits((*lr as f32).to_bits() + 1));
        Ok((model, None))
    };
    let every = WrapConfig::new().with_replica_check(10);
    for (rounded, error) in faulty(&every, last_bit) {
        assert_eq!(error, None);
        assert_eq!(rounded, 8, "in steps 1, 2, 4, 8, 10, 20 and 30, and in the end");
    }
    for (_, error) in faulty(&every.with_exact_replicas(true), last_bit) {
        let (step, error) = error.expect("an error");
        assert!(step <= 2 && error.contains("differs between ranks 0, 1;"), "{error}");
    }
}

/// Flex sums 4 Mi elements and more on several threads, in the order in which the threads finish. So each rank's norm
/// for clipping rounds differently.
#[test]
#[ignore = "RAYON_NUM_THREADS=2 cargo test --features rayon --test replica_state norm -- --ignored"]
fn clipping_by_a_norm_that_rounds_differently_goes_on() {
    let rounded = Ddp::spawn(2, |ddp| {
        let device = ddp.device()?.autodiff();
        let layer = LinearConfig::new(2048, 2049).with_bias(false).init(&device);
        let mut model: Linear = ddp.wrap_with(layer, &WrapConfig::new().with_replica_check(10))?;
        let mut optim = AdamConfig::new().with_grad_clipping(Some(GradientClippingConfig::Norm(1e-3))).init();
        for step in 0..200 {
            let x = rows(2 * step + ddp.rank(), 1, 2048, 1, DType::F32, &device);
            let loss = model.forward(x).powf_scalar(2.0).mean();
            let grads = ddp.backward(&loss, &model)?.expect("averages");
            model = optim.step(1e-3, model, grads);
        }
        ddp.check_replicas(&model)?;
        Ok(ddp.telemetry().stats().rounded)
    });
    assert!(rounded.unwrap()[0] > 0, "one thread per rank?");
}

#[test]
fn movements_are_measured_anew_after_a_join() {
    let rounded = Ddp::spawn(2, |ddp| {
        let device = ddp.device()?.autodiff();
        let mut model = ddp.wrap_with(Mlp::new(&device), &WrapConfig::new().with_replica_check(2))?;
        let mut optim = AdamConfig::new().init();
        let lr = f64::from(f32::from_bits(0.01_f32.to_bits() + ddp.rank() as u32));
        for _ in 0..2 {
            for step in 0..6 + 5 * ddp.rank() {
                let loss = loss(&model, ddp.rank(), step, &device);
                let grads = ddp.backward(&loss, &model)?.expect("averages");
                model = optim.step(lr, model, grads);
            }
            ddp.join(&mut model, &mut optim)?;
        }
        ddp.check_replicas(&model)?;
        Ok(ddp.telemetry().stats().rounded)
    })
    .unwrap();
    assert!(rounded.iter().all(|rounded| *rounded > 3), "{rounded:?}");
}

#[test]
fn ranks_that_train_different_models_are_an_error_at_the_next_comparison() {
    let rate: Fault = |_, model, lr, _| {
        *lr *= 1.01;
        Ok((model, None))
    };
    let own_gradient: Fault = |ddp, model, _, step| {
        let device = ddp.device()?.autodiff();
        let own = (step == 15).then(|| -> anyhow::Result<_> {
            let plain = ddp.unwrap(model.clone())?;
            Ok(GradientsParams::from_grads(loss(&plain, 1, step, &device).backward(), &plain))
        });
        Ok((model, own.transpose()?))
    };
    let late_rate: Fault = |_, model, lr, step| {
        *lr *= if step < 12 { 1.0 } else { 1.01 };
        Ok((model, None))
    };
    /// Rounds to bf16.
    struct Halves;
    impl ModuleMapper for Halves {
        fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
            param.map(|w| Tensor::from_inner(w.inner().cast(DType::BF16).cast(DType::F32)).require_grad())
        }
    }
    let bf16: Fault = |_, model, _, _| Ok((model.map(&mut Halves), None));
    for (name, fault, at) in
        [("rate", rate, 1), ("own gradient", own_gradient, 20), ("late rate", late_rate, 20), ("bf16", bf16, 1)]
    {
        for (_, error) in faulty(&WrapConfig::new().with_replica_check(10), fault) {
            let (step, error) = error.expect(name);
            assert_eq!(step, at, "{name}: {error}");
            assert!(error.contains(&format!("the replicas differ in step {at}: a.weight")), "{name}: {error}");
            assert!(
                error.contains("between ranks 0, 1") && error.contains("go on from a checkpoint"),
                "{name}: {error}"
            );
        }
    }
}

#[test]
fn a_lagging_copy_that_one_rank_reads_is_not_compared() {
    for frozen in [false, true] {
        for scoped in [false, true] {
            let hashes = Ddp::spawn(2, |ddp| {
                let device = ddp.device()?.autodiff();
                let config = WrapConfig::new().with_replica_check(1).with_exact_replicas(true);
                let mut model = ddp.wrap_with(Mlp::new(&device), &config)?;
                let mut best = model.clone();
                let mut optim = SgdConfig::new().init();
                for step in 0..6 {
                    let loss = loss(&model, ddp.rank(), step, &device);
                    if ddp.rank() == 1 {
                        let copy = if frozen { best.clone().no_grad() } else { best.clone() };
                        let _ = copy.forward(rows(0, 4, 6, 1, DType::F32, &device));
                    }
                    let grads = match scoped {
                        true => ddp.scope(&model, || drop(loss.backward()))?.1,
                        false => ddp.backward(&loss, &model)?,
                    };
                    if step == 2 {
                        best = model.clone();
                    }
                    model = optim.step(0.05, model, grads.expect("averages"));
                }
                Ok(param_hash(&model)?)
            })
            .unwrap();
            assert_eq!(hashes[0], hashes[1]);
        }
    }
}

#[test]
fn of_two_models_in_one_loss_the_checked_one_is_compared() {
    for faulty in [0, 1] {
        let errors = Ddp::spawn(2, |ddp| {
            let device = ddp.device()?.autodiff();
            let mut models = Vec::new();
            for every in [5, 0] {
                models.push(ddp.wrap_with(Mlp::new(&device), &WrapConfig::new().with_replica_check(every))?);
            }
            for step in 0..12 {
                if step == 7 && ddp.rank() == 1 {
                    models[faulty] = models[faulty].clone().map(&mut Flip(SIGN.0, SIGN.1));
                }
                let mut order = [0, 1];
                order.rotate_left((step + ddp.rank()) % 2);
                let [one, other] = order.map(|i| loss(&models[i], ddp.rank(), step, &device));
                let named = [step % 2, 1 - step % 2];
                let grads = match ddp.backward(&(one + other), (&models[named[0]], &models[named[1]])) {
                    Ok(grads) => grads.expect("averages"),
                    Err(error) => return Ok((step, error.to_string())),
                };
                for (i, grads) in named.into_iter().zip([grads.0, grads.1]) {
                    models[i] = SgdConfig::new().init().step(0.05, models[i].clone(), grads);
                }
            }
            let checks: Vec<bool> = models.iter().map(|model| ddp.check_replicas(model).is_ok()).collect();
            Ok((12, format!("{checks:?}")))
        })
        .unwrap();
        for (step, error) in errors {
            match faulty {
                0 => {
                    assert!(step == 10 && error.contains("the replicas differ in step 10: a.weight"), "{step} {error}")
                }
                _ => assert_eq!((step, error.as_str()), (12, "[true, false]"), "found by `check_replicas` alone"),
            }
        }
    }
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
    for copied in [true, false] {
        let errors = Ddp::spawn(2, |ddp| {
            let device = ddp.device()?.autodiff();
            let mut model = ddp.wrap(Mlp::new(&device))?;
            let _copy = copied.then(|| model.clone());
            model.b.weight = model.b.weight.map(|w| w.clamp(-0.01, 0.01).detach().require_grad());
            let loss = model.forward(rows(ddp.rank() * 4, 4, 6, 1, DType::F32, &device)).mean();
            Ok(ddp.backward(&loss, &model).err().map(|e| e.to_string()).unwrap_or_default())
        })
        .unwrap();
        assert!(errors.iter().any(|e| e.contains("b.weight is no longer tapped")), "copied {copied}: {errors:?}");
        assert!(errors.iter().all(|e| !e.is_empty()), "{errors:?}");
    }
}

#[derive(Module, Debug)]
struct Careless {
    inner: Mlp,
}

impl Careless {
    /// `past`: how the second layer's weight is read: 0 through `val()`, 1 through `base()`, 2 through `Deref`, 3 both
    /// ways.
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
        let errors = Ddp::spawn(2, |ddp| {
            let device = ddp.device()?.autodiff();
            let model = ddp.wrap(Careless { inner: Mlp::new(&device) })?;
            let loss = model.loss(rows(ddp.rank() * 4, 4, 6, 1, DType::F32, &device), past);
            Ok(ddp.backward(&loss, &model).err().map(|e| e.to_string()).unwrap_or_default())
        })
        .unwrap();
        assert!(
            errors.iter().any(|e| e.contains("inner.b.weight was read past its tap") && e.contains("val()")),
            "way {past}: {errors:?}"
        );
        assert!(errors.iter().all(|e| !e.is_empty()));
    }
}

#[test]
fn two_wrapped_models_in_one_loss_may_meet_in_any_order() {
    let options = WorldOptions { timeout: Duration::from_secs(60), ..WorldOptions::default() };
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
            let (grads_a, grads_b) = ddp.backward(&loss, (&first, &second))?.expect("averages");
            first = one.step(0.05, first, grads_a);
            second = two.step(0.05, second, grads_b);
        }
        Ok((param_hash(&first)?, param_hash(&second)?))
    })
    .unwrap();
    assert_eq!(hashes[0], hashes[1]);
    assert!(start.elapsed() < Duration::from_secs(60));
}
