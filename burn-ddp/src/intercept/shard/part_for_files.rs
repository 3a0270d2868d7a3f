//! This rank's part of a sharded parameter, as files and hashes need it.

use std::collections::HashMap;
use std::ops::Range;

use burn::module::Module;
use burn::tensor::Bytes;
use burn_ddp_comm::{DType, RowDivision};

use super::ShardGroup;
use super::shard_group::Purpose;
use crate::agreement::tell_peers;
use crate::intercept::model_walk::taps;
use crate::intercept::tap_handle::TapHandle;
use crate::{Error, Result};

/// The sharded parameters of `model` by their paths.
pub(crate) fn parts<M: Module>(model: &M) -> HashMap<String, Part> {
    let sharded = |tap: &TapHandle| tap.model.shards().is_some() && tap.model.is_sharded(tap.slot);
    taps(model).into_iter().filter(|(_, tap)| sharded(tap)).map(|(path, tap)| (path, Part(tap))).collect()
}

/// A sharded parameter, of which this rank holds some rows.
#[derive(Clone, Debug)]
pub(crate) struct Part(TapHandle);

impl Part {
    /// Shape of the whole parameter.
    pub(crate) fn dims(&self) -> &[usize] {
        &self.0.model.slots[self.0.slot].dims
    }

    /// Shape of the rows of this rank.
    pub(crate) fn own_dims(&self) -> Vec<usize> {
        let own = self.shards().map_or(self.dims()[0], |shards| self.division(0).rows_of(shards.rank()).len());
        [&[own], &self.dims()[1..]].concat()
    }

    /// Bytes of the rows of this rank, of `element_bytes` per element.
    pub(crate) fn own_len_bytes(&self, element_bytes: usize) -> usize {
        self.own_dims().iter().product::<usize>() * element_bytes
    }

    /// Bytes of the rows of each rank in the whole, of `element_bytes` per element.
    pub(crate) fn byte_ranges(&self, element_bytes: usize) -> Vec<Range<usize>> {
        let division = self.division(element_bytes);
        (0..division.world_size).map(|rank| division.bytes_of(rank)).collect()
    }

    /// Checks that a value of this rank has the shape that `wrap` left it.
    pub(crate) fn check(&self, dims: &[usize]) -> Result<()> {
        let expected = self.own_dims();
        if dims == expected {
            return Ok(());
        }
        let path = &self.0.model.slots[self.0.slot].path;
        Err(Error::invalid(format!(
            "this rank's part of {path} has shape {dims:?}, but `wrap` gave it {expected:?}: the parameter was replaced"
        )))
    }

    /// Ends the waits of the other ranks in [`gather`](Self::gather) with an error of this rank.
    pub(crate) fn tell_peers(&self, error: &Error) {
        tell_peers(&self.0.model.ddp, error);
    }

    /// Rows of all ranks, one after the other, of `element_bytes` per element. `own` are the bytes of this rank's.
    /// *Collective*.
    pub(crate) fn gather(&self, element_bytes: usize, own: &[u8]) -> Result<Bytes> {
        let Some(shards) = self.shards() else { return Ok(Bytes::from_bytes_vec(own.to_vec())) };
        // Any dtype of that size: the bits are moved, and not computed with.
        let dtype = match element_bytes {
            8 => DType::F64,
            4 => DType::F32,
            2 => DType::F16,
            _ => DType::U8,
        };
        let divided = (self.division(element_bytes), dtype);
        shards.gather_as(divided, self.0.slot, self.0.value_id, own, Purpose::Whole)
    }

    fn division(&self, element_bytes: usize) -> RowDivision {
        let dims = self.dims();
        let world_size = self.shards().map_or(1, |shards| shards.rows(self.0.slot).world_size);
        RowDivision { rows: dims[0], row_bytes: dims[1..].iter().product::<usize>() * element_bytes, world_size }
    }

    fn shards(&self) -> Option<&ShardGroup> {
        self.0.model.shards()
    }
}
