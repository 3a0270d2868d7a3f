//! Untracked tensors of growing depth, which put the hook of a read at about the depth of the layer that reads.

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
/// Reads after so many hang on the highest rung: Burn allocates memory for each depth in each backward.
const MAX_READS: usize = 1024;
/// Reads with a rung of their own. Burn looks up each of its nodes among all live ones, so rungs are few: of later
/// reads, those that differ by less than this fraction share one.
const OWN_RUNGS: usize = 32;

/// A tensor of the autodiff backend over `B`, whatever its checkpointing strategy.
pub(crate) type AutodiffTensor<B> = FloatTensor<Autodiff<B>>;

/// The rungs of one wrapped model.
pub(super) struct Ladder<B: Backend> {
    /// Rungs that hooks hang on, with the number of the first read of each.
    rungs: Vec<(usize, AutodiffTensor<B>)>,
    /// Index of the rung of the last read.
    at: usize,
    /// Reads since the last backward. The rung depends on nothing else, so a resumed run sums in the same order.
    reads: usize,
}

impl<B: Backend> Ladder<B> {
    pub(super) fn new() -> Self {
        Ladder { rungs: Vec::new(), at: 0, reads: 0 }
    }

    /// The rung for the next read, of a parameter `like` this.
    pub(super) fn next<C: CheckpointStrategy>(&mut self, like: &AutodiffTensor<B>) -> NodeGuard {
        let first = first_on_rung(self.reads.min(MAX_READS - 1));
        self.reads += 1;
        if self.rungs.get(self.at).is_some_and(|(of, _)| *of < first) {
            self.at += 1;
        }
        if self.at == self.rungs.len() {
            self.rungs.push(match self.rungs.last() {
                None => (first, untracked::<B>(scalar::<B>(&like.device(), like.dtype()))),
                Some((below, rung)) => {
                    let height = RUNGS_PER_READ * (first - below);
                    (first, (0..height).fold(rung.clone(), |below, _| rung_above::<B, C>(below)))
                }
            });
        }
        self.rungs[self.at].1.node()
    }

    /// Begins at the lowest rung again, when a backward has ended.
    pub(super) fn restart(&mut self) {
        self.reads = 0;
        self.at = 0;
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

/// A leaf that requires a gradient, as `require_grad` makes it.
pub(super) fn new_leaf<B: Backend>(value: FloatTensor<B>) -> AutodiffTensor<B> {
    untracked::<B>(value).require_grad()
}

/// A tensor of the autodiff backend outside any graph.
pub(crate) fn untracked<B: Backend>(value: FloatTensor<B>) -> AutodiffTensor<B> {
    <Autodiff<B> as AutodiffBackend>::from_inner(value)
}

/// A tensor of one element.
pub(super) fn scalar<B: Backend>(device: &B::Device, dtype: DType) -> FloatTensor<B> {
    B::float_zeros(Shape::from([1]), device, dtype.into())
}

/// Number of reads that share the rung of the last of `reads` reads.
pub(crate) fn reads_of_a_rung(reads: usize) -> usize {
    let last = reads.clamp(1, MAX_READS) - 1;
    match (last / OWN_RUNGS).checked_ilog2() {
        None => 1,
        Some(log) => 2 << log,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rungs_are_few_and_near() {
        let rungs: std::collections::BTreeSet<usize> = (0..MAX_READS).map(first_on_rung).collect();
        assert_eq!(rungs.len(), 112);
        assert_eq!([0, 1, 32, 33, 64, 65, 1024, 9999].map(reads_of_a_rung), [1, 1, 1, 2, 2, 4, 32, 32]);
        for read in 0..MAX_READS {
            let first = first_on_rung(read);
            assert!(first <= read && (read - first) * OWN_RUNGS / 2 < read.max(1), "read {read} hangs at {first}");
        }
    }
}
