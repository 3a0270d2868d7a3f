//! Stopping together.

use burn::tensor::TensorReadError;
use burn::train::train::WorkerFailure;
use burn::train::{Interrupter, TrainingError};
use burn_ddp_comm::ReduceOp;
use serde::{Deserialize, Serialize};

use crate::{Ddp, Error, Result};

/// Why a rank wants to stop.
#[derive(Clone, Debug, Serialize, Deserialize)]
enum Stop {
    /// Somebody asked for it, maybe with a reason.
    Asked(Option<String>),
    /// An error.
    Failed(String),
}

/// Whether training ends here, because of any rank. *Collective*. Ranks that did not know hear the reason: an error before a mere wish.
pub(super) fn agree_to_stop(ddp: &Ddp, interrupter: &Interrupter) -> bool {
    match ask(ddp, interrupter) {
        Ok(stop) => stop,
        Err(error) => {
            fail(ddp, interrupter, error);
            true
        }
    }
}

#[track_caller]
fn ask(ddp: &Ddp, interrupter: &Interrupter) -> Result<bool> {
    if ddp.world_size() == 1 {
        return Ok(interrupter.should_stop());
    }
    let mut stop = [u8::from(interrupter.should_stop())];
    ddp.group().all_reduce(&mut stop, ReduceOp::Max)?;
    if stop[0] == 0 {
        return Ok(false);
    }
    let own = interrupter.error().map(|error| Stop::Failed(error.to_string()));
    let own = own.or_else(|| interrupter.should_stop().then(|| Stop::Asked(interrupter.get_message())));
    let all = ddp.group().all_gather_object(&own)?;
    let failed = |(rank, stop): (usize, &Option<Stop>)| match stop {
        Some(Stop::Failed(reason)) => Some((rank, reason.clone())),
        _ => None,
    };
    if let Some((rank, reason)) = all.iter().enumerate().find_map(failed) {
        if interrupter.error().is_none() {
            interrupter.fail(failure(rank, Error::Rank { rank, reason }.to_string()));
        }
    } else if !interrupter.should_stop()
        && let Some(Stop::Asked(reason)) = all.into_iter().flatten().next()
    {
        interrupter.stop(reason.as_deref());
    }
    Ok(true)
}

/// Whether rank 0 says so. *Collective*; the value of other ranks does not count.
pub(super) fn as_rank_0_says(ddp: &Ddp, interrupter: &Interrupter, own: bool) -> bool {
    match ddp.group().broadcast_object(ddp.is_main().then_some(own), 0) {
        Ok(verdict) => verdict,
        Err(error) => {
            fail(ddp, interrupter, error.into());
            true
        }
    }
}

/// This rank cannot go on: it stops, and the others end with its reason instead of waiting.
pub(super) fn fail(ddp: &Ddp, interrupter: &Interrupter, error: Error) {
    // What came from a peer is known to all.
    if !matches!(error, Error::Comm(_)) {
        ddp.world().fail(error.to_string());
    }
    report(ddp, interrupter, &error);
}

/// Stops this rank's trainer with `error`.
pub(super) fn report(ddp: &Ddp, interrupter: &Interrupter, error: &Error) {
    interrupter.fail(failure(ddp.rank(), error.to_string()));
}

fn failure(rank: usize, message: String) -> TrainingError {
    TrainingError::Workers(vec![WorkerFailure { device_id: rank, message }])
}

/// `error` as metrics may return it.
pub(super) fn unreadable(error: impl Into<Error>) -> TensorReadError {
    burn::backend::ExecutionError::with_context(error.into().to_string()).into()
}
