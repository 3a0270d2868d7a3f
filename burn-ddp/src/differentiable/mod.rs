//! Collectives whose backward is a collective, too.

mod adjoint;
mod collective_node;

use burn::backend::Dispatch;
use burn::tensor::{Tensor, TensorData};
use burn_ddp_comm::{DType, ProcessGroup, ReduceOp};

pub use adjoint::Adjoint;
use adjoint::Kind;
pub use collective_node::CollectiveBackend;
pub(crate) use collective_node::{abandon, read};

use crate::ddp::Ddp;
use crate::{Error, Result, collectives, convert};

impl Ddp {
    /// The collectives that gradients go through, as those in `torch.distributed.nn.functional`: for losses over the
    /// items of all ranks (contrastive ones) and for layers that are split over ranks.
    ///
    /// # Example
    ///
    /// Each rank compares its item with those of all ranks, and its gradient has a part from every rank's loss.
    ///
    /// ```
    /// # use burn::prelude::*;
    /// # use burn_ddp::prelude::*;
    /// let gradients = Ddp::spawn(2, |ddp| {
    ///     let device = ddp.device()?.autodiff();
    ///     let x = Tensor::<1>::from_floats([1.0 + ddp.rank() as f32], &device).require_grad(); // 1 and 2
    ///     let all = ddp.differentiable().all_gather(x.clone())?;
    ///     let loss = all.powf_scalar(2.0).sum(); // 1² + 2² on both ranks
    ///     Ok(x.grad(&loss.backward()).unwrap().into_scalar::<f32>())
    /// })?;
    /// assert_eq!(gradients, [4.0, 8.0]); // of the sum of both losses
    /// # Ok::<(), burn_ddp::Error>(())
    /// ```
    #[must_use]
    pub fn differentiable(&self) -> Differentiable<'_> {
        Differentiable { ddp: self }
    }
}

/// Collectives on float tensors whose backward is a collective too. Made by [`Ddp::differentiable`].
///
/// **What is differentiated** is the *sum of the losses of all ranks*: `backward` gives each rank the gradient of Σₛ
/// lossₛ with respect to its own input. A model that was [wrapped](Ddp::wrap) then averages over ranks, and so steps
/// along the gradient of the mean of the losses. (Means weighted by items weigh what arrives at a rank, from whichever
/// rank's loss it came: with gradients that cross ranks give all ranks batches of one size.)
///
/// **What each rank must do**: call the same ones in the same order, with tracked inputs on all ranks or on none, and
/// run the backward of the same graph, in which every result takes part. Calls that differ are an error on all ranks; a
/// backward that a rank does not run leaves the others waiting until their time-out names it. Ranks that are threads
/// must not share a tracked tensor: a backward holds the lock of its graph while it waits.
///
/// An input without a graph makes a plain collective. With gradient checkpointing a collective is not repeated. All of
/// them have a group of their own, so they mix with other collectives; the first one makes it.
///
/// A failure in backward panics with the full report, or is what [`Ddp::backward`] returns.
#[derive(Clone, Copy, Debug)]
pub struct Differentiable<'a> {
    ddp: &'a Ddp,
}

impl Differentiable<'_> {
    /// Reduces element by element over all ranks, by [`ReduceOp::Sum`] or [`ReduceOp::Mean`]. *Collective*, blocking.
    ///
    /// Each rank passes a tensor of the same shape and holds the same reduced tensor after. In backward gradients are
    /// reduced in the same way.
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`] for another op; [`Error::Comm`]: a peer failed or called something else.
    #[track_caller]
    pub fn all_reduce<const D: usize>(&self, tensor: Tensor<D>, op: ReduceOp) -> Result<Tensor<D>> {
        check_op("all_reduce", op)?;
        self.run(tensor, Kind::AllReduce(op), |group, x| collectives::all_reduce(group, x, op))
    }

    /// Concatenates the tensors of all ranks along dimension 0, in rank order. *Collective*, blocking.
    ///
    /// Each rank passes a tensor of the same shape `[n, …]` and holds `[world_size * n, …]` after. In backward a rank's
    /// rows get the sum of the gradients that all ranks have for them.
    ///
    /// # Errors
    ///
    /// [`Error::Comm`]: a peer failed or called something else.
    #[track_caller]
    pub fn all_gather<const D: usize>(&self, tensor: Tensor<D>) -> Result<Tensor<D>> {
        self.run(tensor, Kind::AllGather, collectives::all_gather)
    }

    /// Reduces over all ranks, by [`ReduceOp::Sum`] or [`ReduceOp::Mean`], and leaves each rank its slice of dimension
    /// 0. *Collective*, blocking.
    ///
    /// Each rank passes a tensor of the same shape `[world_size * n, …]` and holds `[n, …]` after: rows `rank * n ..`.
    /// In backward the gradients of all slices are gathered.
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`] for another op, or if dimension 0 does not divide by the world size; [`Error::Comm`]: a peer
    /// failed or called something else.
    #[track_caller]
    pub fn reduce_scatter<const D: usize>(&self, tensor: Tensor<D>, op: ReduceOp) -> Result<Tensor<D>> {
        check_op("reduce_scatter", op)?;
        self.run(tensor, Kind::ReduceScatter(op), |group, x| collectives::reduce_scatter(group, x, op))
    }

    #[track_caller]
    fn run<const D: usize>(
        &self,
        x: Tensor<D>,
        kind: Kind,
        forward: impl FnOnce(&ProcessGroup, (DType, TensorData)) -> Result<TensorData>,
    ) -> Result<Tensor<D>> {
        let device = x.device();
        if x.is_tracked() {
            crate::device::check_supported(&device)?;
        }
        let elements = collectives::read(self.ddp, x.clone())?;
        let group = self.ddp.state().graph_group()?;
        let y: Tensor<D> = convert::back(forward(&group, elements)?, &device);
        if !x.is_tracked() {
            return Ok(y);
        }
        let adjoint = Adjoint { ddp: self.ddp.without_presence(), group, kind };
        Ok(Tensor::from_dispatch(Dispatch::collective(x.into_dispatch(), y.into_dispatch(), adjoint)))
    }
}

fn check_op(what: &str, op: ReduceOp) -> Result<()> {
    match op {
        ReduceOp::Sum | ReduceOp::Mean => Ok(()),
        other => Err(Error::invalid(format!("a differentiable {what} takes sum or mean, not {other}"))),
    }
}

#[cfg(test)]
mod tests;
