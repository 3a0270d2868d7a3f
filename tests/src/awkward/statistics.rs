//! Running statistics. A rank normalises by its own batch, so plain Burn with the whole batch has other values; the
//! test only compares the ranks.

use anyhow::{Result, ensure};
use burn::module::Module;
use burn::nn::{BatchNorm, BatchNormConfig, Linear, LinearConfig};
use burn_ddp::prelude::*;

use super::{Outcome, Run, sgd};

#[derive(Module, Debug)]
struct Normed {
    before: Linear,
    norm: BatchNorm,
    after: Linear,
}

fn train(run: &Run, config: WrapConfig) -> Result<Outcome> {
    let init = || LinearConfig::new(6, 6).init(&run.device);
    let model = Normed { before: init(), norm: BatchNormConfig::new(6).init(&run.device), after: init() };
    let mut model = run.wrap_with(run.fill(model), config)?;
    let started = model.norm.running_mean.value().into_data();
    let mut optim = sgd();
    for step in 0..6 {
        let h = model.norm.forward(model.before.forward(run.batch(step)));
        let loss = run.scale(model.after.forward(h).powf_scalar(2.0).sum());
        // The oracle is wrapped, too.
        let grads = run.ddp.backward(&loss, &model)?.expect("averages");
        model = optim.step(0.1, model, grads);
        // Evaluation computes the same values on all ranks.
        let y = model.valid();
        let y = y.after.forward(y.norm.forward(y.before.forward(run.x(99, 0).inner()))).sum().into_scalar::<f64>();
        ensure!(
            run.ddp.group().broadcast_object(run.ddp.is_main().then_some(y), 0)? == y,
            "evaluation differs in step {step}"
        );
    }
    ensure!(model.valid().norm.running_mean.value().into_data() != started, "nothing was counted");
    Ok(Outcome { values: Vec::new(), ..run.outcome(&model)? })
}

pub(super) fn batch_norm(run: &Run) -> Result<Outcome> {
    train(run, WrapConfig::new())
}

pub(super) fn batch_norm_of_rank_0(run: &Run) -> Result<Outcome> {
    train(run, WrapConfig::new().with_buffers(BufferPolicy::Broadcast))
}
