//! Where the ranks of a job compute, and who reduces their gradients.

#[cfg(feature = "nccl")]
mod nccl;

use std::collections::BTreeMap;

use burn::tensor::Device;
use burn_ddp_comm::EngineChoice;
use serde::{Deserialize, Serialize};

use crate::ddp::Ddp;
use crate::{Error, Result, device};

/// What a rank tells the others of the device that its model is on.
#[derive(Clone, Debug, Serialize, Deserialize)]
struct Here {
    kind: String,
    /// What its NCCL can do there, or why it cannot; `None` if nobody wants to know. Text, since ranks may be built with other features.
    nccl: Option<Result<String, String>>,
}

/// Chooses who reduces the gradients of a model on `device`, if any are to be reduced, and tells the user: NCCL where all ranks
/// can, else the engines between hosts. Yields whether they are reduced on their device. *Collective*.
///
/// # Errors
///
/// On all ranks, if NCCL was asked for and some rank cannot.
#[track_caller]
pub(crate) fn choose(ddp: &Ddp, device: &Device, reduces: bool) -> Result<bool> {
    #[cfg(all(test, feature = "flex"))]
    if crate::intercept::fake_device::is_installed() {
        return Ok(reduces);
    }
    let wanted = ddp.world().options().engine;
    let asked = wanted == Some(EngineChoice::Nccl);
    let ask = asked || wanted.is_none() && reduces;
    let mine = Here { kind: device::kind(device), nccl: ask.then(|| nccl_here(ddp, device)) };
    let all = ddp.group().all_gather_object(&mine)?;
    let agreed = if ask { agree(ddp, device, &all, reduces)? } else { Err(String::new()) };
    let kinds: Vec<String> = all.iter().map(|here| here.kind.clone()).collect();
    match agreed {
        Ok(gpus) => {
            if ddp.is_main() && reduces {
                tracing::info!("engine: nccl ({}, {})", count(kinds.len(), "rank"), count(gpus, "GPU"));
            }
            Ok(reduces)
        }
        Err(why) if asked => Err(Error::Use(format!("BURN_DDP_ENGINE=nccl, but {why}"))),
        Err(why) => {
            if ddp.is_main() {
                let host = if kinds.iter().any(|kind| kind == "cuda") && !why.is_empty() {
                    format!("; gradients go through host memory: {why}")
                } else {
                    String::new()
                };
                tracing::info!("engine: {} ({}){host}", ddp.host_engine(), describe(&kinds));
            }
            Ok(false)
        }
    }
}

#[cfg(feature = "nccl")]
use nccl::{agree, here as nccl_here};

#[cfg(not(feature = "nccl"))]
fn nccl_here(_: &Ddp, _: &Device) -> Result<String, String> {
    Err("burn-ddp was built without its feature `nccl`: enable it".to_owned())
}

/// Whether all use NCCL, and with how many GPUs; else why not.
#[cfg(not(feature = "nccl"))]
fn agree(_: &Ddp, _: &Device, all: &[Here], _: bool) -> Result<Result<usize, String>> {
    Ok(Err(refusal(all).unwrap_or_default()))
}

/// Who cannot use NCCL first, and why.
fn refusal(all: &[Here]) -> Option<String> {
    all.iter().enumerate().find_map(|(rank, here)| match &here.nccl {
        Some(Err(why)) => Some(format!("rank {rank} ({}) cannot use it: {why}", here.kind)),
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
    fn what_was_asked_for_and_is_not_there_is_everybodys_error() {
        use burn::nn::LinearConfig;
        for world in [1, 2] {
            let options = burn_ddp_comm::Options { engine: Some(EngineChoice::Nccl), ..Default::default() };
            let errors = Ddp::spawn_with(world, options, |ddp| {
                let model = LinearConfig::new(1, 1).init(&Device::flex().autodiff());
                Ok(ddp.wrap(model).map(drop).unwrap_err().to_string())
            });
            for error in errors.unwrap() {
                for part in ["BURN_DDP_ENGINE=nccl", "rank 0 (flex)", "enable it"] {
                    assert!(error.contains(part), "{error}");
                }
            }
        }
    }
}
