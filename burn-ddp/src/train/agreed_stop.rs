//! Stopping training on all ranks after the same step, with the same reason.

use burn::tensor::TensorReadError;
use burn::train::train::WorkerFailure;
use burn::train::{Interrupter, TrainingError};
use burn_ddp_comm::ReduceOp;
use serde::{Deserialize, Serialize};

use crate::{Ddp, Error, Result};

/// A rank's reason to stop.
#[derive(Clone, Debug, Serialize, Deserialize)]
enum Stop {
    /// An interruption, with the message of `Interrupter::stop` if it has one.
    Interrupted(Option<String>),
    /// An error.
    Failed(String),
}

/// True if any rank wants to end the training now. *Collective*. The `interrupter` of every rank then has the reason:
/// the first rank's error, or else the first interruption. If the training `saves`, a wish to stop and save is agreed
/// on with it, and is no reason: see [`Ddp::stop_requested`].
pub(super) fn agree_to_stop(ddp: &Ddp, interrupter: &Interrupter, saves: bool) -> bool {
    match ask(ddp, interrupter, saves) {
        Ok(stop) => stop,
        Err(error) => {
            fail(ddp, interrupter, error);
            true
        }
    }
}

#[track_caller]
fn ask(ddp: &Ddp, interrupter: &Interrupter, saves: bool) -> Result<bool> {
    let wish = &ddp.state().stop;
    let mut stop = [interrupter.should_stop(), saves && wish.is_wished()].map(u8::from);
    ddp.group().all_reduce(&mut stop, ReduceOp::Max)?;
    wish.agree(stop[1] != 0);
    if ddp.world_size() == 1 {
        return Ok(interrupter.should_stop());
    }
    if stop[0] == 0 {
        return Ok(false);
    }
    let own = interrupter.error().map(|error| Stop::Failed(error.to_string()));
    let own = own.or_else(|| interrupter.should_stop().then(|| Stop::Interrupted(interrupter.get_message())));
    let all = ddp.group().all_gather_object(&own)?;
    let failed = |(nth, stop): (usize, &Option<Stop>)| match stop {
        Some(Stop::Failed(reason)) => Some((nth, reason.clone())),
        _ => None,
    };
    if let Some((nth, reason)) = all.iter().enumerate().find_map(failed) {
        let rank = ddp.group().ranks()[nth];
        if interrupter.error().is_none() {
            interrupter.fail(failure(rank, Error::Rank { rank, reason }.to_string()));
        }
    } else if !interrupter.should_stop()
        && let Some(Stop::Interrupted(reason)) = all.into_iter().flatten().next()
    {
        interrupter.stop(reason.as_deref());
    }
    Ok(true)
}

/// Returns rank 0's value of `own` on every rank; true after an error. *Collective*.
pub(super) fn decide_on_main(ddp: &Ddp, interrupter: &Interrupter, own: bool) -> bool {
    match ddp.group().broadcast_object(ddp.is_main().then_some(own), 0) {
        Ok(verdict) => verdict,
        Err(error) => {
            fail(ddp, interrupter, error.into());
            true
        }
    }
}

/// Stops this rank with `error`, and ends the world with it, so that the other ranks do not wait.
pub(super) fn fail(ddp: &Ddp, interrupter: &Interrupter, error: Error) {
    // All ranks know the errors of peers already.
    if !matches!(error, Error::Comm(_)) {
        ddp.world().fail(error.to_string());
    }
    report(ddp, interrupter, &error);
}

/// Stops this rank's trainer with `error`.
pub(super) fn report(ddp: &Ddp, interrupter: &Interrupter, error: &Error) {
    interrupter.fail(failure(ddp.world().rank(), error.to_string()));
}

fn failure(rank: usize, message: String) -> TrainingError {
    TrainingError::Workers(vec![WorkerFailure { device_id: rank, message }])
}

/// `error` in the type that metrics return.
pub(super) fn metric_error(error: impl Into<Error>) -> TensorReadError {
    burn::backend::ExecutionError::with_context(error.into().to_string()).into()
}
