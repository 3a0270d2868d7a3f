//! Averages of parameters that this rank did not use: they wait for an optimizer under stand-in leaves.

use std::collections::{BTreeMap, VecDeque};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};

use burn::backend::Backend;
use burn::backend::TensorMetadata;
use burn::backend::autodiff::NodeId;
use burn::backend::tensor::FloatTensor;
use burn::tensor::Shape;

use super::depth_ladder::{AutodiffTensor, new_leaf};

/// Largest number of averages of a slot that wait for their optimizer; the oldest are forgotten.
const CAP: usize = 8;

/// Leaves under which averages are registered, one per slot, made when first needed and kept: gradients of several
/// backwards may wait side by side.
pub(super) struct StandInLeaves<B: Backend>(BTreeMap<usize, AutodiffTensor<B>>);

impl<B: Backend> StandInLeaves<B> {
    pub(super) fn new() -> Self {
        StandInLeaves(BTreeMap::new())
    }

    /// The leaf of a slot, if it has been needed.
    pub(super) fn get(&self, slot: usize) -> Option<AutodiffTensor<B>> {
        self.0.get(&slot).cloned()
    }

    /// The leaf of a slot whose average is `average`. It has no elements, so that it counts as nothing where parameters
    /// are counted.
    pub(super) fn leaf_of(&mut self, slot: usize, average: &FloatTensor<B>) -> NodeId {
        let empty = || B::float_zeros(Shape::from([0]), &average.device(), average.dtype().into());
        self.0.entry(slot).or_insert_with(|| new_leaf::<B>(empty())).id()
    }
}

/// Numbers of the averages that wait under stand-in leaves.
#[derive(Default)]
pub(super) struct WaitingAverages {
    /// Numbers of the reductions whose averages were registered there lately, by slot. Each copy of the model keeps the
    /// number of the last one that its optimizer used.
    numbers: Mutex<BTreeMap<usize, VecDeque<u64>>>,
    /// True if any average has ever waited.
    any: AtomicBool,
}

impl WaitingAverages {
    /// Notes that the averages of `slots` from reduction `number` wait from now on.
    pub(super) fn note(&self, slots: &[usize], number: u64) {
        if slots.is_empty() {
            return;
        }
        let mut all = self.numbers.lock().unwrap_or_else(PoisonError::into_inner);
        for slot in slots {
            let numbers = all.entry(*slot).or_default();
            numbers.push_back(number);
            if numbers.len() > CAP {
                numbers.pop_front();
            }
        }
        self.any.store(true, Ordering::Release);
    }

    /// Number of the slot's first waiting average later than number `used`.
    pub(super) fn after(&self, slot: usize, used: u64) -> Option<u64> {
        if !self.any.load(Ordering::Acquire) {
            return None;
        }
        let numbers = self.numbers.lock().unwrap_or_else(PoisonError::into_inner);
        numbers.get(&slot)?.iter().copied().find(|number| *number > used)
    }
}
