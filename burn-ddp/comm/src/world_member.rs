//! State that all handles and groups of a rank share: its place in the job, its engines, and its goodbye. Every call of
//! a group runs through [`Member::run`].

use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError, RwLock, Weak};

use crate::call::call_arguments::Site;
use crate::call::{Call, CallInfo, Collective, GroupId, Members};
use crate::engine::Fabric;
use crate::group::{CallPath, ProcessGroup};
use crate::history::Log;
use crate::membership::{Membership, panic_hook};
use crate::poison_free_locks::lock;
use crate::timeline::Timeline;
use crate::topology::Machines;
use crate::{Error, PeerInfo, Result, WorldOptions};

/// Result of joining: this rank's place among all ranks, and its connections to them.
pub(crate) struct Seat {
    pub(crate) rank: usize,
    pub(crate) local_world_size: usize,
    pub(crate) machines: Machines,
    /// All ranks in order; `peers[rank]` is this one.
    pub(crate) peers: Vec<PeerInfo>,
    pub(crate) membership: Arc<Membership>,
    pub(crate) fabric: Arc<dyn Fabric>,
    /// The control connections, which live as long as the membership. Dropped after the goodbye; its `Drop` must not
    /// block.
    pub(crate) keep_alive: Option<Box<dyn Send + Sync>>,
}

/// Shared by all handles and groups of a rank. Its `Drop` sends the goodbye.
pub(crate) struct Member {
    pub(crate) seat: Seat,
    pub(crate) options: WorldOptions,
    /// Makes the engines of the next groups: the seat's fabric, unless `set_fabric` has replaced it.
    fabric: RwLock<Arc<dyn Fabric>>,
    /// Number of the next group. Locked while a group is made, so that all ranks number them alike.
    pub(crate) next_group: Mutex<u64>,
    /// Number of the next sub-group that this rank could lead.
    next_sub_group: AtomicU64,
    /// Starts with the first group, ends with the goodbye.
    timeline: OnceLock<Timeline>,
    left: AtomicBool,
    /// Groups of this rank: all open ones, and some that are dropped already. A group is added when it is made; the
    /// goodbye closes all.
    groups: Mutex<Vec<Weak<CallPath>>>,
}

impl Member {
    pub(crate) fn new(seat: Seat, options: WorldOptions) -> Self {
        Member {
            fabric: RwLock::new(seat.fabric.clone()),
            seat,
            options,
            next_group: Mutex::new(1),
            next_sub_group: AtomicU64::new(1),
            timeline: OnceLock::new(),
            left: AtomicBool::new(false),
            groups: Mutex::new(Vec::new()),
        }
    }

    pub(crate) fn me(&self) -> &PeerInfo {
        &self.seat.peers[self.seat.rank]
    }

    pub(crate) fn fabric(&self) -> Arc<dyn Fabric> {
        self.fabric.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    pub(crate) fn set_fabric(&self, fabric: Arc<dyn Fabric>) {
        *self.fabric.write().unwrap_or_else(PoisonError::into_inner) = fabric;
    }

    /// Number for a sub-group that this rank may come to lead; each call returns another one.
    pub(crate) fn sub_group_number(&self) -> u64 {
        self.next_sub_group.fetch_add(1, Ordering::Relaxed)
    }

    /// Makes the group with the number `group`, together with its other members.
    pub(crate) fn open_group(self: &Arc<Member>, group: u64, members: Members, site: Site) -> Result<ProcessGroup> {
        let Seat { rank, membership, .. } = &self.seat;
        let fabric = self.fabric();
        let info = CallInfo { step: membership.step(), ..CallInfo::bare(Collective::NewGroup, group, 0, site) };
        let call = Call::new(info, Arc::new(members), *rank, self.options.timeout);
        let log = membership.history().open(group, call.members.clone());
        let opened = self.run(&log, &call, || {
            let group_rank = call.group_rank()?;
            // Empties a part that an earlier job left. Before the barrier no rank of this job can have ended, so no
            // merge has taken that part for this job's.
            self.start_timeline()?;
            let mut engine = fabric.open(&call)?;
            engine.barrier(&call)?;
            Ok((group_rank, engine))
        });
        let (group_rank, engine) = opened.inspect_err(|_| membership.history().close(&log))?;
        tracing::debug!(rank, group = %GroupId(group), engine = engine.name(), "new group");
        Ok(ProcessGroup::new(CallPath::new(self.clone(), group_rank, call, log, engine)))
    }

    /// Runs one call, unless the world has ended. An error ends the world unless it leaves the group usable.
    pub(crate) fn run<R>(&self, log: &Log, call: &Call, body: impl FnOnce() -> Result<R>) -> Result<R> {
        let membership = &self.seat.membership;
        if self.left.load(Ordering::Acquire) {
            return Err(membership.left_error(self.seat.rank).noticed_by(&call.info));
        }
        membership.announce_stops();
        log.begin(call);
        let result = membership.check().and_then(|()| body());
        let result = result.map_err(|error| self.with_purposes(membership.conclude(error, call)));
        log.end(call, result.is_ok());
        result
    }

    /// The error with the purposes of the calls in it, as far as the groups of this rank know them.
    #[cold]
    pub(crate) fn with_purposes(&self, mut error: Error) -> Error {
        if let Error::Deadlock { calls } = &mut error {
            let groups: Vec<_> = lock(&self.groups).iter().filter_map(Weak::upgrade).collect();
            for stuck in calls {
                let group = groups.iter().find(|group| group.id == stuck.call.group);
                stuck.purpose = group.and_then(|group| group.purpose(stuck.call.tag));
            }
        }
        error
    }

    /// Ends the world if this thread panics.
    pub(crate) fn fail_if_panicking(&self) {
        if std::thread::panicking() && !self.left.load(Ordering::Acquire) {
            self.seat.membership.fail_self(panic_hook::describe());
        }
    }

    pub(crate) fn leave(&self) {
        if !self.left.swap(true, Ordering::AcqRel) {
            self.seat.membership.goodbye();
            // Peers must hear the goodbye before they see the data connections end. The connections end behind all
            // data that was sent over them.
            let groups = std::mem::take(&mut *lock(&self.groups));
            groups.iter().filter_map(Weak::upgrade).for_each(CallPath::leave);
            self.end_timeline();
        }
    }

    /// Notes that `group` is open, to be closed when this rank leaves.
    pub(crate) fn opened(&self, group: &Arc<CallPath>) {
        let mut groups = lock(&self.groups);
        groups.retain(|group| group.strong_count() > 0);
        groups.push(Arc::downgrade(group));
        drop(groups);
        // `leave` may have taken the list of groups before this one was in it.
        if self.left.load(Ordering::Acquire) {
            group.clone().leave();
        }
    }

    /// `None` if nothing is recorded.
    #[inline]
    pub(crate) fn timeline(&self) -> Option<&Timeline> {
        self.timeline.get()
    }

    fn start_timeline(&self) -> Result<()> {
        let Some(file) = self.options.timeline.as_deref().filter(|_| self.timeline.get().is_none()) else {
            return Ok(());
        };
        let timeline = Timeline::start(file, self.me(), self.seat.peers.len()).map_err(|error| Error::Environment {
            message: format!(
                "the timeline {} (BURN_DDP_TIMELINE, burnrun --timeline) cannot be written: {error}",
                file.display()
            ),
        })?;
        // Never set twice: the first group is one of all ranks, and those are made one after the other.
        let _ = self.timeline.set(timeline);
        Ok(())
    }

    pub(crate) fn end_timeline(&self) {
        if let Some(timeline) = self.timeline.get() {
            timeline.end(self.seat.membership.check().is_err());
        }
    }
}

impl Drop for Member {
    fn drop(&mut self) {
        self.fail_if_panicking();
        self.leave();
        // The goodbye has been sent; now the control connections may close.
        self.seat.keep_alive = None;
    }
}

impl fmt::Debug for Member {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Member")
            .field("peer", self.me())
            .field("world_size", &self.seat.peers.len())
            .field("engine", &self.fabric().name())
            .finish_non_exhaustive()
    }
}
