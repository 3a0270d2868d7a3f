//! Waits for a device or for NCCL, which wake no thread when something is done.

use std::time::Duration;

use burn_ddp_comm::{Error, PollPause};

/// Check that a wait makes between two polls. An error ends the wait: the world has ended, or the deadline has passed.
pub type WaitCheck<'a> = &'a dyn Fn() -> Result<(), Error>;

/// Time for which a wait yields its core before it sleeps: most launches are enqueued within this time.
const YIELDS: Duration = Duration::from_micros(200);

/// Pauses between two polls of a device. They never spin: the threads of a rank may share one core.
pub(crate) fn poll_pause() -> PollPause {
    PollPause::new(Duration::ZERO, YIELDS)
}

/// Polls `is_done` until it returns true, and calls `check` after each poll that returned false.
///
/// # Errors
/// The first error of `is_done` or `check`.
pub(crate) fn wait_until<E: From<Error>>(
    check: WaitCheck<'_>,
    mut is_done: impl FnMut() -> Result<bool, E>,
) -> Result<(), E> {
    let mut pause = poll_pause();
    while !is_done()? {
        check()?;
        pause.wait();
    }
    Ok(())
}
