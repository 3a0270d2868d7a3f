//! Every optimizer of Burn, on a model of which each rank uses different parameters.

use anyhow::Result;
use burn::grad_clipping::{GradientClipping, GradientClippingConfig};
use burn::lr_scheduler::module_lr_scheduler::ModuleLrScheduler;
use burn::module::{Module, ModuleVisitor, Param, ParamGroup};
use burn::nn::{Linear, LinearConfig};
use burn::optim::decay::WeightDecayConfig;
use burn::optim::momentum::MomentumConfig;
use burn::optim::{
    AdaGradConfig, AdafactorConfig, AdamConfig, AdamWConfig, AdanConfig, GradientsParams, LBFGSConfig, LambConfig,
    LionConfig, ModuleOptimizer, MuonConfig, RmsPropConfig, SgdConfig,
};
use burn::prelude::*;
use burn_ddp::WrapConfig;

use super::unused::Branches;
use super::{Outcome, Run};

fn loss(run: &Run, model: &Branches, step: usize) -> Tensor<1> {
    run.over_parts(|part| model.loss(run.x(step, part), (part / 2 + step) % 3))
}

fn train(run: &Run, optim: ModuleOptimizer) -> Result<Outcome> {
    let mut model = run.wrap(run.fill(Branches::new(3, &run.device)))?;
    let mut optim = run.checked(optim, &model)?;
    for step in 0..6 {
        let grads = run.grads(&loss(run, &model, step), &model)?.expect("averages");
        model = optim.step(0.01, model, grads);
    }
    run.outcome(&model)
}

pub(super) fn sgd_plain(run: &Run) -> Result<Outcome> {
    train(run, SgdConfig::new().init())
}

pub(super) fn sgd_decay_and_nesterov(run: &Run) -> Result<Outcome> {
    let momentum = MomentumConfig { momentum: 0.9, dampening: 0.0, nesterov: true };
    let decay = WeightDecayConfig::new(0.125);
    train(run, SgdConfig::new().with_momentum(Some(momentum)).with_weight_decay(Some(decay)).init())
}

pub(super) fn adam_ams(run: &Run) -> Result<Outcome> {
    train(run, AdamConfig::new().with_amsgrad(true).init())
}

pub(super) fn adam_w(run: &Run) -> Result<Outcome> {
    train(run, AdamWConfig::new().with_cautious_weight_decay(true).init())
}

pub(super) fn ada_grad(run: &Run) -> Result<Outcome> {
    train(run, AdaGradConfig::new().init())
}

pub(super) fn adafactor(run: &Run) -> Result<Outcome> {
    train(run, AdafactorConfig::new().init())
}

pub(super) fn adan(run: &Run) -> Result<Outcome> {
    train(run, AdanConfig::new().init())
}

pub(super) fn lamb(run: &Run) -> Result<Outcome> {
    train(run, LambConfig::new().init())
}

pub(super) fn lion(run: &Run) -> Result<Outcome> {
    train(run, LionConfig::new().init())
}

/// Moves gradients from the first to the second, except those of the matrices, the only parameters that Muon can train.
struct KeepMatrices<'a>(&'a mut GradientsParams, &'a mut GradientsParams);

impl ModuleVisitor for KeepMatrices<'_> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        if D != 2
            && let Some(gradient) = self.0.remove::<D>(param.id)
        {
            self.1.register(param.id, gradient);
        }
    }
}

pub(super) fn muon(run: &Run) -> Result<Outcome> {
    let mut model = run.wrap(run.fill(Branches::new(3, &run.device)))?;
    let mut muon = run.checked(MuonConfig::new().init(), &model)?;
    let mut sgd = run.checked(SgdConfig::new().init(), &model)?;
    for step in 0..6 {
        let mut of_matrices = run.grads(&loss(run, &model, step), &model)?.expect("averages");
        let mut others = GradientsParams::new();
        model.visit(&mut KeepMatrices(&mut of_matrices, &mut others));
        model = muon.step(0.01, model, of_matrices);
        model = sgd.step(0.01, model, others);
    }
    Ok(run.outcome(&model)?.within(1e-8))
}

pub(super) fn rms_prop(run: &Run) -> Result<Outcome> {
    train(run, RmsPropConfig::new().with_centered(true).init())
}

pub(super) fn learning_rates_per_group(run: &Run) -> Result<Outcome> {
    let mut model = run.wrap(run.fill(Branches::new(3, &run.device)))?;
    let mut optim = AdamConfig::new().init();
    let mut rates = ModuleLrScheduler::from(0.01).with_group(ParamGroup::from_predicate("branches"), 0.05);
    for step in 0..6 {
        let grads = run.grads(&loss(run, &model, step), &model)?.expect("averages");
        model = optim.step(rates.step(), model, grads);
    }
    run.outcome(&model)
}

pub(super) fn optimizers_per_group(run: &Run) -> Result<Outcome> {
    let clipping = GradientClipping::Norm(0.5);
    let group = ParamGroup::from_predicate("branches");
    train(run, AdamConfig::new().init().with_group(group, LionConfig::new().build(), Some(clipping)))
}

pub(super) fn clipping_by_norm(run: &Run) -> Result<Outcome> {
    train(run, SgdConfig::new().with_gradient_clipping(Some(GradientClippingConfig::Norm(0.1))).init())
}

pub(super) fn clipping_by_value(run: &Run) -> Result<Outcome> {
    train(run, SgdConfig::new().with_gradient_clipping(Some(GradientClippingConfig::Value(0.01))).init())
}

/// The closure of LBFGS returns the loss over all ranks, so that the line searches of all ranks agree.
fn with_lbfgs(run: &Run, branch: impl Fn(usize) -> usize) -> Result<Outcome> {
    let layer = || LinearConfig::new(6, 6).init(&run.device);
    let layers: Vec<Linear> = run.fill((0..3).map(|_| layer()).collect());
    // LBFGS is no optimizer that `Ddp::optimizer` could check.
    let mut model = if run.is_oracle() { run.wrap(layers)? } else { run.wrap_for_others(layers, WrapConfig::new())? };
    let mut optim = LBFGSConfig::new().with_max_iter(4).init();
    for _ in 0..3 {
        let closure = |model: Vec<Linear>| {
            let loss = run.over_parts(|part| {
                let h = model[0].forward(run.x(0, part)).tanh();
                (model[branch(part)].forward(h) - 0.5).powf_scalar(2.0).sum()
            });
            let all = run.ddp.mean(loss.clone().into_scalar::<f64>()).expect("no rank fails");
            (all, run.grads(&loss, &model).expect("no rank fails").expect("averages"))
        };
        (model, _) = optim.step(1.0, model, closure);
    }
    Ok(run.outcome(&model)?.within(1e-6))
}

/// Every parameter is used on every rank.
pub(super) fn lbfgs(run: &Run) -> Result<Outcome> {
    with_lbfgs(run, |part| 1 + part % 2)
}

/// LBFGS joins the parameters to one vector and the gradients to another. Their lengths are equal only if the gradients
/// include the averages of parameters that this rank has not used, and nothing else.
pub(super) fn lbfgs_with_unused(run: &Run) -> Result<Outcome> {
    with_lbfgs(run, |part| 1 + part / 3)
}
