//! Collectives on Burn tensors of any kind and device, through host memory, and on models.

use burn::module::Module;
use burn::optim::ModuleOptimizer;
use burn::tensor::kind::Basic;
use burn::tensor::{Tensor, TensorData};
use burn_ddp_comm::{ReduceOp, TensorType};

use crate::agreement::tell_peers;
use crate::ddp::Ddp;
use crate::element_collectives::{all_gather, all_reduce, all_to_all, in_place, read, reduce_scatter};
use crate::model::broadcast;
use crate::tensor_conversion::back;
use crate::{Error, Result, optimizer};

/// Collectives on tensors, models and optimizers, implemented by [`Ddp`].
///
/// Shapes and dtypes must agree between ranks, or every rank gets an error that shows both. Tensors travel through
/// host memory; results are on the device of the input, outside any autodiff graph: [`Ddp::differentiable`] has the
/// collectives through which gradients flow. Each method blocks until this rank's part is done. All but
/// [`send`](Self::send) and [`recv`](Self::recv) are *collective*: every rank calls them, in the same order.
///
/// The costs below are those of the engines `threads` and `tcp` for a tensor of `b` bytes on `n` ranks; with `shm` a
/// rank reads the peers' memory instead of receiving messages. A step is one message to each peer and one from each.
pub trait Collectives: sealed::Sealed {
    /// Reduces element by element over all ranks.
    ///
    /// Each rank passes a tensor of the same shape and holds the same reduced tensor after. Two steps in which a rank
    /// sends about `2 b` bytes; one step for small tensors.
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
    fn all_reduce<const D: usize, K: Basic>(&self, tensor: Tensor<D, K>, op: ReduceOp) -> Result<Tensor<D, K>>;

    /// Copies `root`'s tensor to all ranks.
    ///
    /// Each rank passes a tensor of the same shape; the values on ranks other than `root` are replaced. One step in
    /// which `root` sends `(n - 1) b` bytes.
    ///
    /// # Errors
    ///
    /// [`Error::Comm`]: a peer failed or called something else, `root` is no rank.
    ///
    /// # Example
    ///
    /// ```
    /// # use burn::prelude::*;
    /// # use burn_ddp::prelude::*;
    /// let all = Ddp::spawn(3, |ddp| {
    ///     let x = Tensor::<1>::from_floats([ddp.rank() as f32], &ddp.device()?);
    ///     Ok(ddp.broadcast(x, 2)?.into_scalar::<f32>())
    /// })?;
    /// assert_eq!(all, [2.0, 2.0, 2.0]);
    /// # Ok::<(), burn_ddp::Error>(())
    /// ```
    #[track_caller]
    fn broadcast<const D: usize, K: Basic>(&self, tensor: Tensor<D, K>, root: usize) -> Result<Tensor<D, K>>;

    /// Copies `root`'s parameters and buffers to all ranks, in a model that is wrapped or not. Parameter ids do not
    /// change. *Collective*.
    ///
    /// Each rank passes a model of the same structure and holds the same values after: a broadcast of each value, which
    /// reaches each machine once. [`Ddp::wrap`] does this from rank 0 by itself.
    ///
    /// # Errors
    ///
    /// On every rank: [`Error::ModelsDiffer`](crate::Error::ModelsDiffer) naming the first parameter that differs and
    /// both shapes; [`Error::Comm`](crate::Error::Comm) if a peer failed or `root` is no rank.
    ///
    /// # Example
    ///
    /// ```
    /// # use burn::{nn::LinearConfig, prelude::*};
    /// # use burn_ddp::prelude::*;
    /// let hashes = Ddp::spawn(2, |ddp| {
    ///     let model = LinearConfig::new(3, 1).init(&ddp.device()?); // other values on each rank
    ///     Ok(param_hash(&ddp.broadcast_parameters(model, 1)?)?)
    /// })?;
    /// assert_eq!(hashes[0], hashes[1]);
    /// # Ok::<(), burn_ddp::Error>(())
    /// ```
    #[track_caller]
    fn broadcast_parameters<M: Module>(&self, model: M, root: usize) -> Result<M>;

    /// Gives every rank the state of `root`'s optimizer (momentum, moments, step counts), bit by bit. *Collective*.
    ///
    /// Each rank passes its optimizer, of the same kind on all ranks, and the model that the optimizer trains. The
    /// state of `root` replaces that of the others; if `root` has made no step yet, no rank has a state afterwards. A
    /// broadcast of the state's bytes, with some rounds of small messages before and after it.
    ///
    /// # Errors
    ///
    /// On every rank, and nothing has changed: [`Error::ModelsDiffer`](crate::Error::ModelsDiffer);
    /// [`Error::Invalid`](crate::Error::Invalid) if the optimizers are of different kinds, or the state cannot be
    /// loaded without loss.
    ///
    /// # Example
    ///
    /// ```
    /// # use burn::nn::{Linear, LinearConfig};
    /// # use burn::optim::{GradientsParams, SgdConfig, momentum::MomentumConfig};
    /// # use burn::prelude::*;
    /// # use burn_ddp::prelude::*;
    /// let hashes = Ddp::spawn(2, |ddp| {
    ///     let device = ddp.device()?.autodiff();
    ///     let mut model: Linear = LinearConfig::new(2, 1).init(&device);
    ///     let mut optim = SgdConfig::new().with_momentum(Some(MomentumConfig::new())).init();
    ///     let grads = |model: &Linear, x: usize| {
    ///         let loss = model.forward(Tensor::<2>::full([1, 2], x as f64, &device)).sum();
    ///         GradientsParams::from_grads(loss.backward(), model)
    ///     };
    ///     let own = grads(&model, ddp.rank() + 1);
    ///     model = optim.step(0.1, model, own); // each rank by itself, so far
    ///     model = ddp.broadcast_parameters(model, 0)?;
    ///     ddp.broadcast_optimizer_state(&mut optim, &model, 0)?;
    ///     let same = grads(&model, 1);
    ///     Ok(param_hash(&optim.step(0.1, model, same))?)
    /// })?;
    /// assert_eq!(hashes[0], hashes[1]); // the momentum of rank 0 on both
    /// # Ok::<(), burn_ddp::Error>(())
    /// ```
    #[track_caller]
    fn broadcast_optimizer_state<M: Module>(&self, optim: &mut ModuleOptimizer, model: &M, root: usize) -> Result<()>;

    /// Concatenates the tensors of all ranks along dimension 0, in rank order.
    ///
    /// Each rank passes a tensor of the same shape `[r, …]` and holds `[n * r, …]` after. One step in which a rank
    /// sends `(n - 1) b` bytes.
    ///
    /// # Errors
    ///
    /// [`Error::Comm`]: a peer failed or called something else.
    ///
    /// # Example
    ///
    /// ```
    /// # use burn::prelude::*;
    /// # use burn_ddp::prelude::*;
    /// let all = Ddp::spawn(2, |ddp| {
    ///     let x = Tensor::<1>::from_floats([ddp.rank() as f32], &ddp.device()?);
    ///     Ok(ddp.all_gather(x)?.into_data().try_to_vec::<f32>()?)
    /// })?;
    /// assert_eq!(all, [[0.0, 1.0], [0.0, 1.0]]);
    /// # Ok::<(), burn_ddp::Error>(())
    /// ```
    #[track_caller]
    fn all_gather<const D: usize, K: Basic>(&self, tensor: Tensor<D, K>) -> Result<Tensor<D, K>>;

    /// Reduces over all ranks and leaves each rank its slice of dimension 0.
    ///
    /// Each rank passes a tensor of the same shape `[n * r, …]` and holds `[r, …]` after: rows `rank * r ..`. One step
    /// in which a rank sends `(n - 1) / n · b` bytes.
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`] if dimension 0 does not divide by the world size; [`Error::Comm`] as for
    /// [`all_reduce`](Self::all_reduce).
    ///
    /// # Example
    ///
    /// ```
    /// # use burn::prelude::*;
    /// # use burn_ddp::prelude::*;
    /// let all = Ddp::spawn(2, |ddp| {
    ///     let x = Tensor::<1>::from_floats([1.0, 10.0], &ddp.device()?);
    ///     Ok(ddp.reduce_scatter(x, ReduceOp::Sum)?.into_data().try_to_vec::<f32>()?)
    /// })?;
    /// assert_eq!(all, [[2.0], [20.0]]);
    /// # Ok::<(), burn_ddp::Error>(())
    /// ```
    #[track_caller]
    fn reduce_scatter<const D: usize, K: Basic>(&self, tensor: Tensor<D, K>, op: ReduceOp) -> Result<Tensor<D, K>>;

    /// Reduces element by element onto `root`.
    ///
    /// Each rank passes a tensor of the same shape; `root` holds the reduced one after, the others their own.
    /// Two steps in which a rank sends about `b` bytes.
    ///
    /// # Errors
    ///
    /// [`Error::Comm`] as for [`all_reduce`](Self::all_reduce); `root` is no rank.
    ///
    /// # Example
    ///
    /// ```
    /// # use burn::prelude::*;
    /// # use burn_ddp::prelude::*;
    /// let all = Ddp::spawn(2, |ddp| {
    ///     let x = Tensor::<1>::from_floats([1.0 + ddp.rank() as f32], &ddp.device()?);
    ///     Ok(ddp.reduce(x, ReduceOp::Max, 0)?.into_scalar::<f32>())
    /// })?;
    /// assert_eq!(all, [2.0, 2.0]); // on rank 1 its own
    /// # Ok::<(), burn_ddp::Error>(())
    /// ```
    #[track_caller]
    fn reduce<const D: usize, K: Basic>(&self, tensor: Tensor<D, K>, op: ReduceOp, root: usize)
    -> Result<Tensor<D, K>>;

    /// Concatenates the tensors of all ranks along dimension 0 on `root`, in rank order.
    ///
    /// Each rank passes a tensor of the same shape `[r, …]`; `root` holds `[n * r, …]` after, the others `None`. One
    /// step in which a rank sends `b` bytes.
    ///
    /// # Errors
    ///
    /// [`Error::Comm`]: a peer failed or called something else, `root` is no rank.
    ///
    /// # Example
    ///
    /// ```
    /// # use burn::prelude::*;
    /// # use burn_ddp::prelude::*;
    /// let all = Ddp::spawn(2, |ddp| {
    ///     let x = Tensor::<1>::from_floats([ddp.rank() as f32], &ddp.device()?);
    ///     Ok(ddp.gather(x, 0)?.map(|x| x.dims()))
    /// })?;
    /// assert_eq!(all, [Some([2]), None]);
    /// # Ok::<(), burn_ddp::Error>(())
    /// ```
    #[track_caller]
    fn gather<const D: usize, K: Basic>(&self, tensor: Tensor<D, K>, root: usize) -> Result<Option<Tensor<D, K>>>;

    /// Hands each rank its slice of `root`'s tensor along dimension 0.
    ///
    /// `root` passes `Some` of shape `[n * r, …]`; tensors of other ranks are ignored. Each rank passes a tensor `like`
    /// its slice, `[r, …]`, of which only shape, dtype and device are used, and holds rows `rank * r ..` after. One
    /// step in which `root` sends `(n - 1) / n · b` bytes.
    ///
    /// # Errors
    ///
    /// [`Error::Comm`]: a peer failed or called something else, `root` is no rank or passed `None`; on `root`,
    /// [`Error::Invalid`] if its tensor does not consist of such slices.
    ///
    /// # Example
    ///
    /// ```
    /// # use burn::prelude::*;
    /// # use burn_ddp::prelude::*;
    /// let all = Ddp::spawn(2, |ddp| {
    ///     let device = ddp.device()?;
    ///     let whole = ddp.is_main().then(|| Tensor::<1>::from_floats([5.0, 6.0], &device));
    ///     Ok(ddp.scatter(whole, Tensor::zeros([1], &device), 0)?.into_scalar::<f32>())
    /// })?;
    /// assert_eq!(all, [5.0, 6.0]);
    /// # Ok::<(), burn_ddp::Error>(())
    /// ```
    #[track_caller]
    fn scatter<const D: usize, K: Basic>(
        &self,
        tensor: Option<Tensor<D, K>>,
        like: Tensor<D, K>,
        root: usize,
    ) -> Result<Tensor<D, K>>;

    /// Sends slice *j* of dimension 0 to rank *j*, and gets one from each.
    ///
    /// Each rank passes a tensor of the same shape `[n * r, …]` and holds one of that shape after: rows `j * r ..` are
    /// from rank *j*. One step in which a rank sends `(n - 1) / n · b` bytes.
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`] if dimension 0 does not divide by the world size; [`Error::Comm`]: a peer failed or called
    /// something else.
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
    fn all_to_all<const D: usize, K: Basic>(&self, tensor: Tensor<D, K>) -> Result<Tensor<D, K>>;

    /// Sends a tensor to rank `to`, and blocks until that rank has [received](Self::recv) it. One message of `b` bytes
    /// and its confirmation.
    ///
    /// # Errors
    ///
    /// [`Error::Comm`]: the peer failed, called something else, or expects another shape or dtype.
    ///
    /// # Example
    ///
    /// ```
    /// # use burn::prelude::*;
    /// # use burn_ddp::prelude::*;
    /// Ddp::spawn(2, |ddp| {
    ///     let x = Tensor::<1>::from_floats([ddp.rank() as f32], &ddp.device()?);
    ///     match ddp.rank() {
    ///         0 => ddp.send(x, 1)?,
    ///         _ => assert_eq!(ddp.recv(x, 0)?.into_scalar::<f32>(), 0.0),
    ///     }
    ///     Ok(())
    /// })?;
    /// # Ok::<(), burn_ddp::Error>(())
    /// ```
    #[track_caller]
    fn send<const D: usize, K: Basic>(&self, tensor: Tensor<D, K>, to: usize) -> Result<()>;

    /// The tensor that rank `from` [sends](Self::send). Blocks until it has arrived.
    ///
    /// `like` gives shape, dtype and device; its values are ignored. One message of `b` bytes and its confirmation.
    ///
    /// # Errors
    ///
    /// As [`send`](Self::send).
    #[track_caller]
    fn recv<const D: usize, K: Basic>(&self, like: Tensor<D, K>, from: usize) -> Result<Tensor<D, K>>;
}

mod sealed {
    pub trait Sealed {}
    impl Sealed for crate::Ddp {}
}

impl Collectives for Ddp {
    #[track_caller]
    fn all_reduce<const D: usize, K: Basic>(&self, tensor: Tensor<D, K>, op: ReduceOp) -> Result<Tensor<D, K>> {
        let device = tensor.device();
        Ok(back(all_reduce(self.group(), read(self, tensor)?, op)?, &device))
    }

    #[track_caller]
    fn broadcast<const D: usize, K: Basic>(&self, tensor: Tensor<D, K>, root: usize) -> Result<Tensor<D, K>> {
        let device = tensor.device();
        let (of, mut data) = read(self, tensor)?;
        in_place(&mut data, |bytes| self.group().broadcast_bytes(of, bytes, root))?;
        Ok(back(data, &device))
    }

    #[track_caller]
    fn broadcast_parameters<M: Module>(&self, model: M, root: usize) -> Result<M> {
        broadcast::model(self, model, root)
    }

    #[track_caller]
    fn broadcast_optimizer_state<M: Module>(&self, optim: &mut ModuleOptimizer, model: &M, root: usize) -> Result<()> {
        optimizer::state::broadcast(self.group(), optim, model, root)
    }

    #[track_caller]
    fn all_gather<const D: usize, K: Basic>(&self, tensor: Tensor<D, K>) -> Result<Tensor<D, K>> {
        let device = tensor.device();
        Ok(back(all_gather(self.group(), read(self, tensor)?)?, &device))
    }

    #[track_caller]
    fn reduce_scatter<const D: usize, K: Basic>(&self, tensor: Tensor<D, K>, op: ReduceOp) -> Result<Tensor<D, K>> {
        let device = tensor.device();
        Ok(back(reduce_scatter(self.group(), read(self, tensor)?, op)?, &device))
    }

    #[track_caller]
    fn reduce<const D: usize, K: Basic>(
        &self,
        tensor: Tensor<D, K>,
        op: ReduceOp,
        root: usize,
    ) -> Result<Tensor<D, K>> {
        let device = tensor.device();
        let (of, mut data) = read(self, tensor)?;
        in_place(&mut data, |bytes| self.group().reduce_bytes(of, bytes, op, root))?;
        Ok(back(data, &device))
    }

    #[track_caller]
    fn gather<const D: usize, K: Basic>(&self, tensor: Tensor<D, K>, root: usize) -> Result<Option<Tensor<D, K>>> {
        let device = tensor.device();
        let (of, data) = read(self, tensor)?;
        let mut shape = data.shape().clone();
        shape[0] *= self.world_size();
        let rows = self.group().gather_bytes(of, data.as_bytes(), root)?;
        Ok(rows.map(|bytes| back(TensorData::from_bytes_vec(bytes, shape, data.dtype()), &device)))
    }

    #[track_caller]
    fn scatter<const D: usize, K: Basic>(
        &self,
        tensor: Option<Tensor<D, K>>,
        like: Tensor<D, K>,
        root: usize,
    ) -> Result<Tensor<D, K>> {
        let device = like.device();
        let (of, mut part) = read(self, like)?;
        let whole = tensor.filter(|_| self.rank() == root).map(|whole| read(self, whole)).transpose()?;
        let whole = whole.map(|whole| whole_of(whole, (of, part.shape()), self.world_size())).transpose();
        // Only the root sees its tensor: the other ranks would wait for it.
        let whole = whole.inspect_err(|e| tell_peers(self, e))?;
        let whole = whole.as_ref().map(TensorData::as_bytes);
        in_place(&mut part, |bytes| self.group().scatter_bytes(of, whole, bytes, root))?;
        Ok(back(part, &device))
    }

    #[track_caller]
    fn all_to_all<const D: usize, K: Basic>(&self, tensor: Tensor<D, K>) -> Result<Tensor<D, K>> {
        let device = tensor.device();
        Ok(back(all_to_all(self.group(), read(self, tensor)?)?, &device))
    }

    #[track_caller]
    fn send<const D: usize, K: Basic>(&self, tensor: Tensor<D, K>, to: usize) -> Result<()> {
        let (of, data) = read(self, tensor)?;
        Ok(self.group().send_bytes(of, data.as_bytes(), to)?)
    }

    #[track_caller]
    fn recv<const D: usize, K: Basic>(&self, like: Tensor<D, K>, from: usize) -> Result<Tensor<D, K>> {
        let device = like.device();
        let (of, mut data) = read(self, like)?;
        in_place(&mut data, |bytes| self.group().recv_bytes(of, bytes, from))?;
        Ok(back(data, &device))
    }
}

/// The elements of the `whole` tensor of a scatter, if it consists of a slice of this type and shape for each rank.
fn whole_of(whole: (TensorType, TensorData), (of, slice): (TensorType, &[usize]), ranks: usize) -> Result<TensorData> {
    let (whole_of, whole) = whole;
    let mut expected = slice.to_vec();
    expected[0] *= ranks;
    if whole_of == TensorType::new(of.dtype, &expected) {
        return Ok(whole);
    }
    Err(Error::invalid(format!(
        "scatter of {} elements of shape {:?} into {ranks} slices of {} elements of shape {slice:?}",
        whole_of.dtype,
        &whole.shape()[..],
        of.dtype
    )))
}
