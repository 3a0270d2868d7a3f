//! Backwards that panic half-way, and ranks that go on afterwards.

use std::panic::{AssertUnwindSafe, catch_unwind};

use anyhow::Result;
use burn::nn::{Linear, LinearConfig};
use burn_ddp::WrapConfig;

use super::panicking_op::{armed, trap};
use super::{Outcome, Run, sgd};

/// The backward of a step for which `falls` is true panics between two layers: only the last one has its gradients. The
/// panic comes out of the scope and abandons the step, which the rank then repeats.
fn survive(run: &Run, config: WrapConfig, falls: impl Fn(usize) -> bool) -> Result<Outcome> {
    let init = || LinearConfig::new(6, 6).init(&run.device);
    let mut model: Vec<Linear> = run.wrap_bare(run.fill(vec![init(), init()]), config)?;
    let started = run.values(&model);
    let loss = |model: &Vec<Linear>, step| {
        let h = trap(model[0].forward(run.batch(step)).tanh());
        run.scale(model[1].forward(h).powf_scalar(2.0).sum())
    };
    let mut optim = sgd();
    for step in 0..5 {
        if falls(step) {
            let (ddp, l) = (&run.ddp, loss(&model, step));
            let result = armed(|| catch_unwind(AssertUnwindSafe(|| ddp.scope(&model, || l.backward()).map(drop))));
            anyhow::ensure!(result.is_err(), "the bomb did not go off");
        }
        // The oracle is wrapped, too.
        let grads = run.ddp.backward(&loss(&model, step), &model)?.expect("averages");
        model = optim.step(0.1, model, grads);
    }
    anyhow::ensure!(started != run.values(&model), "nothing was trained");
    Ok(Outcome { hash: burn_ddp::param_hash(&model)?, values: run.values(&model), tolerance: 1e-10 })
}

/// The backwards of all ranks panic in the same steps.
pub(super) fn every_rank_goes_on(run: &Run) -> Result<Outcome> {
    survive(run, WrapConfig::new(), |step| step % 2 == 1)
}

/// The backward of one rank panics before it has sent anything; the rank repeats it while the others wait.
pub(super) fn one_rank_goes_on(run: &Run) -> Result<Outcome> {
    survive(run, WrapConfig::new(), |step| run.ddp.rank() == step % 3)
}
