//! What a rank knows about the others: who is there, who left, and the first thing that went wrong.
//!
//! Every wait of a collective also waits for this: whatever ends the world wakes it and is returned by it. Ranks in one
//! process share one [`Membership`] state; between processes the control connections carry [`ControlMessage`]s from one
//! rank's membership to the others'.

pub(crate) mod control;
mod diagnosis;
mod dispatch;
mod failure;
mod heartbeats;
mod messages;
pub(crate) mod panics;
mod peer;
mod progress;
mod state;
#[cfg(test)]
mod tests;
mod watch;

use std::sync::atomic::Ordering;
use std::sync::{Arc, OnceLock, Weak};
use std::time::Instant;

use self::heartbeats::Liveness;
use self::state::Shared;
use crate::call::CallInfo;
use crate::history::History;
use crate::sync::lock;
use crate::{LaunchEnv, Options, Result};

pub use self::messages::{ControlMessage, Outbox, Wake};
pub use self::peer::PeerInfo;
pub(crate) use self::peer::list_ranks;
pub(crate) use self::progress::show_position;

/// One rank's view of its world.
pub struct Membership {
    rank: usize,
    shared: Arc<Shared>,
    /// The first collective on this rank that returned the cause; all later ones repeat it.
    noticed_by: OnceLock<Box<CallInfo>>,
    /// Done once, by the first who knows that the world has ended; others wait for it, so that no rank ends before its report is written.
    reported: OnceLock<()>,
}

impl Membership {
    /// The membership of `rank`, the only one in this process.
    pub fn new(rank: usize, peers: Vec<PeerInfo>, options: Options) -> Arc<Membership> {
        let liveness = Liveness::new(rank, peers.len(), &options, Instant::now());
        Arc::new(Membership::view(rank, Shared::new(peers, options, liveness, false)))
    }

    /// The memberships of all ranks of a world that lives in this process.
    pub fn shared(peers: Vec<PeerInfo>, options: Options) -> Vec<Arc<Membership>> {
        let world_size = peers.len();
        // Nobody is listened to.
        let liveness = Liveness::new(0, 0, &options, Instant::now());
        let shared = Shared::new(peers, options, liveness, true);
        (0..world_size).map(|rank| Arc::new(Membership::view(rank, shared.clone()))).collect()
    }

    fn view(rank: usize, shared: Arc<Shared>) -> Membership {
        Membership { rank, shared, noticed_by: OnceLock::new(), reported: OnceLock::new() }
    }

    /// The rank whose view this is.
    pub fn rank(&self) -> usize {
        self.rank
    }

    /// See [`World::set_step`](crate::World::set_step).
    pub(crate) fn set_step(&self, step: u64) {
        self.shared.doing[self.rank].step.store(step, Ordering::Relaxed);
    }

    /// The training step, if the program says.
    pub(crate) fn step(&self) -> Option<u64> {
        self.shared.doing[self.rank].step()
    }

    /// This rank's calls.
    pub(crate) fn history(&self) -> &History {
        &self.shared.doing[self.rank].history
    }

    /// The waits of this world.
    pub fn options(&self) -> &Options {
        &self.shared.options
    }

    /// All ranks.
    pub fn peers(&self) -> &[PeerInfo] {
        &self.shared.peers
    }

    /// Sets the way to the other ranks. Once, before the first collective.
    pub fn set_outbox(&self, outbox: Weak<dyn Outbox>) {
        // A second outbox would be a bug of the caller; the first one stays.
        let _ = self.shared.outbox.set(outbox);
    }

    /// Tells what happens where `env` says.
    pub(crate) fn report_to(&self, env: &LaunchEnv) {
        // Set once, by the rendezvous.
        let _ = self.shared.launch.set(env.clone());
    }

    /// Wakes `waker` at every change from now on, for as long as it lives.
    pub fn add_waker(&self, waker: Weak<dyn Wake>) {
        let mut wakers = lock(&self.shared.wakers);
        wakers.retain(|waker| waker.strong_count() > 0);
        wakers.push(waker);
    }

    /// Whether the world has ended, and why.
    ///
    /// # Errors
    /// The root cause.
    #[inline]
    pub fn check(&self) -> Result<()> {
        if self.shared.ended.load(Ordering::Acquire) { self.cause() } else { Ok(()) }
    }

    #[cold]
    fn cause(&self) -> Result<()> {
        match &lock(&self.shared.state).cause {
            Some(cause) => Err(cause.clone()),
            None => Ok(()),
        }
    }

    /// Whether `rank` said goodbye. What it sent before may still be on its way.
    pub fn has_left(&self, rank: usize) -> bool {
        self.shared.left[rank].load(Ordering::Acquire)
    }
}
