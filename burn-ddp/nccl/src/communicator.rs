//! One rank's side of an NCCL communicator: how it begins, how calls are made and waited for, how it ends.
//!
//! An NCCL call may go on in the background: this crate polls it until it is done, and checks the world and the
//! deadline in between. Any failure aborts the communicator, which ends its work on the device.
#![allow(unsafe_code)]

use std::ffi::c_int;
use std::fmt;
use std::mem::ManuallyDrop;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use crate::device::Device;
use crate::error::DeviceError;
use crate::nccl::{Config, IN_PROGRESS, Nccl, NcclCalls, RawComm, SUCCESS, UniqueId};
use crate::poison_free_lock::lock;
use crate::process_end;
use crate::stream::Stream;
use crate::wait::{WaitCheck, poll_pause, wait_until};

/// An `ncclComm_t`.
struct Handle(RawComm);

// SAFETY: NCCL allows any thread to use a communicator, one at a time (NCCL user guide, "Thread safety"); it has one
// owner, whose methods that use it take `&mut self`. It is not `Sync`.
unsafe impl Send for Handle {}

/// One rank's side of an `ncclComm_t`.
pub struct Communicator {
    nccl: Nccl,
    device: Device,
    handle: Handle,
    rank: usize,
    size: usize,
    /// True before it is ready and after a failure: dropping it then aborts it.
    broken: bool,
    /// Stream of the last launch. After a failed wait NCCL may still launch on it, on a thread of its own, until an
    /// abort has returned.
    stream: Option<Stream>,
    closed: Closed,
    _live: process_end::Live,
}

/// Tells whether a dropped communicator has been closed: only then does NCCL use nothing any more that it was given.
#[derive(Clone, Debug, Default)]
pub(crate) struct Closed(Arc<AtomicBool>);

impl Closed {
    pub(crate) fn is_over(&self) -> bool {
        self.0.load(Ordering::Acquire)
    }
}

/// Longest wait for the other ranks to finalize a communicator; then this rank aborts its own side. Shorter when the
/// process ends.
const FINALIZE: Duration = Duration::from_secs(60);

impl Communicator {
    /// Makes this rank's side of the communicator `id`. All ranks call it, and it waits for them.
    ///
    /// # Errors
    /// [`DeviceError::InvalidArgument`] unless `rank` is below `size`, which fits in 31 bits; errors of NCCL and of
    /// `check`, after which the communicator is aborted.
    pub fn init(
        (nccl, device): (&Nccl, &Device),
        id: UniqueId,
        (rank, size): (usize, usize),
        blocking: bool,
        check: WaitCheck<'_>,
    ) -> Result<Communicator, DeviceError> {
        if rank >= size || c_int::try_from(size).is_err() {
            return Err(DeviceError::invalid_argument(format!("rank {rank} of a communicator of {size}")));
        }
        device.bind()?;
        let (mut raw, mut config): (RawComm, Config) = (std::ptr::null_mut(), Config::new(blocking));
        // SAFETY: valid pointers to a handle and a configuration, a rank below the size, and the device is current.
        let code =
            unsafe { nccl.calls().comm_init_rank_config(&mut raw, size as c_int, id, rank as c_int, &mut config) };
        if raw.is_null() {
            nccl.check("ncclCommInitRankConfig", raw, code)?;
            return Err(DeviceError::Library("ncclCommInitRankConfig made no communicator".to_owned()));
        }
        let (nccl, device, handle, _live) = (nccl.clone(), device.clone(), Handle(raw), process_end::live());
        let mut communicator = Communicator {
            nccl,
            device,
            handle,
            rank,
            size,
            broken: true,
            stream: None,
            closed: Closed::default(),
            _live,
        };
        let settled = communicator.settle("ncclCommInitRankConfig", code, check);
        process_end::wait_at_exit();
        settled?;
        communicator.broken = false;
        Ok(communicator)
    }

    /// Becomes true once the communicator has been dropped and closed.
    pub(crate) fn closed(&self) -> Closed {
        self.closed.clone()
    }

    /// Makes dropping the communicator abort it.
    pub(crate) fn give_up(&mut self) {
        self.broken = true;
    }

    /// NCCL's asynchronous error, if there is one: code and text.
    pub(crate) fn async_error(&mut self) -> Option<(c_int, String)> {
        let mut state = SUCCESS;
        // SAFETY: a valid out-pointer.
        let code = unsafe { self.calls().comm_get_async_error(self.handle.0, &mut state) };
        let of = |call, code| self.nccl.check(call, self.handle.0, code).err().map(|text| (code, text));
        of("ncclCommGetAsyncError", code).or_else(|| of("NCCL in the background", state))
    }

    pub(crate) fn rank(&self) -> usize {
        self.rank
    }

    pub(crate) fn size(&self) -> usize {
        self.size
    }

    pub(crate) fn device(&self) -> &Device {
        &self.device
    }

    /// The `ncclComm_t`, for callers that hold `&mut self`.
    pub(crate) fn raw(&self) -> RawComm {
        self.handle.0
    }

    pub(crate) fn calls(&self) -> &dyn NcclCalls {
        self.nccl.calls()
    }

    /// Takes the stream of the next launch. Fails unless it belongs to this communicator's device.
    pub(crate) fn launches_on(&mut self, stream: &Stream) -> Result<(), DeviceError> {
        stream.check_device(self.device.ordinal())?;
        if self.broken {
            return Err(DeviceError::Library("an earlier call of the communicator failed".to_owned()));
        }
        self.stream = Some(stream.clone());
        Ok(())
    }

    /// Makes the calls of `launch` as one group, and waits until they are enqueued. `launch` returns the code of a call
    /// that failed.
    pub(crate) fn grouped(
        &mut self,
        what: &str,
        check: WaitCheck<'_>,
        launch: impl FnOnce(&dyn NcclCalls, RawComm) -> Result<(), c_int>,
    ) -> Result<(), DeviceError> {
        self.device.bind()?;
        // SAFETY: no conditions; ended below, on this thread.
        let started = unsafe { self.calls().group_start() };
        self.noted("ncclGroupStart", started)?;
        let launched = launch(self.calls(), self.handle.0);
        // After a failed launch too: otherwise this thread would stay in the group.
        // SAFETY: the group started above.
        let ended = unsafe { self.calls().group_end() };
        self.settle(what, launched.err().unwrap_or(ended), check)
    }

    /// Marks the communicator as broken if `code` is an error.
    pub(crate) fn noted(&mut self, call: &str, code: c_int) -> Result<(), DeviceError> {
        let result = self.nccl.check(call, self.handle.0, code);
        self.broken |= result.is_err();
        result.map_err(DeviceError::Library)
    }

    fn settle(&mut self, call: &str, code: c_int, check: WaitCheck<'_>) -> Result<(), DeviceError> {
        let result = self.settled(call, code, check);
        self.broken |= result.is_err();
        result
    }

    /// Waits until the NCCL call that returned `code` has finished.
    fn settled(&self, call: &str, code: c_int, check: WaitCheck<'_>) -> Result<(), DeviceError> {
        self.nccl.check(call, self.handle.0, code)?;
        if code != IN_PROGRESS {
            return Ok(());
        }
        wait_until(check, || {
            let mut state = SUCCESS;
            // SAFETY: a valid out-pointer.
            let code = unsafe { self.calls().comm_get_async_error(self.handle.0, &mut state) };
            self.nccl.check("ncclCommGetAsyncError", self.handle.0, code)?;
            self.nccl.check(call, self.handle.0, state)?;
            Ok(state != IN_PROGRESS)
        })
    }
}

impl fmt::Debug for Communicator {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Communicator({} of {} on {:?})", self.rank, self.size, self.device)
    }
}

/// Ends the communicator on a thread of its own, since that may wait for other ranks, for the device, or, to free
/// memory, for the kernels of other communicators that are being aborted as well.
impl Drop for Communicator {
    fn drop(&mut self) {
        let handle = Handle(std::mem::replace(&mut self.handle.0, std::ptr::null_mut()));
        let (nccl, broken, closed) = (self.nccl.clone(), self.broken, self.closed.clone());
        // Not destroyed if no thread closes the communicator.
        let stream = ManuallyDrop::new(self.stream.take());
        process_end::wait_at_exit();
        self.device.later("close", move || {
            close(&nccl, handle, broken);
            closed.0.store(true, Ordering::Release);
            drop(ManuallyDrop::into_inner(stream));
        });
    }
}

fn close(nccl: &Nccl, handle: Handle, broken: bool) {
    let Handle(comm) = handle;
    if !broken && finalized(nccl, comm) {
        // SAFETY: `comm` has no other user, and it is finalized.
        let code = unsafe { nccl.calls().comm_destroy(comm) };
        if let Err(why) = nccl.check("ncclCommDestroy", comm, code) {
            tracing::debug!(why, "a communicator could not be destroyed");
        }
        return;
    }
    // SAFETY: `comm` has no other user.
    let code = unsafe { nccl.calls().comm_abort(comm) };
    if let Err(why) = nccl.check("ncclCommAbort", std::ptr::null_mut(), code) {
        tracing::debug!(why, "a communicator could not be aborted");
    }
}

/// Finalizes the communicator together with the other ranks; true if that succeeded.
fn finalized(nccl: &Nccl, comm: RawComm) -> bool {
    // SAFETY: `comm` has no other user.
    let mut state = unsafe { nccl.calls().comm_finalize(comm) };
    let (until, mut pause) = (Instant::now() + FINALIZE, poll_pause());
    while state == IN_PROGRESS && Instant::now() < until && !process_end::is_overdue() {
        pause.wait();
        // SAFETY: a valid out-pointer.
        let code = unsafe { nccl.calls().comm_get_async_error(comm, &mut state) };
        if code != SUCCESS {
            return false;
        }
    }
    state == SUCCESS
}

/// A group's communicator: `None` before its first launch and after a failure. A launch holds the lock; the watchdog
/// and waits take it briefly to read NCCL's error.
pub(crate) type SharedCommunicator = Arc<Mutex<Option<Communicator>>>;

/// Aborts the communicator's work on the device, without waiting for the abort.
pub(crate) fn abort(communicator: &SharedCommunicator) {
    if let Some(mut communicator) = lock(communicator).take() {
        communicator.give_up();
    }
}
