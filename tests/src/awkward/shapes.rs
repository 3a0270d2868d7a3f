//! Parameters of unusual size, shape and dtype.

use anyhow::Result;
use burn::module::{Module, Param};
use burn::nn::conv::{Conv2d, Conv2dConfig};
use burn::nn::{EmbeddingConfig, Linear, LinearConfig};
use burn::prelude::*;
use burn::tensor::DType;

use super::{Outcome, Run, adam, sgd};

fn param<const D: usize>(shape: [usize; D], device: &Device) -> Param<Tensor<D>> {
    Param::from_tensor(Tensor::zeros(shape, device))
}

#[derive(Module, Debug)]
struct Scaled {
    scale: Param<Tensor<1>>,
    layer: Linear,
    shift: Param<Tensor<1>>,
}

pub(super) fn scalars(run: &Run) -> Result<Outcome> {
    let model = Scaled {
        scale: param([1], &run.device),
        layer: LinearConfig::new(6, 6).init(&run.device),
        shift: param([1], &run.device),
    };
    let mut model = run.wrap(run.fill(model))?;
    let mut optim = sgd();
    for step in 0..5 {
        let h = model.layer.forward(run.batch(step)).tanh();
        let y = h * model.scale.val().unsqueeze_dim::<2>(0) + model.shift.val().unsqueeze_dim::<2>(0);
        let loss = run.scale((y - 0.25).powf_scalar(2.0).sum());
        model = run.step(&mut optim, model, loss)?;
    }
    run.outcome(&model)
}

#[derive(Module, Debug)]
struct Hollow {
    before: Param<Tensor<2>>,
    nothing: Param<Tensor<2>>,
    none_at_all: Param<Tensor<1>>,
    after: Param<Tensor<2>>,
}

/// Two parameters without elements: one is read, the other is not.
pub(super) fn empty_tensors(run: &Run) -> Result<Outcome> {
    let model = Hollow {
        before: param([6, 6], &run.device),
        nothing: param([0, 6], &run.device),
        none_at_all: param([0], &run.device),
        after: param([6, 2], &run.device),
    };
    let mut model = run.wrap(run.fill(model))?;
    let mut optim = sgd();
    for step in 0..5 {
        let h = run.batch(step).matmul(model.before.val()).tanh();
        let h = Tensor::cat(vec![h, model.nothing.val()], 0);
        let loss = run.scale(h.matmul(model.after.val()).powf_scalar(2.0).sum());
        model = run.step(&mut optim, model, loss)?;
    }
    run.outcome(&model)
}

pub(super) fn ten_thousand_tiny(run: &Run) -> Result<Outcome> {
    let model: Vec<Param<Tensor<1>>> = (0..10_000).map(|_| param([2], &run.device)).collect();
    // Buckets of the default size: this case is about the number of parameters.
    let mut model = run.ddp.wrap(run.fill(model))?;
    let mut optim = sgd();
    for step in 0..2 {
        let loss = run.over_parts(|part| {
            let of_part = model.iter().enumerate().filter(|(i, _)| (i + step) % 7 != part).map(|(_, p)| p.val());
            Tensor::cat(of_part.collect(), 0).powf_scalar(2.0).sum()
        });
        // The oracle is wrapped, too.
        let grads = run.ddp.backward(&loss, &model)?.expect("averages");
        model = optim.step(0.1, model, grads);
    }
    let values = crate::values(&model);
    Ok(Outcome { hash: burn_ddp::param_hash(&model)?, values, tolerance: 1e-10 })
}

pub(super) fn larger_than_any_bucket(run: &Run) -> Result<Outcome> {
    let init = |i, o| LinearConfig::new(i, o).init(&run.device);
    let mut model: Vec<Linear> = run.wrap(run.fill(vec![init(6, 2), init(2, 900), init(900, 2)]))?;
    let mut optim = sgd();
    for step in 0..4 {
        let y = model.iter().fold(run.batch(step), |h, layer| layer.forward(h).tanh());
        let loss = run.scale(y.powf_scalar(2.0).sum());
        model = run.step(&mut optim, model, loss)?;
    }
    run.outcome(&model)
}

pub(super) fn five_dimensions(run: &Run) -> Result<Outcome> {
    let mut model: Param<Tensor<5>> = run.wrap(run.fill(param([2, 1, 3, 1, 2], &run.device)))?;
    let mut optim = sgd();
    for step in 0..4 {
        let loss = run.over_parts(|part| {
            let x = run.x(step, part).reshape([2, 1, 6, 1, 1]).narrow(2, 0, 3);
            (x * model.val() - 0.5).powf_scalar(2.0).sum()
        });
        model = run.step(&mut optim, model, loss)?;
    }
    run.outcome(&model)
}

/// A step reads 8 of 500 rows, different ones on each rank.
pub(super) fn embedding_with_few_touched_rows(run: &Run) -> Result<Outcome> {
    let mut model = run.wrap(run.fill(EmbeddingConfig::new(500, 4).init(&run.device)))?;
    let mut optim = adam();
    for step in 0..5 {
        let loss = run.over_parts(|part| {
            let ids: Vec<i64> = (0..4).map(|i| ((step * 131 + part * 61 + i * 17) % 500) as i64).collect();
            let ids = Tensor::<2, Int>::from_data(TensorData::new(ids, [2, 2]), &run.device);
            (model.forward(ids) - 0.5).powf_scalar(2.0).sum()
        });
        model = run.step(&mut optim, model, loss)?;
    }
    run.outcome(&model)
}

pub(super) fn convolution(run: &Run) -> Result<Outcome> {
    let mut model: Conv2d = run.wrap(run.fill(Conv2dConfig::new([1, 3], [2, 2]).init(&run.device)))?;
    let mut optim = sgd();
    for step in 0..4 {
        let x = run.batch(step);
        let rows = x.dims()[0];
        let loss = run.scale(model.forward(x.reshape([rows, 1, 2, 3])).powf_scalar(2.0).sum());
        model = run.step(&mut optim, model, loss)?;
    }
    run.outcome(&model)
}

fn in_dtype(run: &Run, dtype: DType, tolerance: f64) -> Result<Outcome> {
    let run = run.with_dtype(dtype);
    let init = || LinearConfig::new(6, 6).init(&run.device);
    let mut model: Vec<Linear> = run.wrap(run.fill(vec![init(), init(), init()]))?;
    let mut optim = sgd();
    for step in 0..5 {
        let loss = run.over_parts(|part| {
            // One layer for each pair of parts besides the first.
            let h = model[0].forward(run.x(step, part)).tanh();
            model[1 + (part / 2 + step) % 2].forward(h).powf_scalar(2.0).sum()
        });
        model = run.step(&mut optim, model, loss)?;
    }
    Ok(run.outcome(&model)?.within(tolerance))
}

pub(super) fn in_f32(run: &Run) -> Result<Outcome> {
    in_dtype(run, DType::F32, 1e-5)
}

pub(super) fn in_f16(run: &Run) -> Result<Outcome> {
    in_dtype(run, DType::F16, 2e-2)
}

pub(super) fn in_bf16(run: &Run) -> Result<Outcome> {
    in_dtype(run, DType::BF16, 1e-1)
}

/// Layers of four dtypes in one model: buckets of four dtypes.
pub(super) fn in_mixed_dtypes(run: &Run) -> Result<Outcome> {
    const DTYPES: [DType; 4] = [DType::F64, DType::F32, DType::F16, DType::BF16];
    let layer = |dtype| {
        let run = run.with_dtype(dtype);
        run.fill(LinearConfig::new(6, 6).init(&run.device))
    };
    let mut model: Vec<Linear> = run.wrap((0..8).map(|i| layer(DTYPES[i % 4])).collect())?;
    let mut optim = sgd();
    for step in 0..4 {
        let loss = run.over_parts(|part| {
            let mut h = run.x(step, part);
            for (i, layer) in model.iter().enumerate() {
                if i != 4 + (step + part / 3) % 4 {
                    h = layer.forward(h.cast(DTYPES[i % 4])).tanh();
                }
            }
            h.cast(DType::F64).powf_scalar(2.0).sum()
        });
        model = run.step(&mut optim, model, loss)?;
    }
    Ok(run.outcome(&model)?.within(1e-1))
}
