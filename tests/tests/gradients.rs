//! Averages of gradients after backward: numbers checked by hand, equality with one large batch, buckets, accumulation.

use burn::nn::LinearConfig;
use burn::optim::GradientsParams;
use burn::prelude::*;
use burn::tensor::DType;
use burn_ddp::prelude::*;
use burn_ddp_tests::*;

/// The gradient of w on each rank, for y = w·x with w = 1, the inputs `[2r, 2r + 1]` on rank r and the loss Σ y².
fn fixture(reduction: GradientReduction) -> Vec<f32> {
    Ddp::spawn(2, |ddp| {
        let device = ddp.device()?.autodiff();
        let mut model = LinearConfig::new(1, 1).with_bias(false).init(&device);
        model.weight = model.weight.map(|w| w.ones_like().detach().require_grad());
        let model = ddp.wrap_with(model, &WrapConfig::new().with_reduction(reduction))?;
        let r = ddp.rank() as f32;
        let x = Tensor::<2>::from_floats([[2.0 * r], [2.0 * r + 1.0]], &device);
        let mut grads = ddp.backward(&model.forward(x).powf_scalar(2.0).sum(), &model)?.expect("averages");
        Ok(grads.remove::<2>(model.weight.id).unwrap().into_scalar::<f32>())
    })
    .unwrap()
}

#[test]
fn fixture_f_mean_is_14_and_sum_is_28() {
    assert_eq!(fixture(GradientReduction::Mean), [14.0, 14.0]);
    assert_eq!(fixture(GradientReduction::Sum), [28.0, 28.0]);
}

/// Ranks with a part of the batch each follow one rank with the whole batch, and hold the same bits.
fn follows_one_rank(dtype: DType, optim: Optim, tolerance: f64) {
    const GLOBAL_BATCH: usize = 12;
    const STEPS: usize = 100;
    let plain = Mlp::new(&device().autodiff());
    let plain = if dtype == DType::F64 { to_f64(plain) } else { plain };
    let run = |world: usize, caps: usize| {
        let config = WrapConfig::new()
            .with_bucket_cap_bytes(caps)
            .with_first_bucket_cap_bytes(caps)
            .with_overlap(caps < 1 << 20);
        Ddp::spawn(world, |ddp| {
            let model = train(&ddp, plain.clone(), optim, STEPS, GLOBAL_BATCH, &config)?;
            Ok((values(&model), param_hash(&model)?))
        })
        .unwrap()
    };
    let (one, tolerance) = (run(1, 1 << 20), tolerance_of_device(tolerance));
    for world in 2..=4 {
        let many = run(world, 700);
        assert!(many.iter().all(|(_, hash)| *hash == many[0].1), "ranks differ at world {world}");
        let d = distance(&many[0].0, &one[0].0);
        assert!(d <= tolerance, "{optim:?} {dtype:?} world {world}: {d:e}");
        assert!(d > 0.0 || world == 1, "different sums of floats are never all equal: is anything compared?");
        let other_buckets = run(world, 1 << 20);
        assert!(
            other_buckets[0].1 == many[0].1 || reduces_by_nccl(),
            "bits depend on the bucket size, or on who reduces, at world {world}"
        );
    }
}

#[test]
fn f64_sgd_with_momentum_follows_one_rank() {
    follows_one_rank(DType::F64, Optim::Sgd, 1e-10);
}

#[test]
fn f64_adam_follows_one_rank() {
    follows_one_rank(DType::F64, Optim::Adam, 1e-10);
}

#[test]
fn f32_sgd_with_momentum_follows_one_rank() {
    follows_one_rank(DType::F32, Optim::Sgd, 1e-5);
}

#[test]
fn f32_adam_follows_the_loss_curve() {
    // Adam divides by the root of squares: rounding noise in near-zero gradients becomes visible steps in weights.
    follows_one_rank(DType::F32, Optim::Adam, 1e-3);
}

#[test]
fn one_collective_per_bucket_and_most_of_them_during_backward() {
    let stats = Ddp::spawn(2, |ddp| {
        let device = ddp.device()?.autodiff();
        let config = WrapConfig::new().with_bucket_cap_bytes(600).with_first_bucket_cap_bytes(200).with_overlap(true);
        let model = train(&ddp, Mlp::new(&device), Optim::Sgd, 5, 8, &config)?;
        drop(model);
        Ok(ddp.telemetry().stats())
    })
    .unwrap();
    for s in stats {
        // Gradients arrive as c.bias? c.weight b… : six parameters, 12 … 1024 bytes, in at least four buckets.
        assert_eq!(s.steps, 5);
        assert!(s.collectives >= 5 * 4 && s.collectives % 5 == 0, "{s:?}");
        assert!(s.overlapped * 2 > s.collectives, "buckets wait for the end of backward: {s:?}");
        assert!(s.bytes >= 5 * 4 * (6 * 16 + 16 + 16 * 16 + 16 + 16 * 3 + 3), "{s:?}");
    }
}

#[test]
fn accumulation_is_one_big_batch_with_one_reduction() {
    const K: usize = 3;
    let plain = to_f64(Mlp::new(&device().autodiff()));
    // Micro-batches of different sizes: the mean is per item.
    let sizes = [4, 1, 7];
    let gradients = |world: usize, accumulate: bool| {
        Ddp::spawn(world, |ddp| {
            let device = ddp.device()?.autodiff();
            let k = if accumulate { K } else { 1 };
            let model = ddp.wrap_with(plain.clone(), &WrapConfig::new().with_accumulation(k))?;
            let loss = |start: usize, n: usize| {
                model.loss(rows(start, n, 6, 1, DType::F64, &device), rows(start, n, 3, 2, DType::F64, &device))
            };
            let grads = if accumulate {
                let mut start = ddp.rank() * 12;
                let mut last = None;
                for (i, n) in sizes.into_iter().enumerate() {
                    let grads = ddp.weighted(n as f64).backward(&loss(start, n), &model)?;
                    assert_eq!(grads.as_ref().map(GradientsParams::len), (i + 1 == K).then_some(6));
                    start += n;
                    last = grads;
                }
                last
            } else {
                ddp.backward(&loss(0, 24), &model)?
            };
            let grads = grads.expect("averages");
            let g = grads.get::<2>(model.b.weight.id).unwrap().into_data().try_to_vec::<f64>().unwrap();
            Ok((g, ddp.telemetry().stats().steps))
        })
        .unwrap()
    };
    let one = gradients(1, false);
    let many = gradients(2, true);
    assert_eq!(many[0].0, many[1].0);
    assert_eq!(many[0].1, 1, "one reduction");
    let d = distance(&[many[0].0.clone()], &[one[0].0.clone()]);
    assert!(d < 1e-14, "{d:e}");
    // One rank that accumulates micro-batches computes the same.
    let plain = to_f64(Mlp::new(&device().autodiff()));
    let lone = Ddp::spawn(1, |ddp| {
        let device = ddp.device()?.autodiff();
        let model = ddp.wrap_with(plain.clone(), &WrapConfig::new().with_accumulation(2))?;
        let loss = |s| model.loss(rows(s, 4, 6, 1, DType::F64, &device), rows(s, 4, 3, 2, DType::F64, &device));
        assert!(ddp.backward(&loss(0), &model)?.is_none());
        let two = ddp.backward(&loss(4), &model)?.expect("averages");
        let whole = plain.loss(rows(0, 8, 6, 1, DType::F64, &device), rows(0, 8, 3, 2, DType::F64, &device)).backward();
        let a = two.get::<2>(model.c.weight.id).unwrap().into_data().try_to_vec::<f64>().unwrap();
        let b = plain.c.weight.grad(&whole).unwrap().into_data().try_to_vec::<f64>().unwrap();
        Ok(distance(&[a], &[b]))
    })
    .unwrap();
    assert!(lone[0] < 1e-14, "{lone:?}");
}

#[test]
fn accumulate_holds_a_micro_batch_for_one_step() {
    Ddp::spawn(2, |ddp| {
        let device = ddp.device()?.autodiff();
        let model = ddp.wrap(Mlp::new(&device))?;
        let loss =
            |start| model.loss(rows(start, 2, 6, 1, DType::F32, &device), rows(start, 2, 3, 2, DType::F32, &device));
        let step = || {
            let grads = ddp.backward(&loss(0), &model)?.expect("averages");
            anyhow::Ok(grads.get::<2>(model.a.weight.id).unwrap().into_data().try_to_vec::<f32>()?)
        };
        let clean = step()?;
        ddp.accumulate(&loss(50), &model)?;
        assert_ne!(step()?, clean, "held gradients count");
        assert_eq!(step()?, clean, "and count once");
        Ok(())
    })
    .unwrap();
}

#[test]
fn weights_of_ranks_are_weights_of_items() {
    // Rank 0 has one item, rank 1 three: the mean of all four.
    let grads = Ddp::spawn(2, |ddp| {
        let device = ddp.device()?.autodiff();
        let mut model = LinearConfig::new(1, 1).with_bias(false).init(&device);
        model.weight = model.weight.map(|w| w.ones_like().detach().require_grad());
        let model = ddp.wrap(model)?;
        let x: &[f32] = if ddp.rank() == 0 { &[1.0] } else { &[2.0, 3.0, 6.0] };
        let weighted = ddp.weighted(x.len() as f64);
        let x = Tensor::<1>::from_floats(x, &device).unsqueeze_dim::<2>(1);
        let grads = weighted.backward(&model.forward(x).mean(), &model)?.expect("averages");
        Ok(grads.get::<2>(model.weight.id).unwrap().into_scalar::<f32>())
    })
    .unwrap();
    let tolerance = if is_gpu() { tolerance_of_device(2e-6) as f32 } else { 0.0 };
    assert!(grads.iter().all(|grad| (grad - 3.0).abs() <= tolerance), "{grads:?}");
}
