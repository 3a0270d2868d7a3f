//! What sits on a parameter and sees its gradient. `README.md` beside this file tells how.

mod ops;
mod tapped;

use std::cell::{Cell, RefCell};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

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
    /// The parameter's id, as it was seen last. Shared by clones of the model.
    id: Arc<AtomicU64>,
    /// Number of dimensions of the parameter.
    rank: usize,
}

impl Tap {
    pub(crate) fn new(ddp: Ddp, tapped: Arc<Tapped>, slot: usize, id: ParamId, rank: usize) -> Self {
        Tap { _presence: ddp, handle: TapHandle { tapped, slot }, id: Arc::new(AtomicU64::new(id.val())), rank }
    }

    fn visit_pending<const D: usize>(&self, visitor: &mut impl ModuleVisitor) {
        let like = Tensor::<D>::zeros([1; D], &self.handle.tapped.device);
        let leaf = Tensor::<D>::from_dispatch(Dispatch::delivered(like.into_dispatch(), self.handle.clone()));
        visitor.visit_float(&Param::initialized(ParamId::from(self.id.load(Ordering::Relaxed)), leaf));
    }
}

impl Reparameterization for Tap {
    const NAME: &'static str = TAP_NAME;

    fn apply<const D: usize>(&self, base: Tensor<D>) -> Tensor<D> {
        if BYPASS.get() || !base.is_autodiff() {
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

    /// Yields the average of a parameter that this rank did not use in the last backward, under the parameter's id: Burn's
    /// `GradientsParams::from_grads` visits this after the parameter itself.
    fn visit<V: ModuleVisitor>(&self, visitor: &mut V) {
        FOUND.with_borrow_mut(|found| {
            if let Some(found) = found {
                found.push(self.handle.tapped.clone());
                // Loading a record gives parameters new ids.
                if let Some(id) = BASE_ID.get() {
                    self.id.store(id, Ordering::Relaxed);
                }
            }
        });
        if BYPASS.get() || !self.handle.tapped.yield_pending(self.handle.slot) {
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
        self.handle.tapped.clear_pending(self.handle.slot);
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
    /// Id of the parameter that `find` visited last on this thread.
    static BASE_ID: Cell<Option<u64>> = const { Cell::new(None) };
    /// Reads and visits pass taps unseen on this thread.
    static BYPASS: Cell<bool> = const { Cell::new(false) };
}

/// The wrapped models that `model` is made of: none, one, or several if wrapped parts were put together.
pub(crate) fn find<M: Module>(model: &M) -> Vec<Arc<Tapped>> {
    struct Ids;
    impl ModuleVisitor for Ids {
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
            BASE_ID.set(Some(param.id.val()));
        }
    }
    struct Forget;
    impl Drop for Forget {
        fn drop(&mut self) {
            FOUND.set(None);
            BASE_ID.set(None);
        }
    }
    let _forget = Forget;
    FOUND.set(Some(Vec::new()));
    bypass(|| model.visit(&mut Ids));
    let mut unique: Vec<Arc<Tapped>> = Vec::new();
    for tapped in FOUND.take().unwrap_or_default() {
        if !unique.iter().any(|u| Arc::ptr_eq(u, &tapped)) {
            unique.push(tapped);
        }
    }
    unique
}

/// Runs `f` with parameters read and visited as if they had no tap.
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
