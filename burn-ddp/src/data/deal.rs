//! The batches of an epoch that one rank loads: the leaves of its run, step after step.

use std::ops::Range;

use serde::{Deserialize, Serialize};

use super::EpochPlan;
use crate::gradients::OwnRun;

/// Part of a step that was handed out when a checkpoint was saved.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct PartOfStep {
    /// Leaves of the step.
    pub(super) leaves: usize,
    /// Items of a full step, and the end of this one in the epoch's order: leaves must have the same items again.
    pub(super) items: usize,
    pub(super) end: usize,
    /// Those that were handed out.
    pub(super) done: Vec<usize>,
}

/// One rank's batches of a plan, numbered from 0. Without logical ranks each step has one.
///
/// All ranks have equally many batches in a step, so that they stay in step with each other. A rank without a further
/// leaf loads an item of an earlier one, with weight 0, while the others make theirs.
#[derive(Clone, Debug)]
pub(super) struct Deal {
    plan: EpochPlan,
    run: OwnRun,
    /// Leaves of the first step that are to come on this rank, and the batches of that step.
    first: Vec<usize>,
    in_first: usize,
    /// The part of the first step that was handed out before.
    part: Option<PartOfStep>,
}

/// A batch of a [`Deal`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Place {
    pub(super) step: usize,
    pub(super) leaf: usize,
    /// True if the leaf is not to be counted again.
    pub(super) repeats: bool,
    /// True if no further batch of the step follows.
    pub(super) ends_step: bool,
    /// Batches of the step, this one included, since the step or its rest began.
    nth: usize,
}

impl Deal {
    pub(super) fn new(plan: EpochPlan, run: OwnRun, part: Option<PartOfStep>) -> Self {
        let left_to = |rank| left(OwnRun { rank, ..run }, part.as_ref());
        let in_first = (0..run.division.ranks()).map(|rank| left_to(rank).len()).max().unwrap_or(1);
        Self { plan, run, first: left_to(run.rank), in_first, part }
    }

    /// Batches of a whole step.
    pub(super) fn in_step(&self) -> usize {
        self.run.division.of_rank(0).len()
    }

    /// Number of batches.
    pub(super) fn len(&self) -> usize {
        match self.plan.steps() {
            0 => 0,
            steps => self.in_first + (steps - 1) * self.in_step(),
        }
    }

    pub(super) fn at(&self, batch: usize) -> Place {
        let own = self.run.leaves();
        let (step, nth, of) = match batch.checked_sub(self.in_first) {
            None => (0, batch, self.in_first),
            Some(after) => (after / self.in_step() + 1, after % self.in_step(), self.in_step()),
        };
        let leaf = if step == 0 { self.first.get(nth).copied() } else { own.clone().nth(nth) };
        let (ends_step, repeats) = (nth + 1 == of, leaf.is_none());
        Place { step, leaf: leaf.unwrap_or(own.start), repeats, ends_step, nth: nth + 1 }
    }

    /// Number of items of a batch that count.
    pub(super) fn items(&self, batch: usize) -> usize {
        let place = self.at(batch);
        if place.repeats { 0 } else { self.plan.share(place.step, place.leaf).len() }
    }

    /// The positions in the epoch's order that a batch loads.
    pub(super) fn loads(&self, batch: usize) -> Range<usize> {
        let place = self.at(batch);
        let loads = self.plan.loads(place.step, place.leaf);
        if place.repeats { loads.start..loads.start + 1 } else { loads }
    }

    /// The part of the step that is handed out with a batch, if every rank has handed out as many batches of it; `None`
    /// if the step is complete.
    pub(super) fn part_with(&self, place: Place) -> Option<PartOfStep> {
        if place.ends_step {
            return None;
        }
        let (division, part) = (self.run.division, self.part.as_ref().filter(|_| place.step == 0));
        let of_rank = |rank| left(OwnRun { division, rank }, part).into_iter().take(place.nth);
        let mut done: Vec<usize> = (0..division.ranks()).flat_map(of_rank).collect();
        done.extend(part.iter().flat_map(|part| &part.done));
        done.sort_unstable();
        let (items, end) = (self.plan.global_batch(), self.plan.step(place.step).end);
        Some(PartOfStep { leaves: division.count(), items, end, done })
    }
}

/// Leaves of a run that are not among those handed out.
fn left(run: OwnRun, part: Option<&PartOfStep>) -> Vec<usize> {
    run.leaves().filter(|leaf| !part.is_some_and(|part| part.done.contains(leaf))).collect()
}

#[cfg(test)]
mod tests {
    use burn_ddp_comm::LogicalRanks;

    use super::*;

    fn deals(items: usize, ranks: usize, part: Option<PartOfStep>) -> Vec<Deal> {
        let division = LogicalRanks::new(8, ranks).unwrap();
        let plan = EpochPlan::new(items, 8, 16).unwrap();
        (0..ranks).map(|rank| Deal::new(plan, OwnRun { division, rank }, part.clone())).collect()
    }

    /// The leaves of each step over all ranks, with the positions that they load.
    fn steps(deals: &[Deal]) -> Vec<Vec<(usize, Range<usize>)>> {
        let mut steps = vec![Vec::new(); deals[0].plan.steps()];
        for deal in deals {
            for batch in 0..deal.len() {
                let place = deal.at(batch);
                assert_eq!(place.repeats, deal.items(batch) == 0);
                if !place.repeats {
                    steps[place.step].push((place.leaf, deal.loads(batch)));
                }
            }
        }
        steps.iter_mut().for_each(|step| step.sort_by_key(|(leaf, _)| *leaf));
        steps
    }

    #[test]
    fn any_number_of_ranks_loads_the_same_leaves() {
        for items in [16, 33, 40, 64] {
            let one = steps(&deals(items, 1, None));
            assert!(one.iter().all(|step| step.len() == 8));
            let loaded: usize = one.iter().flatten().map(|(_, loads)| loads.len()).sum();
            assert_eq!(loaded, items);
            for ranks in 2..=8 {
                let deals = deals(items, ranks, None);
                assert_eq!(steps(&deals), one);
                for deal in deals {
                    let ends: Vec<usize> =
                        (0..deal.len()).map(|batch| deal.at(batch)).filter(|p| p.ends_step).map(|p| p.step).collect();
                    assert_eq!(ends, (0..deal.plan.steps()).collect::<Vec<_>>());
                }
            }
        }
    }

    #[test]
    fn the_rest_of_a_step_is_dealt_to_any_number_of_ranks() {
        // Two ranks have handed out two of their four leaves.
        let two = deals(32, 2, None);
        let part = two[1].part_with(two[1].at(1));
        assert_eq!(part, Some(PartOfStep { leaves: 8, items: 16, end: 16, done: vec![0, 1, 4, 5] }));
        for ranks in 1..=8 {
            let deals = deals(32, ranks, part.clone());
            let steps = steps(&deals);
            let leaves: Vec<usize> = steps[0].iter().map(|(leaf, _)| *leaf).collect();
            assert_eq!(leaves, [2, 3, 6, 7], "{ranks} ranks");
            assert_eq!(steps[1].len(), 8);
            for deal in &deals {
                let of_step = |step| (0..deal.len()).map(|batch| deal.at(batch)).filter(move |at| at.step == step);
                let in_steps = [0, 1].map(|step| of_step(step).count());
                assert_eq!(in_steps, [deals[0].in_first, 8_usize.div_ceil(ranks)]);
                assert!((0..2).all(|step| of_step(step).next_back().unwrap().ends_step), "{ranks} ranks");
            }
        }
        // Of eight ranks those of leaves 0, 1, 4 and 5 have nothing of their own in this step.
        let deals = deals(32, 8, part);
        let repeats: Vec<bool> = deals.iter().map(|deal| deal.at(0).repeats).collect();
        assert_eq!(repeats, [true, true, false, false, true, true, false, false]);
        assert_eq!((deals[0].items(0), deals[0].loads(0).len(), deals[0].len()), (0, 1, 2));
        // One rank is interrupted again, after leaf 2.
        let one = super::tests::deals(32, 1, deals[0].part.clone());
        assert_eq!(
            one[0].part_with(one[0].at(0)),
            Some(PartOfStep { leaves: 8, items: 16, end: 16, done: vec![0, 1, 2, 4, 5] })
        );
    }
}
