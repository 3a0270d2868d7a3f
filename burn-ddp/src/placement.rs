//! Where the ranks of a job compute.

use std::collections::BTreeMap;

use burn::tensor::Device;

use crate::ddp::Ddp;
use crate::{Result, device};

/// Tells the user what meets in a wrapped model: the engine, and the devices of the ranks. *Collective*.
#[track_caller]
pub(crate) fn tell(ddp: &Ddp, device: &Device) -> Result<()> {
    let kinds = ddp.group().all_gather_object(&device::kind(device))?;
    if ddp.is_main() {
        tracing::info!("engine: {} ({})", ddp.engine(), describe(&kinds));
    }
    Ok(())
}

/// `4 ranks: 3 × cuda, 1 × flex`
fn describe(kinds: &[String]) -> String {
    let mut counts = BTreeMap::new();
    kinds.iter().for_each(|kind| *counts.entry(kind.as_str()).or_insert(0) += 1);
    let of_each: Vec<_> = counts.iter().map(|(kind, count)| format!("{count} × {kind}")).collect();
    let ranks = if kinds.len() == 1 { "rank" } else { "ranks" };
    format!("{} {ranks}: {}", kinds.len(), of_each.join(", "))
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
}
