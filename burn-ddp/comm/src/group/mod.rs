//! The collectives.

use std::fmt;
use std::panic::Location;
use std::sync::Arc;
use std::time::Duration;

#[cfg(doc)]
use crate::Error;
use crate::Result;
use crate::call::GroupId;
use crate::call::call_arguments::{Caller, Site};
use crate::call::call_attribution::on_behalf_of;

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
mod row_division;
mod shared_buffer_reductions;
mod split;

use self::async_queue::CallQueue;
pub(crate) use self::call_path::CallPath;
pub use self::divided_calls::PartReduction;
pub use self::objects::MAX_OBJECT_BYTES;
#[cfg(feature = "fuzzing")]
pub(crate) use self::objects::decode;
pub use self::pending_result::Pending;
pub use self::row_division::RowDivision;

/// Ranks that do collectives together, in one order. Made by [`World::group`](crate::World::group), of all ranks, and
/// by [`split`](Self::split), of some.
///
/// A collective is called by all ranks, with the same arguments where they must agree; calls are compared, and a
/// difference is an error on all ranks that shows both calls. Calls from several threads of a rank are done one after
/// the other. All of them block until done, at most for [`WorldOptions::timeout`](crate::WorldOptions::timeout); those
/// whose names end in `_async` return at once what can be [waited for](Pending).
///
/// Ranks are passed and returned by their place in the group; errors and reports show ranks of the world.
///
/// # Errors
/// Common to all collectives, and the end of the world unless said otherwise: [`Error::Mismatch`], [`Error::Timeout`],
/// [`Error::PeerLost`], [`Error::PeerLeft`], [`Error::PeerFailed`], [`Error::OutOfStep`]. [`Error::InvalidArgument`]
/// leaves the group usable. After an error buffers hold unspecified values.
///
/// # Numerics
/// Reductions are a balanced binary tree over the ranks for each element, so results have the same bits on every rank,
/// in every run, on every engine between hosts. f16, bf16 and f32 are accumulated in f32, f64 in f64, integers in their
/// own width, wrapping. A mean is one division at the end, before the one rounding.
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
    /// Calls that were started and not waited for.
    queue: Arc<CallQueue>,
    /// The line that errors show instead of the caller's.
    site: Option<Site>,
}

impl ProcessGroup {
    pub(crate) fn new(calls: Arc<CallPath>) -> ProcessGroup {
        ProcessGroup { calls, queue: Arc::default(), site: None }
    }

    /// Group rank of this rank.
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

    /// Name of the engine that does its calls. Groups of some ranks may have another one than groups of all: `shm` on
    /// one machine of several.
    pub fn engine(&self) -> &'static str {
        self.calls.engine
    }

    /// From now on errors and reports say that calls are "of the model wrapped at" `site`: for code that is called back
    /// from a backward.
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

    /// The [timeline](crate::timeline) does not show the calls of this group: for code that shows them under names of
    /// its own.
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

    /// Deadline of a call, see [`WorldOptions::timeout`](crate::WorldOptions::timeout).
    pub fn timeout(&self) -> Duration {
        self.calls.member.seat.membership.options().timeout
    }

    /// Time that this rank has spent in calls of this group so far: mostly waiting for peers.
    pub fn time_in_calls(&self) -> Duration {
        self.calls.time_in_calls()
    }

    /// Waits until all ranks are here. One step, no bytes but the call itself.
    ///
    /// # Errors
    /// Those of all collectives.
    ///
    /// ```
    /// use burn_ddp_comm::{Error, WorldOptions, World};
    /// use std::time::Duration;
    ///
    /// // Rank 1 never comes: rank 0 does not hang, and says who.
    /// let options = WorldOptions { timeout: Duration::from_millis(50), ..WorldOptions::default() };
    /// let worlds = World::threads(2, options);
    /// let error = worlds[0].group().unwrap_err();
    /// assert!(matches!(&error, Error::Timeout { waiting_for, .. } if *waiting_for == [1]));
    /// ```
    #[track_caller]
    pub fn barrier(&self) -> Result<()> {
        self.calls.barrier(self.in_turn(Location::caller()))
    }

    /// The origin of a blocking call, once the calls that were started before are done.
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

/// Leaves started calls to be done. Ends the world if the rank panics: the peers would wait for this group in vain.
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
