//! Engines: implementations of the collectives.
//!
//! An [`Engine`] does the collectives of one group on one rank. Engines whose ranks exchange frames (threads, tcp, mpi)
//! share their algorithms: each is a [`HostEngine`] over a [`Transport`], whose one primitive is the exchange of
//! frames.

use std::any::Any;

use crate::call::Call;
use crate::{DType, Error, ReduceOp, Result};

pub(crate) mod auto_fabric;
mod choice;
mod host_engine;
mod leaf_rows;
mod row_calls;
mod row_division;
mod shared_buffer;
#[cfg(target_os = "linux")]
pub(crate) mod shm;
pub(crate) mod tcp;
pub(crate) mod threads;
#[cfg(target_os = "linux")]
pub(crate) mod two_level;
mod unavailable_reason;

pub use self::choice::EngineChoice;
pub use self::host_engine::{HostEngine, checked_weights};
pub use self::leaf_rows::OwnLeaves;
pub(crate) use self::leaf_rows::reduce_leaf_rows;
pub(crate) use self::row_calls::gather_rows;
pub use self::row_calls::{PartReduction, gather_rows_into, reduce_rows};
pub use self::row_division::RowDivision;
pub use self::shared_buffer::{SharedBuffer, SharedView};
pub use self::unavailable_reason::Unavailable;

/// The collectives of one group on one rank, on raw bytes. Ranks are group ranks: positions in the group.
///
/// The caller has checked what can be checked on one rank: ranks are in range, lengths are whole elements and fit
/// together, the reduce op supports the dtype. The engine compares `call` with the peers' calls. On an error the
/// buffers hold unspecified bytes.
pub trait Engine: Send {
    /// Name of the engine: `threads`, `shm`, `tcp`, …
    fn name(&self) -> &'static str;

    /// Waits until all ranks have called it.
    fn barrier(&mut self, call: &Call) -> Result<()>;

    /// Reduces `buf` over all ranks into `buf`.
    fn all_reduce(&mut self, call: &Call, dtype: DType, buf: &mut [u8], op: ReduceOp) -> Result<()>;

    /// Replaces `buf` by its mean over all ranks, each weighted by its [`Call::weight`].
    fn all_reduce_weighted(&mut self, call: &Call, dtype: DType, buf: &mut [u8]) -> Result<()>;

    /// Copies `buf` of `root` to all ranks.
    fn broadcast(&mut self, call: &Call, buf: &mut [u8], root: usize) -> Result<()>;

    /// Fills `outputs[r]` with the input of rank `r`. Inputs may differ in length; every rank's outputs have their
    /// lengths.
    fn all_gather(&mut self, call: &Call, input: &[u8], outputs: &mut [&mut [u8]]) -> Result<()>;

    /// Reduces `input`, which is `[world, n]`, and leaves row `rank` in `output`, which is `[n]`.
    fn reduce_scatter(
        &mut self,
        call: &Call,
        dtype: DType,
        input: &[u8],
        output: &mut [u8],
        op: ReduceOp,
    ) -> Result<()>;

    /// Reduces `buf` over all ranks into `buf` of `root`; the buffers of the other ranks stay as they are.
    fn reduce(&mut self, call: &Call, dtype: DType, buf: &mut [u8], op: ReduceOp, root: usize) -> Result<()>;

    /// Fills `outputs[r]` of `root` with the input of rank `r`. Only the root passes outputs. All inputs have the same
    /// length.
    fn gather(&mut self, call: &Call, input: &[u8], outputs: Option<&mut [&mut [u8]]>, root: usize) -> Result<()>;

    /// Fills `output` of rank `r` with `inputs[r]` of `root`. Only the root passes inputs. All of them have the same
    /// length.
    fn scatter(&mut self, call: &Call, inputs: Option<&[&[u8]]>, output: &mut [u8], root: usize) -> Result<()>;

    /// Copies row `j` of `input` to row `rank` of `output` of rank `j`. Both are `[world, n]`.
    fn all_to_all(&mut self, call: &Call, input: &[u8], output: &mut [u8]) -> Result<()>;

    /// Sends to one rank, receives from one, or both. The two peers may be the same rank, but not this one. Only this
    /// rank and its peers take part; each pair compares the part of `call` between the two, [`Call::info_for`]. Returns
    /// when the receiver has the payload that this rank sent.
    fn send_recv(&mut self, call: &Call, send: Option<Outgoing<'_>>, receive: Option<&mut Incoming<'_>>) -> Result<()>;

    /// Makes buffers of these lengths, the same on all ranks, for the calls whose names end in `_shared`.
    fn shared_buffers(&mut self, call: &Call, lens: &[usize]) -> Result<Vec<SharedBuffer>> {
        self.barrier(call)?;
        Ok(lens.iter().map(|len| SharedBuffer::plain(*len)).collect())
    }

    /// Reduces `buffer` over all ranks; `op` is `None` for the mean weighted by [`Call::weight`].
    fn all_reduce_shared(
        &mut self,
        call: &Call,
        dtype: DType,
        buffer: &mut SharedBuffer,
        op: Option<ReduceOp>,
    ) -> Result<SharedView> {
        match op {
            Some(op) => self.all_reduce(call, dtype, buffer.bytes_mut(), op)?,
            None => self.all_reduce_weighted(call, dtype, buffer.bytes_mut())?,
        }
        Ok(buffer.view())
    }

    /// Gathers the parts of all ranks, of which this rank's is `part`. `buffer`, as long as the whole, is room for the
    /// result; its contents are lost.
    fn all_gather_shared(
        &mut self,
        call: &Call,
        division: RowDivision,
        part: &[u8],
        buffer: &mut SharedBuffer,
    ) -> Result<SharedView> {
        gather_rows_into(self, call, division, part, buffer)
    }

    /// Reduces `buffer` over all ranks and leaves this rank's rows in `part`. Weights are checked, and not all equal.
    fn reduce_scatter_shared(
        &mut self,
        call: &Call,
        (dtype, division): (DType, RowDivision),
        buffer: &mut SharedBuffer,
        reduction: &PartReduction,
        part: &mut [u8],
    ) -> Result<()> {
        reduce_rows(self, call, (dtype, division), buffer.bytes_mut(), reduction, part)
    }

    /// Reduces elements that are in a device's memory; `op` is `None` for the mean weighted by [`Call::weight`].
    ///
    /// # Errors
    /// [`Error::Environment`] if the engine cannot reach that memory.
    fn all_reduce_on_device(&mut self, call: &Call, elements: OnDevice<'_>, op: Option<ReduceOp>) -> Result<()> {
        let _ = (call, elements, op);
        Err(host_memory_only(self.name()))
    }

    /// Gathers the parts of all ranks in a device's memory: `place` names this rank's part and the memory of the whole.
    ///
    /// # Errors
    /// Those of [`all_reduce_on_device`](Self::all_reduce_on_device).
    fn all_gather_on_device(
        &mut self,
        call: &Call,
        (dtype, division): (DType, RowDivision),
        place: &mut dyn Any,
    ) -> Result<()> {
        let _ = (call, dtype, division, place);
        Err(host_memory_only(self.name()))
    }

    /// Reduces a tensor in a device's memory over all ranks and leaves this rank its rows: `place` names the whole
    /// tensor and the memory of the rows. Weights are checked, and not all equal.
    ///
    /// # Errors
    /// Those of [`all_reduce_on_device`](Self::all_reduce_on_device).
    fn reduce_scatter_on_device(
        &mut self,
        call: &Call,
        (dtype, division): (DType, RowDivision),
        reduction: &PartReduction,
        place: &mut dyn Any,
    ) -> Result<()> {
        let _ = (call, dtype, division, reduction, place);
        Err(host_memory_only(self.name()))
    }

    /// Closes this rank's side of the group, since the rank has left the world with the group open: no call follows. An
    /// engine implements it if its waits cannot tell from the membership alone that no more bytes of a rank are on
    /// their way. An engine that wraps another passes the call on. Does not block. Calls after the first do nothing.
    fn leave(&mut self) {}
}

/// Error of an engine that does not reach the memory of devices.
fn host_memory_only(engine: &str) -> Error {
    Error::Environment { message: format!("the engine {engine} works in host memory only") }
}

/// Elements in the memory of a device.
#[derive(Debug)]
pub struct OnDevice<'a> {
    /// Type of the elements.
    pub dtype: DType,
    /// Number of elements.
    pub len_elems: usize,
    /// Address of the elements, in a type of the engine's own.
    pub place: &'a mut dyn Any,
}

/// A frame to a peer.
#[derive(Clone, Copy, Debug)]
pub struct Outgoing<'a> {
    /// Group rank of the receiver.
    pub peer: usize,
    /// The bytes after the header; may be empty.
    pub payload: &'a [u8],
}

/// A frame from a peer.
#[derive(Debug)]
pub struct Incoming<'a> {
    /// Group rank of the sender.
    pub peer: usize,
    /// Memory for the payload, of exactly its length; empty if the frame is only a header.
    pub payload: &'a mut [u8],
    /// The weight in the header, filled in by the exchange.
    pub weight: f64,
}

impl<'a> Incoming<'a> {
    /// An expected frame, with memory for its payload.
    pub fn new(peer: usize, payload: &'a mut [u8]) -> Incoming<'a> {
        Incoming { peer, payload, weight: f64::NAN }
    }
}

/// Bytes from all other ranks: the same range of each rank's payload.
#[derive(Clone, Copy, Debug)]
pub struct Piece<'a> {
    /// Start of that range in the payload.
    pub start: usize,
    /// The bytes of each other rank, in rank order, all of one length.
    pub rows: &'a [&'a [u8]],
    /// Weights of all ranks, by group rank.
    pub weights: &'a [f64],
}

/// Exchange of frames: the one primitive of a [`HostEngine`].
pub trait Transport: Send {
    /// Name of the engine over this transport.
    fn name(&self) -> &'static str;

    /// This rank in the group.
    fn rank(&self) -> usize;

    /// Number of ranks in the group.
    fn world_size(&self) -> usize;

    /// Sends at most one frame to each peer and receives at most one from each, all at the same time. Returns when
    /// every frame to receive has arrived and the memory of those to send is no longer needed. Each frame starts with
    /// [`call.header(peer, payload.len())`](Call::header); each header that arrives is passed to [`Call::check_header`]
    /// before its payload is read.
    ///
    /// Frames between two ranks arrive in the order they were sent. A peer may be one exchange ahead. A frame that has
    /// arrived is delivered even if its sender has left since.
    ///
    /// # Errors
    /// The first that is known: the cause in [`Membership`](crate::membership::Membership) that ended the world, a peer
    /// that left or was lost before its frame arrived, a header that does not fit the call, or [`Call::timed_out`] with
    /// the peers whose frames are missing.
    fn exchange(&mut self, call: &Call, sends: &[Outgoing<'_>], receives: &mut [Incoming<'_>]) -> Result<()>;

    /// An [`exchange`](Self::exchange) that receives `len` bytes from every other rank and need not hold all of them in
    /// memory: `take` gets them piece by piece, in order, and is called at least once. `scratch` is memory that the
    /// caller keeps between calls.
    ///
    /// # Errors
    /// Like `exchange`; `take` may have been called before the error.
    fn collect(
        &mut self,
        call: &Call,
        sends: &[Outgoing<'_>],
        len: usize,
        scratch: &mut Vec<u8>,
        take: &mut dyn FnMut(Piece<'_>),
    ) -> Result<()> {
        let (rank, world_size) = (self.rank(), self.world_size());
        let peers = (0..world_size).filter(|peer| *peer != rank);
        scratch.resize(len * (world_size - 1), 0);
        let mut rest = &mut scratch[..];
        let mut receives = Vec::with_capacity(world_size - 1);
        for peer in peers {
            let (room, behind) = rest.split_at_mut(len);
            receives.push(Incoming::new(peer, room));
            rest = behind;
        }
        self.exchange(call, sends, &mut receives)?;
        let mut weights = vec![call.weight; world_size];
        receives.iter().for_each(|receive| weights[receive.peer] = receive.weight);
        let rows: Vec<&[u8]> = receives.iter().map(|receive| &*receive.payload).collect();
        take(Piece { start: 0, rows: &rows, weights: &weights });
        Ok(())
    }

    /// See [`Engine::leave`].
    fn leave(&mut self) {}
}

/// Makes the engines of one rank's groups. [`World::set_fabric`](crate::World::set_fabric) installs a fabric of another
/// crate.
pub trait Fabric: Send + Sync {
    /// The name of the fabric's engines.
    fn name(&self) -> &'static str;

    /// This rank's engine for a new group of the ranks `call.members`, which include this rank. The engines of the
    /// ranks need not be connected yet when it returns. `call.info.group` is the group's number: the same on all its
    /// ranks, and unique in the world.
    ///
    /// # Errors
    /// Like [`Transport::exchange`].
    fn open(&self, call: &Call) -> Result<Box<dyn Engine>>;

    /// Like [`open`](Self::open), but returns [`Unavailable`], on all ranks of the group alike, if this fabric cannot
    /// serve the group and another one may.
    ///
    /// # Errors
    /// Like [`Transport::exchange`].
    fn try_open(&self, call: &Call) -> Result<Result<Box<dyn Engine>, Unavailable>> {
        self.open(call).map(Ok)
    }
}
