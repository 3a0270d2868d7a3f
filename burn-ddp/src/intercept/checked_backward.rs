//! A backward that returns failures as errors, and looks at every leaf at its end.

use std::sync::Arc;

use burn::module::Module;
use burn::tensor::{Gradients, Tensor};

use super::averaged_gradient::settle;
use super::backward_failure::tell_peers;
use super::model_walk::note_values;
use super::tap_and_replica_checks::find_past_tap;
use super::wrapped_model::WrappedModel;
use crate::ddp::Ddp;
use crate::{Error, Result};

/// Runs `loss.backward()` for [`Ddp::backward`], where `model` is `wrapped`.
pub(crate) fn checked_backward<const D: usize, M: Module>(
    wrapped: &Arc<WrappedModel>,
    loss: &Tensor<D>,
    model: &M,
) -> Result<Gradients> {
    if wrapped.compares() {
        note_values(model, wrapped);
    }
    let (mut gradients, reached) = wrapped.capture(|| loss.backward())?;
    if !reached {
        let reason = "the loss depends on no parameter of the wrapped model, or only on parameters without a tap \
        (frozen, or replaced after `wrap`)";
        return Err(refused(&wrapped.ddp, reason.into()));
    }
    match find_past_tap(model, wrapped, &gradients).inspect_err(|e| tell_peers(&wrapped.ddp, e))? {
        None => {
            settle(model, wrapped, &mut gradients);
            Ok(gradients)
        }
        Some(reason) => Err(refused(&wrapped.ddp, reason)),
    }
}

/// Error of a backward that cannot deliver averages. The other ranks get it, too.
pub(crate) fn refused(ddp: &Ddp, reason: String) -> Error {
    ddp.world().fail(format!("backward: {reason}"));
    Error::Backward { rank: ddp.world().rank(), reason }
}
