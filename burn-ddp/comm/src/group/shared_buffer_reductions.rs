//! Reductions of buffers in the memory where they are: memory that ranks share, or a device's.

use std::panic::Location;

use super::ProcessGroup;
use crate::engine::{OnDevice, OwnLeaves};
use crate::{DType, ReduceOp, Result, SharedBuffer, SharedView};

impl ProcessGroup {
    /// Makes buffers of these lengths in bytes for the calls whose names end in `_shared`.
    ///
    /// All ranks pass the same lengths; each gets one buffer per length, in this order. Blocks. Costs a
    /// [`barrier`](Self::barrier). Where ranks of one machine share memory (`shm`, `shm+tcp`), they also map a new
    /// segment, which holds, per buffer, one input of each of these ranks and one result.
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

    /// Reduces `dtype` elements in a buffer of [`shared_buffers`](Self::shared_buffers) over all ranks.
    ///
    /// All ranks pass the buffer of the same index in the same list; each gets a view of the result. Blocks. Costs what
    /// [`all_reduce`](Self::all_reduce) costs, except on `shm`: there rank `j` reduces slice `j` of all inputs into one
    /// result, which all ranks read in place, so nothing is copied. While a rank holds a view of a buffer's last
    /// result, the next reduction of that buffer costs a copy.
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

    /// [`all_reduce_weighted`](Self::all_reduce_weighted) on a buffer of [`shared_buffers`](Self::shared_buffers);
    /// buffer, view and cost as in [`all_reduce_shared`](Self::all_reduce_shared).
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

    /// Reduces the sums of leaves in a buffer of [`shared_buffers`](Self::shared_buffers) to their mean, or to their
    /// sum if `own` has no weights: up one tree over all leaves, whatever the number of ranks.
    ///
    /// The buffer is `[rows, n]`, one row for each subtree of this rank; a row whose subtree has nothing to add is −0,
    /// which changes no sum, and so are rows behind the last subtree. The result is `[n]`: `Σ sums / Σ weights`.
    /// Elements are f32 or f64, so that partial sums are not rounded on the way.
    ///
    /// With one row per rank it costs what [`all_reduce_shared`](Self::all_reduce_shared) costs; with `r` rows
    /// `(r + 1) / 2` times its bytes, and two calls.
    ///
    /// `tag` is compared between ranks like the other arguments; 0 if there is nothing to compare.
    ///
    /// # Errors
    /// Those of [`all_reduce_weighted_bytes`](Self::all_reduce_weighted_bytes).
    ///
    /// # Example
    ///
    /// ```
    /// use burn_ddp_comm::{DType, LogicalRanks, OwnLeaves, World};
    ///
    /// // The mean of 0, 1, … 5 on 1, 2 and 4 ranks.
    /// for ranks in [1, 2, 4] {
    ///     World::spawn(ranks, |world| {
    ///         let (group, division) = (world.group()?, LogicalRanks::new(6, ranks).unwrap());
    ///         let mut buffer = group.shared_buffers(&[division.rows() * 8])?.remove(0);
    ///         let (mut sums, mut weights) = (vec![-0.0; division.rows()], vec![0.0; division.rows()]);
    ///         for (row, leaves) in division.subtrees(world.rank()).into_iter().enumerate() {
    ///             (sums[row], weights[row]) = (leaves.clone().map(|leaf| leaf as f64).sum(), leaves.len() as f64);
    ///         }
    ///         let bytes: Vec<u8> = sums.iter().flat_map(|sum| sum.to_le_bytes()).collect();
    ///         buffer.bytes_mut().copy_from_slice(&bytes);
    ///         let own = OwnLeaves { division, weights: &weights };
    ///         let mean = group.all_reduce_leaves_shared(DType::F64, &mut buffer, own, 0)?;
    ///         assert_eq!(mean[..], 2.5_f64.to_le_bytes());
    ///         Ok::<_, burn_ddp_comm::Error>(())
    ///     }).into_iter().collect::<Result<(), _>>()?;
    /// }
    /// # Ok::<(), burn_ddp_comm::Error>(())
    /// ```
    #[track_caller]
    pub fn all_reduce_leaves_shared(
        &self,
        dtype: DType,
        buffer: &mut SharedBuffer,
        own: OwnLeaves<'_>,
        tag: u64,
    ) -> Result<SharedView> {
        self.calls.all_reduce_leaves_shared(self.in_turn(Location::caller()), dtype, buffer, own, tag)
    }

    /// Reduces elements in a device's memory over all ranks, on an engine that reaches that memory, such as NCCL.
    ///
    /// All ranks pass equally many elements of the same type. The engine defines where the result lies, and if it is
    /// complete when the call returns: NCCL returns once the reduction is enqueued on the device. The engine also
    /// determines the cost: NCCL exchanges the calls in host memory in two steps, and the elements between the devices.
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
    /// let mut address = 0x7f00_0000; // stands for the address of elements on a GPU
    /// let group = World::solo(WorldOptions::default()).group()?;
    /// let error = group.all_reduce_on_device(elements(&mut address), ReduceOp::Sum, 0).unwrap_err();
    /// assert!(error.to_string().contains("works in host memory only"));
    /// let group = World::solo(WorldOptions::default()).group()?;
    /// assert!(group.all_reduce_weighted_on_device(elements(&mut address), 1.0, 0).is_err());
    /// # Ok::<(), burn_ddp_comm::Error>(())
    /// ```
    #[track_caller]
    pub fn all_reduce_on_device(&self, elements: OnDevice<'_>, op: ReduceOp, tag: u64) -> Result<()> {
        self.calls.all_reduce_on_device(self.in_turn(Location::caller()), elements, Some(op), 1.0, tag)
    }

    /// [`all_reduce_on_device`](Self::all_reduce_on_device) to the weighted mean, in which this rank has the weight
    /// `weight`. Same cost.
    ///
    /// # Errors
    /// Those of `all_reduce_on_device`, and of [`all_reduce_weighted_bytes`](Self::all_reduce_weighted_bytes).
    #[track_caller]
    pub fn all_reduce_weighted_on_device(&self, elements: OnDevice<'_>, weight: f64, tag: u64) -> Result<()> {
        self.calls.all_reduce_on_device(self.in_turn(Location::caller()), elements, None, weight, tag)
    }
}
