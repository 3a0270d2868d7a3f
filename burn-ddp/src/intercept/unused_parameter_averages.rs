//! Averages of parameters that this rank did not use: each waits on a stand-in leaf in the `Gradients` of its backward,
//! as long as these exist.

use std::collections::BTreeMap;

use burn::backend::autodiff::NodeId;
use burn::backend::autodiff::grads::Gradients;
use burn::backend::tensor::FloatTensor;
use burn::backend::{Backend, TensorMetadata};
use burn::tensor::{DType, Shape};

use super::hook_depth::{AutodiffTensor, new_leaf, scalar};
use crate::gradients::GradientMemory;

/// Stand-in leaves of a model, and the averages that wait on them.
pub(super) struct StandIns<B: Backend> {
    /// Leaves by key, made when first needed and kept: gradients of several backwards may wait side by side.
    leaves: BTreeMap<usize, AutodiffTensor<B>>,
    /// A tensor for each `Gradients`, which holds it, too, under a leaf of its own: while it is shared, they exist.
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

    /// The leaf with a key, if [`leaf_of`](Self::leaf_of) has made it.
    pub(super) fn leaf(&self, key: usize) -> Option<AutodiffTensor<B>> {
        self.leaves.get(&key).cloned()
    }

    /// The leaf with a key, of a slot or of clones, to which `average` belongs; made when it is first asked for. It has
    /// no elements, so that it adds nothing where parameters are counted.
    pub(super) fn leaf_of(&mut self, key: usize, average: &FloatTensor<B>) -> NodeId {
        let empty = || B::float_zeros(Shape::from([0]), &average.device(), average.dtype().into());
        self.leaves.entry(key).or_insert_with(|| new_leaf::<B>(empty())).id()
    }

    /// Notes what a backward has put into `grads`.
    pub(super) fn deliver(&mut self, delivery: Delivery, device: &B::Device, grads: &mut Gradients) {
        let marker = scalar::<B>(device, DType::F32);
        let leaf = self.marker_leaf.get_or_insert_with(|| new_leaf::<B>(scalar::<B>(device, DType::F32))).id();
        grads.register::<B>(leaf, marker.clone());
        self.markers.push((delivery.number, marker));
        self.waiting().add(delivery);
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

/// Deliveries whose `Gradients` exist, or existed when the last backward began.
#[derive(Default)]
pub(super) struct WaitingAverages(Vec<Delivery>);

/// Averages of one backward.
pub(super) struct Delivery {
    /// Number of the reduction.
    number: u64,
    /// Number of backwards that had ended before.
    ended: u64,
    /// True if the slot has an average, by slot.
    present: Vec<bool>,
    /// True while their `Gradients` exist.
    alive: bool,
    /// True if a copy of the model was mapped with an average missing, and read for another forward.
    trained_on: bool,
    /// Averages that this rank had no leaf for.
    averages: Vec<Waiting>,
}

struct Waiting {
    slot: usize,
    /// True if other `Gradients` with an average of the slot existed at the same time.
    rivalled: bool,
    /// True if a visitor has read the average, or `ddp.grad` has returned it.
    taken: bool,
    /// True if the parameter was mapped before the average was taken.
    missed: bool,
}

/// Last changes of a parameter in a copy of the model, as numbers of backwards that had ended; `None` for never.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Changes {
    /// A mapper was shown the parameter, and may have changed it.
    pub(super) mapped_at: Option<u64>,
    /// The same, but nothing had visited the parameter since the last backward, as an optimizer does for gradients.
    pub(super) mapped_unvisited_at: Option<u64>,
    /// A record was loaded, which gives parameters new leaves.
    pub(super) loaded_at: Option<u64>,
}

/// Average of a slot as a copy of the model finds it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Found {
    Nothing,
    Waits,
    /// The parameter was mapped since, by no optimizer. If the mapper changed the parameter, the average is outdated.
    Unclear,
    /// The average is of values that a step or a record has changed since: the parameter has a new leaf, for which Burn
    /// finds no gradient on ranks that used it.
    Outdated,
}

impl Delivery {
    /// Averages of reduction `number`, after `ended` backwards. This rank had no leaf for those of `unused`.
    pub(super) fn new(number: u64, ended: u64, present: Vec<bool>, unused: Vec<usize>) -> Self {
        let waiting = |slot| Waiting { slot, rivalled: false, taken: false, missed: false };
        let averages = unused.into_iter().map(waiting).collect();
        Delivery { number, ended, present, alive: true, trained_on: false, averages }
    }

    /// Notes that the averages of `other` are there at the same time.
    fn rival(&mut self, other: &[bool]) {
        self.averages.iter_mut().for_each(|of| of.rivalled |= other[of.slot]);
    }
}

impl WaitingAverages {
    fn add(&mut self, mut delivery: Delivery) {
        for earlier in self.0.iter_mut().filter(|of| of.alive) {
            earlier.rival(&delivery.present);
            delivery.rival(&earlier.present);
        }
        self.0.push(delivery);
    }

    fn gradients_are_gone(&mut self, number: u64) {
        self.0.iter_mut().filter(|of| of.number == number).for_each(|of| of.alive = false);
    }

    /// True if no average waits.
    pub(super) fn is_empty(&self) -> bool {
        self.0.iter().all(|of| of.averages.is_empty())
    }

    /// Averages of a slot whose `Gradients` are there.
    fn of(&mut self, slot: usize) -> impl Iterator<Item = &mut Waiting> {
        self.0.iter_mut().filter(|of| of.alive).flat_map(|of| &mut of.averages).filter(move |of| of.slot == slot)
    }

    /// The average of a slot for a copy of the model with these changes. Two `Gradients` with averages of a parameter
    /// are stepped one after the other: the first step gives the parameter a new leaf, so ranks that have used it find
    /// nothing in the second.
    pub(super) fn find(&self, slot: usize, changes: Changes) -> Found {
        let of_slot = |of: &&Waiting| of.slot == slot;
        let waiting =
            self.0.iter().filter(|of| of.alive).flat_map(|of| of.averages.iter().find(of_slot).map(|w| (of, w)));
        let mut found = Found::Nothing;
        for (delivery, average) in waiting {
            let is_since = |change: Option<u64>| change.is_some_and(|ended| ended > delivery.ended);
            if !is_since(changes.mapped_at) {
                return Found::Waits;
            }
            if !average.rivalled && !is_since(changes.loaded_at) {
                return if is_since(changes.mapped_unvisited_at) { Found::Unclear } else { Found::Waits };
            }
            found = Found::Outdated;
        }
        found
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

    /// Called when a backward begins. Returns the slot and the reduction's number of an average that the optimizer may
    /// have missed: the parameter was mapped before anything took the average, and the mapped copy has been read since.
    /// Forgets averages whose `Gradients` are gone.
    pub(super) fn begin_backward(&mut self) -> Option<(usize, u64)> {
        let missed = self.0.iter().filter(|of| of.trained_on).find_map(|of| {
            let average = of.averages.iter().find(|average| average.missed && !average.taken)?;
            Some((average.slot, of.number))
        });
        self.0.retain(|of| of.alive);
        missed
    }
}
