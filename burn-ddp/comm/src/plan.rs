//! What a caller wants, and what can be said about it on one rank.

use std::panic::Location;

use crate::call::Collective;
use crate::{DType, Error, ReduceOp, Result};

/// The line that called.
pub(crate) type Site = &'static Location<'static>;

/// From where a call is made: what errors and reports show of it.
#[derive(Clone, Copy)]
pub(crate) struct Caller {
    pub(crate) site: Site,
    /// The training step, if the program says.
    pub(crate) step: Option<u64>,
}

/// What a call is, before it has its turn.
#[derive(Clone, Copy)]
pub(crate) struct Plan {
    pub(crate) collective: Collective,
    pub(crate) reduce: Option<ReduceOp>,
    pub(crate) dtype: Option<DType>,
    pub(crate) len_elems: usize,
    /// By group rank.
    pub(crate) root: Option<usize>,
    pub(crate) tag: u64,
    pub(crate) weight: f64,
    pub(crate) caller: Caller,
}

impl Plan {
    /// A call without elements.
    pub(crate) fn bare(collective: Collective, caller: Caller) -> Plan {
        Plan { collective, reduce: None, dtype: None, len_elems: 0, root: None, tag: 0, weight: 1.0, caller }
    }

    /// A call with `len_bytes` of `dtype` elements.
    pub(crate) fn elements(collective: Collective, dtype: DType, len_bytes: usize, caller: Caller) -> Plan {
        Plan { dtype: Some(dtype), len_elems: len_bytes / dtype.size_bytes(), ..Plan::bare(collective, caller) }
    }
}

/// The error of a call that all ranks refuse alike.
pub(crate) fn refuse<R>(message: String) -> Result<R> {
    Err(Error::InvalidArgument { message, rank: None, during: None })
}

pub(crate) fn check_whole(dtype: DType, len_bytes: usize) -> Result<()> {
    if len_bytes.is_multiple_of(dtype.size_bytes()) {
        return Ok(());
    }
    refuse(format!("{len_bytes} bytes are not a whole number of {dtype} elements of {} bytes", dtype.size_bytes()))
}

pub(crate) fn check_op(op: ReduceOp, dtype: DType) -> Result<()> {
    if op.supports(dtype) {
        return Ok(());
    }
    let instead = if dtype == DType::Bool { "min (and) and max (or)" } else { "sum, min, max and product" };
    refuse(format!("{op} is not defined for {dtype}; {instead} are"))
}

/// Whether the buffer `what`, of `len_bytes`, is `[count, n]` for `n` elements that are `row_bytes`.
pub(crate) fn check_rows(what: &str, dtype: DType, len_bytes: usize, count: usize, row_bytes: usize) -> Result<()> {
    if row_bytes.checked_mul(count) == Some(len_bytes) {
        return Ok(());
    }
    let (got, room) = (len_bytes / dtype.size_bytes(), row_bytes / dtype.size_bytes());
    refuse(format!("{what} of {got} elements is not [world, n] = {count} × {room} elements"))
}
