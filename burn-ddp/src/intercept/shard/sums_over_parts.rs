//! Numbers of the parts of sharded parameters, summed over the ranks.

use std::sync::Arc;

use super::parts_and_wholes::ShardedParameter;
use crate::Result;

/// Sums what each rank passes for its parts of `parameters`, one number for each, in the order of ranks: all ranks get
/// the same bits. *Collective* if parameters are in parts.
pub(crate) fn sums_over_parts(parameters: &[ShardedParameter], own: &[f64]) -> Result<Vec<f64>> {
    let mut sums = own.to_vec();
    let mut left: Vec<usize> = (0..own.len()).collect();
    while let Some(&first) = left.first() {
        let model = &parameters[first].tap.model;
        let (of_model, others) = left.iter().partition(|nth| Arc::ptr_eq(&parameters[**nth].tap.model, model));
        left = others;
        let in_parts = |nth: &usize| model.is_sharded(parameters[*nth].tap.slot);
        let of_model: Vec<usize> = Vec::into_iter(of_model).filter(in_parts).collect();
        let Some(shards) = model.shards().filter(|_| !of_model.is_empty()) else { continue };
        let help = "clip by value, or unsharded";
        model.ddp.state().leaves.refuse_if_exact("the norm of sharded gradients, added by parts", help)?;
        let mine: Vec<f64> = of_model.iter().map(|nth| own[*nth]).collect();
        let all = shards.numbers(&mine)?;
        for (column, nth) in of_model.into_iter().enumerate() {
            sums[nth] = all.chunks_exact(mine.len()).map(|of_rank| of_rank[column]).sum();
        }
    }
    Ok(sums)
}
