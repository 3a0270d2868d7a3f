//! Parameters that other ranks used and this one did not: their averages have no leaf of this backward.
//!
//! The last gate registers such an average on the leaf of a clone or on a stand-in leaf. [`Handoff`] shows stand-in
//! leaves to the visitors of each copy of the model, so that the copy's optimizer gets them.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use burn::backend::Dispatch;
use burn::backend::autodiff::NodeId;
use burn::module::{ModuleMapper, ModuleVisitor, Param, ParamId};
use burn::tensor::Tensor;

use super::depth_ladder::AutodiffTensor;
use super::model_state::State;
use super::nodes::DdpBackend;
use super::wrapped_model::{TapHandle, WrappedModel};
use crate::gradients::GradientMemory;

/// Largest number of dimensions of a parameter.
pub(crate) const MAX_DIMS: usize = 8;

/// Evaluates `$run` with the number of dimensions as the constant `$d`; `$other` above [`MAX_DIMS`], which `wrap`
/// refuses.
macro_rules! with_dims {
    ($dims:expr, $d:ident => $run:expr, else $other:expr) => {
        with_dims!($dims, $d => $run, else $other, 1 2 3 4 5 6 7 8)
    };
    ($dims:expr, $d:ident => $run:expr, else $other:expr, $($n:literal)*) => {
        match $dims {
            $($n => {
                const $d: usize = $n;
                $run
            })*
            _ => $other,
        }
    };
}

/// Place for the average of a slot that this rank did not use.
pub(super) enum Substitute {
    /// The leaf of a clone.
    Leaf(NodeId),
    /// The stand-in leaf of this slot.
    StandIn(usize),
}

impl WrappedModel {
    /// The stand-in leaf of a slot, if it has been needed.
    pub(super) fn stand_in<B: GradientMemory>(&self, slot: usize) -> Option<AutodiffTensor<B>> {
        self.lock().of::<B>()?.stand_ins.get(slot)
    }

    /// Place for the average of a slot that this rank did not use. Until an optimizer steps, clones of a parameter
    /// share a leaf.
    pub(super) fn substitute<B: GradientMemory>(&self, state: &State<B>, slot: usize) -> Substitute {
        if !self.cloned[slot] || self.mapped.load(Ordering::Acquire) {
            return Substitute::StandIn(slot);
        }
        let first = self.slots[slot].first_clone;
        let mut clones = (first..self.slots.len()).filter(|&other| self.slots[other].first_clone == first);
        clones.find_map(|other| state.slots[other].leaf).map_or(Substitute::StandIn(first), Substitute::Leaf)
    }

    /// Warns once, on rank 0, of parameters that no rank used.
    pub(super) fn warn_unused<B: GradientMemory>(&self, state: &mut State<B>) {
        if std::mem::replace(&mut state.warned_unused, true) || self.ddp.rank() != 0 {
            return;
        }
        let slots = self.slots.iter().enumerate();
        let unused: Vec<&str> = slots
            .filter(|(slot, s)| s.trainable && !state.reducer.is_present(*slot))
            .map(|(_, s)| s.path.as_str())
            .collect();
        if !unused.is_empty() {
            tracing::warn!(
                parameters = unused.join(", "),
                "parameters that had no gradient on any rank in the first step: unused, or read past their taps"
            );
        }
    }
}

/// Hands the waiting averages of one parameter in one copy of the model to the copy's optimizer.
#[derive(Clone, Debug)]
pub(super) struct Handoff {
    /// The parameter's id as of the last visit by [`find`](super::find). Shared by clones of the model.
    id: Arc<AtomicU64>,
    /// Number of dimensions of the parameter.
    dims: usize,
    /// Number of the waiting average that this copy showed to a visitor last.
    shown: Number,
    /// Number of the last waiting average that an optimizer has used: this copy showed it, and was mapped later.
    used: Number,
}

impl Handoff {
    pub(super) fn new<const D: usize>(param: &Param<Tensor<D>>) -> Self {
        Handoff {
            id: Arc::new(AtomicU64::new(param.id.val())),
            dims: D,
            shown: Number::default(),
            used: Number::default(),
        }
    }

    /// Sets the parameter's id, in all copies of the model.
    pub(super) fn set_id(&self, id: u64) {
        self.id.store(id, Ordering::Relaxed);
    }

    /// Shows `visitor` the stand-in leaf under the parameter's id, if this copy's optimizer has not used every waiting
    /// average.
    pub(super) fn visit(&self, tap: &TapHandle, visitor: &mut impl ModuleVisitor) {
        let Some(number) = tap.model.waiting.after(tap.slot, self.used.get()) else { return };
        self.shown.set(number);
        with_dims!(self.dims, D => self.show::<D>(tap, visitor), else ());
    }

    fn show<const D: usize>(&self, tap: &TapHandle, visitor: &mut impl ModuleVisitor) {
        let like = Tensor::<D>::zeros([1; D], &tap.model.device);
        let leaf = Tensor::<D>::from_dispatch(Dispatch::stand_in(like.into_dispatch(), tap.clone()));
        visitor.visit_float(&Param::initialized(self.id(), leaf));
    }

    /// Notes that `mapper` has used the average that this copy showed last. If it has not, no later step is right, and
    /// the job ends.
    pub(super) fn map(&self, tap: &TapHandle, mapper: &mut impl ModuleMapper) {
        if self.shown.get() <= self.used.get() {
            return;
        }
        self.used.set(self.shown.get());
        let missed = with_dims!(self.dims, D => self.missed_average::<D>(tap, mapper), else false);
        if missed {
            tap.model.note_stale_id(tap.slot);
        }
    }

    /// True if `mapper` is an optimizer that still has a gradient under the parameter's id: no parameter of the model
    /// has this id any more. Such an optimizer changes zeros under this id, and leaves zeros under a new id as they
    /// are.
    fn missed_average<const D: usize>(&self, tap: &TapHandle, mapper: &mut impl ModuleMapper) -> bool {
        let (shape, dtype) = tap.model.shape(tap.slot);
        let Ok(shape) = <[usize; D]>::try_from(shape) else { return false };
        let mut moved = |id: ParamId| {
            let zeros = Tensor::<D>::zeros(shape, (&tap.model.device, dtype)).require_grad();
            mapper.map_float(Param::initialized(id, zeros)).base().try_into_data().ok()
        };
        moved(self.id()) != moved(ParamId::new())
    }

    fn id(&self) -> ParamId {
        ParamId::from(self.id.load(Ordering::Relaxed))
    }
}

/// A number of which each clone has its own.
#[derive(Debug, Default)]
struct Number(AtomicU64);

impl Number {
    fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }

    fn set(&self, number: u64) {
        self.0.store(number, Ordering::Relaxed);
    }
}

impl Clone for Number {
    fn clone(&self) -> Self {
        Number(AtomicU64::new(self.get()))
    }
}
