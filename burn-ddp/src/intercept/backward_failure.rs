//! Errors of a backward, and of a forward that gathers parameters: they go to the other ranks, and to the caller by
//! `Ddp::backward` or as a panic.

use std::cell::RefCell;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};

use crate::ddp::Ddp;
use crate::{Error, Result};

thread_local! {
    /// The first error of the backward that [`capture`] runs on this thread, of any model; the outer option is `None`
    /// without such a backward.
    static CAPTURED: RefCell<Option<Option<Error>>> = const { RefCell::new(None) };
}

/// Runs `backward` with errors of [`fail`] returned instead of panics.
pub(super) fn capture<T>(backward: impl FnOnce() -> T) -> Result<T> {
    struct Restore(Option<Option<Error>>);
    impl Drop for Restore {
        fn drop(&mut self) {
            CAPTURED.set(self.0.take());
        }
    }
    let restore = Restore(CAPTURED.replace(Some(None)));
    // An error leaves Burn's graph unfinished, so Burn may panic later; that panic is dropped in favour of our error.
    let out = catch_unwind(AssertUnwindSafe(backward));
    let captured = CAPTURED.take().flatten();
    drop(restore);
    match (captured, out) {
        (Some(e), _) => Err(e),
        (None, Ok(out)) => Ok(out),
        (None, Err(panic)) => resume_unwind(panic),
    }
}

/// True inside [`capture`] on this thread.
pub(super) fn is_captured() -> bool {
    CAPTURED.with_borrow(Option::is_some)
}

/// Makes `error` what [`capture`] returns, if it runs on this thread and nothing failed before.
pub(super) fn note_captured(error: &Error) {
    CAPTURED.with_borrow_mut(|captured| {
        if let Some(first) = captured {
            first.get_or_insert_with(|| error.clone());
        }
    });
}

/// Ends the waits of the other ranks with an error of this rank.
pub(crate) fn tell_peers(ddp: &Ddp, error: &Error) {
    if !matches!(error, Error::Comm(_)) {
        ddp.world().fail(error.to_string());
    }
}

/// Reports the error of a backward to the other ranks, and to `Ddp::backward` if that runs on this thread; panics
/// otherwise.
pub(crate) fn fail(ddp: &Ddp, error: Error) {
    let note = "a `loss.backward()` of the program ends here, since it cannot return an error (RUST_BACKTRACE=1 shows \
        its line); `ddp.backward(&loss, &model)` returns this error";
    fail_with(ddp, error, note);
}

/// [`fail`] in a forward, which only Burn's trainer captures.
pub(super) fn fail_forward(ddp: &Ddp, error: Error) {
    let note = "a forward of the program ends here, since it cannot return an error (RUST_BACKTRACE=1 shows its line)";
    fail_with(ddp, error, note);
}

fn fail_with(ddp: &Ddp, error: Error, note: &str) {
    tell_peers(ddp, &error);
    let unheard = CAPTURED.with_borrow_mut(|captured| match captured {
        Some(first) => {
            first.get_or_insert(error);
            None
        }
        None => Some(error),
    });
    if let Some(error) = unheard {
        panic!("{error}\nnote: {note}");
    }
}
