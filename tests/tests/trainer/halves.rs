//! Burn's trainer in f16: a step that overflows moves neither optimizer nor schedule, on any rank.

use std::cell::Cell;

use burn_ddp::{LossScaling, Precision};

use super::*;

thread_local!(static STEPS: Cell<u64> = const { Cell::new(0) });

/// Counts a step of the optimizer on this thread.
pub(super) fn count_step() {
    STEPS.set(STEPS.get() + 1);
}

fn job(initial_scale_power: u32, sharding: Sharding) -> Job {
    let scaling = LossScaling { initial_scale_power, ..LossScaling::default() };
    let config = WrapConfig::new().with_compute_dtype(Precision::F16).with_loss_scaling(scaling);
    Job { sharding: Some(config.with_sharding(sharding).with_sharding_above(1)), ..Job::new() }
}

fn half(model: Net) -> Net {
    Net { halves: true, ..model }
}

#[test]
fn f16_follows_f32_and_shards_have_its_bits() {
    let model = model();
    for accumulation in [None, Some(2)] {
        let whole = Job { accumulation, ..Job::new() }.together(2, &model);
        let of = |sharding| Job { accumulation, ..job(8, sharding) }.together(2, &half(model.clone()));
        let (f16, sharded) = (of(Sharding::Off), of(Sharding::Parameters));
        assert_eq!(f16.hash, sharded.hash, "{accumulation:?}");
        let d = distance(&f16.values, &whole.values);
        assert!(d > 0.0 && d < 1e-2, "{accumulation:?}: {d:e}");
    }
}

#[test]
fn skipped_steps_are_no_steps() {
    let model = half(model());
    let steps = Ddp::spawn(2, |ddp| {
        STEPS.set(0);
        let outcome = job(30, Sharding::Off).on_rank(&ddp, model.clone(), Path::new("unused"), |t| t)?;
        assert_eq!(outcome.error, None);
        let stats = ddp.telemetry().stats();
        assert_eq!(STEPS.get(), stats.steps - stats.skipped);
        Ok((outcome.hash, stats.steps, stats.skipped))
    })
    .unwrap();
    assert_eq!(steps[0], steps[1]);
    let (_, all, skipped) = steps[0];
    assert!(skipped > 5 && skipped < all, "{skipped} of {all}");
}

#[test]
fn a_loss_without_its_scale_is_an_error() {
    let model = Net { forgets_scale: true, ..half(model()) };
    let errors =
        Ddp::spawn(2, |ddp| Ok(job(8, Sharding::Off).on_rank(&ddp, model.clone(), Path::new("unused"), |t| t)?.error));
    for error in errors.unwrap() {
        let error = error.expect("an error");
        assert!(error.contains("scale_loss(&loss).backward()"), "{error}");
    }
}
