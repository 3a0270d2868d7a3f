//! Collectives on tensors whose rows are divided between the ranks, evenly or not.

use std::any::Any;
use std::panic::Location;

use super::{CallPath, Pending, ProcessGroup};
#[cfg(doc)]
use crate::Error;
use crate::call::call_arguments::{Caller, ON_DEVICE, Request, check_op, digest, refuse};
use crate::call::{Call, Collective};
use crate::engine::{Engine, OwnLeaves, checked_weights, gather_rows, reduce_leaf_rows, reduce_rows};
use crate::{DType, PartReduction, ReduceOp, Result, RowDivision, SharedBuffer, SharedView};

impl ProcessGroup {
    /// Collects the parts of a divided tensor on every rank, as FSDP gathers parameters.
    ///
    /// Each rank passes its part, the bytes [`division.bytes_of(rank)`](RowDivision::bytes_of) of the whole tensor, and
    /// room for the whole, of [`division.len_bytes()`](RowDivision::len_bytes). The ranks compare the division and the
    /// `tag`. Blocks. Costs one step, in which each rank sends its part to each other rank.
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
    ///     let mut whole = [0; 6];
    ///     let group = world.group()?;
    ///     group.all_gather_parts(DType::U8, division, part, &mut whole, 7)?;
    ///     assert_eq!(whole, [1, 2, 3, 4, 5, 6]);
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
        whole: &mut [u8],
        tag: u64,
    ) -> Result<()> {
        let caller = self.in_turn(Location::caller());
        self.calls.all_gather_parts(caller, dtype, division, (part, whole), tag)
    }

    /// [`all_gather_parts`](Self::all_gather_parts) into a buffer of [`shared_buffers`](Self::shared_buffers).
    ///
    /// All ranks pass the buffer of the same index in the same list, made as long as the whole tensor by
    /// [`SharedBuffer::set_len`]; its contents are lost. Each gets a view of the whole tensor. Between ranks that share
    /// memory (`shm`, and the machines of `shm+tcp`) each rank copies its part to the one result, which all read in
    /// place; elsewhere this costs what `all_gather_parts` costs. So it does everywhere, in new memory, while a rank
    /// holds a view of the buffer's last result.
    ///
    /// # Errors
    /// Those of `all_gather_parts`.
    ///
    /// ```
    /// use burn_ddp_comm::{DType, PartReduction, ReduceOp, RowDivision, World};
    ///
    /// World::spawn(2, |world| {
    ///     let group = world.group()?;
    ///     let buffer = &mut group.shared_buffers(&[8])?[0]; // as long as the largest tensor
    ///     let division = RowDivision { rows: 3, row_bytes: 2, world_size: 2 };
    ///     buffer.set_len(division.len_bytes());
    ///     let part = [&[1_u8, 2, 3, 4][..], &[5, 6]][world.rank()];
    ///     let whole = group.all_gather_parts_shared(DType::U8, division, part, buffer, 7)?;
    ///     assert_eq!(whole[..], [1, 2, 3, 4, 5, 6]);
    ///
    ///     buffer.bytes_mut().copy_from_slice(&whole);
    ///     let sum = PartReduction::Op(ReduceOp::Sum);
    ///     let part = group.reduce_scatter_parts_shared(DType::U8, division, buffer, &sum, 8)?;
    ///     assert_eq!(part, [&[2, 4, 6, 8][..], &[10, 12]][world.rank()]);
    ///     Ok::<_, burn_ddp_comm::Error>(())
    /// }).into_iter().collect::<Result<(), _>>()?;
    /// # Ok::<(), burn_ddp_comm::Error>(())
    /// ```
    #[track_caller]
    pub fn all_gather_parts_shared(
        &self,
        dtype: DType,
        division: RowDivision,
        part: &[u8],
        buffer: &mut SharedBuffer,
        tag: u64,
    ) -> Result<SharedView> {
        let caller = self.in_turn(Location::caller());
        let lens = Some((part.len(), buffer.len_bytes()));
        self.calls.gather_divided(caller, (dtype, division), lens, tag, |engine, call| {
            engine.all_gather_shared(call, division, part, buffer)
        })
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
            let mut whole = vec![0; division.len_bytes()];
            calls.all_gather_parts(caller, dtype, division, (&part, &mut whole), tag)?;
            Ok(whole)
        })
    }

    /// Reduces a divided tensor over all ranks and leaves each rank its part, as FSDP reduces gradients.
    ///
    /// Each rank passes its whole tensor, of [`division.len_bytes()`](RowDivision::len_bytes), and gets the bytes
    /// [`division.bytes_of(rank)`](RowDivision::bytes_of) of the all-reduced tensor, with the bits of an all-reduce
    /// where the engine reduces in host memory. The ranks compare the division, the op or the weights, and the `tag`.
    /// Blocks. Costs one step, in which each rank sends one part to each other rank. If the rows do not divide evenly,
    /// or the weights are not equal, it also costs memory for a copy of the whole tensor.
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

    /// [`reduce_scatter_parts`](Self::reduce_scatter_parts) of tensors in a buffer of
    /// [`shared_buffers`](Self::shared_buffers).
    ///
    /// All ranks pass the buffer of the same index in the same list, made as long as the whole tensor by
    /// [`SharedBuffer::set_len`] and then filled; its contents are lost. On `shm` each rank reads its part of all
    /// buffers in place; on the other engines this costs what `reduce_scatter_parts` costs.
    ///
    /// # Errors
    /// Those of `reduce_scatter_parts`.
    ///
    /// # Example
    ///
    /// As in [`all_gather_parts_shared`](Self::all_gather_parts_shared).
    #[track_caller]
    pub fn reduce_scatter_parts_shared(
        &self,
        dtype: DType,
        division: RowDivision,
        buffer: &mut SharedBuffer,
        reduction: &PartReduction,
        tag: u64,
    ) -> Result<Vec<u8>> {
        let (caller, len) = (self.in_turn(Location::caller()), Some(buffer.len_bytes()));
        let (mut part, rank) = (Vec::new(), self.rank());
        self.calls.reduce_divided(caller, (dtype, division), len, (reduction, tag), |engine, call, reduction| {
            part.resize(division.bytes_of(rank).len(), 0);
            engine.reduce_scatter_shared(call, (dtype, division), buffer, reduction, &mut part)
        })?;
        Ok(part)
    }

    /// [`all_gather_parts`](Self::all_gather_parts) in a device's memory, on an engine that reaches it, such as NCCL.
    ///
    /// `place` names this rank's part and the memory of the whole tensor, in a type of the engine's own. As in
    /// [`all_reduce_on_device`](Self::all_reduce_on_device), the engine defines if the result is complete when the call
    /// returns: NCCL returns once the collective is enqueued on the device. Costs two exchanges of small messages
    /// between the hosts; then each device sends its part to each other one.
    ///
    /// # Errors
    /// Those of `all_gather_parts`, except for buffers; [`Error::InvalidArgument`] if `place` does not fit the
    /// division; [`Error::Environment`] if the group's engine works in host memory only, as all engines of this crate
    /// do.
    ///
    /// ```
    /// use burn_ddp_comm::{DType, PartReduction, ReduceOp, RowDivision, World, WorldOptions};
    ///
    /// let mut address = 0x7f00_0000_u64; // stands for the address of elements on a GPU
    /// let division = RowDivision { rows: 3, row_bytes: 4, world_size: 1 };
    /// let group = World::solo(WorldOptions::default()).group()?;
    /// let error = group.all_gather_parts_on_device(DType::F32, division, &mut address, 0).unwrap_err();
    /// assert!(error.to_string().contains("works in host memory only"));
    /// let (group, sum) = (World::solo(WorldOptions::default()).group()?, PartReduction::Op(ReduceOp::Sum));
    /// assert!(group.reduce_scatter_parts_on_device(DType::F32, division, &mut address, &sum, 0).is_err());
    /// # Ok::<(), burn_ddp_comm::Error>(())
    /// ```
    #[track_caller]
    pub fn all_gather_parts_on_device(
        &self,
        dtype: DType,
        division: RowDivision,
        place: &mut dyn Any,
        tag: u64,
    ) -> Result<()> {
        let caller = self.in_turn(Location::caller());
        self.calls.gather_divided(caller, (dtype, division), None, tag, |engine, call| {
            engine.all_gather_on_device(call, (dtype, division), place)
        })
    }

    /// [`reduce_scatter_parts`](Self::reduce_scatter_parts) in a device's memory, on an engine that reaches it: `place`
    /// names the whole tensor and the memory of this rank's part. Otherwise like
    /// [`all_gather_parts_on_device`](Self::all_gather_parts_on_device).
    ///
    /// # Errors
    /// Those of `reduce_scatter_parts` and of `all_gather_parts_on_device`.
    ///
    /// # Example
    ///
    /// As in [`all_gather_parts_on_device`](Self::all_gather_parts_on_device).
    #[track_caller]
    pub fn reduce_scatter_parts_on_device(
        &self,
        dtype: DType,
        division: RowDivision,
        place: &mut dyn Any,
        reduction: &PartReduction,
        tag: u64,
    ) -> Result<()> {
        let caller = self.in_turn(Location::caller());
        self.calls.reduce_divided(caller, (dtype, division), None, (reduction, tag), |engine, call, reduction| {
            engine.reduce_scatter_on_device(call, (dtype, division), reduction, place)
        })
    }

    /// [`all_reduce_leaves_shared`](Self::all_reduce_leaves_shared) of a divided tensor, of which each rank gets its
    /// rows: `buffer` is `[rows of leaves, tensor]`. Costs an [`all_to_all`](Self::all_to_all) of it.
    ///
    /// # Errors
    /// Those of `all_reduce_leaves_shared`.
    ///
    /// # Example
    ///
    /// ```
    /// use burn_ddp_comm::{DType, LogicalRanks, OwnLeaves, RowDivision, World};
    ///
    /// World::spawn(2, |world| {
    ///     let (group, rank) = (world.group()?, world.rank());
    ///     let own = OwnLeaves { division: LogicalRanks::new(2, 2).unwrap(), weights: &[1.0] };
    ///     let division = RowDivision { rows: 2, row_bytes: 4, world_size: 2 };
    ///     let tensor = [1.0_f32, 3.0].map(|x| (x * (rank + 1) as f32).to_le_bytes()).concat();
    ///     let part = group.reduce_scatter_leaves(DType::F32, division, &tensor, own, 0)?;
    ///     assert_eq!(part, [1.5_f32, 4.5][rank].to_le_bytes());
    ///     Ok::<_, burn_ddp_comm::Error>(())
    /// }).into_iter().collect::<Result<(), _>>()?;
    /// # Ok::<(), burn_ddp_comm::Error>(())
    /// ```
    #[track_caller]
    pub fn reduce_scatter_leaves(
        &self,
        dtype: DType,
        division: RowDivision,
        buffer: &[u8],
        own: OwnLeaves<'_>,
        tag: u64,
    ) -> Result<Vec<u8>> {
        self.calls.reduce_scatter_leaves(self.in_turn(Location::caller()), (dtype, division), buffer, own, tag)
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
        (part, whole): (&[u8], &mut [u8]),
        tag: u64,
    ) -> Result<()> {
        let lens = Some((part.len(), whole.len()));
        self.gather_divided(caller, (dtype, division), lens, tag, |engine, call| {
            gather_rows(engine, call, division, part, whole)
        })
    }

    fn reduce_scatter_parts(
        &self,
        caller: Caller,
        dtype: DType,
        division: RowDivision,
        whole: &[u8],
        request: (&PartReduction, u64),
    ) -> Result<Vec<u8>> {
        let mut part = Vec::new();
        self.reduce_divided(caller, (dtype, division), Some(whole.len()), request, |engine, call, reduction| {
            part.resize(division.bytes_of(self.rank).len(), 0);
            reduce_rows(engine, call, (dtype, division), whole, reduction, &mut part)
        })?;
        Ok(part)
    }

    fn reduce_scatter_leaves(
        &self,
        caller: Caller,
        (dtype, division): (DType, RowDivision),
        buffer: &[u8],
        own: OwnLeaves<'_>,
        tag: u64,
    ) -> Result<Vec<u8>> {
        division.check(dtype, self.size())?;
        let ranges: Vec<_> = (0..self.size()).map(|rank| division.bytes_of(rank)).collect();
        let mut part = vec![0; ranges[self.rank].len()];
        self.call(self.request_of_leaves(caller, dtype, buffer.len(), own, tag), |engine, call| {
            self.check_leaves(dtype, buffer.len(), own)?;
            check_bytes(buffer.len(), own.division.rows() * division.len_bytes())?;
            reduce_leaf_rows(engine, call, (dtype, own), buffer, &ranges, &mut part)
        })?;
        Ok(part)
    }

    /// The call in which `gather` gathers the parts of a divided tensor. `lens` are the bytes of this rank's part and
    /// of the room for the whole; `None` in a device's memory, which the engine checks.
    fn gather_divided<R>(
        &self,
        caller: Caller,
        (dtype, division): (DType, RowDivision),
        lens: Option<(usize, usize)>,
        tag: u64,
        gather: impl FnOnce(&mut dyn Engine, &Call) -> Result<R>,
    ) -> Result<R> {
        division.check(dtype, self.size())?;
        if let Some((part_bytes, whole_bytes)) = lens {
            check_bytes(whole_bytes, division.len_bytes())?;
            check_bytes(part_bytes, division.bytes_of(self.rank).len())?;
        }
        let request = Request::elements(Collective::AllGather, dtype, division.part_bytes(), caller);
        let memory = lens.is_none().then_some(ON_DEVICE);
        self.call(Request { tag, digest: digest(division.words().into_iter().chain(memory)), ..request }, gather)
    }

    /// The call in which `reduce` reduces a divided tensor of `whole_bytes`; `None` in a device's memory, which the
    /// engine checks.
    fn reduce_divided(
        &self,
        caller: Caller,
        (dtype, division): (DType, RowDivision),
        whole_bytes: Option<usize>,
        (reduction, tag): (&PartReduction, u64),
        reduce: impl FnOnce(&mut dyn Engine, &Call, &PartReduction) -> Result<()>,
    ) -> Result<()> {
        let memory = whole_bytes.is_none().then_some(ON_DEVICE);
        division.check(dtype, self.size())?;
        whole_bytes.map_or(Ok(()), |bytes| check_bytes(bytes, division.len_bytes()))?;
        let (op, weights) = match reduction {
            PartReduction::Op(op) => (Some(*op), &[][..]),
            PartReduction::Weighted(weights) => (None, &weights[..]),
        };
        let weight_bits = weights.iter().map(|weight| weight.to_bits());
        let digest = digest(division.words().into_iter().chain(weight_bits).chain(memory));
        let request = Request::elements(Collective::ReduceScatter, dtype, division.part_bytes(), caller);
        self.call(Request { reduce: op, tag, digest, ..request }, |engine, call| {
            check_op(op.unwrap_or(ReduceOp::Mean), dtype)?;
            if op.is_some() {
                return reduce(engine, call, reduction);
            }
            if weights.len() != self.size() {
                return refuse(format!("{} weights for {} ranks", weights.len(), self.size()));
            }
            let weights = checked_weights(call, weights)?;
            let equal = weights.iter().all(|weight| *weight == weights[0]).then_some(PartReduction::Op(ReduceOp::Mean));
            reduce(engine, call, equal.as_ref().unwrap_or(reduction))
        })
    }
}

/// Fails unless a buffer has the length that its division says.
fn check_bytes(len_bytes: usize, expected: usize) -> Result<()> {
    if len_bytes == expected {
        return Ok(());
    }
    refuse(format!("a buffer of {len_bytes} bytes, but the RowDivision has {expected}"))
}
