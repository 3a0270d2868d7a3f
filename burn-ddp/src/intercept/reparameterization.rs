//! The reparameterization that `wrap` attaches to each float parameter.

use std::cell::{Cell, RefCell};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use burn::backend::Dispatch;
use burn::module::{Module, ModuleMapper, ModuleVisitor, Param, ParamId, Reparameterization};
use burn::tensor::{Device, Gradients, Tensor};

use super::bypass::{bypass, is_bypassed};
use super::nodes::{DdpBackend, TapHandle};
use super::wrapped_model::{WrappedModel, lost_tap, past_tap};
use crate::ddp::Ddp;
use crate::{Error, Result};

/// Name of the tap as a path component, where Burn shows reparameterizations.
pub(crate) const TAP_NAME: &str = "ddp";

/// Runs an expression with the number of dimensions as a constant; the other one beyond [`MAX_RANK`], which `wrap` refuses.
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

/// The reparameterization that `wrap` attaches to each float parameter: an identity with ears.
#[derive(Clone, Debug)]
pub(crate) struct Tap {
    /// A rank that holds a wrapped model takes part in the job.
    _presence: Ddp,
    handle: TapHandle,
    _live: Live,
    /// The parameter's id, as it was seen last. Shared by clones of the model.
    id: Arc<AtomicU64>,
    /// Number of dimensions of the parameter.
    rank: usize,
    /// The waiting average that this copy of the model yielded to a visitor last, by its number.
    yielded: Number,
    /// The last one that was in the hands of whoever mapped this copy, and so is used up: an optimizer steps by mapping.
    used: Number,
}

/// Counts the taps of a slot that there are.
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
        tapped: Arc<WrappedModel>,
        slot: usize,
        param: &Param<Tensor<D>>,
    ) -> Self {
        let handle = TapHandle { model: tapped, slot };
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

    /// Whether the optimizer that is mapping has used the average that was yielded: then it treats the parameter's id like any other,
    /// since nothing more waits under it.
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

    /// Yields the average of a parameter that this rank did not use in the last backward, under the parameter's id: Burn's
    /// `GradientsParams::from_grads` visits this after the parameter itself.
    fn visit<V: ModuleVisitor>(&self, visitor: &mut V) {
        SEEN.with_borrow_mut(|seen| *seen = Some(self.handle.clone()));
        FOUND.with_borrow_mut(|found| {
            if let Some(found) = found {
                found.push(self.handle.model.clone());
                // Loading a record gives parameters new ids.
                if let Some(id) = BASE_ID.get() {
                    self.id.store(id, Ordering::Relaxed);
                }
            }
        });
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

/// Most dimensions a parameter may have.
pub(crate) const MAX_RANK: usize = 8;

thread_local! {
    /// Taps seen by `visit` on this thread, while someone asks.
    static FOUND: RefCell<Option<Vec<Arc<WrappedModel>>>> = const { RefCell::new(None) };
    /// The tap that `visit` came to last on this thread.
    static SEEN: RefCell<Option<TapHandle>> = const { RefCell::new(None) };
    /// Id of the parameter that `find` visited last on this thread.
    static BASE_ID: Cell<Option<u64>> = const { Cell::new(None) };
}

/// The wrapped models that `model` is made of: none, one, or several if wrapped parts were put together.
pub(crate) fn find<M: Module>(model: &M) -> Vec<Arc<WrappedModel>> {
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
    let mut unique: Vec<Arc<WrappedModel>> = Vec::new();
    for tapped in FOUND.take().unwrap_or_default() {
        if !unique.iter().any(|u| Arc::ptr_eq(u, &tapped)) {
            unique.push(tapped);
        }
    }
    unique
}

/// What is wrong with the first parameter of `model` whose gradient is not what its tap put there, after a backward of `tapped`
/// that noted what it delivered.
pub(crate) fn bypassed<M: Module>(
    model: &M,
    tapped: &Arc<WrappedModel>,
    gradients: &Gradients,
) -> Result<Option<String>> {
    struct Look<'a> {
        tapped: &'a Arc<WrappedModel>,
        gradients: &'a Gradients,
        path: Vec<String>,
        /// Path and gradient of the parameter visited last.
        last: Option<(String, Option<i64>)>,
        found: Result<Option<String>>,
    }
    impl ModuleVisitor for Look<'_> {
        fn enter_module(&mut self, name: &str, _: &str) {
            self.path.push(name.to_string());
        }

        fn exit_module(&mut self, name: &str, _: &str) {
            self.path.pop();
            let (Some((path, on_leaf)), Ok(None)) = (self.last.take(), &self.found) else { return };
            let tap = (name == TAP_NAME).then(|| SEEN.take()).flatten();
            match tap.filter(|tap| Arc::ptr_eq(&tap.model, self.tapped)) {
                Some(tap) if !self.tapped.was_delivered(tap.slot, on_leaf) => self.found = Ok(Some(past_tap(&path))),
                None if on_leaf.is_some() => self.found = Ok(Some(lost_tap(&path))),
                _ => {}
            }
        }

        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
            let base = param.base();
            let gradient = if base.is_require_grad() { base.grad(self.gradients) } else { None };
            let on_leaf = match gradient {
                None => Ok(None),
                Some(_) if !self.tapped.notes_values() => Ok(Some(UNREAD)),
                Some(gradient) => gradient
                    .try_into_data()
                    .map(|data| Some(crate::model::digest::digest(data.as_bytes())))
                    .map_err(|e| Error::invalid(format!("reading a gradient failed: {e:?}"))),
            };
            match on_leaf {
                Ok(on_leaf) => self.last = Some((self.path.join("."), on_leaf)),
                Err(e) => self.found = Err(e),
            }
        }
    }
    let mut look = Look { tapped, gradients, path: Vec::new(), last: None, found: Ok(None) };
    bypass(|| model.visit(&mut look));
    look.found
}

/// The digest of a gradient that nobody computed.
pub(crate) const UNREAD: i64 = 0;

/// Shows `tapped` the values of all parameters of `model`, also of those that the forward did not read.
pub(crate) fn note_values<M: Module>(model: &M, tapped: &Arc<WrappedModel>) {
    type Note = Box<dyn FnOnce(TapHandle)>;
    struct Show<'a> {
        tapped: &'a Arc<WrappedModel>,
        last: Option<Note>,
    }
    impl ModuleVisitor for Show<'_> {
        fn exit_module(&mut self, name: &str, _: &str) {
            let note = self.last.take();
            let tap = (name == TAP_NAME).then(|| SEEN.take()).flatten();
            if let (Some(note), Some(tap)) = (note, tap.filter(|tap| Arc::ptr_eq(&tap.model, self.tapped))) {
                note(tap);
            }
        }

        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
            let base = param.base();
            self.last = Some(Box::new(move |tap| drop(Dispatch::note_leaf(base.into_dispatch(), tap))));
        }
    }
    bypass(|| model.visit(&mut Show { tapped, last: None }));
}
