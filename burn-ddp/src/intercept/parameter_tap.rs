//! The reparameterization that `wrap` attaches to each float parameter: it sees every read, visit and map of it.
//!
//! Burn keeps one reparameterization per parameter, so everything that changes the value of a read (gathering shards)
//! is done here, in [`Tap::apply`], in front of the hook.

use std::sync::Arc;

use burn::backend::Dispatch;
use burn::module::{Module, ModuleMapper, ModuleVisitor, Param, ParamId, Reparameterization};
use burn::tensor::{Device, Shape, Tensor};

use super::autodiff_nodes::DdpBackend;
use super::model_walk::{TAP_NAME, note_visit};
use super::save_mappers::refuse_records_of_parts;
use super::tap_bypass::{is_bypassed, is_replacing, steps_elements};
use super::tap_handle::TapHandle;
use super::wrapped_model::{StepOf, WrappedModel};
use crate::ddp::Ddp;

/// Largest number of dimensions of a parameter.
pub(crate) const MAX_DIMS: usize = 8;

/// The tap of a parameter: an identity that also reports the gradient of the value that passes through.
#[derive(Clone, Debug)]
pub(crate) struct Tap {
    /// Keeps the rank in the job: a rank that holds a wrapped model takes part in it.
    _presence: Ddp,
    handle: TapHandle,
    _holder: Holder,
    /// The parameter's id at `wrap`.
    id: ParamId,
    /// True if the parameter is frozen in this copy, as far as the tap has seen.
    frozen: bool,
}

/// Counts a holder of the model.
#[derive(Debug)]
struct Holder(Arc<WrappedModel>);

impl Holder {
    fn new(model: Arc<WrappedModel>) -> Self {
        model.count_holder(true);
        Holder(model)
    }
}

impl Clone for Holder {
    fn clone(&self) -> Self {
        Holder::new(self.0.clone())
    }
}

impl Drop for Holder {
    fn drop(&mut self) {
        self.0.count_holder(false);
    }
}

impl Tap {
    /// Returns a tap for `param`, which is the `first` of the clones of its slot or not, and `param` with a mapper that
    /// keeps parts out of records.
    pub(crate) fn new<const D: usize>(
        ddp: Ddp,
        model: Arc<WrappedModel>,
        slot: usize,
        first: bool,
        param: Param<Tensor<D>>,
    ) -> (Param<Tensor<D>>, Self) {
        let frozen = !model.is_trainable(slot);
        let handle = TapHandle { model, slot, first, value_id: 0, mixed: false, reads_master: false };
        Dispatch::note_value(param.base().into_dispatch(), handle.clone());
        let (id, _holder) = (param.id, Holder::new(handle.model.clone()));
        let param = refuse_records_of_parts(param, &handle);
        (param, Tap { _presence: ddp, _holder, handle, id, frozen })
    }

    /// The wrapped model that this tap is a part of.
    pub(crate) fn model(&self) -> &Arc<WrappedModel> {
        &self.handle.model
    }

    /// True if the value of the parameter in this copy may be mixed after `mapper` has come to it: elements of one rank
    /// may depend on others of the same rank.
    fn may_mix(&mut self, mapper: &mut impl ModuleMapper) -> bool {
        let TapHandle { model, slot, mixed, .. } = &self.handle;
        if !model.is_divided(*slot) || steps_elements() {
            return false;
        }
        match model.step_of(*slot) {
            StepOf::Elements => return false,
            StepOf::Nothing => return *mixed,
            StepOf::Unknown => {}
        }
        let mixed = *mixed;
        // Freezing and unfreezing change no value. Steps, too, may make what they return require a gradient.
        let freezes = !self.trains_after(mapper, true);
        let was_frozen = self.frozen;
        self.frozen = freezes || was_frozen && !self.trains_after(mapper, false);
        mixed || !freezes && !was_frozen
    }

    /// True if a parameter with the id of this one, and the shape that it has on this rank, requires a gradient after
    /// `mapper` has come to it; before, it does if `trains`.
    fn trains_after(&self, mapper: &mut impl ModuleMapper, trains: bool) -> bool {
        let TapHandle { model, slot, .. } = &self.handle;
        let (mut dims, dtype) = model.shape(*slot);
        if let Some(shards) = model.shards().filter(|_| model.is_sharded(*slot)) {
            dims = shards.part_dims(*slot);
        }
        macro_rules! of_dims {
            ($($d:literal)*) => {
                match dims.len() {
                    $($d => {
                        let zeros = Tensor::<$d>::zeros(Shape::from(dims), (&model.device, dtype));
                        let param = Param::initialized(self.id, zeros.set_require_grad(trains));
                        mapper.map_float(param).is_require_grad()
                    })*
                    _ => trains,
                }
            };
        }
        of_dims!(1 2 3 4 5 6 7 8)
    }
}

impl Reparameterization for Tap {
    const NAME: &'static str = TAP_NAME;

    fn apply<const D: usize>(&self, base: Tensor<D>) -> Tensor<D> {
        if is_bypassed() {
            return base;
        }
        if base.is_autodiff() {
            return Tensor::from_dispatch(Dispatch::grad_tap(base.into_dispatch(), self.handle.clone()));
        }
        let TapHandle { model, slot, .. } = &self.handle;
        match (model.is_sharded(*slot), model.compute_dtype(*slot)) {
            (true, _) => Tensor::from_dispatch(Dispatch::gather_part(base.into_dispatch(), self.handle.clone())),
            (false, Some(dtype)) => base.cast(dtype),
            (false, None) => base,
        }
    }
}

/// A tap owns no parameters of its own: as a module it only notices that its parameter is visited or mapped.
impl Module for Tap {
    fn collect_devices(&self, devices: Vec<Device>) -> Vec<Device> {
        devices
    }

    fn fork(self, _: &Device) -> Self {
        self
    }

    fn to_device(self, _: &Device) -> Self {
        self
    }

    fn visit<V: ModuleVisitor>(&self, _: &mut V) {
        if is_bypassed() {
            note_visit(self.handle.clone());
        }
    }

    fn map<M: ModuleMapper>(mut self, mapper: &mut M) -> Self {
        if !is_bypassed() {
            self.handle.mixed = self.may_mix(mapper);
            self.handle.value_id = self.handle.model.next_value_id(self.handle.slot);
        } else if is_replacing() {
            self.handle.mixed = false;
            self.handle.value_id = self.handle.model.next_value_id(self.handle.slot);
        }
        self
    }

    fn valid(&self) -> Self {
        self.clone()
    }

    /// Only `model.valid().train()` comes here.
    fn train(self) -> Self {
        if !is_bypassed() {
            self.handle.model.note_train();
        }
        self
    }

    fn materialize(self) -> Self {
        self
    }
}
