//! Averages of parameters that this rank did not use: each waits on a stand-in leaf in the `Gradients` of its backward,
//! and no longer than they are there.

use std::collections::BTreeMap;

use burn::backend::autodiff::NodeId;
use burn::backend::autodiff::grads::Gradients;
use burn::backend::tensor::FloatTensor;
use burn::backend::{Backend, TensorMetadata};
use burn::tensor::{DType, Shape};

use super::depth_ladder::{AutodiffTensor, new_leaf, scalar};
use crate::gradients::GradientMemory;

/// Stand-in leaves of a model, and the averages that wait on them.
pub(super) struct StandIns<B: Backend> {
    /// Leaves by key, made when first needed and kept: gradients of several backwards may wait side by side.
    leaves: BTreeMap<usize, AutodiffTensor<B>>,
    /// A tensor in each `Gradients` with waiting averages, under one leaf of its own: as long as they share it, they
    /// are there.
    markers: Vec<(u64, FloatTensor<B>)>,
    marker_leaf: Option<AutodiffTensor<B>>,
    waiting: WaitingAverages,
}

impl<B: GradientMemory> StandIns<B> {
    pub(super) fn new() -> Self {
        StandIns {
            leaves: BTreeMap::new(),
            markers: Vec::new(),
            marker_leaf: None,
            waiting: WaitingAverages::default(),
        }
    }

    /// The leaf with a key, if it has been needed.
    pub(super) fn leaf(&self, key: usize) -> Option<AutodiffTensor<B>> {
        self.leaves.get(&key).cloned()
    }

    /// The leaf with a key: that of a slot, or of clones, whose average is `average`. It has no elements, so that it counts as nothing where parameters
    /// are counted.
    pub(super) fn leaf_of(&mut self, key: usize, average: &FloatTensor<B>) -> NodeId {
        let empty = || B::float_zeros(Shape::from([0]), &average.device(), average.dtype().into());
        self.leaves.entry(key).or_insert_with(|| new_leaf::<B>(empty())).id()
    }

    /// Notes that the averages of `slots` from reduction `number` wait in `grads`.
    pub(super) fn wait(&mut self, number: u64, slots: Vec<usize>, device: &B::Device, grads: &mut Gradients) {
        let marker = scalar::<B>(device, DType::F32);
        let leaf = self.marker_leaf.get_or_insert_with(|| new_leaf::<B>(scalar::<B>(device, DType::F32))).id();
        grads.register::<B>(leaf, marker.clone());
        self.markers.push((number, marker));
        self.waiting.add(number, slots);
    }

    /// The waiting averages, as of now.
    pub(super) fn waiting(&mut self) -> &mut WaitingAverages {
        let waiting = &mut self.waiting;
        self.markers.retain(|(number, marker)| {
            let alive = !B::is_unique(marker);
            if !alive {
                waiting.gradients_are_gone(*number);
            }
            alive
        });
        waiting
    }
}

/// Averages that wait, or waited until the next backward began.
#[derive(Default)]
pub(super) struct WaitingAverages(Vec<Delivery>);

/// Averages of one backward that this rank had no leaf for.
struct Delivery {
    /// Number of the reduction.
    number: u64,
    /// True while their `Gradients` are there.
    alive: bool,
    /// True if a copy of the model was mapped with an average missing, and read for another forward.
    trained_on: bool,
    averages: Vec<Waiting>,
}

struct Waiting {
    slot: usize,
    /// True if a visitor was shown it, or `ddp.grad` has returned it.
    taken: bool,
    /// True if the parameter was mapped before it was taken.
    missed: bool,
}

impl WaitingAverages {
    fn add(&mut self, number: u64, slots: Vec<usize>) {
        let averages = slots.into_iter().map(|slot| Waiting { slot, taken: false, missed: false }).collect();
        self.0.push(Delivery { number, alive: true, trained_on: false, averages });
    }

    fn gradients_are_gone(&mut self, number: u64) {
        self.0.iter_mut().filter(|of| of.number == number).for_each(|of| of.alive = false);
    }

    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Averages of a slot whose `Gradients` are there.
    fn of(&mut self, slot: usize) -> impl Iterator<Item = &mut Waiting> {
        self.0.iter_mut().filter(|of| of.alive).flat_map(|of| &mut of.averages).filter(move |of| of.slot == slot)
    }

    /// True if an average of the slot waits.
    pub(super) fn has(&mut self, slot: usize) -> bool {
        self.of(slot).next().is_some()
    }

    /// Notes that the last average of a slot is on the leaf of its parameter: it waits no longer.
    pub(super) fn settle(&mut self, slot: usize) {
        if let Some(last) = self.0.last_mut() {
            last.averages.retain(|of| of.slot != slot);
        }
    }

    /// Notes that the averages of the slot were taken.
    pub(super) fn take(&mut self, slot: usize) {
        self.of(slot).for_each(|of| of.taken = true);
    }

    /// Notes that the parameter of a slot was mapped. Returns the number of the last delivery of which an average has
    /// not been taken. A mapper that comes after the `Gradients` are gone cannot look up anything in them.
    pub(super) fn mapped(&mut self, slot: usize) -> Option<u64> {
        let mut last = None;
        for delivery in self.0.iter_mut().filter(|of| of.alive) {
            for waiting in delivery.averages.iter_mut().filter(|of| !of.taken) {
                waiting.missed |= waiting.slot == slot;
                last = Some(delivery.number);
            }
        }
        last
    }

    /// Notes that a copy of the model was read that was mapped while averages of delivery `number` had not been taken.
    pub(super) fn trained_on(&mut self, number: u64) {
        self.0.iter_mut().filter(|of| of.number == number).for_each(|of| of.trained_on = true);
    }

    /// The slot of an average that a step on this rank may have missed, and the number of its reduction. Forgets
    /// averages that can no longer be taken.
    pub(super) fn begin_backward(&mut self) -> Option<(usize, u64)> {
        let missed = self.0.iter().filter(|of| of.trained_on).find_map(|of| {
            let average = of.averages.iter().find(|average| average.missed && !average.taken)?;
            Some((average.slot, of.number))
        });
        self.0.retain(|of| of.alive && !of.averages.is_empty());
        missed
    }
}
