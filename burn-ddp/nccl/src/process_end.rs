//! The end of the process: `exit` runs the destructors of NCCL and of the driver, which take memory away from threads
//! that are in functions of these libraries: the process then dies by SIGSEGV after its work is done.
#![allow(unsafe_code)]

use std::ffi::c_int;
use std::sync::{Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

use crate::poison_free_lock::lock;

/// Longest time for which the end of the process waits for threads of this crate.
const PATIENCE: Duration = Duration::from_secs(10);

/// Part of that time for communicators that no thread is closing yet. Another thread may be about to drop them; or
/// `std::process::exit` was called, which drops nothing.
const FOR_OWNERS: Duration = Duration::from_secs(1);

/// Part of that time for which a communicator waits for other ranks.
const FOR_RANKS: Duration = Duration::from_secs(5);

static STATE: Mutex<State> = Mutex::new(State { users: 0, communicators: 0, ending: None, over: false });
static CHANGED: Condvar = Condvar::new();

struct State {
    /// Threads that release what the libraries have made, or look at it: threads that no caller waits for. (A thread in
    /// a collective belongs to the program.)
    users: usize,
    /// Communicators that are not dropped yet.
    communicators: usize,
    /// Time at which `exit` was called.
    ending: Option<Instant>,
    /// True once the end has waited: the libraries must not be used any more.
    over: bool,
}

/// Use of the libraries by a thread, for which the end of the process waits.
pub(crate) struct InUse(());

/// A communicator that is not dropped yet.
pub(crate) struct Live(());

/// Begins a use of the libraries; `None` if the process has ended, which frees all that it has.
pub(crate) fn in_use() -> Option<InUse> {
    let mut state = lock(&STATE);
    if state.over {
        return None;
    }
    state.users += 1;
    Some(InUse(()))
}

/// Notes a new communicator.
pub(crate) fn live() -> Live {
    lock(&STATE).communicators += 1;
    Live(())
}

/// Makes `exit` wait for the threads and communicators of this crate before it runs the destructors of what the
/// libraries have made until now: functions run in reverse order of their registration. Called when a communicator is
/// ready, and again before it is closed, since NCCL makes more in its first collectives.
pub(crate) fn wait_at_exit() {
    unsafe extern "C" {
        fn atexit(function: extern "C" fn()) -> c_int;
    }
    // SAFETY: a function of the C library, whose argument lives as long as the process.
    if unsafe { atexit(end) } != 0 {
        tracing::debug!("the end of the process will not wait for NCCL");
    }
}

/// True if the process has been ending for so long that no thread should wait for other ranks any more.
pub(crate) fn is_overdue() -> bool {
    lock(&STATE).ending.is_some_and(|since| since.elapsed() > FOR_RANKS)
}

impl Drop for InUse {
    fn drop(&mut self) {
        lock(&STATE).users -= 1;
        CHANGED.notify_all();
    }
}

impl Drop for Live {
    fn drop(&mut self) {
        lock(&STATE).communicators -= 1;
        CHANGED.notify_all();
    }
}

extern "C" fn end() {
    let start = Instant::now();
    let mut state = lock(&STATE);
    // It may be registered several times.
    if state.over {
        return;
    }
    state.ending = Some(start);
    while state.users > 0 || state.communicators > 0 {
        let patience = if state.users > 0 { PATIENCE } else { FOR_OWNERS };
        let Some(rest) = patience.checked_sub(start.elapsed()) else { break };
        state = CHANGED.wait_timeout(state, rest).unwrap_or_else(PoisonError::into_inner).0;
    }
    state.over = true;
}

#[cfg(test)]
mod tests {
    use std::process::{Command, exit};
    use std::{env, thread};

    use super::*;

    const CASE: &str = "TEST_OF_PROCESS_END";
    const CLOSING: Duration = Duration::from_millis(300);

    /// Runs this test's program again, which ends by `exit` in the middle of a close, before a thread drops a
    /// communicator, or with one that nobody drops.
    #[test]
    fn the_end_waits_for_threads_that_close_communicators() {
        wait_at_exit();
        let close = |state: Box<dyn Send>| {
            thread::spawn(move || {
                thread::sleep(CLOSING);
                println!("closed");
                drop(state);
            })
        };
        match env::var(CASE).as_deref() {
            Ok("closing") => drop(close(Box::new(in_use().unwrap()))),
            Ok("held by a thread") => drop(close(Box::new(live()))),
            Ok(_) => {
                wait_at_exit();
                std::mem::forget(live());
            }
            Err(_) => {
                for (case, closed) in [("closing", true), ("held by a thread", true), ("forgotten", false)] {
                    let mut again = Command::new(env::current_exe().unwrap());
                    again.args(["process_end", "--nocapture"]).env(CASE, case);
                    let (start, output) = (Instant::now(), again.output().unwrap());
                    let text = String::from_utf8_lossy(&output.stdout);
                    assert!(output.status.success(), "{case}: {output:?}");
                    assert_eq!(text.contains("closed"), closed, "{case}: {text}");
                    let took = start.elapsed();
                    assert!(closed || took >= FOR_OWNERS, "another thread could have dropped it");
                    assert!(closed || took < FOR_OWNERS * 2, "it waits once: {took:?}");
                }
                return;
            }
        }
        exit(0);
    }
}
