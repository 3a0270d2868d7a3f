//! `param_hash`: a hash of all values of a model at this moment.

use burn::module::Module;
use sha2::{Digest, Sha256};

use super::values::values;
use crate::Result;
use crate::intercept::tell_peers_of_parts;

/// SHA-256 of all parameters and buffers (paths, dtypes, shapes, bytes) in hexadecimal: equal on two ranks if and only
/// if their models are. Costs no communication, unless parameters are [sharded](crate::WrapConfig::with_sharding): then
/// it is *collective*, with one all-gather per sharded parameter, and the hash is that of the whole parameters.
///
/// # Errors
///
/// [`Error::Sharding`](crate::Error::Sharding) or [`Error::Comm`](crate::Error::Comm) if sharded parameters cannot be
/// gathered.
/// [`Error::Invalid`](crate::Error::Invalid) if a value cannot be read from its device.
///
/// # Example
///
/// ```
/// # use burn::nn::LinearConfig;
/// # use burn_ddp::prelude::*;
/// let hashes = Ddp::spawn(2, |ddp| {
///     let model = LinearConfig::new(2, 1).init(&ddp.device()?.autodiff());
///     let before = param_hash(&model)?; // each rank drew values of its own
///     Ok((before, param_hash(&ddp.wrap(model)?)?))
/// })?;
/// assert_ne!(hashes[0].0, hashes[1].0);
/// assert_eq!(hashes[0].1, hashes[1].1);
/// # Ok::<(), burn_ddp::Error>(())
/// ```
pub fn param_hash<M: Module>(model: &M) -> Result<String> {
    let (schema, values) = values(model).inspect_err(|e| tell_peers_of_parts(model, e))?;
    let mut sha = Sha256::new();
    for (entry, value) in schema.entries.iter().zip(values) {
        sha.update((entry.path.len() as u64).to_le_bytes());
        sha.update(&entry.path);
        sha.update(&entry.dtype);
        sha.update((entry.dims.len() as u64).to_le_bytes());
        for d in &entry.dims {
            sha.update((*d as u64).to_le_bytes());
        }
        sha.update(value.whole()?.as_bytes());
    }
    Ok(sha.finalize().iter().map(|b| format!("{b:02x}")).collect())
}
