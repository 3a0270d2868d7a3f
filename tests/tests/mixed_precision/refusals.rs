//! What mixed precision refuses, and how.

use burn::module::{Module, ModuleMapper, Param};
use burn::nn::{Linear, LinearConfig};
use burn::prelude::*;
use burn::tensor::DType;
use burn_ddp::prelude::*;
use burn_ddp::{LossScaling, Precision, master};
use burn_ddp_tests::awkward::panicking_op::{trap, widening};
use burn_ddp_tests::{Mlp, to_f64};

use super::in_half;

fn refused(world: usize, f: impl Fn(&Ddp, &Device) -> burn_ddp::Error + Sync) -> String {
    let errors = Ddp::spawn(world, |ddp| {
        let device = ddp.device()?.autodiff();
        Ok(f(&ddp, &device).to_string())
    })
    .unwrap();
    super::all_equal(&errors);
    errors[0].clone()
}

fn wrap_error(world: usize, config: &WrapConfig, model: impl Fn(&Device) -> Mlp + Sync) -> String {
    refused(world, |ddp, device| ddp.wrap_with(model(device), config).unwrap_err())
}

#[test]
fn parameters_of_another_type_are_named() {
    for world in [1, 2] {
        let error = wrap_error(world, &in_half(Precision::Bf16), |device| to_f64(Mlp::new(device)));
        assert!(error.contains("a.weight is F64") && error.contains("with_full_precision"), "{error}");
    }
    // What is left in full precision may be of any type.
    Ddp::spawn(1, |ddp| {
        let model = to_f64(Mlp::new(&ddp.device()?.autodiff()));
        ddp.wrap_with(model, &in_half(Precision::Bf16).with_full_precision(["*"]))?;
        Ok(())
    })
    .unwrap();
}

#[test]
fn names_and_settings_are_checked() {
    let error = wrap_error(1, &in_half(Precision::F16).with_full_precision(["d.weight"]), Mlp::new);
    assert!(error.contains("the name in `with_full_precision` \"d.weight\" names no parameter"), "{error}");
    assert!(error.contains("closest are "), "{error}");
    let error = wrap_error(2, &in_half(Precision::F16).with_local_parameters(["c"]), Mlp::new);
    assert!(error.contains("the local parameter c.weight is read as it is, in F32"), "{error}");
    let local = in_half(Precision::F16).with_local_parameters(["c"]).with_full_precision(["c"]);
    let error = wrap_error(2, &local, Mlp::new);
    assert!(error.contains("a loss scale with a local parameter that is trained (c.weight)"), "{error}");
    let error = wrap_error(2, &in_half(Precision::F16).with_reduce_dtype(Precision::F16), Mlp::new);
    assert!(error.contains("gradients that travel in f16 lose what the loss scale keeps"), "{error}");
    let halves = |device: &Device| Mlp::new(device).map(&mut ToF16);
    let error = wrap_error(1, &WrapConfig::new().with_loss_scaling(LossScaling::default()), halves);
    assert!(error.contains("a.weight is f16 itself"), "{error}");
    let high = LossScaling { initial_scale_power: 3, min_loss_scale: 9, ..LossScaling::default() };
    let error = wrap_error(1, &in_half(Precision::F16).with_loss_scaling(high), Mlp::new);
    assert!(error.contains("at most the first scale, 8"), "{error}");
    let error = refused(1, |ddp, device| {
        let layer: Linear = LinearConfig::new(4, 4).init(device);
        let tied = vec![layer.clone(), layer];
        ddp.wrap_with(tied, &in_half(Precision::Bf16).with_full_precision(["1"])).unwrap_err()
    });
    assert!(error.contains("0.weight and 1.weight are the same parameter"), "{error}");
    let never = LossScaling { loss_scale_window: 0, ..LossScaling::default() };
    let error = wrap_error(1, &in_half(Precision::F16).with_loss_scaling(never), Mlp::new);
    assert!(error.contains("loss_scale_window counts steps"), "{error}");
    let error = refused(2, |ddp, device| {
        let precision = if ddp.is_main() { Precision::Bf16 } else { Precision::F16 };
        ddp.wrap_with(Mlp::new(device), &in_half(precision)).unwrap_err()
    });
    assert!(error.contains("compute_dtype is \"bf16\" on rank 0 and \"f16\" on rank 1"), "{error}");
    let error = refused(2, |ddp, device| {
        ddp.set_logical_ranks(4).unwrap();
        ddp.wrap_with(Mlp::new(device), &WrapConfig::new().with_reduce_dtype(Precision::Bf16)).unwrap_err()
    });
    assert!(error.contains("a reduce dtype of bf16 rounds the sums of logical ranks"), "{error}");
    assert!("f64".parse::<Precision>().unwrap_err().to_string().contains("none of f32, bf16, f16"));
}

struct ToF16;

impl ModuleMapper for ToF16 {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        param.map(|old| Tensor::from_inner(old.inner().cast(DType::F16)).require_grad())
    }
}

/// A read returns the type in which the model computes; the parameter that the optimizer steps, its whole and files
/// are f32.
#[test]
fn reads_are_halves_and_masters_are_not() {
    for sharding in [Sharding::Off, Sharding::Parameters] {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("model.bpk");
        Ddp::spawn(2, |ddp| {
            let device = ddp.device()?.autodiff();
            let init: Linear = LinearConfig::new(4, 4).init(&device);
            let config =
                in_half(Precision::Bf16).with_full_precision(["bias"]).with_sharding(sharding).with_sharding_above(1);
            let model: Linear = ddp.wrap_with(init, &config)?;
            let bias = |model: &Linear| model.bias.as_ref().unwrap().val().dtype();
            assert_eq!((model.weight.val().dtype(), bias(&model)), (DType::BF16, DType::F32));
            let valid = model.valid();
            assert_eq!((valid.weight.val().dtype(), bias(&valid)), (DType::BF16, DType::F32));
            let frozen = model.clone().no_grad();
            assert_eq!((frozen.weight.val().dtype(), bias(&frozen)), (DType::BF16, DType::F32));
            let whole = master(&model.weight);
            assert_eq!((whole.dtype(), whole.dims()), (DType::F32, [4, 4]));
            assert_eq!(master(&valid.weight).into_data(), whole.clone().into_data());
            ddp.save(&model, &file)?;
            let unwrapped = ddp.unwrap(model)?;
            assert_eq!(unwrapped.weight.val().dtype(), DType::F32);
            assert_eq!(unwrapped.weight.val().into_data(), whole.into_data());
            let plain: Linear = LinearConfig::new(4, 4).init(&device);
            let plain = plain.load_file(&file);
            assert_eq!(plain.weight.val().into_data(), unwrapped.weight.val().into_data());
            Ok(())
        })
        .unwrap();
    }
}

/// On a device that does not check types only the hook sees this.
#[test]
fn a_gradient_of_another_type_than_the_read_is_an_error_of_the_hook() {
    let errors = Ddp::spawn(2, |ddp| {
        let device = ddp.device()?.autodiff();
        let model = ddp.wrap_with(Mlp::new(&device), &in_half(Precision::Bf16))?;
        let step = || {
            let loss = trap(model.a.weight.val()).cast(DType::F32).sum();
            ddp.backward(&loss, &model)
        };
        assert!(step()?.is_some());
        Ok(widening(step).unwrap_err().to_string())
    })
    .unwrap();
    for error in errors {
        assert!(error.contains("the gradient of a.weight is F32, and the forward read it as BF16"), "{error}");
    }
}
