//! Epochs that a program leaves before their end, and what a resumed run logs about them.

use serde::{Deserialize, Serialize};

use crate::Ddp;

/// An epoch that all ranks left early to begin the next one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct LeftEarly {
    epoch: usize,
    /// Batches of each rank that were handed out.
    batches: usize,
}

impl LeftEarly {
    /// Notes that the epoch `next` begins after `batches` batches of `epoch`, which has more; `before` was noted last.
    /// An epoch that is begun again was not left.
    pub(super) fn note(before: Option<Self>, epoch: usize, batches: usize, next: usize) -> Option<Self> {
        if batches > 0 && next > epoch { Some(Self { epoch, batches }) } else { before }
    }
}

/// Logs, on rank 0, that `loader` goes on within `epoch`, of which `progress` was read; and warns if the run that saved
/// the position had `left` the epoch before, since this one will be read to its end.
pub(super) fn log_resume(ddp: &Ddp, loader: &str, epoch: usize, progress: &str, left: Option<LeftEarly>) {
    if !ddp.is_main() {
        return;
    }
    let number = epoch.saturating_add(1);
    tracing::info!(target: "burn_ddp::data", "{loader} resumes within epoch {number}: {progress}");
    if let Some(LeftEarly { epoch, batches }) = left {
        tracing::warn!(
            target: "burn_ddp::data",
            "{loader} was left after {batches} batch(es) of epoch {}; the resumed epoch {number} is read to the end: \
            if epochs are to end early (`take`, `break`), build the loader with `.max_batches({batches})`",
            epoch.saturating_add(1)
        );
    }
}
