//! A fault of rank 1 in a step of a sharded model: `rank sharded-fault MOMENT [MS]`. Some faults come after that time.
//!
//! Rank 1 prints `FAULT ms` as it begins the fault, and every rank that gets an error `ERROR ms text`; times are
//! milliseconds since 1970, as in `rank fault`.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::thread;
use std::time::Duration;

use burn::nn::{Linear, LinearConfig};
use burn::optim::SgdConfig;
use burn::prelude::*;
use burn_ddp::prelude::*;
use burn_ddp_tests::awkward::panicking_op::{armed, trap};

use super::fault::{print_error, print_fault, suffer};

/// Time after which rank 1 commits its fault while the other ranks, or rank 1 itself, wait in a call.
const FAULT_AFTER: Duration = Duration::from_millis(300);
/// Time by which rank 0 is late for a call in which rank 1 dies.
const LATE: Duration = Duration::from_secs(3);

#[derive(Module, Debug)]
struct Two {
    a: Linear,
    b: Linear,
}

fn die() {
    suffer("kill");
}

/// Kills this rank once `moment` has returned.
fn dies_after(moment: impl FnOnce() + Send + 'static) {
    thread::spawn(move || {
        moment();
        die();
    });
}

pub(crate) fn run(ddp: &Ddp) -> anyhow::Result<()> {
    let arg = |n: usize| std::env::args().nth(n).unwrap_or_default();
    let moment = arg(2);
    let device = ddp.device()?.autodiff();
    // Weights of 4 MiB take milliseconds to send.
    let width = if matches!(moment.as_str(), "in-scatter" | "any") { 1024 } else { 6 };
    let linear = || LinearConfig::new(width, width).with_bias(false).init(&device);
    let config = WrapConfig::new().with_sharding(Sharding::Parameters).with_sharding_above(1);
    let model = ddp.wrap_with(Two { a: linear(), b: linear() }, &config)?;
    ddp.optimizer(SgdConfig::new().init(), &model)?;
    let x = Tensor::<2>::ones([2, width], &device);
    ddp.backward(&model.b.forward(model.a.forward(x.clone())).sum(), &model)?;
    let dies_in_backward = ddp.rank() == 1 && moment == "scatter";
    std::panic::set_hook(Box::new(move |_| {
        if dies_in_backward {
            die();
        }
    }));
    ddp.barrier()?;
    let after = arg(3).parse().map_or(FAULT_AFTER, Duration::from_millis);
    let done = catch_unwind(AssertUnwindSafe(|| match moment.as_str() {
        "swaps" | "skips" | "evaluates" | "evaluates-alone" => differ(ddp, &model, &moment, x, after),
        "any" => {
            if ddp.rank() == 1 {
                dies_after(move || thread::sleep(after));
            }
            loop {
                ddp.backward(&model.b.forward(model.a.forward(x.clone())).sum(), &model)?;
            }
        }
        _ => step_with_a_death(ddp, &model, &moment, x),
    }));
    let error = match done {
        Ok(done) => done.err().map_or("none".into(), |e| e.to_string()),
        Err(panic) => panic.downcast_ref::<String>().cloned().unwrap_or_default(),
    };
    print_error(&error);
    Ok(())
}

/// Rank 1 dies
/// - `forward`, `backward`: before it gathers the second layer, in forward or again in backward;
/// - `agreement`: before the ranks agree on the gradients to reduce;
/// - `scatter`: between the scatters of two gradients;
/// - `in-forward`, `in-backward`: in these gathers, while it waits for rank 0, which comes late;
/// - `in-scatter`: in the scatter of the first gradient.
fn step_with_a_death(ddp: &Ddp, model: &Two, moment: &str, x: Tensor<2>) -> anyhow::Result<()> {
    let dies_at = |here: &str| {
        if ddp.rank() == 1 && moment == here {
            die();
        }
    };
    let waits_in = |call: &str| {
        if moment == call && ddp.rank() == 0 {
            thread::sleep(LATE);
        } else if moment == call && ddp.rank() == 1 {
            dies_after(|| thread::sleep(FAULT_AFTER));
        }
    };
    let y = model.a.forward(x);
    dies_at("forward");
    waits_in("in-forward");
    // The first layer's input needs no gradient, so its weight is not gathered again.
    let loss = match moment {
        "agreement" => y.sum(),
        _ => model.b.forward(trap(y)).sum(),
    };
    if moment == "scatter" && ddp.rank() == 1 {
        return Ok(armed(|| ddp.backward(&loss, model)).map(drop)?);
    }
    if moment == "in-scatter" && ddp.rank() == 1 {
        let (telemetry, before) = (ddp.telemetry(), ddp.telemetry().stats().bytes);
        // Bytes are counted as a reduction begins.
        dies_after(move || {
            while telemetry.stats().bytes == before {
                std::hint::spin_loop();
            }
        });
    }
    dies_at("backward");
    dies_at("agreement");
    waits_in("in-backward");
    ddp.backward(&loss, model)?;
    if moment == "in-scatter" {
        // Where the cores are busy, rank 1 may live through its backward for a moment.
        ddp.barrier()?;
    }
    Ok(())
}

/// Rank 1 makes other calls than the other ranks
/// - `swaps`: it reads the two layers in the other order;
/// - `skips`: it leaves out the second layer;
/// - `evaluates`: it evaluates the first layer while the others train it;
/// - `evaluates-alone`: it evaluates while the others wait in a barrier.
fn differ(ddp: &Ddp, model: &Two, what: &str, x: Tensor<2>, after: Duration) -> anyhow::Result<()> {
    if ddp.rank() != 1 {
        if what == "evaluates-alone" {
            return Ok(ddp.barrier()?);
        }
        return Ok(ddp.backward(&model.b.forward(model.a.forward(x)).sum(), model).map(drop)?);
    }
    // A rank that is still in the barrier would get the error there.
    thread::sleep(after);
    print_fault();
    match what {
        "swaps" => drop(model.a.forward(model.b.forward(x))),
        "skips" => drop(ddp.backward(&model.a.forward(x).sum(), model)?),
        _ => drop(model.valid().a.forward(x.inner())),
    }
    Ok(())
}
