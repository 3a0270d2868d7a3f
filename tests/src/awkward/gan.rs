//! Two models that train against each other.

use anyhow::Result;
use burn::module::Module;
use burn::nn::{Linear, LinearConfig};
use burn::prelude::*;
use burn_ddp::param_hash;

use super::{Outcome, Run, adam, sgd};

#[derive(Module, Debug)]
struct Net {
    first: Linear,
    second: Linear,
}

impl Net {
    fn new(outputs: usize, device: &Device) -> Self {
        Net { first: LinearConfig::new(6, 8).init(device), second: LinearConfig::new(8, outputs).init(device) }
    }

    fn forward(&self, x: Tensor<2>) -> Tensor<2> {
        self.second.forward(self.first.forward(x).tanh())
    }
}

fn pair(run: &Run) -> (Net, Net) {
    (run.fill(Net::new(6, &run.device)), run.fill(Net::new(1, &run.device)))
}

fn discriminator_loss(run: &Run, d: &Net, fake: Tensor<2>, step: usize) -> Tensor<1> {
    let real = run.batch(1000 + step);
    run.scale((d.forward(real) - 1.0).powf_scalar(2.0).sum() + d.forward(fake).powf_scalar(2.0).sum())
}

fn generator_loss(run: &Run, d: &Net, fake: Tensor<2>) -> Tensor<1> {
    run.scale((d.forward(fake) - 1.0).powf_scalar(2.0).sum())
}

fn alternate(run: &Run, quiet: bool) -> Result<Outcome> {
    let (g, d) = pair(run);
    let (mut g, mut d) = (run.wrap(g)?, run.wrap(d)?);
    let (mut g_optim, mut d_optim) = (adam(), sgd());
    for step in 0..5 {
        // The generator's graph is cut off here …
        let fake = g.forward(run.batch(step)).detach();
        let loss = discriminator_loss(run, &d, fake, step);
        d = run.step(&mut d_optim, d, loss)?;
        // … and reaches through the discriminator here.
        let judge = if quiet { d.clone().no_grad() } else { d.clone() };
        let loss = generator_loss(run, &judge, g.forward(run.batch(step)));
        g = run.step(&mut g_optim, g, loss)?;
    }
    Ok(run.outcome(&g)?.and(run.outcome(&d)?))
}

/// The usual GAN loop: the backward of the generator's step drops the gradients of the discriminator.
pub(super) fn detached_and_attached(run: &Run) -> Result<Outcome> {
    alternate(run, false)
}

pub(super) fn discriminator_without_gradient(run: &Run) -> Result<Outcome> {
    alternate(run, true)
}

/// Both losses in one backward, which returns the gradients of each model.
pub(super) fn one_backward_for_both(run: &Run) -> Result<Outcome> {
    let (g, d) = pair(run);
    let (mut g, mut d) = (run.wrap(g)?, run.wrap(d)?);
    let (mut g_optim, mut d_optim) = (adam(), sgd());
    for step in 0..5 {
        let fake = g.forward(run.batch(step));
        let loss =
            discriminator_loss(run, &d, fake.clone().detach(), step) + generator_loss(run, &d.clone().no_grad(), fake);
        let (for_g, for_d) = run.grads_of_both(&loss, (&g, &d))?.expect("averages");
        g = g_optim.step(0.05, g, for_g);
        d = d_optim.step(0.05, d, for_d);
    }
    Ok(run.outcome(&g)?.and(run.outcome(&d)?))
}

/// One `wrap` for both: each backward reaches only half of the wrapped parameters.
pub(super) fn wrapped_together(run: &Run) -> Result<Outcome> {
    let (g, d) = pair(run);
    let mut both: Vec<Net> = run.wrap(vec![g, d])?;
    let (mut g_optim, mut d_optim) = (adam(), sgd());
    for step in 0..5 {
        let fake = both[0].forward(run.batch(step)).detach();
        let loss = discriminator_loss(run, &both[1], fake, step);
        let grads = run.grads(&loss, &both[1])?.expect("averages");
        let before = param_hash(&both[0])?;
        both[1] = d_optim.step(0.1, both[1].clone(), grads);
        assert_eq!(before, param_hash(&both[0])?);
        let loss = generator_loss(run, &both[1], both[0].forward(run.batch(step)));
        let grads = run.grads(&loss, &both[0])?.expect("averages");
        both[0] = g_optim.step(0.1, both[0].clone(), grads);
    }
    run.outcome(&both)
}
