//! One parameter in several places of a model.

use anyhow::Result;
use burn::module::Param;
use burn::nn::{Embedding, EmbeddingConfig, Linear, LinearConfig};
use burn::optim::{GradientsAccumulator, GradientsParams};
use burn::prelude::*;

use super::{Outcome, Run, sgd};

/// A square matrix and a layer between its two uses.
#[derive(Module, Debug)]
struct Tied {
    matrix: Param<Tensor<2>>,
    middle: Linear,
}

impl Tied {
    fn new(device: &Device) -> Self {
        let matrix = Param::from_tensor(Tensor::<2>::zeros([6, 6], device));
        Tied { matrix, middle: LinearConfig::new(6, 6).init(device) }
    }
}

/// Weight tying as torch users know it: one `Param`, read by the first and by the last operation.
pub(super) fn weight_read_twice(run: &Run) -> Result<Outcome> {
    let mut model = run.wrap(run.fill(Tied::new(&run.device)))?;
    let mut optim = sgd();
    for step in 0..6 {
        let x = run.batch(step);
        let h = model.middle.forward(x.clone().matmul(model.matrix.val()).tanh());
        let y = h.matmul(model.matrix.val().transpose());
        let loss = run.scale((y - x).powf_scalar(2.0).sum());
        model = run.step(&mut optim, model, loss)?;
    }
    run.outcome(&model)
}

/// The same with one read.
pub(super) fn one_read_used_twice(run: &Run) -> Result<Outcome> {
    let mut model = run.wrap(run.fill(Tied::new(&run.device)))?;
    let mut optim = sgd();
    for step in 0..6 {
        let x = run.batch(step);
        let w = model.matrix.val();
        let h = model.middle.forward(x.clone().matmul(w.clone()).tanh());
        let loss = run.scale((h.matmul(w.transpose()) - x).powf_scalar(2.0).sum());
        model = run.step(&mut optim, model, loss)?;
    }
    run.outcome(&model)
}

/// A language model whose embedding is also its output layer.
#[derive(Module, Debug)]
struct Language {
    table: Embedding,
    middle: Linear,
}

pub(super) fn embedding_tied_to_the_output(run: &Run) -> Result<Outcome> {
    let model = Language {
        table: EmbeddingConfig::new(11, 6).init(&run.device),
        middle: LinearConfig::new(6, 6).init(&run.device),
    };
    let mut model = run.wrap(run.fill(model))?;
    let mut optim = sgd();
    for step in 0..6 {
        let loss = run.over_parts(|part| {
            let ids: Vec<i64> = (0..4).map(|i| ((step * 7 + part * 5 + i * 3) % 11) as i64).collect();
            let ids = Tensor::<2, Int>::from_data(TensorData::new(ids, [1, 4]), &run.device);
            let h = model.middle.forward(model.table.forward(ids)).tanh().squeeze_dim::<2>(0);
            h.matmul(model.table.weight.val().transpose()).powf_scalar(2.0).sum()
        });
        model = run.step(&mut optim, model, loss)?;
    }
    run.outcome(&model)
}

/// A layer that two branches share.
pub(super) fn layer_in_two_places(run: &Run) -> Result<Outcome> {
    let init = || LinearConfig::new(6, 6).init(&run.device);
    let mut model: Vec<Linear> = run.wrap(run.fill(vec![init(), init()]))?;
    let mut optim = sgd();
    for step in 0..6 {
        let x = run.batch(step);
        let left = model[0].forward(model[1].forward(x.clone()).tanh());
        let right = model[0].forward(x).tanh();
        let loss = run.scale((left - right).powf_scalar(2.0).sum());
        model = run.step(&mut optim, model, loss)?;
    }
    run.outcome(&model)
}

/// Two clones of one `Param`. Each part of the batch reads one of the two, another one in the next step. burn-ddp adds
/// their gradients up; Burn's optimizers step the first clone by the sum.
pub(super) fn cloned_params(run: &Run) -> Result<Outcome> {
    let one: Linear = run.fill(LinearConfig::new(6, 6).init(&run.device));
    let mut model = run.wrap(vec![one.clone(), one])?;
    let mut optim = sgd();
    for step in 0..5 {
        let loss = run.over_parts(|part| {
            let h = model[(part / 2 + step) % 2].forward(run.x(step, part)).tanh();
            let y = if part % 3 == 0 { model[1].forward(h) } else { h };
            y.powf_scalar(2.0).sum()
        });
        let grads = match run.is_oracle() {
            true => of_clones(&loss, &model),
            false => run.ddp.backward(&loss, &model)?.expect("averages"),
        };
        model = optim.step(0.1, model, grads);
    }
    run.outcome(&model)
}

/// The sum of the gradients of both clones in plain Burn. They share a leaf, whose gradient is that sum, until the
/// first optimizer step moves one of them.
fn of_clones(loss: &Tensor<1>, model: &[Linear]) -> GradientsParams {
    let (mut grads, mut sum) = (loss.backward(), GradientsAccumulator::new());
    for clone in model {
        sum.accumulate(clone, GradientsParams::from_module(&mut grads, clone));
    }
    sum.grads()
}
