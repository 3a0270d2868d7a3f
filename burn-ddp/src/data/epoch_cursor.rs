//! Position of a training loader: the next epoch, and the number of items of the present epoch that were handed out.

/// Epochs begun so far, and items consumed of the present epoch. It changes when an epoch begins, with each batch, and
/// by `set_epoch` and `resume`.
#[derive(Default)]
pub(super) struct EpochCursor {
    /// The epoch that `iter` begins next.
    next: usize,
    /// The present epoch, or, between two epochs, the next one.
    epoch: usize,
    /// Items of `epoch` that were handed out, over all ranks.
    consumed: usize,
    /// True after `resume`, until an epoch begins: `epoch` and `consumed` are those of an earlier run.
    resumed: bool,
    /// The epoch that was begun last.
    begun: Option<usize>,
    /// Number of epochs begun whose number was not larger than that of the epoch before. Two passes over the same epoch
    /// differ in it.
    repeats: u32,
}

impl EpochCursor {
    /// The epoch that `iter` begins next.
    pub(super) fn next(&self) -> usize {
        self.next
    }

    /// The present epoch and its consumed items, to be saved in a checkpoint.
    pub(super) fn position(&self) -> (usize, usize) {
        (self.epoch, self.consumed)
    }

    /// The first epoch that `epochs` may begin: after a resume, the interrupted one.
    pub(super) fn first(&self) -> usize {
        if self.resumed { self.epoch } else { 0 }
    }

    pub(super) fn repeats(&self) -> u32 {
        self.repeats
    }

    pub(super) fn resume(&mut self, epoch: usize, consumed: usize) {
        *self = Self { next: epoch, epoch, consumed, resumed: true, ..*self };
    }

    /// Makes `epoch` the next one, from its beginning.
    pub(super) fn set_epoch(&mut self, epoch: usize) {
        *self = Self { next: epoch, epoch, consumed: 0, resumed: false, ..*self };
    }

    /// Begins the epoch `number`. Returns the number of its items that an earlier run consumed.
    pub(super) fn begin(&mut self, number: usize) -> usize {
        let consumed = if self.resumed && self.epoch == number { self.consumed } else { 0 };
        let repeats = self.repeats + u32::from(self.begun.is_some_and(|begun| number <= begun));
        let next = number.saturating_add(1);
        *self = Self { next, epoch: number, consumed, resumed: false, begun: Some(number), repeats };
        consumed
    }

    /// Records that the first `consumed` of the `items` items of the epoch `number` were handed out. Ignored unless
    /// that epoch was begun last, with this number of `repeats`.
    pub(super) fn consume(&mut self, number: usize, repeats: u32, consumed: usize, items: usize) {
        if self.begun == Some(number) && self.repeats == repeats && !self.resumed {
            (self.epoch, self.consumed) = if consumed < items { (number, consumed) } else { (self.next, 0) };
        }
    }
}
