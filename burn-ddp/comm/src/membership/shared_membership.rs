//! Membership state that the ranks of one process share: peers, signs of life, ranks that left, the first failure.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock, Weak};
use std::time::Instant;

use super::control_messages::{Heartbeat, Outbox, Wake};
use super::deadlock_detection::WaitCircles;
use super::liveness::Liveness;
use super::out_of_step::Tracks;
use super::peer_info::PeerInfo;
use super::presence::Presence;
use crate::history::History;
use crate::{Error, LaunchEnv, WorldOptions};

/// State that all ranks of one process share.
pub(super) struct Shared {
    pub(super) peers: Vec<PeerInfo>,
    pub(super) options: WorldOptions,
    /// True if all ranks live in this process.
    pub(super) local: bool,
    /// Activity of the ranks of this process, by rank; unused for the others.
    pub(super) local_ranks: Vec<LocalRank>,
    /// Signs of life of the ranks in other processes. Written by the monitor.
    pub(super) liveness: Mutex<Liveness>,
    /// Detection of deadlocks. Written by the monitor; where all ranks live in this process, by the ranks that wait.
    pub(super) circles: Mutex<WaitCircles>,
    /// Held while a cause of the end is noted, written down and sent to the other ranks.
    pub(super) ending: Mutex<()>,
    /// True once `state` holds a cause that was sent. Read by every call.
    pub(super) ended: AtomicBool,
    pub(super) presence: Presence,
    /// Written by ranks and control threads. Unlocked before any waker or outbox is called.
    pub(super) state: Mutex<State>,
    /// Wakers of waits, to be called at each change. Added when a transport or wait begins; dropped ones are removed at
    /// the next addition.
    pub(super) wakers: Mutex<Vec<Weak<dyn Wake>>>,
    /// Set once, by the control connections; ranks in one process need none.
    pub(super) outbox: OnceLock<Weak<dyn Outbox>>,
    /// Names the launcher's event file and report directory. Set once, before the first collective.
    pub(super) launch: OnceLock<LaunchEnv>,
}

const NO_STEP: u64 = u64::MAX;

/// Activity of one rank of this process.
pub(super) struct LocalRank {
    /// Training step, [`NO_STEP`] if the program does not set it. Written by the rank, read by its calls and
    /// heartbeats.
    pub(super) step: AtomicU64,
    pub(super) history: History,
}

pub(super) struct State {
    /// The first failure, which ended the world. Set once.
    pub(super) cause: Option<Error>,
    pub(super) tracks: Tracks,
}

impl Shared {
    pub(super) fn new(peers: Vec<PeerInfo>, options: WorldOptions, liveness: Liveness, local: bool) -> Arc<Shared> {
        let state = State { cause: None, tracks: Tracks::default() };
        Arc::new(Shared {
            local_ranks: peers.iter().map(|_| LocalRank::new(options.history)).collect(),
            presence: Presence::of_all(peers.len()),
            circles: Mutex::new(WaitCircles::new(options.heartbeat, Instant::now())),
            liveness: Mutex::new(liveness),
            peers,
            options,
            local,
            ending: Mutex::new(()),
            ended: AtomicBool::new(false),
            state: Mutex::new(state),
            wakers: Mutex::new(Vec::new()),
            outbox: OnceLock::new(),
            launch: OnceLock::new(),
        })
    }
}

impl LocalRank {
    fn new(history: usize) -> LocalRank {
        LocalRank { step: AtomicU64::new(NO_STEP), history: History::new(history) }
    }

    pub(super) fn heartbeat(&self) -> Heartbeat {
        self.history.heartbeat(self.step())
    }

    pub(super) fn step(&self) -> Option<u64> {
        Some(self.step.load(Ordering::Relaxed)).filter(|step| *step != NO_STEP)
    }
}
