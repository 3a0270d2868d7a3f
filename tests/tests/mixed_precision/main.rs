//! Mixed precision: forward and backward in a half, parameters, averages and optimizers in f32, and the loss scale that
//! all ranks obey.

mod crossings;
mod curves;
mod layers;
mod not_finite;
mod overflow;
mod refusals;

use burn::optim::{AdamConfig, SgdConfig};
use burn::prelude::*;
use burn::tensor::DType;
use burn_ddp::prelude::*;
use burn_ddp::{LossScaling, Precision, param_hash};
use burn_ddp_tests::{Fill, Mlp, rows};

const HALVES: [Precision; 2] = [Precision::Bf16, Precision::F16];

fn in_half(precision: Precision) -> WrapConfig {
    WrapConfig::new().with_compute_dtype(precision).with_bucket_cap_bytes(300).with_first_bucket_cap_bytes(100)
}

/// Settings of a scale that begins small enough for these models to overflow only where a test plants it.
fn small_scale() -> LossScaling {
    LossScaling { initial_scale_power: 4, ..LossScaling::default() }
}

/// Mean squared error of a model that computes in `precision`, on rows from `start` on.
fn loss(model: &Mlp, precision: Precision, start: usize, count: usize, device: &Device) -> Tensor<1> {
    let x = rows(start, count, 6, 1, DType::F32, device).cast(precision.dtype());
    let y = rows(start, count, 3, 2, DType::F32, device);
    (model.forward(x).cast(DType::F32) - y).powf_scalar(2.0).mean()
}

/// The hash after `steps` of Adam, each on 12 rows over all ranks.
fn trained(ddp: &Ddp, config: &WrapConfig, precision: Precision, steps: usize) -> burn_ddp::Result<String> {
    let device = ddp.device()?.autodiff();
    let mut model = ddp.wrap_with(Mlp::new(&device).map(&mut Fill(0.0)), config)?;
    let mut optim = ddp.optimizer(AdamConfig::new().init(), &model)?;
    let own = 12 / ddp.world_size();
    for step in 0..steps {
        let start = 12 * step + own * ddp.rank();
        let grads = ddp.backward(&loss(&model, precision, start, own, &device), &model)?.expect("a step");
        model = optim.step(1e-2, model, grads);
    }
    param_hash(&model)
}

fn all_equal<T: PartialEq + std::fmt::Debug>(values: &[T]) {
    assert!(values.iter().all(|value| *value == values[0]), "{values:?}");
}

#[test]
fn masters_keep_updates_that_a_half_would_lose() {
    let weights = Ddp::spawn(2, |ddp| {
        let device = ddp.device()?.autodiff();
        let linear = || burn::nn::LinearConfig::new(1, 1).with_bias(false).init(&device).map(&mut Ones);
        let mut ends = Vec::new();
        for config in [in_half(Precision::Bf16), WrapConfig::new()] {
            // Without masters: a model whose parameters are bf16 themselves.
            let plain = config == WrapConfig::new();
            let model = if plain { linear().map(&mut ToBf16) } else { linear() };
            let mut model = ddp.wrap_with(model, &config)?;
            let mut optim = ddp.optimizer(SgdConfig::new().init(), &model)?;
            for _ in 0..100 {
                let x = Tensor::<2>::ones([1, 1], &device).cast(DType::BF16);
                let grads = ddp.backward(&model.forward(x).cast(DType::F32).sum(), &model)?.expect("a step");
                model = optim.step(1e-3, model, grads);
            }
            ends.push(ddp.unwrap(model)?.weight.val().cast(DType::F32).into_scalar::<f32>());
        }
        Ok(ends)
    })
    .unwrap();
    for ends in weights {
        assert!((ends[0] - 0.9).abs() < 1e-5, "{ends:?}");
        assert_eq!(ends[1], 1.0);
    }
}

struct Ones;

impl burn::module::ModuleMapper for Ones {
    fn map_float<const D: usize>(&mut self, param: burn::module::Param<Tensor<D>>) -> burn::module::Param<Tensor<D>> {
        param.map(|old| Tensor::ones(old.dims(), &old.device()).require_grad())
    }
}

struct ToBf16;

impl burn::module::ModuleMapper for ToBf16 {
    fn map_float<const D: usize>(&mut self, param: burn::module::Param<Tensor<D>>) -> burn::module::Param<Tensor<D>> {
        param.map(|old| Tensor::from_inner(old.inner().cast(DType::BF16)).require_grad())
    }
}

/// With logical ranks the numbers of processes do not matter, and the hashes are not those of f32.
#[test]
fn one_two_three_and_four_ranks_train_the_same_bits() {
    let mut hashes = Vec::new();
    for precision in [Precision::F32, Precision::Bf16, Precision::F16] {
        let of_worlds = [1, 2, 3, 4].map(|world| {
            let hashes = Ddp::spawn(world, |ddp| {
                ddp.set_logical_ranks(12)?;
                let device = ddp.device()?.autodiff();
                let config = in_half(precision).with_loss_scaling(small_scale());
                let mut model = ddp.wrap_with(Mlp::new(&device).map(&mut Fill(ddp.rank() as f32)), &config)?;
                let mut optim = ddp.optimizer(AdamConfig::new().init(), &model)?;
                for step in 0..5 {
                    for leaf in 0..12 / ddp.world_size() {
                        ddp.next_leaf()?;
                        let at = 24 * step + 2 * (leaf + 12 / ddp.world_size() * ddp.rank());
                        let loss = loss(&model, precision, at, 2, &device);
                        if let Some(grads) = ddp.backward(&loss, &model)? {
                            model = optim.step(1e-2, model, grads);
                        }
                    }
                }
                assert_eq!(ddp.telemetry().stats().skipped, 0);
                Ok(param_hash(&model)?)
            })
            .unwrap();
            all_equal(&hashes);
            hashes[0].clone()
        });
        all_equal(&of_worlds);
        hashes.push(of_worlds[0].clone());
    }
    assert!(hashes[0] != hashes[1] && hashes[1] != hashes[2], "{hashes:?}");
}

#[test]
fn sharded_models_have_the_bits_of_whole_ones() {
    for precision in HALVES {
        let of = |sharding| {
            let config = in_half(precision).with_loss_scaling(small_scale());
            let config = config.with_sharding(sharding).with_sharding_above(1);
            let hashes = Ddp::spawn(3, |ddp| Ok(trained(&ddp, &config, precision, 6)?)).unwrap();
            all_equal(&hashes);
            hashes[0].clone()
        };
        assert_eq!(of(Sharding::Off), of(Sharding::Parameters), "{precision}");
    }
}

#[test]
fn a_power_of_two_as_scale_changes_no_bit_of_f32() {
    for world in [1, 2, 3] {
        for sharding in [Sharding::Off, Sharding::Parameters] {
            let of = |config: WrapConfig| {
                let config = config.with_sharding(sharding).with_sharding_above(1);
                Ddp::spawn(world, |ddp| Ok(trained(&ddp, &config, Precision::F32, 4)?)).unwrap()[0].clone()
            };
            let scaling = LossScaling { initial_scale_power: 10, ..LossScaling::default() };
            assert_eq!(of(WrapConfig::new()), of(WrapConfig::new().with_loss_scaling(scaling)), "{world} {sharding:?}");
        }
    }
}

/// Bytes of reductions and gathers of two steps, without flags and first steps.
#[test]
fn halves_move_half_the_bytes() {
    #[derive(Module, Debug)]
    struct Wide {
        a: burn::nn::Linear,
        b: burn::nn::Linear,
    }
    let moved = |config: WrapConfig, precision: Precision| {
        let moved = Ddp::spawn(2, |ddp| {
            let device = ddp.device()?.autodiff();
            let linear = || burn::nn::LinearConfig::new(64, 64).init(&device);
            let model = ddp.wrap_with(Wide { a: linear(), b: linear() }, &config)?;
            ddp.optimizer(SgdConfig::new().init(), &model)?;
            let step = || {
                let x = rows(0, 4, 64, 1, DType::F32, &device).cast(precision.dtype());
                let y = model.b.forward(model.a.forward(x)).cast(DType::F32).mean();
                ddp.backward(&y, &model).map(drop)
            };
            step()?;
            let before = ddp.telemetry().stats();
            step()?;
            let moved = ddp.telemetry().stats() - before;
            Ok([moved.bytes, moved.gathered])
        })
        .unwrap();
        all_equal(&moved);
        moved[0]
    };
    let close = |half: u64, whole: u64| assert!((2 * half).abs_diff(whole) <= whole / 100, "{half} {whole}");
    let whole = moved(WrapConfig::new(), Precision::F32);
    let half = moved(WrapConfig::new().with_reduce_dtype(Precision::Bf16), Precision::F32);
    close(half[0], whole[0]);
    let sharded = || WrapConfig::new().with_sharding(Sharding::Parameters).with_sharding_above(1);
    let whole = moved(sharded(), Precision::F32);
    let gathers = moved(sharded().with_compute_dtype(Precision::Bf16), Precision::Bf16);
    assert_eq!((gathers[0], 2 * gathers[1]), (whole[0], whole[1]));
    let both = sharded().with_compute_dtype(Precision::Bf16).with_reduce_dtype(Precision::F16);
    let both = moved(both, Precision::Bf16);
    close(both[0], whole[0]);
    assert_eq!(2 * both[1], whole[1]);
}

/// Gradients of any type travel in a half.
#[test]
fn f64_travels_in_a_half_and_comes_back() {
    for sharding in [Sharding::Off, Sharding::Parameters] {
        for micro_batches in [1, 2] {
            let averages = Ddp::spawn(2, |ddp| {
                let device = ddp.device()?.autodiff();
                let config = WrapConfig::new()
                    .with_reduce_dtype(Precision::F16)
                    .with_accumulation(micro_batches)
                    .with_sharding(sharding)
                    .with_sharding_above(1);
                let model: burn::nn::Linear = burn::nn::LinearConfig::new(2, 3).with_bias(false).init(&device);
                let model = ddp.wrap_with(burn_ddp_tests::to_f64(model), &config)?;
                ddp.optimizer(SgdConfig::new().init(), &model)?;
                let mut grads = None;
                for _ in 0..micro_batches {
                    let x =
                        Tensor::<2>::from_data([[1.0, 1.0 / 3.0]], (&device, DType::F64)) * (1 + 2 * ddp.rank()) as f64;
                    grads = ddp.backward(&model.forward(x).sum(), &model)?;
                }
                let average = grads.expect("a step").get::<2>(model.weight.id).expect("averaged");
                assert_eq!(average.dtype(), DType::F64);
                Ok(average.into_data().try_to_vec::<f64>().unwrap())
            })
            .unwrap();
            let all: Vec<f64> = match sharding {
                Sharding::Off => averages[0].clone(),
                Sharding::Parameters => averages.concat(),
            };
            assert_eq!(&all[..3], [2.0; 3], "{sharding:?} {micro_batches}");
            assert!(all[3..].iter().all(|x| (x - 2.0 / 3.0).abs() < 1e-3), "{all:?}");
        }
    }
}

/// Averages in a half: rounded once, from sums in f32.
#[test]
fn sums_of_halves_are_added_in_f32() {
    for (sharding, engine_rows) in [(Sharding::Off, 1), (Sharding::Parameters, 4)] {
        let averages = Ddp::spawn(4, |ddp| {
            let device = ddp.device()?.autodiff();
            let config = WrapConfig::new()
                .with_reduction(burn_ddp::GradientReduction::Sum)
                .with_reduce_dtype(Precision::Bf16)
                .with_sharding(sharding)
                .with_sharding_above(1);
            let model: burn::nn::Linear =
                ddp.wrap_with(burn::nn::LinearConfig::new(4, 1).with_bias(false).init(&device), &config)?;
            ddp.optimizer(SgdConfig::new().init(), &model)?;
            // 1 + 3 · 2⁻⁸: in bf16 each addition would be lost.
            let x = if ddp.rank() == 0 { 1.0 } else { 1.0 / 256.0 };
            let loss = model.forward(Tensor::<2>::full([1, 4], x, &device)).sum();
            let grads = ddp.backward(&loss, &model)?.expect("a step");
            let average = grads.get::<2>(model.weight.id).expect("averaged");
            assert_eq!(average.dtype(), DType::F32);
            Ok(average.into_data().try_to_vec::<f32>().unwrap())
        })
        .unwrap();
        for average in averages {
            assert_eq!(average, vec![1.015_625; 4 / engine_rows], "{sharding:?}");
        }
    }
}
