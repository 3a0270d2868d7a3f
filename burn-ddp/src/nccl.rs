//! NCCL as the engine of a job: the ranks' agreement that all can use it, and its installation.

use std::collections::HashSet;
use std::sync::Arc;

use burn::tensor::Device;
use burn_ddp_comm::engine::Fabric;
use burn_ddp_nccl::{Decision, HostMemory, NcclFabric, RankInfo, decide};

use crate::ddp::Ddp;
use crate::engine_choice::{EngineAgreement, RankReport, refusal};
use crate::{Result, device};

/// Abilities of this rank's NCCL on the device, in the form that [`agree`] reads; or the reason why NCCL cannot reduce
/// on the device.
pub(crate) fn report(ddp: &Ddp, device: &Device) -> Result<String, String> {
    let Some(ordinal) = device::cuda_ordinal(device) else {
        return Err("NCCL reduces on NVIDIA GPUs, so the model has to be on one: `Device::cuda`, or BURN_DEVICE=cuda"
            .to_owned());
    };
    if let Some(first) = ddp.state().nccl_device().filter(|first| *first != ordinal) {
        return Err(format!(
            "its model is on CUDA device {ordinal}, but an earlier wrapped model is on device {first}: NCCL has one \
             device per rank"
        ));
    }
    serde_json::to_string(&RankInfo::here(ddp.world().rank(), ordinal)).map_err(|e| e.to_string())
}

/// Chooses NCCL if all ranks can use it, the same on all ranks. With `reduces`, NCCL is then the engine of later
/// groups. *Collective*.
#[track_caller]
pub(crate) fn agree(ddp: &Ddp, device: &Device, reports: &[RankReport], reduces: bool) -> Result<EngineAgreement> {
    let infos = match rank_infos(reports, ddp.group().ranks()) {
        Ok(infos) => infos,
        Err(why) => return Ok(EngineAgreement::Host(Some(why))),
    };
    if let Decision::Host(why) = decide(&infos) {
        return Ok(EngineAgreement::Host(Some(why)));
    }
    let installed = ddp.state().nccl_device().is_some();
    if ddp.state().is_part() && !installed {
        let why = "NCCL starts when the handle of the whole job wraps a model, and it has not wrapped any yet";
        return Ok(EngineAgreement::Host(Some(why.to_owned())));
    }
    if reduces
        && !installed
        && let Some(ordinal) = device::cuda_ordinal(device)
        && let Some(why) = install(ddp, ordinal)?
    {
        return Ok(EngineAgreement::Host(Some(why)));
    }
    let gpus: HashSet<&str> =
        infos.iter().filter_map(|info| info.device.as_ref().ok()).map(|d| d.uuid.as_str()).collect();
    Ok(EngineAgreement::Nccl { gpus: gpus.len() })
}

/// The reports of all ranks if all of them have NCCL; otherwise the reason of the first rank that does not.
fn rank_infos(reports: &[RankReport], ranks: &[usize]) -> Result<Vec<RankInfo>, String> {
    if let Some(why) = refusal(reports, ranks) {
        return Err(why);
    }
    let info = |report: &RankReport| match &report.nccl {
        Some(Ok(text)) => serde_json::from_str::<RankInfo>(text)
            .map_err(|e| format!("cannot parse a rank's NCCL report (different burn-ddp version?): {e}")),
        _ => Err("a rank sent no NCCL report (different burn-ddp version?)".to_owned()),
    };
    reports.iter().map(info).collect()
}

/// Installs NCCL's engine on all ranks, or, if a rank fails, on none; then returns the reason. *Collective*.
#[track_caller]
fn install(ddp: &Ddp, ordinal: usize) -> Result<Option<String>> {
    let world = ddp.world();
    let set = world.set_fabric(|own, membership| {
        NcclFabric::load(own, membership, ordinal, HostMemory::ByHost).map(|fabric| Arc::new(fabric) as Arc<dyn Fabric>)
    });
    let mine = set.err().map(|error| error.to_string());
    let all = ddp.group().all_gather_object(&mine)?;
    match ddp.group().ranks().iter().zip(all).find_map(|(rank, why)| Some((rank, why?))) {
        None => {
            ddp.state().set_nccl_device(ordinal);
            Ok(None)
        }
        Some((rank, why)) => {
            world.set_fabric(|own, _| Ok::<_, burn_ddp_comm::Error>(own))?;
            Ok(Some(format!("rank {rank} could not start it: {why}")))
        }
    }
}
