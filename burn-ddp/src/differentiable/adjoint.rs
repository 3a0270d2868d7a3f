//! The adjoint of a collective: the collective on gradients that its backward makes.

use std::sync::Arc;

use burn::tensor::TensorData;
use burn_ddp_comm::{ProcessGroup, ReduceOp};

use crate::Result;
use crate::ddp::Ddp;
use crate::element_collectives::{all_gather, all_reduce, reduce_scatter};
use crate::tensor_conversion::with_type;

/// Backward of a collective. Opaque: made by [`Differentiable`](super::Differentiable), passed through
/// [`CollectiveBackend`](super::CollectiveBackend).
#[derive(Clone, Debug)]
pub struct Adjoint {
    /// A handle that does not keep the rank in the job, since Burn may keep the node for long.
    pub(crate) ddp: Ddp,
    pub(crate) group: Arc<ProcessGroup>,
    pub(crate) kind: Kind,
}

/// The collective of the forward.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Kind {
    AllReduce(ReduceOp),
    AllGather,
    ReduceScatter(ReduceOp),
}

impl Adjoint {
    /// The gradient of a rank's input, from the gradients that all ranks have of their outputs. *Collective*.
    pub(crate) fn apply(&self, gradient: TensorData) -> Result<TensorData> {
        let gradient = with_type(gradient)?;
        match self.kind {
            Kind::AllReduce(op) => all_reduce(&self.group, gradient, op),
            Kind::AllGather => reduce_scatter(&self.group, gradient, ReduceOp::Sum),
            Kind::ReduceScatter(_) => all_gather(&self.group, gradient),
        }
    }

    /// Number by which the result of [`apply`](Self::apply) must still be divided; `None` for 1.
    pub(crate) fn excess(&self) -> Option<f64> {
        matches!(self.kind, Kind::ReduceScatter(ReduceOp::Mean)).then(|| self.group.world_size() as f64)
    }
}
