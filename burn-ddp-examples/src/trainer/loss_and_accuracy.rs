//! Losses and accuracies over all ranks.

use anyhow::{Context, Result};
use burn::prelude::*;
use burn::tensor::DType;
use burn_ddp::data::EvalLoader;
use burn_ddp::{Ddp, ExactSums, ReduceOp};

/// `x` in f32 if it is narrower, for losses and running statistics.
pub(crate) fn widened<const D: usize>(x: Tensor<D>) -> Tensor<D> {
    match x.dtype() {
        DType::F16 | DType::BF16 => x.cast(DType::F32),
        _ => x,
    }
}

/// Losses of this rank's steps. They stay on the device and are read together, so that no step waits for the device.
#[derive(Debug, Default)]
pub(crate) struct Losses {
    /// Mean loss of a step, `[1]`, and its items.
    steps: Vec<(Tensor<1>, usize)>,
}

impl Losses {
    /// Adds a step: the mean loss of its `items`.
    pub(crate) fn push(&mut self, loss: &Tensor<1>, items: usize) {
        self.steps.push((loss.clone().inner(), items));
    }

    /// Adds the losses of all items to `sum`, and returns their number. Waits for the device.
    pub(crate) fn add_to(self, sum: &mut ExactSums) -> u64 {
        let add = |(mean, items): (Tensor<1>, usize)| {
            sum.add(mean.into_scalar::<f64>(), items as f64);
            items as u64
        };
        self.steps.into_iter().map(add).sum()
    }
}

/// Share of the test items that are recognised, over all ranks, 0–1. Each rank reads its own share, so every item
/// counts once. `correct` returns the number of recognised items of a batch and the number of all its items.
/// `collective`: true if `correct` is collective, as with a sharded model; a rank with fewer batches than another then
/// calls it again with its last batch, and ignores the result. Otherwise `stops` may end the work of this rank early,
/// and the ranks agree on that. *Collective*.
pub(crate) fn accuracy<B: Clone + Send + 'static>(
    ddp: &Ddp,
    test: &EvalLoader<B>,
    collective: bool,
    stops: impl Fn() -> bool,
    mut correct: impl FnMut(B) -> (Tensor<1, Int>, usize),
) -> Result<f64> {
    let mut most = [test.len() as i64];
    if collective {
        ddp.group().all_reduce(&mut most, ReduceOp::Max)?;
    }
    let mut counts = [0_i64, 0];
    let mut last = None;
    for batch in test.iter() {
        if !collective && stops() {
            break;
        }
        let batch = batch?;
        last = collective.then(|| batch.clone());
        let (recognised, items) = correct(batch);
        counts[0] += recognised.into_scalar::<i64>();
        counts[1] += items as i64;
    }
    for _ in test.len() as i64..most[0] {
        correct(last.clone().context("this rank has no test items")?);
    }
    Ok(ddp.sum(counts[0])? as f64 / ddp.sum(counts[1])? as f64)
}

/// Number of items whose label, in `labels` `[items]`, has the highest of its `logits` `[items, classes]`.
pub(crate) fn recognised(logits: Tensor<2>, labels: Tensor<1, Int>) -> Tensor<1, Int> {
    let [items] = labels.dims();
    logits.argmax(1).reshape([items]).equal(labels).int().sum()
}
