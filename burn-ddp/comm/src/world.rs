//! A rank's membership of a job.

use std::panic::Location;
use std::sync::Arc;

use crate::call::Members;
use crate::call::users_call_site::on_behalf_of;
use crate::engine::Fabric;
use crate::engine::threads::ThreadsFabric;
use crate::group::ProcessGroup;
use crate::membership::Membership;
use crate::membership::panic_hook;
use crate::poison_free_locks::lock;
use crate::post_mortem::Event;
use crate::timeline::Timeline;
use crate::topology::Machines;
use crate::world_member::{Member, Seat};
use crate::{PeerInfo, Progress, Result, Track, WorldOptions};

/// One rank's membership of a job: its rank, its peers, and the way to talk to them.
///
/// Clones are handles to the same membership. When the last handle and the last group of a rank are dropped, the rank
/// sends its peers a goodbye; if its thread is panicking, it sends the panic as the cause that ends the world. Neither
/// blocks.
///
/// A process joins by [`join`](World::join); tests and examples run ranks as threads by [`spawn`](World::spawn).
///
/// ```
/// use burn_ddp_comm::{World, WorldOptions};
/// let world = World::threads(2, WorldOptions::default()).remove(1); // rank 1's, to be moved to its thread
/// assert_eq!((world.rank(), world.world_size(), world.peers().len()), (1, 2, 2));
/// assert_eq!((world.local_rank(), world.local_world_size()), (1, 2)); // on its machine
/// assert_eq!((world.node_rank(), world.machines().count()), (0, 1));
/// assert!(!world.timeline().is_on() && world.options().timeline.is_none());
/// assert_eq!(world.check(), Ok(())); // an error once a rank has failed
/// world.leave();
/// ```
#[derive(Clone, Debug)]
pub struct World {
    member: Arc<Member>,
}

impl World {
    /// A world of one rank. Everything works and every check runs, as in a larger world.
    ///
    /// ```
    /// use burn_ddp_comm::{WorldOptions, ReduceOp, World};
    ///
    /// let group = World::solo(WorldOptions::default()).group()?;
    /// let mut x = [1.0, 2.0];
    /// group.all_reduce(&mut x, ReduceOp::Mean)?;
    /// assert_eq!(x, [1.0, 2.0]);
    /// assert!(group.all_reduce(&mut [1_i32], ReduceOp::Mean).is_err()); // as with many ranks
    /// # Ok::<(), burn_ddp_comm::Error>(())
    /// ```
    pub fn solo(options: WorldOptions) -> World {
        World::threads(1, options).remove(0)
    }

    /// A world of `n` ranks in this process: one `World` per rank, in rank order, each to be moved to a thread of its
    /// own. [`spawn`](Self::spawn) starts the threads, too.
    pub fn threads(n: usize, options: WorldOptions) -> Vec<World> {
        let peers: Vec<PeerInfo> = (0..n).map(|rank| PeerInfo::here(rank, rank, 0)).collect();
        let memberships = Membership::shared(peers.clone(), options.clone());
        let fabrics = ThreadsFabric::all(&memberships);
        let seat = |(membership, fabric): (Arc<Membership>, ThreadsFabric)| Seat {
            rank: membership.rank(),
            local_world_size: n,
            machines: Machines::new(&vec![(); n]),
            peers: peers.clone(),
            membership,
            fabric: Arc::new(fabric),
            keep_alive: None,
        };
        memberships.into_iter().zip(fabrics).map(|pair| World::from_seat(seat(pair), options.clone())).collect()
    }

    /// Runs `rank_main` on `n` ranks, each on a thread of this process, with default [`WorldOptions`]. Returns their
    /// results in rank order once all have ended.
    ///
    /// ```
    /// use burn_ddp_comm::{ReduceOp, World};
    ///
    /// let sums = World::spawn(4, |world| {
    ///     let mut x = [world.rank() as f32];
    ///     world.group()?.all_reduce(&mut x, ReduceOp::Sum)?;
    ///     Ok::<_, burn_ddp_comm::Error>(x[0])
    /// });
    /// assert_eq!(sums, [Ok(6.0), Ok(6.0), Ok(6.0), Ok(6.0)]);
    /// ```
    ///
    /// # Panics
    /// If a rank panicked.
    pub fn spawn<R: Send>(n: usize, rank_main: impl Fn(World) -> R + Sync) -> Vec<R> {
        std::thread::scope(|scope| {
            let rank_main = &rank_main;
            let ranks: Vec<_> = World::threads(n, WorldOptions::default())
                .into_iter()
                .map(|world| scope.spawn(move || rank_main(world)))
                .collect();
            let ended: Vec<_> = ranks.into_iter().map(|rank| rank.join()).collect();
            ended.into_iter().map(|rank| rank.unwrap_or_else(|panic| std::panic::resume_unwind(panic))).collect()
        })
    }

    pub(crate) fn from_seat(seat: Seat, options: WorldOptions) -> World {
        panic_hook::watch(&seat.membership);
        World { member: Arc::new(Member::new(seat, options)) }
    }

    /// Number of this rank in the world, from 0.
    pub fn rank(&self) -> usize {
        self.member.seat.rank
    }

    /// Number of ranks.
    pub fn world_size(&self) -> usize {
        self.member.seat.peers.len()
    }

    /// Number of this rank among the ranks of its machine, from 0.
    pub fn local_rank(&self) -> usize {
        self.member.me().local_rank
    }

    /// Number of ranks on this rank's machine.
    pub fn local_world_size(&self) -> usize {
        self.member.seat.local_world_size
    }

    /// Number of this rank's machine, from 0.
    pub fn node_rank(&self) -> usize {
        self.member.me().node_rank
    }

    /// Machines of this world, and the ranks on each.
    pub fn machines(&self) -> &Machines {
        &self.member.seat.machines
    }

    /// All ranks in order, this one included.
    pub fn peers(&self) -> &[PeerInfo] {
        &self.member.seat.peers
    }

    /// Name of the engine that groups of all ranks use: `threads`, `shm`, `tcp`, `shm+tcp`, or the engine of
    /// [`set_fabric`](Self::set_fabric).
    pub fn engine(&self) -> &'static str {
        self.member.fabric().name()
    }

    /// Installs an engine from outside this crate: later groups get their engines from the fabric that `make` returns.
    /// `make` gets the world's own fabric and this rank's membership.
    ///
    /// All ranks call it, between the same two groups. It compares nothing between ranks: if it fails on one rank only,
    /// the program must make the other ranks stop, by [`fail`](Self::fail) or over a group made before.
    ///
    /// ```
    /// use burn_ddp_comm::{WorldOptions, World};
    ///
    /// let world = World::solo(WorldOptions::default());
    /// // A fabric for another engine would wrap `own`, or replace it.
    /// world.set_fabric(|own, _membership| Ok::<_, burn_ddp_comm::Error>(own))?;
    /// assert_eq!(world.engine(), "threads");
    /// # Ok::<(), burn_ddp_comm::Error>(())
    /// ```
    ///
    /// # Errors
    /// The error of `make`; the world then keeps the fabric that it had.
    pub fn set_fabric<E>(
        &self,
        make: impl FnOnce(Arc<dyn Fabric>, Arc<Membership>) -> Result<Arc<dyn Fabric>, E>,
    ) -> Result<(), E> {
        let seat = &self.member.seat;
        self.member.set_fabric(make(seat.fabric.clone(), seat.membership.clone())?);
        Ok(())
    }

    /// Options of this world.
    pub fn options(&self) -> &WorldOptions {
        &self.member.options
    }

    /// Timeline of this rank; records nothing unless [`WorldOptions::timeline`] is set and a group was made.
    pub fn timeline(&self) -> Timeline {
        self.member.timeline().cloned().unwrap_or_default()
    }

    /// Makes a group of all ranks. Each group counts its own calls and has its own connections, so no call on one group
    /// waits for a call on another.
    ///
    /// All ranks call it, and make their groups in the same order; each holds its end of the group afterwards. Blocks
    /// until all ranks have called it. Costs one [`barrier`](ProcessGroup::barrier), and before it the time to connect
    /// the ranks or to share memory between those of one machine.
    ///
    /// # Errors
    /// Those of a [`barrier`](ProcessGroup::barrier) on the new group;
    /// [`Error::Environment`](crate::Error::Environment) if the timeline cannot be written.
    #[track_caller]
    pub fn group(&self) -> Result<ProcessGroup> {
        let site = on_behalf_of().unwrap_or(Location::caller());
        let mut next_group = lock(&self.member.next_group);
        let group = *next_group;
        *next_group += 1;
        self.member.open_group(group, Members::all(self.world_size()), site)
    }

    /// Checks that no error has ended the world, as far as this rank knows. Sends nothing and does not block.
    ///
    /// # Errors
    /// The root cause that ended the world, which every collective returns from then on.
    pub fn check(&self) -> Result<()> {
        self.member.seat.membership.check().map_err(|error| self.member.with_purposes(error))
    }

    /// Ends the world: every pending and later collective, on every rank and group, returns an error with this rank
    /// and this cause. Waits for no peer. If the world has already ended, the first cause stays.
    ///
    /// ```
    /// use burn_ddp_comm::World;
    ///
    /// let results = World::spawn(2, |world| {
    ///     let group = world.group()?;
    ///     if world.rank() == 1 {
    ///         world.fail("disk full");
    ///     }
    ///     group.barrier()
    /// });
    /// for result in results {
    ///     let error = result.unwrap_err();
    ///     assert_eq!(error.rank(), Some(1));
    ///     assert!(error.to_string().contains("disk full"));
    /// }
    /// ```
    pub fn fail(&self, cause: impl Into<String>) {
        self.member.seat.membership.fail_self(cause.into());
    }

    /// Writes `event` for the launcher, if the launcher has given this rank a [file for events](crate::post_mortem).
    /// Costs the opening of a file. Errors are logged: a rank does not fail because its launcher hears nothing.
    ///
    /// ```
    /// # use burn_ddp_comm::post_mortem::{Event, now_ms};
    /// # use burn_ddp_comm::{World, WorldOptions};
    /// let world = World::solo(WorldOptions::default());
    /// let checkpoint = "checkpoints/step-100".into();
    /// world.tell_launcher(&Event::Saved { rank: world.rank(), checkpoint, at: now_ms() });
    /// ```
    pub fn tell_launcher(&self, event: &Event) {
        self.member.seat.membership.append_event(event);
    }

    /// [`fail`](Self::fail)s with the message and line of this thread's panic. For destructors of values that a rank
    /// holds.
    ///
    /// ```
    /// struct Guard(burn_ddp_comm::World); // other handles to this world may outlive the guard
    /// impl Drop for Guard {
    ///     fn drop(&mut self) {
    ///         if std::thread::panicking() {
    ///             self.0.fail_with_panic();
    ///         }
    ///     }
    /// }
    /// ```
    pub fn fail_with_panic(&self) {
        self.member.seat.membership.fail_self(panic_hook::describe());
        // Dropping the last handle would end it too, but other handles may never be dropped.
        self.member.end_timeline();
    }

    /// Sets this rank's training step. Errors and reports of its later collectives show it; ranks do not compare it.
    ///
    /// ```
    /// use burn_ddp_comm::{WorldOptions, World};
    ///
    /// let world = World::solo(WorldOptions::default());
    /// let group = world.group()?;
    /// world.set_step(28);
    /// let error = group.broadcast(&mut [0.0_f32], 7).unwrap_err().to_string();
    /// assert!(error.contains("in step 28"), "{error}");
    /// # Ok::<(), burn_ddp_comm::Error>(())
    /// ```
    pub fn set_step(&self, step: u64) {
        self.member.seat.membership.set_step(step);
    }

    /// Sends the goodbye now, rather than when the last handle is dropped. Never blocks; a second call does nothing.
    ///
    /// Later collectives of this rank return an error. A collective of another rank fails only if it needs more data
    /// from this rank than this rank has sent; it then fails at once, even if this rank's groups are still open.
    ///
    /// Does not wait for a collective that another thread of this rank is in. That collective goes on, and succeeds if
    /// no other rank waits for this one in it any more. Otherwise it fails on every rank, this one included, because
    /// this rank has left. So call `leave` when no thread is in a collective.
    pub fn leave(&self) {
        self.member.leave();
    }

    /// Records that this rank has reached the step `at` of `track`, such as a batch of a data loader. Does not block;
    /// sends nothing but the stops that [`stop_with_next_call`](Self::stop_with_next_call) has postponed.
    ///
    /// # Errors
    /// [`Error::OutOfStep`](crate::Error::OutOfStep), on all ranks, if a peer [stopped](World::stop) before this step
    /// of the same epoch; the root cause, if the world has ended.
    pub fn advance(&self, track: Track, at: Progress) -> Result<()> {
        self.member.seat.membership.advance(track, at)
    }

    /// Tells all ranks that this rank has stopped `track` at step `at` and will not go beyond that step in this epoch.
    /// Never blocks.
    ///
    /// A peer that is beyond that step, or gets beyond it later, would wait for this rank in vain. So the world then
    /// ends with [`Error::OutOfStep`](crate::Error::OutOfStep), which names this rank, `what` and both steps. It is no
    /// error if all ranks stop at the same step, or go on to a later epoch.
    ///
    /// ```
    /// use burn_ddp_comm::{Progress, Track, World};
    ///
    /// let results = World::spawn(2, |world| {
    ///     let group = world.group()?;
    ///     let track = Track::Batches { group: group.id(), loader: 0, run: 0 };
    ///     for step in 0..10 {
    ///         let at = Progress { epoch: 0, step };
    ///         world.advance(track, at)?;
    ///         if world.rank() == 1 && step == 3 {
    ///             world.stop(track, at, "the training loader");
    ///             break;
    ///         }
    ///         group.barrier()?; // rank 0 would wait here forever
    ///     }
    ///     group.barrier()
    /// });
    /// let error = results[0].clone().unwrap_err().to_string();
    /// assert!(error.contains("stopped the training loader at epoch 0, step 3"), "{error}");
    /// assert!(error.contains("rank 0 went on to epoch 0, step 4"), "{error}");
    /// ```
    pub fn stop(&self, track: Track, at: Progress, what: &str) {
        self.member.seat.membership.stop(track, at, what);
    }

    /// A [`stop`](Self::stop) that is sent later: with this rank's next collective, [`advance`](Self::advance) or
    /// goodbye; between processes after a second or two at the latest. For destructors: the delay lets a rank that
    /// stops because of an error [`fail`](Self::fail) with that error first, so that the other ranks return it.
    ///
    /// ```
    /// use burn_ddp_comm::{Progress, Track, World, WorldOptions};
    /// let world = World::solo(WorldOptions::default());
    /// let track = Track::Batches { group: world.group()?.id(), loader: 0, run: 0 };
    /// world.stop_with_next_call(track, Progress { epoch: 0, step: 3 }, "the training loader");
    /// # Ok::<(), burn_ddp_comm::Error>(())
    /// ```
    pub fn stop_with_next_call(&self, track: Track, at: Progress, what: &str) {
        self.member.seat.membership.stop_with_next_call(track, at, what);
    }
}
