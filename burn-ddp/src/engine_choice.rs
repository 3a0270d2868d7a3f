//! Choice of the engine that reduces the gradients of a model: NCCL if all ranks can use it, otherwise an engine that
//! works on host memory.

use std::collections::BTreeMap;

use burn::tensor::Device;
use burn_ddp_comm::EngineChoice;
use serde::{Deserialize, Serialize};

use crate::ddp::Ddp;
use crate::{Error, Result, device};

/// One rank's report on the device of its model.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct RankReport {
    kind: String,
    /// Abilities of the rank's NCCL on the device, or the reason why it cannot use NCCL; `None` if NCCL is no
    /// candidate. Both are text, since ranks may be built with different features.
    pub(crate) nccl: Option<Result<String, String>>,
}

/// Agreement of all ranks on the engine.
pub(crate) enum EngineAgreement {
    /// NCCL reduces gradients on their devices.
    #[cfg(feature = "nccl")]
    Nccl {
        /// Number of different GPUs.
        gpus: usize,
    },
    /// Gradients go through host memory. Holds the reason why NCCL does not reduce them, if NCCL was a candidate.
    Host(Option<String>),
}

/// True if the gradients of a model on `device` are reduced on their device; false if they go through host memory.
/// Rank 0 logs the choice. *Collective*.
///
/// `reduces` is false in a world of one rank that reduces nothing: then this only checks a demand for NCCL, and is
/// false.
///
/// # Errors
///
/// On all ranks, if `BURN_DDP_ENGINE` or the options demand NCCL and a rank cannot use it.
#[track_caller]
pub(crate) fn reduces_on_device(ddp: &Ddp, device: &Device, reduces: bool) -> Result<bool> {
    #[cfg(all(test, feature = "flex"))]
    if crate::intercept::fake_device::is_installed() {
        return Ok(reduces);
    }
    let wanted = ddp.world().options().engine;
    let required = wanted == Some(EngineChoice::External("nccl"));
    let candidate = required || wanted.is_none() && reduces;
    let mine = RankReport {
        kind: device::kind(device),
        nccl: candidate.then(|| may_be_plain(ddp).and_then(|()| nccl_report(ddp, device))),
    };
    let reports = ddp.group().all_gather_object(&mine)?;
    let agreement = if candidate { agree(ddp, device, &reports, reduces)? } else { EngineAgreement::Host(None) };
    let kinds: Vec<String> = reports.iter().map(|report| report.kind.clone()).collect();
    match agreement {
        #[cfg(feature = "nccl")]
        EngineAgreement::Nccl { gpus } => {
            if ddp.is_main() && reduces {
                tracing::info!("engine: nccl ({}, {})", count(kinds.len(), "rank"), count(gpus, "GPU"));
            }
            Ok(reduces)
        }
        EngineAgreement::Host(why) if required => {
            Err(Error::invalid(format!("the engine nccl was demanded, but {}", why.unwrap_or_default())))
        }
        EngineAgreement::Host(why) => {
            if ddp.is_main() {
                let has_cuda = kinds.iter().any(|kind| kind == "cuda");
                let why = why.filter(|_| has_cuda);
                let why = why.map_or_else(String::new, |why| format!("; gradients go through host memory: {why}"));
                tracing::info!("engine: {} ({}){why}", ddp.state().host_engine, describe(&kinds));
            }
            Ok(false)
        }
    }
}

/// Refuses NCCL, whose connections are not encrypted, if data between machines must be encrypted.
fn may_be_plain(ddp: &Ddp) -> Result<(), String> {
    let encrypt_data = ddp.world().options().encrypt_data;
    match encrypt_data && ddp.world().machines().count() > 1 {
        true => Err("BURN_DDP_ENCRYPT=data, and NCCL does not encrypt what it sends between machines".to_owned()),
        false => Ok(()),
    }
}

#[cfg(feature = "nccl")]
use crate::nccl::{agree, report as nccl_report};

#[cfg(not(feature = "nccl"))]
fn nccl_report(_: &Ddp, _: &Device) -> Result<String, String> {
    Err("burn-ddp was built without its feature `nccl`: enable it".to_owned())
}

#[cfg(not(feature = "nccl"))]
fn agree(ddp: &Ddp, _: &Device, reports: &[RankReport], _: bool) -> Result<EngineAgreement> {
    Ok(EngineAgreement::Host(refusal(reports, ddp.group().ranks())))
}

/// The first rank that cannot use NCCL, and why. `ranks[n]` sent the n-th report.
pub(crate) fn refusal(reports: &[RankReport], ranks: &[usize]) -> Option<String> {
    ranks.iter().zip(reports).find_map(|(rank, report)| match &report.nccl {
        Some(Err(why)) => Some(format!("rank {rank} ({}) cannot use it: {why}", report.kind)),
        _ => None,
    })
}

/// `4 ranks: 3 × cuda, 1 × flex`
fn describe(kinds: &[String]) -> String {
    let mut counts = BTreeMap::new();
    kinds.iter().for_each(|kind| *counts.entry(kind.as_str()).or_insert(0) += 1);
    let of_each: Vec<_> = counts.iter().map(|(kind, count)| format!("{count} × {kind}")).collect();
    format!("{}: {}", count(kinds.len(), "rank"), of_each.join(", "))
}

fn count(n: usize, what: &str) -> String {
    format!("{n} {what}{}", if n == 1 { "" } else { "s" })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kinds_are_counted() {
        let kinds = ["flex", "cuda", "cuda"].map(String::from);
        assert_eq!(describe(&kinds), "3 ranks: 2 × cuda, 1 × flex");
        assert_eq!(describe(&kinds[..1]), "1 rank: 1 × flex");
    }

    #[cfg(all(feature = "flex", not(feature = "nccl")))]
    #[test]
    fn a_missing_engine_that_was_asked_for_is_an_error_on_all_ranks() {
        use burn::nn::LinearConfig;
        for world in [1, 2] {
            let options =
                burn_ddp_comm::WorldOptions { engine: Some(EngineChoice::External("nccl")), ..Default::default() };
            let errors = Ddp::spawn_with(world, options, |ddp| {
                let model = LinearConfig::new(1, 1).init(&Device::flex().autodiff());
                Ok(ddp.wrap(model).map(drop).unwrap_err().to_string())
            });
            for error in errors.unwrap() {
                for part in ["engine nccl was demanded", "rank 0 (flex)", "enable it"] {
                    assert!(error.contains(part), "{error}");
                }
            }
        }
    }
}
