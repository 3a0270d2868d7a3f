//! A clock that takes a few nanoseconds to read, for use at every call.
//!
//! If the kernel itself keeps time by the processor's time stamp counter, so does this clock; otherwise it reads
//! [`Instant`]. A reading is turned into an [`Instant`] only where one is needed.
#![allow(unsafe_code)]

use std::sync::LazyLock;
use std::time::{Duration, Instant};

/// A moment, as a reading of the clock.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Ticks(pub(crate) u64);

struct Clock {
    /// True if ticks are those of the time stamp counter; otherwise they are nanoseconds since `start`.
    counter: bool,
    start: Instant,
    start_ticks: u64,
}

/// A property of the machine and a point in time, read once; nothing here changes afterwards.
static CLOCK: LazyLock<Clock> = LazyLock::new(|| {
    let counter = counter_keeps_time();
    let start = Instant::now();
    Clock { counter, start, start_ticks: if counter { read_counter() } else { 0 } }
});

impl Clock {
    fn ticks(&self) -> u64 {
        // A nanosecond counter of 64 bits lasts for centuries.
        if self.counter { read_counter() } else { self.start.elapsed().as_nanos() as u64 }
    }

    /// Nanoseconds from the start until now, and how many ticks that took.
    fn span(&self) -> (u128, u64) {
        let ticks = self.ticks().saturating_sub(self.start_ticks);
        (self.start.elapsed().as_nanos(), ticks.max(1))
    }
}

impl Ticks {
    #[inline]
    pub(crate) fn now() -> Ticks {
        Ticks(CLOCK.ticks())
    }

    /// The moment as an [`Instant`]. Never in the future.
    pub(crate) fn instant(self) -> Instant {
        CLOCK.start + nanos(self.0.saturating_sub(CLOCK.start_ticks))
    }

    /// Time since then.
    pub(crate) fn elapsed(self) -> Duration {
        self.instant().elapsed()
    }
}

/// Duration of `ticks` ticks, by the mean tick since the start, so with an error of one reading at most. Never longer
/// than the time since the start.
pub(crate) fn nanos(ticks: u64) -> Duration {
    let (nanos, span) = CLOCK.span();
    Duration::from_nanos((nanos * u128::from(ticks.min(span)) / u128::from(span)) as u64)
}

/// True if the kernel keeps time by the counter: then it runs at one speed in all sleep states, alike on all cores.
#[cfg(all(target_arch = "x86_64", not(miri)))]
fn counter_keeps_time() -> bool {
    let source = std::fs::read_to_string("/sys/devices/system/clocksource/clocksource0/current_clocksource");
    source.is_ok_and(|source| source.trim() == "tsc")
}

#[cfg(all(target_arch = "x86_64", not(miri)))]
#[inline]
fn read_counter() -> u64 {
    // SAFETY: `rdtsc` reads a register. Every x86-64 processor has it, and that the kernel lets user code execute it is
    // established by `counter_keeps_time`: a kernel that keeps time by it offers it to all processes.
    unsafe { core::arch::x86_64::_rdtsc() }
}

#[cfg(any(not(target_arch = "x86_64"), miri))]
fn counter_keeps_time() -> bool {
    false
}

#[cfg(any(not(target_arch = "x86_64"), miri))]
fn read_counter() -> u64 {
    0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_agrees_with_the_other_clock() {
        let (before, ticks, after) = (Instant::now(), Ticks::now(), Instant::now());
        std::thread::sleep(Duration::from_millis(30));
        let slack = Duration::from_millis(1);
        let moment = ticks.instant();
        assert!(moment + slack >= before && moment <= after + slack, "{before:?} {moment:?} {after:?}");
        assert!(ticks.elapsed() + slack >= Duration::from_millis(30));
        let later = Ticks::now();
        assert!(later > ticks && nanos(later.0 - ticks.0) + slack >= Duration::from_millis(30));
        assert!(Ticks(u64::MAX).instant() <= Instant::now() + slack, "never in the future");
    }
}
