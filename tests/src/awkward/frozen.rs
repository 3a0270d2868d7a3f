//! Frozen parameters: from the start, for some steps, or from some step on.

use anyhow::Result;
use burn::module::Module;
use burn::nn::{Linear, LinearConfig};
use burn::prelude::*;

use super::{Outcome, Run, adam};

fn layers(run: &Run) -> Vec<Linear> {
    run.fill((0..4).map(|_| LinearConfig::new(6, 6).init(&run.device)).collect::<Vec<_>>())
}

fn loss(run: &Run, model: &[Linear], step: usize) -> Tensor<1> {
    let y = model.iter().fold(run.batch(step), |h, layer| layer.forward(h).tanh());
    run.scale(y.powf_scalar(2.0).sum())
}

/// Trains for six steps; `change` may change the model before each.
fn train(run: &Run, model: Vec<Linear>, change: impl Fn(usize, &mut Vec<Linear>)) -> Result<Outcome> {
    let mut model = run.wrap(model)?;
    let mut optim = adam();
    for step in 0..6 {
        change(step, &mut model);
        let l = loss(run, &model, step);
        model = run.step(&mut optim, model, l)?;
    }
    run.outcome(&model)
}

fn freeze(layer: &mut Linear) {
    *layer = layer.clone().freeze();
}

fn unfreeze(layer: &mut Linear) {
    *layer = layer.clone().unfreeze();
}

pub(super) fn from_the_start(run: &Run) -> Result<Outcome> {
    let mut model = layers(run);
    freeze(&mut model[0]);
    freeze(&mut model[2]);
    train(run, model, |_, _| ())
}

pub(super) fn half_a_layer(run: &Run) -> Result<Outcome> {
    let mut model = layers(run);
    model[1].weight = model[1].weight.clone().set_require_grad(false);
    model[3].bias = model[3].bias.clone().map(|b| b.set_require_grad(false));
    train(run, model, |_, _| ())
}

pub(super) fn unfrozen_midway(run: &Run) -> Result<Outcome> {
    let mut model = layers(run);
    freeze(&mut model[0]);
    freeze(&mut model[1]);
    train(run, model, |step, model| {
        if step == 3 {
            unfreeze(&mut model[0]);
            unfreeze(&mut model[1]);
        }
    })
}

pub(super) fn frozen_midway(run: &Run) -> Result<Outcome> {
    train(run, layers(run), |step, model| {
        if step == 3 {
            freeze(&mut model[1]);
        }
    })
}

/// Fine-tuning from the head down: all layers but the last begin frozen, each step unfreezes one more, and the last
/// step freezes the head.
pub(super) fn thawing_layer_by_layer(run: &Run) -> Result<Outcome> {
    let mut model = layers(run);
    model[..3].iter_mut().for_each(freeze);
    train(run, model, |step, model| match step {
        1..=3 => unfreeze(&mut model[3 - step]),
        5 => freeze(&mut model[3]),
        _ => (),
    })
}

/// A wrapped model without trainable parameters: its backward is an error, not a step that changes nothing.
pub(super) fn everything_after_wrap(run: &Run) -> Result<Outcome> {
    if run.is_oracle() {
        return Ok(Outcome::nothing());
    }
    let train = || {
        // A rank may receive the error of another one while it still wraps.
        let model = run.wrap(layers(run))?.freeze();
        // Something outside the model trains, so there is a graph to go through.
        let scale = Tensor::<1>::ones([1], (&run.device, run.dtype)).require_grad();
        Ok(run.ddp.backward(&(loss(run, &model, 0) * scale), &model)?)
    };
    run.expect_error(train, &["depends on no parameter of the wrapped model", "frozen"])
}
