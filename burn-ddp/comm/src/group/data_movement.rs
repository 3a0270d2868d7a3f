//! Collectives that move elements without changing them.

use std::panic::Location;

use super::ProcessGroup;
#[cfg(doc)]
use crate::Error;
use crate::dtype::Element;
use crate::{DType, Result, TensorType};

impl ProcessGroup {
    /// Copies the root's buffer to all ranks.
    ///
    /// Each rank passes a buffer of the same length; afterwards each buffer holds the root's elements. Blocks. Costs
    /// one step, in which the root sends its buffer to each other rank.
    ///
    /// # Errors
    /// Those of all collectives. [`Error::InvalidArgument`], which leaves the group usable, if there is no such root.
    ///
    /// ```
    /// use burn_ddp_comm::World;
    ///
    /// World::spawn(2, |world| {
    ///     let group = world.group()?;
    ///     let mut x = [world.rank() as i64, 7];
    ///     group.broadcast(&mut x, 1)?;
    ///     assert_eq!(x, [1, 7]);
    ///     assert!(group.broadcast(&mut x, 2).is_err()); // there is no rank 2
    ///     Ok::<_, burn_ddp_comm::Error>(())
    /// }).into_iter().collect::<Result<(), _>>()?;
    /// # Ok::<(), burn_ddp_comm::Error>(())
    /// ```
    #[track_caller]
    pub fn broadcast<T: Element>(&self, buf: &mut [T], root: usize) -> Result<()> {
        let caller = self.in_turn(Location::caller());
        T::edit(buf, |bytes| self.calls.broadcast(caller, T::DTYPE, bytes, root))
    }

    /// [`broadcast`](Self::broadcast) on the bytes of `dtype` elements.
    ///
    /// # Errors
    /// Those of [`broadcast`](Self::broadcast); [`Error::InvalidArgument`] also if the bytes are not whole elements.
    ///
    /// # Example
    ///
    /// As in [`DType`](crate::DType).
    #[track_caller]
    pub fn broadcast_bytes(&self, elements: impl Into<TensorType>, buf: &mut [u8], root: usize) -> Result<()> {
        let caller = self.in_turn(Location::caller());
        self.calls.broadcast(caller, elements, buf, root)
    }

    /// Collects all ranks' buffers on every rank.
    ///
    /// Each rank passes `n` elements and gets `[world, n]`, where row `r` is from rank `r`. Blocks. Costs one step, in
    /// which each rank sends its buffer to each other rank.
    ///
    /// # Errors
    /// Those of all collectives.
    ///
    /// ```
    /// use burn_ddp_comm::World;
    ///
    /// World::spawn(3, |world| {
    ///     let group = world.group()?;
    ///     let rows = group.all_gather(&[world.rank() as u8, 9])?;
    ///     assert_eq!(rows, [0, 9, 1, 9, 2, 9]);
    ///     Ok::<_, burn_ddp_comm::Error>(())
    /// }).into_iter().collect::<Result<(), _>>()?;
    /// # Ok::<(), burn_ddp_comm::Error>(())
    /// ```
    #[track_caller]
    pub fn all_gather<T: Element>(&self, input: &[T]) -> Result<Vec<T>> {
        let mut rows = T::zeros(input.len() * self.world_size());
        let caller = self.in_turn(Location::caller());
        T::edit(&mut rows, |rows| self.calls.all_gather(caller, T::DTYPE, T::bytes(input), rows, 0))?;
        Ok(rows)
    }

    /// [`all_gather`](Self::all_gather) on the bytes of `dtype` elements.
    ///
    /// # Errors
    /// Those of all collectives; [`Error::InvalidArgument`] if the bytes are not whole elements.
    ///
    /// # Example
    ///
    /// As in [`DType`](crate::DType).
    #[track_caller]
    pub fn all_gather_bytes(&self, elements: impl Into<TensorType>, input: &[u8]) -> Result<Vec<u8>> {
        let mut rows = vec![0; input.len() * self.world_size()];
        let caller = self.in_turn(Location::caller());
        self.calls.all_gather(caller, elements, input, &mut rows, 0)?;
        Ok(rows)
    }

    /// [`all_gather`](Self::all_gather) on the bytes of `dtype` elements, into `rows`, which is `[world, n]`. `tag` is
    /// compared between ranks like the other arguments.
    ///
    /// # Errors
    /// Those of all collectives; [`Error::InvalidArgument`] if the bytes are not whole elements, or `rows` is not
    /// `world` times as long as `input`.
    ///
    /// # Example
    ///
    /// As in [`DType`](crate::DType).
    #[track_caller]
    pub fn all_gather_tagged(&self, dtype: DType, input: &[u8], rows: &mut [u8], tag: u64) -> Result<()> {
        let caller = self.in_turn(Location::caller());
        self.calls.all_gather(caller, dtype, input, rows, tag)
    }

    /// Collects all ranks' buffers on one rank.
    ///
    /// Each rank passes `n` elements; the root gets `[world, n]`, where row `r` is from rank `r`, and the other ranks
    /// get `None`. Blocks. Costs one step, in which each rank sends its buffer to the root.
    ///
    /// # Errors
    /// Those of all collectives. [`Error::InvalidArgument`], which leaves the group usable, if there is no such root.
    ///
    /// ```
    /// use burn_ddp_comm::World;
    ///
    /// World::spawn(3, |world| {
    ///     let group = world.group()?;
    ///     let rows = group.gather(&[world.rank() as u8, 9], 1)?;
    ///     assert_eq!(rows, (world.rank() == 1).then(|| vec![0, 9, 1, 9, 2, 9]));
    ///     assert!(group.gather(&[0_u8], 3).unwrap_err().group_usable()); // there is no rank 3
    ///     Ok::<_, burn_ddp_comm::Error>(())
    /// }).into_iter().collect::<Result<(), _>>()?;
    /// # Ok::<(), burn_ddp_comm::Error>(())
    /// ```
    #[track_caller]
    pub fn gather<T: Element>(&self, input: &[T], root: usize) -> Result<Option<Vec<T>>> {
        let caller = self.in_turn(Location::caller());
        self.calls.gather_elements(caller, input, root)
    }

    /// [`gather`](Self::gather) on the bytes of `dtype` elements.
    ///
    /// # Errors
    /// Those of [`gather`](Self::gather); [`Error::InvalidArgument`] also if the bytes are not whole elements.
    ///
    /// # Example
    ///
    /// As in [`DType`](crate::DType).
    #[track_caller]
    pub fn gather_bytes(&self, elements: impl Into<TensorType>, input: &[u8], root: usize) -> Result<Option<Vec<u8>>> {
        let caller = self.in_turn(Location::caller());
        let mut rows = (self.rank() == root).then(|| vec![0; input.len() * self.world_size()]);
        self.calls.gather(caller, elements, input, rows.as_deref_mut(), root)?;
        Ok(rows)
    }

    /// Gives each rank a row of the root's buffer.
    ///
    /// The root passes an input of `[world, n]` elements, and each rank an output of `n`; afterwards the output of rank
    /// `r` holds row `r`. The input of other ranks than the root is ignored. Blocks. Costs one step, in which the root
    /// sends one row to each other rank.
    ///
    /// # Errors
    /// Those of all collectives. [`Error::InvalidArgument`], which leaves the group usable, if there is no such root.
    /// [`Error::PeerFailed`] of the root, on all ranks and ending the world, if the root passes no input or its input
    /// is not `world` times as long as its output.
    ///
    /// ```
    /// use burn_ddp_comm::World;
    ///
    /// World::spawn(2, |world| {
    ///     let group = world.group()?;
    ///     let rows = (world.rank() == 0).then_some([1.0, 2.0, 3.0, 4.0]);
    ///     let mut mine = [0.0; 2];
    ///     group.scatter(rows.as_ref().map(|rows| &rows[..]), &mut mine, 0)?;
    ///     assert_eq!(mine, if world.rank() == 0 { [1.0, 2.0] } else { [3.0, 4.0] });
    ///     assert!(group.scatter(None, &mut mine, 2).unwrap_err().group_usable()); // there is no rank 2
    ///     Ok::<_, burn_ddp_comm::Error>(())
    /// }).into_iter().collect::<Result<(), _>>()?;
    /// # Ok::<(), burn_ddp_comm::Error>(())
    /// ```
    #[track_caller]
    pub fn scatter<T: Element>(&self, input: Option<&[T]>, output: &mut [T], root: usize) -> Result<()> {
        let caller = self.in_turn(Location::caller());
        T::edit(output, |output| self.calls.scatter(caller, T::DTYPE, input.map(T::bytes), output, root))
    }

    /// [`scatter`](Self::scatter) on the bytes of `dtype` elements.
    ///
    /// # Errors
    /// Those of [`scatter`](Self::scatter); [`Error::InvalidArgument`] also if the bytes are not whole elements.
    ///
    /// # Example
    ///
    /// As in [`DType`](crate::DType).
    #[track_caller]
    pub fn scatter_bytes(
        &self,
        elements: impl Into<TensorType>,
        input: Option<&[u8]>,
        output: &mut [u8],
        root: usize,
    ) -> Result<()> {
        self.calls.scatter(self.in_turn(Location::caller()), elements, input, output, root)
    }

    /// Gives each rank a row of every rank's buffer.
    ///
    /// Each rank passes an input and an output of `[world, n]` elements; afterwards row `r` of rank `j`'s output is row
    /// `j` of rank `r`'s input. Blocks. Costs one step, in which each rank sends one row to each other rank.
    ///
    /// # Errors
    /// Those of all collectives. [`Error::InvalidArgument`], which leaves the group usable, if input and output differ
    /// in length, or if the length is not a whole number of rows.
    ///
    /// ```
    /// use burn_ddp_comm::World;
    ///
    /// World::spawn(3, |world| {
    ///     let group = world.group()?;
    ///     let rank = world.rank() as i32;
    ///     let mut rows = [0; 3];
    ///     group.all_to_all(&[10 * rank, 10 * rank + 1, 10 * rank + 2], &mut rows)?;
    ///     assert_eq!(rows, [rank, 10 + rank, 20 + rank]);
    ///     assert!(group.all_to_all(&[0; 4], &mut [0; 4]).unwrap_err().group_usable()); // 4 is not 3 × n
    ///     Ok::<_, burn_ddp_comm::Error>(())
    /// }).into_iter().collect::<Result<(), _>>()?;
    /// # Ok::<(), burn_ddp_comm::Error>(())
    /// ```
    #[track_caller]
    pub fn all_to_all<T: Element>(&self, input: &[T], output: &mut [T]) -> Result<()> {
        let caller = self.in_turn(Location::caller());
        T::edit(output, |output| self.calls.all_to_all(caller, T::DTYPE, T::bytes(input), output))
    }

    /// [`all_to_all`](Self::all_to_all) on the bytes of `dtype` elements.
    ///
    /// # Errors
    /// Those of [`all_to_all`](Self::all_to_all); [`Error::InvalidArgument`] also if the bytes are not whole elements.
    ///
    /// # Example
    ///
    /// As in [`DType`](crate::DType).
    #[track_caller]
    pub fn all_to_all_bytes(&self, elements: impl Into<TensorType>, input: &[u8], output: &mut [u8]) -> Result<()> {
        self.calls.all_to_all(self.in_turn(Location::caller()), elements, input, output)
    }
}
