//! Engines: implementations of the collectives.
//!
//! An [`Engine`] does the collectives of one group on one rank. Engines that move bytes between hosts share their
//! algorithms: they are [`HostEngine`]s over a [`Transport`], which knows one primitive, the exchange of frames.

use std::time::{Duration, Instant};

use crate::call::Call;
use crate::net::wait::deadline_in;
use crate::{DType, ReduceOp, Result};

mod host;
pub(crate) mod tcp;
pub(crate) mod threads;

pub use host::HostEngine;

/// The collectives of one group on one rank, on raw bytes.
///
/// The caller has checked what can be checked on one rank: ranks are in range, lengths are whole elements and fit
/// together, the reduce op supports the dtype. The engine compares `call` with the peers' calls. On an error the
/// buffers hold unspecified bytes.
pub trait Engine: Send {
    /// Its name: `threads`, `tcp`, …
    fn name(&self) -> &'static str;

    /// Waits until all ranks are here.
    fn barrier(&mut self, call: &Call) -> Result<()>;

    /// Reduces `buf` over all ranks into `buf`.
    fn all_reduce(&mut self, call: &Call, dtype: DType, buf: &mut [u8], op: ReduceOp) -> Result<()>;

    /// Replaces `buf` by its mean over all ranks, each weighted by its [`Call::weight`].
    fn all_reduce_weighted(&mut self, call: &Call, dtype: DType, buf: &mut [u8]) -> Result<()>;

    /// Copies `buf` of `root` to all ranks.
    fn broadcast(&mut self, call: &Call, buf: &mut [u8], root: usize) -> Result<()>;

    /// Fills `outputs[r]` with the input of rank `r`. Lengths may differ between ranks, where all ranks know them.
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
}

/// A frame to a peer.
#[derive(Clone, Copy, Debug)]
pub struct Outgoing<'a> {
    /// To whom.
    pub peer: usize,
    /// The bytes behind the header; may be empty.
    pub payload: &'a [u8],
}

/// A frame from a peer.
#[derive(Debug)]
pub struct Incoming<'a> {
    /// From whom.
    pub peer: usize,
    /// Where the payload goes; its length is what must come. May be empty: then only the header comes.
    pub payload: &'a mut [u8],
    /// The weight in the header, filled in by the exchange.
    pub weight: f64,
}

impl<'a> Incoming<'a> {
    /// Room for a frame from `peer`.
    pub fn new(peer: usize, payload: &'a mut [u8]) -> Incoming<'a> {
        Incoming { peer, payload, weight: f64::NAN }
    }
}

/// The one primitive of engines between hosts.
pub trait Transport: Send {
    /// Its name, which is the engine's.
    fn name(&self) -> &'static str;

    /// This rank.
    fn rank(&self) -> usize;

    /// How many ranks there are.
    fn world_size(&self) -> usize;

    /// Sends at most one frame to each peer and receives at most one from each, all at the same time; returns when all
    /// that is to be received has come and all that is to be sent is out of the caller's memory. Each frame starts with
    /// [`call.header(payload.len())`](Call::header); each header that comes is passed to [`Call::check_header`] before
    /// room is made for what follows it.
    ///
    /// Frames between two ranks arrive in the order they were sent. A peer may be an exchange ahead. A frame that has
    /// come is delivered even if its sender has left since.
    ///
    /// # Errors
    /// As soon as one is known: the cause in [`Health`](crate::health::Health), a peer that left or was lost and whose
    /// frame has not come, a header that does not fit, or [`Call::timed_out`] naming the peers that were waited for.
    fn exchange(&mut self, call: &Call, sends: &[Outgoing<'_>], receives: &mut [Incoming<'_>]) -> Result<()>;
}

/// Makes the engines of one rank's groups.
pub trait Fabric: Send + Sync {
    /// The name of its engines.
    fn name(&self) -> &'static str;

    /// This rank's engine of a new group; the ranks' engines may still be on their way to each other when it returns.
    /// `call.info.group` is the group's number, the same on all ranks; numbers are not reused.
    ///
    /// # Errors
    /// Like [`Transport::exchange`].
    fn open(&self, call: &Call) -> Result<Box<dyn Engine>>;
}

/// When a wait is to be reported as taking long: after a time, then after twice that time, and so on.
#[derive(Debug)]
pub(crate) struct Stall {
    pub(crate) at: Instant,
    interval: Duration,
}

impl Stall {
    /// For a wait of `call`.
    pub(crate) fn new(call: &Call, after: Duration) -> Stall {
        // What is never due is due at the deadline, which comes first.
        Stall { at: call.started.checked_add(after).unwrap_or(call.deadline), interval: after }
    }

    /// Whether it is time; then the next time is later.
    pub(crate) fn is_due(&mut self) -> bool {
        let due = Instant::now() >= self.at;
        if due {
            self.at = deadline_in(self.interval);
            self.interval = self.interval.saturating_mul(2);
        }
        due
    }
}
