//! Models that a backward trains, and their averaged gradients by the ids of their parameters.

use std::sync::Arc;

use burn::backend::Dispatch;
use burn::module::{Module, Param, ParamId};
use burn::optim::GradientsParams;
use burn::tensor::{Gradients, Tensor};
use burn_ddp_comm::ProcessGroup;

use super::autodiff_nodes::DdpBackend;
use super::model_walk::{AtTap, Path, note_values, walk};
use super::tap_handle::TapHandle;
use super::wrapped_model::WrappedModel;
use crate::wrap::wrapped_in;
use crate::{Error, Result};

/// What [`Ddp::backward`](crate::Ddp::backward) trains: a wrapped model or a part of one (`&model`, `&model.encoder`),
/// or up to four of them, which share the loss (`(&generator, &discriminator)`).
pub trait Trained: sealed::Sealed {
    /// Averaged gradients: `GradientsParams`, or a tuple of them.
    type Gradients;

    /// Adds the wrapped models among them to `models`.
    #[doc(hidden)]
    fn find(&self, group: &ProcessGroup, models: &mut Models) -> Result<()>;

    /// Notes the values of all their parameters.
    #[doc(hidden)]
    fn note_values(&self);

    /// Takes what belongs to each of them out of `own`, this rank's gradients of a call on `models`.
    ///
    /// # Errors
    ///
    /// A parameter has a gradient of this rank that no tap has seen.
    #[doc(hidden)]
    fn prepare(&self, models: &Models, own: Own<'_>) -> Result<Vec<Prepared>>;

    /// The gradients, once the averages are there.
    #[doc(hidden)]
    fn gradients(prepared: Vec<Prepared>) -> Self::Gradients;
}

mod sealed {
    pub trait Sealed {}
}

/// Wrapped models of a call. Opaque.
#[derive(Debug, Default)]
pub struct Models(pub(crate) Vec<Arc<WrappedModel>>);

impl<M: Module> sealed::Sealed for &M {}

impl<M: Module> Trained for &M {
    type Gradients = GradientsParams;

    fn find(&self, group: &ProcessGroup, models: &mut Models) -> Result<()> {
        for model in wrapped_in(group, *self)? {
            if !models.0.iter().any(|known| Arc::ptr_eq(known, &model)) {
                models.0.push(model);
            }
        }
        Ok(())
    }

    fn note_values(&self) {
        note_values(*self);
    }

    fn prepare(&self, models: &Models, own: Own<'_>) -> Result<Vec<Prepared>> {
        Ok(vec![prepare(*self, models, own)?])
    }

    fn gradients(prepared: Vec<Prepared>) -> GradientsParams {
        prepared.into_iter().next().map(Prepared::gradients).unwrap_or_default()
    }
}

macro_rules! tuples {
    ($(($($model:ident $n:tt $gradients:ty),*))*) => {$(
        impl<$($model: Module),*> sealed::Sealed for ($(&$model,)*) {}

        impl<$($model: Module),*> Trained for ($(&$model,)*) {
            type Gradients = ($($gradients,)*);

            fn find(&self, group: &ProcessGroup, models: &mut Models) -> Result<()> {
                $(Trained::find(&self.$n, group, models)?;)*
                Ok(())
            }

            fn note_values(&self) {
                $(Trained::note_values(&self.$n);)*
            }

            fn prepare(&self, models: &Models, mut own: Own<'_>) -> Result<Vec<Prepared>> {
                Ok(vec![$(prepare(self.$n, models, own.reborrow())?,)*])
            }

            fn gradients(prepared: Vec<Prepared>) -> Self::Gradients {
                let mut prepared = prepared.into_iter().map(Prepared::gradients);
                ($(prepared.next().unwrap_or_else(<$gradients>::new),)*)
            }
        }
    )*};
}

tuples! {
    (A 0 GradientsParams, B 1 GradientsParams)
    (A 0 GradientsParams, B 1 GradientsParams, C 2 GradientsParams)
    (A 0 GradientsParams, B 1 GradientsParams, C 2 GradientsParams, D 3 GradientsParams)
}

/// This rank's gradients of a call. Opaque.
pub enum Own<'a> {
    /// Only the code of others has them.
    Unknown,
    /// As Burn's backward returned them. Those of local parameters are left out unless the batch `counts`.
    Gradients {
        /// The gradients.
        own: &'a mut Gradients,
        /// False for a batch of weight 0.
        counts: bool,
    },
    /// As the code of others took them out, which goes on with those of local parameters.
    #[cfg(feature = "train")]
    Params {
        /// The gradients.
        own: &'a mut GradientsParams,
        /// False for a batch of weight 0.
        counts: bool,
    },
}

impl Own<'_> {
    fn reborrow(&mut self) -> Own<'_> {
        match self {
            Own::Unknown => Own::Unknown,
            Own::Gradients { own, counts } => Own::Gradients { own, counts: *counts },
            #[cfg(feature = "train")]
            Own::Params { own, counts } => Own::Params { own, counts: *counts },
        }
    }

    /// What else than a read past its tap may have given a parameter a gradient.
    fn or_by_hand(&self) -> &'static str {
        match self {
            #[cfg(feature = "train")]
            Own::Params { .. } => ", or `TrainStep::step` gave it a gradient by hand",
            _ => "",
        }
    }
}

/// Gradients of one model before the averages are there. Opaque.
pub struct Prepared {
    /// Gradients of this rank's local parameters.
    own: GradientsParams,
    /// Parameters whose averages are to come.
    tapped: Vec<(Box<dyn Trainable>, TapHandle)>,
}

impl Prepared {
    fn gradients(self) -> GradientsParams {
        let Prepared { own: mut gradients, tapped } = self;
        tapped.into_iter().for_each(|(parameter, tap)| parameter.put_average(tap, &mut gradients));
        gradients
    }

    /// Puts the averages into `gradients`.
    #[cfg(feature = "train")]
    pub(crate) fn put_averages(self, gradients: &mut GradientsParams) {
        self.tapped.into_iter().for_each(|(parameter, tap)| parameter.put_average(tap, gradients));
    }
}

/// A parameter that requires a gradient, of any number of dimensions.
trait Trainable {
    fn id(&self) -> ParamId;

    /// True if this rank has a gradient of it that no tap has seen.
    fn is_in(&self, own: &Own<'_>) -> bool;

    /// Moves such a gradient into `gradients`, if there is one and its batch counts.
    fn move_own(&self, own: &mut Own<'_>, gradients: &mut GradientsParams);

    /// Puts its average into `gradients`, if there is one.
    fn put_average(self: Box<Self>, tap: TapHandle, gradients: &mut GradientsParams);
}

struct Leaf<const D: usize> {
    id: ParamId,
    value: Tensor<D>,
}

impl<const D: usize> Trainable for Leaf<D> {
    fn id(&self) -> ParamId {
        self.id
    }

    fn is_in(&self, own: &Own<'_>) -> bool {
        match own {
            Own::Unknown => false,
            Own::Gradients { own, .. } => self.value.grad(own).is_some(),
            #[cfg(feature = "train")]
            Own::Params { own, .. } => own.get::<D>(self.id).is_some(),
        }
    }

    fn move_own(&self, own: &mut Own<'_>, gradients: &mut GradientsParams) {
        match own {
            Own::Unknown => {}
            Own::Gradients { own, counts } => match self.value.grad_remove(own) {
                Some(gradient) if *counts => gradients.register(self.id, gradient),
                _ => {}
            },
            #[cfg(feature = "train")]
            Own::Params { counts: true, .. } => {}
            #[cfg(feature = "train")]
            Own::Params { own, .. } => drop(own.remove::<D>(self.id)),
        }
    }

    fn put_average(self: Box<Self>, tap: TapHandle, gradients: &mut GradientsParams) {
        // A clone that came before has taken the average of its slot.
        if !tap.model.has_average(tap.slot) {
            return;
        }
        let average = Tensor::<D>::from_dispatch(Dispatch::average(self.value.into_dispatch(), tap.clone()));
        // It is there still if this copy of the model is on another backend.
        if !tap.model.has_average(tap.slot) {
            gradients.register(self.id, average.inner());
        }
    }
}

/// See [`Trained::prepare`].
pub(crate) fn prepare<M: Module>(model: &M, models: &Models, own: Own<'_>) -> Result<Prepared> {
    struct Prepare<'a> {
        models: &'a Models,
        own: Own<'a>,
        prepared: Prepared,
        fault: Option<Error>,
    }
    impl AtTap for Prepare<'_> {
        type Seen = Box<dyn Trainable>;

        fn parameter<const D: usize>(&mut self, param: &Param<Tensor<D>>) -> Option<Self::Seen> {
            let value = param.base();
            value.is_require_grad().then(|| -> Self::Seen { Box::new(Leaf { id: param.id, value }) })
        }

        fn leave(&mut self, path: &Path, parameter: Self::Seen, tap: Option<TapHandle>) {
            let Prepare { models, own, prepared, .. } = self;
            let is_local = |path: &str| models.0.iter().any(|model| model.is_local(path, parameter.id()));
            let fault = match tap {
                Some(_) if parameter.is_in(own) => format!(
                    "{path} was read past its tap{}, so its gradient is not averaged: read parameters through `val()`, \
                    not through `base()` or by dereferencing the `Param`",
                    own.or_by_hand()
                ),
                Some(tap) => return prepared.tapped.push((parameter, tap)),
                None => {
                    parameter.move_own(own, &mut prepared.own);
                    if is_local(&path.to_string()) {
                        return;
                    }
                    format!(
                        "{path} is no longer tapped, so its gradient is not averaged: it was replaced after `wrap` \
                        (`Param::map` makes a new parameter; `Module::map` keeps the tap), or never wrapped. Change it \
                        before, or `ddp.wrap(ddp.unwrap(model)?)` again"
                    )
                }
            };
            self.fault.get_or_insert(Error::invalid(fault));
        }
    }
    let prepared = Prepared { own: GradientsParams::new(), tapped: Vec::new() };
    let mut prepare = Prepare { models, own, prepared, fault: None };
    walk(model, &mut prepare);
    prepare.fault.map_or(Ok(prepare.prepared), Err)
}
