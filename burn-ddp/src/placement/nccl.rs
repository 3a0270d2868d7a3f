//! Whether all ranks can let NCCL reduce, and its engine in its place.

use std::collections::HashSet;
use std::sync::Arc;

use burn::tensor::Device;
use burn_ddp_comm::engine::Fabric;
use burn_ddp_nccl::{Decision, HostMemory, NcclFabric, RankInfo, decide};

use super::{Here, refusal};
use crate::ddp::Ddp;
use crate::{Result, device};

/// What this rank's NCCL can do on the device, as [`agree`] reads it.
pub(super) fn here(ddp: &Ddp, device: &Device) -> Result<String, String> {
    let Some(ordinal) = device::cuda_ordinal(device) else {
        return Err("NCCL reduces on NVIDIA GPUs, so the model has to be on one: `Device::cuda`, or BURN_DEVICE=cuda"
            .to_owned());
    };
    if let Some(first) = ddp.nccl_ordinal().filter(|first| *first != ordinal) {
        return Err(format!(
            "its model is on CUDA device {ordinal}, but one that was wrapped before is on device {first}: NCCL has one device per rank"
        ));
    }
    serde_json::to_string(&RankInfo::here(ddp.rank(), ordinal)).map_err(|e| e.to_string())
}

/// Whether all use NCCL, and with how many GPUs; else why not. With `reduces` its engine is then that of later groups. *Collective*.
#[track_caller]
pub(super) fn agree(ddp: &Ddp, device: &Device, all: &[Here], reduces: bool) -> Result<Result<usize, String>> {
    if let Some(why) = refusal(all) {
        return Ok(Err(why));
    }
    let infos: Result<Vec<RankInfo>, String> =
        all.iter()
            .map(|here| match &here.nccl {
                Some(Ok(text)) => serde_json::from_str(text)
                    .map_err(|e| format!("a rank told what this one does not understand: {e}")),
                _ => Err("a rank told nothing of its NCCL".to_owned()),
            })
            .collect();
    let infos = match infos {
        Ok(infos) => infos,
        Err(why) => return Ok(Err(why)),
    };
    if let Decision::Host(why) = decide(&infos) {
        return Ok(Err(why));
    }
    let gpus: HashSet<&str> =
        infos.iter().filter_map(|info| info.device.as_ref().ok()).map(|d| d.uuid.as_str()).collect();
    if reduces
        && ddp.nccl_ordinal().is_none()
        && let Some(ordinal) = device::cuda_ordinal(device)
        && let Err(why) = install(ddp, ordinal)?
    {
        return Ok(Err(why));
    }
    Ok(Ok(gpus.len()))
}

/// Puts NCCL's engine in its place on all ranks, or on none. *Collective*.
#[track_caller]
fn install(ddp: &Ddp, ordinal: usize) -> Result<Result<(), String>> {
    let world = ddp.world();
    let set = world.set_fabric(|own, membership| {
        NcclFabric::load(own, membership, ordinal, HostMemory::ByHost).map(|fabric| Arc::new(fabric) as Arc<dyn Fabric>)
    });
    let mine = set.err().map(|error| error.to_string());
    let all = ddp.group().all_gather_object(&mine)?;
    match all.into_iter().enumerate().find_map(|(rank, why)| Some((rank, why?))) {
        None => {
            ddp.note_nccl(ordinal);
            Ok(Ok(()))
        }
        Some((rank, why)) => {
            world.set_fabric(|own, _| Ok::<_, burn_ddp_comm::Error>(own))?;
            Ok(Err(format!("rank {rank} could not start it: {why}")))
        }
    }
}
