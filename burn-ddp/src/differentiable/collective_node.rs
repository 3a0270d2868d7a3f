//! The autodiff node of a collective: it puts the result, computed outside the graph, into the graph, and sends its
//! gradient through the adjoint.

use burn::backend::autodiff::Autodiff;
use burn::backend::autodiff::checkpoint::base::Checkpointer;
use burn::backend::autodiff::checkpoint::strategy::CheckpointStrategy;
use burn::backend::autodiff::grads::Gradients;
use burn::backend::autodiff::ops::{Backward, Ops, OpsKind};
use burn::backend::tensor::FloatTensor;
use burn::backend::{Backend, TensorMetadata, backend_extension};
use burn::tensor::{TensorData, read_sync};

use super::adjoint::Adjoint;
use crate::backends::extend_backends;
use crate::intercept::{fail, has_weight_0, rung_above, untracked};
use crate::{Error, Result};

/// Extension of a Burn backend for [`Ddp::differentiable`](crate::Ddp::differentiable), which calls it.
#[backend_extension(
    Flex: cfg(feature = "flex"),
    NdArray: cfg(feature = "ndarray"),
    LibTorch: cfg(feature = "tch"),
    Cube: cfg(feature = "cube"),
    Autodiff
)]
pub trait CollectiveBackend: Backend {
    /// Returns `y`, which a collective made of the `x` of all ranks. With autodiff, its gradient goes to `x` through
    /// the collective's adjoint.
    fn collective(x: FloatTensor<Self>, y: FloatTensor<Self>, adjoint: Adjoint) -> FloatTensor<Self> {
        let _ = (x, adjoint);
        y
    }
}

extend_backends!(CollectiveBackend {});

#[derive(Debug)]
struct Collective;

impl<B: Backend> Backward<B, 2> for Collective {
    type State = Adjoint;

    fn backward(self, ops: Ops<Adjoint, 2>, grads: &mut Gradients, _: &mut Checkpointer) {
        let [Some(x), _] = ops.parents else { return };
        let gradient = grads.consume::<B>(&ops.node);
        let device = gradient.device();
        let gradient = match has_weight_0(true) {
            Ok(false) => gradient,
            // It may be NaN.
            Ok(true) => B::float_zeros(gradient.shape(), &device, gradient.dtype().into()),
            Err(error) => abandon(&ops.state.ddp, error),
        };
        let back = read::<B>(gradient).and_then(|data| ops.state.apply(data));
        let back = back.unwrap_or_else(|error| abandon(&ops.state.ddp, error));
        let back = B::float_from_data(back, &device);
        let back = match ops.state.excess() {
            Some(excess) => B::float_div_scalar(back, excess.into()),
            None => back,
        };
        grads.register::<B>(x.id, back);
    }
}

impl<B: CollectiveBackend, C: CheckpointStrategy> CollectiveBackend for Autodiff<B, C> {
    fn collective(x: FloatTensor<Self>, y: FloatTensor<Self>, adjoint: Adjoint) -> FloatTensor<Self> {
        // The extra parent gives the node on a leaf the depth of one behind a parameter, so that ranks make their
        // collectives in the same order, whatever they are computed from.
        let rung = rung_above::<B, C>(untracked::<B>(y.primitive().clone()));
        // Compute-bound, so that gradient checkpointing never repeats the collective.
        match Backward::<B, 2>::prepare::<C>(Collective, [x.node(), rung.node()]).compute_bound().stateful() {
            OpsKind::Tracked(prep) => prep.finish(adjoint, y.into_primitive()),
            OpsKind::UnTracked(prep) => prep.finish(y.into_primitive()),
        }
    }
}

/// The elements of a tensor.
pub(crate) fn read<B: Backend>(tensor: FloatTensor<B>) -> Result<TensorData> {
    read_sync(B::float_into_data(tensor))
        .map_err(|e| Error::invalid(format!("reading a gradient from its device failed: {e:?}")))
}

/// Ends a backward that cannot go on: by a panic, which is silent if `Ddp::backward` returns the error.
pub(crate) fn abandon(ddp: &crate::Ddp, error: Error) -> ! {
    fail(ddp, error);
    std::panic::resume_unwind(Box::new("a backward was abandoned"))
}
