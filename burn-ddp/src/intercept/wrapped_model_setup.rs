//! Construction of a wrapped model on its backend.

use std::sync::Arc;

use burn::backend::Dispatch;
use burn::tensor::{Device, Tensor};
use burn_ddp_comm::ProcessGroup;

use super::autodiff_nodes::DdpBackend;
use super::model_state::ModelOpening;
use super::synced_statistics::SyncedStatistics;
use super::wrapped_model::WrappedModel;
use crate::ddp::Ddp;
use crate::gradients::{ReducerSettings, Slot};
use crate::{Error, Result};

/// A model on `device` whose gradients are reduced in `group`. *Collective* over the group.
///
/// # Errors
///
/// An error if the ranks cannot make buffers, or this rank cannot start its communication thread.
pub(crate) fn open_model(
    ddp: Ddp,
    device: Device,
    group: ProcessGroup,
    slots: Vec<Slot>,
    settings: ReducerSettings,
    statistics: Option<SyncedStatistics>,
) -> Result<WrappedModel> {
    let (id, slots): (_, Arc<[Slot]>) = (group.id(), slots.into());
    let shared = (ddp.state().meter.clone(), ddp.state().stop.clone());
    let opening = ModelOpening::new(group, slots.clone(), settings, shared, statistics);
    // Dispatch knows the backend of a tensor.
    let tensor = Tensor::<1>::zeros([1], &device);
    drop(Dispatch::open_model(tensor.into_dispatch(), opening.clone()));
    let Some(state) = opening.take() else {
        return Err(Error::invalid(format!("{device:?} has no autodiff: make the model on `device.autodiff()`")));
    };
    Ok(WrappedModel::new(ddp, device, id, slots, &settings, state?))
}
