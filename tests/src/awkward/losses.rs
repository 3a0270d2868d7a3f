//! Several losses in a step: one backward for each, or one backward of their sum.

use anyhow::Result;
use burn::module::Module;
use burn::nn::{Linear, LinearConfig};
use burn::optim::GradientsAccumulator;
use burn::prelude::*;

use super::{Outcome, Run, sgd};

/// A trunk with two heads.
#[derive(Module, Debug)]
struct TwoHeads {
    trunk: Linear,
    heads: [Linear; 2],
}

impl TwoHeads {
    fn new(device: &Device) -> Self {
        let init = |outputs| LinearConfig::new(6, outputs).init(device);
        TwoHeads { trunk: init(6), heads: [init(2), init(3)] }
    }

    fn loss(&self, run: &Run, step: usize, head: usize) -> Tensor<1> {
        let y = self.heads[head].forward(self.trunk.forward(run.batch(step)).tanh());
        run.scale((y - 0.5).powf_scalar(2.0).sum())
    }
}

/// A backward and a step for each loss in turn.
pub(super) fn one_backward_each(run: &Run) -> Result<Outcome> {
    let mut model = run.wrap(run.fill(TwoHeads::new(&run.device)))?;
    let mut optim = sgd();
    for step in 0..4 {
        // Both forwards come before the backwards: each backward has the graph of its own reads.
        let losses = [model.loss(run, step, 0), model.loss(run, step, 1)];
        let first = run.grads(&losses[0], &model)?.expect("averages");
        let second = run.grads(&losses[1], &model)?.expect("averages");
        model = optim.step(0.05, model, first);
        model = optim.step(0.05, model, second);
    }
    run.outcome(&model)
}

/// Burn's own accumulation, which adds averages up: one reduction for each backward.
pub(super) fn gradients_accumulator(run: &Run) -> Result<Outcome> {
    let mut model = run.wrap(run.fill(TwoHeads::new(&run.device)))?;
    let (mut optim, mut sum) = (sgd(), GradientsAccumulator::new());
    for step in 0..4 {
        for head in [0, 1] {
            sum.accumulate(&model, run.grads(&model.loss(run, step, head), &model)?.expect("averages"));
        }
        model = optim.step(0.05, model, sum.grads());
    }
    run.outcome(&model)
}

pub(super) fn sum_of_losses(run: &Run) -> Result<Outcome> {
    let mut model = run.wrap(run.fill(TwoHeads::new(&run.device)))?;
    let mut optim = sgd();
    for step in 0..4 {
        let loss = model.loss(run, step, 0) + model.loss(run, step, 1) * 0.25;
        model = run.step(&mut optim, model, loss)?;
    }
    run.outcome(&model)
}

/// The nodes that burn-ddp adds to a read of a parameter serve one backward; a second backward over the same read is an
/// error of Burn's on every rank.
pub(super) fn two_backwards_over_one_read(run: &Run) -> Result<Outcome> {
    if run.is_oracle() {
        return Ok(Outcome::nothing());
    }
    let model = run.wrap(run.fill(TwoHeads::new(&run.device)))?;
    let w = model.trunk.weight.val();
    let loss = |step| run.batch(step).matmul(w.clone()).powf_scalar(2.0).sum();
    let (first, second) = (loss(0), loss(1));
    let _ = run.ddp.backward(&first, &model)?;
    run.expect_error(
        || Ok(run.ddp.backward(&second, &model)?),
        &["already been consumed", "recompute the forward pass"],
    )?;
    // The model still trains.
    let grads = run.ddp.backward(&model.loss(run, 2, 0), &model)?.expect("averages");
    assert_eq!(grads.len(), 4);
    Ok(Outcome::nothing())
}
