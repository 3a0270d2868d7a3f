//! Ranks of a world: their identities, signs of life, and the first failure.
//!
//! | part | file |
//! |---|---|
//! | identity of a rank | `peer_info` |
//! | control messages (all messages between ranks except data) | `control_messages`, applied in `dispatch` |
//! | the connections that carry them between processes | `control`; the ways between machines in `routes` |
//! | the first failure, which every call returns from then on | `world_failure`; panics in `panic_hook` |
//! | ranks that take part | `presence` |
//! | signs of life | `liveness`; heartbeats and reports of silence in `heartbeats` |
//! | the reason that a call waits | `stall_diagnosis`; the reports in `stall_reports` |
//! | checks of every wait: end of the world, deadline, stall | `wait_checks` |
//! | ranks that wait for each other | `deadlock_detection`, shown as `deadlocked_call` |
//! | ranks that stop where others go on | `step_position`, `out_of_step`; announced in `pending_stops` |
//! | events and the report for the launcher | `rank_report` |
//!
//! Whatever ends the world wakes every wait of a collective, which then returns that cause. Ranks of one process share
//! one `Shared` state; between processes the control connections carry [`ControlMessage`]s.

pub(crate) mod control;
mod control_messages;
mod deadlock_detection;
mod deadlocked_call;
mod dispatch;
mod heartbeats;
mod liveness;
mod out_of_step;
pub(crate) mod panic_hook;
mod peer_info;
mod pending_stops;
mod presence;
mod rank_report;
pub(crate) mod routes;
mod shared_membership;
mod stall_diagnosis;
mod stall_reports;
mod step_position;
#[cfg(test)]
mod tests;
mod wait_checks;
mod world_failure;

use std::io;
use std::sync::atomic::Ordering;
use std::sync::{Arc, OnceLock, Weak};
use std::time::Instant;

use self::liveness::Liveness;
use self::pending_stops::PendingStops;
use self::shared_membership::Shared;
use crate::call::CallInfo;
use crate::history::History;
use crate::net::descriptors;
use crate::net::wait::Waker;
use crate::poison_free_locks::lock;
use crate::{Error, LaunchEnv, Machines, Result, WorldOptions};

pub(crate) use self::control_messages::Envelope;
pub use self::control_messages::{BlockedGroup, ControlMessage, Heartbeat, Outbox, PendingCall, Wake};
pub use self::deadlocked_call::StuckCall;
pub use self::peer_info::PeerInfo;
pub(crate) use self::peer_info::list_ranks;
pub(crate) use self::routes::Routes;
pub use self::step_position::{Progress, Track};
pub use self::wait_checks::Watch;

/// One rank's view of its world.
pub struct Membership {
    rank: usize,
    routes: Routes,
    shared: Arc<Shared>,
    /// The first collective of this rank that returned the cause of the world's end. Later errors name it, too.
    noticed_by: OnceLock<Box<CallInfo>>,
    /// Set when the report is written. Calls on other threads wait for that: the process may end once they return.
    reported: OnceLock<()>,
    /// Stops of this rank that it has not announced yet. Added by its threads, announced with its next call.
    pending_stops: PendingStops,
}

impl Membership {
    /// View of `rank`, the only rank of the world in this process.
    pub(crate) fn new(rank: usize, peers: Vec<PeerInfo>, machines: Machines, options: WorldOptions) -> Arc<Membership> {
        let routes = Routes::new(rank, machines);
        let liveness = Liveness::new(rank, peers.len(), |peer| routes.is_near(peer), &options, Instant::now());
        Arc::new(Membership::view(routes, Shared::new(peers, options, liveness, false)))
    }

    /// Views of all ranks of a world that lives in this process.
    pub fn shared(peers: Vec<PeerInfo>, options: WorldOptions) -> Vec<Arc<Membership>> {
        let world_size = peers.len();
        // Threads of one process need no heartbeats.
        let liveness = Liveness::new(0, 0, |_| false, &options, Instant::now());
        let shared = Shared::new(peers, options, liveness, true);
        let machines = Machines::new(&vec![(); world_size]);
        let view = |rank| Arc::new(Membership::view(Routes::new(rank, machines.clone()), shared.clone()));
        (0..world_size).map(view).collect()
    }

    fn view(routes: Routes, shared: Arc<Shared>) -> Membership {
        let (rank, noticed_by, reported) = (routes.rank(), OnceLock::new(), OnceLock::new());
        Membership { rank, routes, shared, noticed_by, reported, pending_stops: PendingStops::default() }
    }

    /// The rank whose view this is.
    pub fn rank(&self) -> usize {
        self.rank
    }

    /// Ways of control messages to and from this rank.
    pub(crate) fn routes(&self) -> &Routes {
        &self.routes
    }

    /// Ranks that are cut off from this rank: it has no connection to them, and no rank is left to pass on messages.
    pub(crate) fn cut_off(&self) -> Vec<usize> {
        let mut cut_off = self.routes.cut_off(|rank| self.has_left(rank));
        let liveness = lock(&self.shared.liveness);
        cut_off.retain(|rank| !liveness.is_near(*rank));
        cut_off
    }

    /// Notes that this rank has made a fallback connection to `rank`. Then `rank` takes part, even if it seemed to have
    /// ended unheard, unless it has said goodbye.
    pub(crate) fn connected(&self, rank: usize) {
        let (mut liveness, now) = (lock(&self.shared.liveness), Instant::now());
        if self.shared.presence.reappear(rank) {
            tracing::info!(rank = self.rank, peer = rank, "the peer has connected although it seemed to have ended");
            liveness.reappeared(rank, now);
        }
        liveness.connected(rank, now);
    }

    /// Notes that the fallback connection to `rank` has ended before a message came over it.
    pub(crate) fn disconnected(&self, rank: usize) {
        lock(&self.shared.liveness).disconnected(rank);
    }

    /// See [`World::set_step`](crate::World::set_step).
    pub(crate) fn set_step(&self, step: u64) {
        self.shared.local_ranks[self.rank].step.store(step, Ordering::Relaxed);
    }

    /// Training step, if the program sets it.
    pub(crate) fn step(&self) -> Option<u64> {
        self.shared.local_ranks[self.rank].step()
    }

    /// Last and pending calls of this rank.
    pub(crate) fn history(&self) -> &History {
        &self.shared.local_ranks[self.rank].history
    }

    /// True if all ranks live in this process.
    pub(crate) fn is_local(&self) -> bool {
        self.shared.local
    }

    /// Options of the world.
    pub fn options(&self) -> &WorldOptions {
        &self.shared.options
    }

    /// All ranks, in order.
    pub fn peers(&self) -> &[PeerInfo] {
        &self.shared.peers
    }

    /// Sets the outbox for control messages to the other ranks. Called once, before the first collective.
    pub fn set_outbox(&self, outbox: Weak<dyn Outbox>) {
        // A second outbox would be a bug of the caller; the first one stays.
        let _ = self.shared.outbox.set(outbox);
    }

    /// Writes events and the report to the files that `env` names.
    pub(crate) fn report_to(&self, env: &LaunchEnv) {
        // Set once, by the rendezvous.
        let _ = self.shared.launch.set(env.clone());
    }

    /// Wakes `waker` at every change of the membership from now on, as long as it exists.
    pub fn add_waker(&self, waker: Weak<dyn Wake>) {
        let mut wakers = lock(&self.shared.wakers);
        wakers.retain(|waker| waker.strong_count() > 0);
        wakers.push(waker);
    }

    /// A waker to poll together with sockets. It becomes readable at every change of the membership, as long as it
    /// exists.
    ///
    /// # Errors
    /// [`Error::PeerFailed`] of this rank if it cannot have another socket.
    pub(crate) fn new_waker(&self) -> Result<Arc<Waker>> {
        let waker = Arc::new(Waker::new().map_err(|e| self.without_socket(&e))?);
        let weak: Weak<dyn Wake> = Arc::downgrade(&waker) as Weak<dyn Wake>;
        self.add_waker(weak);
        Ok(waker)
    }

    /// Error of this rank, which cannot have another socket.
    pub(crate) fn without_socket(&self, e: &io::Error) -> Error {
        let shortage = descriptors::shortage(e, self.shared.peers.len());
        self.own_error(shortage.unwrap_or_else(|| format!("it cannot have another socket: {e}")))
    }

    /// Checks that the world goes on.
    ///
    /// # Errors
    /// The root cause that ended it.
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

    /// True if `rank` takes part no more: it said goodbye, or ended unheard. Messages and data that it sent before may
    /// still be on their way.
    pub fn has_left(&self, rank: usize) -> bool {
        self.shared.presence.has_left(rank)
    }

    /// True if this rank has heard the goodbye of `rank`.
    fn said_goodbye(&self, rank: usize) -> bool {
        self.shared.presence.said_goodbye(rank)
    }

    /// True if `rank` has ended unheard: it is not known whether it said goodbye or died.
    fn is_unannounced(&self, rank: usize) -> bool {
        self.shared.presence.ended_unheard(rank)
    }
}
