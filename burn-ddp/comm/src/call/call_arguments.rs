//! A call's arguments, and the checks of arguments that need no other rank.

use std::panic::Location;

use super::{CallSite, Collective};
use crate::tensor_type::{Shape, TensorType};
use crate::{DType, Error, ReduceOp, Result};

/// Source line of the caller.
pub(crate) type Site = &'static Location<'static>;

/// Origin of a call, as errors and reports show it.
#[derive(Clone, Copy)]
pub(crate) struct Caller {
    pub(crate) site: Site,
    /// True if `site` is the line that wrapped a model, and the call is for that model.
    pub(crate) wrapped: bool,
    /// The training step, if the program has set one.
    pub(crate) step: Option<u64>,
}

impl Caller {
    pub(crate) fn shown(&self) -> CallSite {
        if self.wrapped { CallSite::Wrapped(self.site) } else { CallSite::Here(self.site) }
    }
}

/// The arguments of a call, except its buffers.
#[derive(Clone, Copy)]
pub(crate) struct Request {
    pub(crate) collective: Collective,
    pub(crate) reduce: Option<ReduceOp>,
    pub(crate) dtype: Option<DType>,
    pub(crate) shape: Option<Shape>,
    pub(crate) len_elems: usize,
    /// The root's group rank.
    pub(crate) root: Option<usize>,
    pub(crate) tag: u64,
    /// See [`CallInfo::digest`](super::CallInfo::digest).
    pub(crate) digest: u32,
    pub(crate) weight: f64,
    pub(crate) caller: Caller,
}

impl Request {
    /// A call without elements.
    pub(crate) fn bare(collective: Collective, caller: Caller) -> Request {
        Request {
            collective,
            reduce: None,
            dtype: None,
            shape: None,
            len_elems: 0,
            root: None,
            tag: 0,
            digest: 0,
            weight: 1.0,
            caller,
        }
    }

    /// A call with `len_bytes` of elements.
    pub(crate) fn elements(
        collective: Collective,
        elements: impl Into<TensorType>,
        len_bytes: usize,
        caller: Caller,
    ) -> Request {
        let TensorType { dtype, shape } = elements.into();
        let len_elems = len_bytes / dtype.size_bytes();
        Request { dtype: Some(dtype), shape, len_elems, ..Request::bare(collective, caller) }
    }
}

/// Word of a [`digest`] that stands for elements in a device's memory.
pub(crate) const ON_DEVICE: u64 = 1;

/// Hash of arguments that ranks compare only by it.
pub(crate) fn digest(words: impl IntoIterator<Item = u64>) -> u32 {
    let mix = |hash: u64, word: u64| {
        let product = u128::from(hash ^ word) * 0x9e37_79b9_7f4a_7c15;
        (product >> 64) as u64 ^ product as u64
    };
    let hash = words.into_iter().fold(0x2545_f491_4f6c_dd1d, mix);
    (hash >> 32) as u32 ^ hash as u32
}

/// The error of a call that every rank refuses for the same reason, so that the group stays usable.
pub(crate) fn refuse<R>(message: String) -> Result<R> {
    Err(Error::InvalidArgument { message, rank: None, during: None })
}

/// Fails if `len_bytes` is not a whole number of elements.
pub(crate) fn check_whole(dtype: DType, len_bytes: usize) -> Result<()> {
    if len_bytes.is_multiple_of(dtype.size_bytes()) {
        return Ok(());
    }
    refuse(format!("{len_bytes} bytes are not a whole number of {dtype} elements of {} bytes", dtype.size_bytes()))
}

/// Fails if `op` is not defined for `dtype`.
pub(crate) fn check_op(op: ReduceOp, dtype: DType) -> Result<()> {
    if op.supports(dtype) {
        return Ok(());
    }
    let instead = if dtype == DType::Bool { "min (and) and max (or)" } else { "sum, min, max and product" };
    refuse(format!("{op} is not defined for {dtype}; {instead} are"))
}

/// Fails unless the buffer `what`, of `len_bytes`, is `[count, n]` with rows of `n` elements in `row_bytes`.
pub(crate) fn check_rows(what: &str, dtype: DType, len_bytes: usize, count: usize, row_bytes: usize) -> Result<()> {
    if row_bytes.checked_mul(count) == Some(len_bytes) {
        return Ok(());
    }
    let (got, room) = (len_bytes / dtype.size_bytes(), row_bytes / dtype.size_bytes());
    refuse(format!("{what} of {got} elements is not [world, n] = {count} × {room} elements"))
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    #[test]
    fn arguments_that_differ_have_different_digests() {
        let weight = |last: u32| digest([1000, 4096, 32_f64.to_bits(), f64::from(last).to_bits()]);
        let rows = |rows: u64| digest([rows, 4096]);
        let different: HashSet<u32> = (1..=20_000).map(weight).chain((1..=20_000).map(rows)).collect();
        // Of 40,000 random numbers of 32 bits 0.2 pairs are equal.
        assert!(different.len() >= 39_995, "{}", different.len());
    }
}
