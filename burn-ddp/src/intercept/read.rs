//! One read of a parameter.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use super::wrapped_model::WrappedModel;

/// One read of a parameter. Counts as outstanding until this is dropped: its hook has run, or its graph is gone.
pub(crate) struct Read {
    pub(super) model: Arc<WrappedModel>,
    pub(super) slot: usize,
}

impl Read {
    pub(super) fn new(model: Arc<WrappedModel>, slot: usize) -> Self {
        model.outstanding[slot].fetch_add(1, Ordering::AcqRel);
        Read { model, slot }
    }

    /// True if no other read of the slot is outstanding.
    pub(super) fn is_last(&self) -> bool {
        self.model.outstanding[self.slot].load(Ordering::Acquire) <= 1
    }
}

impl Drop for Read {
    fn drop(&mut self) {
        self.model.outstanding[self.slot].fetch_sub(1, Ordering::AcqRel);
    }
}

impl std::fmt::Debug for Read {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Read(slot {})", self.slot)
    }
}
