//! An optimizer of Burn that was checked for the sharded parameters that it steps.

use std::borrow::{Borrow, BorrowMut};
use std::ops::Deref;

use burn::module::Module;
use burn::optim::lr_scheduler::module_lr_scheduler::ModuleLearningRate;
use burn::optim::{GradientsParams, ModuleOptimizer, OptimizerRecord};

use crate::ddp::Ddp;
use crate::intercept::{self, SteppedSlot};

/// An optimizer of Burn, as [`Ddp::optimizer`] returns it: [`step`](Self::step) tells
/// [sharded](crate::WrapConfig::with_sharding) parameters that this optimizer was checked for them. It dereferences to
/// Burn's [`ModuleOptimizer`], but not mutably, as that one's own `step` would tell nothing.
///
/// # Example
///
/// ```
/// # use burn::nn::{Linear, LinearConfig};
/// # use burn::optim::{AdamConfig, ModuleOptimizer};
/// # use burn::prelude::*;
/// # use burn_ddp::prelude::*;
/// Ddp::spawn(2, |ddp| {
///     let device = ddp.device()?.autodiff();
///     let config = WrapConfig::new().with_sharding(Sharding::Parameters).with_sharding_above(1);
///     let mut model: Linear = ddp.wrap_with(LinearConfig::new(4, 4).init(&device), &config)?;
///     let mut optim: DdpOptimizer = ddp.optimizer(AdamConfig::new().init(), &model)?;
///     let loss = model.forward(Tensor::<2>::ones([1, 4], &device)).sum();
///     let grads = ddp.backward(&loss, &model)?.expect("a step");
///     model = optim.step(0.1, model, grads);
///     let burn: &ModuleOptimizer = &optim;
///     assert!(!burn.to_record().is_empty());
///     Ok(())
/// })?;
/// # Ok::<(), burn_ddp::Error>(())
/// ```
#[derive(Clone)]
pub struct DdpOptimizer {
    optim: ModuleOptimizer,
    /// Sharded parameters that the optimizer steps element by element.
    fits: Vec<SteppedSlot>,
    /// True if it steps models with sharded parameters, or parts of such models.
    is_sharded: bool,
}

impl std::fmt::Debug for DdpOptimizer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "DdpOptimizer(checked for {} sharded parameters)", self.fits.len())
    }
}

impl DdpOptimizer {
    /// Notes that the optimizer steps these sharded parameters of a model element by element.
    pub(super) fn fit(&mut self, slots: impl IntoIterator<Item = SteppedSlot>) {
        self.is_sharded = true;
        for slot in slots {
            slot.note_optimizer();
            self.fits.push(slot);
        }
    }

    /// `ModuleOptimizer::load_record`. Not collective.
    ///
    /// # Example
    ///
    /// ```
    /// # use burn::{nn::LinearConfig, optim::AdamConfig};
    /// # use burn_ddp::prelude::*;
    /// Ddp::spawn(2, |ddp| {
    ///     let model = ddp.wrap(LinearConfig::new(4, 4).init(&ddp.device()?.autodiff()))?;
    ///     let optim = ddp.optimizer(AdamConfig::new().init(), &model)?;
    ///     let again = ddp.optimizer(AdamConfig::new().init(), &model)?.load_record(optim.to_record());
    ///     assert!(again.to_record().is_empty()); // no step so far
    ///     Ok(())
    /// })?;
    /// # Ok::<(), burn_ddp::Error>(())
    /// ```
    #[must_use]
    pub fn load_record(self, record: OptimizerRecord) -> Self {
        DdpOptimizer { optim: self.optim.load_record(record), ..self }
    }

    /// `ModuleOptimizer::step`. Not collective.
    ///
    /// A sharded parameter that has a gradient, and for which this optimizer was not checked, is stepped all the same;
    /// the next backward that reaches it is then an error on every rank.
    pub fn step<M: Module>(&mut self, lr: impl Into<ModuleLearningRate>, model: M, grads: GradientsParams) -> M {
        let optim = &mut self.optim;
        if !self.is_sharded {
            return optim.step(lr, model, grads);
        }
        intercept::step_by_elements(&self.fits, model, grads, |model, grads| optim.step(lr, model, grads))
    }
}

impl From<ModuleOptimizer> for DdpOptimizer {
    fn from(optim: ModuleOptimizer) -> Self {
        DdpOptimizer { optim, fits: Vec::new(), is_sharded: false }
    }
}

impl Deref for DdpOptimizer {
    type Target = ModuleOptimizer;

    fn deref(&self) -> &ModuleOptimizer {
        &self.optim
    }
}

impl Borrow<ModuleOptimizer> for DdpOptimizer {
    fn borrow(&self) -> &ModuleOptimizer {
        &self.optim
    }
}

impl BorrowMut<ModuleOptimizer> for DdpOptimizer {
    fn borrow_mut(&mut self) -> &mut ModuleOptimizer {
        &mut self.optim
    }
}

impl Ddp {
    /// Runs `f`, whose mappers treat each element of a parameter by itself: clamps, moving averages, optimizers written
    /// by hand. Only needed for [sharded](crate::WrapConfig::with_sharding) parameters, of which each rank maps its own
    /// rows: a backward refuses such a parameter after any other mapper has changed it, except for freezing, loading,
    /// and steps of [`DdpOptimizer`]. Not collective.
    ///
    /// # Example
    ///
    /// ```
    /// # use burn::module::{ModuleMapper, Param};
    /// # use burn::nn::{Linear, LinearConfig};
    /// # use burn::prelude::*;
    /// # use burn_ddp::prelude::*;
    /// struct Clamp;
    ///
    /// impl ModuleMapper for Clamp {
    ///     fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
    ///         param.map(|value| Tensor::from_inner(value.inner().clamp(-0.1, 0.1)).require_grad())
    ///     }
    /// }
    ///
    /// Ddp::spawn(2, |ddp| {
    ///     let device = ddp.device()?.autodiff();
    ///     let config = WrapConfig::new().with_sharding(Sharding::Parameters).with_sharding_above(1);
    ///     let mut model: Linear = ddp.wrap_with(LinearConfig::new(4, 4).init(&device), &config)?;
    ///     model = ddp.element_wise(|| model.map(&mut Clamp));
    ///     assert!(model.weight.val().abs().max().into_scalar::<f32>() <= 0.1);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), burn_ddp::Error>(())
    /// ```
    pub fn element_wise<T>(&self, f: impl FnOnce() -> T) -> T {
        intercept::element_wise(f)
    }
}
