//! Untracked tensors of growing depth, which put the hook of a read at about the depth of the layer that reads.

use burn::backend::autodiff::Autodiff;
use burn::backend::autodiff::checkpoint::base::Checkpointer;
use burn::backend::autodiff::checkpoint::strategy::CheckpointStrategy;
use burn::backend::autodiff::grads::Gradients;
use burn::backend::autodiff::ops::{Backward, Ops, OpsKind};
use burn::backend::tensor::FloatTensor;
use burn::backend::{AutodiffBackend, Backend, TensorMetadata};
use burn::tensor::{DType, Shape};

/// Depth that each read of a parameter adds to the ladder: about what a layer adds to the graph.
const RUNGS_PER_READ: usize = 4;
/// Burn walks all live nodes in each backward: only rungs that hooks hang on are kept, and at most this many.
const MAX_LADDER: usize = 1024;

/// A tensor of the autodiff backend over `B`, whatever its checkpointing strategy.
pub(crate) type AutodiffTensor<B> = FloatTensor<Autodiff<B>>;

/// The rungs of one wrapped model.
pub(super) struct Ladder<B: Backend> {
    rungs: Vec<AutodiffTensor<B>>,
    /// Reads since the last backward. The rung depends on nothing else, so a resumed run sums in the same order.
    reads: usize,
}

impl<B: Backend> Ladder<B> {
    pub(super) fn new() -> Self {
        Ladder { rungs: Vec::new(), reads: 0 }
    }

    /// The rung for the next read, of a parameter `like` this.
    pub(super) fn next<C: CheckpointStrategy>(&mut self, like: &AutodiffTensor<B>) -> AutodiffTensor<B> {
        let nth = self.reads.min(MAX_LADDER - 1);
        self.reads += 1;
        while self.rungs.len() <= nth {
            self.rungs.push(match self.rungs.last() {
                None => untracked::<B>(scalar::<B>(&like.device(), like.dtype())),
                Some(last) => (0..RUNGS_PER_READ).fold(last.clone(), |below, _| rung_above::<B, C>(below)),
            });
        }
        self.rungs[nth].clone()
    }

    /// Begins at the lowest rung again, when a backward has ended.
    pub(super) fn restart(&mut self) {
        self.reads = 0;
    }
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
