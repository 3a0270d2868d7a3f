//! Parameters that were clones of each other at `wrap`. In a copy of the model that was never mapped they share a leaf,
//! so the averages of all of them belong to it.

use std::sync::atomic::Ordering;

use burn::backend::autodiff::NodeId;

use super::model_state::State;
use super::wrapped_model::{TapHandle, WrappedModel};
use crate::gradients::GradientMemory;

/// Place for the average of a slot that this rank did not use.
pub(super) enum Substitute {
    /// The leaf that the slot shares with a clone.
    Leaf(NodeId),
    /// Stand-in leaves with these keys.
    StandIns(Vec<usize>),
}

impl TapHandle {
    /// True if the parameter shares its leaf with clones.
    fn shares_leaf(&self) -> bool {
        let TapHandle { model, slot, apart, .. } = self;
        model.cloned[*slot] && !apart && !model.clones_are_apart()
    }

    /// Key of the stand-in leaf with the average of this parameter, summed over the clones that share its leaf.
    pub(super) fn stand_in_key(&self) -> usize {
        if self.shares_leaf() { self.model.shared_key(self.slot) } else { self.slot }
    }

    /// The slots whose averages are summed on the leaf of [`stand_in_key`](Self::stand_in_key).
    pub(super) fn sharing_slots(&self) -> impl Iterator<Item = usize> {
        let TapHandle { model, slot, .. } = self;
        let shares = self.shares_leaf();
        let all = if shares { model.slots[*slot].first_clone..model.slots.len() } else { *slot..*slot + 1 };
        all.filter(move |other| !shares || model.slots[*other].first_clone == model.slots[*slot].first_clone)
    }
}

impl WrappedModel {
    /// Notes that no copy has clones that share a leaf.
    pub(crate) fn part_clones(&self) {
        self.note_map();
        self.clones_apart.store(true, Ordering::Release);
    }

    fn clones_are_apart(&self) -> bool {
        self.clones_apart.load(Ordering::Acquire)
    }

    /// Key of the stand-in leaf of a slot and its clones.
    fn shared_key(&self, slot: usize) -> usize {
        self.slots.len() + self.slots[slot].first_clone
    }

    /// Place for the average of a slot that this rank did not use. If this rank did not use a clone either, both
    /// stand-in leaves serve, as it is not known whether the clones share a leaf in the copy that will be stepped.
    pub(super) fn substitute<B: GradientMemory>(&self, state: &State<B>, slot: usize) -> Substitute {
        if !self.cloned[slot] || self.clones_are_apart() {
            return Substitute::StandIns(vec![slot]);
        }
        let first = self.slots[slot].first_clone;
        let clones = (first..self.slots.len()).filter(|&other| self.slots[other].first_clone == first);
        let mut used = clones.filter_map(|other| state.slots[other].leaf.map(|leaf| (leaf, state.slots[other].apart)));
        match used.next() {
            Some((leaf, false)) => Substitute::Leaf(leaf),
            Some((_, true)) => Substitute::StandIns(vec![slot]),
            None => Substitute::StandIns(vec![slot, self.shared_key(slot)]),
        }
    }
}

#[cfg(all(test, feature = "flex"))]
mod tests {
    use burn::module::{Module, Param};
    use burn::optim::{GradientsParams, SgdConfig};
    use burn::tensor::{Device, Gradients, Tensor};

    use crate::Ddp;

    #[derive(Module, Debug)]
    struct Tied {
        a: Param<Tensor<1>>,
        clone_of_a: Param<Tensor<1>>,
        c: Param<Tensor<1>>,
    }

    impl Tied {
        fn ones() -> Self {
            let one = || Param::from_tensor(Tensor::<1>::ones([1], &Device::flex().autodiff()));
            let a = one();
            Tied { clone_of_a: a.clone(), a, c: one() }
        }
    }

    /// Values of `a` and its clone on each rank after steps, in which rank 1 uses of them what `uses` says: neither, or
    /// `a`, or the clone. A copy of the model is mapped before if `copies`.
    fn trained(uses: &[&str], copies: bool, backward: fn(&Ddp, &Tied, Tensor<1>) -> Gradients) -> Vec<[f32; 2]> {
        let ranks = Ddp::spawn(2, |ddp| {
            let mut model = ddp.wrap(Tied::ones())?;
            let copy = copies.then(|| model.clone().no_grad());
            for uses in uses {
                let loss = match *uses {
                    _ if ddp.is_main() => model.a.val() + model.clone_of_a.val() * 3.0 + model.c.val(),
                    "a" => model.a.val() * 0.0 + model.c.val(),
                    "clone" => model.clone_of_a.val() * 0.0 + model.c.val(),
                    _ => model.c.val() * 1.0,
                };
                let grads = GradientsParams::from_grads(backward(&ddp, &model, loss), &model);
                model = SgdConfig::new().init().step(0.1, model, grads);
            }
            drop(copy);
            Ok([&model.a, &model.clone_of_a].map(|param| param.base().into_scalar::<f32>()))
        });
        ranks.unwrap()
    }

    #[test]
    fn averages_of_clones_add_up_whatever_a_rank_uses() {
        let plain: fn(&Ddp, &Tied, Tensor<1>) -> Gradients = |_, _, loss| loss.backward();
        let checked: fn(&Ddp, &Tied, Tensor<1>) -> Gradients = |ddp, model, loss| ddp.backward(&loss, model).unwrap();
        for backward in [plain, checked] {
            for copies in [false, true] {
                for uses in ["a", "clone", "neither"] {
                    // Burn steps the first clone by the gradient of all: (1 + 3) / 2 here.
                    let after = trained(&[uses], copies, backward);
                    assert_eq!(after, [[0.8, 1.0]; 2], "rank 1 uses {uses}, a copy was mapped: {copies}");
                    let after = trained(&[uses, uses], copies, backward);
                    assert_eq!(after[0], after[1], "rank 1 uses {uses}, a copy was mapped: {copies}");
                }
            }
        }
    }
}
