//! The calls of MPI, checked: all `unsafe` of this crate is here.
//!
//! MPI uses the memory of a message until its request is done, long after the call has returned. So [`Requests`] owns
//! every buffer until MPI is through with it, and leaks those of requests that never end. Threads take turns: every
//! call on a communicator or a request holds the lock of `turn`; none of these calls waits.
//!
//! The notes on safety rely on this:
//!
//! - This crate makes a [`Comm`] only after `lifecycle::begin`: MPI is initialised, for threads that take turns.
//!   `lifecycle` finalizes MPI at the end of the process, if no transport is in use, and `turn` refuses calls after any
//!   `MPI_Finalize`.
//! - The constants of `mpi::ffi`, "a constant" below, are immutable statics of mpi-sys, set when the program is loaded.
#![allow(unsafe_code)]

use std::ffi::{c_char, c_int, c_void};
use std::fmt;
use std::ptr::null_mut;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use mpi::ffi;

/// Reason why a call of MPI did not succeed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Failure {
    /// MPI's message, or what is wrong with the arguments.
    Call(String),
    /// MPI was finalized in this process, not by this crate: any further call would abort the process.
    Finalized,
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Failure::Call(message) => f.write_str(message),
            Failure::Finalized => f.write_str(
                "MPI_Finalize was called in this rank's process, and not by burn-ddp: a rank needs MPI until it has \
                 dropped its groups",
            ),
        }
    }
}

type Result<T> = std::result::Result<T, Failure>;

/// Lock that a thread holds during a call of MPI, and never while it waits for anything.
///
/// # Errors
/// [`Failure::Finalized`]. A call during the foreign `MPI_Finalize` is not caught.
fn turn() -> Result<MutexGuard<'static, ()>> {
    static TURN: Mutex<()> = Mutex::new(());
    let turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    if is_finalized() { Err(Failure::Finalized) } else { Ok(turn) }
}

const SUCCESS: c_int = ffi::MPI_SUCCESS as c_int;

fn check(call: &str, code: c_int) -> Result<()> {
    if code == SUCCESS { Ok(()) } else { Err(Failure::Call(format!("{call}: {}", text_of(code)))) }
}

fn text_of(code: c_int) -> String {
    let (mut text, mut len) = (vec![0_u8; ffi::MPI_MAX_ERROR_STRING as usize + 1], 0);
    // SAFETY: MPI writes at most `MPI_MAX_ERROR_STRING` bytes, its closing zero included, to `text`, which has more,
    // and one number to `len`. Any code is allowed.
    let code_of_text = unsafe { ffi::MPI_Error_string(code, text.as_mut_ptr().cast::<c_char>(), &raw mut len) };
    if code_of_text != SUCCESS {
        return format!("error {code}");
    }
    text.truncate(usize::try_from(len).unwrap_or(0));
    String::from_utf8_lossy(&text).trim().to_owned()
}

/// True if MPI was initialised, here or by the program. May be called at any time.
pub(crate) fn is_initialized() -> bool {
    let mut flag = 0;
    // SAFETY: MPI allows this call at any time, from any thread, and writes one number to `flag`.
    unsafe { ffi::MPI_Initialized(&raw mut flag) == SUCCESS && flag != 0 }
}

/// True if MPI was finalized. May be called at any time.
pub(crate) fn is_finalized() -> bool {
    let mut flag = 0;
    // SAFETY: MPI allows this call at any time, from any thread, and writes one number to `flag`.
    unsafe { ffi::MPI_Finalized(&raw mut flag) == SUCCESS && flag != 0 }
}

/// Initialises MPI with its highest thread level: the program may want to call it as well. May block until all ranks
/// do. The caller has checked that MPI was never initialised.
pub(crate) fn init() -> Result<()> {
    let mut provided = 0;
    // SAFETY: MPI may be initialised once per process: `lifecycle` calls this once, on a thread of its own, if MPI was
    // neither initialised nor finalized before. MPI lets both pointers to arguments be null, the level is a constant,
    // and MPI writes one number to `provided`.
    let code = unsafe { ffi::MPI_Init_thread(null_mut(), null_mut(), ffi::RSMPI_THREAD_MULTIPLE, &raw mut provided) };
    check("MPI_Init_thread", code)
}

/// True if threads may call MPI by turns. MPI is initialised.
pub(crate) fn is_for_threads() -> Result<bool> {
    let mut provided = 0;
    // SAFETY: MPI is initialised: `lifecycle` calls this after `init`, or if `is_initialized`. Any thread may call it,
    // and MPI writes one number to `provided`.
    check("MPI_Query_thread", unsafe { ffi::MPI_Query_thread(&raw mut provided) })?;
    // SAFETY: a constant.
    Ok(provided >= unsafe { ffi::RSMPI_THREAD_SERIALIZED })
}

/// Finalizes MPI; blocks until all ranks do. On the thread that initialised MPI, with no message under way.
pub(crate) fn finalize() -> Result<()> {
    if is_finalized() {
        return Err(Failure::Finalized);
    }
    // SAFETY: MPI asks for the thread that initialised it: `lifecycle` calls `init` and this on one thread. No other
    // thread may be in a call of MPI: no transport is in use, and the program must have ended its own calls, as with
    // any finalization. Messages still under way keep their memory: `lifecycle` holds their `Requests` in a static.
    check("MPI_Finalize", unsafe { ffi::MPI_Finalize() })
}

/// The installed MPI, by name and version.
pub(crate) fn library() -> String {
    // SAFETY: a constant.
    let room = usize::try_from(unsafe { ffi::RSMPI_MAX_LIBRARY_VERSION_STRING }).unwrap_or(8192);
    let (mut text, mut len) = (vec![0_u8; room + 1], 0);
    // SAFETY: MPI allows this call at any time, and writes at most `room` bytes to `text`, which has more, and one
    // number to `len`.
    let code = unsafe { ffi::MPI_Get_library_version(text.as_mut_ptr().cast::<c_char>(), &raw mut len) };
    if code != SUCCESS {
        return "an unknown MPI".to_owned();
    }
    text.truncate(usize::try_from(len).unwrap_or(0));
    let text = String::from_utf8_lossy(&text);
    text.split([',', '\n']).next().unwrap_or_default().split_whitespace().collect::<Vec<_>>().join(" ")
}

/// Registers `f` to be called when the process ends by `exit` or by returning from `main`; true if that succeeded.
pub(crate) fn at_exit(f: extern "C" fn()) -> bool {
    unsafe extern "C" {
        fn atexit(f: extern "C" fn()) -> c_int;
    }
    // SAFETY: the declaration is that of the C standard; `f` is code of this program, which is never unloaded, and a
    // panic in an `extern "C"` function aborts instead of unwinding into the C library.
    unsafe { atexit(f) == 0 }
}

/// A communicator whose errors are returned.
#[derive(Debug)]
pub(crate) struct Comm {
    raw: ffi::MPI_Comm,
    rank: c_int,
    size: c_int,
    tag_max: c_int,
    /// True if it was made here, of this process alone. Only such a communicator is freed: freeing others would wait
    /// for all their processes.
    is_own: bool,
}

// SAFETY: `raw` is MPI's handle, which is never followed here. MPI was initialised at least for threads that take turns
// (`is_for_threads`), so any thread may use the handle while it holds the lock of `turn`.
unsafe impl Send for Comm {}
// SAFETY: as above: every method that passes `raw` to MPI, and `Requests`, holds the lock of `turn`; the other fields
// never change.
unsafe impl Sync for Comm {}

impl Comm {
    /// All processes of the job. MPI is initialised.
    pub(crate) fn world() -> Result<Comm> {
        let _turn = turn()?;
        // SAFETY: a constant.
        Comm::new(unsafe { ffi::RSMPI_COMM_WORLD })
    }

    /// A new communicator of this process alone.
    pub(crate) fn of_this_process() -> Result<Comm> {
        let _turn = turn()?;
        // SAFETY: a constant.
        let own = Comm::new(unsafe { ffi::RSMPI_COMM_SELF })?;
        let mut raw = own.raw;
        // SAFETY: `own` is MPI_COMM_SELF, which is valid while MPI is initialised; the lock of `turn` is held. MPI
        // writes the new handle to `raw`. Only this process takes part, so the call waits for no other.
        check("MPI_Comm_dup", unsafe { ffi::MPI_Comm_dup(own.raw, &raw mut raw) })?;
        let mut comm = Comm::new(raw)?;
        comm.is_own = true;
        Ok(comm)
    }

    /// `raw` is a valid communicator, and the caller holds the lock of `turn`.
    fn new(raw: ffi::MPI_Comm) -> Result<Comm> {
        let (mut rank, mut size) = (0, 0);
        // SAFETY: `raw` is valid and the lock of `turn` is held, which all three callers see to: they pass a constant
        // or what a duplication has completed. The error handler is a constant.
        check("MPI_Comm_set_errhandler", unsafe { ffi::MPI_Comm_set_errhandler(raw, ffi::RSMPI_ERRORS_RETURN) })?;
        // SAFETY: `raw` as above; MPI writes one number to `rank`.
        check("MPI_Comm_rank", unsafe { ffi::MPI_Comm_rank(raw, &raw mut rank) })?;
        // SAFETY: `raw` as above; MPI writes one number to `size`.
        check("MPI_Comm_size", unsafe { ffi::MPI_Comm_size(raw, &raw mut size) })?;
        Ok(Comm { raw, rank, size, tag_max: tag_max()?, is_own: false })
    }

    /// Rank of this process in the communicator.
    pub(crate) fn rank(&self) -> c_int {
        self.rank
    }

    /// Number of processes of the communicator.
    pub(crate) fn size(&self) -> c_int {
        self.size
    }

    /// The highest tag that a message can have.
    pub(crate) fn tag_max(&self) -> c_int {
        self.tag_max
    }

    /// Begins to duplicate the communicator, together with its other processes.
    pub(crate) fn duplicate(&self) -> Result<Duplication> {
        let _turn = turn()?;
        // Boxed and leaked: MPI writes to it at the end, which may never come. A few bytes per world.
        // SAFETY: constants.
        let state = Box::leak(Box::new(unsafe { (ffi::RSMPI_COMM_NULL, ffi::RSMPI_REQUEST_NULL) }));
        // SAFETY: `self.raw` is valid, as `Comm::new` got it, and the lock of `turn` is held. MPI writes to `state`,
        // now and when the duplication is complete: it is leaked, and only its `Duplication` uses it.
        check("MPI_Comm_idup", unsafe { ffi::MPI_Comm_idup(self.raw, &raw mut state.0, &raw mut state.1) })?;
        Ok(Duplication(state))
    }

    fn check_peer(&self, peer: c_int, tag: c_int) -> Result<()> {
        if (0..self.size).contains(&peer) && (0..=self.tag_max).contains(&tag) {
            return Ok(());
        }
        Err(Failure::Call(format!("process {peer} of {}, tag {tag} of {}", self.size, self.tag_max)))
    }
}

impl Drop for Comm {
    fn drop(&mut self) {
        if !self.is_own {
            return;
        }
        let Ok(_turn) = turn() else { return };
        // SAFETY: `self.raw` is a duplicate that `of_this_process` made, valid and freed only here, and the lock of
        // `turn` is held. `Requests` hold this object by an `Arc`, so no new message can begin; MPI itself keeps the
        // communicator until those under way are done.
        unsafe { ffi::MPI_Comm_free(&raw mut self.raw) };
    }
}

fn tag_max() -> Result<c_int> {
    let (mut value, mut flag) = (null_mut::<c_int>(), 0);
    // SAFETY: a constant.
    let world = unsafe { ffi::RSMPI_COMM_WORLD };
    // SAFETY: MPI_COMM_WORLD is valid while MPI is initialised, and the caller, `Comm::new`, holds the lock of `turn`.
    // For this key MPI writes the address of an `int` of its own to `value` if it sets `flag`.
    let code = unsafe {
        ffi::MPI_Comm_get_attr(world, ffi::MPI_TAG_UB as c_int, (&raw mut value).cast::<c_void>(), &raw mut flag)
    };
    check("MPI_Comm_get_attr", code)?;
    if flag == 0 || value.is_null() {
        return Ok(32767); // MPI guarantees this much
    }
    // SAFETY: MPI set the flag and an address that is not null: that of an `int` which MPI never changes, and which
    // lives until MPI is finalized, for which the lock of `turn` was checked.
    Ok(unsafe { *value })
}

/// A communicator that is being made.
pub(crate) struct Duplication(&'static mut (ffi::MPI_Comm, ffi::MPI_Request));

impl Duplication {
    /// The new communicator, if it is complete.
    pub(crate) fn test(&mut self) -> Result<Option<Comm>> {
        let _turn = turn()?;
        let (mut flag, mut status) = (0, no_status());
        // SAFETY: the request is that of `MPI_Comm_idup`, or the null request once it is complete; both may be tested.
        // `&mut self` and the lock of `turn` keep others from it. MPI writes to `flag` and `status`.
        check("MPI_Comm_idup", unsafe { ffi::MPI_Test(&raw mut self.0.1, &raw mut flag, &raw mut status) })?;
        if flag == 0 { Ok(None) } else { Comm::new(self.0.0).map(Some) }
    }
}

/// Messages under way, each with its memory and with a key of type `K`.
pub(crate) struct Requests<K> {
    comm: Arc<Comm>,
    requests: Vec<ffi::MPI_Request>,
    /// The message of each request.
    messages: Vec<Message<K>>,
    /// Memory for the answers of `MPI_Testsome`, reused.
    indices: Vec<c_int>,
    statuses: Vec<ffi::MPI_Status>,
}

struct Message<K> {
    key: K,
    buffer: Vec<u8>,
    receives: bool,
}

/// A message that was sent or received.
pub(crate) struct Completed<K> {
    pub(crate) key: K,
    pub(crate) buffer: Vec<u8>,
    /// Number of bytes received; 0 for a message that was sent.
    pub(crate) len: Result<usize>,
}

// SAFETY: the requests are MPI's handles, which are never followed here. MPI lets any thread test or cancel a request,
// by turns: `send`, `receive`, `poll` and `drop` hold the lock of `turn`. Everything else is owned, and `K` is `Send`.
unsafe impl<K: Send> Send for Requests<K> {}

impl<K> Requests<K> {
    pub(crate) fn new(comm: Arc<Comm>) -> Requests<K> {
        Requests { comm, requests: Vec::new(), messages: Vec::new(), indices: Vec::new(), statuses: Vec::new() }
    }

    pub(crate) fn comm(&self) -> &Arc<Comm> {
        &self.comm
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.requests.is_empty()
    }

    /// Begins to send the first `len` bytes of `buffer`.
    pub(crate) fn send(&mut self, to: c_int, tag: c_int, buffer: Vec<u8>, len: usize, key: K) -> Result<()> {
        self.comm.check_peer(to, tag)?;
        let _turn = turn()?;
        let (count, mut request) = (count(len.min(buffer.len()))?, null_request());
        // SAFETY: `check_peer` has checked rank and tag, `self.comm` is valid, and the lock of `turn` is held. MPI
        // reads `count` bytes, at most the length of `buffer`, until the request is done. Until `poll` has found it
        // done, `push` keeps `buffer` unchanged; `drop` leaks it if that never comes.
        let code = unsafe {
            let bytes = buffer.as_ptr().cast::<c_void>();
            ffi::MPI_Isend(bytes, count, ffi::RSMPI_UINT8_T, to, tag, self.comm.raw, &raw mut request)
        };
        check("MPI_Isend", code)?;
        self.push(request, Message { key, buffer, receives: false });
        Ok(())
    }

    /// Begins to receive up to `len` bytes into `buffer`.
    pub(crate) fn receive(&mut self, from: c_int, tag: c_int, mut buffer: Vec<u8>, len: usize, key: K) -> Result<()> {
        self.comm.check_peer(from, tag)?;
        let _turn = turn()?;
        let (count, mut request) = (count(len.min(buffer.len()))?, null_request());
        // SAFETY: as in `send`; MPI writes at most `count` bytes to `buffer`, which nothing else reads or writes until
        // the request is done.
        let code = unsafe {
            let bytes = buffer.as_mut_ptr().cast::<c_void>();
            ffi::MPI_Irecv(bytes, count, ffi::RSMPI_UINT8_T, from, tag, self.comm.raw, &raw mut request)
        };
        check("MPI_Irecv", code)?;
        self.push(request, Message { key, buffer, receives: true });
        Ok(())
    }

    fn push(&mut self, request: ffi::MPI_Request, message: Message<K>) {
        self.requests.push(request);
        self.messages.push(message);
    }

    /// Adds finished messages to `completed`, in the order of their begin. Lets MPI make progress, never waits.
    pub(crate) fn poll(&mut self, completed: &mut Vec<Completed<K>>) -> Result<()> {
        let under_way = self.requests.len();
        if under_way == 0 {
            return Ok(());
        }
        let _turn = turn()?;
        let mut done = 0;
        self.indices.resize(under_way, 0);
        self.statuses.resize_with(under_way, no_status);
        // SAFETY: the lock of `turn` is held. `requests` are `under_way` requests that `MPI_Isend` and `MPI_Irecv`
        // returned and that are not done: those done are removed below. MPI writes at most as many indices and
        // statuses, for which both vectors were resized, and one number to `done`.
        let code = unsafe {
            ffi::MPI_Testsome(
                count(under_way)?,
                self.requests.as_mut_ptr(),
                &raw mut done,
                self.indices.as_mut_ptr(),
                self.statuses.as_mut_ptr(),
            )
        };
        let in_status = code == ffi::MPI_ERR_IN_STATUS as c_int;
        if !in_status {
            check("MPI_Testsome", code)?;
        }
        // `MPI_UNDEFINED`, which is negative, if there are no requests.
        let done = usize::try_from(done).unwrap_or(0).min(under_way);
        let nth_of = |index: &c_int| usize::try_from(*index).ok().filter(|nth| *nth < under_way);
        let mut order: Vec<(usize, usize)> =
            self.indices[..done].iter().enumerate().filter_map(|(at, index)| Some((nth_of(index)?, at))).collect();
        order.sort_unstable();
        let mut results = order.iter().map(|(nth, at)| (*nth, self.outcome(*nth, &self.statuses[*at], in_status)));
        let mut results: Vec<_> = results.by_ref().collect();
        // From the back, so that a removal does not shift those that follow.
        let first = completed.len();
        while let Some((nth, len)) = results.pop() {
            self.requests.remove(nth);
            let Message { key, buffer, .. } = self.messages.remove(nth);
            completed.push(Completed { key, buffer, len });
        }
        completed[first..].reverse();
        Ok(())
    }

    fn outcome(&self, nth: usize, status: &ffi::MPI_Status, in_status: bool) -> Result<usize> {
        if in_status {
            check("MPI_Testsome", status.MPI_ERROR)?;
        }
        if self.messages[nth].receives { length(status) } else { Ok(0) }
    }
}

/// Messages are under way only after an error. Cancels receives, and leaks memory that MPI may still touch.
impl<K> Drop for Requests<K> {
    fn drop(&mut self) {
        if let Ok(_turn) = turn() {
            for (request, _) in self.requests.iter_mut().zip(&self.messages).filter(|(_, message)| message.receives) {
                // SAFETY: the lock of `turn` is held, and `request` is a receive that is not done, or `poll` would have
                // removed it; after a failed `MPI_Testsome` it may be the null request, which MPI refuses. A cancelled
                // request stays valid until it is tested, as below.
                unsafe { ffi::MPI_Cancel(request) };
            }
        }
        let mut completed = Vec::new();
        // A request that can be cancelled ends at once.
        for _ in 0..3 {
            if self.poll(&mut completed).is_err() {
                break;
            }
        }
        // MPI may use the memory of the other requests at any time: it is never freed.
        self.messages.drain(..).for_each(|message| std::mem::forget(message.buffer));
    }
}

fn count(len: usize) -> Result<c_int> {
    c_int::try_from(len).map_err(|_| Failure::Call(format!("{len} is more than MPI can count to")))
}

fn length(status: &ffi::MPI_Status) -> Result<usize> {
    let mut len = 0;
    // SAFETY: `status` is one of those that `MPI_Testsome` has filled in, for a message of this type, and the caller,
    // `poll`, holds the lock of `turn`. The type is a constant, and MPI writes one number to `len`.
    check("MPI_Get_count", unsafe { ffi::MPI_Get_count(status, ffi::RSMPI_UINT8_T, &raw mut len) })?;
    usize::try_from(len).map_err(|_| Failure::Call(format!("MPI_Get_count: {len}")))
}

fn null_request() -> ffi::MPI_Request {
    // SAFETY: a constant.
    unsafe { ffi::RSMPI_REQUEST_NULL }
}

fn no_status() -> ffi::MPI_Status {
    // SAFETY: MPICH and Open MPI declare `MPI_Status` as a struct of integers, of which zeros are a valid value.
    unsafe { std::mem::zeroed() }
}
