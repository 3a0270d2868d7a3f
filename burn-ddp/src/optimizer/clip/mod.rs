//! Clipping of gradients, after they were averaged.
//!
//! The gradients that `ddp.backward` returns are the same bits on all ranks, so ranks clip alike without communication.

use std::collections::{HashMap, HashSet};

use burn::module::{Module, ModuleVisitor, Param};
use burn::optim::GradientsParams;
use burn::tensor::{DType, Tensor, TensorData};

use crate::tensor_conversion::data_of;
use crate::{Error, Result, intercept};

/// Scales the gradients of `model` together so that their common 2-norm is at most `max_norm`, as torch's
/// `clip_grad_norm_`; returns them and the norm that they had.
///
/// Call it between [`Ddp::backward`](crate::Ddp::backward) and the optimizer's step. Not collective: the averages
/// are equal on all ranks, and so is their norm. With [sharded](crate::WrapConfig::with_sharding) parameters it is
/// *collective*: every rank calls it, and one step gathers 8 bytes per sharded parameter from each rank; the norm is
/// that of unsharded training to rounding in f64. Burn's `GradientClippingConfig::Norm` is something else: it limits
/// the norm of each parameter's gradient alone.
///
/// Gradients are multiplied by `max_norm / (norm + 1e-6)` if that is below 1, and otherwise left as they are. The norm
/// is accumulated in f64, in one order.
///
/// # Errors
///
/// [`Error::Invalid`] if `max_norm` is negative or NaN, or the norm is infinite or NaN (torch's
/// `error_if_nonfinite=True`): it names the first parameter to blame. Check [`grad_norm`] first where that may happen,
/// as with loss scaling. All ranks see the same error, and the job can go on. [`Error::Sharding`] or
/// [`Error::Comm`] as [`grad_norm`].
///
/// # Example
///
/// ```
/// # use burn::{nn::LinearConfig, prelude::*};
/// # use burn_ddp::prelude::*;
/// use burn_ddp::clip_grad_norm;
///
/// let norms = Ddp::spawn(2, |ddp| {
///     let device = ddp.device()?.autodiff();
///     let model = ddp.wrap(LinearConfig::new(2, 1).with_bias(false).init(&device))?;
///     let x = Tensor::<2>::from_floats([[3.0, 8.0 * ddp.rank() as f32]], &device);
///     let grads = ddp.backward(&model.forward(x).sum(), &model)?.expect("a step"); // 3 and 4
///     let (grads, norm) = clip_grad_norm(grads, &model, 1.0)?;
///     let clipped = grads.get::<2>(model.weight.id).unwrap().into_data().try_to_vec::<f32>()?;
///     assert!((clipped[0] - 0.6).abs() < 1e-5 && (clipped[1] - 0.8).abs() < 1e-5);
///     Ok(norm)
/// })?;
/// assert_eq!(norms, [5.0, 5.0]);
/// # Ok::<(), burn_ddp::Error>(())
/// ```
pub fn clip_grad_norm<M: Module>(
    mut grads: GradientsParams,
    model: &M,
    max_norm: f64,
) -> Result<(GradientsParams, f64)> {
    let norms = Norms::of(&grads, model)?;
    check_limit("max_norm", max_norm)?;
    let norm = norms.total();
    if !norm.is_finite() {
        let path = norms.0.iter().find(|(_, squares)| !squares.is_finite()).map_or("all together", |(path, _)| path);
        return Err(Error::invalid(format!(
            "the norm of the gradients is {norm}, because of {path}: there is nothing to clip to"
        )));
    }
    let factor = max_norm / (norm + 1e-6);
    if factor < 1.0 {
        each(&mut grads, model, Scale(factor));
    }
    Ok((grads, norm))
}

/// The 2-norm of all gradients of `model` together, as torch's `get_total_norm`; infinite or NaN if an element is.
///
/// The same on all ranks of a wrapped model. Not collective, unless the model has
/// [sharded](crate::WrapConfig::with_sharding) parameters: then every rank calls it, and one step gathers 8 bytes per
/// sharded parameter from each rank. Parameters without a gradient count as 0.
///
/// # Errors
///
/// [`Error::Invalid`] if a gradient cannot be read from its device; [`Error::Sharding`] or [`Error::Comm`] if the ranks
/// cannot sum up over sharded parameters.
///
/// # Example
///
/// ```
/// # use burn::{nn::LinearConfig, prelude::*};
/// # use burn_ddp::prelude::*;
/// let norms = Ddp::spawn(2, |ddp| {
///     let device = ddp.device()?.autodiff();
///     let model = ddp.wrap(LinearConfig::new(2, 1).with_bias(false).init(&device))?;
///     let x = Tensor::<2>::from_floats([[3.0, 8.0 * ddp.rank() as f32]], &device);
///     let grads = ddp.backward(&model.forward(x).sum(), &model)?.expect("a step");
///     Ok(burn_ddp::grad_norm(&grads, &model)?)
/// })?;
/// assert_eq!(norms, [5.0, 5.0]); // of 3 and 4, the averages
/// # Ok::<(), burn_ddp::Error>(())
/// ```
pub fn grad_norm<M: Module>(grads: &GradientsParams, model: &M) -> Result<f64> {
    Ok(Norms::of(grads, model)?.total())
}

/// Limits each element of the gradients of `model` to `-limit ..= limit`, as torch's `clip_grad_value_`. Burn's
/// `GradientClippingConfig::Value` does the same inside the optimizer.
///
/// Not collective, and the same on all ranks of a wrapped model.
///
/// # Errors
///
/// [`Error::Invalid`] if `limit` is negative or NaN.
///
/// # Example
///
/// ```
/// # use burn::{nn::LinearConfig, prelude::*};
/// # use burn_ddp::prelude::*;
/// Ddp::spawn(2, |ddp| {
///     let device = ddp.device()?.autodiff();
///     let model = ddp.wrap(LinearConfig::new(2, 1).with_bias(false).init(&device))?;
///     let x = Tensor::<2>::from_floats([[0.5, 8.0 * ddp.rank() as f32]], &device);
///     let grads = ddp.backward(&model.forward(x).sum(), &model)?.expect("a step");
///     let grads = burn_ddp::clip_grad_value(grads, &model, 1.0)?;
///     let clipped = grads.get::<2>(model.weight.id).unwrap().into_data().try_to_vec::<f32>()?;
///     assert_eq!(clipped, [0.5, 1.0]); // from 0.5 and 4, the averages
///     Ok(())
/// })?;
/// # Ok::<(), burn_ddp::Error>(())
/// ```
pub fn clip_grad_value<M: Module>(mut grads: GradientsParams, model: &M, limit: f64) -> Result<GradientsParams> {
    check_limit("limit", limit)?;
    each(&mut grads, model, Clamp(limit));
    Ok(grads)
}

fn check_limit(what: &str, limit: f64) -> Result<()> {
    if limit >= 0.0 {
        return Ok(());
    }
    Err(Error::invalid(format!("{what} is a size: 0 or more, got {limit}")))
}

/// Change of a gradient.
trait Edit {
    fn edit<const D: usize>(&self, gradient: Tensor<D>) -> Tensor<D>;
}

struct Scale(f64);

impl Edit for Scale {
    fn edit<const D: usize>(&self, gradient: Tensor<D>) -> Tensor<D> {
        gradient.mul_scalar(self.0)
    }
}

struct Clamp(f64);

impl Edit for Clamp {
    fn edit<const D: usize>(&self, gradient: Tensor<D>) -> Tensor<D> {
        gradient.clamp(-self.0, self.0)
    }
}

/// Edits each gradient once, also those of parameters that appear more than once.
fn each<M: Module, E: Edit>(grads: &mut GradientsParams, model: &M, edit: E) {
    struct Each<'a, E> {
        grads: &'a mut GradientsParams,
        seen: HashSet<u64>,
        edit: E,
    }
    impl<E: Edit> ModuleVisitor for Each<'_, E> {
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
            if self.seen.insert(param.id.val())
                && let Some(gradient) = self.grads.remove::<D>(param.id)
            {
                self.grads.register(param.id, self.edit.edit(gradient));
            }
        }
    }
    // Without the taps: averages that wait there for an optimizer are in `grads` already, under the parameter's id.
    intercept::bypass(|| model.visit(&mut Each { grads, seen: HashSet::new(), edit }));
}

/// Path and sum of squares of each gradient.
struct Norms(Vec<(String, f64)>);

impl Norms {
    fn of<M: Module>(grads: &GradientsParams, model: &M) -> Result<Norms> {
        struct Read<'a> {
            grads: &'a GradientsParams,
            seen: HashSet<u64>,
            path: Vec<String>,
            norms: Result<Norms>,
        }
        impl ModuleVisitor for Read<'_> {
            fn enter_module(&mut self, name: &str, _: &str) {
                self.path.push(name.into());
            }

            fn exit_module(&mut self, _: &str, _: &str) {
                self.path.pop();
            }

            fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
                let Ok(norms) = &mut self.norms else { return };
                if !self.seen.insert(param.id.val()) {
                    return;
                }
                let Some(gradient) = self.grads.get::<D>(param.id) else { return };
                let path = self.path.join(".");
                match squares(gradient) {
                    Ok(squares) => norms.0.push((path, squares)),
                    Err(e) => self.norms = Err(Error::invalid(format!("reading the gradient of {path}: {e}"))),
                }
            }
        }
        let mut read = Read { grads, seen: HashSet::new(), path: Vec::new(), norms: Ok(Norms(Vec::new())) };
        intercept::bypass(|| model.visit(&mut read));
        // If there are sharded parameters, the other ranks wait in the exchange.
        let mut norms = read.norms.inspect_err(|e| intercept::tell_peers_of_parts(model, e))?;
        norms.sum_over_parts(model)?;
        Ok(norms)
    }

    /// Adds the sums of the other ranks for sharded parameters, each of which has a gradient on all ranks or on none.
    /// *Collective* if there are sharded parameters.
    fn sum_over_parts<M: Module>(&mut self, model: &M) -> Result<()> {
        let parameters = intercept::sharded_parameters(model);
        let of_path: HashMap<&str, usize> =
            self.0.iter().enumerate().map(|(nth, (path, _))| (path.as_str(), nth)).collect();
        let places: Vec<Option<usize>> =
            parameters.iter().map(|parameter| of_path.get(parameter.path.as_str()).copied()).collect();
        let own: Vec<f64> = places.iter().map(|place| place.map_or(0.0, |nth| self.0[nth].1)).collect();
        let sums = intercept::sums_over_parts(&parameters, &own)?;
        for (nth, sum) in places.iter().zip(sums).filter_map(|(place, sum)| Some(((*place)?, sum))) {
            self.0[nth].1 = sum;
        }
        Ok(())
    }

    fn total(&self) -> f64 {
        self.0.iter().map(|(_, squares)| squares).sum::<f64>().sqrt()
    }
}

/// The sum of the squares in f64, by the host: kernels may sum large tensors in an order of their own in every run, and
/// then ranks would clip by factors that differ in the last bit.
fn squares<const D: usize>(gradient: Tensor<D>) -> Result<f64, String> {
    let data = data_of(gradient)?;
    let squares = match data.dtype() {
        DType::F64 => data.as_slice::<f64>().map(|x| sum_of_squares(x, |x| x)),
        DType::F32 => data.as_slice::<f32>().map(|x| sum_of_squares(x, f64::from)),
        _ => wide(data).map(|x| sum_of_squares(&x, |x| x)),
    };
    squares.map_err(|e| format!("{e:?}"))
}

fn wide(data: TensorData) -> Result<Vec<f64>, burn::tensor::DataError> {
    data.try_into_vec_as::<f64>()
}

/// Adds in eight independent sums, which a processor can compute at once.
fn sum_of_squares<T: Copy>(x: &[T], wide: impl Fn(T) -> f64) -> f64 {
    let mut sums = [0.0; 8];
    let (rows, rest) = x.as_chunks::<8>();
    for row in rows {
        for (sum, &x) in sums.iter_mut().zip(row) {
            *sum += wide(x) * wide(x);
        }
    }
    sums.into_iter().sum::<f64>() + rest.iter().map(|&x| wide(x) * wide(x)).sum::<f64>()
}

#[cfg(test)]
mod tests;
