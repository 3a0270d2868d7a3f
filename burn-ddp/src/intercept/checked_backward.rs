//! `Ddp::backward`: a backward whose failures are errors, and after which every leaf is looked at.

use burn::module::Module;
use burn::tensor::{Gradients, Tensor};

use super::checks::bypassed;
use super::model_walk::{find, note_values};
use crate::ddp::Ddp;
use crate::{Error, Result};

/// Runs `loss.backward()` for [`Ddp::backward`].
pub(crate) fn checked_backward<const D: usize, M: Module>(ddp: &Ddp, loss: &Tensor<D>, model: &M) -> Result<Gradients> {
    let fail = |reason: String| {
        ddp.world().fail(format!("backward: {reason}"));
        Err(Error::Backward { rank: ddp.rank(), reason })
    };
    if !loss.is_tracked() {
        return fail(
            "the loss depends on no parameter (a frozen model, or a loss computed from detached values)".to_string(),
        );
    }
    let wrapped = find(model);
    let [wrapped] = wrapped.as_slice() else {
        if wrapped.is_empty() && ddp.world_size() == 1 {
            return Ok(loss.backward());
        }
        return Err(Error::Use(match wrapped.len() {
            0 => "the model is not wrapped: use what `ddp.wrap(model)` returned".into(),
            n => format!("the model consists of {n} wrapped parts: wrap it as a whole"),
        }));
    };
    if wrapped.compares() {
        note_values(model, wrapped);
    }
    let (gradients, reached) = wrapped.capture(|| loss.backward())?;
    if !reached {
        return fail(
            "the loss depends on no parameter of the wrapped model, or on none that it tapped (frozen or replaced after `wrap`?)".to_string(),
        );
    }
    match bypassed(model, wrapped, &gradients)? {
        Some(reason) => fail(reason),
        None => Ok(gradients),
    }
}
