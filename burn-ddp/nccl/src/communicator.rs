//! One rank's side of an NCCL communicator: checks, the foreign call, its result.
//!
//! A communicator does not block: each call may go on in the background and is waited for with a look at the world and at the clock. On
//! any failure it is aborted, which ends what it does on the device.
#![allow(unsafe_code)]

use std::ffi::{c_int, c_void};
use std::fmt;
use std::time::{Duration, Instant};

use burn_ddp_comm::{DType, Error, ReduceOp};

use crate::device::{Device, Region, Stream};
use crate::nccl::{
    Config, IN_PROGRESS, Nccl, NcclCalls, RawComm, SCALAR_HOST_IMMEDIATE, SUCCESS, UniqueId, dtype_code, op_code,
};
use crate::pause::Pause;

/// Why a communicator did not do what was asked.
#[derive(Clone, Debug, PartialEq)]
pub enum Fault {
    /// NCCL or the driver says so.
    Device(String),
    /// The world has ended, or the deadline has passed.
    World(Error),
}

impl From<String> for Fault {
    fn from(text: String) -> Fault {
        Fault::Device(text)
    }
}

impl From<Error> for Fault {
    fn from(error: Error) -> Fault {
        Fault::World(error)
    }
}

/// Whether to wait on: an error ends the wait.
pub type Alive<'a> = &'a dyn Fn() -> Result<(), Error>;

/// How elements become one.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum How {
    /// By an op; the mean is NCCL's, which multiplies by 1/n before it adds.
    Op(ReduceOp),
    /// The sum of what the ranks have, each multiplied by its own factor first. Floats only.
    Scaled(f64),
}

/// An `ncclComm_t`.
struct Handle(RawComm);

// SAFETY: NCCL allows any thread to use a communicator, one at a time (NCCL user guide, "Thread safety"); it has one owner, whose methods
// that use it take `&mut self`. It is not `Sync`.
unsafe impl Send for Handle {}

/// A communicator.
pub struct Communicator {
    nccl: Nccl,
    device: Device,
    handle: Handle,
    rank: usize,
    size: usize,
    /// Something went wrong, or is to be given up: it ends by an abort.
    broken: bool,
}

/// How long the others may take to end a communicator, after which this rank ends it alone. Nobody waits for that.
const FINALIZE: Duration = Duration::from_secs(60);

impl Communicator {
    /// Makes this rank's side of the communicator `id`, when the other ranks do.
    ///
    /// # Errors
    /// What NCCL or `alive` says; then it is aborted.
    pub fn init(
        (nccl, device): (&Nccl, &Device),
        id: UniqueId,
        (rank, size): (usize, usize),
        blocking: bool,
        alive: Alive<'_>,
    ) -> Result<Communicator, Fault> {
        if rank >= size || c_int::try_from(size).is_err() {
            return Err(Fault::Device(format!("rank {rank} of a communicator of {size}")));
        }
        device.bind()?;
        let (mut raw, mut config): (RawComm, Config) = (std::ptr::null_mut(), Config::new(blocking));
        // SAFETY: places for a handle and a configuration, a rank below the size, and the device is current.
        let code =
            unsafe { nccl.calls().comm_init_rank_config(&mut raw, size as c_int, id, rank as c_int, &mut config) };
        if raw.is_null() {
            nccl.check("ncclCommInitRankConfig", raw, code)?;
            return Err(Fault::Device("ncclCommInitRankConfig made no communicator".to_owned()));
        }
        let mut communicator =
            Communicator { nccl: nccl.clone(), device: device.clone(), handle: Handle(raw), rank, size, broken: true };
        communicator.settle("ncclCommInitRankConfig", code, alive)?;
        communicator.broken = false;
        Ok(communicator)
    }

    /// It is not to be used any more: aborted when it is dropped.
    pub(crate) fn give_up(&mut self) {
        self.broken = true;
    }

    /// Whether NCCL found an error in what goes on in the background; `Some` of its code and text.
    pub(crate) fn async_error(&mut self) -> Option<(c_int, String)> {
        let mut state = SUCCESS;
        // SAFETY: a place for an int.
        let code = unsafe { self.calls().comm_get_async_error(self.handle.0, &mut state) };
        let of = |call, code| self.nccl.check(call, self.handle.0, code).err().map(|text| (code, text));
        of("ncclCommGetAsyncError", code).or_else(|| of("NCCL in the background", state))
    }

    /// Reduces each first region, over all ranks, into the second, which may be the same.
    ///
    /// # Errors
    /// What was passed and cannot be, or what NCCL or `alive` says.
    pub fn all_reduce(
        &mut self,
        stream: &Stream,
        pieces: &[(Region, Region)],
        (dtype, how): (DType, How),
        alive: Alive<'_>,
    ) -> Result<(), Fault> {
        for (input, output) in pieces {
            self.check_pair(dtype, *input, *output, 1, 1)?;
        }
        let op = self.op(dtype, how)?;
        let launched = self.grouped("ncclAllReduce", alive, |calls, comm| {
            pieces.iter().try_for_each(|(input, output)| {
                let count = input.len_bytes / dtype.size_bytes();
                // SAFETY: both regions are memory of this device with room for `count` elements, by the check above.
                accepted(unsafe {
                    calls.all_reduce(at(*input), at(*output), count, dtype_code(dtype), op, comm, stream.raw())
                })
            })
        });
        if launched.is_ok() {
            self.release(op, how);
        }
        launched
    }

    /// Reduces `input` over all ranks into `output` of `root`; the others' output is not touched.
    ///
    /// # Errors
    /// Those of [`all_reduce`](Self::all_reduce).
    pub fn reduce(
        &mut self,
        stream: &Stream,
        (input, output): (Region, Region),
        (dtype, op): (DType, ReduceOp),
        root: usize,
        alive: Alive<'_>,
    ) -> Result<(), Fault> {
        self.check_pair(dtype, input, output, 1, 1)?;
        self.check_rank(root)?;
        let count = input.len_bytes / dtype.size_bytes();
        self.grouped("ncclReduce", alive, |calls, comm| {
            let (dtype, op, root) = (dtype_code(dtype), op_code(op), root as c_int);
            // SAFETY: both regions are memory of this device with room for `count` elements, and the root exists.
            accepted(unsafe { calls.reduce(at(input), at(output), count, dtype, op, root, comm, stream.raw()) })
        })
    }

    /// Copies the first region of `roots[..].0` to the second one of all ranks, for each root.
    ///
    /// # Errors
    /// Those of [`all_reduce`](Self::all_reduce).
    pub fn broadcast(
        &mut self,
        stream: &Stream,
        copies: &[(usize, Region, Region)],
        alive: Alive<'_>,
    ) -> Result<(), Fault> {
        for (root, input, output) in copies {
            self.check_rank(*root)?;
            // Only the root's input is read.
            let input = if *root == self.rank { *input } else { *output };
            self.check_pair(DType::U8, input, *output, 1, 1)?;
        }
        self.grouped("ncclBroadcast", alive, |calls, comm| {
            copies.iter().try_for_each(|(root, input, output)| {
                let (count, root) = (output.len_bytes, *root as c_int);
                // SAFETY: what is read and what is written are memory of this device with `count` bytes, and the root exists.
                accepted(unsafe {
                    calls.broadcast(at(*input), at(*output), count, dtype_code(DType::U8), root, comm, stream.raw())
                })
            })
        })
    }

    /// Copies `input` of rank `r` to row `r` of `output`, `[size, n]`.
    ///
    /// # Errors
    /// Those of [`all_reduce`](Self::all_reduce).
    pub fn all_gather(
        &mut self,
        stream: &Stream,
        input: Region,
        output: Region,
        alive: Alive<'_>,
    ) -> Result<(), Fault> {
        self.check_pair(DType::U8, input, output, 1, self.size)?;
        self.grouped("ncclAllGather", alive, |calls, comm| {
            let (count, dtype) = (input.len_bytes, dtype_code(DType::U8));
            // SAFETY: the input has `count` bytes and the output that for each rank, in memory of this device.
            accepted(unsafe { calls.all_gather(at(input), at(output), count, dtype, comm, stream.raw()) })
        })
    }

    /// Reduces `input`, `[size, n]`, and leaves row `rank` in `output`.
    ///
    /// # Errors
    /// Those of [`all_reduce`](Self::all_reduce).
    pub fn reduce_scatter(
        &mut self,
        stream: &Stream,
        (input, output): (Region, Region),
        (dtype, op): (DType, ReduceOp),
        alive: Alive<'_>,
    ) -> Result<(), Fault> {
        self.check_pair(dtype, input, output, self.size, 1)?;
        let count = output.len_bytes / dtype.size_bytes();
        self.grouped("ncclReduceScatter", alive, |calls, comm| {
            let (dtype, op) = (dtype_code(dtype), op_code(op));
            // SAFETY: the output has room for `count` elements and the input that for each rank, in memory of this device.
            accepted(unsafe { calls.reduce_scatter(at(input), at(output), count, dtype, op, comm, stream.raw()) })
        })
    }

    /// Sends each region of `sends` to its rank and fills each of `receives` from its rank, all at the same time. What a rank sends to
    /// itself it must receive.
    ///
    /// # Errors
    /// Those of [`all_reduce`](Self::all_reduce).
    pub fn exchange(
        &mut self,
        stream: &Stream,
        sends: &[(usize, Region)],
        receives: &[(usize, Region)],
        alive: Alive<'_>,
    ) -> Result<(), Fault> {
        for (peer, region) in sends.iter().chain(receives) {
            self.check_rank(*peer)?;
            self.check_region(DType::U8, *region)?;
        }
        self.grouped("ncclSend and ncclRecv", alive, |calls, comm| {
            let dtype = dtype_code(DType::U8);
            sends.iter().try_for_each(|(peer, region)| {
                // SAFETY: the region is memory of this device, and the peer exists.
                accepted(unsafe {
                    calls.send(at(*region), region.len_bytes, dtype, *peer as c_int, comm, stream.raw())
                })
            })?;
            receives.iter().try_for_each(|(peer, region)| {
                // SAFETY: as above.
                accepted(unsafe {
                    calls.recv(at(*region), region.len_bytes, dtype, *peer as c_int, comm, stream.raw())
                })
            })
        })
    }

    fn calls(&self) -> &dyn NcclCalls {
        self.nccl.calls()
    }

    fn check_rank(&self, rank: usize) -> Result<(), String> {
        if rank < self.size { Ok(()) } else { Err(format!("rank {rank} of a communicator of {}", self.size)) }
    }

    fn check_region(&self, dtype: DType, region: Region) -> Result<(), String> {
        let Region { pointer, len_bytes, ordinal } = region;
        if ordinal != self.device.ordinal() {
            return Err(format!("memory of device {ordinal} for a communicator on device {}", self.device.ordinal()));
        }
        let size = dtype.size_bytes();
        if !len_bytes.is_multiple_of(size) || !pointer.is_multiple_of(size as u64) {
            return Err(format!("{len_bytes} bytes at {pointer:#x} are not {dtype} elements"));
        }
        if pointer == 0 && len_bytes > 0 {
            return Err(format!("{len_bytes} bytes at address 0"));
        }
        Ok(())
    }

    /// Whether the regions have `rows_in` and `rows_out` times the same number of elements.
    fn check_pair(
        &self,
        dtype: DType,
        input: Region,
        output: Region,
        rows_in: usize,
        rows_out: usize,
    ) -> Result<(), String> {
        self.check_region(dtype, input)?;
        self.check_region(dtype, output)?;
        if input.len_bytes.checked_mul(rows_out) != output.len_bytes.checked_mul(rows_in) {
            return Err(format!("an input of {} bytes for an output of {}", input.len_bytes, output.len_bytes));
        }
        Ok(())
    }

    /// NCCL's number of a way to reduce; to be [released](Self::release).
    fn op(&mut self, dtype: DType, how: How) -> Result<c_int, Fault> {
        let factor = match how {
            How::Op(op) if op.supports(dtype) => return Ok(op_code(op)),
            How::Op(op) => return Err(Fault::Device(format!("{op} of {dtype}"))),
            How::Scaled(factor) => factor,
        };
        let mut scalar = scalar(dtype, factor).ok_or_else(|| format!("a factor for {dtype}"))?;
        let mut op = 0;
        // SAFETY: a place for the op, and a scalar of the type, which NCCL reads before it returns.
        let code = unsafe {
            let (op, scalar) = (&mut op, scalar.as_mut_ptr().cast::<c_void>());
            let comm = self.handle.0;
            self.calls().red_op_create_pre_mul_sum(op, scalar, dtype_code(dtype), SCALAR_HOST_IMMEDIATE, comm)
        };
        self.noted("ncclRedOpCreatePreMulSum", code)?;
        Ok(op)
    }

    /// An op may go as soon as the calls that were given it have returned.
    fn release(&mut self, op: c_int, how: How) {
        if let How::Scaled(_) = how {
            // SAFETY: made by `op`, and released once.
            unsafe { self.calls().red_op_destroy(op, self.handle.0) };
        }
    }

    /// Makes the calls of `launch` as one, and waits until they are enqueued. `launch` yields the code of a call that fails.
    fn grouped(
        &mut self,
        what: &str,
        alive: Alive<'_>,
        launch: impl FnOnce(&dyn NcclCalls, RawComm) -> Result<(), c_int>,
    ) -> Result<(), Fault> {
        self.device.bind()?;
        // SAFETY: no conditions; ended below, on this thread.
        let started = unsafe { self.calls().group_start() };
        self.noted("ncclGroupStart", started)?;
        let launched = launch(self.calls(), self.handle.0);
        // In any case, else this thread would stay in the group.
        // SAFETY: what was started above.
        let ended = unsafe { self.calls().group_end() };
        self.settle(what, launched.err().unwrap_or(ended), alive)
    }

    /// Notes a failure.
    fn noted(&mut self, call: &str, code: c_int) -> Result<(), Fault> {
        let result = self.nccl.check(call, self.handle.0, code);
        self.broken |= result.is_err();
        result.map_err(Fault::Device)
    }

    fn settle(&mut self, call: &str, code: c_int, alive: Alive<'_>) -> Result<(), Fault> {
        let result = self.settled(call, code, alive);
        self.broken |= result.is_err();
        result
    }

    /// Waits until a call that returned `code` is through.
    fn settled(&self, call: &str, code: c_int, alive: Alive<'_>) -> Result<(), Fault> {
        self.nccl.check(call, self.handle.0, code)?;
        let (mut state, mut pause) = (code, Pause::new());
        while state == IN_PROGRESS {
            // SAFETY: a place for an int.
            let code = unsafe { self.calls().comm_get_async_error(self.handle.0, &mut state) };
            self.nccl.check("ncclCommGetAsyncError", self.handle.0, code)?;
            self.nccl.check(call, self.handle.0, state)?;
            if state == IN_PROGRESS {
                alive()?;
                pause.wait();
            }
        }
        Ok(())
    }
}

/// The result of one call of several.
fn accepted(code: c_int) -> Result<(), c_int> {
    if code == SUCCESS || code == IN_PROGRESS { Ok(()) } else { Err(code) }
}

/// Where a region begins, as NCCL wants it.
fn at(region: Region) -> *mut c_void {
    region.pointer as usize as *mut c_void
}

/// A number as an element of `dtype`, in bytes; `None` if that is not a float. Rounded to the type, which in bf16 is 1 part in 256.
fn scalar(dtype: DType, factor: f64) -> Option<[u8; 8]> {
    let mut bytes = [0; 8];
    match dtype {
        DType::F64 => bytes = factor.to_le_bytes(),
        DType::F32 => bytes[..4].copy_from_slice(&(factor as f32).to_le_bytes()),
        DType::F16 => bytes[..2].copy_from_slice(&half::f16::from_f64(factor).to_le_bytes()),
        DType::BF16 => bytes[..2].copy_from_slice(&half::bf16::from_f64(factor).to_le_bytes()),
        _ => return None,
    }
    Some(bytes)
}

impl fmt::Debug for Communicator {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Communicator({} of {} on {:?})", self.rank, self.size, self.device)
    }
}

/// Ends it on a thread of its own, since that may wait for other ranks, for the device, or, to free memory, for the kernels of other
/// communicators that are being aborted as well.
impl Drop for Communicator {
    fn drop(&mut self) {
        let handle = Handle(std::mem::replace(&mut self.handle.0, std::ptr::null_mut()));
        let (nccl, broken) = (self.nccl.clone(), self.broken);
        self.device.later("close", move || close(&nccl, handle, broken));
    }
}

fn close(nccl: &Nccl, handle: Handle, broken: bool) {
    let Handle(comm) = handle;
    if !broken && finalized(nccl, comm) {
        // SAFETY: nobody else has it, and it is finalized.
        let code = unsafe { nccl.calls().comm_destroy(comm) };
        if let Err(why) = nccl.check("ncclCommDestroy", comm, code) {
            tracing::debug!(why, "a communicator did not end");
        }
        return;
    }
    // SAFETY: nobody else has it.
    let code = unsafe { nccl.calls().comm_abort(comm) };
    if let Err(why) = nccl.check("ncclCommAbort", std::ptr::null_mut(), code) {
        tracing::debug!(why, "a communicator did not abort");
    }
}

/// Lets what is under way end, together with the other ranks.
fn finalized(nccl: &Nccl, comm: RawComm) -> bool {
    // SAFETY: nobody else has it.
    let mut state = unsafe { nccl.calls().comm_finalize(comm) };
    let (until, mut pause) = (Instant::now() + FINALIZE, Pause::new());
    while state == IN_PROGRESS && Instant::now() < until {
        pause.wait();
        // SAFETY: a place for an int.
        let code = unsafe { nccl.calls().comm_get_async_error(comm, &mut state) };
        if code != SUCCESS {
            return false;
        }
    }
    state == SUCCESS
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn factors_are_elements() {
        assert_eq!(scalar(DType::F64, 0.1), Some(0.1_f64.to_le_bytes()));
        assert_eq!(scalar(DType::F32, 0.5), Some([0, 0, 0, 0x3f, 0, 0, 0, 0]));
        assert_eq!(scalar(DType::F16, 1.0), Some([0, 0x3c, 0, 0, 0, 0, 0, 0]));
        assert_eq!(scalar(DType::BF16, 1.0), Some([0x80, 0x3f, 0, 0, 0, 0, 0, 0]));
        assert_eq!(scalar(DType::I32, 1.0), None);
    }
}
