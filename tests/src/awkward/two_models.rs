//! Two wrapped models in one program.

use anyhow::Result;
use burn_ddp::WrapConfig;

use super::unused::Branches;
use super::{Outcome, Run, adam, sgd};

fn model(run: &Run) -> Branches {
    run.fill(Branches::new(2, &run.device))
}

pub(super) fn one_after_the_other(run: &Run) -> Result<Outcome> {
    let (mut a, mut b) = (run.wrap(model(run))?, run.wrap(model(run))?);
    let (mut a_optim, mut b_optim) = (sgd(), adam());
    for step in 0..5 {
        let loss = run.over_parts(|part| a.loss(run.x(step, part), part / 3));
        a = run.step(&mut a_optim, a, loss)?;
        let loss = run.over_parts(|part| b.loss(run.x(50 + step, part), 1 - part / 3));
        b = run.step(&mut b_optim, b, loss)?;
    }
    Ok(run.outcome(&a)?.and(run.outcome(&b)?))
}

pub(super) fn both_in_one_loss(run: &Run) -> Result<Outcome> {
    let (mut a, mut b) = (run.wrap(model(run))?, run.wrap(model(run))?);
    let (mut a_optim, mut b_optim) = (sgd(), adam());
    for step in 0..5 {
        let loss = run.over_parts(|part| {
            let h = a.branches[part / 3].forward(a.trunk.forward(run.x(step, part))).tanh();
            b.loss(h, 1 - part / 3)
        });
        let (of_a, of_b) = run.grads_of_both(&loss, (&a, &b))?.expect("averages");
        a = a_optim.step(0.05, a, of_a);
        b = b_optim.step(0.05, b, of_b);
    }
    Ok(run.outcome(&a)?.and(run.outcome(&b)?))
}

/// One model takes two micro-batches per step, the other one takes one.
pub(super) fn with_accumulation(run: &Run) -> Result<Outcome> {
    let mut a = run.wrap_with(model(run), WrapConfig::new().with_accumulation(2))?;
    let mut b = run.wrap(model(run))?;
    let (mut a_optim, mut b_optim) = (sgd(), adam());
    for step in 0..4 {
        for micro in [0, 1] {
            let loss = run.over_parts(|part| a.loss(run.x(2 * step + micro, part), (part / 3 + micro) % 2));
            // The oracle of this model is wrapped, too.
            let grads = run.ddp.backward(&loss, &a)?;
            anyhow::ensure!(grads.is_none() == (micro == 0), "gradients come with the last micro-batch");
            if let Some(grads) = grads {
                a = a_optim.step(0.1, a, grads);
            }
        }
        let loss = run.over_parts(|part| b.loss(run.x(50 + step, part), 1 - part / 3));
        b = run.step(&mut b_optim, b, loss)?;
    }
    Ok(run.outcome(&a)?.and(run.outcome(&b)?))
}

/// The second `wrap` of a model is an error on every rank; the model still trains.
pub(super) fn wrapped_twice(run: &Run) -> Result<Outcome> {
    let mut a = run.wrap(model(run))?;
    if !run.is_oracle() {
        run.expect_error(|| Ok(run.ddp.wrap(a.clone())?), &["wrapped already", "ddp.unwrap"])?;
        // A part of a wrapped model is wrapped too.
        run.expect_error(|| Ok(run.ddp.wrap(a.trunk.clone())?), &["wrapped already"])?;
    }
    let mut optim = sgd();
    for step in 0..3 {
        let loss = run.over_parts(|part| a.loss(run.x(step, part), part / 3));
        a = run.step(&mut optim, a, loss)?;
    }
    run.outcome(&a)
}
