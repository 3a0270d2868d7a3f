//! A rank's membership of a job.

use std::panic::Location;
use std::sync::Arc;

use crate::call::Members;
use crate::call::call_attribution::on_behalf_of;
use crate::engine::Fabric;
use crate::engine::threads::ThreadsFabric;
use crate::group::ProcessGroup;
use crate::membership::Membership;
use crate::membership::panic_hook;
use crate::poison_free_locks::lock;
use crate::timeline::Timeline;
use crate::topology::Machines;
use crate::world_member::{Member, Seat};
use crate::{PeerInfo, Progress, Result, Track, WorldOptions};

/// One rank's membership of a job: its rank, its peers, and the way to talk to them.
///
/// Clones are handles to the same membership. When the last handle and the last group of a rank are dropped, the rank
/// says goodbye; if that happens while it panics, it says that instead. Neither blocks.
///
/// A process joins by [`join`](World::join); tests and examples run ranks as threads by [`spawn`](World::spawn).
///
/// ```
/// use burn_ddp_comm::{World, WorldOptions};
/// let world = World::threads(2, WorldOptions::default()).remove(1); // each for a thread of its own
/// assert_eq!((world.rank(), world.world_size(), world.peers().len()), (1, 2, 2));
/// assert_eq!((world.local_rank(), world.local_world_size()), (1, 2)); // on its machine
/// assert_eq!((world.node_rank(), world.machines().count()), (0, 1));
/// assert!(!world.timeline().is_on() && world.options().timeline.is_none());
/// assert_eq!(world.check(), Ok(())); // an error once the job has ended by one
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

    /// A world of `n` ranks in this process, in rank order: one for each thread. [`spawn`](Self::spawn) starts the
    /// threads, too.
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

    /// Number of this rank.
    pub fn rank(&self) -> usize {
        self.member.seat.rank
    }

    /// Number of ranks.
    pub fn world_size(&self) -> usize {
        self.member.seat.peers.len()
    }

    /// Number of this rank among those of its machine.
    pub fn local_rank(&self) -> usize {
        self.member.me().local_rank
    }

    /// Number of ranks on its machine.
    pub fn local_world_size(&self) -> usize {
        self.member.seat.local_world_size
    }

    /// Number of its machine.
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

    /// Name of the engine of groups of all ranks: `threads`, `shm`, `tcp`, or the engine of
    /// [`set_fabric`](Self::set_fabric).
    pub fn engine(&self) -> &'static str {
        self.member.fabric().name()
    }

    /// Makes later groups get their engines from the fabric that `make` returns, given the world's own fabric and this
    /// rank's membership.
    ///
    /// The way in for engines outside this crate. All ranks call it, between the same groups. If it fails on one rank
    /// only, the caller tells the others, by [`fail`](Self::fail) or over a group made before.
    ///
    /// ```
    /// use burn_ddp_comm::{WorldOptions, World};
    ///
    /// let world = World::solo(WorldOptions::default());
    /// // An engine of one's own would wrap `own`, or take its place.
    /// world.set_fabric(|own, _membership| Ok::<_, burn_ddp_comm::Error>(own))?;
    /// assert_eq!(world.engine(), "threads");
    /// # Ok::<(), burn_ddp_comm::Error>(())
    /// ```
    ///
    /// # Errors
    /// Those of `make`; then nothing has changed.
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

    /// Makes a group of all ranks, with a sequence and connections of its own: nothing on one group waits for another.
    ///
    /// All ranks call it, and make their groups in the same order. Blocks until all have.
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

    /// Checks that the world goes on.
    ///
    /// # Errors
    /// The root cause that ended it, which is what every collective returns from then on.
    pub fn check(&self) -> Result<()> {
        self.member.seat.membership.check()
    }

    /// Gives up: every pending and later collective, on every rank and group, returns this cause, naming this rank.
    /// Never blocks. If the world has already ended, the first cause stays.
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

    /// [`fail`](Self::fail)s with the message and line of this thread's panic. For destructors of what a rank holds.
    ///
    /// ```
    /// struct Guard(burn_ddp_comm::World); // of which other handles may live on
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
        // The last handle may never be dropped.
        self.member.end_timeline();
    }

    /// Sets this rank's training step. Shown in errors and reports of its later collectives, never compared.
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

    /// Says goodbye now, rather than when the last handle is dropped. Never blocks; once is enough.
    ///
    /// Later collectives of this rank are an error. Those of the others are an error only if they need more of this
    /// rank than it has sent, and then at once, also where its groups are still open.
    ///
    /// A collective that another thread of this rank is in is not waited for, and goes on. It succeeds if no rank waits
    /// for this one in it any more. Otherwise a rank finds that this one has left, which is an error on every rank, and
    /// of that call, too. So leave when no thread is in a call.
    pub fn leave(&self) {
        self.member.leave();
    }

    /// Notes that this rank is `at` this step of `track`, such as the batches of a data loader. Sends nothing.
    ///
    /// # Errors
    /// [`Error::OutOfStep`](crate::Error::OutOfStep), on all ranks, if a peer [stopped](World::stop) before this step
    /// of the same epoch; the root cause, if the world has ended.
    pub fn advance(&self, track: Track, at: Progress) -> Result<()> {
        self.member.seat.membership.advance(track, at)
    }

    /// Notes that this rank has stopped `track` at step `at` and will not pass it in this epoch. Sent to all ranks;
    /// never blocks.
    ///
    /// A peer that is beyond it, or gets there, would wait for this rank in vain: so the world ends with
    /// [`Error::OutOfStep`](crate::Error::OutOfStep), which names this rank, `what` and both steps. All ranks may stop
    /// at the same step, and go on to a later epoch.
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

    /// [`stop`](Self::stop)s with this rank's next call, step or goodbye; between processes after a second or two even
    /// without. For destructors: a rank that stops because of an error can [`fail`](Self::fail) with it first, and the
    /// others return that.
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
