//! The plan of an epoch: its steps, and each rank's share of a step.

use std::ops::Range;

use super::DataError;

/// The steps of an epoch over all ranks, as a pure function of three numbers.
///
/// The epoch's order (the dataset's, or a [`permutation`](super::permutation) of it) is cut into *global* steps of
/// `global_batch` items. A remainder with at least one item per rank is a step of its own; a smaller one joins the step
/// before. Within a step the items are split contiguously over the ranks. So every item is loaded exactly once, all
/// ranks make equally many steps, no rank is ever without an item, and the items of a step do not depend on the world
/// size.
///
/// ```
/// use burn_ddp::data::EpochPlan;
///
/// let plan = EpochPlan::new(11, 2, 4)?; // 11 items, 2 ranks, 4 items per step
/// assert_eq!((plan.items(), plan.world_size(), plan.global_batch()), (11, 2, 4));
/// assert_eq!((plan.steps(), plan.consumed()), (3, 0)); // `consumed` of a plan `after` an interruption
/// assert_eq!(plan.step(2), 8..11);
/// assert_eq!(plan.share(2, 0), 8..10); // rank 0
/// assert_eq!(plan.share(2, 1), 10..11); // rank 1
///
/// let plan = EpochPlan::new(9, 2, 4)?; // the ninth item alone would leave a rank without
/// assert_eq!(plan.steps(), 2);
/// assert_eq!(plan.step(1), 4..9);
///
/// assert!(EpochPlan::new(1, 2, 4).is_err());
/// # Ok::<(), burn_ddp::data::DataError>(())
/// ```
///
/// The rest of an interrupted epoch is cut in the same way, for the world that goes on: see [`after`](Self::after).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct EpochPlan {
    items: usize,
    /// Items consumed before the first step.
    consumed: usize,
    world: usize,
    global_batch: usize,
    steps: usize,
    /// True if the items at the end that do not fill a step are left out.
    drops_last: bool,
    /// True if `max_batches` may end the epoch before its order.
    pub(super) limited: bool,
}

impl EpochPlan {
    /// The plan for `items` items over `world_size` ranks, `global_batch` items per step over all ranks.
    ///
    /// # Errors
    /// [`DataError::EmptyDataset`], [`DataError::DatasetTooSmall`] or [`DataError::BatchTooSmall`] if a rank would be
    /// without an item; [`DataError::TooManySteps`] if the number of steps exceeds 32 bits; [`DataError::NoSuchRank`]
    /// for a world of 0.
    pub fn new(items: usize, world_size: usize, global_batch: usize) -> Result<Self, DataError> {
        let world = world_size;
        if world == 0 {
            return Err(DataError::NoSuchRank { rank: 0, world });
        }
        if items == 0 {
            return Err(DataError::EmptyDataset);
        }
        if items < world {
            return Err(DataError::DatasetTooSmall { items, world });
        }
        if global_batch < world {
            return Err(DataError::BatchTooSmall { global_batch, world });
        }
        let plan =
            Self { items, consumed: 0, world, global_batch, steps: 0, drops_last: false, limited: false }.after(0);
        // Step numbers have 32 bits, and count from 1.
        if plan.steps >= u32::MAX as usize {
            return Err(DataError::TooManySteps { steps: plan.steps });
        }
        Ok(plan)
    }

    /// The same plan with full steps only: items at the end of the epoch's order that do not fill a step are left out,
    /// as with torch's `drop_last=True`. If the world size divides `global_batch`, every rank then has `global_batch /
    /// world_size` items in each step.
    ///
    /// # Errors
    /// [`DataError::NoFullStep`] if the epoch has fewer items than a step.
    ///
    /// ```
    /// use burn_ddp::data::EpochPlan;
    ///
    /// let plan = EpochPlan::new(11, 2, 4)?.drop_last()?;
    /// assert_eq!((plan.steps(), plan.step(1), plan.step(2).len()), (2, 4..8, 0));
    /// assert!(EpochPlan::new(3, 2, 4)?.drop_last().is_err());
    /// # Ok::<(), burn_ddp::data::DataError>(())
    /// ```
    pub fn drop_last(self) -> Result<Self, DataError> {
        let Self { items, global_batch, .. } = self;
        match items < global_batch {
            true => Err(DataError::NoFullStep { items, global_batch }),
            false => Ok(Self { drops_last: true, ..self }.after(self.consumed)),
        }
    }

    /// The plan for an epoch of `items` items with the same settings.
    pub(super) fn of_items(&self, items: usize) -> Result<Self, DataError> {
        let plan = Self::new(items, self.world, self.global_batch)?;
        if self.drops_last { plan.drop_last() } else { Ok(plan) }
    }

    /// The same plan for at most `steps` steps.
    pub(super) fn limit(&self, steps: usize) -> Self {
        let items = if steps < self.steps { steps * self.global_batch } else { self.items };
        Self { limited: true, ..self.of_first(items) }
    }

    /// The same plan for the first `items` items of the epoch only.
    pub(super) fn of_first(&self, items: usize) -> Self {
        Self { items, ..*self }.after(self.consumed)
    }

    /// The plan for the rest of an epoch whose first `consumed` items were handed out before, to any number of ranks in
    /// steps of any size. Its steps begin at the item `consumed` of the epoch's order; if all items were consumed, it
    /// has no step.
    ///
    /// If fewer items are left than there are ranks, they are one step, in which some ranks have no
    /// [`share`](Self::share): these ranks [load](Self::loads) an item of another rank, with weight 0.
    ///
    /// ```
    /// use burn_ddp::data::EpochPlan;
    ///
    /// let rest = EpochPlan::new(100, 4, 8)?.after(72); // interrupted after 9 steps of 8
    /// assert_eq!((rest.steps(), rest.step(0)), (4, 72..80));
    ///
    /// let rest = EpochPlan::new(100, 3, 9)?.after(72); // the same epoch on 3 ranks
    /// assert_eq!((rest.steps(), rest.step(0), rest.step(2)), (3, 72..81, 90..100));
    ///
    /// let rest = EpochPlan::new(100, 3, 9)?.after(98);
    /// assert_eq!((rest.share(0, 1), rest.share(0, 2)), (99..100, 100..100));
    /// assert_eq!(rest.loads(0, 2), 98..99); // counts 0
    /// # Ok::<(), burn_ddp::data::DataError>(())
    /// ```
    #[must_use]
    pub fn after(&self, consumed: usize) -> Self {
        let left = self.items.saturating_sub(consumed);
        let full = left / self.global_batch;
        let steps = match left % self.global_batch {
            // A remainder with an item for each rank is a step of its own.
            rest if !self.drops_last => (full + usize::from(rest >= self.world)).max(usize::from(left > 0)),
            _ => full,
        };
        Self { consumed: self.items - left, steps, ..*self }
    }

    /// Items of a whole epoch over all ranks.
    pub fn items(&self) -> usize {
        self.items
    }

    /// Items of the epoch consumed before the first step: 0, except in the plan of the rest of an interrupted epoch.
    pub fn consumed(&self) -> usize {
        self.consumed
    }

    /// Ranks that share each step.
    pub fn world_size(&self) -> usize {
        self.world
    }

    /// Items of a full step over all ranks.
    pub fn global_batch(&self) -> usize {
        self.global_batch
    }

    /// Steps of the plan, the same on every rank; at least one if there are items, unless the last step is
    /// [dropped](Self::drop_last).
    pub fn steps(&self) -> usize {
        self.steps
    }

    /// The positions in the epoch's order that all ranks together load in `step`; empty past the last.
    pub fn step(&self, step: usize) -> Range<usize> {
        if step >= self.steps {
            return self.items..self.items;
        }
        let start = self.consumed + step * self.global_batch;
        let joined = step + 1 == self.steps && !self.drops_last;
        let end = if joined { self.items } else { start + self.global_batch };
        start..end
    }

    /// The positions in the epoch's order that are `rank`'s in `step`; their number is the weight of its batch. Never
    /// empty for a step and a rank that exist, unless an interrupted epoch had fewer items left than there are ranks.
    pub fn share(&self, step: usize, rank: usize) -> Range<usize> {
        let step = self.step(step);
        let share = share(step.len(), rank, self.world);
        step.start + share.start..step.start + share.end
    }

    /// The positions that `rank` loads in `step`: its [`share`](Self::share), or, if the share is empty, one position
    /// of another rank, so that the rank has a gradient of the right shape, with weight 0.
    pub fn loads(&self, step: usize, rank: usize) -> Range<usize> {
        let (all, share) = (self.step(step), self.share(step, rank));
        if !share.is_empty() || all.is_empty() || rank >= self.world {
            return share;
        }
        let other = all.start + rank % all.len();
        other..other + 1
    }
}

/// The contiguous part of `0..items` of `rank`, if `world` ranks split the range: the sizes of parts differ by at most
/// one, and the first ranks have the larger parts. Empty for a rank outside the world.
pub(crate) fn share(items: usize, rank: usize, world: usize) -> Range<usize> {
    if rank >= world {
        return items..items;
    }
    let (each, larger) = (items / world, items % world);
    let start = rank * each + rank.min(larger);
    start..start + each + usize::from(rank < larger)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn remainders() {
        let sizes = |items, world, global_batch| {
            let plan = EpochPlan::new(items, world, global_batch).unwrap();
            let shares = |step| (0..world).map(|rank| plan.share(step, rank).len()).collect::<Vec<_>>();
            (0..plan.steps()).map(shares).collect::<Vec<_>>()
        };
        assert_eq!(sizes(8, 2, 4), [[2, 2], [2, 2]]);
        assert_eq!(sizes(9, 2, 4), [[2, 2], [3, 2]]); // 1 < 2 joins the step before
        assert_eq!(sizes(10, 2, 4), [[2, 2], [2, 2], [1, 1]]);
        assert_eq!(sizes(11, 2, 4), [[2, 2], [2, 2], [2, 1]]);
        assert_eq!(sizes(5, 3, 100), [[2, 2, 1]]); // less than one step
        assert_eq!(sizes(10, 3, 5), [[2, 2, 1], [2, 2, 1]]); // a global batch that does not divide
        assert_eq!(sizes(7, 1, 3), [[3], [3], [1]]);
    }

    #[test]
    fn what_would_leave_a_rank_without_items_is_an_error() {
        let error = |items, world, batch| EpochPlan::new(items, world, batch).unwrap_err();
        assert!(matches!(error(0, 2, 4), DataError::EmptyDataset));
        assert!(matches!(error(3, 4, 4), DataError::DatasetTooSmall { items: 3, world: 4 }));
        assert!(matches!(error(9, 4, 3), DataError::BatchTooSmall { global_batch: 3, world: 4 }));
        assert!(matches!(error(9, 1, 0), DataError::BatchTooSmall { global_batch: 0, world: 1 }));
        assert!(matches!(error(9, 0, 1), DataError::NoSuchRank { world: 0, .. }));
        let message = error(3, 4, 4).to_string();
        assert!(message.contains("3 item(s)") && message.contains("4 ranks"), "{message}");
    }

    #[test]
    fn the_largest_numbers_do_not_overflow() {
        let plan = EpochPlan::new(usize::MAX, 3, usize::MAX).unwrap();
        assert_eq!(plan.share(0, 2).end, usize::MAX);
        assert_eq!(EpochPlan::new(10, 3, usize::MAX).unwrap().steps(), 1);
        assert!(matches!(EpochPlan::new(usize::MAX, 1, 1), Err(DataError::TooManySteps { .. })));
    }

    proptest! {
        #[test]
        fn laws(world in 1usize..20, extra in 0usize..60, more in 0usize..600) {
            let (items, global_batch) = (world + more, world + extra);
            let plan = EpochPlan::new(items, world, global_batch).unwrap();
            let mut read = Vec::new();
            for step in 0..plan.steps() {
                let shares: Vec<_> = (0..world).map(|rank| plan.share(step, rank)).collect();
                let sizes = shares.iter().map(ExactSizeIterator::len);
                let (least, most) = (sizes.clone().min().unwrap(), sizes.clone().max().unwrap());
                prop_assert!(least >= 1, "an empty rank in step {}", step);
                prop_assert!(most - least <= 1);
                let total: usize = sizes.sum();
                if step + 1 < plan.steps() {
                    prop_assert_eq!(total, global_batch);
                } else {
                    prop_assert!(total < global_batch + world);
                }
                prop_assert_eq!(total, plan.step(step).len());
                read.extend(shares.into_iter().flatten());
            }
            // Contiguous, in order, every item once.
            prop_assert_eq!(read, (0..items).collect::<Vec<_>>());
            prop_assert!(plan.step(plan.steps()).is_empty());
            prop_assert!(plan.share(0, world).is_empty());
        }

        #[test]
        fn what_is_left_at_another_world(
            world in 1usize..20, extra in 0usize..60, more in 0usize..600, read in 0usize..700,
        ) {
            let whole = EpochPlan::new(world + more, world, world + extra).unwrap();
            let rest = whole.after(read);
            let read = read.min(whole.items());
            prop_assert_eq!(rest.consumed(), read);
            prop_assert_eq!(rest.steps() == 0, read == whole.items());
            let mut left = Vec::new();
            for step in 0..rest.steps() {
                let shares: Vec<_> = (0..world).map(|rank| rest.share(step, rank)).collect();
                let sizes = shares.iter().map(ExactSizeIterator::len);
                prop_assert!(sizes.clone().max().unwrap() - sizes.clone().min().unwrap() <= 1);
                for (rank, share) in shares.iter().enumerate() {
                    let loads = rest.loads(step, rank);
                    prop_assert!(!loads.is_empty(), "rank {} has nothing to load", rank);
                    if share.is_empty() {
                        prop_assert!(whole.items() - read < world);
                        prop_assert!(loads.len() == 1 && rest.step(step).contains(&loads.start));
                    } else {
                        prop_assert_eq!(&loads, share);
                    }
                }
                left.extend(shares.into_iter().flatten());
            }
            prop_assert_eq!(left, (read..whole.items()).collect::<Vec<_>>());
        }

        #[test]
        fn resuming_in_steps_of_the_same_size_changes_no_step(
            world in 1usize..9, extra in 0usize..30, more in 0usize..300,
        ) {
            let whole = EpochPlan::new(world + more, world, world + extra).unwrap();
            for taken in 0..whole.steps() {
                let rest = whole.after(whole.step(taken).start);
                prop_assert_eq!(rest.steps(), whole.steps() - taken);
                for step in 0..rest.steps() {
                    for rank in 0..world {
                        prop_assert_eq!(rest.loads(step, rank), whole.share(taken + step, rank));
                    }
                }
            }
        }

        #[test]
        fn steps_do_not_depend_on_the_world(a in 1usize..9, b in 1usize..9, batches in 1usize..6, rest in 9usize..50) {
            // With at least as many items in the remainder as ranks in either world.
            let global_batch = 60;
            let items = batches * global_batch + rest;
            let [a, b] = [a, b].map(|world| EpochPlan::new(items, world, global_batch).unwrap());
            prop_assert_eq!(a.steps(), b.steps());
            for step in 0..a.steps() {
                prop_assert_eq!(a.step(step), b.step(step));
            }
        }

        #[test]
        fn without_the_last_step_all_are_full_and_no_item_of_them_is_missing(
            world in 1usize..9, more in 0usize..200, extra in 0usize..30, consumed in 0usize..300,
        ) {
            let (items, global_batch) = (world + more, world + extra);
            let plan = EpochPlan::new(items, world, global_batch).unwrap();
            let Ok(dropping) = plan.drop_last() else {
                prop_assert!(items < global_batch);
                return Ok(());
            };
            for plan in [dropping, dropping.after(consumed)] {
                let first = plan.consumed();
                prop_assert_eq!(plan.steps(), (items - first) / global_batch);
                for step in 0..plan.steps() {
                    let start = first + step * global_batch;
                    prop_assert_eq!(plan.step(step), start..start + global_batch);
                    let shares: Vec<usize> = (0..world).flat_map(|rank| plan.share(step, rank)).collect();
                    prop_assert_eq!(shares, plan.step(step).collect::<Vec<_>>());
                }
                prop_assert!(plan.step(plan.steps()).is_empty());
            }
        }

        #[test]
        fn any_numbers_give_a_plan_or_an_error(
            items: usize, world: usize, global_batch: usize, step: usize, rank: usize,
        ) {
            if let Ok(plan) = EpochPlan::new(items, world, global_batch) {
                let share = plan.share(step, rank);
                prop_assert!(share.start <= share.end && share.end <= items);
            }
        }
    }
}
