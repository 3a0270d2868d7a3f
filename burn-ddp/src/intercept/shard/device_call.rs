//! A collective on one tensor in the memory of its device.

use burn::backend::tensor::FloatTensor;
use burn::tensor::Shape;

use crate::gradients::{DeviceLoan, GradientMemory};
use crate::{Error, Result};

/// Lends `tensor` to the collective `call`, and returns the result, which has the shape `result`. Waits for nothing
/// that the device does. `failed` makes the error of a device that fails.
pub(super) fn on_device<B: GradientMemory>(
    tensor: FloatTensor<B>,
    result: Shape,
    call: impl FnOnce(&mut dyn DeviceLoan) -> Result<()>,
    failed: impl Fn(String) -> Error,
) -> Result<FloatTensor<B>> {
    let mut loan = B::lend(vec![(tensor, result)]).map_err(&failed)?;
    call(&mut *loan)?;
    let mut results = B::take_back(loan).map_err(&failed)?;
    match results.pop() {
        Some(only) if results.is_empty() => Ok(only),
        _ => Err(failed("one tensor was lent, but not one came back".into())),
    }
}
