//! Differentiable collectives: their backward is a collective, too.

mod adjoint;
mod collective_node;

use burn::backend::Dispatch;
use burn::tensor::{Tensor, TensorData};
use burn_ddp_comm::{ProcessGroup, ReduceOp, TensorType};

pub use adjoint::Adjoint;
use adjoint::Kind;
pub use collective_node::CollectiveBackend;
pub(crate) use collective_node::{abandon, read};

use crate::ddp::Ddp;
use crate::{Error, Result, element_collectives, tensor_conversion};

impl Ddp {
    /// The collectives through which gradients flow, as in `torch.distributed.nn.functional`: for losses over the items
    /// of all ranks (contrastive ones) and for layers that are split over ranks. This call communicates nothing.
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
/// **The differentiated function** is the *sum of the losses of all ranks*: `backward` gives each rank the gradient of
/// Σₛ lossₛ with respect to its own input. A model that was [wrapped](Ddp::wrap) then averages over ranks, so its step
/// follows the gradient of the mean of the losses. (Averages weighted by items weigh a rank's whole gradient by that
/// rank's items, also the parts that came from other ranks' losses. So give all ranks batches of one size.) The loss of
/// a rank whose `ddp.backward` weighs 0 is left out; it may pass one of these collectives, and several are an error.
///
/// **Each rank must** call the same collectives in the same order, with tracked inputs on all ranks or on none, and run
/// the backward of the same graph, in which every result takes part. Calls that differ are an error on all ranks. If a
/// rank does not run its backward, the other ranks wait in theirs until the deadline, and their error names that rank.
/// Ranks that are threads must not share a tracked tensor, since a backward holds the lock of its graph while it waits.
///
/// The costs below are for a tensor of `b` bytes that each of `n` ranks passes, in the units of
/// [`Collectives`](crate::Collectives).
///
/// With an input that is not tracked, the collective has no backward. Gradient checkpointing does not repeat a
/// collective. Differentiable collectives have a group of their own, so their order relative to other collectives is
/// free. The first one makes the group, at the cost of [`World::group`](crate::comm::World::group).
///
/// A failure in a backward is the error of [`Ddp::backward`]; for a model that is not wrapped, `loss.backward()` panics
/// with the full report.
#[derive(Clone, Copy, Debug)]
pub struct Differentiable<'a> {
    ddp: &'a Ddp,
}

impl Differentiable<'_> {
    /// Reduces element by element over all ranks, by [`ReduceOp::Sum`] or [`ReduceOp::Mean`]. *Collective*, blocking.
    ///
    /// Each rank passes a tensor of the same shape and holds the same reduced tensor after. The backward reduces the
    /// ranks' gradients in the same way.
    ///
    /// Two steps in which a rank sends about `2 b` bytes, and the same in backward; one step for small tensors.
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`] for another op; [`Error::Comm`]: a peer failed or called something else.
    ///
    /// # Example
    ///
    /// ```
    /// # use burn::prelude::*;
    /// # use burn_ddp::prelude::*;
    /// let gradients = Ddp::spawn(2, |ddp| {
    ///     let device = ddp.device()?.autodiff();
    ///     let x = Tensor::<1>::from_floats([1.0 + ddp.rank() as f32], &device).require_grad(); // 1 and 2
    ///     let mean = ddp.differentiable().all_reduce(x.clone(), ReduceOp::Mean)?; // 1.5 on both ranks
    ///     let grads = mean.powf_scalar(2.0).sum().backward();
    ///     Ok(x.grad(&grads).unwrap().into_scalar::<f32>())
    /// })?;
    /// assert_eq!(gradients, [3.0, 3.0]); // 2 · 1.5 from each rank's loss, half of it for each x
    /// # Ok::<(), burn_ddp::Error>(())
    /// ```
    #[track_caller]
    pub fn all_reduce<const D: usize>(&self, tensor: Tensor<D>, op: ReduceOp) -> Result<Tensor<D>> {
        check_op("all_reduce", op)?;
        self.run(tensor, Kind::AllReduce(op), |group, x| element_collectives::all_reduce(group, x, op))
    }

    /// Concatenates the tensors of all ranks along dimension 0, in rank order. *Collective*, blocking.
    ///
    /// Each rank passes a tensor of the same shape `[r, …]` and holds `[n * r, …]` after. In the backward a rank's
    /// input gets the sum of all ranks' gradients for its rows.
    ///
    /// One step in which a rank sends `(n - 1) b` bytes; in backward the same, as a reduce-scatter.
    ///
    /// # Errors
    ///
    /// [`Error::Comm`]: a peer failed or called something else.
    ///
    /// # Example
    ///
    /// ```
    /// # use burn::prelude::*;
    /// # use burn_ddp::prelude::*;
    /// let gradients = Ddp::spawn(2, |ddp| {
    ///     let device = ddp.device()?.autodiff();
    ///     let x = Tensor::<2>::ones([1, 3], &device).require_grad();
    ///     let all = ddp.differentiable().all_gather(x.clone())?;
    ///     assert_eq!(all.dims(), [2, 3]);
    ///     let grads = (all.sum() * (1.0 + ddp.rank() as f32)).backward(); // 1 on rank 0, 2 on rank 1
    ///     Ok(x.grad(&grads).unwrap().into_data().try_to_vec::<f32>()?)
    /// })?;
    /// assert_eq!(gradients, [[3.0; 3], [3.0; 3]]);
    /// # Ok::<(), burn_ddp::Error>(())
    /// ```
    #[track_caller]
    pub fn all_gather<const D: usize>(&self, tensor: Tensor<D>) -> Result<Tensor<D>> {
        self.run(tensor, Kind::AllGather, element_collectives::all_gather)
    }

    /// Reduces over all ranks, by [`ReduceOp::Sum`] or [`ReduceOp::Mean`], and leaves each rank its slice of dimension
    /// 0. *Collective*, blocking.
    ///
    /// Each rank passes a tensor of the same shape `[n * r, …]` and holds `[r, …]` after: rows `rank * r ..`.
    /// The backward gathers the gradients of all slices.
    ///
    /// One step in which a rank sends `(n - 1) / n · b` bytes; in backward the same, as an all-gather.
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`] for another op, or if dimension 0 does not divide by the world size; [`Error::Comm`]: a peer
    /// failed or called something else.
    ///
    /// # Example
    ///
    /// ```
    /// # use burn::prelude::*;
    /// # use burn_ddp::prelude::*;
    /// let gradients = Ddp::spawn(2, |ddp| {
    ///     let device = ddp.device()?.autodiff();
    ///     let x = Tensor::<1>::from_floats([1.0, 10.0], &device).require_grad();
    ///     let own = ddp.differentiable().reduce_scatter(x.clone(), ReduceOp::Sum)?; // 2 on rank 0, 20 on rank 1
    ///     let grads = own.powf_scalar(2.0).sum().backward();
    ///     Ok(x.grad(&grads).unwrap().into_data().try_to_vec::<f32>()?)
    /// })?;
    /// assert_eq!(gradients, [[4.0, 40.0], [4.0, 40.0]]); // one from each rank's loss
    /// # Ok::<(), burn_ddp::Error>(())
    /// ```
    #[track_caller]
    pub fn reduce_scatter<const D: usize>(&self, tensor: Tensor<D>, op: ReduceOp) -> Result<Tensor<D>> {
        check_op("reduce_scatter", op)?;
        self.run(tensor, Kind::ReduceScatter(op), |group, x| element_collectives::reduce_scatter(group, x, op))
    }

    #[track_caller]
    fn run<const D: usize>(
        &self,
        x: Tensor<D>,
        kind: Kind,
        forward: impl FnOnce(&ProcessGroup, (TensorType, TensorData)) -> Result<TensorData>,
    ) -> Result<Tensor<D>> {
        let device = x.device();
        if x.is_tracked() {
            crate::device::check_supported(&device)?;
        }
        let elements = element_collectives::read(self.ddp, x.clone())?;
        let group = self.ddp.state().graph_group()?;
        let y: Tensor<D> = tensor_conversion::back(forward(&group, elements)?, &device);
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
