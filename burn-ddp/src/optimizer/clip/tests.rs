use burn::grad_clipping::GradientClippingConfig;
use burn::module::{Module, Param};
use burn::nn::{Linear, LinearConfig};
use burn::optim::{GradientsParams, SgdConfig};
use burn::tensor::{DType, Device, Tensor, TensorData};

use super::{clip_grad_norm, clip_grad_value, grad_norm};
use crate::Ddp;

#[derive(Module, Debug)]
struct Model {
    a: Param<Tensor<2>>,
    b: Param<Tensor<1>>,
    unused: Param<Tensor<1>>,
}

const A: [f64; 6] = [0.5, -1.5, 2.0, 0.25, -0.75, 3.0];
const B: [f64; 3] = [-4.0, 0.125, 1.0];

/// Results of `clip_grad_norm_([a, b], 2.0)` of torch 2.9.0 for these gradients.
const TORCH_NORM: f64 = 5.756789469834727;
const TORCH_CLIPPED: [f64; 9] = [
    0.17370790290873817,
    -0.5211237087262145,
    0.6948316116349527,
    0.08685395145436908,
    -0.26056185436310725,
    1.042247417452429,
    -1.3896632232699053,
    0.04342697572718454,
    0.34741580581747633,
];

/// A model and gradients of these values.
fn gradients(a: &[f64], b: &[f64], dtype: DType) -> (Model, GradientsParams) {
    let device = Device::flex();
    let one = || Param::from_tensor(Tensor::<1>::zeros([1], &device));
    let model = Model { a: Param::from_tensor(Tensor::zeros([2, 3], &device)), b: one(), unused: one() };
    let data = |values: &[f64]| TensorData::new(values.to_vec(), [values.len()]).convert_dtype(dtype);
    let mut grads = GradientsParams::new();
    grads.register(model.a.id, Tensor::<1>::from_data(data(a), (&device, dtype)).reshape([2, 3]));
    grads.register(model.b.id, Tensor::<1>::from_data(data(b), (&device, dtype)));
    (model, grads)
}

fn values(model: &Model, grads: &GradientsParams) -> Vec<f64> {
    assert_eq!(grads.len(), 2);
    let a = grads.get::<2>(model.a.id).unwrap().into_data();
    let b = grads.get::<1>(model.b.id).unwrap().into_data();
    a.iter::<f64>().chain(b.iter::<f64>()).collect()
}

fn close(got: &[f64], expected: &[f64], tolerance: f64) {
    assert_eq!(got.len(), expected.len());
    for (got, expected) in got.iter().zip(expected) {
        assert!((got - expected).abs() <= tolerance * expected.abs(), "{got} instead of {expected}");
    }
}

#[test]
fn as_torch() {
    for (dtype, tolerance) in [(DType::F64, 1e-14), (DType::F32, 1e-6), (DType::F16, 2e-3)] {
        let (model, grads) = gradients(&A, &B, dtype);
        let (clipped, norm) = clip_grad_norm(grads, &model, 2.0).unwrap();
        close(&[norm], &[TORCH_NORM], tolerance);
        close(&values(&model, &clipped), &TORCH_CLIPPED, tolerance);

        let (model, grads) = gradients(&A, &B, dtype);
        let clipped = clip_grad_value(grads, &model, 0.7).unwrap();
        close(&values(&model, &clipped), &[0.5, -0.7, 0.7, 0.25, -0.7, 0.7, -0.7, 0.125, 0.7], tolerance);
    }
}

#[test]
fn what_is_within_the_limit_stays_as_it_is() {
    let (model, grads) = gradients(&A, &B, DType::F64);
    let (same, norm) = clip_grad_norm(grads, &model, 100.0).unwrap();
    assert_eq!(norm, grad_norm(&same, &model).unwrap());
    assert_eq!(values(&model, &same), [&A[..], &B].concat());
    let nothing = clip_grad_norm(GradientsParams::new(), &model, 1.0).unwrap();
    assert_eq!((nothing.0.len(), nothing.1), (0, 0.0));
}

#[test]
fn long_gradients_are_summed_whole() {
    let device = Device::flex();
    let model = LinearConfig::new(13, 7).with_bias(false).init(&device);
    let mut grads = GradientsParams::new();
    grads.register(model.weight.id, Tensor::<2>::ones([13, 7], &device) * 3.0);
    assert_eq!(grad_norm(&grads, &model).unwrap(), (9.0 * 91.0_f64).sqrt());
}

#[test]
fn what_is_not_finite_is_named() {
    for bad in [f64::NAN, f64::INFINITY, f64::NEG_INFINITY] {
        let (model, grads) = gradients(&A, &[1.0, bad, 2.0], DType::F32);
        assert!(!grad_norm(&grads, &model).unwrap().is_finite());
        let e = clip_grad_norm(grads, &model, 1.0).unwrap_err().to_string();
        assert!(e.contains("because of b:"), "{e}");
    }
    for bad in [f64::NAN, -1.0] {
        let (model, grads) = gradients(&A, &B, DType::F32);
        let e = clip_grad_norm(grads, &model, bad).unwrap_err().to_string();
        assert!(e.contains("max_norm"), "{e}");
        assert!(clip_grad_value(GradientsParams::new(), &model, bad).is_err());
    }
}

/// Rank 0 uses `a` alone, rank 1 `b` too; both clip what both have on average.
#[test]
fn averages_are_clipped_also_of_what_a_rank_did_not_use() {
    #[derive(Module, Debug)]
    struct Two {
        a: Linear,
        b: Linear,
    }
    let results = Ddp::spawn(2, |ddp| {
        let device = ddp.device()?.autodiff();
        let init = || LinearConfig::new(1, 1).with_bias(false).init(&device);
        let mut model = ddp.wrap(Two { a: init(), b: init() })?;
        let x = |value: f32| Tensor::<2>::from_floats([[value]], &device);
        let mut loss = model.a.forward(x(3.0));
        if ddp.rank() == 1 {
            loss = loss + model.b.forward(x(8.0));
        }
        let grads = ddp.backward(&loss.sum(), &model)?.expect("averages");
        let (grads, norm) = clip_grad_norm(grads, &model, 1.0)?;
        assert_eq!(norm, 5.0);
        let before = crate::param_hash(&model)?;
        model = SgdConfig::new().init().step(1.0, model, grads);
        let after = crate::param_hash(&model)?;
        assert_ne!(before, after);
        Ok(after)
    })
    .unwrap();
    assert_eq!(results[0], results[1]);
}

/// Burn clips inside the optimizer, so it sees averages: 2 and −1, of which no rank had either.
#[test]
fn burns_clipping_by_value_sees_averages() {
    let weights = Ddp::spawn(2, |ddp| {
        let device = ddp.device()?.autodiff();
        let model = ddp.wrap(LinearConfig::new(2, 1).with_bias(false).init(&device))?;
        let started = model.weight.val().inner();
        let x = if ddp.rank() == 0 { [5.0, -3.0] } else { [-1.0, 1.0] };
        let loss = model.forward(Tensor::<2>::from_floats([x], &device)).sum();
        let grads = ddp.backward(&loss, &model)?.expect("averages");
        let clip = GradientClippingConfig::Value(1.5);
        let model = SgdConfig::new().with_gradient_clipping(Some(clip)).init().step(1.0, model, grads);
        Ok((started - model.weight.val().inner()).into_data().try_to_vec::<f32>()?)
    })
    .unwrap();
    for moved in weights {
        close(&moved.iter().map(|&x| f64::from(x)).collect::<Vec<_>>(), &[1.5, -1.0], 1e-6);
    }
}
