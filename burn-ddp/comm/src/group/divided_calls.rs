//! Collectives on tensors whose rows are divided between the ranks, evenly or not.

use std::panic::Location;

use super::row_division::RowDivision;
use super::{CallPath, Pending, ProcessGroup};
#[cfg(doc)]
use crate::Error;
use crate::call::call_arguments::Caller;
use crate::{DType, ReduceOp, Result};

/// Reduction of a [`reduce_scatter_parts`](ProcessGroup::reduce_scatter_parts).
#[derive(Clone, Debug, PartialEq)]
pub enum PartReduction {
    /// This op, in which all ranks count alike.
    Op(ReduceOp),
    /// The mean with these weights, one per rank, as in [`all_reduce_weighted`](ProcessGroup::all_reduce_weighted).
    Weighted(Vec<f64>),
}

impl ProcessGroup {
    /// Collects the parts of a divided tensor on every rank, as FSDP gathers parameters.
    ///
    /// Each rank passes its part, the bytes [`division.bytes_of(rank)`](RowDivision::bytes_of) of the whole tensor, and
    /// `room` of [`division.padded_len_bytes()`](RowDivision::padded_len_bytes); afterwards the first
    /// [`division.len_bytes()`](RowDivision::len_bytes) of `room` hold the whole tensor. The division is the same on
    /// all ranks, which compare the length of its parts and the `tag`. Blocks. Costs one step, in which each rank sends
    /// its part, padded to the longest, to each other rank.
    ///
    /// # Errors
    /// Those of all collectives. [`Error::InvalidArgument`] if the division is between another number of ranks, if its
    /// rows are not whole elements, or if a buffer has another length than the division says.
    ///
    /// ```
    /// use burn_ddp_comm::{DType, RowDivision, World};
    ///
    /// World::spawn(2, |world| {
    ///     let division = RowDivision { rows: 3, row_bytes: 2, world_size: 2 };
    ///     let part = [&[1_u8, 2, 3, 4][..], &[5, 6]][world.rank()]; // two rows, one row
    ///     let mut room = vec![0; division.padded_len_bytes()];
    ///     let group = world.group()?;
    ///     group.all_gather_parts(DType::U8, division, part, &mut room, 7)?;
    ///     assert_eq!(room[..6], [1, 2, 3, 4, 5, 6]);
    ///     let whole = group.all_gather_parts_async(DType::U8, division, part.to_vec(), 7).wait()?;
    ///     assert_eq!(whole, [1, 2, 3, 4, 5, 6]);
    ///     Ok::<_, burn_ddp_comm::Error>(())
    /// }).into_iter().collect::<Result<(), _>>()?;
    /// # Ok::<(), burn_ddp_comm::Error>(())
    /// ```
    #[track_caller]
    pub fn all_gather_parts(
        &self,
        dtype: DType,
        division: RowDivision,
        part: &[u8],
        room: &mut [u8],
        tag: u64,
    ) -> Result<()> {
        let caller = self.in_turn(Location::caller());
        self.calls.all_gather_parts(caller, dtype, division, (part, room), tag)
    }

    /// Starts an [`all_gather_parts`](Self::all_gather_parts) without blocking; yields the whole tensor.
    ///
    /// # Example
    ///
    /// As in [`all_gather_parts`](Self::all_gather_parts).
    #[track_caller]
    pub fn all_gather_parts_async(
        &self,
        dtype: DType,
        division: RowDivision,
        part: Vec<u8>,
        tag: u64,
    ) -> Pending<Vec<u8>> {
        self.start(Location::caller(), move |calls, caller| {
            let mut room = vec![0; division.padded_len_bytes()];
            calls.all_gather_parts(caller, dtype, division, (&part, &mut room), tag)?;
            room.truncate(division.len_bytes());
            Ok(room)
        })
    }

    /// Reduces a divided tensor over all ranks and leaves each rank its part, as FSDP reduces gradients.
    ///
    /// Each rank passes its whole tensor, of [`division.len_bytes()`](RowDivision::len_bytes), and gets the bytes
    /// [`division.bytes_of(rank)`](RowDivision::bytes_of) of the all-reduced tensor, with the bits of an all-reduce
    /// where the engine reduces in host memory. The division, the reduction and its weights are the same on all ranks,
    /// which compare the length of the parts, the op or the weights, and the `tag`. Blocks. Costs one step, in which
    /// each rank sends one part to each other rank. If the rows do not divide evenly, or the weights are not equal, it
    /// also costs memory for a copy of the whole tensor.
    ///
    /// # Errors
    /// Those of all collectives. [`Error::InvalidArgument`] if the division is between another number of ranks, if its
    /// rows are not whole elements, if the tensor has another length than the division says, if the op is not
    /// [defined](ReduceOp::supports) for the type, or unless there is one weight per rank, each finite and not
    /// negative, and not all 0.
    ///
    /// ```
    /// use burn_ddp_comm::{DType, PartReduction, ReduceOp, RowDivision, World};
    ///
    /// World::spawn(2, |world| {
    ///     let division = RowDivision { rows: 3, row_bytes: 1, world_size: 2 };
    ///     let whole = vec![1, 2, 3 + world.rank() as u8];
    ///     let (group, sum) = (world.group()?, PartReduction::Op(ReduceOp::Sum));
    ///     let part = group.reduce_scatter_parts(DType::U8, division, &whole, &sum, 7)?;
    ///     assert_eq!(part, [&[2, 4][..], &[7]][world.rank()]);
    ///     assert_eq!(group.reduce_scatter_parts_async(DType::U8, division, whole, sum, 7).wait()?, part);
    ///
    ///     let division = RowDivision { rows: 2, row_bytes: 4, world_size: 2 };
    ///     let whole = [world.rank() as f32, 10.0];
    ///     let weights = PartReduction::Weighted(vec![3.0, 1.0]);
    ///     let part = group.reduce_scatter_parts(DType::F32, division, bytemuck::bytes_of(&whole), &weights, 0)?;
    ///     assert_eq!(part, [0.25_f32, 10.0][world.rank()].to_ne_bytes());
    ///     Ok::<_, burn_ddp_comm::Error>(())
    /// }).into_iter().collect::<Result<(), _>>()?;
    /// # Ok::<(), burn_ddp_comm::Error>(())
    /// ```
    #[track_caller]
    pub fn reduce_scatter_parts(
        &self,
        dtype: DType,
        division: RowDivision,
        whole: &[u8],
        reduction: &PartReduction,
        tag: u64,
    ) -> Result<Vec<u8>> {
        let caller = self.in_turn(Location::caller());
        self.calls.reduce_scatter_parts(caller, dtype, division, whole, (reduction, tag))
    }

    /// Starts a [`reduce_scatter_parts`](Self::reduce_scatter_parts) without blocking; yields this rank's part.
    ///
    /// # Example
    ///
    /// As in [`reduce_scatter_parts`](Self::reduce_scatter_parts).
    #[track_caller]
    pub fn reduce_scatter_parts_async(
        &self,
        dtype: DType,
        division: RowDivision,
        whole: Vec<u8>,
        reduction: PartReduction,
        tag: u64,
    ) -> Pending<Vec<u8>> {
        self.start(Location::caller(), move |calls, caller| {
            calls.reduce_scatter_parts(caller, dtype, division, &whole, (&reduction, tag))
        })
    }
}

impl CallPath {
    fn all_gather_parts(
        &self,
        caller: Caller,
        dtype: DType,
        division: RowDivision,
        (part, room): (&[u8], &mut [u8]),
        tag: u64,
    ) -> Result<()> {
        division.check(dtype, self.size(), (room.len(), division.padded_len_bytes()))?;
        let own_bytes = division.bytes_of(self.rank).len();
        division.check(dtype, self.size(), (part.len(), own_bytes))?;
        if own_bytes == division.part_bytes() {
            self.all_gather(caller, dtype, part, room, tag)?;
        } else {
            let mut padded = part.to_vec();
            padded.resize(division.part_bytes(), 0);
            self.all_gather(caller, dtype, &padded, room, tag)?;
        }
        division.close_up(room);
        Ok(())
    }

    fn reduce_scatter_parts(
        &self,
        caller: Caller,
        dtype: DType,
        division: RowDivision,
        whole: &[u8],
        (reduction, tag): (&PartReduction, u64),
    ) -> Result<Vec<u8>> {
        division.check(dtype, self.size(), (whole.len(), division.len_bytes()))?;
        let padded = (!division.is_even()).then(|| division.padded(whole));
        let rows = padded.as_deref().unwrap_or(whole);
        let mut part = vec![0; division.part_bytes()];
        match reduction {
            PartReduction::Op(op) => self.reduce_scatter(caller, dtype, rows, &mut part, (*op, tag))?,
            PartReduction::Weighted(weights) => {
                self.reduce_scatter_weighted(caller, dtype, rows, &mut part, (weights, tag))?;
            }
        }
        part.truncate(division.bytes_of(self.rank).len());
        Ok(part)
    }
}
