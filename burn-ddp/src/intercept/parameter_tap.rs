//! The reparameterization that `wrap` attaches to each float parameter: it sees every read, visit and map of it.
//!
//! Burn keeps one reparameterization per parameter, so everything that changes the value of a read (gathering shards)
//! is done here, in [`Tap::apply`], in front of the hook.

use std::sync::Arc;

use burn::backend::Dispatch;
use burn::module::{Module, ModuleMapper, ModuleVisitor, Param, Reparameterization};
use burn::tensor::{Device, Tensor};

use super::autodiff_nodes::DdpBackend;
use super::load_save_mappers::{loads, note_read, report_records, saves};
use super::locally_unused_parameters::Handoff;
use super::model_walk::{TAP_NAME, note_visit};
use super::tap_bypass::{is_bypassed, is_replacing, steps_elements};
use super::unused_parameter_averages::Found;
use super::wrapped_model::{StepOf, TapHandle, WrappedModel};
use crate::ddp::Ddp;

/// The tap of a parameter: an identity that also reports the gradient of the value that passes through.
#[derive(Clone, Debug)]
pub(crate) struct Tap {
    /// Keeps the rank in the job: a rank that holds a wrapped model takes part in it.
    _presence: Ddp,
    handle: TapHandle,
    _live: Live,
    handoff: Handoff,
    /// True if the parameter is sharded and a mapper has come to it in this copy of which the program did not say that
    /// it treats each element by itself.
    mixed: bool,
    /// True if the parameter is frozen in this copy, as far as the tap has seen.
    frozen: bool,
}

/// Counts the taps of a slot.
#[derive(Debug)]
struct Live(TapHandle);

impl Live {
    fn new(handle: TapHandle) -> Self {
        handle.model.count_tap(handle.slot, true);
        Live(handle)
    }
}

impl Clone for Live {
    fn clone(&self) -> Self {
        Live::new(self.0.clone())
    }
}

impl Drop for Live {
    fn drop(&mut self) {
        self.0.model.count_tap(self.0.slot, false);
    }
}

impl Tap {
    /// Returns a tap for `param`, and `param` with mappers that report that a record is loaded or taken.
    pub(crate) fn new<const D: usize>(
        ddp: Ddp,
        model: Arc<WrappedModel>,
        slot: usize,
        param: Param<Tensor<D>>,
    ) -> (Param<Tensor<D>>, Self) {
        let handle = TapHandle { model, slot, apart: false, value_id: 0, mixed: false };
        Dispatch::note_value(param.base().into_dispatch(), handle.clone());
        let (handoff, frozen) = (Handoff::new(&param), !handle.model.is_trainable(slot));
        let param = report_records(param, &handle);
        (param, Tap { _presence: ddp, _live: Live::new(handle.clone()), handle, handoff, mixed: false, frozen })
    }

    /// The slot of the parameter and the wrapped model that this tap is a part of, as of now.
    pub(super) fn handle(&self) -> TapHandle {
        let (apart, value_id) = (self.handoff.is_apart(), self.handoff.value_id());
        TapHandle { apart, value_id, mixed: self.mixed, ..self.handle.clone() }
    }

    /// Looks up the average that an optimizer may apply to the parameter in this copy of the model.
    pub(super) fn find(&self) -> Found {
        self.handoff.find(&self.handle())
    }

    /// True if the value of the parameter in this copy may be mixed after `mapper` has come to it: elements of one rank
    /// may depend on others of the same rank.
    fn may_mix(&mut self, mapper: &mut impl ModuleMapper) -> bool {
        let TapHandle { model, slot, .. } = &self.handle;
        if !model.is_divided(*slot) || steps_elements() {
            return false;
        }
        match model.step_of(*slot) {
            StepOf::Elements => return false,
            StepOf::Nothing => return self.mixed,
            StepOf::Unknown => {}
        }
        // Freezing and unfreezing change no value. Steps, too, may make what they return require a gradient.
        let freezes = !self.handoff.trains_after(&self.handle, mapper, true);
        let was_frozen = self.frozen;
        self.frozen = freezes || was_frozen && !self.handoff.trains_after(&self.handle, mapper, false);
        self.mixed || !freezes && !was_frozen
    }

    /// The wrapped model that this tap is a part of.
    pub(crate) fn model(&self) -> &Arc<WrappedModel> {
        &self.handle.model
    }
}

impl Reparameterization for Tap {
    const NAME: &'static str = TAP_NAME;

    fn apply<const D: usize>(&self, base: Tensor<D>) -> Tensor<D> {
        note_read(&self.handle);
        if is_bypassed() {
            return base;
        }
        if !base.is_autodiff() {
            return match self.handle.model.is_sharded(self.handle.slot) {
                true => Tensor::from_dispatch(Dispatch::gather_part(base.into_dispatch(), self.handle())),
                false => base,
            };
        }
        self.handoff.read(&self.handle);
        Tensor::from_dispatch(Dispatch::grad_tap(base.into_dispatch(), self.handle()))
    }
}

/// A tap owns no parameters of its own: as a module it only notices that its parameter is visited, mapped or forked.
impl Module for Tap {
    fn collect_devices(&self, devices: Vec<Device>) -> Vec<Device> {
        devices
    }

    fn fork(self, _: &Device) -> Self {
        self.handoff.note_apart();
        self
    }

    fn to_device(self, _: &Device) -> Self {
        self
    }

    /// Shows `visitor` the average of a parameter that this rank did not use in the last backward:
    /// `GradientsParams::from_grads` visits a parameter's reparameterization after the parameter itself. A visitor that
    /// takes a record is shown nothing.
    fn visit<V: ModuleVisitor>(&self, visitor: &mut V) {
        let saves = saves(&self.handle);
        if !is_bypassed() {
            if saves {
                assert!(
                    !self.handle.model.is_divided(self.handle.slot),
                    "a parameter of this model is sharded, and on several ranks a record would hold a part of it: \
                    save with `ddp.save(&model, path)`, or, unless the model has LoRA, `ddp.unwrap(model)` first"
                );
                return;
            }
            self.handle.model.lookups.visited();
            self.handoff.visit(&self.handle(), visitor);
        } else if let Some(id) = note_visit(&self.handle()) {
            // Loading a record gives parameters new ids.
            self.handoff.set_id(id);
        }
    }

    /// Notes that the parameter is mapped. An optimizer steps by mapping; it has used the average that this copy showed
    /// it, unless the parameter's id has changed.
    fn map<M: ModuleMapper>(mut self, mapper: &mut M) -> Self {
        if !is_bypassed() {
            self.mixed = self.may_mix(mapper);
            self.handle.model.lookups.mapped(self.handle.slot);
            self.handle.model.note_map();
            self.handoff.map(&self.handle, loads(&self.handle), mapper);
        } else if is_replacing() {
            self.handoff.replaced(&self.handle);
            self.mixed = false;
        }
        self
    }

    fn valid(&self) -> Self {
        Tap { handoff: self.handoff.training(false), ..self.clone() }
    }

    /// Only `model.valid().train()` comes here.
    fn train(self) -> Self {
        if !is_bypassed() {
            self.handle.model.note_train();
        }
        Tap { handoff: self.handoff.training(true), ..self }
    }

    fn materialize(self) -> Self {
        self
    }
}
