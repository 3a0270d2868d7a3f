//! What one rank finds out becomes what all ranks know, so that all go on alike.

use burn_ddp_comm::ProcessGroup;

use crate::model::schema::{Entry, difference, digest};
use crate::{Error, Result};

/// This rank's result, if no rank failed to do `what`. *Collective*.
///
/// # Errors
///
/// This rank's own error, else [`Error::Use`] with that of the first rank that has one.
#[track_caller]
pub(crate) fn on_outcome<T>(group: &ProcessGroup, what: &str, mine: Result<T>) -> Result<T> {
    let outcomes = group.all_gather_object(&mine.as_ref().err().map(ToString::to_string))?;
    let mine = mine?;
    match outcomes.into_iter().enumerate().find_map(|(rank, reason)| Some((rank, reason?))) {
        None => Ok(mine),
        Some((rank, reason)) => Err(Error::Use(format!("rank {rank} cannot {what}: {reason}"))),
    }
}

/// Whether the models of all ranks have the same parameters and buffers. *Collective*.
///
/// # Errors
///
/// [`Error::ModelsDiffer`] with the first difference, on every rank.
#[track_caller]
pub(crate) fn on_model(group: &ProcessGroup, entries: &[Entry]) -> Result<()> {
    let digests = group.all_gather_object(&digest(entries))?;
    if digests.iter().all(|digest| *digest == digests[0]) {
        return Ok(());
    }
    let models = group.all_gather_object(&entries.to_vec())?;
    Err(Error::ModelsDiffer(difference(&models).unwrap_or_else(|| "their digests differ".into())))
}
