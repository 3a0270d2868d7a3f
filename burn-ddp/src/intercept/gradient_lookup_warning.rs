//! Warns, once for each model, of a program that looks up `param.val()` in `Gradients`. Burn finds nothing for it, as
//! the value of a parameter with a tap is no leaf, so an optimizer written by hand changes nothing.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use burn::backend::autodiff::NodeId;

use crate::gradients::Slot;

/// Watches for lookups of one wrapped model.
pub(super) struct Lookups {
    slots: Arc<[Slot]>,
    /// True from a delivery until something else than a read of a parameter has happened.
    watching: AtomicBool,
    /// True if there is a suspect.
    suspecting: AtomicBool,
    seen: Mutex<Seen>,
    /// True if there is nothing to warn of any more.
    warned: AtomicBool,
}

#[derive(Default)]
struct Seen {
    /// The first read since the delivery, as long as only reads have made nodes of graphs in this process since then:
    /// nothing was computed from the read.
    alone: Option<Read>,
    /// Id of the node that was made last.
    last_node: u64,
    /// Read that may be for a lookup.
    suspect: Option<Suspect>,
}

/// A read of a slot, and the leaf that held its parameter then.
#[derive(Clone, Copy, PartialEq)]
struct Read {
    slot: usize,
    leaf: NodeId,
}

struct Suspect {
    read: Read,
    /// Sign of the lookup, for the warning.
    sign: &'static str,
    /// True if the parameter was mapped since, as an optimizer by hand does, and the model was not visited.
    mapped: bool,
}

impl Lookups {
    pub(super) fn new(slots: Arc<[Slot]>) -> Self {
        Lookups {
            slots,
            watching: AtomicBool::new(false),
            suspecting: AtomicBool::new(false),
            seen: Mutex::default(),
            warned: AtomicBool::new(false),
        }
    }

    /// Begins to watch, since averages were put on leaves.
    pub(super) fn delivered(&self) {
        if !self.warned.load(Ordering::Relaxed) {
            let mut seen = self.lock();
            seen.alone = None;
            seen.last_node = NodeId::new().value;
            self.watching.store(true, Ordering::Release);
        }
    }

    /// Id that separates the nodes of a read from all nodes before, if reads are watched.
    pub(super) fn before_read(&self) -> Option<NodeId> {
        self.watching.load(Ordering::Acquire).then(NodeId::new)
    }

    /// Notes a read of a slot whose parameter is `leaf`; its last node is `after`.
    pub(super) fn read(&self, slot: usize, leaf: NodeId, before: Option<NodeId>, after: NodeId) {
        let Some(before) = before else { return };
        let mut seen = self.lock();
        if before.value == seen.last_node + 1 {
            seen.alone.get_or_insert(Read { slot, leaf });
            seen.last_node = after.value;
        } else {
            // A forward may have begun.
            self.watching.store(false, Ordering::Release);
        }
    }

    /// Notes that the program still has the tensor of a read whose layers have run.
    pub(super) fn kept(&self, slot: usize, leaf: NodeId) {
        let sign = "was read before the backward, and the tensor was still there after it";
        self.suspect(&mut self.lock(), Read { slot, leaf }, sign);
    }

    /// Notes that a backward begins.
    pub(super) fn forget_reads(&self) {
        self.watching.store(false, Ordering::Release);
    }

    /// Notes that the model is visited: `GradientsParams::from_grads` finds averages.
    pub(super) fn visited(&self) {
        self.forget_reads();
        if self.suspecting.load(Ordering::Acquire) {
            self.acquit(&mut self.lock());
        }
    }

    /// Notes that the parameter of a slot is mapped.
    pub(super) fn mapped(&self, slot: usize) {
        if self.watching.load(Ordering::Acquire) && self.watching.swap(false, Ordering::AcqRel) {
            let mut seen = self.lock();
            if let Some(read) = seen.alone.filter(|_| NodeId::new().value == seen.last_node + 1) {
                self.suspect(&mut seen, read, "was read after the backward, and nothing was computed from it");
            }
        }
        if self.suspecting.load(Ordering::Acquire)
            && let Some(suspect) = self.lock().suspect.as_mut().filter(|suspect| suspect.read.slot == slot)
        {
            suspect.mapped = true;
        }
    }

    /// Judges the suspect when a gradient comes for a read of its slot; the parameter was on `leaf` in that read. Warns
    /// if the map has left it on the same leaf, so unchanged: programs that only log a value change it in their step.
    pub(super) fn trained(&self, slot: usize, leaf: NodeId) {
        if !self.suspecting.load(Ordering::Acquire) {
            return;
        }
        let mut seen = self.lock();
        let Some(suspect) = seen.suspect.as_ref().filter(|of| of.mapped && of.read.slot == slot) else { return };
        if suspect.read.leaf == leaf && !self.warned.swap(true, Ordering::Relaxed) {
            tracing::warn!(
                target: "burn_ddp::gradients",
                parameter = self.slots[slot].path,
                "a parameter {}, and the step did not change it. If it was read to find its gradient: \
                `val().grad(&grads)` is `None` for wrapped models; use `ddp.grad(&param, &grads)` or \
                `param.base().grad(&grads)`",
                suspect.sign
            );
        }
        self.acquit(&mut seen);
    }

    fn suspect(&self, seen: &mut Seen, read: Read, sign: &'static str) {
        if seen.suspect.is_none() && !self.warned.load(Ordering::Relaxed) {
            seen.suspect = Some(Suspect { read, sign, mapped: false });
            self.suspecting.store(true, Ordering::Release);
        }
    }

    fn acquit(&self, seen: &mut Seen) {
        seen.suspect = None;
        self.suspecting.store(false, Ordering::Release);
    }

    fn lock(&self) -> MutexGuard<'_, Seen> {
        self.seen.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(all(test, feature = "flex"))]
mod tests {
    use std::time::{Duration, Instant};

    use burn::data::dataloader::batcher::Batcher;
    use burn::data::dataset::InMemDataset;
    use burn::module::{Module, ModuleMapper, Param};
    use burn::tensor::{Device, Gradients, Tensor};

    use crate::Ddp;
    use crate::intercept::warning_test_model::Pair;
    use crate::telemetry::test_event_capture::Listener;

    /// Makes nodes in graphs, on a thread of the loader.
    struct Numbers;

    impl Batcher<f32, Tensor<1>> for Numbers {
        fn batch(&self, items: Vec<f32>, device: &Device) -> Tensor<1> {
            Tensor::from_floats(items.as_slice(), device)
        }
    }

    /// Parameters that rank 0 is warned of while it trains by `step`, on data that are read ahead.
    fn warned(step: impl Fn(Pair, Gradients) -> Pair + Sync) -> Vec<String> {
        let warned = Ddp::spawn(2, |ddp| {
            let listener = Listener::default();
            tracing::subscriber::with_default(listener.clone(), || {
                let mut model = ddp.wrap(Pair::ones())?;
                // Nodes that other threads make may hide a lookup.
                for batch in ddp.loader(Numbers).build(InMemDataset::new(vec![1.0; 40]))?.iter() {
                    assert_eq!(batch?.dims(), [1]);
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

    /// `warned(step)`, again until there is a warning: nodes that the tests beside this one make hide lookups as well.
    fn warned_in_the_end(step: impl Fn(Pair, Gradients) -> Pair + Sync) -> Vec<String> {
        let begin = Instant::now();
        loop {
            let paths = warned(&step);
            if !paths.is_empty() || begin.elapsed() > Duration::from_secs(60) {
                return paths;
            }
        }
    }

    /// Steps the parameters for which a gradient was found.
    struct Move(Vec<Option<Tensor<1>>>);

    impl ModuleMapper for Move {
        fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
            match self.0.pop().flatten() {
                Some(gradient) => {
                    param.map(|value| Tensor::from_inner(value.inner() - gradient.reshape([1; D])).require_grad())
                }
                None => param,
            }
        }
    }

    #[test]
    fn lookups_of_an_optimizer_by_hand_are_warned_of_once() {
        let step = |model: Pair, grads: Gradients| {
            let found = [&model.b, &model.a].map(|param| param.val().grad(&grads));
            model.map(&mut Move(found.into()))
        };
        assert_eq!(warned_in_the_end(step), ["\"b\""]);
    }

    #[test]
    fn lookups_of_kept_tensors_are_warned_of_once() {
        let step = |model: Pair, _| {
            let kept = model.b.val();
            let grads = kept.clone().powf_scalar(2.0).backward();
            let found = kept.grad(&grads);
            model.map(&mut Move(vec![found, None]))
        };
        assert_eq!(warned_in_the_end(step), ["\"b\""]);
    }

    #[test]
    fn reads_that_log_values_are_not() {
        let nothing: [&str; 0] = [];
        assert_eq!(warned(Pair::step), nothing);
        let logs = |model: Pair, grads| {
            assert_eq!(model.b.val().into_data().num_elements(), 1);
            model.step(grads)
        };
        assert_eq!(warned(logs), nothing);
        let keeps = |model: Pair, _| {
            let kept = model.b.val();
            let grads = kept.clone().powf_scalar(2.0).backward();
            assert_eq!(kept.into_data().num_elements(), 1);
            model.step(grads)
        };
        assert_eq!(warned(keeps), nothing);
        let logs_by_hand = |model: Pair, grads: Gradients| {
            assert_eq!(model.b.val().into_data().num_elements(), 1);
            let found = [&model.b, &model.a].map(|param| param.base().grad(&grads));
            model.map(&mut Move(found.into()))
        };
        assert_eq!(warned(logs_by_hand), nothing);
    }
}
