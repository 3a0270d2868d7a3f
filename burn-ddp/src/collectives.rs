//! Collectives on Burn tensors of any kind and device, through host memory.

use burn::tensor::kind::Basic;
use burn::tensor::{Tensor, TensorData};
use burn_ddp_comm::{DType, ProcessGroup, ReduceOp};

use crate::convert::comm_dtype;
use crate::ddp::Ddp;
use crate::{Error, Result};

/// Collectives on tensors. Shapes and dtypes must agree between ranks; results are on the device of the input, outside any
/// autodiff graph: [`Ddp::differentiable`] has those that gradients go through.
impl Ddp {
    /// Reduces element by element over all ranks. *Collective*, blocking.
    ///
    /// Each rank passes a tensor of the same shape and holds the same reduced tensor after.
    ///
    /// # Errors
    ///
    /// [`Error::Comm`]: a peer failed or called something else; integer mean, bool sum (the group stays usable).
    ///
    /// # Example
    ///
    /// ```
    /// # use burn::prelude::*;
    /// # use burn_ddp::prelude::*;
    /// let all = Ddp::spawn(2, |ddp| {
    ///     let x = Tensor::<1>::from_floats([1.0, ddp.rank() as f32], &ddp.device()?);
    ///     Ok(ddp.all_reduce(x, ReduceOp::Sum)?.into_data().try_to_vec::<f32>()?)
    /// })?;
    /// assert_eq!(all, [[2.0, 1.0], [2.0, 1.0]]);
    /// # Ok::<(), burn_ddp::Error>(())
    /// ```
    #[track_caller]
    pub fn all_reduce<const D: usize, K: Basic>(&self, tensor: Tensor<D, K>, op: ReduceOp) -> Result<Tensor<D, K>> {
        let device = tensor.device();
        Ok(back(all_reduce(self.group(), read(tensor)?, op)?, &device))
    }

    /// Copies `root`'s tensor to all ranks. *Collective*, blocking.
    ///
    /// Each rank passes a tensor of the same shape; the values on ranks other than `root` are overwritten.
    ///
    /// # Errors
    ///
    /// [`Error::Comm`]: a peer failed or called something else, `root` is no rank.
    #[track_caller]
    pub fn broadcast<const D: usize, K: Basic>(&self, tensor: Tensor<D, K>, root: usize) -> Result<Tensor<D, K>> {
        let device = tensor.device();
        let (dtype, mut data) = read(tensor)?;
        in_place(&mut data, |bytes| self.group().broadcast_bytes(dtype, bytes, root))?;
        Ok(back(data, &device))
    }

    /// Concatenates the tensors of all ranks along dimension 0, in rank order. *Collective*, blocking.
    ///
    /// Each rank passes a tensor of the same shape `[n, …]` and holds `[world_size * n, …]` after.
    ///
    /// # Errors
    ///
    /// [`Error::Comm`]: a peer failed or called something else.
    #[track_caller]
    pub fn all_gather<const D: usize, K: Basic>(&self, tensor: Tensor<D, K>) -> Result<Tensor<D, K>> {
        let device = tensor.device();
        Ok(back(all_gather(self.group(), read(tensor)?)?, &device))
    }

    /// Reduces over all ranks and leaves each rank its slice of dimension 0. *Collective*, blocking.
    ///
    /// Each rank passes a tensor of the same shape `[world_size * n, …]` and holds `[n, …]` after: rows `rank * n ..`.
    ///
    /// # Errors
    ///
    /// [`Error::Use`] if dimension 0 does not divide by the world size; [`Error::Comm`] as for [`Ddp::all_reduce`].
    #[track_caller]
    pub fn reduce_scatter<const D: usize, K: Basic>(&self, tensor: Tensor<D, K>, op: ReduceOp) -> Result<Tensor<D, K>> {
        let device = tensor.device();
        Ok(back(reduce_scatter(self.group(), read(tensor)?, op)?, &device))
    }

    /// Reduces element by element onto `root`. *Collective*, blocking.
    ///
    /// Each rank passes a tensor of the same shape; `root` holds the reduced one after, the others what they passed.
    ///
    /// # Errors
    ///
    /// [`Error::Comm`] as for [`Ddp::all_reduce`]; `root` is no rank.
    #[track_caller]
    pub fn reduce<const D: usize, K: Basic>(
        &self,
        tensor: Tensor<D, K>,
        op: ReduceOp,
        root: usize,
    ) -> Result<Tensor<D, K>> {
        let device = tensor.device();
        let (dtype, mut data) = read(tensor)?;
        in_place(&mut data, |bytes| self.group().reduce_bytes(dtype, bytes, op, root))?;
        Ok(back(data, &device))
    }

    /// Concatenates the tensors of all ranks along dimension 0 on `root`, in rank order. *Collective*, blocking.
    ///
    /// Each rank passes a tensor of the same shape `[n, …]`; `root` holds `[world_size * n, …]` after, the others `None`.
    ///
    /// # Errors
    ///
    /// [`Error::Comm`]: a peer failed or called something else, `root` is no rank.
    #[track_caller]
    pub fn gather<const D: usize, K: Basic>(&self, tensor: Tensor<D, K>, root: usize) -> Result<Option<Tensor<D, K>>> {
        let device = tensor.device();
        let (dtype, data) = read(tensor)?;
        let mut shape = data.shape().clone();
        shape[0] *= self.world_size();
        let rows = self.group().gather_bytes(dtype, data.as_bytes(), root)?;
        Ok(rows.map(|bytes| back(TensorData::from_bytes_vec(bytes, shape, data.dtype()), &device)))
    }

    /// Hands each rank its slice of `root`'s tensor along dimension 0. *Collective*, blocking.
    ///
    /// `root` passes `Some` of shape `[world_size * n, …]`, what others pass is dropped; each passes a tensor `like` its slice, `[n, …]`, of
    /// which only shape, dtype and device count, and holds rows `rank * n ..` after.
    ///
    /// # Errors
    ///
    /// [`Error::Comm`]: a peer failed or called something else, `root` is no rank, `root` passed `None` or another number of elements.
    #[track_caller]
    pub fn scatter<const D: usize, K: Basic>(
        &self,
        tensor: Option<Tensor<D, K>>,
        like: Tensor<D, K>,
        root: usize,
    ) -> Result<Tensor<D, K>> {
        let device = like.device();
        let (dtype, mut part) = read(like)?;
        let whole = tensor.filter(|_| self.rank() == root).map(read).transpose()?;
        if let Some((other, _)) = &whole
            && *other != dtype
        {
            return Err(Error::Use(format!("scatter of {other} elements into slices of {dtype}")));
        }
        let whole = whole.as_ref().map(|(_, data)| data.as_bytes());
        in_place(&mut part, |bytes| self.group().scatter_bytes(dtype, whole, bytes, root))?;
        Ok(back(part, &device))
    }

    /// Sends slice *j* of dimension 0 to rank *j*, and gets one from each. *Collective*, blocking.
    ///
    /// Each rank passes a tensor of the same shape `[world_size * n, …]` and holds one of that shape after: rows `j * n ..` are from rank *j*.
    ///
    /// # Errors
    ///
    /// [`Error::Use`] if dimension 0 does not divide by the world size; [`Error::Comm`]: a peer failed or called something else.
    ///
    /// # Example
    ///
    /// ```
    /// # use burn::prelude::*;
    /// # use burn_ddp::prelude::*;
    /// let all = Ddp::spawn(2, |ddp| {
    ///     let r = ddp.rank() as f32;
    ///     let x = Tensor::<1>::from_floats([10.0 * r, 10.0 * r + 1.0], &ddp.device()?);
    ///     Ok(ddp.all_to_all(x)?.into_data().try_to_vec::<f32>()?)
    /// })?;
    /// assert_eq!(all, [[0.0, 10.0], [1.0, 11.0]]);
    /// # Ok::<(), burn_ddp::Error>(())
    /// ```
    #[track_caller]
    pub fn all_to_all<const D: usize, K: Basic>(&self, tensor: Tensor<D, K>) -> Result<Tensor<D, K>> {
        let device = tensor.device();
        let (dtype, data) = read(tensor)?;
        check_rows("all_to_all", data.shape()[0], self.world_size())?;
        let mut out = vec![0u8; data.as_bytes().len()];
        self.group().all_to_all_bytes(dtype, data.as_bytes(), &mut out)?;
        Ok(back(TensorData::from_bytes_vec(out, data.shape().clone(), data.dtype()), &device))
    }

    /// Sends a tensor to rank `to`, which [receives](Ddp::recv) it. Blocks until it has.
    ///
    /// # Errors
    ///
    /// [`Error::Comm`]: the peer failed, called something else, or expects another number of elements or dtype.
    #[track_caller]
    pub fn send<const D: usize, K: Basic>(&self, tensor: Tensor<D, K>, to: usize) -> Result<()> {
        let (dtype, data) = read(tensor)?;
        Ok(self.group().send_bytes(dtype, data.as_bytes(), to)?)
    }

    /// The tensor that rank `from` [sends](Ddp::send). Blocks until it is here.
    ///
    /// `like` says shape, dtype and device; its values do not count.
    ///
    /// # Errors
    ///
    /// As [`Ddp::send`].
    #[track_caller]
    pub fn recv<const D: usize, K: Basic>(&self, like: Tensor<D, K>, from: usize) -> Result<Tensor<D, K>> {
        let device = like.device();
        let (dtype, mut data) = read(like)?;
        in_place(&mut data, |bytes| self.group().recv_bytes(dtype, bytes, from))?;
        Ok(back(data, &device))
    }
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

fn check_rows(what: &str, rows: usize, ranks: usize) -> Result<()> {
    if rows.is_multiple_of(ranks) {
        return Ok(());
    }
    Err(Error::Use(format!("{what} splits dimension 0 over the ranks: {rows} rows do not divide by {ranks} ranks")))
}

/// The elements of a tensor, for a collective.
pub(crate) fn read<const D: usize, K: Basic>(tensor: Tensor<D, K>) -> Result<(DType, TensorData)> {
    if D == 0 {
        return Err(Error::Use("collectives take tensors of one dimension or more".into()));
    }
    // On Flex a tensor that nobody else holds gives its memory away: no copy.
    let data =
        tensor.try_into_data().map_err(|e| Error::Use(format!("reading the tensor from its device failed: {e:?}")))?;
    with_dtype(data)
}

/// Elements and their type, as collectives take them.
pub(crate) fn with_dtype(data: TensorData) -> Result<(DType, TensorData)> {
    // Between ranks a bool is a byte, whatever the backend stores it as.
    let data = match data.dtype() {
        dtype if dtype.is_bool() => {
            data.try_cast_as::<bool>().map_err(|e| Error::Use(format!("reading bools: {e}")))?
        }
        _ => data,
    };
    let dtype = comm_dtype(data.dtype())
        .ok_or_else(|| Error::Use(format!("tensors of dtype {:?} cannot be sent between ranks", data.dtype())))?;
    Ok((dtype, data))
}

fn in_place(data: &mut TensorData, f: impl FnOnce(&mut [u8]) -> burn_ddp_comm::Result<()>) -> Result<()> {
    TensorData::with_bytes_mut([data], |mut bytes| f(bytes[0]))?;
    Ok(())
}

/// A tensor of these elements.
pub(crate) fn back<const D: usize, K: Basic>(data: TensorData, device: &burn::tensor::Device) -> Tensor<D, K> {
    match data.dtype() {
        dtype if dtype.is_bool() => Tensor::from_data(data, device),
        dtype => Tensor::from_data(data, (device, dtype)),
    }
}
