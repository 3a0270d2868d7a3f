//! One parameter read many times in one forward.

use anyhow::Result;
use burn::module::Module;
use burn::nn::gru::GruConfig;
use burn::nn::{Linear, LinearConfig, LstmConfig};
use burn::prelude::*;
use burn::tensor::DType;

use super::{Outcome, Run, sgd};

/// A recurrent cell.
#[derive(Module, Debug)]
struct Cell {
    input: Linear,
    state: Linear,
}

impl Cell {
    fn new(device: &Device) -> Self {
        Cell { input: LinearConfig::new(6, 6).init(device), state: LinearConfig::new(6, 6).init(device) }
    }

    fn unroll(&self, x: Tensor<2>, steps: usize) -> Tensor<1> {
        let mut h = x.zeros_like();
        for _ in 0..steps {
            h = (self.input.forward(x.clone()) + self.state.forward(h)).tanh();
        }
        h.powf_scalar(2.0).sum()
    }
}

/// Reads the cell's parameters `reads(step)` times in each step.
fn unrolled(run: &Run, reads: impl Fn(usize) -> usize) -> Result<Outcome> {
    let mut model = run.wrap(run.fill(Cell::new(&run.device)))?;
    let mut optim = sgd();
    for step in 0..5 {
        let loss = run.scale(model.unroll(run.batch(step), reads(step)));
        model = run.step(&mut optim, model, loss)?;
    }
    run.outcome(&model)
}

pub(super) fn once(run: &Run) -> Result<Outcome> {
    unrolled(run, |_| 1)
}

pub(super) fn three_times(run: &Run) -> Result<Outcome> {
    unrolled(run, |_| 3)
}

pub(super) fn fifty_times(run: &Run) -> Result<Outcome> {
    unrolled(run, |_| 50)
}

pub(super) fn another_count_in_each_step(run: &Run) -> Result<Outcome> {
    unrolled(run, |step| [3, 50, 1, 7, 2][step])
}

/// Sequences of different lengths.
pub(super) fn another_count_on_each_rank(run: &Run) -> Result<Outcome> {
    let mut model = run.wrap(run.fill(Cell::new(&run.device)))?;
    let mut optim = sgd();
    for step in 0..5 {
        let loss = run.over_parts(|part| model.unroll(run.x(step, part), 1 + (part * 3 + step) % 8));
        model = run.step(&mut optim, model, loss)?;
    }
    run.outcome(&model)
}

/// Burn's LSTM collects its states in the default dtype, so it runs in f32.
fn lstm(run: &Run, length: usize) -> Result<Outcome> {
    let run = &run.with_dtype(DType::F32);
    let mut model = run.wrap(run.fill(LstmConfig::new(6, 4, true).init(&run.device)))?;
    let mut optim = sgd();
    for step in 0..3 {
        let x = run.batch(step);
        let [rows, columns] = x.dims();
        let x = x.unsqueeze_dim::<3>(1).expand([rows, length, columns]);
        let (_, last) = model.forward(x, None);
        let loss = run.scale(last.hidden.powf_scalar(2.0).sum());
        model = run.step(&mut optim, model, loss)?;
    }
    Ok(run.outcome(&model)?.within(1e-5))
}

pub(super) fn lstm_of_1(run: &Run) -> Result<Outcome> {
    lstm(run, 1)
}

pub(super) fn lstm_of_3(run: &Run) -> Result<Outcome> {
    lstm(run, 3)
}

pub(super) fn lstm_of_50(run: &Run) -> Result<Outcome> {
    lstm(run, 50)
}

pub(super) fn gru(run: &Run) -> Result<Outcome> {
    let run = &run.with_dtype(DType::F32);
    let mut model = run.wrap(run.fill(GruConfig::new(6, 4, true).init(&run.device)))?;
    let mut optim = sgd();
    for step in 0..3 {
        let x = run.batch(step);
        let [rows, columns] = x.dims();
        let x = x.unsqueeze_dim::<3>(1).expand([rows, 5, columns]);
        let loss = run.scale(model.forward(x, None).powf_scalar(2.0).sum());
        model = run.step(&mut optim, model, loss)?;
    }
    Ok(run.outcome(&model)?.within(1e-5))
}
