//! What the memberships of all ranks of one process have in common.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock, Weak};

use super::heartbeats::Liveness;
use super::peer::PeerInfo;
use super::progress::Tracks;
use super::{Outbox, Wake};
use crate::history::History;
use crate::{Error, LaunchEnv, Options};

/// Common to all ranks of one process.
pub(super) struct Shared {
    pub(super) peers: Vec<PeerInfo>,
    pub(super) options: Options,
    /// Whether all ranks live in this process.
    pub(super) local: bool,
    /// What each rank of this process does; of others nothing is written here.
    pub(super) doing: Vec<Doing>,
    /// What is heard of the ranks in other processes. Written by the monitor.
    pub(super) liveness: Mutex<Liveness>,
    /// Whether there is a cause. Set with it, read by every call.
    pub(super) ended: AtomicBool,
    /// Who said goodbye. Written by ranks and control threads, read by every wait.
    pub(super) left: Box<[AtomicBool]>,
    /// Written by ranks and control threads; never locked while calling out.
    pub(super) state: Mutex<State>,
    /// Who waits. Transports add themselves when they are made; the dead are dropped at the next addition.
    pub(super) wakers: Mutex<Vec<Weak<dyn Wake>>>,
    /// Set once, by the control connections; ranks in one process need none.
    pub(super) outbox: OnceLock<Weak<dyn Outbox>>,
    /// Where the launcher reads what happens. Set once, before the first collective.
    pub(super) launch: OnceLock<LaunchEnv>,
}

const NO_STEP: u64 = u64::MAX;

/// What one rank does.
pub(super) struct Doing {
    /// The training step, [`NO_STEP`] if the program does not say. Written by the rank, read when it calls.
    pub(super) step: AtomicU64,
    pub(super) history: History,
}

pub(super) struct State {
    /// The first thing that went wrong. Set once, stays.
    pub(super) cause: Option<Error>,
    pub(super) tracks: Tracks,
}

impl Shared {
    pub(super) fn new(peers: Vec<PeerInfo>, options: Options, liveness: Liveness, local: bool) -> Arc<Shared> {
        let state = State { cause: None, tracks: Tracks::default() };
        let left = peers.iter().map(|_| AtomicBool::new(false)).collect();
        Arc::new(Shared {
            doing: peers.iter().map(|_| Doing::new(options.history)).collect(),
            liveness: Mutex::new(liveness),
            peers,
            options,
            local,
            ended: AtomicBool::new(false),
            left,
            state: Mutex::new(state),
            wakers: Mutex::new(Vec::new()),
            outbox: OnceLock::new(),
            launch: OnceLock::new(),
        })
    }
}

impl Doing {
    fn new(history: usize) -> Doing {
        Doing { step: AtomicU64::new(NO_STEP), history: History::new(history) }
    }

    pub(super) fn step(&self) -> Option<u64> {
        Some(self.step.load(Ordering::Relaxed)).filter(|step| *step != NO_STEP)
    }
}
