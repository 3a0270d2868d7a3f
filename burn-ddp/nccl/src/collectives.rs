//! Collectives of a communicator: checks of the arguments, then the calls of NCCL.
#![allow(unsafe_code)]

use std::ffi::{c_int, c_void};

use burn_ddp_comm::DType;

use crate::communicator::Communicator;
use crate::device_and_pinned_memory::Region;
use crate::error::DeviceError;
use crate::nccl::{IN_PROGRESS, NcclCalls, RawComm, SCALAR_HOST_IMMEDIATE, SUCCESS, dtype_code, op_code};
use crate::nccl_op::{NcclOp, scalar};
use crate::stream::Stream;
use crate::wait::WaitCheck;

impl Communicator {
    /// Reduces the first region of each pair over all ranks into the second, which may be the same.
    ///
    /// # Errors
    /// [`DeviceError::InvalidArgument`] for regions, ranks, types or operators that do not fit together;
    /// [`DeviceError::WrongStream`]; errors of NCCL and of `check`.
    pub fn all_reduce(
        &mut self,
        stream: &Stream,
        pieces: &[(Region, Region)],
        (dtype, kind): (DType, NcclOp),
        check: WaitCheck<'_>,
    ) -> Result<(), DeviceError> {
        self.launches_on(stream)?;
        for (input, output) in pieces {
            self.check_pair(dtype, *input, *output, 1, 1)?;
        }
        self.reducing("ncclAllReduce", (dtype, kind), check, |calls, comm, op| {
            pieces.iter().try_for_each(|(input, output)| {
                let count = input.len_bytes / dtype.size_bytes();
                // SAFETY: both regions are memory of this device with room for `count` elements, by `check_pair`.
                accepted(unsafe {
                    calls.all_reduce(at(*input), at(*output), count, dtype_code(dtype), op, comm, stream.raw())
                })
            })
        })
    }

    /// For each `(root, input, output)`: reduces `input` over all ranks into `output` of `root`; the outputs of the
    /// other ranks are not written.
    ///
    /// # Errors
    /// Those of [`all_reduce`](Self::all_reduce).
    pub fn reduce(
        &mut self,
        stream: &Stream,
        pieces: &[(usize, Region, Region)],
        (dtype, kind): (DType, NcclOp),
        check: WaitCheck<'_>,
    ) -> Result<(), DeviceError> {
        self.launches_on(stream)?;
        for (root, input, output) in pieces {
            self.check_rank(*root)?;
            self.check_pair(dtype, *input, *output, 1, 1)?;
        }
        self.reducing("ncclReduce", (dtype, kind), check, |calls, comm, op| {
            pieces.iter().try_for_each(|(root, input, output)| {
                let (count, root) = (input.len_bytes / dtype.size_bytes(), *root as c_int);
                // SAFETY: both regions are memory of this device with room for `count` elements, and the root exists.
                accepted(unsafe {
                    calls.reduce(at(*input), at(*output), count, dtype_code(dtype), op, root, comm, stream.raw())
                })
            })
        })
    }

    /// For each `(root, input, output)`: copies `input` of the rank `root` to `output` of all ranks.
    ///
    /// # Errors
    /// Those of [`all_reduce`](Self::all_reduce).
    pub fn broadcast(
        &mut self,
        stream: &Stream,
        copies: &[(usize, Region, Region)],
        check: WaitCheck<'_>,
    ) -> Result<(), DeviceError> {
        self.launches_on(stream)?;
        for (root, input, output) in copies {
            self.check_rank(*root)?;
            // Only the root's input is read.
            let input = if *root == self.rank() { *input } else { *output };
            self.check_pair(DType::U8, input, *output, 1, 1)?;
        }
        self.grouped("ncclBroadcast", check, |calls, comm| {
            copies.iter().try_for_each(|(root, input, output)| {
                let (count, root) = (output.len_bytes, *root as c_int);
                // SAFETY: the memory read and the memory written are of this device, `count` bytes each, and the root
                // exists.
                accepted(unsafe {
                    calls.broadcast(at(*input), at(*output), count, dtype_code(DType::U8), root, comm, stream.raw())
                })
            })
        })
    }

    /// Copies `input` of each rank `r` to row `r` of `output`, `[size, n]`, on all ranks.
    ///
    /// # Errors
    /// Those of [`all_reduce`](Self::all_reduce).
    pub fn all_gather(
        &mut self,
        stream: &Stream,
        input: Region,
        output: Region,
        check: WaitCheck<'_>,
    ) -> Result<(), DeviceError> {
        self.launches_on(stream)?;
        self.check_pair(DType::U8, input, output, 1, self.size())?;
        self.grouped("ncclAllGather", check, |calls, comm| {
            let (count, dtype) = (input.len_bytes, dtype_code(DType::U8));
            // SAFETY: the input has `count` bytes and the output that for each rank, in memory of this device.
            accepted(unsafe { calls.all_gather(at(input), at(output), count, dtype, comm, stream.raw()) })
        })
    }

    /// Reduces `input`, `[size, n]`, over all ranks, and writes this rank's row of the result to `output`.
    ///
    /// # Errors
    /// Those of [`all_reduce`](Self::all_reduce).
    pub fn reduce_scatter(
        &mut self,
        stream: &Stream,
        (input, output): (Region, Region),
        (dtype, kind): (DType, NcclOp),
        check: WaitCheck<'_>,
    ) -> Result<(), DeviceError> {
        self.launches_on(stream)?;
        self.check_pair(dtype, input, output, self.size(), 1)?;
        self.reducing("ncclReduceScatter", (dtype, kind), check, |calls, comm, op| {
            let (count, dtype) = (output.len_bytes / dtype.size_bytes(), dtype_code(dtype));
            // SAFETY: the output has room for `count` elements and the input that for each rank, in memory of this
            // device.
            accepted(unsafe { calls.reduce_scatter(at(input), at(output), count, dtype, op, comm, stream.raw()) })
        })
    }

    /// Sends each region of `sends` to its rank and fills each of `receives` from its rank, all at the same time. A
    /// rank that sends to itself also receives from itself.
    ///
    /// # Errors
    /// Those of [`all_reduce`](Self::all_reduce).
    pub fn exchange(
        &mut self,
        stream: &Stream,
        sends: &[(usize, Region)],
        receives: &[(usize, Region)],
        check: WaitCheck<'_>,
    ) -> Result<(), DeviceError> {
        self.launches_on(stream)?;
        for (peer, region) in sends.iter().chain(receives) {
            self.check_rank(*peer)?;
            self.check_region(DType::U8, *region)?;
        }
        self.grouped("ncclSend and ncclRecv", check, |calls, comm| {
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

    fn check_rank(&self, rank: usize) -> Result<(), DeviceError> {
        if rank < self.size() {
            return Ok(());
        }
        refuse(format!("rank {rank} of a communicator of {}", self.size()))
    }

    fn check_region(&self, dtype: DType, region: Region) -> Result<(), DeviceError> {
        let Region { pointer, len_bytes, ordinal } = region;
        if ordinal != self.device().ordinal() {
            return refuse(format!(
                "memory of device {ordinal} for a communicator on device {}",
                self.device().ordinal()
            ));
        }
        let size = dtype.size_bytes();
        if !len_bytes.is_multiple_of(size) || !pointer.is_multiple_of(size as u64) {
            return refuse(format!("{len_bytes} bytes at {pointer:#x} are not {dtype} elements"));
        }
        if pointer == 0 && len_bytes > 0 {
            return refuse(format!("{len_bytes} bytes at address 0"));
        }
        Ok(())
    }

    /// Fails unless the regions are `rows_in` and `rows_out` rows of one length, of `dtype` elements on this device.
    fn check_pair(
        &self,
        dtype: DType,
        input: Region,
        output: Region,
        rows_in: usize,
        rows_out: usize,
    ) -> Result<(), DeviceError> {
        self.check_region(dtype, input)?;
        self.check_region(dtype, output)?;
        if input.len_bytes.checked_mul(rows_out) != output.len_bytes.checked_mul(rows_in) {
            return refuse(format!("an input of {} bytes for an output of {}", input.len_bytes, output.len_bytes));
        }
        Ok(())
    }

    /// Makes the reductions of `launch`, which gets the operator's number, as one group.
    fn reducing(
        &mut self,
        what: &str,
        (dtype, kind): (DType, NcclOp),
        check: WaitCheck<'_>,
        launch: impl FnOnce(&dyn NcclCalls, RawComm, c_int) -> Result<(), c_int>,
    ) -> Result<(), DeviceError> {
        let op = self.op(dtype, kind)?;
        let launched = self.grouped(what, check, |calls, comm| launch(calls, comm, op));
        if launched.is_ok() {
            self.release(op, kind);
        }
        launched
    }

    /// NCCL's number of an operator, which has to be [released](Self::release).
    fn op(&mut self, dtype: DType, kind: NcclOp) -> Result<c_int, DeviceError> {
        let factor = match kind {
            NcclOp::Builtin(op) if op.supports(dtype) => return Ok(op_code(op)),
            NcclOp::Builtin(op) => return refuse(format!("{op} of {dtype}")),
            NcclOp::PreMulSum(factor) => factor,
        };
        let Some(mut scalar) = scalar(dtype, factor) else { return refuse(format!("a factor for {dtype}")) };
        let mut op = 0;
        // SAFETY: a valid out-pointer for the operator, and a scalar of the type, which NCCL reads before it returns.
        let code = unsafe {
            let (op, scalar) = (&mut op, scalar.as_mut_ptr().cast::<c_void>());
            let comm = self.raw();
            self.calls().red_op_create_pre_mul_sum(op, scalar, dtype_code(dtype), SCALAR_HOST_IMMEDIATE, comm)
        };
        self.noted("ncclRedOpCreatePreMulSum", code)?;
        Ok(op)
    }

    /// Releases an operator. Allowed as soon as the calls that it was passed to have returned.
    fn release(&mut self, op: c_int, kind: NcclOp) {
        if let NcclOp::PreMulSum(_) = kind {
            // SAFETY: made by `op`, and released once.
            unsafe { self.calls().red_op_destroy(op, self.raw()) };
        }
    }
}

fn refuse<R>(message: String) -> Result<R, DeviceError> {
    Err(DeviceError::invalid_argument(message))
}

/// Result of one NCCL call within a group.
fn accepted(code: c_int) -> Result<(), c_int> {
    if code == SUCCESS || code == IN_PROGRESS { Ok(()) } else { Err(code) }
}

fn at(region: Region) -> *mut c_void {
    region.pointer as usize as *mut c_void
}
