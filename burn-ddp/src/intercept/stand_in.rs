//! Averages of parameters that this rank did not use: where they wait for an optimizer.

use std::any::Any;
use std::collections::{BTreeMap, VecDeque};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use burn::backend::Backend;
use burn::backend::autodiff::NodeId;

use super::nodes::AutodiffTensor;

/// Averages of one slot that may wait for their optimizer at a time.
const CAP: usize = 8;

type StandIns = BTreeMap<usize, Box<dyn Any + Send>>;

/// The averages that the last gates had no leaf for.
#[derive(Default)]
pub(super) struct Waiting {
    /// Leaves under which they are registered, one per slot, made when first needed and kept: gradients of several backwards may wait
    /// side by side.
    stand_ins: Mutex<StandIns>,
    /// The numbers (counting reductions) of the averages put there lately, by slot. Each copy of the model counts for itself which of
    /// them an optimizer took.
    numbers: Mutex<BTreeMap<usize, VecDeque<u64>>>,
    /// There are numbers.
    any: AtomicBool,
}

impl Waiting {
    /// The stand-in leaf of a slot, if it was needed yet.
    pub(super) fn stand_in<B: Backend>(&self, slot: usize) -> Option<AutodiffTensor<B>> {
        self.stand_ins().get(&slot)?.downcast_ref::<AutodiffTensor<B>>().cloned()
    }

    /// The stand-in leaf of a slot, made by `make` when it is first needed. `None` if it belongs to another backend.
    pub(super) fn place<B: Backend>(&self, slot: usize, make: impl FnOnce() -> AutodiffTensor<B>) -> Option<NodeId> {
        let mut stand_ins = self.stand_ins();
        let stand_in = stand_ins.entry(slot).or_insert_with(|| Box::new(make()));
        stand_in.downcast_ref::<AutodiffTensor<B>>().map(AutodiffTensor::<B>::id)
    }

    /// The averages number `number` of `slots` wait from now on.
    pub(super) fn note(&self, slots: &[usize], number: u64) {
        if slots.is_empty() {
            return;
        }
        let mut all = self.numbers();
        for slot in slots {
            let numbers = all.entry(*slot).or_default();
            numbers.push_back(number);
            if numbers.len() > CAP {
                numbers.pop_front();
            }
        }
        self.any.store(true, Ordering::Release);
    }

    /// The first of the slot's averages that wait whose number is above `used`.
    pub(super) fn after(&self, slot: usize, used: u64) -> Option<u64> {
        if !self.any.load(Ordering::Acquire) {
            return None;
        }
        self.numbers().get(&slot)?.iter().copied().find(|number| *number > used)
    }

    fn stand_ins(&self) -> MutexGuard<'_, StandIns> {
        self.stand_ins.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn numbers(&self) -> MutexGuard<'_, BTreeMap<usize, VecDeque<u64>>> {
        self.numbers.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
