//! The collectives.

use std::fmt;
use std::panic::Location;
use std::sync::{Arc, Mutex};

use crate::call::{Awaited, Call, CallInfo, Collective};
use crate::dtype::Element;
use crate::engine::Engine;
use crate::health::lock;
use crate::plan::{Plan, Site, check_op, check_whole, refuse};
use crate::world::Member;
use crate::{DType, Error, ReduceOp, Result};

/// Ranks that do collectives together, in one order. Made by [`World::group`](crate::World::group).
///
/// A collective is called by all ranks, with the same arguments where they must agree; calls are compared, and a
/// difference is an error on all ranks that shows both calls. Calls from several threads of a rank are done one after
/// the other. All of them block until done, at most for [`Options::timeout`](crate::Options::timeout).
///
/// # Errors
/// Common to all collectives, and the end of the world unless said otherwise: [`Error::Mismatch`], [`Error::Timeout`],
/// [`Error::PeerLost`], [`Error::PeerLeft`], [`Error::PeerFailed`], [`Error::OutOfStep`]. [`Error::InvalidArgument`] leaves
/// the group usable. After an error buffers hold unspecified values.
///
/// # Numerics
/// Reductions are a balanced binary tree over the ranks for each element, so results have the same bits on every rank,
/// in every run, on every engine between hosts. f16, bf16 and f32 are accumulated in f32, f64 in f64, integers in their
/// own width, wrapping. A mean is one division at the end, before the one rounding.
pub struct ProcessGroup {
    member: Arc<Member>,
    id: u64,
    /// Whom the call under way waits for.
    awaited: Arc<Awaited>,
    /// Locked for the whole of a call: the next one waits.
    turn: Mutex<Turn>,
}

struct Turn {
    engine: Box<dyn Engine>,
    /// The number of the next call. Calls that are refused count too: so a rank that was refused what others were not
    /// is noticed at its next call.
    sequence: u64,
}

impl ProcessGroup {
    pub(crate) fn new(member: Arc<Member>, id: u64, engine: Box<dyn Engine>, awaited: Arc<Awaited>) -> ProcessGroup {
        ProcessGroup { member, id, awaited, turn: Mutex::new(Turn { engine, sequence: 0 }) }
    }

    /// This rank in the group.
    pub fn rank(&self) -> usize {
        self.member.seat.rank
    }

    /// How many ranks the group has.
    pub fn world_size(&self) -> usize {
        self.member.seat.peers.len()
    }

    /// The number of the group in its world, the same on all ranks.
    pub fn id(&self) -> u64 {
        self.id
    }

    /// Reduces a buffer over all ranks.
    ///
    /// Each rank passes a buffer of the same length; afterwards each holds the reduction, the same bits everywhere.
    /// Sends and receives about twice the buffer in two steps, small buffers in one.
    ///
    /// # Errors
    /// Those of all collectives. [`Error::InvalidArgument`], which leaves the group usable, if the op is not
    /// [defined](ReduceOp::supports) for the type.
    ///
    /// ```
    /// use burn_ddp_comm::{ReduceOp, on_threads};
    ///
    /// on_threads(3, |world| {
    ///     let group = world.group()?;
    ///     let mut x = [world.rank() as f32, 10.0];
    ///     group.all_reduce(&mut x, ReduceOp::Mean)?;
    ///     assert_eq!(x, [1.0, 10.0]);
    ///
    ///     let mut ids = [world.rank() as i32];
    ///     assert!(group.all_reduce(&mut ids, ReduceOp::Mean).unwrap_err().group_usable());
    ///     group.all_reduce(&mut ids, ReduceOp::Max)?;
    ///     assert_eq!(ids, [2]);
    ///     Ok::<_, burn_ddp_comm::Error>(())
    /// }).into_iter().collect::<Result<(), _>>()?;
    /// # Ok::<(), burn_ddp_comm::Error>(())
    /// ```
    #[track_caller]
    pub fn all_reduce<T: Element>(&self, buf: &mut [T], op: ReduceOp) -> Result<()> {
        let site = Location::caller();
        T::edit(buf, |bytes| self.all_reduce_at(T::DTYPE, bytes, op, 0, site))
    }

    /// [`all_reduce`](Self::all_reduce) on the bytes of `dtype` elements, which need not be aligned.
    ///
    /// `tag` is compared between ranks like the other arguments; 0 if there is nothing to compare.
    ///
    /// # Errors
    /// Those of [`all_reduce`](Self::all_reduce); [`Error::InvalidArgument`] also for a part of an element.
    #[track_caller]
    pub fn all_reduce_bytes(&self, dtype: DType, buf: &mut [u8], op: ReduceOp, tag: u64) -> Result<()> {
        self.all_reduce_at(dtype, buf, op, tag, Location::caller())
    }

    /// Averages a buffer over all ranks, each with its own weight: Σ wᵣxᵣ / Σ wᵣ.
    ///
    /// Each rank passes a buffer of the same length and a weight that is finite and not negative; afterwards each holds
    /// the average, the same bits everywhere. Equal weights give the bits of [`ReduceOp::Mean`]. A rank of weight 0
    /// counts as absent, even if its buffer holds NaN. Costs what [`all_reduce`](Self::all_reduce) costs: every rank
    /// sees all weights in the frames it gets anyway.
    ///
    /// # Errors
    /// Those of all collectives. [`Error::InvalidArgument`], on all ranks and leaving the group usable, if a weight
    /// cannot be used, all are 0, or the type is not a float.
    ///
    /// ```
    /// use burn_ddp_comm::on_threads;
    ///
    /// on_threads(2, |world| {
    ///     let group = world.group()?;
    ///     let (mut x, items) = if world.rank() == 0 { ([1.0], 3.0) } else { ([5.0], 1.0) };
    ///     group.all_reduce_weighted(&mut x, items)?;
    ///     assert_eq!(x, [2.0]);
    ///     assert!(group.all_reduce_weighted(&mut x, 0.0).unwrap_err().group_usable());
    ///     Ok::<_, burn_ddp_comm::Error>(())
    /// }).into_iter().collect::<Result<(), _>>()?;
    /// # Ok::<(), burn_ddp_comm::Error>(())
    /// ```
    #[track_caller]
    pub fn all_reduce_weighted<T: Element>(&self, buf: &mut [T], weight: f64) -> Result<()> {
        let site = Location::caller();
        T::edit(buf, |bytes| self.all_reduce_weighted_at(T::DTYPE, bytes, weight, 0, site))
    }

    /// [`all_reduce_weighted`](Self::all_reduce_weighted) on the bytes of `dtype` elements, which need not be aligned.
    ///
    /// `tag` is compared between ranks like the other arguments; 0 if there is nothing to compare.
    ///
    /// # Errors
    /// Those of [`all_reduce_weighted`](Self::all_reduce_weighted); [`Error::InvalidArgument`] also for a part of an
    /// element.
    #[track_caller]
    pub fn all_reduce_weighted_bytes(&self, dtype: DType, buf: &mut [u8], weight: f64, tag: u64) -> Result<()> {
        self.all_reduce_weighted_at(dtype, buf, weight, tag, Location::caller())
    }

    /// Copies the root's buffer to all ranks.
    ///
    /// Each rank passes a buffer of the same length; afterwards each holds the root's. The root sends its buffer once
    /// to each rank; one step.
    ///
    /// # Errors
    /// Those of all collectives. [`Error::InvalidArgument`], which leaves the group usable, if there is no such root.
    ///
    /// ```
    /// use burn_ddp_comm::on_threads;
    ///
    /// on_threads(2, |world| {
    ///     let group = world.group()?;
    ///     let mut x = [world.rank() as i64, 7];
    ///     group.broadcast(&mut x, 1)?;
    ///     assert_eq!(x, [1, 7]);
    ///     assert!(group.broadcast(&mut x, 2).is_err()); // there is no rank 2
    ///     Ok::<_, burn_ddp_comm::Error>(())
    /// }).into_iter().collect::<Result<(), _>>()?;
    /// # Ok::<(), burn_ddp_comm::Error>(())
    /// ```
    #[track_caller]
    pub fn broadcast<T: Element>(&self, buf: &mut [T], root: usize) -> Result<()> {
        let site = Location::caller();
        T::edit(buf, |bytes| self.broadcast_at(T::DTYPE, bytes, root, site))
    }

    /// [`broadcast`](Self::broadcast) on the bytes of `dtype` elements.
    ///
    /// # Errors
    /// Those of [`broadcast`](Self::broadcast); [`Error::InvalidArgument`] also for a part of an element.
    #[track_caller]
    pub fn broadcast_bytes(&self, dtype: DType, buf: &mut [u8], root: usize) -> Result<()> {
        self.broadcast_at(dtype, buf, root, Location::caller())
    }

    /// Collects everybody's buffer on every rank.
    ///
    /// Each rank passes `n` elements and gets `[world, n]`: row `r` is from rank `r`. Each rank sends its buffer once to
    /// each other; one step.
    ///
    /// # Errors
    /// Those of all collectives.
    ///
    /// ```
    /// use burn_ddp_comm::on_threads;
    ///
    /// on_threads(3, |world| {
    ///     let group = world.group()?;
    ///     let rows = group.all_gather(&[world.rank() as u8, 9])?;
    ///     assert_eq!(rows, [0, 9, 1, 9, 2, 9]);
    ///     Ok::<_, burn_ddp_comm::Error>(())
    /// }).into_iter().collect::<Result<(), _>>()?;
    /// # Ok::<(), burn_ddp_comm::Error>(())
    /// ```
    #[track_caller]
    pub fn all_gather<T: Element>(&self, input: &[T]) -> Result<Vec<T>> {
        let mut rows = T::zeros(input.len() * self.world_size());
        let site = Location::caller();
        T::edit(&mut rows, |rows| self.all_gather_at(T::DTYPE, T::bytes(input), rows, site))?;
        Ok(rows)
    }

    /// [`all_gather`](Self::all_gather) on the bytes of `dtype` elements.
    ///
    /// # Errors
    /// Those of all collectives; [`Error::InvalidArgument`] for a part of an element.
    #[track_caller]
    pub fn all_gather_bytes(&self, dtype: DType, input: &[u8]) -> Result<Vec<u8>> {
        let mut rows = vec![0; input.len() * self.world_size()];
        self.all_gather_at(dtype, input, &mut rows, Location::caller())?;
        Ok(rows)
    }

    /// Reduces a buffer over all ranks and leaves each rank a part of the result.
    ///
    /// Each rank passes `[world, n]` and room for `n`; afterwards rank `r` holds the reduction of everybody's row `r`.
    /// Each rank sends one row to each other; one step.
    ///
    /// # Errors
    /// Those of all collectives. [`Error::InvalidArgument`], which leaves the group usable, if the op is not
    /// [defined](ReduceOp::supports) for the type or the lengths do not fit together.
    ///
    /// ```
    /// use burn_ddp_comm::{ReduceOp, on_threads};
    ///
    /// on_threads(2, |world| {
    ///     let group = world.group()?;
    ///     let mut mine = [0.0];
    ///     group.reduce_scatter(&[1.0, 2.0], &mut mine, ReduceOp::Sum)?;
    ///     assert_eq!(mine, [2.0 * (1.0 + world.rank() as f64)]);
    ///     assert!(group.reduce_scatter(&[1.0; 3], &mut mine, ReduceOp::Sum).is_err()); // 3 is not 2 × 1
    ///     Ok::<_, burn_ddp_comm::Error>(())
    /// }).into_iter().collect::<Result<(), _>>()?;
    /// # Ok::<(), burn_ddp_comm::Error>(())
    /// ```
    #[track_caller]
    pub fn reduce_scatter<T: Element>(&self, input: &[T], output: &mut [T], op: ReduceOp) -> Result<()> {
        let site = Location::caller();
        T::edit(output, |output| self.reduce_scatter_at(T::DTYPE, T::bytes(input), output, op, site))
    }

    /// [`reduce_scatter`](Self::reduce_scatter) on the bytes of `dtype` elements, which need not be aligned.
    ///
    /// # Errors
    /// Those of [`reduce_scatter`](Self::reduce_scatter); [`Error::InvalidArgument`] also for a part of an element.
    #[track_caller]
    pub fn reduce_scatter_bytes(&self, dtype: DType, input: &[u8], output: &mut [u8], op: ReduceOp) -> Result<()> {
        self.reduce_scatter_at(dtype, input, output, op, Location::caller())
    }

    /// Waits until all ranks are here. One step, no bytes but the call itself.
    ///
    /// # Errors
    /// Those of all collectives.
    ///
    /// ```
    /// use burn_ddp_comm::{Error, Options, World};
    /// use std::time::Duration;
    ///
    /// // Rank 1 never comes: rank 0 does not hang, and says who.
    /// let options = Options { timeout: Duration::from_millis(50), ..Options::default() };
    /// let worlds = World::threads(2, options);
    /// let error = worlds[0].group().unwrap_err();
    /// assert!(matches!(&error, Error::Timeout { waiting_for, .. } if *waiting_for == [1]));
    /// ```
    #[track_caller]
    pub fn barrier(&self) -> Result<()> {
        self.run(Plan::bare(Collective::Barrier, Location::caller()), |engine, call| engine.barrier(call))
    }
}

/// Where the public methods meet: all checks, then the engine.
impl ProcessGroup {
    /// [`all_reduce_bytes`](Self::all_reduce_bytes) on behalf of the code at `site`, which errors then show.
    ///
    /// # Errors
    /// Those of [`all_reduce_bytes`](Self::all_reduce_bytes).
    pub fn all_reduce_at(
        &self,
        dtype: DType,
        buf: &mut [u8],
        op: ReduceOp,
        tag: u64,
        site: &'static Location<'static>,
    ) -> Result<()> {
        let plan = Plan { reduce: Some(op), tag, ..Plan::elements(Collective::AllReduce, dtype, buf.len(), site) };
        self.run(plan, |engine, call| {
            check_whole(dtype, buf.len())?;
            check_op(op, dtype)?;
            engine.all_reduce(call, dtype, buf, op)
        })
    }

    /// [`all_reduce_weighted_bytes`](Self::all_reduce_weighted_bytes) on behalf of the code at `site`, which errors then show.
    ///
    /// # Errors
    /// Those of [`all_reduce_weighted_bytes`](Self::all_reduce_weighted_bytes).
    pub fn all_reduce_weighted_at(
        &self,
        dtype: DType,
        buf: &mut [u8],
        weight: f64,
        tag: u64,
        site: &'static Location<'static>,
    ) -> Result<()> {
        let plan = Plan { weight, tag, ..Plan::elements(Collective::AllReduceWeighted, dtype, buf.len(), site) };
        self.run(plan, |engine, call| {
            check_whole(dtype, buf.len())?;
            check_op(ReduceOp::Mean, dtype)?;
            engine.all_reduce_weighted(call, dtype, buf)
        })
    }

    fn broadcast_at(&self, dtype: DType, buf: &mut [u8], root: usize, site: Site) -> Result<()> {
        let plan = Plan { root: Some(root), ..Plan::elements(Collective::Broadcast, dtype, buf.len(), site) };
        self.run(plan, |engine, call| {
            check_whole(dtype, buf.len())?;
            self.check_root(root)?;
            engine.broadcast(call, buf, root)
        })
    }

    fn all_gather_at(&self, dtype: DType, input: &[u8], rows: &mut [u8], site: Site) -> Result<()> {
        let plan = Plan::elements(Collective::AllGather, dtype, input.len(), site);
        self.run(plan, |engine, call| {
            check_whole(dtype, input.len())?;
            // Rows of no bytes still are rows.
            let mut rest = rows;
            let mut outputs = Vec::with_capacity(self.world_size());
            for _ in 0..self.world_size() {
                let (row, behind) = rest.split_at_mut(input.len());
                outputs.push(row);
                rest = behind;
            }
            engine.all_gather(call, input, &mut outputs)
        })
    }

    fn reduce_scatter_at(&self, dtype: DType, input: &[u8], output: &mut [u8], op: ReduceOp, site: Site) -> Result<()> {
        let plan = Plan { reduce: Some(op), ..Plan::elements(Collective::ReduceScatter, dtype, output.len(), site) };
        self.run(plan, |engine, call| {
            check_whole(dtype, output.len())?;
            check_op(op, dtype)?;
            if input.len() != output.len() * self.world_size() {
                let size = dtype.size_bytes();
                let (got, room, world) = (input.len() / size, output.len() / size, self.world_size());
                return refuse(format!(
                    "an input of {got} elements is not [world, n] = {world} × {room} elements of the output"
                ));
            }
            engine.reduce_scatter(call, dtype, input, output, op)
        })
    }

    /// Does one call when its turn has come.
    pub(crate) fn run<R>(&self, plan: Plan, body: impl FnOnce(&mut dyn Engine, &Call) -> Result<R>) -> Result<R> {
        let mut turn = lock(&self.turn);
        let info = CallInfo {
            collective: plan.collective,
            reduce: plan.reduce,
            dtype: plan.dtype,
            len_elems: plan.len_elems as u64,
            root: plan.root,
            tag: plan.tag,
            group: self.id,
            sequence: turn.sequence,
            site: plan.site.into(),
            step: self.member.seat.health.step(),
        };
        turn.sequence += 1;
        let call = Call {
            weight: plan.weight,
            awaited: Some(self.awaited.clone()),
            ..Call::new(info, self.rank(), self.member.options.timeout)
        };
        self.member.run(&call, || body(&mut *turn.engine, &call))
    }

    pub(crate) fn check_root(&self, root: usize) -> Result<(), Error> {
        if root < self.world_size() {
            return Ok(());
        }
        refuse(format!("root {root} is not a rank of a world of {}", self.world_size()))
    }
}

/// A group that goes while its rank panics will never do what the others wait for.
impl Drop for ProcessGroup {
    fn drop(&mut self) {
        self.member.fail_if_panicking();
    }
}

impl fmt::Debug for ProcessGroup {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ProcessGroup").field("id", &self.id).field("member", &self.member).finish_non_exhaustive()
    }
}
