//! Collectives on the elements of tensors, after they were read from the device into host memory.

use burn::tensor::kind::Basic;
use burn::tensor::{Tensor, TensorData};
use burn_ddp_comm::{DType, ProcessGroup, ReduceOp};

use crate::agreement::tell_peers;
use crate::ddp::Ddp;
use crate::model::schema::unreadable;
use crate::tensor_conversion::{data_of, with_dtype};
use crate::{Error, Result};

/// Reads the elements of a tensor for a collective. A read that fails ends the job, since the other ranks wait in the
/// collective.
pub(crate) fn read<const D: usize, K: Basic>(ddp: &Ddp, tensor: Tensor<D, K>) -> Result<(DType, TensorData)> {
    if D == 0 {
        return Err(Error::invalid("collectives take tensors of one dimension or more"));
    }
    let data = data_of(tensor).map_err(|e| unreadable("the tensor", &e));
    with_dtype(data.inspect_err(|e| tell_peers(ddp, e))?)
}

#[track_caller]
pub(crate) fn all_reduce(group: &ProcessGroup, elements: (DType, TensorData), op: ReduceOp) -> Result<TensorData> {
    let (dtype, mut data) = elements;
    in_place(&mut data, |bytes| group.all_reduce_bytes(dtype, bytes, op, 0))?;
    Ok(data)
}

#[track_caller]
pub(crate) fn all_gather(group: &ProcessGroup, elements: (DType, TensorData)) -> Result<TensorData> {
    let (dtype, data) = elements;
    let mut shape = data.shape().clone();
    let bytes = group.all_gather_bytes(dtype, data.as_bytes())?;
    shape[0] *= group.world_size();
    Ok(TensorData::from_bytes_vec(bytes, shape, data.dtype()))
}

#[track_caller]
pub(crate) fn reduce_scatter(group: &ProcessGroup, elements: (DType, TensorData), op: ReduceOp) -> Result<TensorData> {
    let (dtype, data) = elements;
    let mut shape = data.shape().clone();
    check_rows("reduce_scatter", shape[0], group.world_size())?;
    shape[0] /= group.world_size();
    let mut out = vec![0u8; data.as_bytes().len() / group.world_size()];
    group.reduce_scatter_bytes(dtype, data.as_bytes(), &mut out, op)?;
    Ok(TensorData::from_bytes_vec(out, shape, data.dtype()))
}

pub(crate) fn check_rows(what: &str, rows: usize, ranks: usize) -> Result<()> {
    if rows.is_multiple_of(ranks) {
        return Ok(());
    }
    Err(Error::invalid(format!("{what} splits dimension 0 over the ranks: {rows} rows do not divide by {ranks} ranks")))
}

pub(crate) fn in_place(data: &mut TensorData, f: impl FnOnce(&mut [u8]) -> burn_ddp_comm::Result<()>) -> Result<()> {
    TensorData::with_bytes_mut([data], |mut bytes| f(bytes[0]))?;
    Ok(())
}
