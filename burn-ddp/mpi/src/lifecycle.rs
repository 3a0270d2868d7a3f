//! MPI in this process: initialised once, finalized once.
//!
//! MPI cannot be initialised twice, and finalizing it waits for all ranks. So no `drop` finalizes MPI: the end of the
//! process does, and only if no world has failed. One thread initialises and finalizes MPI, as MPI requires; other
//! threads wait for it with a deadline.

use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use burn_ddp_comm::membership::Membership;
use burn_ddp_comm::{Error, Result};

use crate::error::environment;
use crate::ffi::{self, Failure, Requests};

/// Time between two checks of a wait.
const LOOK: Duration = Duration::from_millis(20);
/// Time for threads to drop their groups when the process ends.
const LAST_GROUPS: Duration = Duration::from_secs(2);

struct Process {
    state: Mutex<State>,
    /// Notified at every change of the stage, and when a transport is dropped.
    changed: Condvar,
}

struct State {
    stage: Stage,
    /// Number of transports that exist.
    in_use: usize,
    /// Ranks that used MPI, with the longest time of a collective.
    ranks: Vec<(Arc<Membership>, Duration)>,
    /// Closing messages, to and from the peers of closed groups, that are still under way.
    closing: Vec<Requests<()>>,
}

#[derive(Clone, Debug, PartialEq)]
enum Stage {
    /// MPI has not been needed yet.
    Fresh,
    /// MPI is being initialised.
    Beginning,
    /// MPI can be used. `ours` if this crate initialised it, and so finalizes it.
    Ready {
        ours: bool,
    },
    /// MPI cannot be used, for this reason.
    Failed(String),
    /// The process is ending, and MPI is being finalized.
    Ending,
    Ended,
}

static PROCESS: Process = Process {
    state: Mutex::new(State { stage: Stage::Fresh, in_use: 0, ranks: Vec::new(), closing: Vec::new() }),
    changed: Condvar::new(),
};

fn state() -> MutexGuard<'static, State> {
    PROCESS.state.lock().unwrap_or_else(PoisonError::into_inner)
}

fn enter(stage: Stage) {
    state().stage = stage;
    PROCESS.changed.notify_all();
}

fn wait<'a>(state: MutexGuard<'a, State>, time: Duration) -> MutexGuard<'a, State> {
    PROCESS.changed.wait_timeout(state, time).unwrap_or_else(PoisonError::into_inner).0
}

/// True if MPI was or is being initialised, here or by the program.
pub(crate) fn has_begun() -> bool {
    state().stage != Stage::Fresh || ffi::is_initialized()
}

/// Initialises MPI, unless that was done before.
///
/// # Errors
/// [`Error::Environment`] if MPI cannot be used, or not by threads, or is not initialised within `timeout`; errors of
/// `check`.
pub(crate) fn begin(timeout: Duration, check: &dyn Fn() -> Result<()>) -> Result<()> {
    let deadline = Instant::now().checked_add(timeout);
    let mut state = state();
    if state.stage == Stage::Fresh {
        if ffi::is_finalized() {
            let why = "MPI has been finalized in this process, and cannot be initialised again";
            state.stage = Stage::Failed(why.to_owned());
        } else if ffi::is_initialized() {
            state.stage = usable(false);
        } else {
            let started = thread::Builder::new().name("burn-ddp-mpi".into()).spawn(life);
            started.map_err(|e| environment(format!("no thread for MPI: {e}")))?;
            state.stage = Stage::Beginning;
        }
    }
    loop {
        match &state.stage {
            Stage::Ready { .. } => return Ok(()),
            Stage::Failed(why) => return Err(environment(why.clone())),
            Stage::Ending | Stage::Ended => return Err(too_late()),
            Stage::Fresh | Stage::Beginning => {}
        }
        check()?;
        if deadline.is_some_and(|deadline| Instant::now() >= deadline) {
            let waited = timeout.as_secs_f64();
            return Err(environment(format!(
                "MPI_Init_thread has not returned for {waited} s: do all ranks get there?"
            )));
        }
        state = wait(state, LOOK);
    }
}

/// The thread that initialises MPI and finalizes it.
fn life() {
    let begun = match ffi::init() {
        Ok(()) => usable(true),
        Err(failure) => Stage::Failed(format!("MPI cannot be initialised: {failure}")),
    };
    if begun == (Stage::Ready { ours: true }) && !ffi::at_exit(at_exit) {
        tracing::warn!("MPI will not be finalized: atexit refused the function that finalizes it");
    }
    enter(begun);
    let mut state = state();
    while state.stage != Stage::Ending {
        state = PROCESS.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
    }
    drop(state);
    // Where something else has finalized MPI, nothing is left to do.
    if let Err(failure) = ffi::finalize()
        && !matches!(failure, Failure::Finalized)
    {
        tracing::warn!(%failure, "MPI could not be finalized");
    }
    enter(Stage::Ended);
}

fn usable(ours: bool) -> Stage {
    match ffi::is_for_threads() {
        Ok(true) => Stage::Ready { ours },
        Ok(false) => {
            let library = ffi::library();
            let why = if ours {
                "its build does not support that: install one that does, or use another engine"
            } else {
                "this program initialised it for less: use mpi::initialize_with_threading(Threading::Serialized), or \
                 leave it to burn-ddp"
            };
            Stage::Failed(format!("{library} does not let threads call it by turns (MPI_THREAD_SERIALIZED); {why}"))
        }
        Err(failure) => Stage::Failed(failure.to_string()),
    }
}

/// Lock for steps that MPI allows only one thread at a time on a communicator. Other worlds wait for the lock; each
/// step has a deadline.
pub(crate) fn one_at_a_time() -> MutexGuard<'static, ()> {
    static ONE: Mutex<()> = Mutex::new(());
    ONE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Registers a rank of this process that uses MPI: MPI is finalized only if the world of the rank does not fail.
pub(crate) fn register(membership: &Arc<Membership>, timeout: Duration) {
    state().ranks.push((membership.clone(), timeout));
}

/// Guard of a transport: while it exists, MPI is not finalized.
pub(crate) struct InUse(());

/// Guard of a new transport.
///
/// # Errors
/// If MPI cannot be used any more.
pub(crate) fn in_use() -> Result<InUse> {
    let mut state = state();
    match state.stage {
        Stage::Ready { .. } => {
            state.in_use += 1;
            Ok(InUse(()))
        }
        _ => Err(too_late()),
    }
}

impl Drop for InUse {
    fn drop(&mut self) {
        state().in_use -= 1;
        PROCESS.changed.notify_all();
    }
}

/// Keeps the last messages of a closed group until they are sent and received: `MPI_Finalize` allows none under way.
pub(crate) fn close(requests: Requests<()>) {
    let mut state = state();
    state.closing.push(requests);
    poll_closing(&mut state);
}

fn poll_closing(state: &mut State) {
    let mut completed = Vec::new();
    // After a failure of MPI no message will come.
    state.closing.retain_mut(|requests| requests.poll(&mut completed).is_ok() && !requests.is_empty());
}

/// Finalizes MPI if every rank of this process has dropped its groups and left a world that had not failed. Waits for
/// the other ranks, for as long as a collective may take. Otherwise MPI is not finalized, which the launcher takes as a
/// failure.
extern "C" fn at_exit() {
    let mut state = state();
    if state.stage != (Stage::Ready { ours: true }) {
        return;
    }
    let went_well = |(membership, _): &(Arc<Membership>, Duration)| {
        membership.check().is_ok() && membership.has_left(membership.rank())
    };
    let last_groups = Instant::now() + LAST_GROUPS;
    while state.in_use > 0 && state.ranks.iter().all(went_well) && Instant::now() < last_groups {
        state = wait(state, LOOK);
    }
    if state.in_use > 0 || !state.ranks.iter().all(went_well) {
        return;
    }
    let timeout = state.ranks.iter().map(|(_, timeout)| *timeout).max().unwrap_or(LAST_GROUPS);
    let deadline = Instant::now().checked_add(timeout);
    let is_late = || deadline.is_some_and(|deadline| Instant::now() >= deadline);
    while !state.closing.is_empty() && !is_late() {
        poll_closing(&mut state);
        if !state.closing.is_empty() {
            state = wait(state, Duration::from_millis(1));
        }
    }
    state.stage = Stage::Ending;
    PROCESS.changed.notify_all();
    while state.stage != Stage::Ended && !is_late() {
        state = wait(state, LOOK);
    }
}

fn too_late() -> Error {
    environment("MPI has been finalized in this process, or is being finalized".to_owned())
}
