//! Hashes of trained models: `rank bits MODEL OPTIMIZER STEPS [sharded]`; and a rank that dies in a step of a sharded
//! model: `rank bits-kill forward|backward|agreement|scatter`.

use std::time::Instant;

use burn::nn::{Linear, LinearConfig};
use burn::optim::SgdConfig;
use burn::prelude::*;
use burn_ddp::prelude::*;
use burn_ddp_tests::awkward::panicking_op::{armed, trap};
use burn_ddp_tests::four_models;
use rustix::process::{Signal, getpid, kill_process};

fn arg(n: usize) -> String {
    std::env::args().nth(n).unwrap_or_default()
}

fn sharded() -> WrapConfig {
    WrapConfig::new().with_sharding(Sharding::Parameters).with_sharding_above(1)
}

/// Prints the hash of the trained model.
pub(crate) fn run(ddp: &Ddp) -> anyhow::Result<()> {
    let config = if arg(5) == "sharded" { sharded() } else { WrapConfig::new() };
    println!("{}", four_models::train(ddp, &arg(2), &arg(3), arg(4).parse()?, &config)?.0);
    Ok(())
}

#[derive(Module, Debug)]
struct Two {
    a: Linear,
    b: Linear,
}

/// Rank 1 dies while the others gather parameters in forward, gather them again in backward, agree on the gradients to
/// reduce, or scatter the second of two sums. The others print the time until the error, in ms, and the error.
pub(crate) fn kill(ddp: &Ddp) -> anyhow::Result<()> {
    let device = ddp.device()?.autodiff();
    let linear = || LinearConfig::new(6, 6).with_bias(false).init(&device);
    let model = ddp.wrap_with(Two { a: linear(), b: linear() }, &sharded())?;
    ddp.optimizer(SgdConfig::new().init(), &model)?;
    let moment = arg(2);
    let die = || kill_process(getpid(), Signal::KILL).unwrap();
    let dies_at = |now: &str| {
        if ddp.rank() == 1 && moment == now {
            die();
        }
    };
    let dies_in_backward = ddp.rank() == 1 && moment == "scatter";
    let x = Tensor::<2>::ones([2, 6], &device);
    let mut last = Instant::now();
    std::panic::set_hook(Box::new(move |_| {
        if dies_in_backward {
            die();
        }
    }));
    let step = std::panic::AssertUnwindSafe(|| {
        ddp.backward(&model.b.forward(model.a.forward(x.clone())).sum(), &model)?;
        last = Instant::now();
        let y = model.a.forward(x);
        dies_at("forward");
        // The first layer's input needs no gradient, so its weight is not gathered again.
        let loss = match moment.as_str() {
            "agreement" => y.sum(),
            _ => model.b.forward(trap(y)).sum(),
        };
        if dies_in_backward {
            return armed(|| ddp.backward(&loss, &model)).map(drop);
        }
        dies_at(&moment);
        ddp.backward(&loss, &model).map(drop)
    });
    let error = match std::panic::catch_unwind(step) {
        Ok(done) => done.err().map(|e| e.to_string()).unwrap_or_default(),
        Err(panic) => panic.downcast_ref::<String>().cloned().unwrap_or_default(),
    };
    println!("{} {}", last.elapsed().as_millis(), error.replace('\n', " "));
    Ok(())
}
