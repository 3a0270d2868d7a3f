//! Visits of a model that see its parameters together with their taps.

use std::cell::RefCell;
use std::collections::HashMap;
use std::sync::Arc;

use burn::backend::Dispatch;
use burn::module::{Module, ModuleVisitor, Param};
use burn::tensor::Tensor;

use super::autodiff_nodes::DdpBackend;
use super::tap_bypass::bypass;
use super::tap_handle::TapHandle;
use super::wrapped_model::WrappedModel;

/// Name of a tap as a path component, where Burn shows reparameterizations.
pub(crate) const TAP_NAME: &str = "ddp";

thread_local! {
    /// The tap that was visited last on this thread.
    static VISITED: RefCell<Option<TapHandle>> = const { RefCell::new(None) };
}

/// Notes that a visit in a walk has come to a tap.
pub(super) fn note_visit(tap: TapHandle) {
    VISITED.replace(Some(tap));
}

/// Visitor of float parameters and their taps.
pub(super) trait AtTap {
    /// Value that is kept from a parameter until its tap is visited.
    type Seen;

    /// Visits a parameter, before its tap.
    fn parameter<const D: usize>(&mut self, param: &Param<Tensor<D>>) -> Option<Self::Seen>;

    /// Leaves a parameter, with its tap if it has one.
    fn leave(&mut self, path: &Path, seen: Self::Seen, tap: Option<TapHandle>);
}

/// Names of the modules on the way to a parameter. A walk keeps the memory of their names.
#[derive(Default)]
pub(super) struct Path {
    names: Vec<String>,
    len: usize,
}

impl Path {
    fn enter(&mut self, name: &str) {
        match self.names.get_mut(self.len) {
            Some(kept) => {
                kept.clear();
                kept.push_str(name);
            }
            None => self.names.push(name.to_owned()),
        }
        self.len += 1;
    }
}

impl std::fmt::Display for Path {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.names[..self.len].join("."))
    }
}

/// Visits the parameters of `model` as if they had no tap, and gives `visitor` the tap of each.
pub(super) fn walk<M: Module, V: AtTap>(model: &M, visitor: &mut V) {
    struct Walk<'a, V: AtTap> {
        visitor: &'a mut V,
        path: Path,
        /// Value of the parameter visited last.
        last: Option<V::Seen>,
    }
    impl<V: AtTap> ModuleVisitor for Walk<'_, V> {
        fn enter_module(&mut self, name: &str, _: &str) {
            self.path.enter(name);
        }

        fn exit_module(&mut self, name: &str, _: &str) {
            let is_tap = name == TAP_NAME;
            let tap = if is_tap { VISITED.take() } else { None };
            if let Some(seen) = self.last.take() {
                self.path.len -= usize::from(is_tap);
                self.visitor.leave(&self.path, seen, tap);
                self.path.len += usize::from(is_tap);
            }
            self.path.len -= 1;
        }

        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
            self.last = self.visitor.parameter(param);
        }
    }
    VISITED.take();
    let mut walk = Walk { visitor, path: Path::default(), last: None };
    bypass(|| model.visit(&mut walk));
    // A model that is a bare parameter has no module around it.
    if let Some(seen) = walk.last.take() {
        walk.visitor.leave(&walk.path, seen, VISITED.take());
    }
}

/// The wrapped models in `model`: none, one, or several if the model was put together from wrapped parts.
pub(crate) fn find<M: Module>(model: &M) -> Vec<Arc<WrappedModel>> {
    struct Find(Vec<Arc<WrappedModel>>);
    impl AtTap for Find {
        type Seen = ();

        fn parameter<const D: usize>(&mut self, _: &Param<Tensor<D>>) -> Option<()> {
            Some(())
        }

        fn leave(&mut self, _: &Path, (): (), tap: Option<TapHandle>) {
            if let Some(tap) = tap
                && !self.0.iter().rev().any(|known| Arc::ptr_eq(known, &tap.model))
            {
                self.0.push(tap.model);
            }
        }
    }
    let mut find = Find(Vec::new());
    walk(model, &mut find);
    find.0
}

/// The taps of `model` by the paths of their parameters.
pub(crate) fn taps<M: Module>(model: &M) -> HashMap<String, TapHandle> {
    struct Taps(HashMap<String, TapHandle>);
    impl AtTap for Taps {
        type Seen = ();

        fn parameter<const D: usize>(&mut self, _: &Param<Tensor<D>>) -> Option<()> {
            Some(())
        }

        fn leave(&mut self, path: &Path, (): (), tap: Option<TapHandle>) {
            self.0.extend(tap.map(|tap| (path.to_string(), tap)));
        }
    }
    let mut taps = Taps(HashMap::new());
    walk(model, &mut taps);
    taps.0
}

/// The tap of a sharded parameter, for a read of what the optimizer steps.
pub(crate) fn read_of_master<const D: usize>(param: &Param<Tensor<D>>) -> Option<TapHandle> {
    let tap = taps(param).into_values().next().filter(|tap| tap.model.is_sharded(tap.slot))?;
    Some(TapHandle { reads_master: true, ..tap })
}

/// Notes the values of all parameters of `model` in their wrapped models, also of those that the forward did not read.
pub(super) fn note_values<M: Module>(model: &M) {
    struct Note;
    impl AtTap for Note {
        type Seen = Box<dyn FnOnce(TapHandle)>;

        fn parameter<const D: usize>(&mut self, param: &Param<Tensor<D>>) -> Option<Self::Seen> {
            let base = param.base();
            Some(Box::new(move |tap| drop(Dispatch::note_value(base.into_dispatch(), tap))))
        }

        fn leave(&mut self, _: &Path, note: Self::Seen, tap: Option<TapHandle>) {
            if let Some(tap) = tap {
                note(tap);
            }
        }
    }
    walk(model, &mut Note);
}
