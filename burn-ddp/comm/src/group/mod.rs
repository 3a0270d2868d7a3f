//! Process groups and their collectives.

use std::fmt;
use std::panic::Location;
use std::sync::Arc;
use std::time::Duration;

#[cfg(doc)]
use crate::Error;
use crate::Result;
use crate::call::GroupId;
use crate::call::call_arguments::{Caller, Site};
use crate::call::users_call_site::on_behalf_of;

mod async_calls;
mod async_queue;
mod call_path;
mod checked_calls;
mod data_movement;
mod divided_calls;
mod objects;
mod pending_result;
mod point_to_point;
mod reductions;
mod shared_buffer_reductions;
mod split;

use self::async_queue::CallQueue;
pub(crate) use self::call_path::CallPath;
pub use self::objects::MAX_OBJECT_BYTES;
#[cfg(feature = "fuzzing")]
pub(crate) use self::objects::decode;
pub use self::pending_result::Pending;

/// Ranks that run collectives together, in the same order. [`World::group`](crate::World::group) makes a group of all
/// ranks, [`split`](Self::split) one of some ranks.
///
/// All ranks of the group call each collective, with the same operation, element type, length, root and tag. The ranks
/// compare their calls; if two calls differ, every rank gets an error that shows both. Calls from several threads of a
/// rank run one after the other. Each call blocks until it is done, at most for
/// [`WorldOptions::timeout`](crate::WorldOptions::timeout) from when its turn has come. Methods whose names end in
/// `_async` do not block: they return a [`Pending`] to wait for.
///
/// Arguments and results name a rank by its place in the group; errors and reports show its rank in the world.
///
/// # Errors
/// Every collective can return [`Error::Mismatch`], [`Error::Deadlock`], [`Error::Timeout`], [`Error::PeerLost`],
/// [`Error::PeerLeft`], [`Error::PeerFailed`], [`Error::OutOfStep`] and [`Error::Protocol`]; these end the world.
/// [`Error::InvalidArgument`] leaves the group usable. After an error buffers hold unspecified values.
///
/// # Cost
/// Each collective states its cost on the engines `threads`, `tcp` and `mpi`: steps, which are exchanges of messages
/// between ranks, and the bytes of elements in them. Each message also has a header of about 100 bytes. On `shm` ranks
/// read each other's data in shared memory instead; on `shm+tcp` most collectives send fewer bytes between machines.
///
/// # Numerics
/// Each element is reduced by a balanced binary tree over the ranks, so results have the same bits on every rank, in
/// every run, and on every engine that reduces in host memory. f16, bf16 and f32 are accumulated in f32, f64 in f64,
/// integers in their own width, wrapping. A mean divides once, at the end, before the result is rounded to its type.
///
/// # Example
///
/// ```
/// use burn_ddp_comm::World;
///
/// World::spawn(2, |world| {
///     let group = world.group()?;
///     assert_eq!((group.rank(), group.world_size()), (world.rank(), 2));
///     assert_eq!((group.ranks(), group.engine()), (&[0, 1][..], "threads"));
///     println!("group {}: a call takes {:?} at most", group.id(), group.timeout());
///     group.barrier()?;
///     println!("{:?} waiting for other ranks so far", group.time_in_calls());
///     Ok::<_, burn_ddp_comm::Error>(())
/// }).into_iter().collect::<Result<(), _>>()?;
/// # Ok::<(), burn_ddp_comm::Error>(())
/// ```
pub struct ProcessGroup {
    calls: Arc<CallPath>,
    /// The `_async` calls that have not run yet, and the thread that runs them.
    queue: Arc<CallQueue>,
    /// The source line that errors show instead of the caller's; see [`attribute_to`](Self::attribute_to).
    site: Option<Site>,
}

impl ProcessGroup {
    pub(crate) fn new(calls: Arc<CallPath>) -> ProcessGroup {
        ProcessGroup { calls, queue: Arc::default(), site: None }
    }

    /// This rank's place in the group, from 0: its group rank.
    pub fn rank(&self) -> usize {
        self.calls.rank
    }

    /// Number of ranks in the group.
    pub fn world_size(&self) -> usize {
        self.calls.size()
    }

    /// The ranks of the group as ranks of the world, in the order of the group.
    pub fn ranks(&self) -> &[usize] {
        self.calls.members.ranks()
    }

    /// The number of the group in its world, the same on all its ranks; [`GroupId`] shows it as errors do.
    pub fn id(&self) -> u64 {
        self.calls.id
    }

    /// Name of the engine that runs this group's collectives. A sub-group may have another engine than a group of all
    /// ranks: for example `shm` if its ranks are all on one of several machines.
    pub fn engine(&self) -> &'static str {
        self.calls.engine
    }

    /// From now on errors and reports say that this group's calls are "of the model wrapped at" `site`, instead of
    /// showing the line of each call: for calls from inside a backward, whose line is not in the user's program.
    ///
    /// ```
    /// # use burn_ddp_comm::{World, WorldOptions};
    /// let mut group = World::solo(WorldOptions::default()).group()?;
    /// group.attribute_to(std::panic::Location::caller());
    /// # Ok::<(), burn_ddp_comm::Error>(())
    /// ```
    pub fn attribute_to(&mut self, site: &'static Location<'static>) {
        self.site = Some(on_behalf_of().unwrap_or(site));
    }

    /// Hides the calls of this group from the [timeline](crate::timeline): for code that records them there under names
    /// of its own.
    ///
    /// ```
    /// # use burn_ddp_comm::{World, WorldOptions};
    /// let group = World::solo(WorldOptions::default()).group()?;
    /// group.hide_from_timeline();
    /// # Ok::<(), burn_ddp_comm::Error>(())
    /// ```
    pub fn hide_from_timeline(&self) {
        self.calls.hide();
    }

    /// Lets errors about deadlocks say what the calls of this group are for, to users who do not see these calls:
    /// `purpose` returns it for a call's tag, as the rest of a sentence that begins with a rank (`reads a.weight`), or
    /// `None`. On each rank it is this rank's `purpose` that counts, whichever call returns the error.
    ///
    /// `purpose` must take any number, also 0 and the engine's own tags, and make no calls. Only the first one of a
    /// group counts.
    ///
    /// ```
    /// # use burn_ddp_comm::{World, WorldOptions};
    /// let group = World::solo(WorldOptions::default()).group()?;
    /// let names = ["a.weight", "b.weight"];
    /// group.explain_tags(move |tag| names.get(tag as usize).map(|name| format!("reads {name}")));
    /// # Ok::<(), burn_ddp_comm::Error>(())
    /// ```
    pub fn explain_tags(&self, purpose: impl Fn(u64) -> Option<String> + Send + Sync + 'static) {
        // A second one is ignored.
        let _ = self.calls.purpose_of_tag.set(Box::new(purpose));
    }

    /// Deadline of a call, see [`WorldOptions::timeout`](crate::WorldOptions::timeout).
    pub fn timeout(&self) -> Duration {
        self.calls.member.seat.membership.options().timeout
    }

    /// Time that this rank has spent in calls of this group so far, most of it waiting for peers.
    pub fn time_in_calls(&self) -> Duration {
        self.calls.time_in_calls()
    }

    /// Blocks until all ranks have called it. Carries no data. Costs one step, in which only headers travel.
    ///
    /// # Errors
    /// Those of all collectives.
    ///
    /// ```
    /// use burn_ddp_comm::{Error, WorldOptions, World};
    /// use std::time::Duration;
    ///
    /// // Rank 1 makes no group: rank 0 does not hang, and its error names rank 1.
    /// let options = WorldOptions { timeout: Duration::from_millis(50), ..WorldOptions::default() };
    /// let worlds = World::threads(2, options);
    /// let error = worlds[0].group().unwrap_err();
    /// assert!(matches!(&error, Error::Timeout { waiting_for, .. } if *waiting_for == [1]));
    /// ```
    #[track_caller]
    pub fn barrier(&self) -> Result<()> {
        self.calls.barrier(self.in_turn(Location::caller()))
    }

    /// Waits until the `_async` calls that were started before are done; returns the origin of a blocking call.
    #[inline]
    pub(crate) fn in_turn(&self, site: Site) -> Caller {
        self.queue.settle();
        self.caller(site)
    }

    #[inline]
    fn caller(&self, site: Site) -> Caller {
        let on_behalf_of = on_behalf_of();
        let wrapped = on_behalf_of.is_none() && self.site.is_some();
        let site = on_behalf_of.or(self.site).unwrap_or(site);
        Caller { site, wrapped, step: self.calls.member.seat.membership.step() }
    }
}

/// `_async` calls that were started are still done. Ends the world if this thread is panicking: the peers would wait
/// for this group in vain.
impl Drop for ProcessGroup {
    fn drop(&mut self) {
        self.calls.member.fail_if_panicking();
        self.queue.close();
    }
}

impl fmt::Debug for ProcessGroup {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let id = GroupId(self.id()).to_string();
        f.debug_struct("ProcessGroup").field("id", &id).field("member", &self.calls.member).finish_non_exhaustive()
    }
}
