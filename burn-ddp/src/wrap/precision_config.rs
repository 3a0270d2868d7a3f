//! Settings of mixed precision.

use burn::module::Module;

use super::WrapConfig;
use crate::Result;
use crate::loss_scaling::LossScaling;
use crate::model::schema::Schema;
use crate::precision::Precision;

impl WrapConfig {
    /// Computes forward and backward in half precision, with parameters, their averaged gradients and the optimizer's
    /// state in f32: mixed precision as in FSDP2's `MixedPrecisionPolicy`. F32, which changes nothing, by default.
    ///
    /// A read of a parameter (`Param::val`) is cast to `precision` and its gradient back to f32, before it is added to
    /// another. So parameters keep updates that are smaller than a half's last bit; files, checkpoints, hashes, norms,
    /// `unwrap` and what a `ModuleMapper` sees are f32. Frozen parameters and copies (`valid()`) are cast as well; a
    /// training forward casts each value once, however often it is read. [`master`](fn@crate::master) returns a
    /// parameter's f32 value. [Sharded](Self::with_sharding) parameters travel in `precision` and are kept in f32.
    ///
    /// Activations follow the inputs: cast those to [`Precision::dtype`], and logits to f32 for the loss. Some layers
    /// of Burn mix types: `docs/models.md` has the line that mends each.
    /// [`with_full_precision`](Self::with_full_precision) leaves layers in f32. F16 comes with a [loss
    /// scale](Self::with_loss_scaling); a program that calls `loss.backward()` itself, in
    /// [`Ddp::scope`](crate::Ddp::scope) or in Burn's `TrainStep`, calls [`scale_loss`](crate::scale_loss) before.
    ///
    /// Costs one cast per parameter and forward, another per gradient, and memory for the casts from forward to
    /// backward: half of that of the parameters.
    ///
    /// # Errors of `wrap`
    ///
    /// A parameter that is not f32, a local parameter, unless it is named in `with_full_precision`, or a device that
    /// does not compute in `precision`.
    ///
    /// # Example
    ///
    /// ```
    /// # use burn::{nn::{Linear, LinearConfig}, optim::SgdConfig, prelude::*, tensor::DType};
    /// # use burn_ddp::{Precision, prelude::*};
    /// Ddp::spawn(2, |ddp| {
    ///     let device = ddp.device()?.autodiff();
    ///     let config = WrapConfig::new().with_compute_dtype(Precision::Bf16);
    ///     let model: Linear = ddp.wrap_with(LinearConfig::new(4, 1).init(&device), &config)?;
    ///     let mut optim = ddp.optimizer(SgdConfig::new().init(), &model)?;
    ///     let inputs = Tensor::<2>::ones([8, 4], &device).cast(Precision::Bf16.dtype());
    ///     let outputs = model.forward(inputs);
    ///     assert_eq!(outputs.dtype(), DType::BF16);
    ///     let loss = outputs.cast(DType::F32).mean();
    ///     let grads = ddp.backward(&loss, &model)?.expect("a step");
    ///     let model = optim.step(0.1, model, grads);
    ///     assert_eq!(ddp.unwrap(model)?.weight.val().dtype(), DType::F32);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), burn_ddp::Error>(())
    /// ```
    #[must_use]
    pub fn with_compute_dtype(mut self, precision: Precision) -> Self {
        self.compute_dtype = precision;
        self
    }

    /// Parameters that are read in f32 whatever the [compute dtype](Self::with_compute_dtype), such as those of a
    /// BatchNorm or of the last layer. Names are paths, modules and patterns, as in
    /// [`with_local_parameters`](Self::with_local_parameters), and add up over several calls. Cast what goes into such
    /// a layer to f32, and what comes out of it back.
    ///
    /// ```
    /// # use burn_ddp::{Precision, WrapConfig};
    /// let config = WrapConfig::new().with_compute_dtype(Precision::Bf16).with_full_precision(["head", "*.norm"]);
    /// # assert_ne!(config, WrapConfig::new());
    /// ```
    #[must_use]
    pub fn with_full_precision<S: Into<String>>(mut self, names: impl IntoIterator<Item = S>) -> Self {
        self.full_precision.extend(names.into_iter().map(Into::into));
        self
    }

    /// [`with_full_precision`](Self::with_full_precision) of those paths of `model` for which `is_full` returns true,
    /// the same on every rank.
    ///
    /// ```
    /// # use burn::{nn::LinearConfig, tensor::Device};
    /// # use burn_ddp::WrapConfig;
    /// let model = LinearConfig::new(2, 1).init(&Device::default());
    /// let config = WrapConfig::new().with_full_precision_where(&model, |path| path.ends_with("bias"))?;
    /// assert_eq!(config, WrapConfig::new().with_full_precision(["bias"]));
    /// # Ok::<(), burn_ddp::Error>(())
    /// ```
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`](crate::Error::Invalid) for a trainable parameter of a dtype that `wrap` does not take.
    pub fn with_full_precision_where<M: Module>(self, model: &M, is_full: impl Fn(&str) -> bool) -> Result<Self> {
        let schema = Schema::of(model)?;
        Ok(self.with_full_precision(schema.paths().into_iter().filter(|path| is_full(path))))
    }

    /// Type in which gradients travel between ranks: F32 by default, which leaves them as they are. A half moves half
    /// the bytes. Between hosts, sums are added in f32 and each average is rounded once; NCCL adds in the half.
    /// Averages are cast back to the type of their parameter. Values below 6e-8 become 0 in f16, and above 65504
    /// infinite.
    ///
    /// Not with [logical ranks](crate::Ddp::set_logical_ranks): their sums must not be rounded before the last one.
    ///
    /// ```
    /// # use burn_ddp::{Precision, WrapConfig};
    /// let config = WrapConfig::new().with_reduce_dtype(Precision::Bf16);
    /// # assert_ne!(config, WrapConfig::new());
    /// ```
    #[must_use]
    pub fn with_reduce_dtype(mut self, precision: Precision) -> Self {
        self.reduce_dtype = precision;
        self
    }

    /// Settings of the loss scale, which is on for a [compute dtype](Self::with_compute_dtype) of F16 by default, and
    /// off otherwise; with this call it is on unless `scaling` says otherwise.
    ///
    /// [`Ddp::backward`](crate::Ddp::backward) multiplies the loss by the scale and divides the gradients by it, so
    /// that averages, clipping and optimizers see none of it. If the average of a parameter is not finite, it returns
    /// `None` on all ranks, and the scale becomes smaller: the program makes no optimizer step. Running statistics keep
    /// what a skipped step has changed, as in torch.
    ///
    /// The verdict travels with the gradients. Where they stay on their device (NCCL, and a world of 1), each step
    /// reads a byte for each parameter back; sharded parameters on their device take a small gather more.
    ///
    /// A call with several models takes the smallest of their scales, and is skipped for all of them. The scale is
    /// saved in checkpoints with the model: load them after `wrap`. [`Stats::skipped`](crate::Stats::skipped) counts
    /// skipped steps. A scale below `min_loss_scale` is an error on all ranks, with a gradient that is not finite.
    /// Parameters that are trained must be f32 (or bf16), and not local.
    ///
    /// # Example
    ///
    /// As in [`LossScaling`].
    #[must_use]
    pub fn with_loss_scaling(mut self, scaling: LossScaling) -> Self {
        self.loss_scaling = Some(scaling);
        self
    }

    /// If true, an average gradient that is not finite is an error on all ranks, which names the rank and the parameter
    /// where it came from. By default the first such step is a warning. Gradients that stay on their device (NCCL), or
    /// in a world of 1, are not looked at. Steps that a [loss scale](Self::with_loss_scaling) skips are no errors.
    ///
    /// ```
    /// # use burn::{nn::LinearConfig, prelude::*};
    /// # use burn_ddp::prelude::*;
    /// let errors = Ddp::spawn(2, |ddp| {
    ///     let device = ddp.device()?.autodiff();
    ///     let config = WrapConfig::new().with_finite_gradients(true);
    ///     let model = ddp.wrap_with(LinearConfig::new(2, 1).init(&device), &config)?;
    ///     let x = if ddp.rank() == 1 { f32::INFINITY } else { 1.0 };
    ///     let loss = model.forward(Tensor::<2>::full([1, 2], x, &device)).mean();
    ///     Ok(ddp.backward(&loss, &model).unwrap_err().to_string())
    /// })?;
    /// assert!(errors[0].contains("in step 0 the gradient of weight is not finite on rank 1"), "{}", errors[0]);
    /// assert_eq!(errors[0], errors[1]);
    /// # Ok::<(), burn_ddp::Error>(())
    /// ```
    #[must_use]
    pub fn with_finite_gradients(mut self, finite: bool) -> Self {
        self.finite_gradients = finite;
        self
    }

    /// Settings of the loss scale, if there is one.
    pub(super) fn scaling(&self) -> Option<LossScaling> {
        let of_compute = (self.compute_dtype == Precision::F16).then(LossScaling::default);
        self.loss_scaling.or(of_compute).filter(|scaling| scaling.enabled)
    }

    /// Refuses settings of mixed precision that cannot be.
    pub(super) fn check_precision(&self) -> Result<()> {
        self.loss_scaling.as_ref().map_or(Ok(()), LossScaling::check)
    }
}
