//! Untracked tensors of growing depth, which put the hook of a read at about the depth of the layer that reads.

use std::collections::BTreeMap;

use burn::backend::autodiff::Autodiff;
use burn::backend::autodiff::checkpoint::base::Checkpointer;
use burn::backend::autodiff::checkpoint::strategy::CheckpointStrategy;
use burn::backend::autodiff::grads::Gradients;
use burn::backend::autodiff::ops::{Backward, NodeGuard, Ops, OpsKind};
use burn::backend::tensor::FloatTensor;
use burn::backend::{AutodiffBackend, Backend, TensorMetadata};
use burn::tensor::{DType, Shape};

/// Depth that each read of a parameter adds to the ladder: about what a layer adds to the graph.
const RUNGS_PER_READ: usize = 4;
/// Reads of whole parameters after so many hang on one rung: Burn allocates memory for each depth in each backward.
const MAX_READS: usize = 16384;
/// Reads with a rung of their own. Burn looks up each of its nodes among all live ones, so rungs are few: of later
/// reads of whole parameters, those that differ by less than this fraction share one.
const OWN_RUNGS: usize = 32;

/// A tensor of the autodiff backend over `B`, whatever its checkpointing strategy.
pub(crate) type AutodiffTensor<B> = FloatTensor<Autodiff<B>>;

/// The rungs of one wrapped model.
pub(super) struct Ladder<B: Backend> {
    /// Rungs that hooks hang on, by the number of the first read of each.
    rungs: BTreeMap<usize, AutodiffTensor<B>>,
    /// Reads since the last backward. The rung depends on nothing else, so a resumed run sums in the same order.
    reads: usize,
}

impl<B: Backend> Ladder<B> {
    pub(super) fn new() -> Self {
        Ladder { rungs: BTreeMap::new(), reads: 0 }
    }

    /// The rung for the next read, of a parameter `like` this. The gradient of a `sharded` one is as long as the
    /// gathered parameter, and is freed when its hook has run, so it must not wait for other reads on its rung.
    pub(super) fn next<C: CheckpointStrategy>(&mut self, like: &AutodiffTensor<B>, sharded: bool) -> NodeGuard {
        let first = if sharded { self.reads } else { first_on_rung(self.reads.min(MAX_READS - 1)) };
        self.reads += 1;
        if let Some(rung) = self.rungs.get(&first) {
            return rung.node();
        }
        let (below, lowest) = match self.rungs.range(..first).next_back() {
            Some((below, rung)) => (*below, rung.clone()),
            None => (0, untracked::<B>(scalar::<B>(&like.device(), like.dtype()))),
        };
        let rung = (RUNGS_PER_READ * below..RUNGS_PER_READ * first).fold(lowest, |below, _| rung_above::<B, C>(below));
        self.rungs.entry(first).or_insert(rung).node()
    }

    /// Begins at the lowest rung again, when a backward has ended.
    pub(super) fn restart(&mut self) {
        self.reads = 0;
    }
}

/// Number of the first read that hangs on the same rung as read number `read`.
fn first_on_rung(read: usize) -> usize {
    let coarse = (read / OWN_RUNGS).checked_ilog2().map_or(0, |log| log + 1);
    read >> coarse << coarse
}

/// A step of the ladder. It raises the depth of the hooks that hang on it, and does nothing in backward.
#[derive(Debug)]
struct Rung;

impl<B: Backend> Backward<B, 1> for Rung {
    type State = ();

    fn backward(self, _: Ops<(), 1>, _: &mut Gradients, _: &mut Checkpointer) {}
}

/// The tensor one rung above `below`.
pub(crate) fn rung_above<B: Backend, C: CheckpointStrategy>(below: AutodiffTensor<B>) -> AutodiffTensor<B> {
    let (primitive, guard) = below.into_parts();
    match Backward::<B, 1>::prepare::<C>(Rung, [guard]).compute_bound().stateful() {
        OpsKind::Tracked(prep) => prep.finish((), primitive),
        OpsKind::UnTracked(prep) => prep.finish(primitive),
    }
}

/// A tensor of the autodiff backend outside any graph.
pub(crate) fn untracked<B: Backend>(value: FloatTensor<B>) -> AutodiffTensor<B> {
    <Autodiff<B> as AutodiffBackend>::from_inner(value)
}

/// A tensor of one element.
pub(super) fn scalar<B: Backend>(device: &B::Device, dtype: DType) -> FloatTensor<B> {
    B::float_zeros(Shape::from([1]), device, dtype.into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rungs_are_few_and_near() {
        let rungs: std::collections::BTreeSet<usize> = (0..MAX_READS).map(first_on_rung).collect();
        assert_eq!(rungs.len(), 176);
        for read in 0..MAX_READS {
            let first = first_on_rung(read);
            assert!(first <= read && (read - first) * OWN_RUNGS / 2 < read.max(1), "read {read} hangs at {first}");
        }
    }
}
