//! What sits on a parameter and sees its gradient. `README.md` beside this file tells how.

mod ops;
mod tapped;

use std::cell::{Cell, RefCell};
use std::sync::Arc;

use burn::backend::Dispatch;
use burn::module::{Module, ModuleMapper, ModuleVisitor, Param, ParamId, Reparameterization};
use burn::tensor::{Device, Tensor};

use crate::ddp::Ddp;
pub use ops::{DdpBackend, TapHandle};
pub(crate) use tapped::Tapped;

/// Name of the tap as a path component, where Burn shows reparameterizations.
pub(crate) const TAP_NAME: &str = "ddp";

/// The reparameterization that `wrap` attaches to each float parameter: an identity with ears.
#[derive(Clone, Debug)]
pub(crate) struct Tap {
    /// A rank that holds a wrapped model takes part in the job.
    _presence: Ddp,
    handle: TapHandle,
    id: ParamId,
    /// Number of dimensions of the parameter.
    rank: usize,
}

impl Tap {
    pub(crate) fn new(ddp: Ddp, tapped: Arc<Tapped>, slot: usize, id: ParamId, rank: usize) -> Self {
        Tap { _presence: ddp, handle: TapHandle { tapped, slot }, id, rank }
    }

    fn visit_pending<const D: usize>(&self, visitor: &mut impl ModuleVisitor) {
        let like = Tensor::<D>::zeros([1; D], &self.handle.tapped.device);
        let leaf = Tensor::<D>::from_dispatch(Dispatch::delivered(like.into_dispatch(), self.handle.clone()));
        visitor.visit_float(&Param::initialized(self.id, leaf));
    }
}

impl Reparameterization for Tap {
    const NAME: &'static str = TAP_NAME;

    fn apply<const D: usize>(&self, base: Tensor<D>) -> Tensor<D> {
        if BYPASS.get() || !base.is_autodiff() {
            return base;
        }
        self.handle.tapped.clear_pending();
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

    /// Yields the average of a parameter that this rank did not use in the last backward, under the parameter's id: Burn's
    /// `GradientsParams::from_grads` visits this after the parameter itself.
    fn visit<V: ModuleVisitor>(&self, visitor: &mut V) {
        FOUND.with_borrow_mut(|found| {
            if let Some(found) = found {
                found.push(self.handle.tapped.clone());
            }
        });
        if !self.handle.tapped.is_pending(self.handle.slot) {
            return;
        }
        match self.rank {
            1 => self.visit_pending::<1>(visitor),
            2 => self.visit_pending::<2>(visitor),
            3 => self.visit_pending::<3>(visitor),
            4 => self.visit_pending::<4>(visitor),
            5 => self.visit_pending::<5>(visitor),
            6 => self.visit_pending::<6>(visitor),
            7 => self.visit_pending::<7>(visitor),
            8 => self.visit_pending::<8>(visitor),
            // `wrap` refuses other ranks.
            _ => {}
        }
    }

    fn map<M: ModuleMapper>(self, _: &mut M) -> Self {
        self.handle.tapped.clear_pending();
        self
    }

    fn valid(&self) -> Self {
        self.clone()
    }

    fn train(self) -> Self {
        self
    }

    fn materialize(self) -> Self {
        self
    }
}

/// Most dimensions a parameter may have.
pub(crate) const MAX_RANK: usize = 8;

thread_local! {
    /// Taps seen by `visit` on this thread, while someone asks.
    static FOUND: RefCell<Option<Vec<Arc<Tapped>>>> = const { RefCell::new(None) };
    /// Reads pass taps unseen on this thread.
    static BYPASS: Cell<bool> = const { Cell::new(false) };
}

/// The wrapped models that `model` is made of: none, one, or several if wrapped parts were put together.
pub(crate) fn find<M: Module>(model: &M) -> Vec<Arc<Tapped>> {
    struct Nothing;
    impl ModuleVisitor for Nothing {}
    FOUND.set(Some(Vec::new()));
    model.visit(&mut Nothing);
    let mut unique: Vec<Arc<Tapped>> = Vec::new();
    for tapped in FOUND.take().unwrap_or_default() {
        if !unique.iter().any(|u| Arc::ptr_eq(u, &tapped)) {
            unique.push(tapped);
        }
    }
    unique
}

/// Runs `f` with parameters read as if they had no tap.
pub(crate) fn bypass<T>(f: impl FnOnce() -> T) -> T {
    struct Restore(bool);
    impl Drop for Restore {
        fn drop(&mut self) {
            BYPASS.set(self.0);
        }
    }
    let _restore = Restore(BYPASS.replace(true));
    f()
}
