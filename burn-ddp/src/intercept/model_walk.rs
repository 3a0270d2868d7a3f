//! Visits of a model that see its parameters together with their taps.

use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::sync::Arc;

use burn::backend::Dispatch;
use burn::module::{Module, ModuleVisitor, Param};
use burn::tensor::{DType, Tensor};

use super::autodiff_nodes::DdpBackend;
use super::tap_bypass::bypass;
use super::wrapped_model::{TapHandle, WrappedModel};

/// Name of a tap as a path component, where Burn shows reparameterizations.
pub(crate) const TAP_NAME: &str = "ddp";

thread_local! {
    /// Models whose taps were visited on this thread, while [`find`] runs.
    static FOUND: RefCell<Option<Vec<Arc<WrappedModel>>>> = const { RefCell::new(None) };
    /// The tap visited last on this thread.
    static LAST_TAP: RefCell<Option<TapHandle>> = const { RefCell::new(None) };
    /// Id of the parameter that [`find`] visited last on this thread.
    static BASE_ID: Cell<Option<u64>> = const { Cell::new(None) };
}

/// Notes that a visit has come to a tap. Returns the id of the tap's parameter inside [`find`].
pub(super) fn note_visit(tap: &TapHandle) -> Option<u64> {
    LAST_TAP.with_borrow_mut(|last| *last = Some(tap.clone()));
    FOUND.with_borrow_mut(|found| found.as_mut().map(|found| found.push(tap.model.clone())))?;
    BASE_ID.get()
}

/// The wrapped models in `model`: none, one, or several if the model was put together from wrapped parts.
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
    for wrapped in FOUND.take().unwrap_or_default() {
        if !unique.iter().any(|u| Arc::ptr_eq(u, &wrapped)) {
            unique.push(wrapped);
        }
    }
    unique
}

/// Visitor of float parameters and their taps.
pub(super) trait AtTap {
    /// Value that is kept from a parameter until its tap is visited.
    type Seen;

    /// Visits a parameter, before its tap.
    fn parameter<const D: usize>(&mut self, param: &Param<Tensor<D>>) -> Option<Self::Seen>;

    /// Leaves the parameter at `path`, with its tap if it has one.
    fn leave(&mut self, path: &str, seen: Self::Seen, tap: Option<TapHandle>);
}

/// Visits the parameters of `model` as if they had no tap, and gives `visitor` the tap of each.
pub(super) fn walk<M: Module, V: AtTap>(model: &M, visitor: &mut V) {
    struct Walk<'a, V: AtTap> {
        visitor: &'a mut V,
        path: Vec<String>,
        /// The parameter visited last, and its path.
        last: Option<(String, V::Seen)>,
    }
    impl<V: AtTap> ModuleVisitor for Walk<'_, V> {
        fn enter_module(&mut self, name: &str, _: &str) {
            self.path.push(name.to_string());
        }

        fn exit_module(&mut self, name: &str, _: &str) {
            self.path.pop();
            let Some((path, seen)) = self.last.take() else { return };
            let tap = (name == TAP_NAME).then(|| LAST_TAP.take()).flatten();
            self.visitor.leave(&path, seen, tap);
        }

        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
            self.last = self.visitor.parameter(param).map(|seen| (self.path.join("."), seen));
        }
    }
    bypass(|| model.visit(&mut Walk { visitor, path: Vec::new(), last: None }));
}

/// The taps of `model` by the paths of their parameters.
pub(crate) fn taps<M: Module>(model: &M) -> HashMap<String, TapHandle> {
    struct Taps(HashMap<String, TapHandle>);
    impl AtTap for Taps {
        type Seen = ();

        fn parameter<const D: usize>(&mut self, _: &Param<Tensor<D>>) -> Option<()> {
            Some(())
        }

        fn leave(&mut self, path: &str, (): (), tap: Option<TapHandle>) {
            self.0.extend(tap.map(|tap| (path.to_owned(), tap)));
        }
    }
    let mut taps = Taps(HashMap::new());
    walk(model, &mut taps);
    taps.0
}

/// Notes the values of all parameters of `model` in `wrapped`, also of those that the forward did not read.
pub(super) fn note_values<M: Module>(model: &M, wrapped: &Arc<WrappedModel>) {
    struct Note<'a>(&'a Arc<WrappedModel>);
    impl AtTap for Note<'_> {
        type Seen = Box<dyn FnOnce(TapHandle)>;

        fn parameter<const D: usize>(&mut self, param: &Param<Tensor<D>>) -> Option<Self::Seen> {
            let base = param.base();
            Some(Box::new(move |tap| drop(Dispatch::note_value(base.into_dispatch(), tap))))
        }

        fn leave(&mut self, _: &str, note: Self::Seen, tap: Option<TapHandle>) {
            if let Some(tap) = tap.filter(|tap| Arc::ptr_eq(&tap.model, self.0)) {
                note(tap);
            }
        }
    }
    walk(model, &mut Note(wrapped));
}

/// The sum of all trainable parameters of `model`, read through the taps of `wrapped`; `None` if there are none. Its
/// backward reaches all of them.
pub(crate) fn read_all<M: Module>(model: &M, wrapped: &Arc<WrappedModel>) -> Option<Tensor<1>> {
    struct Sum<'a> {
        wrapped: &'a Arc<WrappedModel>,
        sum: Option<Tensor<1>>,
    }
    impl AtTap for Sum<'_> {
        type Seen = Box<dyn FnOnce(TapHandle) -> Tensor<1>>;

        fn parameter<const D: usize>(&mut self, param: &Param<Tensor<D>>) -> Option<Self::Seen> {
            let base = param.base();
            if !base.is_require_grad() {
                return None;
            }
            Some(Box::new(|tap| {
                let value = Tensor::<D>::from_dispatch(Dispatch::grad_tap(base.into_dispatch(), tap));
                value.sum().cast(DType::F32)
            }))
        }

        fn leave(&mut self, _: &str, read: Self::Seen, tap: Option<TapHandle>) {
            let Some(tap) = tap.filter(|tap| Arc::ptr_eq(&tap.model, self.wrapped)) else { return };
            let value = read(tap);
            self.sum = Some(match self.sum.take() {
                Some(sum) => sum + value,
                None => value,
            });
        }
    }
    let mut sum = Sum { wrapped, sum: None };
    walk(model, &mut sum);
    sum.sum
}
