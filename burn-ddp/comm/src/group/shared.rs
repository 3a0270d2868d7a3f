//! Reductions of buffers where they are.

use std::panic::Location;

use super::ProcessGroup;
use crate::{DType, ReduceOp, Result, SharedBuffer, SharedView};

impl ProcessGroup {
    /// Makes buffers of these lengths in bytes for [`all_reduce_shared`](Self::all_reduce_shared). All ranks ask for the same.
    ///
    /// # Errors
    /// Those of all collectives.
    #[track_caller]
    pub fn shared_buffers(&self, lens_bytes: &[usize]) -> Result<Vec<SharedBuffer>> {
        self.core.shared_buffers(self.in_turn(Location::caller()), lens_bytes)
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
        self.core.all_reduce_shared(self.in_turn(Location::caller()), dtype, buffer, op, tag)
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
        self.core.all_reduce_weighted_shared(self.in_turn(Location::caller()), dtype, buffer, weight, tag)
    }
}
