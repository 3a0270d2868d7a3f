//! Reads of parameters that a program looks up in `Gradients`. Burn finds nothing for them, as they are no leaves; a
//! warning says so, once for each model.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use burn::backend::autodiff::NodeId;

use crate::gradients::Slot;

/// Watches for lookups of one wrapped model.
pub(super) struct Lookups {
    slots: Arc<[Slot]>,
    /// True from a delivery until something else than a read of a parameter has happened.
    watching: AtomicBool,
    reads: Mutex<ReadsAlone>,
    /// True if there is nothing to warn of any more.
    warned: AtomicBool,
}

/// Reads since a delivery, as long as no other node of a graph was made in this process: a tensor that was read has no
/// child then.
#[derive(Default)]
struct ReadsAlone {
    /// Slot of the first read.
    first: Option<usize>,
    /// Id of the node that was made last.
    last: u64,
}

impl Lookups {
    pub(super) fn new(slots: Arc<[Slot]>) -> Self {
        Lookups { slots, watching: AtomicBool::new(false), reads: Mutex::default(), warned: AtomicBool::new(false) }
    }

    /// Begins to watch, since averages were put on leaves.
    pub(super) fn delivered(&self) {
        if !self.warned.load(Ordering::Relaxed) {
            *self.lock() = ReadsAlone { first: None, last: NodeId::new().value };
            self.watching.store(true, Ordering::Release);
        }
    }

    /// Id that separates the nodes of a read from all nodes before, if reads are watched.
    pub(super) fn before_read(&self) -> Option<NodeId> {
        self.watching.load(Ordering::Acquire).then(NodeId::new)
    }

    /// Notes a read of a slot, whose last node is `after`.
    pub(super) fn read(&self, slot: usize, before: Option<NodeId>, after: NodeId) {
        let Some(before) = before else { return };
        let mut reads = self.lock();
        if before.value == reads.last + 1 {
            reads.first.get_or_insert(slot);
            reads.last = after.value;
        } else {
            // A forward may have begun.
            self.watching.store(false, Ordering::Release);
        }
    }

    /// Ends watching without a warning.
    pub(super) fn forget(&self) {
        self.watching.store(false, Ordering::Release);
    }

    /// Ends watching. Warns if parameters were read, and nothing was computed from them.
    pub(super) fn end(&self) {
        if !self.watching.load(Ordering::Acquire) || !self.watching.swap(false, Ordering::AcqRel) {
            return;
        }
        let reads = self.lock();
        if let Some(slot) = reads.first.filter(|_| NodeId::new().value == reads.last + 1) {
            self.warn(slot, "was read after the backward, and nothing was computed from it");
        }
    }

    /// Warns that the program still has the tensor of a read whose layers have run.
    pub(super) fn kept(&self, slot: usize) {
        self.warn(slot, "was read before the backward, and the tensor is still there after it");
    }

    fn warn(&self, slot: usize, what: &str) {
        if !self.warned.swap(true, Ordering::Relaxed) {
            tracing::warn!(
                target: "burn_ddp::gradients",
                parameter = self.slots[slot].path,
                "a parameter {what}; if it is for its gradient: `val().grad(&grads)` is `None` for wrapped models, \
                 look averages up with `ddp.grad(&param, &grads)` or `param.base().grad(&grads)`"
            );
        }
    }

    fn lock(&self) -> MutexGuard<'_, ReadsAlone> {
        self.reads.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(all(test, feature = "flex"))]
mod tests {
    use burn::module::{Module, ModuleMapper, Param};
    use burn::tensor::{Gradients, Tensor};

    use crate::Ddp;
    use crate::intercept::pair::Pair;
    use crate::telemetry::listener::Listener;

    /// Parameters that rank 0 is warned of while it trains; `look` runs between each backward and its step.
    fn warned(look: impl Fn(&Pair, &Gradients) + Sync) -> Vec<String> {
        warned_by(|model, grads| {
            look(&model, &grads);
            model.step(grads)
        })
    }

    /// Parameters that rank 0 is warned of while it trains by `step`.
    fn warned_by(step: impl Fn(Pair, Gradients) -> Pair + Sync) -> Vec<String> {
        let warned = Ddp::spawn(2, |ddp| {
            let listener = Listener::default();
            tracing::subscriber::with_default(listener.clone(), || {
                let mut model = ddp.wrap(Pair::ones())?;
                // Nodes that other threads make may hide a lookup.
                for _ in 0..20 {
                    let grads = (model.a.val() * model.b.val()).backward();
                    model = step(model, grads);
                }
                anyhow::Ok(())
            })?;
            let fields = listener.events("burn_ddp::gradients").into_iter().flatten();
            Ok(fields.filter(|(name, _)| name == "parameter").map(|(_, path)| path).collect())
        });
        warned.unwrap().remove(0)
    }

    #[test]
    fn lookups_after_the_backward_are_warned_of_once() {
        assert_eq!(warned(|model, grads| assert!(model.b.val().grad(grads).is_none())), ["\"b\""]);
    }

    /// Steps the parameters for which a gradient was found.
    struct Move(Vec<Option<Tensor<1>>>);

    impl ModuleMapper for Move {
        fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
            match self.0.pop().flatten() {
                Some(gradient) => param.map(|value| value - gradient.reshape([1; D])),
                None => param,
            }
        }
    }

    #[test]
    fn lookups_of_an_optimizer_by_hand_are_warned_of_once() {
        let step = |model: Pair, grads: Gradients| {
            let found = [&model.b, &model.a].map(|param| param.val().grad(&grads));
            let model = model.map(&mut Move(found.into()));
            // With this node, the end of the model warns of nothing.
            drop(model.a.base().powf_scalar(2.0));
            model
        };
        assert_eq!(warned_by(step), ["\"b\""]);
    }

    #[test]
    fn lookups_of_kept_tensors_are_warned_of_once() {
        let look = |model: &Pair, _: &Gradients| {
            let kept = model.b.val();
            let grads = kept.clone().powf_scalar(2.0).backward();
            assert!(kept.grad(&grads).is_none());
        };
        assert_eq!(warned(look), ["\"b\""]);
    }

    #[test]
    fn other_reads_are_not() {
        let nothing: [&str; 0] = [];
        assert_eq!(warned(|_, _| ()), nothing);
        assert_eq!(warned(|model, _| drop(model.b.val().powf_scalar(2.0).sum())), nothing);
        assert_eq!(warned(|model, grads| assert!(model.b.base().grad(grads).is_some())), nothing);
    }
}
