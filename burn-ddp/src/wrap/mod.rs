//! `wrap` and `unwrap`, from a model to a data-parallel model and back.
//!
//! | | |
//! |---|---|
//! | `wrap_config`, `precision_config` | settings |
//! | `inspect_model` | checks that a rank makes alone |
//! | `local_parameters` | selects the parameters that each rank keeps for itself |
//! | `read_types` | types in which parameters are read |
//! | `treatment` | which parameters and buffers have averaged gradients |
//! | `bucket_size` | size of buckets between machines, measured at `wrap` |
//! | `agree_and_broadcast` | agreement on the model and its settings; rank 0's values; the reducer |
//! | `memory_estimate` | memory of a rank, from shapes |
//! | `parameters_to_shard` | which parameters the settings shard, before `wrap` |
//! | `attach` | taps on the parameters |
//! | `rank_placement` | advice on the placement of ranks on machines |
//! | `find_wrapped` | the wrapped models in a module, and the handle that each belongs to |

mod agree_and_broadcast;
mod attach;
mod bucket_size;
mod find_wrapped;
mod inspect_model;
mod leaves;
mod local_parameters;
mod memory_estimate;
#[cfg(feature = "train")]
mod parameters_to_shard;
mod precision_config;
mod rank_placement;
mod read_types;
mod treatment;
mod wrap_config;

use burn::module::Module;

pub(crate) use agree_and_broadcast::agree_and_broadcast;
#[cfg(feature = "train")]
pub(crate) use attach::Taps;
pub(crate) use find_wrapped::{only, wrapped_in};
pub(crate) use local_parameters::refuse_accumulation;
#[cfg(feature = "train")]
pub(crate) use parameters_to_shard::parameters_to_divide;
pub use wrap_config::{Sharding, WrapConfig};

use crate::ddp::Ddp;
use crate::intercept;
use crate::{Error, Result};

impl Ddp {
    /// Makes `model` data-parallel: it keeps its type, every rank gets rank 0's weights and buffers, and
    /// [`Ddp::backward`] returns gradients averaged over all ranks. *Collective*.
    ///
    /// Freeze parameters, load weights and apply LoRA before the call; [`WrapConfig`] sets accumulation, sums instead
    /// of means, and bucket sizes. Every rank must use the same optimizer. Wrapping a wrapped model is an error;
    /// [`Ddp::unwrap`] is the inverse. In a world of 1 the model behaves the same, with the same checks, but nothing is
    /// communicated.
    ///
    /// After the call each rank draws random numbers of its own, as after [`Ddp::seed`], also if the program seeded all
    /// ranks alike (`device.seed(s)`): dropout and noise differ between ranks, and a seeded run repeats them.
    ///
    /// Costs small exchanges of settings, shapes and seeds, then one broadcast step per parameter and buffer (one more
    /// for each further 64 MiB of it), in which rank 0 sends `(n - 1) b` bytes for a value of `b` bytes on `n` ranks.
    ///
    /// # Errors
    ///
    /// On every rank: [`Error::ModelsDiffer`] naming the first parameter that differs and both shapes;
    /// [`Error::Invalid`] for a model that is wrapped already, spans devices, has no autodiff, or lives on a backend
    /// without support.
    ///
    /// # Example
    ///
    /// ```
    /// # use burn::{nn::LinearConfig, prelude::*};
    /// # use burn_ddp::prelude::*;
    /// let errors = Ddp::spawn(2, |ddp| {
    ///     let device = ddp.device()?.autodiff();
    ///     let features = 3 + ddp.rank(); // a bug: each rank makes another model
    ///     Ok(ddp.wrap(LinearConfig::new(features, 1).init(&device)).unwrap_err().to_string())
    /// })?;
    /// assert_eq!(
    ///     errors[0],
    ///     "the ranks do not hold the same model: weight is [3, 1] f32 on rank 0, but [4, 1] f32 on rank 1"
    /// );
    /// assert_eq!(errors[0], errors[1]);
    /// # Ok::<(), burn_ddp::Error>(())
    /// ```
    #[track_caller]
    pub fn wrap<M: Module + 'static>(&self, model: M) -> Result<M> {
        self.wrap_with(model, &WrapConfig::new())
    }

    /// [`Ddp::wrap`] with settings, which must be the same on every rank. *Collective*.
    ///
    /// # Errors
    ///
    /// Those of [`Ddp::wrap`].
    ///
    /// # Example
    ///
    /// ```
    /// # use burn::{nn::LinearConfig, prelude::*};
    /// # use burn_ddp::prelude::*;
    /// Ddp::spawn(2, |ddp| {
    ///     let device = ddp.device()?.autodiff();
    ///     let config = WrapConfig::new().with_accumulation(2);
    ///     let model = ddp.wrap_with(LinearConfig::new(2, 1).init(&device), &config)?;
    ///     for micro_batch in 0..4 {
    ///         let loss = model.forward(Tensor::<2>::ones([8, 2], &device)).mean();
    ///         let grads = ddp.backward(&loss, &model)?;
    ///         assert_eq!(grads.is_none(), micro_batch % 2 == 0); // the second one of a step reduces
    ///     }
    ///     Ok(())
    /// })?;
    /// # Ok::<(), burn_ddp::Error>(())
    /// ```
    #[track_caller]
    pub fn wrap_with<M: Module + 'static>(&self, model: M, config: &WrapConfig) -> Result<M> {
        let (model, agreed) = agree_and_broadcast(self, model, config)?;
        Ok(agreed.taps(self, &model)?.attach(model))
    }

    /// Returns the plain model, with the same parameters and ids, without what `wrap` attached to each parameter.
    /// Gradients held for accumulation stay with the other copies of the wrapped model; if there is no other copy, they
    /// are lost, with a warning. Costs no communication, unless parameters are
    /// [sharded](WrapConfig::with_sharding): then it is *collective*, and they become whole on every rank, each in one
    /// step in which a rank sends about `(n - 1) / n` of its bytes.
    ///
    /// # Errors
    ///
    /// [`Error::Sharding`] or [`Error::Comm`] if sharded parameters cannot be gathered.
    /// [`Error::Invalid`] if the model carries other reparameterizations (LoRA): Burn removes all of them at once, and
    /// would fold the others into the weights.
    ///
    /// # Example
    ///
    /// ```
    /// # use burn::{nn::LinearConfig, prelude::*};
    /// # use burn_ddp::prelude::*;
    /// let gradients = Ddp::spawn(2, |ddp| {
    ///     let device = ddp.device()?.autodiff();
    ///     let model = ddp.wrap(LinearConfig::new(1, 1).init(&device))?;
    ///     let model = ddp.unwrap(model)?;
    ///     let x = Tensor::<2>::full([1, 1], ddp.rank() as f64, &device);
    ///     let grads = model.forward(x).sum().backward(); // this rank's own gradients again
    ///     Ok(model.weight.grad(&grads).unwrap().into_scalar::<f32>())
    /// })?;
    /// assert_eq!(gradients, [0.0, 1.0]);
    /// # Ok::<(), burn_ddp::Error>(())
    /// ```
    pub fn unwrap<M: Module>(&self, model: M) -> Result<M> {
        if let Some(name) = inspect_model::foreign_reparameterization(&model) {
            return Err(Error::invalid(format!(
                "the model carries the reparameterization {name:?} beside burn-ddp's, and Burn removes all of them \
                 together, which would fold {name:?} into the weights: keep the model wrapped; \
                 `ddp.save(&model, path)` saves it as it is"
            )));
        }
        intercept::refuse_parts_without_tap(&model).inspect_err(|e| intercept::tell_peers_of_parts(&model, e))?;
        let model = intercept::whole(model)?;
        // Burn removes a reparameterization by folding it into the parameter; ours is the identity.
        Ok(intercept::without_mappers(intercept::bypass(|| model.materialize())))
    }
}
