//! Gradients that a program looks up itself instead of giving them to an optimizer of Burn.

use std::time::Duration;

use burn::module::{Module, ModuleMapper, Param};
use burn::optim::{GradientsParams, SgdConfig};
use burn::prelude::*;
use burn_ddp::WorldOptions;
use burn_ddp::prelude::*;

/// `a` is used by every rank, `b` by rank 0 alone.
#[derive(Module, Debug)]
struct Pair {
    a: Param<Tensor<1>>,
    b: Param<Tensor<1>>,
}

impl Pair {
    fn new(device: &Device) -> Self {
        let one = |value: f32| Param::from_tensor(Tensor::from_floats([value], device));
        Pair { a: one(1.0), b: one(1.0) }
    }

    /// The gradient of `a` is `x`, and so is the gradient of `b` if `uses_b`.
    fn loss(&self, x: f32, uses_b: bool) -> Tensor<1> {
        let loss = self.a.val() * x;
        if uses_b { loss + self.b.val() * x } else { loss }
    }
}

fn number(tensor: Option<Tensor<1>>) -> Option<f32> {
    tensor.map(|tensor| tensor.into_scalar::<f32>())
}

/// Runs `f` on two ranks and returns their results. A hang ends with an error after a minute.
fn two_ranks<T: Send>(f: impl Fn(Ddp) -> anyhow::Result<T> + Sync) -> Vec<T> {
    let timeout = Duration::from_secs(60);
    Ddp::spawn_with(2, WorldOptions { timeout, ..WorldOptions::default() }, f).unwrap()
}

#[test]
fn every_average_is_found_by_the_id_of_its_parameter() {
    let find = |ddp: Ddp| {
        let device = ddp.device()?.autodiff();
        let model = ddp.wrap(Pair::new(&device))?;
        let grads = ddp.backward(&model.loss(2.0, ddp.is_main()), &model)?.expect("averages");
        Ok([number(grads.get(model.a.id)), number(grads.get(model.b.id))])
    };
    assert_eq!(Ddp::spawn(1, find).unwrap(), [[Some(2.0), Some(2.0)]]);
    // The mean over all ranks: rank 1 counts as a gradient of 0 for `b`.
    assert_eq!(two_ranks(find), [[Some(2.0), Some(1.0)]; 2]);
}

#[test]
fn parameters_that_no_rank_uses_are_not_found() {
    let find = |ddp: Ddp| {
        let device = ddp.device()?.autodiff();
        let model = ddp.wrap(Pair::new(&device))?;
        let grads = ddp.backward(&model.loss(1.0 + 2.0 * ddp.rank() as f32, false), &model)?.expect("averages");
        Ok([number(grads.get(model.a.id)), number(grads.get(model.b.id))])
    };
    assert_eq!(Ddp::spawn(1, find).unwrap(), [[Some(1.0), None]]);
    assert_eq!(two_ranks(find), [[Some(2.0), None]; 2]);
}

/// Steps by the gradients.
struct ByHand<'a>(&'a GradientsParams);

impl ModuleMapper for ByHand<'_> {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let id = param.id;
        param.map(|value| match self.0.get::<D>(id) {
            Some(gradient) => Tensor::from_inner(value.inner() - gradient.mul_scalar(0.1)).require_grad(),
            None => value,
        })
    }
}

/// Runs two steps, and returns 10 `b`, rounded, or the error of the comparison of replicas.
fn two_steps(step: impl Fn(&Ddp, Pair, GradientsParams) -> Pair + Sync) -> Vec<Result<i32, String>> {
    two_ranks(|ddp| {
        let device = ddp.device()?.autodiff();
        let mut model = ddp.wrap(Pair::new(&device))?;
        for _ in 0..2 {
            let grads = ddp.backward(&model.loss(2.0, ddp.is_main()), &model)?.expect("averages");
            model = step(&ddp, model, grads);
        }
        let compared = ddp.check_replicas(&model).map_err(|error| error.to_string());
        Ok(compared.map(|()| (10.0 * model.b.base().into_scalar::<f32>()).round() as i32))
    })
}

/// An optimizer by hand that steps only the parameters that its rank has used.
#[test]
fn an_average_that_an_optimizer_by_hand_leaves_out_makes_replicas_differ() {
    let error = Ddp::spawn(2, |ddp| {
        let mut model = ddp.wrap(Pair::new(&ddp.device()?.autodiff()))?;
        for _ in 0..2 {
            let mut grads = ddp.backward(&model.loss(2.0, ddp.is_main()), &model)?.expect("averages");
            if !ddp.is_main() {
                grads.remove::<1>(model.b.id);
            }
            model = model.map(&mut ByHand(&grads));
        }
        Ok(())
    });
    let error = error.unwrap_err().to_string();
    assert!(error.contains("the replicas differ in step 1: b differs between ranks 0, 1"), "{error}");
}

#[test]
fn an_optimizer_by_hand_that_takes_all_averages_trains() {
    let steps = two_steps(|_, model, grads| model.map(&mut ByHand(&grads)));
    assert_eq!(steps, [Ok(8), Ok(8)]);
}

/// A step may look at its gradients without using them: the replicas stay equal, even if it maps a copy of the model.
#[test]
fn averages_of_a_step_that_is_skipped_are_no_error() {
    let copy = |_: &Ddp, model: Pair, grads: GradientsParams| {
        let copy = model.clone().map(&mut ByHand(&grads));
        drop(copy.valid());
        model
    };
    assert_eq!(two_steps(copy), [Ok(10), Ok(10)]);
}

#[test]
fn an_optimizer_of_burn_takes_what_it_is_given() {
    let steps = two_steps(|_, model, grads| SgdConfig::new().init().step(0.1, model, grads));
    assert_eq!(steps, [Ok(8), Ok(8)]);
}
