//! The reparameterization that `wrap` attaches to each float parameter.
//!
//! Burn keeps one per parameter. Treatments of a parameter's value (gathering a shard, a cast to lower precision) are
//! composed here, in [`Tap::apply`], in front of the hook.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use burn::backend::Dispatch;
use burn::module::{Module, ModuleMapper, ModuleVisitor, Param, ParamId, Reparameterization};
use burn::tensor::{Device, Tensor};

use super::bypass::is_bypassed;
use super::model_walk::{TAP_NAME, note_visit};
use super::nodes::DdpBackend;
use super::wrapped_model::{TapHandle, WrappedModel};
use crate::ddp::Ddp;

/// Largest number of dimensions of a parameter.
pub(crate) const MAX_RANK: usize = 8;

/// Runs an expression with the number of dimensions as a constant; the other one above [`MAX_RANK`], which `wrap`
/// refuses.
macro_rules! with_rank {
    ($rank:expr, $d:ident => $run:expr, else $other:expr) => {
        with_rank!($rank, $d => $run, else $other, 1 2 3 4 5 6 7 8)
    };
    ($rank:expr, $d:ident => $run:expr, else $other:expr, $($n:literal)*) => {
        match $rank {
            $($n => {
                const $d: usize = $n;
                $run
            })*
            _ => $other,
        }
    };
}

/// The tap of a parameter: an identity that also reports the gradient of the value that passes through.
#[derive(Clone, Debug)]
pub(crate) struct Tap {
    /// A rank that holds a wrapped model takes part in the job.
    _presence: Ddp,
    handle: TapHandle,
    _live: Live,
    /// The parameter's id as of the last visit by [`find`](super::find). Shared by clones of the model.
    id: Arc<AtomicU64>,
    /// Number of dimensions of the parameter.
    rank: usize,
    /// Number of the waiting average that this copy of the model yielded to a visitor last.
    yielded: Number,
    /// Number of the last one that is used up: it was yielded before this copy was mapped, which is how an optimizer
    /// steps.
    used: Number,
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

/// A number that each copy of a model keeps for itself.
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

impl Tap {
    pub(crate) fn new<const D: usize>(
        ddp: Ddp,
        model: Arc<WrappedModel>,
        slot: usize,
        param: &Param<Tensor<D>>,
    ) -> Self {
        let handle = TapHandle { model, slot };
        Dispatch::note_leaf(param.base().into_dispatch(), handle.clone());
        Tap {
            _presence: ddp,
            _live: Live::new(handle.clone()),
            handle,
            id: Arc::new(AtomicU64::new(param.id.val())),
            rank: D,
            yielded: Number::default(),
            used: Number::default(),
        }
    }

    /// The wrapped model that this tap is a part of.
    pub(crate) fn model(&self) -> &Arc<WrappedModel> {
        &self.handle.model
    }

    /// True if the mapping optimizer has used the average that was yielded: it then treats the parameter's id like any
    /// other, since nothing more waits under it.
    fn was_taken<const D: usize>(&self, mapper: &mut impl ModuleMapper) -> bool {
        let (dims, dtype) = self.handle.model.shape(self.handle.slot);
        let Ok(dims) = <[usize; D]>::try_from(dims) else { return true };
        let mut moved = |id: ParamId| {
            let zeros = Tensor::<D>::zeros(dims, (&self.handle.model.device, dtype)).require_grad();
            mapper.map_float(Param::initialized(id, zeros)).base().try_into_data().ok()
        };
        moved(ParamId::from(self.id.load(Ordering::Relaxed))) == moved(ParamId::new())
    }

    fn visit_waiting<const D: usize>(&self, visitor: &mut impl ModuleVisitor) {
        let like = Tensor::<D>::zeros([1; D], &self.handle.model.device);
        let leaf = Tensor::<D>::from_dispatch(Dispatch::delivered(like.into_dispatch(), self.handle.clone()));
        visitor.visit_float(&Param::initialized(ParamId::from(self.id.load(Ordering::Relaxed)), leaf));
    }
}

impl Reparameterization for Tap {
    const NAME: &'static str = TAP_NAME;

    fn apply<const D: usize>(&self, base: Tensor<D>) -> Tensor<D> {
        if is_bypassed() || !base.is_autodiff() {
            return base;
        }
        Tensor::from_dispatch(Dispatch::grad_tap(base.into_dispatch(), self.handle.clone()))
    }
}

/// A tap owns no parameters: it moves, maps and saves as nothing.
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

    /// Yields the average of a parameter that this rank did not use in the last backward, under the parameter's id:
    /// Burn's `GradientsParams::from_grads` visits this after the parameter itself.
    fn visit<V: ModuleVisitor>(&self, visitor: &mut V) {
        // Loading a record gives parameters new ids.
        if let Some(id) = note_visit(&self.handle) {
            self.id.store(id, Ordering::Relaxed);
        }
        if is_bypassed() {
            return;
        }
        match self.handle.model.waiting.after(self.handle.slot, self.used.get()) {
            Some(number) => self.yielded.set(number),
            None => return,
        }
        with_rank!(self.rank, D => self.visit_waiting::<D>(visitor), else ());
    }

    /// An optimizer steps by mapping: it had what this copy yielded, unless the parameter has another id by now.
    fn map<M: ModuleMapper>(self, mapper: &mut M) -> Self {
        if is_bypassed() {
            return self;
        }
        self.handle.model.note_map();
        if self.yielded.get() > self.used.get() {
            self.used.set(self.yielded.get());
            let taken = with_rank!(self.rank, D => self.was_taken::<D>(mapper), else true);
            if !taken {
                self.handle.model.note_stale_id(self.handle.slot);
            }
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
