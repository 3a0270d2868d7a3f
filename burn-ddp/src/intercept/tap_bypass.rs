//! Reads and visits that pass the taps by, as if the model were not wrapped.

use std::cell::Cell;

thread_local! {
    /// True while reads and visits on this thread ignore taps.
    static BYPASS: Cell<bool> = const { Cell::new(false) };
}

/// Runs `f` with parameters read and visited as if they had no tap.
pub(crate) fn bypass<T>(f: impl FnOnce() -> T) -> T {
    struct Restore(bool);
    impl Drop for Restore {
        fn drop(&mut self) {
            BYPASS.set(self.0);
        }
    }
    let _restore = Restore(BYPASS.replace(true));
    f()
}

/// True inside [`bypass`] on this thread.
pub(super) fn is_bypassed() -> bool {
    BYPASS.get()
}
