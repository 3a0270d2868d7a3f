//! Reads and visits that pass the taps by, as if the model were not wrapped, and maps that step each element by itself.

use std::cell::Cell;

/// Behaviour of taps on a thread.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Taps {
    Work,
    /// As usual, but maps treat each element by itself, so they may step this rank's rows of a sharded parameter.
    StepElements,
    Bypassed,
    /// Bypassed, but for maps: these note that all ranks give the parameter another value.
    Replaced,
}

thread_local! {
    static TAPS: Cell<Taps> = const { Cell::new(Taps::Work) };
}

/// Runs `f`, whose maps treat each element of a parameter by itself.
pub(crate) fn element_wise<T>(f: impl FnOnce() -> T) -> T {
    within(Taps::StepElements, f)
}

/// Runs `f` with parameters read and visited as if they had no tap.
pub(crate) fn bypass<T>(f: impl FnOnce() -> T) -> T {
    within(Taps::Bypassed, f)
}

/// [`bypass`] for an `f` whose maps replace the value of every parameter on all ranks alike.
pub(crate) fn replace<T>(f: impl FnOnce() -> T) -> T {
    within(Taps::Replaced, f)
}

fn within<T>(taps: Taps, f: impl FnOnce() -> T) -> T {
    struct Restore(Taps);
    impl Drop for Restore {
        fn drop(&mut self) {
            TAPS.set(self.0);
        }
    }
    let _restore = Restore(TAPS.replace(taps.max(TAPS.get())));
    f()
}

/// True inside [`bypass`] and [`replace`] on this thread.
pub(crate) fn is_bypassed() -> bool {
    TAPS.get() >= Taps::Bypassed
}

/// True inside [`element_wise`] on this thread.
pub(super) fn steps_elements() -> bool {
    TAPS.get() == Taps::StepElements
}

/// True inside [`replace`] on this thread.
pub(super) fn is_replacing() -> bool {
    TAPS.get() == Taps::Replaced
}
