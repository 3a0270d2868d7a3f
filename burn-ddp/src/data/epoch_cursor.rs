//! The place of a training loader: its position, and the epoch that it begins next.

use super::deal::PartOfStep;
use super::epoch_order::OrderDigest;
use super::left_early::LeftEarly;
use super::{EpochPlan, Position};

/// Epochs begun so far, and the position in the present epoch. It changes when an epoch begins, with each batch, and by
/// `set_epoch` and `resume`.
pub(super) struct EpochCursor {
    /// Plan of a whole epoch.
    plan: EpochPlan,
    /// The epoch that `iter` begins next.
    next: usize,
    /// Position in the present epoch, or, between two epochs, at the beginning of the next one.
    position: Position,
    /// True after `resume`, until an epoch begins: `position` is that of an earlier run.
    resumed: bool,
    /// The epoch that was begun last.
    begun: Option<usize>,
    /// Number of epochs begun whose number was not larger than that of the epoch before. Two passes over the same epoch
    /// differ in it.
    repeats: u32,
}

impl EpochCursor {
    pub(super) fn new(order: OrderDigest, plan: EpochPlan) -> Self {
        Self { plan, next: 0, position: Position::start(order), resumed: false, begun: None, repeats: 0 }
    }

    /// The epoch that `iter` begins next.
    pub(super) fn next(&self) -> usize {
        self.next
    }

    /// The present epoch and its consumed items, to be saved in a checkpoint.
    pub(super) fn position(&self) -> Position {
        self.position.clone()
    }

    /// The first epoch that `epochs` may begin: after a resume, the interrupted one.
    pub(super) fn first(&self) -> usize {
        if self.resumed { self.position.epoch } else { 0 }
    }

    pub(super) fn repeats(&self) -> u32 {
        self.repeats
    }

    /// Goes on from `position`. Returns it as it counts for this loader: `max_batches` ends epochs of a loader that has
    /// it only, and then it matters no longer where an earlier run left them.
    pub(super) fn resume(&mut self, position: Position) -> Position {
        let position = match self.plan.limited {
            true => Position { left_early: None, ..position },
            false => Position { end: None, ..position },
        };
        (self.next, self.position, self.resumed) = (position.epoch, position.clone(), true);
        position
    }

    /// Makes `epoch` the next one, from its beginning.
    pub(super) fn set_epoch(&mut self, epoch: usize) {
        (self.next, self.position, self.resumed) = (epoch, self.beginning_of(epoch), false);
    }

    /// Begins the epoch `number`. Returns the position from which it is read.
    pub(super) fn begin(&mut self, number: usize) -> Position {
        let goes_on = self.resumed && self.position.epoch == number;
        if !goes_on {
            self.position = self.beginning_of(number);
        }
        self.repeats += u32::from(self.begun.is_some_and(|begun| number <= begun));
        (self.next, self.resumed, self.begun) = (number.saturating_add(1), false, Some(number));
        self.position.clone()
    }

    /// The position at the beginning of `epoch`, for which the present epoch is left.
    fn beginning_of(&self, epoch: usize) -> Position {
        let Position { epoch: left, consumed, left_early, .. } = self.position;
        let batches = if self.resumed { 0 } else { consumed / self.plan.global_batch() };
        let left_early = LeftEarly::note(left_early, left, batches, epoch);
        Position { epoch, consumed: 0, end: None, part: None, left_early, ..self.position.clone() }
    }

    /// Records that the first `consumed` of the `items` items of the epoch `number` were handed out. Ignored unless
    /// that epoch was begun last, with this number of `repeats`. `part` is the part of the next step that was, too.
    pub(super) fn consume(
        &mut self,
        number: usize,
        repeats: u32,
        (consumed, part): (usize, Option<PartOfStep>),
        items: usize,
    ) {
        if self.is_present(number, repeats) {
            self.position = match consumed < items {
                true => {
                    let end = self.plan.limited.then_some(items);
                    Position { epoch: number, consumed, end, part, ..self.position.clone() }
                }
                false => {
                    let epoch = self.next;
                    Position { epoch, consumed: 0, end: None, part: None, left_early: None, ..self.position.clone() }
                }
            };
        }
    }

    /// Records the digest of the order of the epoch `number`, as [`consume`](Self::consume) records its items.
    pub(super) fn note_order(&mut self, number: usize, repeats: u32, order: OrderDigest) {
        if self.is_present(number, repeats) {
            self.position.order = order;
        }
    }

    fn is_present(&self, number: usize, repeats: u32) -> bool {
        self.begun == Some(number) && self.repeats == repeats && !self.resumed
    }
}
