//! Averages that are not finite, without a loss scale.

use burn::nn::{Linear, LinearConfig};
use burn::prelude::*;
use burn::tensor::DType;
use burn_ddp::Precision;
use burn_ddp::prelude::*;
use burn_ddp_tests::{Fill, Mlp, rows};

use super::all_equal;

/// The error of a step in which `rank` has an infinite input.
fn error(config: &WrapConfig, world: usize, rank: usize, step: usize, micro_batches: usize) -> String {
    let errors = Ddp::spawn(world, |ddp| {
        let device = ddp.device()?.autodiff();
        let config = config.clone().with_accumulation(micro_batches).with_finite_gradients(true);
        let model = ddp.wrap_with(Mlp::new(&device).map(&mut Fill(0.0)), &config)?;
        ddp.optimizer(burn::optim::SgdConfig::new().init(), &model)?;
        for nth in 0..=step * micro_batches + micro_batches {
            let bad = ddp.rank() == rank && nth / micro_batches == step && nth % micro_batches == micro_batches / 2;
            let x = rows(2 * ddp.rank(), 2, 6, 1, DType::F32, &device);
            let x = if bad { x * f32::INFINITY } else { x };
            if let Err(error) = ddp.backward(&model.forward(x).sum(), &model) {
                assert!(error.job_usable() && error.rank() == Some(rank), "{error:?}");
                // Nothing of the step remains, and all ranks can go on.
                let step = || ddp.backward(&model.forward(rows(0, 2, 6, 1, DType::F32, &device)).sum(), &model);
                for _ in 1..micro_batches {
                    assert!(step()?.is_none());
                }
                let grads = step()?.expect("a step");
                let finite =
                    grads.get::<2>(model.c.weight.id).expect("averaged").sum().into_scalar::<f32>().is_finite();
                assert!(finite);
                return Ok(error.to_string());
            }
        }
        panic!("no error")
    })
    .unwrap();
    all_equal(&errors);
    errors[0].clone()
}

#[test]
fn an_error_names_step_parameter_and_rank() {
    let small = || WrapConfig::new().with_bucket_cap_bytes(300).with_first_bucket_cap_bytes(100);
    let sharded = || WrapConfig::new().with_sharding(Sharding::Parameters).with_sharding_above(90);
    for config in [small(), small().with_overlap(true), sharded(), small().with_reduce_dtype(Precision::Bf16)] {
        for micro_batches in [1, 3] {
            let error = error(&config, 3, 2, 2, micro_batches);
            assert!(error.contains("in step 2 the gradient of a.weight is not finite on rank 2"), "{error}");
        }
    }
}

#[test]
fn an_error_names_the_logical_rank() {
    let errors = Ddp::spawn(2, |ddp| {
        ddp.set_logical_ranks(6)?;
        let device = ddp.device()?.autodiff();
        let config = WrapConfig::new().with_finite_gradients(true);
        let model = ddp.wrap_with(Mlp::new(&device).map(&mut Fill(0.0)), &config)?;
        for nth in 0..3 {
            ddp.next_leaf()?;
            let x = rows(0, 2, 6, 1, DType::F32, &device);
            let x = if nth == 1 && ddp.rank() == 1 { x * f32::NAN } else { x };
            if let Err(error) = ddp.backward(&model.forward(x).sum(), &model) {
                return Ok(error.to_string());
            }
        }
        panic!("no error")
    })
    .unwrap();
    for error in errors {
        assert!(error.contains("is not finite on rank 1, logical rank 4"), "{error}");
    }
}

/// A half in which averages travel may be too small for a sum: no rank has an infinite gradient then.
#[test]
fn an_average_may_be_infinite_though_no_gradient_is() {
    let errors = Ddp::spawn(2, |ddp| {
        let device = ddp.device()?.autodiff();
        let config = WrapConfig::new()
            .with_reduction(burn_ddp::GradientReduction::Sum)
            .with_reduce_dtype(Precision::F16)
            .with_finite_gradients(true);
        let linear = || LinearConfig::new(2, 1).with_bias(false).init(&device);
        let model = ddp.wrap_with(linear(), &config)?;
        let config = config.with_sharding(Sharding::Parameters).with_sharding_above(1);
        let sharded = ddp.wrap_with(linear(), &config)?;
        ddp.optimizer(burn::optim::SgdConfig::new().init(), &sharded)?;
        // Of the sharded one only rank 0's row is out of range.
        let x = Tensor::<2>::from_floats([[6e4, 1.0]], &device);
        let error = |model: &Linear| ddp.backward(&model.forward(x.clone()).sum(), model).unwrap_err().to_string();
        Ok([error(&model), error(&sharded)])
    })
    .unwrap();
    for [error, of_sharded] in errors {
        assert!(error.contains("the average gradient of weight is not finite"), "{error}");
        assert!(of_sharded.contains("the average gradient of some parameter is not finite"), "{of_sharded}");
    }
}
