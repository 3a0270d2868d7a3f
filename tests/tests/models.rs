//! Unusual models under data parallelism: unused and frozen parameters, loops, copies, panics, records.

use burn::nn::{Linear, LinearConfig};
use burn::optim::{AdamConfig, GradientsParams, SgdConfig};
use burn::prelude::*;
use burn::tensor::DType;
use burn_ddp::prelude::*;
use burn_ddp::{Error, WorldOptions};
use burn_ddp_tests::awkward::panicking_op;
use burn_ddp_tests::*;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::{Duration, Instant};

/// A deadline that is never reached by a test that succeeds, even on a slow and busy machine.
fn patient() -> WorldOptions {
    let timeout = Duration::from_secs(60);
    WorldOptions { timeout, join_timeout: timeout, ..WorldOptions::default() }
}

fn x(ddp: &Ddp, device: &Device) -> Tensor<2> {
    rows(ddp.rank() * 4, 4, 6, 1, DType::F32, device)
}

#[test]
fn wrap_gives_every_rank_rank_zeros_weights_and_keeps_ids() {
    let weights = Ddp::spawn(3, |ddp| {
        let device = ddp.device()?.autodiff();
        let mut model = LinearConfig::new(2, 2).init(&device);
        let value = ddp.rank() as f32;
        model.weight = model.weight.map(|w| w.full_like(value).detach().require_grad());
        let id = model.weight.id;
        let model = ddp.wrap(model)?;
        assert_eq!(model.weight.id, id, "optimizer groups are keyed by id");
        Ok(values(&model))
    })
    .unwrap();
    assert_eq!(weights[0][0], [0.0; 4]);
    assert!(weights.iter().all(|w| *w == weights[0]));
}

#[test]
fn models_that_differ_are_an_error_on_every_rank() {
    let wrap = |make: &(dyn Fn(usize, &Device) -> Vec<Linear> + Sync)| {
        Ddp::spawn(3, |ddp| {
            let device = ddp.device()?.autodiff();
            let error = ddp.wrap(make(ddp.rank(), &device)).unwrap_err();
            assert!(matches!(error, Error::ModelsDiffer { .. }), "{error}");
            ddp.barrier()?; // the group survives
            Ok(error.to_string())
        })
        .unwrap()
    };
    let linear = |i, o, d: &Device| LinearConfig::new(i, o).init(d);
    let shape = wrap(&|rank, d| vec![linear(2, 2, d), linear(2, if rank == 2 { 5 } else { 3 }, d)]);
    assert!(shape[0].ends_with("1.weight is [2, 3] f32 on rank 0, but [2, 5] f32 on rank 2"), "{}", shape[0]);
    let count = wrap(&|rank, d| (0..2 + rank.min(1)).map(|_| linear(2, 2, d)).collect());
    assert!(
        count[0]
            .contains("rank 0 has 4 parameters and buffers, rank 1 has 6: 2.weight [2, 2] f32 of rank 1 is missing"),
        "{}",
        count[0]
    );
    let path = wrap(&|rank, d| vec![LinearConfig::new(2, 2).with_bias(rank != 1).init(d), linear(2, 2, d)]);
    assert!(path[0].contains("where rank 0 has 0.bias"), "{}", path[0]);
    let dtype = wrap(&|rank, d| if rank == 1 { to_f64(vec![linear(2, 2, d)]) } else { vec![linear(2, 2, d)] });
    assert!(dtype[0].contains("0.weight is [2, 2] f32 on rank 0, but [2, 2] f64 on rank 1"), "{}", dtype[0]);
    for errors in [shape, count, path, dtype] {
        assert!(errors.iter().all(|e| *e == errors[0]));
    }
}

#[test]
fn what_one_rank_cannot_wrap_is_told_to_all() {
    let errors = Ddp::spawn(2, |ddp| {
        let device = ddp.device()?;
        let device = if ddp.rank() == 1 { device } else { device.autodiff() };
        Ok(ddp.wrap(Mlp::new(&device)).unwrap_err().to_string())
    })
    .unwrap();
    assert!(errors[1].contains("a.weight is on a device without autodiff"), "{errors:?}");
    assert!(errors[0].starts_with("rank 1 cannot wrap its model: a.weight"), "{errors:?}");
}

#[test]
fn wrapping_twice_is_an_error_and_unwrap_is_the_inverse() {
    Ddp::spawn(2, |ddp| {
        let device = ddp.device()?.autodiff();
        let model = ddp.wrap(Mlp::new(&device))?;
        let error = ddp.wrap(model.clone()).unwrap_err().to_string();
        assert!(error.contains("wrapped already"), "{error}");
        let before = (param_hash(&model)?, model.a.weight.id);
        let plain = ddp.unwrap(model)?;
        assert_eq!((param_hash(&plain)?, plain.a.weight.id), before);
        let steps = ddp.telemetry().stats().steps;
        let grads = GradientsParams::from_grads(plain.forward(x(&ddp, &device)).sum().backward(), &plain);
        assert_eq!((grads.len(), ddp.telemetry().stats().steps), (6, steps), "a plain backward again");
        let again = ddp.wrap(plain)?;
        ddp.backward(&again.forward(x(&ddp, &device)).sum(), &again)?;
        assert_eq!(ddp.telemetry().stats().steps, steps + 1);
        Ok(())
    })
    .unwrap();
}

#[test]
fn clones_of_one_model_on_threads_do_not_freeze_each_other() {
    let device = device().autodiff();
    let model = Mlp::new(&device);
    let _ = model.a.weight.val(); // initialised: the clones share leaves
    let start = Instant::now();
    Ddp::spawn_with(3, patient(), |ddp| {
        let mut model = ddp.wrap(model.clone())?;
        let mut optim = AdamConfig::new().init();
        for _ in 0..50 {
            let grads = ddp.backward(&model.forward(x(&ddp, &device)).sum(), &model)?.expect("averages");
            model = optim.step(1e-3, model, grads);
        }
        Ok(())
    })
    .unwrap();
    assert!(start.elapsed() < Duration::from_secs(60));
}

/// Two branches; which one a rank takes depends on the rank and the step.
#[derive(Module, Debug)]
struct Branches {
    shared: Linear,
    left: Linear,
    right: Linear,
}

impl Branches {
    fn new(device: &Device) -> Self {
        let init = || LinearConfig::new(6, 6).init(device);
        Branches { shared: init(), left: init(), right: init() }
    }
}

#[test]
fn a_parameter_that_nobody_uses_has_no_gradient_anywhere() {
    Ddp::spawn(2, |ddp| {
        let device = ddp.device()?.autodiff();
        let model = ddp.wrap(Branches::new(&device))?;
        let h = model.shared.forward(x(&ddp, &device));
        let grads = ddp.backward(&model.left.forward(h).sum(), &model)?.expect("averages");
        assert_eq!(grads.len(), 4);
        assert!(grads.get::<2>(model.right.weight.id).is_none());
        Ok(())
    })
    .unwrap();
}

#[test]
fn frozen_parameters_sleep_until_they_are_unfrozen() {
    Ddp::spawn(2, |ddp| {
        let device = ddp.device()?.autodiff();
        let mut model = Mlp::new(&device);
        model.a = model.a.freeze();
        let model = ddp.wrap(model)?;
        let grads = ddp.backward(&model.forward(x(&ddp, &device)).sum(), &model)?.expect("averages");
        assert_eq!(grads.len(), 4);
        let slept = ddp.telemetry().stats();
        let mut model = model;
        model.a = model.a.unfreeze();
        let grads = ddp.backward(&model.forward(x(&ddp, &device)).sum(), &model)?.expect("averages");
        assert_eq!(grads.len(), 6);
        assert_eq!(ddp.telemetry().stats().collectives, 2 * slept.collectives + 1, "one more bucket, for what woke up");
        let g = grads.get::<2>(model.a.weight.id).unwrap();
        let same = ddp.broadcast(g.clone(), 0)?;
        assert_eq!(same.into_data(), g.into_data(), "and it is averaged");
        Ok(())
    })
    .unwrap();
}

#[test]
fn forwards_without_backward_and_dropped_graphs_leave_nothing_behind() {
    Ddp::spawn(2, |ddp| {
        let device = ddp.device()?.autodiff();
        let model = ddp.wrap(Mlp::new(&device))?;
        let grad = || {
            let grads = ddp.backward(&model.forward(x(&ddp, &device)).sum(), &model).unwrap().expect("averages");
            grads.get::<2>(model.a.weight.id).unwrap().into_data().try_to_vec::<f32>().unwrap()
        };
        let clean = grad();
        for _ in 0..20 {
            let _ = model.forward(x(&ddp, &device));
        }
        let alive = model.forward(x(&ddp, &device) * 2.0).sum();
        assert_eq!(grad(), clean);
        ddp.backward(&alive, &model)?;
        assert_eq!(grad(), clean);
        Ok(())
    })
    .unwrap();
}

#[test]
fn a_copy_of_the_model_in_the_same_backward_is_an_error_that_says_what_to_do() {
    let error = Ddp::spawn_with(2, patient(), |ddp| {
        let device = ddp.device()?.autodiff();
        let model = ddp.wrap(Mlp::new(&device))?;
        let copy = model.clone().fork(&device);
        let loss = (model.forward(x(&ddp, &device)) - copy.forward(x(&ddp, &device))).sum();
        ddp.backward(&loss, &model)?;
        Ok(())
    })
    .unwrap_err()
    .to_string();
    assert!(error.contains("wrap the copy itself"), "{error}");
}

fn with_bomb(model: &Mlp, x: Tensor<2>) -> Tensor<1> {
    let h = panicking_op::trap(model.a.forward(x).tanh());
    model.c.forward(model.b.forward(h)).sum()
}

/// Rank 1 panics once in the middle of a backward and then goes on.
fn panic_in_the_middle(config: &WrapConfig) -> burn_ddp::Result<Vec<()>> {
    Ddp::spawn_with(2, patient(), |ddp| {
        let device = ddp.device()?.autodiff();
        let model = ddp.wrap_with(Mlp::new(&device), config)?;
        let grad = || -> anyhow::Result<Vec<f32>> {
            let loss = with_bomb(&model, x(&ddp, &device));
            let (_, grads) = ddp.scope(&model, || loss.backward())?;
            let gradient = grads.expect("averages").get::<2>(model.a.weight.id).unwrap();
            Ok(gradient.into_data().try_to_vec::<f32>()?)
        };
        let clean = grad()?;
        if ddp.rank() == 1 {
            assert!(panicking_op::armed(|| catch_unwind(AssertUnwindSafe(&grad))).is_err());
        }
        assert_eq!(grad()?, clean);
        assert_eq!(grad()?, clean);
        Ok(())
    })
}

#[test]
fn after_a_panic_with_buckets_under_way_every_rank_has_the_error() {
    let small = WrapConfig::new().with_bucket_cap_bytes(100).with_first_bucket_cap_bytes(100);
    // Reductions on a device begin during backward in any case.
    if !reduces_by_nccl() {
        panic_in_the_middle(&small.clone().with_overlap(false)).expect("nothing was under way");
    }
    let result = panic_in_the_middle(&small.with_overlap(true));
    if reads_at_the_end() {
        return drop(result.expect("nothing was under way"));
    }
    let error = result.unwrap_err().to_string();
    assert!(error.contains("an earlier backward ended half-way"), "{error}");
}

#[test]
fn backward_returns_what_went_wrong() {
    // The loss of one rank does not depend on the model: the other rank's error says so.
    let error = Ddp::spawn_with::<()>(2, patient(), |ddp| {
        let device = ddp.device()?.autodiff();
        let model = ddp.wrap(Mlp::new(&device))?;
        let own = Tensor::<1>::ones([1], &device).require_grad();
        let loss = if ddp.rank() == 1 { own * 2.0 } else { model.forward(x(&ddp, &device)).sum() };
        let error = ddp.backward(&loss, &model).err().map(|e| e.to_string()).unwrap_or_default();
        anyhow::bail!("{error}")
    })
    .unwrap_err()
    .to_string();
    assert!(error.contains("depends on no parameter of the wrapped model"), "{error}");

    Ddp::spawn(2, |ddp| {
        let device = ddp.device()?.autodiff();
        let model = Mlp::new(&device);
        let loss = model.forward(x(&ddp, &device)).sum();
        let error = ddp.backward(&loss, &model).err().unwrap().to_string();
        assert!(error.contains("not wrapped"), "{error}");
        Ok(())
    })
    .unwrap();
}

#[test]
fn a_rank_that_fails_ends_the_others_backward_with_its_reason() {
    let start = Instant::now();
    let seen = std::sync::Mutex::new(Vec::new());
    let error = Ddp::spawn_with::<()>(3, patient(), |ddp| {
        let device = ddp.device()?.autodiff();
        let model = ddp.wrap(Mlp::new(&device))?;
        anyhow::ensure!(ddp.rank() != 2, "the disk is full");
        let loss = model.forward(x(&ddp, &device)).sum();
        let error = ddp.backward(&loss, &model).err().unwrap();
        seen.lock().unwrap().push(error.to_string());
        Err(error.into())
    })
    .unwrap_err();
    assert_eq!(error.to_string(), "rank 2 failed: the disk is full");
    assert!(start.elapsed() < Duration::from_secs(30), "no need to wait for the deadline");
    let seen = seen.into_inner().unwrap();
    assert!(seen.len() == 2 && seen.iter().all(|e| e.contains("rank 2") && e.contains("the disk is full")), "{seen:?}");
}

#[test]
fn a_rank_that_leaves_ends_the_others_backward_with_its_name() {
    let error = Ddp::spawn_with(2, patient(), |ddp| {
        let device = ddp.device()?.autodiff();
        let model = ddp.wrap(Mlp::new(&device))?;
        if ddp.rank() == 1 {
            // Leaves without a goodbye while rank 0 is in its backward.
            return Ok(());
        }
        ddp.backward(&model.forward(x(&ddp, &device)).sum(), &model)?;
        Ok(())
    })
    .unwrap_err()
    .to_string();
    assert!(error.contains("rank 1") && error.contains("left"), "{error}");
}

#[test]
fn a_bare_backward_of_a_wrapped_model_is_a_panic_that_names_the_call() {
    for world in [1, 2] {
        Ddp::spawn_with(world, patient(), |ddp| {
            let device = ddp.device()?.autodiff();
            let model = ddp.wrap(Mlp::new(&device))?;
            let bare = || drop(model.forward(x(&ddp, &device)).sum().backward());
            let panic = catch_unwind(AssertUnwindSafe(bare)).unwrap_err();
            let text = match panic.downcast_ref::<&str>() {
                Some(text) => (*text).to_owned(),
                None => panic.downcast_ref::<String>().cloned().unwrap_or_default(),
            };
            assert!(
                text.contains("`loss.backward()` reached a wrapped model")
                    && text.contains("call `ddp.backward(&loss, &model)?`"),
                "{text}"
            );
            // A copy without gradients is no part of a backward.
            let factor = Tensor::<1>::ones([1], &device).require_grad();
            let frozen = model.clone().no_grad().forward(x(&ddp, &device)).sum();
            assert!(factor.grad(&(frozen * factor.clone()).backward()).is_some());
            // The model still trains.
            let grads = ddp.backward(&model.forward(x(&ddp, &device)).sum(), &model)?.expect("averages");
            assert_eq!(grads.len(), 6);
            Ok(())
        })
        .unwrap();
    }
}

#[test]
fn a_world_of_1_has_the_gradients_of_plain_burn() {
    Ddp::spawn(1, |ddp| {
        let device = ddp.device()?.autodiff();
        let plain = Mlp::new(&device);
        let grad = |model: &Mlp, wrapped: bool| {
            let grads = || {
                let loss = model.forward(x(&ddp, &device)).sum();
                match wrapped {
                    true => ddp.backward(&loss, model).unwrap().expect("averages"),
                    false => GradientsParams::from_grads(loss.backward(), model),
                }
            };
            assert_eq!(grads().len(), 6);
            grads().get::<2>(model.a.weight.id).unwrap().into_data()
        };
        let expected = grad(&plain, false);
        for reduces in [false, true] {
            let before = ddp.telemetry().stats();
            let config = WrapConfig::new().with_single_rank_reduction(reduces);
            assert_eq!(grad(&ddp.wrap_with(plain.clone(), &config)?, true), expected);
            assert_eq!((ddp.telemetry().stats() - before).steps, 2);
        }
        Ok(())
    })
    .unwrap();
}

#[test]
fn save_is_one_file_that_plain_burn_reads() {
    let dir = tempfile::tempdir().unwrap();
    let device = device().autodiff();
    let hashes = Ddp::spawn(2, |ddp| {
        let model = ddp.wrap(Mlp::new(&device))?;
        let path = ddp.save(&model, dir.path().join("model"))?;
        assert_eq!(path, dir.path().join("model.bpk"));
        let error = ddp.save(&model, dir.path().join("no/such/folder/model")).unwrap_err().to_string();
        assert!(error.starts_with("rank 0 could not write"), "{error}");
        Ok(param_hash(&model)?)
    })
    .unwrap();
    let plain = Mlp::new(&device).load_file(dir.path().join("model.bpk"));
    assert_eq!(param_hash(&plain).unwrap(), hashes[0]);
    let left: Vec<_> = std::fs::read_dir(dir.path()).unwrap().map(|e| e.unwrap().file_name()).collect();
    assert_eq!(left, ["model.bpk"], "no temporary file stays");
}

#[test]
fn collectives_on_tensors_of_every_kind() {
    Ddp::spawn(3, |ddp| {
        let device = ddp.device()?;
        let r = ddp.rank();
        let t = Tensor::<2>::full([2, 2], r as f32 + 1.0, &device);
        assert_eq!(ddp.all_reduce(t.clone(), ReduceOp::Mean)?.into_data().try_to_vec::<f32>()?, [2.0; 4]);
        assert_eq!(t.into_data().try_to_vec::<f32>()?, [r as f32 + 1.0; 4], "the input is not touched");
        let i = Tensor::<1, Int>::from_ints([r as i32, 7], &device);
        assert_eq!(ddp.all_reduce(i.clone(), ReduceOp::Max)?.into_data().convert::<i64>().try_to_vec::<i64>()?, [2, 7]);
        assert_eq!(ddp.broadcast(i.clone(), 1)?.into_data().convert::<i64>().try_to_vec::<i64>()?, [1, 7]);
        let all = ddp.all_gather(i)?;
        assert_eq!(all.dims(), [6]);
        assert_eq!(all.into_data().convert::<i64>().try_to_vec::<i64>()?, [0, 7, 1, 7, 2, 7]);
        let b = Tensor::<1, Bool>::from_bool([r == 1, false], &device);
        assert_eq!(ddp.all_reduce(b, ReduceOp::Max)?.into_data().try_into_vec_as::<bool>()?, [true, false]);
        let rows = Tensor::<2>::from_floats([[0.0, 1.0], [2.0, 3.0], [4.0, 5.0]], &device);
        let mine = ddp.reduce_scatter(rows.clone(), ReduceOp::Sum)?;
        assert_eq!(mine.into_data().try_to_vec::<f32>()?, [6.0 * r as f32, 3.0 * (2.0 * r as f32 + 1.0)]);
        let error = ddp.reduce_scatter(rows.narrow(0, 0, 2), ReduceOp::Sum).unwrap_err().to_string();
        assert!(error.contains("2 rows do not divide by 3 ranks"), "{error}");
        let empty = Tensor::<2>::zeros([0, 4], &device);
        assert_eq!(ddp.all_reduce(empty, ReduceOp::Sum)?.dims(), [0, 4]);
        Ok(())
    })
    .unwrap();
}

/// One step of `Branches` in which rank 0 takes the left and rank 1 the right branch, with `between` after the
/// backward; the parameters of the ranks must stay equal.
fn stays_equal(between: impl Fn(&Ddp, &Branches, &Device) + Sync) {
    let plain = Branches::new(&device().autodiff());
    let hashes = Ddp::spawn_with(2, patient(), |ddp| {
        let device = ddp.device()?.autodiff();
        let mut model = ddp.wrap(plain.clone())?;
        let mut optim = SgdConfig::new().init();
        for _ in 0..2 {
            let grads = ddp.backward(&branch(&model, &ddp, &device), &model)?.expect("averages");
            between(&ddp, &model, &device);
            assert_eq!(grads.len(), 6);
            model = optim.step(0.1, model, grads);
        }
        assert_eq!(ddp.unwrap(model.clone())?.num_params(), plain.num_params());
        Ok(param_hash(&model)?)
    })
    .unwrap();
    assert_eq!(hashes[0], hashes[1]);
}

fn branch(model: &Branches, ddp: &Ddp, device: &Device) -> Tensor<1> {
    let h = model.shared.forward(x(ddp, device));
    if ddp.rank() == 0 { model.left.forward(h).sum() } else { model.right.forward(h).sum() }
}

#[test]
fn averages_of_unused_parameters_survive_what_happens_before_the_optimizer_takes_them() {
    stays_equal(|_, _, _| {});
    stays_equal(|ddp, model, device| drop(branch(model, ddp, device)));
    stays_equal(|_, model, _| drop(param_hash(model).unwrap()));
    stays_equal(|_, model, _| drop(model.clone().no_grad()));
    stays_equal(|ddp, model, device| drop(ddp.backward(&branch(model, ddp, device), model).unwrap()));
}

#[test]
fn parts_of_a_model_may_have_optimizers_of_their_own() {
    let plain = Branches::new(&device().autodiff());
    let hashes = Ddp::spawn_with(2, patient(), |ddp| {
        let device = ddp.device()?.autodiff();
        let mut model = ddp.wrap(plain.clone())?;
        let (mut a, mut b, mut c) = (SgdConfig::new().init(), SgdConfig::new().init(), SgdConfig::new().init());
        for _ in 0..2 {
            let parts = (&model.shared, &model.left, &model.right);
            let (shared, left, right) = ddp.backward(&branch(&model, &ddp, &device), parts)?.expect("averages");
            model.shared = a.step(0.1, model.shared, shared);
            model.left = b.step(0.1, model.left, left);
            model.right = c.step(0.1, model.right, right);
        }
        Ok(param_hash(&model)?)
    })
    .unwrap();
    assert_eq!(hashes[0], hashes[1]);
}

#[test]
fn a_record_loaded_after_wrap_is_followed_by_ddp_backward() {
    let plain = Branches::new(&device().autodiff());
    let record = Branches::new(&device().autodiff()).into_record();
    let hashes = Ddp::spawn_with(2, patient(), |ddp| {
        let device = ddp.device()?.autodiff();
        let model = ddp.wrap(plain.clone())?.load_record(record.clone());
        let grads = ddp.backward(&branch(&model, &ddp, &device), &model)?.expect("averages");
        assert_eq!(grads.len(), 6);
        Ok(param_hash(&SgdConfig::new().init().step(0.1, model, grads))?)
    })
    .unwrap();
    assert_eq!(hashes[0], hashes[1]);
}

#[test]
fn lora_with_a_frozen_base_trains_and_with_a_trained_base_is_refused() {
    use burn::module::Lora;
    let plain = Mlp::new(&device().autodiff());
    let hashes = Ddp::spawn_with(2, patient(), |ddp| {
        let device = ddp.device()?.autodiff();
        let error = ddp.wrap(plain.clone().apply_lora(Lora::new(2, 4.0)).unfreeze()).unwrap_err().to_string();
        assert!(error.contains("a.weight is trained itself and carries the reparameterization"), "{error}");
        let mut model = ddp.wrap(plain.clone().apply_lora(Lora::new(2, 4.0)))?;
        let before = param_hash(&model)?;
        let mut optim = SgdConfig::new().init();
        for _ in 0..3 {
            let grads = ddp.backward(&model.forward(x(&ddp, &device)).sum(), &model)?.expect("averages");
            assert_eq!(grads.len(), 6, "two factors for each of three weights");
            model = optim.step(0.1, model, grads);
        }
        assert_ne!(param_hash(&model)?, before);
        Ok(param_hash(&model)?)
    })
    .unwrap();
    assert_eq!(hashes[0], hashes[1]);
}

#[test]
fn a_target_network_beside_its_original_keeps_its_own_state() {
    Ddp::spawn_with(2, patient(), |ddp| {
        let device = ddp.device()?.autodiff();
        let online: Linear = LinearConfig::new(6, 3).init(&device);
        // Initialised: in plain Burn, freezing a clone of a lazy parameter freezes the original.
        let _ = (online.weight.val(), online.bias.as_ref().unwrap().val());
        let target = online.clone().no_grad();
        for target_first in [false, true] {
            let (online, target) = if target_first {
                let both = ddp.wrap(vec![target.clone(), online.clone()])?;
                (both[1].clone(), both[0].clone())
            } else {
                let both = ddp.wrap(vec![online.clone(), target.clone()])?;
                (both[0].clone(), both[1].clone())
            };
            assert!(online.weight.is_require_grad() && !target.weight.is_require_grad());
            let loss = (online.forward(x(&ddp, &device)) - target.forward(x(&ddp, &device)) * 2.0).sum();
            assert_eq!(ddp.backward(&loss, &online)?.expect("averages").len(), 2);
        }
        let tied = ddp.wrap(vec![online.clone(), online.clone()])?;
        let loss = tied[1].forward(x(&ddp, &device)).sum() + tied[0].forward(x(&ddp, &device)).sum();
        let grads = ddp.backward(&loss, &tied)?.expect("averages");
        let one = online.forward(x(&ddp, &device)).sum().backward();
        let both = grads.get::<1>(tied[0].bias.as_ref().unwrap().id).unwrap().into_data();
        let single = online.bias.as_ref().unwrap().base().grad(&one).unwrap() * 2.0;
        assert_eq!(both, single.into_data(), "clones are one parameter");
        Ok(())
    })
    .unwrap();
}

#[test]
fn after_a_failed_backward_the_next_is_an_error_and_not_a_panic() {
    let config = WrapConfig::new().with_overlap(true).with_bucket_cap_bytes(100).with_first_bucket_cap_bytes(100);
    Ddp::spawn_with(1, patient(), |ddp| {
        let device = ddp.device()?.autodiff();
        let config = config.clone().with_accumulation(2).with_single_rank_reduction(true);
        let model = ddp.wrap_with(Mlp::new(&device), &config)?;
        let loss = || model.forward(x(&ddp, &device)).sum();
        ddp.backward(&loss(), &model)?;
        let copy = model.clone().fork(&device);
        let bad = loss() + copy.a.forward(x(&ddp, &device)).sum();
        assert!(ddp.backward(&bad, &model).is_err());
        let error = ddp.backward(&loss(), &model).err().map(|e| e.to_string());
        assert_eq!(error.is_none(), reads_at_the_end(), "with buckets under way the ranks are out of step");
        Ok(())
    })
    .unwrap();
}

#[test]
fn tensors_go_to_one_rank_from_one_rank_and_between_two() {
    Ddp::spawn(3, |ddp| {
        let device = ddp.device()?;
        let (r, n) = (ddp.rank(), ddp.world_size());
        let row = |v: usize| Tensor::<2>::from_floats([[v as f32, 0.5]], &device);
        let list = |t: Tensor<2>| t.into_data().try_to_vec::<f32>().unwrap();

        let reduced = ddp.reduce(row(r + 1), ReduceOp::Sum, 2)?;
        assert_eq!(list(reduced), if r == 2 { vec![6.0, 1.5] } else { list(row(r + 1)) });
        let gathered = ddp.gather(row(r), 1)?.map(list);
        assert_eq!(gathered, (r == 1).then(|| vec![0.0, 0.5, 1.0, 0.5, 2.0, 0.5]));
        let whole = (r == 0).then(|| Tensor::cat((0..n).map(|i| row(10 + i)).collect(), 0));
        assert_eq!(list(ddp.scatter(whole, row(0), 0)?), list(row(10 + r)));
        let turned = ddp.all_to_all(Tensor::cat((0..n).map(|i| row(10 * r + i)).collect(), 0))?;
        assert_eq!(list(turned), list(Tensor::cat((0..n).map(|i| row(10 * i + r)).collect(), 0)));
        match r {
            0 => ddp.send(row(7), 2)?,
            2 => assert_eq!(list(ddp.recv(row(0), 0)?), list(row(7))),
            _ => {}
        }
        let error = ddp.all_to_all(row(1)).unwrap_err().to_string();
        assert!(error.contains("1 rows do not divide by 3 ranks"), "{error}");
        ddp.barrier()?;
        Ok(())
    })
    .unwrap();
}
