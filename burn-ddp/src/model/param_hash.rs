//! The values of a model at one moment, and their hash.

use burn::module::Module;

use super::schema::Snapshot;
use crate::Result;
use crate::intercept::{bypass, whole};

/// SHA-256 of all parameters and buffers (paths, dtypes, shapes, bytes) in hexadecimal: equal on two ranks if and only
/// if their models are. *Collective* if parameters are [sharded](crate::WrapConfig::with_sharding): the hash is that of
/// the whole ones.
///
/// # Errors
///
/// [`Error::Sharding`](crate::Error::Sharding) or [`Error::Comm`](crate::Error::Comm) if sharded parameters cannot be
/// gathered.
/// [`Error::Invalid`](crate::Error::Invalid) if a value cannot be read from its device.
pub fn param_hash<M: Module>(model: &M) -> Result<String> {
    let model = whole(bypass(|| model.valid()), true)?;
    Ok(bypass(|| Snapshot::of(&model))?.hash())
}

/// Values of this moment: nothing pending, running statistics up to date.
pub(super) fn snapshot<M: Module>(model: &M) -> Result<Snapshot> {
    bypass(|| Snapshot::of(&model.valid()))
}
