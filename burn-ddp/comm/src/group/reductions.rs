//! Collectives that reduce elements.

use std::panic::Location;

use super::ProcessGroup;
#[cfg(doc)]
use crate::Error;
use crate::dtype::Element;
use crate::{ReduceOp, Result, TensorType};

impl ProcessGroup {
    /// Reduces a buffer over all ranks.
    ///
    /// Each rank passes a buffer of the same length; afterwards each buffer holds the reduction, with the same bits on
    /// every rank. Blocks. Costs two steps, in which each rank sends and receives about twice its buffer. Where the
    /// buffers of all ranks together have at most 64 KiB, it costs one step, in which each rank sends its buffer to
    /// each other rank.
    ///
    /// # Errors
    /// Those of all collectives. [`Error::InvalidArgument`], which leaves the group usable, if the op is not
    /// [defined](ReduceOp::supports) for the type.
    ///
    /// ```
    /// use burn_ddp_comm::{ReduceOp, World};
    ///
    /// World::spawn(3, |world| {
    ///     let group = world.group()?;
    ///     let mut x = [world.rank() as f32, 10.0];
    ///     group.all_reduce(&mut x, ReduceOp::Mean)?;
    ///     assert_eq!(x, [1.0, 10.0]);
    ///
    ///     let mut ids = [world.rank() as i32];
    ///     assert!(group.all_reduce(&mut ids, ReduceOp::Mean).unwrap_err().group_usable());
    ///     group.all_reduce(&mut ids, ReduceOp::Max)?;
    ///     assert_eq!(ids, [2]);
    ///     Ok::<_, burn_ddp_comm::Error>(())
    /// }).into_iter().collect::<Result<(), _>>()?;
    /// # Ok::<(), burn_ddp_comm::Error>(())
    /// ```
    #[track_caller]
    pub fn all_reduce<T: Element>(&self, buf: &mut [T], op: ReduceOp) -> Result<()> {
        let caller = self.in_turn(Location::caller());
        T::edit(buf, |bytes| self.calls.all_reduce(caller, T::DTYPE, bytes, op, 0))
    }

    /// [`all_reduce`](Self::all_reduce) on the bytes of elements, which need not be aligned.
    ///
    /// `tag` is compared between ranks like the other arguments; 0 if there is nothing to compare.
    ///
    /// # Errors
    /// Those of [`all_reduce`](Self::all_reduce); [`Error::InvalidArgument`] also if the bytes are not whole elements.
    ///
    /// # Example
    ///
    /// As in [`DType`](crate::DType).
    #[track_caller]
    pub fn all_reduce_bytes(
        &self,
        elements: impl Into<TensorType>,
        buf: &mut [u8],
        op: ReduceOp,
        tag: u64,
    ) -> Result<()> {
        let caller = self.in_turn(Location::caller());
        self.calls.all_reduce(caller, elements, buf, op, tag)
    }

    /// Averages a buffer over all ranks, each with its own weight: Σ wᵣxᵣ / Σ wᵣ.
    ///
    /// Each rank passes a buffer of the same length and a weight that is finite and not negative; afterwards each
    /// buffer holds the average, with the same bits on every rank. Equal weights give the bits of [`ReduceOp::Mean`]. A
    /// rank of weight 0 counts as absent, even if its buffer holds NaN. Blocks. Costs what
    /// [`all_reduce`](Self::all_reduce) costs, since the weights travel in the headers; on `shm+tcp`, a large call
    /// whose weights are not those of the last weighted call begins twice.
    ///
    /// # Errors
    /// Those of all collectives. [`Error::InvalidArgument`], on all ranks and leaving the group usable, if a weight is
    /// negative or not finite, all weights are 0, or the type is not a float.
    ///
    /// ```
    /// use burn_ddp_comm::World;
    ///
    /// World::spawn(2, |world| {
    ///     let group = world.group()?;
    ///     let (mut x, items) = if world.rank() == 0 { ([1.0], 3.0) } else { ([5.0], 1.0) };
    ///     group.all_reduce_weighted(&mut x, items)?;
    ///     assert_eq!(x, [2.0]);
    ///     assert!(group.all_reduce_weighted(&mut x, 0.0).unwrap_err().group_usable());
    ///     Ok::<_, burn_ddp_comm::Error>(())
    /// }).into_iter().collect::<Result<(), _>>()?;
    /// # Ok::<(), burn_ddp_comm::Error>(())
    /// ```
    #[track_caller]
    pub fn all_reduce_weighted<T: Element>(&self, buf: &mut [T], weight: f64) -> Result<()> {
        let caller = self.in_turn(Location::caller());
        T::edit(buf, |bytes| self.calls.all_reduce_weighted(caller, T::DTYPE, bytes, weight, 0))
    }

    /// [`all_reduce_weighted`](Self::all_reduce_weighted) on the bytes of elements, which need not be aligned.
    ///
    /// `tag` is compared between ranks like the other arguments; 0 if there is nothing to compare.
    ///
    /// # Errors
    /// Those of [`all_reduce_weighted`](Self::all_reduce_weighted); [`Error::InvalidArgument`] also if the bytes are
    /// not whole elements.
    ///
    /// # Example
    ///
    /// As in [`DType`](crate::DType).
    #[track_caller]
    pub fn all_reduce_weighted_bytes(
        &self,
        elements: impl Into<TensorType>,
        buf: &mut [u8],
        weight: f64,
        tag: u64,
    ) -> Result<()> {
        let caller = self.in_turn(Location::caller());
        self.calls.all_reduce_weighted(caller, elements, buf, weight, tag)
    }

    /// Reduces a buffer over all ranks; one rank, the root, gets the result.
    ///
    /// Each rank passes a buffer of the same length; afterwards the root's buffer holds the reduction, with the bits of
    /// an [`all_reduce`](Self::all_reduce), and the other buffers are unchanged. Blocks. Costs two steps, in which each
    /// rank sends about its buffer; one step if the buffers of all ranks together have at most 64 KiB.
    ///
    /// # Errors
    /// Those of [`all_reduce`](Self::all_reduce). [`Error::InvalidArgument`] also if there is no such root.
    ///
    /// ```
    /// use burn_ddp_comm::{ReduceOp, World};
    ///
    /// World::spawn(3, |world| {
    ///     let group = world.group()?;
    ///     let mut x = [world.rank() as i64, 1];
    ///     group.reduce(&mut x, ReduceOp::Sum, 2)?;
    ///     assert_eq!(x, if world.rank() == 2 { [3, 3] } else { [world.rank() as i64, 1] });
    ///     assert!(group.reduce(&mut x, ReduceOp::Sum, 3).unwrap_err().group_usable()); // there is no rank 3
    ///     Ok::<_, burn_ddp_comm::Error>(())
    /// }).into_iter().collect::<Result<(), _>>()?;
    /// # Ok::<(), burn_ddp_comm::Error>(())
    /// ```
    #[track_caller]
    pub fn reduce<T: Element>(&self, buf: &mut [T], op: ReduceOp, root: usize) -> Result<()> {
        let caller = self.in_turn(Location::caller());
        T::edit(buf, |bytes| self.calls.reduce(caller, T::DTYPE, bytes, op, root))
    }

    /// [`reduce`](Self::reduce) on the bytes of elements, which need not be aligned.
    ///
    /// # Errors
    /// Those of [`reduce`](Self::reduce); [`Error::InvalidArgument`] also if the bytes are not whole elements.
    ///
    /// # Example
    ///
    /// As in [`DType`](crate::DType).
    #[track_caller]
    pub fn reduce_bytes(
        &self,
        elements: impl Into<TensorType>,
        buf: &mut [u8],
        op: ReduceOp,
        root: usize,
    ) -> Result<()> {
        self.calls.reduce(self.in_turn(Location::caller()), elements, buf, op, root)
    }

    /// Reduces a buffer over all ranks and leaves each rank a part of the result.
    ///
    /// Each rank passes an input of `[world, n]` elements and an output of `n`; afterwards the output of rank `r` holds
    /// the reduction of row `r` of all inputs. Blocks. Costs one step, in which each rank sends one row to each other
    /// rank.
    ///
    /// # Errors
    /// Those of all collectives. [`Error::InvalidArgument`], which leaves the group usable, if the op is not
    /// [defined](ReduceOp::supports) for the type or the lengths do not fit together.
    ///
    /// ```
    /// use burn_ddp_comm::{ReduceOp, World};
    ///
    /// World::spawn(2, |world| {
    ///     let group = world.group()?;
    ///     let mut mine = [0.0];
    ///     group.reduce_scatter(&[1.0, 2.0], &mut mine, ReduceOp::Sum)?;
    ///     assert_eq!(mine, [2.0 * (1.0 + world.rank() as f64)]);
    ///     assert!(group.reduce_scatter(&[1.0; 3], &mut mine, ReduceOp::Sum).is_err()); // 3 is not 2 × 1
    ///     Ok::<_, burn_ddp_comm::Error>(())
    /// }).into_iter().collect::<Result<(), _>>()?;
    /// # Ok::<(), burn_ddp_comm::Error>(())
    /// ```
    #[track_caller]
    pub fn reduce_scatter<T: Element>(&self, input: &[T], output: &mut [T], op: ReduceOp) -> Result<()> {
        let caller = self.in_turn(Location::caller());
        T::edit(output, |output| self.calls.reduce_scatter(caller, T::DTYPE, T::bytes(input), output, (op, 0)))
    }

    /// [`reduce_scatter`](Self::reduce_scatter) on the bytes of elements, which need not be aligned.
    ///
    /// # Errors
    /// Those of [`reduce_scatter`](Self::reduce_scatter); [`Error::InvalidArgument`] also if the bytes are not whole
    /// elements.
    ///
    /// # Example
    ///
    /// As in [`DType`](crate::DType).
    #[track_caller]
    pub fn reduce_scatter_bytes(
        &self,
        elements: impl Into<TensorType>,
        input: &[u8],
        output: &mut [u8],
        op: ReduceOp,
    ) -> Result<()> {
        let caller = self.in_turn(Location::caller());
        self.calls.reduce_scatter(caller, elements, input, output, (op, 0))
    }
}
