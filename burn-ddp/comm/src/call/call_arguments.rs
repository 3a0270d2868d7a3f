//! A call's arguments, and the checks of arguments that need no other rank.

use std::panic::Location;

use super::{CallSite, Collective};
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
    pub(crate) len_elems: usize,
    /// The root's group rank.
    pub(crate) root: Option<usize>,
    pub(crate) tag: u64,
    pub(crate) weight: f64,
    pub(crate) caller: Caller,
}

impl Request {
    /// A call without elements.
    pub(crate) fn bare(collective: Collective, caller: Caller) -> Request {
        Request { collective, reduce: None, dtype: None, len_elems: 0, root: None, tag: 0, weight: 1.0, caller }
    }

    /// A call with `len_bytes` of `dtype` elements.
    pub(crate) fn elements(collective: Collective, dtype: DType, len_bytes: usize, caller: Caller) -> Request {
        Request { dtype: Some(dtype), len_elems: len_bytes / dtype.size_bytes(), ..Request::bare(collective, caller) }
    }
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
