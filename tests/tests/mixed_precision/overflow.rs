//! Overflows of scaled losses: all ranks skip exactly the step in which one has one.

use std::path::Path;

use burn::data::dataset::InMemDataset;
use burn::module::{Module, Param};
use burn::nn::{BatchNormConfig, Linear, LinearConfig};
use burn::optim::{AdamConfig, GradientsParams, SgdConfig};
use burn::prelude::*;
use burn::tensor::DType;
use burn_ddp::prelude::*;
use burn_ddp::{DdpOptimizer, LossScaling, Precision, param_hash, scale_loss};
use burn_ddp_tests::{Fill, Mlp};

use super::{all_equal, in_half, loss, small_scale};

/// A parameter of [`Mlp`] whose gradient overflows.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Of {
    Weight,
    Bias,
}

/// Nothing, with an infinite gradient for one parameter.
fn poison(model: &Mlp, of: Of) -> Tensor<1> {
    fn of_param<const D: usize>(param: &Param<Tensor<D>>) -> Tensor<1> {
        (param.val().cast(DType::F32) * f32::MAX).sum() * f32::MAX
    }
    match of {
        Of::Weight => of_param(&model.b.weight),
        Of::Bias => of_param(model.c.bias.as_ref().expect("has one")),
    }
}

/// A training with an overflow: hashes after each step of this rank, numbers of skips, and the last scale.
struct Trained {
    hashes: Vec<String>,
    skipped: Vec<usize>,
    scale: f64,
}

struct Plan {
    world: usize,
    precision: Precision,
    sharding: Sharding,
    micro_batches: usize,
    of: Of,
    /// Step, micro-batch and rank of the overflow.
    at: (usize, usize, usize),
}

fn train(plan: &Plan) -> Vec<Trained> {
    Ddp::spawn(plan.world, |ddp| {
        let device = ddp.device()?.autodiff();
        let config = in_half(plan.precision)
            .with_loss_scaling(small_scale())
            .with_accumulation(plan.micro_batches)
            .with_sharding(plan.sharding)
            .with_sharding_above(90);
        let mut model = ddp.wrap_with(Mlp::new(&device).map(&mut Fill(0.0)), &config)?;
        let mut optim = ddp.optimizer(AdamConfig::new().init(), &model)?;
        let (mut hashes, mut skipped) = (Vec::new(), Vec::new());
        for step in 0..4 {
            for micro_batch in 0..plan.micro_batches {
                let at = (step * plan.micro_batches + micro_batch) * plan.world + ddp.rank();
                let mut loss = loss(&model, plan.precision, 2 * at, 2, &device);
                if (step, micro_batch, ddp.rank()) == plan.at {
                    loss = loss + poison(&model, plan.of);
                } else {
                    // All ranks read the same parameters, which sharded ones demand.
                    let read = match plan.of {
                        Of::Weight => model.b.weight.val().cast(DType::F32).sum(),
                        Of::Bias => model.c.bias.as_ref().expect("has one").val().cast(DType::F32).sum(),
                    };
                    loss = loss + read * 0.0;
                }
                let last = micro_batch + 1 == plan.micro_batches;
                match ddp.backward(&loss, &model)? {
                    Some(grads) => model = optim.step(1e-2, model, grads),
                    None if last => skipped.push(step),
                    None => {}
                }
            }
            hashes.push(param_hash(&model)?);
        }
        assert_eq!(ddp.telemetry().stats().skipped, skipped.len() as u64);
        let scale = ddp.telemetry().loss_scale().expect("has one");
        Ok(Trained { hashes, skipped, scale })
    })
    .unwrap()
}

#[test]
fn all_ranks_skip_exactly_the_step_that_overflows() {
    let all =
        |world, precision, sharding, micro_batches, of, at| Plan { world, precision, sharding, micro_batches, of, at };
    for plan in [
        all(1, Precision::F16, Sharding::Off, 1, Of::Weight, (1, 0, 0)),
        all(1, Precision::F16, Sharding::Off, 2, Of::Weight, (1, 0, 0)),
        all(2, Precision::F16, Sharding::Off, 1, Of::Weight, (0, 0, 1)),
        all(2, Precision::Bf16, Sharding::Off, 1, Of::Bias, (1, 0, 0)),
        all(3, Precision::F16, Sharding::Off, 3, Of::Bias, (2, 0, 1)),
        all(3, Precision::F16, Sharding::Off, 3, Of::Weight, (2, 2, 2)),
        all(2, Precision::F32, Sharding::Off, 2, Of::Weight, (3, 1, 0)),
        all(3, Precision::F16, Sharding::Parameters, 1, Of::Weight, (1, 0, 2)),
        all(2, Precision::F16, Sharding::Parameters, 2, Of::Weight, (1, 0, 1)),
        all(2, Precision::F16, Sharding::Parameters, 2, Of::Bias, (3, 1, 1)),
    ] {
        let Plan { world, precision, sharding, micro_batches, of, at } = plan;
        let case = format!("{world} {precision} {sharding:?} {micro_batches} {of:?} {at:?}");
        let ranks = train(&plan);
        for rank in &ranks {
            assert_eq!(rank.skipped, [at.0], "{case}");
            assert_eq!(rank.scale, 8.0, "{case}");
            assert_eq!(rank.hashes, ranks[0].hashes, "{case}");
            for step in 1..4 {
                assert_eq!(rank.hashes[step] == rank.hashes[step - 1], step == at.0, "{case}");
            }
        }
    }
}

/// A scale that is far too large is found by skips, as in torch.
#[test]
fn the_scale_falls_until_it_fits_and_grows_again() {
    let scales = Ddp::spawn(2, |ddp| {
        let device = ddp.device()?.autodiff();
        let scaling = LossScaling { initial_scale_power: 30, loss_scale_window: 4, ..LossScaling::default() };
        let config = in_half(Precision::F16).with_loss_scaling(scaling);
        let mut model = ddp.wrap_with(Mlp::new(&device).map(&mut Fill(0.0)), &config)?;
        let mut optim = ddp.optimizer(SgdConfig::new().init(), &model)?;
        let (mut scales, mut steps) = (Vec::new(), 0);
        for step in 0..40 {
            let loss = loss(&model, Precision::F16, 4 * step + 2 * ddp.rank(), 2, &device);
            if let Some(grads) = ddp.backward(&loss, &model)? {
                steps += 1;
                model = optim.step(1e-2, model, grads);
            }
            scales.push(ddp.telemetry().loss_scale().expect("has one"));
        }
        let skipped = ddp.telemetry().stats().skipped;
        assert_eq!(skipped + steps, 40);
        assert!(skipped >= 8, "{scales:?}");
        assert!(scales.windows(2).any(|pair| pair[1] == 2.0 * pair[0]), "{scales:?}");
        Ok((scales, param_hash(&model)?))
    })
    .unwrap();
    all_equal(&scales);
}

#[test]
fn tensorboard_shows_scale_and_skips() {
    let dir = tempfile::tempdir().unwrap();
    Ddp::spawn(2, |ddp| {
        let device = ddp.device()?.autodiff();
        let board = ddp.telemetry().tensorboard(dir.path())?;
        for (precision, is_there) in [(Precision::F32, false), (Precision::F16, true)] {
            let model = ddp.wrap_with(Mlp::new(&device).map(&mut Fill(0.0)), &in_half(precision))?;
            ddp.backward(&loss(&model, precision, 2 * ddp.rank(), 2, &device), &model)?;
            board.telemetry(0)?;
            if ddp.is_main() {
                let file = std::fs::read_dir(dir.path())?.next().expect("a file")?.path();
                let bytes = std::fs::read(file)?;
                for tag in ["step/loss_scale", "step/skipped"] {
                    let found = bytes.windows(tag.len()).any(|at| at == tag.as_bytes());
                    assert_eq!(found, is_there, "{tag}");
                }
            }
        }
        Ok(())
    })
    .unwrap();
}

#[test]
fn a_scale_below_its_bound_is_an_error_that_names_a_gradient() {
    let errors = Ddp::spawn(2, |ddp| {
        let device = ddp.device()?.autodiff();
        let config = in_half(Precision::F16).with_loss_scaling(small_scale());
        let model = ddp.wrap_with(Mlp::new(&device).map(&mut Fill(0.0)), &config)?;
        for _ in 0..4 {
            let mut loss = loss(&model, Precision::F16, 0, 2, &device);
            if ddp.rank() == 1 {
                loss = loss + poison(&model, Of::Weight);
            }
            assert!(ddp.backward(&loss, &model)?.is_none());
        }
        let mut loss = loss(&model, Precision::F16, 0, 2, &device);
        if ddp.rank() == 1 {
            loss = loss + poison(&model, Of::Weight);
        }
        Ok(ddp.backward(&loss, &model).unwrap_err().to_string())
    })
    .unwrap();
    for error in &errors {
        assert!(error.contains("the loss scale has fallen to 0.5"), "{error}");
        assert!(error.contains("the gradient of b.weight is not finite on rank 1"), "{error}");
    }
}

/// A rank of weight 0 does not count, so its overflow does not either.
#[test]
fn weight_0_excludes_an_overflow() {
    let hashes = Ddp::spawn(3, |ddp| {
        let device = ddp.device()?.autodiff();
        let config = in_half(Precision::F16).with_loss_scaling(small_scale());
        let mut model = ddp.wrap_with(Mlp::new(&device).map(&mut Fill(0.0)), &config)?;
        let mut optim = ddp.optimizer(AdamConfig::new().init(), &model)?;
        for step in 0..3 {
            let mut loss = loss(&model, Precision::F16, 6 * step + 2 * ddp.rank(), 2, &device);
            if ddp.rank() == 1 {
                loss = loss + poison(&model, Of::Bias);
            }
            let items = if ddp.rank() == 1 { 0.0 } else { 2.0 };
            let grads = ddp.weighted(items).backward(&loss, &model)?.expect("not skipped");
            model = optim.step(1e-2, model, grads);
        }
        Ok(param_hash(&model)?)
    })
    .unwrap();
    all_equal(&hashes);
}

/// The last step of an epoch, which is short, is skipped, and the next epoch trains.
#[test]
fn the_last_step_of_an_epoch_may_be_skipped() {
    #[derive(Clone)]
    struct Numbers;
    impl burn::data::dataloader::batcher::Batcher<usize, Vec<usize>> for Numbers {
        fn batch(&self, items: Vec<usize>, _: &Device) -> Vec<usize> {
            items
        }
    }
    let outcomes = Ddp::spawn(2, |ddp| {
        let device = ddp.device()?.autodiff();
        let config = in_half(Precision::F16).with_loss_scaling(small_scale()).with_accumulation(2);
        let mut model = ddp.wrap_with(Mlp::new(&device).map(&mut Fill(0.0)), &config)?;
        let mut optim = ddp.optimizer(AdamConfig::new().init(), &model)?;
        // 10 items in micro-batches of 2: 3 on rank 0 and 2 of items of its own on rank 1.
        let loader = ddp.loader(Numbers).batch_size(2).build(InMemDataset::new((0..10).collect::<Vec<usize>>()))?;
        let mut steps = Vec::new();
        for mut epoch in loader.epochs(0..2) {
            while let Some(batch) = epoch.next() {
                let batch = batch?;
                let last = epoch.step() == epoch.len();
                let mut loss = loss(&model, Precision::F16, batch[0], batch.len(), &device);
                if last && epoch.number() == 0 && epoch.batch_items() > 0 && ddp.rank() == 0 {
                    loss = loss + poison(&model, Of::Weight);
                }
                match ddp.backward(&loss, &model)? {
                    Some(grads) => {
                        model = optim.step(1e-2, model, grads);
                        steps.push(true);
                    }
                    None if last => steps.push(false),
                    None => {}
                }
            }
        }
        Ok((steps, param_hash(&model)?))
    })
    .unwrap();
    all_equal(&outcomes);
    assert_eq!(outcomes[0].0, [true, false, true, true]);
}

/// Two models in two calls have scales of their own; in one call the smallest counts, and both are skipped.
#[test]
fn models_of_several_calls_are_independent_and_those_of_one_are_not() {
    let outcomes = Ddp::spawn(2, |ddp| {
        let device = ddp.device()?.autodiff();
        let of = |power| {
            let scaling = LossScaling { initial_scale_power: power, ..LossScaling::default() };
            let config = in_half(Precision::F16).with_loss_scaling(scaling);
            ddp.wrap_with(Mlp::new(&device).map(&mut Fill(power as f32)), &config)
        };
        let (a, b) = (of(4)?, of(6)?);
        let loss_of = |model: &Mlp, poisons: bool| {
            let loss = loss(model, Precision::F16, 2 * ddp.rank(), 2, &device);
            if poisons && ddp.rank() == 1 { loss + poison(model, Of::Weight) } else { loss }
        };
        let mut scales = Vec::new();
        let mut note = || scales.push(ddp.telemetry().loss_scale().expect("has one"));
        assert!(ddp.backward(&loss_of(&a, true), &a)?.is_none());
        note(); // a: 8
        assert!(ddp.backward(&loss_of(&b, false), &b)?.is_some());
        note(); // b: 64
        // b overflows in a call with both: its scale falls, and neither makes a step.
        let both = loss_of(&a, false) + loss_of(&b, true);
        assert!(ddp.backward(&both, (&a, &b))?.is_none());
        assert!(ddp.backward(&loss_of(&a, false), &a)?.is_some());
        note(); // a: 8
        assert!(ddp.backward(&loss_of(&b, false), &b)?.is_some());
        note(); // b: 32
        let both = loss_of(&a, false) + loss_of(&b, false);
        assert!(ddp.backward(&both, (&a, &b))?.is_some());
        Ok(scales)
    })
    .unwrap();
    all_equal(&outcomes);
    assert_eq!(outcomes[0], [8.0, 64.0, 8.0, 32.0]);
}

/// Ranks may add up in other calls than their peers; the call that reduces decides for all.
#[test]
fn ranks_that_added_up_in_other_calls_decide_alike() {
    let outcomes = Ddp::spawn(2, |ddp| {
        let device = ddp.device()?.autodiff();
        let scaled = in_half(Precision::F16).with_loss_scaling(small_scale());
        let fill = |number| Mlp::new(&device).map(&mut Fill(number));
        let (a, b) = (ddp.wrap_with(fill(0.0), &scaled)?, ddp.wrap_with(fill(1.0), &in_half(Precision::Bf16))?);
        let of_a = || loss(&a, Precision::F16, 2 * ddp.rank(), 2, &device);
        let of_b = || loss(&b, Precision::Bf16, 2 * ddp.rank(), 2, &device);
        let mut steps = Vec::new();
        for _ in 0..2 {
            if ddp.is_main() {
                ddp.accumulate(&(of_a() + of_b() + poison(&b, Of::Weight)), (&a, &b))?;
            }
            steps.push(ddp.flush((&a, &b))?.is_some());
        }
        assert!(ddp.backward(&(of_a() + of_b()), (&a, &b))?.is_some());
        Ok((steps, ddp.backward(&of_a(), &a)?.is_some(), ddp.telemetry().loss_scale()))
    })
    .unwrap();
    all_equal(&outcomes);
    assert_eq!(outcomes[0], (vec![false, false], true, Some(4.0)));
}

/// Gradients of a model without a scale are unscaled, too, when its loss goes through one with a scale.
#[test]
fn a_model_without_a_scale_gets_unscaled_gradients_beside_one_that_has_one() {
    let gradients = Ddp::spawn(2, |ddp| {
        let device = ddp.device()?.autodiff();
        let linear = || LinearConfig::new(2, 1).with_bias(false).init(&device);
        let scaled = WrapConfig::new().with_loss_scaling(small_scale());
        let (a, b): (Linear, Linear) = (ddp.wrap_with(linear(), &scaled)?, ddp.wrap(linear())?);
        let x = Tensor::<2>::ones([1, 2], &device);
        let loss = (a.forward(x.clone()) + b.forward(x.clone())).sum();
        let (of_a, of_b) = ddp.backward(&loss, (&a, &b))?.expect("a step");
        let alone = ddp.backward(&b.forward(x).sum(), &b)?.expect("a step");
        let read =
            |grads: &GradientsParams, of: &Linear| grads.get::<2>(of.weight.id).unwrap().sum().into_scalar::<f32>();
        Ok([read(&of_a, &a), read(&of_b, &b), read(&alone, &b)])
    })
    .unwrap();
    assert_eq!(gradients, vec![[2.0; 3]; 2]);
}

#[test]
fn a_scope_scales_its_loss_by_hand() {
    let outcomes = Ddp::spawn(2, |ddp| {
        let device = ddp.device()?.autodiff();
        let config = in_half(Precision::F16).with_loss_scaling(small_scale());
        let model = ddp.wrap_with(Mlp::new(&device).map(&mut Fill(0.0)), &config)?;
        let loss = |poisons: bool| {
            let loss = loss(&model, Precision::F16, 2 * ddp.rank(), 2, &device);
            if poisons && ddp.rank() == 1 { loss + poison(&model, Of::Bias) } else { loss }
        };
        let by_door = ddp.backward(&loss(false), &model)?.expect("a step");
        let (_, by_scope) = ddp.scope(&model, || scale_loss(&loss(false)).backward())?;
        let by_scope = by_scope.expect("a step");
        let read = |grads: &GradientsParams| grads.get::<2>(model.a.weight.id).unwrap().into_data();
        assert_eq!(read(&by_door), read(&by_scope));
        assert!(ddp.scope(&model, || scale_loss(&loss(true)).backward())?.1.is_none());
        // Outside of a call it is the loss itself.
        assert_eq!(scale_loss(&loss(false)).into_data(), loss(false).into_data());
        Ok(ddp.scope(&model, || drop(loss(false).backward())).unwrap_err().to_string())
    })
    .unwrap();
    assert!(outcomes.iter().all(|error| error.contains("scale_loss(&loss)")), "{outcomes:?}");
}

/// State of a model that a run saves, or goes on with.
fn resumable(ddp: &Ddp, dir: &Path) -> burn_ddp::Result<(Mlp, DdpOptimizer)> {
    let device = ddp.device()?.autodiff();
    let scaling = LossScaling { initial_scale_power: 20, loss_scale_window: 5, ..LossScaling::default() };
    let config = in_half(Precision::F16).with_loss_scaling(scaling).with_accumulation(2);
    let model = ddp.wrap_with(Mlp::new(&device).map(&mut Fill(0.0)), &config)?;
    let optim = ddp.optimizer(AdamConfig::new().init(), &model)?;
    match ddp.checkpoints(dir)?.latest()? {
        Some(checkpoint) => {
            let model = checkpoint.model(model)?;
            let optim = checkpoint.optimizer(optim, &model)?;
            Ok((model, optim))
        }
        None => Ok((model, optim)),
    }
}

#[test]
fn a_resumed_run_has_the_bits_and_the_scale_of_an_uninterrupted_one() {
    // Saved between two steps, and between two micro-batches of a step.
    for pause in [14, 15] {
        let run = |ends: &[usize]| {
            let dir = tempfile::tempdir().unwrap();
            let mut last = None;
            let mut begin = 0;
            for end in ends {
                let outcomes = Ddp::spawn(2, |ddp| {
                    let device = ddp.device()?.autodiff();
                    let (mut model, mut optim) = resumable(&ddp, dir.path())?;
                    for nth in begin..*end {
                        let loss = loss(&model, Precision::F16, 4 * nth + 2 * ddp.rank(), 2, &device);
                        if let Some(grads) = ddp.backward(&loss, &model)? {
                            model = optim.step(1e-2, model, grads);
                        }
                    }
                    ddp.checkpoints(dir.path())?.save(*end as u64, |c| {
                        c.model(&model)?;
                        c.optimizer(&optim, &model)
                    })?;
                    Ok((param_hash(&model)?, ddp.telemetry().loss_scale()))
                })
                .unwrap();
                all_equal(&outcomes);
                last = Some(outcomes[0].clone());
                begin = *end;
            }
            last
        };
        let whole = run(&[40]);
        assert_eq!(run(&[pause, 40]), whole, "paused after {pause} micro-batches");
        assert!(whole.is_some_and(|(_, scale)| scale != Some(20f64.exp2())));
    }
}

/// A rank that has joined takes part in skips: its scale stays that of the others.
#[test]
fn ranks_that_have_joined_skip_with_the_others() {
    let outcomes = Ddp::spawn(2, |ddp| {
        let device = ddp.device()?.autodiff();
        let config = in_half(Precision::F16).with_loss_scaling(small_scale());
        let mut model = ddp.wrap_with(Mlp::new(&device).map(&mut Fill(0.0)), &config)?;
        let mut optim = ddp.optimizer(AdamConfig::new().init(), &model)?;
        for step in 0..if ddp.is_main() { 1 } else { 4 } {
            let loss = loss(&model, Precision::F16, 4 * step + 2 * ddp.rank(), 2, &device);
            let loss = if step == 2 { loss + poison(&model, Of::Weight) } else { loss };
            let grads = ddp.backward(&loss, &model)?;
            assert_eq!(grads.is_none(), step == 2);
            if let Some(grads) = grads {
                model = optim.step(1e-2, model, grads);
            }
        }
        let missed = ddp.join(&mut model, &mut optim)?;
        // A further step of both has one scale.
        let loss = loss(&model, Precision::F16, 2 * ddp.rank(), 2, &device);
        let grads = ddp.backward(&loss, &model)?.expect("a step");
        model = optim.step(1e-2, model, grads);
        Ok((missed, param_hash(&model)?, ddp.telemetry().loss_scale(), ddp.telemetry().stats().skipped))
    })
    .unwrap();
    // Of three further steps of rank 1 one was skipped.
    assert_eq!((outcomes[0].0, outcomes[1].0), (2, 0));
    let rest = |nth: usize| (outcomes[nth].1.clone(), outcomes[nth].2, outcomes[nth].3);
    assert_eq!(rest(0), rest(1));
    assert_eq!((rest(0).1, rest(0).2), (Some(8.0), 1));
}

/// What is held may have overflowed in an earlier call.
#[test]
fn a_flush_of_an_overflow_is_skipped() {
    let outcomes = Ddp::spawn(2, |ddp| {
        let device = ddp.device()?.autodiff();
        let config = in_half(Precision::F16).with_loss_scaling(small_scale());
        let model = ddp.wrap_with(Mlp::new(&device).map(&mut Fill(0.0)), &config)?;
        let loss = |poisons: bool| {
            let loss = loss(&model, Precision::F16, 2 * ddp.rank(), 2, &device);
            if poisons && ddp.rank() == 1 { loss + poison(&model, Of::Bias) } else { loss }
        };
        ddp.accumulate(&loss(true), &model)?;
        ddp.accumulate(&loss(false), &model)?;
        assert!(ddp.flush(&model)?.is_none());
        ddp.accumulate(&loss(false), &model)?;
        assert!(ddp.flush(&model)?.is_some());
        Ok(ddp.telemetry().loss_scale())
    })
    .unwrap();
    assert_eq!(outcomes, [Some(8.0); 2]);
}

/// Running statistics keep what a skipped step has changed, as in torch, alike on all ranks.
#[test]
fn running_statistics_of_a_skipped_step_stay_equal() {
    #[derive(Module, Debug)]
    struct Net {
        a: Linear,
        norm: burn::nn::BatchNorm,
    }
    let statistics = Ddp::spawn(2, |ddp| {
        let device = ddp.device()?.autodiff();
        let net = Net { a: LinearConfig::new(6, 4).init(&device), norm: BatchNormConfig::new(4).init(&device) };
        let config = in_half(Precision::F16).with_loss_scaling(small_scale()).with_full_precision(["norm"]);
        let model = ddp.wrap_with(net.map(&mut Fill(0.0)), &config)?;
        let mut means = Vec::new();
        for step in 0..3 {
            let x = burn_ddp_tests::rows(2 * ddp.rank(), 2, 6, 1, DType::F32, &device).cast(DType::F16);
            let mut loss = model.norm.forward(model.a.forward(x).cast(DType::F32)).powf_scalar(2.0).mean();
            if step == 1 && ddp.rank() == 0 {
                loss = loss + (model.a.weight.val().cast(DType::F32) * f32::MAX).sum() * f32::MAX;
            }
            assert_eq!(ddp.backward(&loss, &model)?.is_none(), step == 1);
            means.push(model.valid().norm.running_mean.value().into_data().try_to_vec::<f32>().unwrap());
        }
        Ok(means)
    })
    .unwrap();
    all_equal(&statistics);
    assert!(statistics[0][0] != statistics[0][1] && statistics[0][1] != statistics[0][2]);
}
