//! Parameters that a backward does not reach, on one rank or on all, and graphs without a backward.

use anyhow::Result;
use burn::module::Module;
use burn::nn::{Linear, LinearConfig};
use burn::prelude::*;

use super::{Outcome, PARTS, Run, adam, sgd};

/// A trunk and branches.
#[derive(Module, Debug)]
pub(super) struct Branches {
    /// Layer that every item uses.
    pub(super) trunk: Linear,
    /// Layers of which each item uses one.
    pub(super) branches: Vec<Linear>,
}

impl Branches {
    /// A model with `n` branches.
    pub(super) fn new(n: usize, device: &Device) -> Self {
        let init = || LinearConfig::new(6, 6).init(device);
        Branches { trunk: init(), branches: (0..n).map(|_| init()).collect() }
    }

    /// Loss of the rows of `x` through a branch, summed over them.
    pub(super) fn loss(&self, x: Tensor<2>, branch: usize) -> Tensor<1> {
        self.branches[branch].forward(self.trunk.forward(x).tanh()).powf_scalar(2.0).sum()
    }
}

fn train(run: &Run, branch: impl Fn(usize, usize) -> usize) -> Result<Outcome> {
    let mut model = run.wrap(run.fill(Branches::new(3, &run.device)))?;
    let mut optim = adam();
    for step in 0..8 {
        let loss = run.over_parts(|part| model.loss(run.x(step, part), branch(step, part)));
        model = run.step(&mut optim, model, loss)?;
    }
    run.outcome(&model)
}

pub(super) fn everywhere(run: &Run) -> Result<Outcome> {
    train(run, |_, _| 1)
}

pub(super) fn on_some_ranks(run: &Run) -> Result<Outcome> {
    train(run, |_, part| usize::from(part < PARTS / 2))
}

pub(super) fn on_changing_ranks(run: &Run) -> Result<Outcome> {
    train(run, |step, part| (step * 5 + part / 2 + usize::from(step % 3 == 1)) % 3)
}

pub(super) fn by_all_but_one_rank(run: &Run) -> Result<Outcome> {
    train(run, |step, part| if part == 5 && step % 2 == 0 { 2 } else { 0 })
}

/// Evaluation on the training device, between and before steps.
pub(super) fn forward_without_backward(run: &Run) -> Result<Outcome> {
    let mut model = run.wrap(run.fill(Branches::new(2, &run.device)))?;
    let mut optim = sgd();
    let _ = model.loss(run.batch(77), 1);
    for step in 0..6 {
        for _ in 0..step {
            let _ = model.loss(run.batch(78), 1);
        }
        let loss = run.over_parts(|part| model.loss(run.x(step, part), part % 2));
        let _ = model.loss(run.batch(79), 0);
        model = run.step(&mut optim, model, loss)?;
    }
    run.outcome(&model)
}

/// Two branches are computed, and one of them is dropped before the backward.
pub(super) fn graph_dropped_half_way(run: &Run) -> Result<Outcome> {
    let mut model = run.wrap(run.fill(Branches::new(2, &run.device)))?;
    let mut optim = sgd();
    for step in 0..6 {
        let h = model.trunk.forward(run.batch(step)).tanh();
        let candidates = [0, 1].map(|b| model.branches[b].forward(h.clone()));
        let [first, second] = candidates;
        let kept = if (step + run.ddp.rank()).is_multiple_of(2) || run.is_oracle() {
            drop(second);
            first
        } else {
            drop(first);
            // Computed, but not used: the oracle has no ranks to choose by.
            model.branches[0].forward(h)
        };
        let loss = run.scale(kept.powf_scalar(2.0).sum());
        model = run.step(&mut optim, model, loss)?;
    }
    run.outcome(&model)
}

/// The graph of a forward stays alive during another forward and backward, and has its backward afterwards.
pub(super) fn graph_alive_beside(run: &Run) -> Result<Outcome> {
    let mut model = run.wrap(run.fill(Branches::new(2, &run.device)))?;
    let mut optim = sgd();
    for step in 0..4 {
        let kept = run.over_parts(|part| model.loss(run.x(step, part), 0));
        let loss = run.over_parts(|part| model.loss(run.x(100 + step, part), part % 2));
        let late = run.grads(&loss, &model)?.expect("averages");
        let early = run.grads(&kept, &model)?.expect("averages");
        model = optim.step(0.05, model, late);
        model = optim.step(0.05, model, early);
    }
    run.outcome(&model)
}

/// Gradient checkpointing computes forwards again inside backward.
pub(super) fn checkpointing(run: &Run) -> Result<Outcome> {
    let device = run.ddp.device()?.autodiff().gradient_checkpointing();
    let mut model = run.wrap(run.fill(Branches::new(3, &device)))?;
    let mut optim = adam();
    for step in 0..6 {
        let loss = run.over_parts(|part| {
            let x = Tensor::from_data(run.x(step, part).into_data(), (&device, run.dtype));
            model.loss(x, (part / 2 + step) % 3)
        });
        model = run.step(&mut optim, model, loss)?;
    }
    run.outcome(&model)
}
