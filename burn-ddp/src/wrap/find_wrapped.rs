//! The wrapped models in a module, and the handle that each belongs to.

use std::sync::Arc;

use burn::module::Module;
use burn_ddp_comm::ProcessGroup;

use crate::agreement::list_ranks;
use crate::intercept::{self, WrappedModel};
use crate::{Error, Result};

/// The wrapped models in `model`: none, one, or several if it was put together from wrapped parts.
///
/// # Errors
///
/// [`Error::Invalid`] if another handle than that of `group` wrapped one of them.
pub(crate) fn wrapped_in<M: Module>(group: &ProcessGroup, model: &M) -> Result<Vec<Arc<WrappedModel>>> {
    let wrapped = intercept::find(model);
    match wrapped.iter().map(|wrapped| wrapped.ddp.group()).find(|of| !std::ptr::eq(*of, group)) {
        None => Ok(wrapped),
        Some(of) => Err(Error::invalid(format!(
            "the model was wrapped by the handle of {} of the job, but this method is called on {} of {}: call it on \
             the handle that wrapped the model",
            list_ranks(of.ranks()),
            if of.ranks() == group.ranks() { "another handle" } else { "the handle" },
            list_ranks(group.ranks())
        ))),
    }
}

/// The only one of the `wrapped` models in a module. If there is none, the error asks the caller to `do_with` the
/// wrapped model.
pub(crate) fn only<'a>(wrapped: &'a [Arc<WrappedModel>], do_with: &str) -> Result<&'a Arc<WrappedModel>> {
    match wrapped {
        [wrapped] => Ok(wrapped),
        [] => Err(Error::invalid(format!("the model is not wrapped: {do_with} what `ddp.wrap(model)` returned"))),
        several => {
            Err(Error::invalid(format!("the model consists of {} wrapped parts: wrap it as a whole", several.len())))
        }
    }
}
