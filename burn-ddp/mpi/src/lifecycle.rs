//! MPI in this process: begun once, ended once.
//!
//! MPI cannot begin again after its end, and ending it waits for all ranks. So no `drop` ends it, but the end of the
//! process does, and only if all went well. One thread begins and ends MPI, as MPI requires; other threads wait for it
//! with a deadline.

use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use burn_ddp_comm::membership::Membership;
use burn_ddp_comm::{Error, Result};

use crate::error::environment;
use crate::ffi::{self, Requests};

/// Time between two checks of a wait whether the world has ended.
const LOOK: Duration = Duration::from_millis(20);
/// Time for threads to drop their groups when the process ends.
const LAST_GROUPS: Duration = Duration::from_secs(2);

struct Process {
    state: Mutex<State>,
    /// Notified at every change of the stage.
    changed: Condvar,
}

struct State {
    stage: Stage,
    /// Number of transports.
    in_use: usize,
    /// Ranks that used MPI, with their longest wait for others.
    ranks: Vec<(Arc<Membership>, Duration)>,
    /// Messages under way by which closed groups say goodbye to their peers, and the peers to them.
    closing: Vec<Requests<()>>,
}

#[derive(Clone, Debug, PartialEq)]
enum Stage {
    /// MPI was not needed yet.
    Fresh,
    /// MPI is being initialised.
    Beginning,
    /// MPI can be used. `ours` if it was begun here, and so is ended here.
    Ready {
        ours: bool,
    },
    /// MPI cannot be used, for this reason.
    Failed(String),
    /// The process is on its way out.
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

/// True if MPI was begun, here or by the program.
pub(crate) fn has_begun() -> bool {
    state().stage != Stage::Fresh || ffi::is_initialized()
}

/// Begins MPI, unless it was begun before.
///
/// # Errors
/// [`Error::Environment`] if it cannot be used by threads, or not at all, or did not begin within `timeout`;
/// errors of `check`.
pub(crate) fn begin(timeout: Duration, check: &dyn Fn() -> Result<()>) -> Result<()> {
    let deadline = Instant::now().checked_add(timeout);
    let mut state = state();
    if state.stage == Stage::Fresh {
        if ffi::is_finalized() {
            state.stage = Stage::Failed("MPI has been finalized in this process, and cannot begin again".to_owned());
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

/// The thread that begins MPI and ends it.
fn life() {
    let begun = match ffi::init() {
        Ok(()) => usable(true),
        Err(failure) => Stage::Failed(format!("MPI cannot begin: {failure}")),
    };
    if begun == (Stage::Ready { ours: true }) && !ffi::at_exit(at_exit) {
        tracing::warn!("MPI will not be finalized: the process has no more room for what is to be done at its end");
    }
    enter(begun);
    let mut state = state();
    while state.stage != Stage::Ending {
        state = PROCESS.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
    }
    drop(state);
    if let Err(failure) = ffi::finalize() {
        tracing::warn!(%failure, "MPI does not end well");
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

/// Lock for steps that MPI allows only one thread at a time on a communicator. Other worlds wait: each step has a
/// deadline.
pub(crate) fn one_at_a_time() -> MutexGuard<'static, ()> {
    static ONE: Mutex<()> = Mutex::new(());
    ONE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Registers a rank of this process that uses MPI: MPI is finalized only if the rank leaves well.
pub(crate) fn register(membership: &Arc<Membership>, timeout: Duration) {
    state().ranks.push((membership.clone(), timeout));
}

/// Guard that keeps MPI from ending.
pub(crate) struct InUse(());

/// # Errors
/// If MPI has ended.
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

/// Keeps the last messages of a closed group until they are sent and received: MPI must have none under way at its end.
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

/// Finalizes MPI if every rank of this process has left a whole world and dropped its groups. Waits for the other
/// ranks, as long as a collective may take. A process that ends otherwise leaves MPI as it is, which its launcher takes
/// as a failure.
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
    environment("MPI has ended in this process".to_owned())
}
