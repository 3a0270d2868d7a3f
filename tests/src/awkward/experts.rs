//! Mixtures of experts: the data decides which parameters are used.

use anyhow::Result;
use burn::module::Module;
use burn::nn::{Linear, LinearConfig};
use burn::prelude::*;
use burn::tensor::activation::softmax;

use super::{Outcome, Run, adam};

const EXPERTS: usize = 5;

#[derive(Module, Debug)]
struct Mixture {
    router: Linear,
    experts: Vec<Linear>,
    head: Linear,
}

impl Mixture {
    fn new(device: &Device) -> Self {
        let init = |outputs| LinearConfig::new(6, outputs).init(device);
        Mixture { router: init(EXPERTS), experts: (0..EXPERTS).map(|_| init(6)).collect(), head: init(2) }
    }
}

/// Each part of the batch goes to the expert with the largest weight by the router, and is scaled by that weight.
pub(super) fn routed_by_data(run: &Run) -> Result<Outcome> {
    let mut model = run.wrap(run.fill(Mixture::new(&run.device)))?;
    let mut optim = adam();
    for step in 0..8 {
        let loss = run.over_parts(|part| {
            let x = run.x(step, part);
            let gates = softmax(model.router.forward(x.clone()), 1).mean_dim(0);
            let best = gates.clone().argmax(1).into_scalar::<i64>() as usize;
            let gate = gates.narrow(1, best, 1);
            model.head.forward(model.experts[best].forward(x).tanh() * gate).powf_scalar(2.0).sum()
        });
        model = run.step(&mut optim, model, loss)?;
    }
    run.outcome(&model)
}

/// Every expert sees all rows.
pub(super) fn soft_mixture(run: &Run) -> Result<Outcome> {
    let mut model = run.wrap(run.fill(Mixture::new(&run.device)))?;
    let mut optim = adam();
    for step in 0..5 {
        let x = run.batch(step);
        let gates = softmax(model.router.forward(x.clone()), 1);
        let h = (0..EXPERTS)
            .map(|e| model.experts[e].forward(x.clone()).tanh() * gates.clone().narrow(1, e, 1))
            .reduce(|a, b| a + b)
            .expect("there are experts");
        let loss = run.scale(model.head.forward(h).powf_scalar(2.0).sum());
        model = run.step(&mut optim, model, loss)?;
    }
    run.outcome(&model)
}
