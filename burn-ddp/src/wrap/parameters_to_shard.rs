//! The parameters of a model that `wrap` would shard, for Burn's trainer.

use std::collections::HashSet;

use burn::module::{Module, ParamId};

use super::inspect_model::{Inspected, inspect};
use super::{WrapConfig, treatment};
use crate::Result;
use crate::ddp::Ddp;
use crate::model::schema::Entry;

/// A parameter that the settings divide.
pub(crate) struct DividedParameter {
    pub(crate) path: String,
    pub(crate) id: ParamId,
    pub(crate) dims: Vec<usize>,
    /// True if it requires a gradient.
    pub(crate) trains: bool,
}

/// The parameters of `model` that `config` divides, also in a world of 1. Not collective.
///
/// # Errors
///
/// Those of `wrap_with` that a rank sees alone.
pub(crate) fn parameters_to_divide<M: Module>(
    ddp: &Ddp,
    model: &M,
    config: &WrapConfig,
) -> Result<Vec<DividedParameter>> {
    let Inspected { schema, first_clone, is_buffer, is_local, bases, .. } = inspect(model, config, None)?;
    let divides = |entry: &Entry| config.divides(&entry.dims, ddp.world_size()) && !bases.contains(&entry.path);
    let (slots, _) = treatment::slots(&schema, &first_clone, &is_buffer, &is_local, divides);
    let divided: HashSet<String> = slots.into_iter().filter(|slot| slot.sharded).map(|slot| slot.path).collect();
    let entries = schema.entries.into_iter().zip(schema.ids).filter(|(entry, _)| divided.contains(&entry.path));
    let divided = |(Entry { path, dims, trainable, .. }, id)| DividedParameter { path, id, dims, trains: trainable };
    Ok(entries.map(divided).collect())
}
