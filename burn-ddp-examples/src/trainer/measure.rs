//! Losses and accuracies over all ranks.

use anyhow::Result;
use burn::prelude::*;
use burn_ddp::data::EvalLoader;
use burn_ddp::{Ddp, ReduceOp};

/// The losses of an epoch's steps on this rank, read only when the epoch is over, so that no step waits for the device.
#[derive(Debug, Default)]
pub struct Losses {
    /// Mean loss of a step, `[1]`, and its items.
    steps: Vec<(Tensor<1>, usize)>,
}

impl Losses {
    /// Of a step: the mean loss of its `items`.
    pub fn push(&mut self, loss: &Tensor<1>, items: usize) {
        self.steps.push((loss.clone().inner(), items));
    }

    /// Sum of the losses of all items, and how many items these were. Waits for the device.
    pub fn total(self) -> (f64, u64) {
        let add = |(sum, count), (mean, items): (Tensor<1>, usize)| {
            (sum + mean.into_scalar::<f64>() * items as f64, count + items as u64)
        };
        self.steps.into_iter().fold((0.0, 0), add)
    }
}

/// Share of the test items that are recognised, over all ranks, 0–1. Each rank reads its share; none is read twice. `correct`
/// says how many of a batch's items were recognised, and how many it has. *Collective*.
///
/// # Errors
///
/// An item that cannot be read, a peer that failed.
pub fn accuracy<B: Send + 'static>(
    ddp: &Ddp,
    test: &EvalLoader<B>,
    mut correct: impl FnMut(B) -> (Tensor<1, Int>, usize),
) -> Result<f64> {
    let mut counts = [0, 0];
    for batch in test.iter() {
        let (recognised, items) = correct(batch?);
        counts[0] += recognised.into_scalar::<i64>();
        counts[1] += items as i64;
    }
    ddp.group().all_reduce(&mut counts, ReduceOp::Sum)?;
    Ok(counts[0] as f64 / counts[1] as f64)
}

/// How many of `labels`, `[items]`, have the highest of `logits`, `[items, classes]`.
pub fn recognised(logits: Tensor<2>, labels: Tensor<1, Int>) -> Tensor<1, Int> {
    let [items] = labels.dims();
    logits.argmax(1).reshape([items]).equal(labels).int().sum()
}
