//! The values of a model at one moment, and their hash.

use burn::module::Module;

use super::schema::Snapshot;
use crate::Result;
use crate::intercept::bypass;

/// SHA-256 of all parameters and buffers (paths, dtypes, shapes, bytes) in hexadecimal: equal on two ranks if and only
/// if their models are.
///
/// # Errors
///
/// [`Error::Invalid`](crate::Error::Invalid) if a value cannot be read from its device.
pub fn param_hash<M: Module>(model: &M) -> Result<String> {
    Ok(snapshot(model)?.hash())
}

/// Values of this moment: nothing pending, running statistics up to date.
pub(super) fn snapshot<M: Module>(model: &M) -> Result<Snapshot> {
    bypass(|| Snapshot::of(&model.valid()))
}
