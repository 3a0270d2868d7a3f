//! Copies, moves and records of a model between steps; before and after, each rank uses different parameters.

use anyhow::Result;
use burn::module::Module;
use burn::prelude::*;
use burn::tensor::DType;
use burn_ddp::WrapConfig;

use super::unused::Branches;
use super::{Outcome, Run, adam};

fn plain(run: &Run) -> Branches {
    run.fill(Branches::new(3, &run.device))
}

fn loss(run: &Run, model: &Branches, step: usize) -> Tensor<1> {
    run.over_parts(|part| model.loss(run.x(step, part), (part / 2 + step) % 3))
}

/// Trains, and applies `change` to the model after every second step, although some ranks have not used all parameters.
fn around(run: &Run, change: impl Fn(Branches) -> Result<Branches>) -> Result<Outcome> {
    let mut model = run.wrap(plain(run))?;
    let mut optim = adam();
    for step in 0..6 {
        let l = loss(run, &model, step);
        model = run.step(&mut optim, model, l)?;
        if step % 2 == 1 {
            model = change(model)?;
        }
    }
    run.outcome(&model)
}

pub(super) fn clone_goes_on(run: &Run) -> Result<Outcome> {
    #[allow(clippy::redundant_clone)] // that is the case
    around(run, |model| Ok(model.clone()))
}

pub(super) fn fork_goes_on(run: &Run) -> Result<Outcome> {
    around(run, |model| Ok(model.fork(&run.device)))
}

pub(super) fn valid_and_train(run: &Run) -> Result<Outcome> {
    around(run, |model| Ok(model.valid().train()))
}

/// In plain Burn a moved parameter is no leaf any more, and its second backward fails. In a wrapped model the first
/// backward fails, with an error that says what to do.
pub(super) fn moved_to_its_device(run: &Run) -> Result<Outcome> {
    if run.is_oracle() {
        return Ok(Outcome::nothing());
    }
    let train = || {
        // A rank may receive the error of another one while it still wraps.
        let model = run.wrap(plain(run))?.to_device(&run.device);
        Ok(run.ddp.backward(&loss(run, &model, 0), &model)?)
    };
    run.expect_error(train, &["not a leaf", "`fork`"])
}

/// [`Run::wrap_bare`] with default settings; the oracle stays plain Burn.
fn wrapped(run: &Run, model: Branches) -> Result<Branches> {
    if run.is_oracle() { Ok(model) } else { run.wrap_bare(model, WrapConfig::new()) }
}

/// Loads the record of a wrapped model into another wrapped model, which then has the ids of the record.
pub(super) fn from_wrapped_to_wrapped(run: &Run) -> Result<Outcome> {
    around(run, |model| {
        let other = wrapped(run, crate::to_f64(Branches::new(3, &run.device)))?;
        Ok(other.load_record(model.into_record()))
    })
}

pub(super) fn from_plain_to_wrapped(run: &Run) -> Result<Outcome> {
    let mut model =
        run.wrap(crate::to_f64(Branches::new(3, &run.device)))?.load_record(run.wrap(plain(run))?.into_record());
    // A plain model with the same values on all ranks, as a file would have.
    let file = run.ddp.unwrap(model.clone())?;
    model = model.load_record(file.into_record());
    let mut optim = adam();
    for step in 0..4 {
        // The gradients have the new ids.
        let l = loss(run, &model, step);
        model = run.step(&mut optim, model, l)?;
    }
    run.outcome(&model)
}

/// The record of a wrapped model loads into a plain model, which `wrap` wraps again.
pub(super) fn from_wrapped_to_plain(run: &Run) -> Result<Outcome> {
    around(run, |model| {
        let plain = Branches::new(3, &run.device).load_record(model.into_record());
        wrapped(run, plain)
    })
}

pub(super) fn unwrap_and_wrap(run: &Run) -> Result<Outcome> {
    around(run, |model| if run.is_oracle() { Ok(model) } else { wrapped(run, run.ddp.unwrap(model)?) })
}

/// Every rank saves its optimizer and loads it again; parameters keep their ids. Burn loads the state as f32.
pub(super) fn optimizer_record(run: &Run) -> Result<Outcome> {
    let run = &run.with_dtype(DType::F32);
    let mut model = run.wrap(plain(run))?;
    let mut optim = adam();
    for step in 0..6 {
        let l = loss(run, &model, step);
        model = run.step(&mut optim, model, l)?;
        if step == 2 {
            optim = optim.clone().load_record(optim.to_record());
        }
    }
    Ok(run.outcome(&model)?.within(1e-4))
}

/// A copy is taken between backward and step (an EMA, a best model so far), moved, mapped, saved, and used for
/// evaluation.
pub(super) fn a_copy_is_kept_aside(run: &Run) -> Result<Outcome> {
    let mut model = run.wrap(plain(run))?;
    let mut optim = adam();
    let mut best = None;
    for step in 0..6 {
        let grads = run.grads(&loss(run, &model, step), &model)?.expect("averages");
        let copy = model.clone();
        let _ = copy.valid().loss(run.batch(step).inner(), 0);
        let _ = copy.clone().into_record();
        let _ = copy.clone().fork(&run.device).no_grad();
        best = Some(copy);
        model = optim.step(0.1, model, grads);
    }
    let best = run.ddp.unwrap(best.expect("there were steps"))?;
    Ok(run.outcome(&model)?.and(run.outcome(&best)?))
}
