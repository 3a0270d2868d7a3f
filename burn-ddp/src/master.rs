//! Values of parameters apart from the type in which a model computes.

use burn::backend::Dispatch;
use burn::module::Param;
use burn::tensor::Tensor;

use crate::intercept::{DdpBackend, read_of_master};

/// The value of `param` that the optimizer steps, without a graph: in f32 whatever the [compute
/// dtype](crate::WrapConfig::with_compute_dtype) of its model, while `param.val()` returns that. For logging and moving
/// averages; a `ModuleMapper` or `ModuleVisitor` that takes `param.base()` sees this value, too.
///
/// Of a [sharded](crate::WrapConfig::with_sharding) parameter all ranks gather the whole: then *collective*, at the
/// cost of a read. `param.base()` is this rank's rows.
///
/// # Panics
///
/// Like `param.val()`, if a sharded parameter cannot be gathered.
///
/// # Example
///
/// ```
/// # use burn::{nn::{Linear, LinearConfig}, tensor::DType};
/// # use burn_ddp::{Precision, master, prelude::*};
/// Ddp::spawn(2, |ddp| {
///     let config = WrapConfig::new().with_compute_dtype(Precision::Bf16);
///     let model: Linear = ddp.wrap_with(LinearConfig::new(4, 1).init(&ddp.device()?.autodiff()), &config)?;
///     assert_eq!((model.weight.val().dtype(), master(&model.weight).dtype()), (DType::BF16, DType::F32));
///     Ok(())
/// })?;
/// # Ok::<(), burn_ddp::Error>(())
/// ```
#[must_use]
pub fn master<const D: usize>(param: &Param<Tensor<D>>) -> Tensor<D> {
    let base = param.base();
    if let Some(tap) = read_of_master(param) {
        return Tensor::from_dispatch(Dispatch::gather_part(base.into_dispatch(), tap));
    }
    base.detach().set_require_grad(false)
}
