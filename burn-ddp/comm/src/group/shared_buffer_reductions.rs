//! Reductions of buffers where they are.

use std::panic::Location;

use super::ProcessGroup;
use crate::engine::OnDevice;
use crate::{DType, ReduceOp, Result, SharedBuffer, SharedView};

impl ProcessGroup {
    /// Makes buffers of these lengths in bytes for [`all_reduce_shared`](Self::all_reduce_shared). All ranks ask for
    /// the same.
    ///
    /// # Errors
    /// Those of all collectives.
    ///
    /// # Example
    ///
    /// ```
    /// use burn_ddp_comm::{DType, ReduceOp, World};
    ///
    /// World::spawn(2, |world| {
    ///     let group = world.group()?;
    ///     let mut buffers = group.shared_buffers(&[8, 4])?;
    ///     buffers[0].bytes_mut().copy_from_slice(&2_i64.to_le_bytes());
    ///     let sum = group.all_reduce_shared(DType::I64, &mut buffers[0], ReduceOp::Sum, 0)?;
    ///     assert_eq!(sum[..], 4_i64.to_le_bytes());
    ///     buffers[1].bytes_mut().copy_from_slice(&(world.rank() as f32).to_le_bytes());
    ///     let weight = [3.0, 1.0][world.rank()];
    ///     let mean = group.all_reduce_weighted_shared(DType::F32, &mut buffers[1], weight, 0)?;
    ///     assert_eq!(mean[..], 0.25_f32.to_le_bytes());
    ///     Ok::<_, burn_ddp_comm::Error>(())
    /// }).into_iter().collect::<Result<(), _>>()?;
    /// # Ok::<(), burn_ddp_comm::Error>(())
    /// ```
    #[track_caller]
    pub fn shared_buffers(&self, lens_bytes: &[usize]) -> Result<Vec<SharedBuffer>> {
        self.calls.shared_buffers(self.in_turn(Location::caller()), lens_bytes)
    }

    /// Reduces `dtype` elements in a buffer of [`shared_buffers`](Self::shared_buffers) over all ranks, where they are.
    ///
    /// Each rank passes the buffer that it got in the same place of the same list; each gets a view of the same result.
    /// On ranks of one machine nothing is copied. While a rank holds a view, reductions of that buffer cost a copy.
    ///
    /// `tag` is compared between ranks like the other arguments; 0 if there is nothing to compare.
    ///
    /// # Errors
    /// Those of [`all_reduce_bytes`](Self::all_reduce_bytes).
    #[track_caller]
    pub fn all_reduce_shared(
        &self,
        dtype: DType,
        buffer: &mut SharedBuffer,
        op: ReduceOp,
        tag: u64,
    ) -> Result<SharedView> {
        self.calls.all_reduce_shared(self.in_turn(Location::caller()), dtype, buffer, op, tag)
    }

    /// [`all_reduce_weighted`](Self::all_reduce_weighted) on a buffer of [`shared_buffers`](Self::shared_buffers), like
    /// [`all_reduce_shared`](Self::all_reduce_shared).
    ///
    /// # Errors
    /// Those of [`all_reduce_weighted_bytes`](Self::all_reduce_weighted_bytes).
    #[track_caller]
    pub fn all_reduce_weighted_shared(
        &self,
        dtype: DType,
        buffer: &mut SharedBuffer,
        weight: f64,
        tag: u64,
    ) -> Result<SharedView> {
        self.calls.all_reduce_weighted_shared(self.in_turn(Location::caller()), dtype, buffer, weight, tag)
    }

    /// Reduces elements that are in a device's memory over all ranks, by an engine that reaches it.
    ///
    /// `tag` is compared between ranks like the other arguments; 0 if there is nothing to compare.
    ///
    /// # Errors
    /// Those of [`all_reduce_bytes`](Self::all_reduce_bytes); [`Error::Environment`](crate::Error::Environment) if the
    /// group's engine reduces in host memory only, as all engines of this crate do.
    ///
    /// # Example
    ///
    /// ```
    /// use burn_ddp_comm::engine::OnDevice;
    /// use burn_ddp_comm::{DType, ReduceOp, World, WorldOptions};
    ///
    /// fn elements(place: &mut usize) -> OnDevice<'_> {
    ///     OnDevice { dtype: DType::F32, len_elems: 4, place }
    /// }
    ///
    /// let mut address = 0x7f00_0000; // of elements on a GPU, which NCCL would reach
    /// let group = World::solo(WorldOptions::default()).group()?;
    /// let error = group.all_reduce_on_device(elements(&mut address), ReduceOp::Sum, 0).unwrap_err();
    /// assert!(error.to_string().contains("reduces in host memory only"));
    /// let group = World::solo(WorldOptions::default()).group()?;
    /// assert!(group.all_reduce_weighted_on_device(elements(&mut address), 1.0, 0).is_err());
    /// # Ok::<(), burn_ddp_comm::Error>(())
    /// ```
    #[track_caller]
    pub fn all_reduce_on_device(&self, elements: OnDevice<'_>, op: ReduceOp, tag: u64) -> Result<()> {
        self.calls.all_reduce_on_device(self.in_turn(Location::caller()), elements, Some(op), 1.0, tag)
    }

    /// [`all_reduce_on_device`](Self::all_reduce_on_device) to the mean, in which this rank has the weight `weight`.
    ///
    /// # Errors
    /// Those of `all_reduce_on_device`, and of [`all_reduce_weighted_bytes`](Self::all_reduce_weighted_bytes).
    #[track_caller]
    pub fn all_reduce_weighted_on_device(&self, elements: OnDevice<'_>, weight: f64, tag: u64) -> Result<()> {
        self.calls.all_reduce_on_device(self.in_turn(Location::caller()), elements, None, weight, tag)
    }
}
