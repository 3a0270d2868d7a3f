//! Fake communicators, and the calls that wait in them until they are enqueued.

use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use super::fake_reduction::Kind;
use super::fake_rendezvous::{FakeRendezvous, What};
use super::fake_stream::FakeStream;

/// One rank's side of a communicator.
pub(super) struct FakeComm {
    pub(super) rendezvous: Arc<FakeRendezvous>,
    pub(super) rank: usize,
    pub(super) ordinal: usize,
    pub(super) blocking: bool,
    pub(super) aborted: AtomicBool,
    pub(super) finalizing: AtomicBool,
    /// Result of the next calls of `ncclCommGetAsyncError`.
    pub(super) error: AtomicI32,
    /// Number of `ncclCommGetAsyncError` calls until the launched calls are enqueued.
    pub(super) looks: AtomicU32,
    /// Launched calls that are not enqueued yet, and their stream.
    pub(super) held: Mutex<Option<(Arc<FakeStream>, Vec<Op>)>>,
    /// Number of collectives launched.
    pub(super) launched: AtomicU64,
}

/// A call of a communicator.
pub(super) enum Op {
    Collective {
        nth: u64,
        part: PartOp,
    },
    Send {
        peer: usize,
        from: u64,
        bytes: usize,
    },
    Receive {
        peer: usize,
        to: u64,
        bytes: usize,
    },
    /// Never completes.
    Never,
}

impl Op {
    /// True if `pointer` is the beginning of what it reads or writes.
    pub(super) fn uses(&self, pointer: u64) -> bool {
        match self {
            Op::Collective { part, .. } => part.input == pointer || part.output == pointer,
            Op::Send { from, .. } => *from == pointer,
            Op::Receive { to, .. } => *to == pointer,
            Op::Never => false,
        }
    }
}

/// This rank's part in a collective, with addresses.
pub(super) struct PartOp {
    pub(super) what: What,
    pub(super) count: usize,
    pub(super) dtype: i32,
    pub(super) kind: Option<Kind>,
    pub(super) input: u64,
    pub(super) input_bytes: usize,
    pub(super) output: u64,
}

impl FakeComm {
    pub(super) fn is_aborted(&self) -> bool {
        self.aborted.load(Ordering::Acquire)
    }
}
