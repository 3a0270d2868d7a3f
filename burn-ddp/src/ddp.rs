//! The handle of one rank.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use burn::module::Module;
use burn::tensor::{Device, Gradients, Tensor};
use burn_ddp_comm::{LaunchEnv, Options, ProcessGroup, ReduceOp, World};

use crate::checkpoint::background::BackgroundWrite;
use crate::meter::Meter;
use crate::seed::Seed;
use crate::weight::{Batch, Weights};
use crate::wrap::WrapConfig;
use crate::{Error, Result, Stats, Straggler, intercept};

/// One rank's membership in a data-parallel job: who am I, who are my peers, and everything they do together.
///
/// Cheap to clone, `Send` and `Sync`. Methods marked *collective* must be called by every rank, in the same order.
///
/// # Example
///
/// Two ranks as threads; each sees its own data, both get the same averaged gradient.
///
/// ```
/// use burn::nn::LinearConfig;
/// use burn::prelude::*;
/// use burn_ddp::prelude::*;
///
/// let gradients = Ddp::spawn(2, |ddp| {
///     let device = ddp.device()?.autodiff();
///     let model = ddp.wrap(LinearConfig::new(1, 1).with_bias(false).init(&device))?;
///     let x = Tensor::<2>::from_floats([[2.0 * ddp.rank() as f32]], &device); // 0 on rank 0, 2 on rank 1
///     let grads = model.forward(x).sum().backward();
///     Ok(model.weight.base().grad(&grads).unwrap().into_scalar::<f32>())
/// })?;
/// assert_eq!(gradients, [1.0, 1.0]);
/// # Ok::<(), burn_ddp::Error>(())
/// ```
#[derive(Clone)]
pub struct Ddp {
    inner: Arc<Inner>,
    /// What keeps this rank in the job: handles, wrapped models and loaders have it; nodes that Burn keeps in its graphs, maybe
    /// for ever, do not.
    _presence: Option<Arc<Presence>>,
}

/// Says goodbye when the last holder is gone.
struct Presence(World);

impl Drop for Presence {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.0.fail_panicked();
        } else {
            self.0.leave();
        }
    }
}

struct Inner {
    world: World,
    /// For the user's calls and for `wrap`; each wrapped model has a group of its own.
    group: Arc<ProcessGroup>,
    /// For collectives of which the backward is a collective, too. Made at the first of them.
    graph_group: Mutex<Option<Arc<ProcessGroup>>>,
    weights: Weights,
    meter: Meter,
    loaders: AtomicU64,
    seed: Mutex<Option<Seed>>,
    /// Checkpoints that may be under way.
    background_writes: Mutex<Vec<Arc<BackgroundWrite>>>,
    /// What carries the collectives on host memory.
    host_engine: &'static str,
    /// The CUDA device on which NCCL reduces, once it does.
    #[cfg(feature = "nccl")]
    nccl: std::sync::OnceLock<usize>,
    /// For metrics of Burn's trainer, which reduces them on a thread of its own. Made when a training begins.
    #[cfg(feature = "train")]
    metrics: std::sync::OnceLock<ProcessGroup>,
}

/// A world whose groups use MPI.
#[cfg(feature = "mpi")]
#[track_caller]
fn over_mpi(options: Options) -> Result<World> {
    // Some MPIs must begin before the ranks meet.
    let world = match burn_ddp_mpi::detect()? {
        Some(env) => World::join(&env, options)?,
        None => World::solo(options),
    };
    burn_ddp_mpi::attach(&world)?;
    Ok(world)
}

impl std::fmt::Debug for Ddp {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Ddp(rank {} of {}, engine {})", self.rank(), self.world_size(), self.engine())
    }
}

impl Ddp {
    /// Joins the job that a launcher describes in the environment (`burnrun`, torchrun, plain `RANK`/`WORLD_SIZE`/…), or makes
    /// a world of 1 when nothing is set. *Collective*: returns when all ranks have come.
    ///
    /// Waits are bounded by [`Options::from_env`].
    ///
    /// # Errors
    ///
    /// [`Error::Comm`]: half-set or contradictory variables, an unreachable master, a port in use, ranks that do not come in
    /// time (named).
    #[track_caller]
    pub fn init() -> Result<Self> {
        Self::init_with(Options::from_env()?)
    }

    /// [`Ddp::init`] with waits of your own. *Collective*.
    ///
    /// # Errors
    ///
    /// As [`Ddp::init`].
    #[track_caller]
    pub fn init_with(options: Options) -> Result<Self> {
        #[cfg(feature = "mpi")]
        if options.engine == Some(burn_ddp_comm::EngineChoice::Mpi) {
            return Self::from_world(over_mpi(options)?);
        }
        let world = match LaunchEnv::detect()? {
            Some(env) => World::join(&env, options)?,
            None => World::solo(options),
        };
        Self::from_world(world)
    }

    /// The handle of a rank whose world was made by hand. *Collective*.
    ///
    /// # Errors
    ///
    /// [`Error::Comm`] if the ranks cannot form a group.
    #[track_caller]
    pub fn from_world(world: World) -> Result<Self> {
        let group = Arc::new(world.group()?);
        tracing::info!(rank = world.rank(), world_size = world.world_size(), engine = world.engine(), "joined");
        let presence = Some(Arc::new(Presence(world.clone())));
        Ok(Ddp {
            _presence: presence,
            inner: Arc::new(Inner {
                meter: Meter::new(world.clone(), group.clone()),
                host_engine: world.engine(),
                #[cfg(feature = "nccl")]
                nccl: std::sync::OnceLock::new(),
                world,
                group,
                graph_group: Mutex::new(None),
                weights: Weights::default(),
                loaders: AtomicU64::new(0),
                seed: Mutex::new(None),
                background_writes: Mutex::new(Vec::new()),
                #[cfg(feature = "train")]
                metrics: std::sync::OnceLock::new(),
            }),
        })
    }

    /// The same handle, for holders whose life says nothing about this rank's.
    pub(crate) fn without_presence(&self) -> Ddp {
        Ddp { inner: self.inner.clone(), _presence: None }
    }

    /// This rank's number, `0..world_size`.
    #[must_use]
    pub fn rank(&self) -> usize {
        self.inner.world.rank()
    }

    /// Number of ranks in the job.
    #[must_use]
    pub fn world_size(&self) -> usize {
        self.inner.world.world_size()
    }

    /// This rank's number among those on its machine.
    #[must_use]
    pub fn local_rank(&self) -> usize {
        self.inner.world.local_rank()
    }

    /// Number of ranks on this machine.
    #[must_use]
    pub fn local_world_size(&self) -> usize {
        self.inner.world.local_world_size()
    }

    /// Whether this is rank 0, which prints and writes files.
    #[must_use]
    pub fn is_main(&self) -> bool {
        self.rank() == 0
    }

    /// What carries the collectives: `threads`, `shm`, `tcp`, `mpi`; `nccl` from the first [`wrap`](Self::wrap) on whose gradients NCCL
    /// reduces, which leaves what is in host memory to what was there before.
    #[must_use]
    pub fn engine(&self) -> &'static str {
        self.inner.world.engine()
    }

    /// What carries the collectives on host memory.
    pub(crate) fn host_engine(&self) -> &'static str {
        self.inner.host_engine
    }

    /// The CUDA device on which NCCL reduces, once it does.
    #[cfg(feature = "nccl")]
    pub(crate) fn nccl_ordinal(&self) -> Option<usize> {
        self.inner.nccl.get().copied()
    }

    /// From now on NCCL reduces on the CUDA device `ordinal`.
    #[cfg(feature = "nccl")]
    pub(crate) fn note_nccl(&self, ordinal: usize) {
        self.inner.nccl.get_or_init(|| ordinal);
    }

    /// The world below, for groups of your own and for [`World::fail`].
    #[must_use]
    pub fn world(&self) -> &World {
        &self.inner.world
    }

    /// The group of all ranks, for collectives on slices and serde values.
    #[must_use]
    pub fn group(&self) -> &ProcessGroup {
        &self.inner.group
    }

    /// The group of collectives in forwards and their backwards, which have one order on all ranks. *Collective* at first.
    #[track_caller]
    pub(crate) fn graph_group(&self) -> Result<Arc<ProcessGroup>> {
        let mut group = self.inner.graph_group.lock().unwrap_or_else(PoisonError::into_inner);
        match &*group {
            Some(group) => Ok(group.clone()),
            None => Ok(group.insert(Arc::new(self.world().group()?)).clone()),
        }
    }

    /// Makes the group of metrics, unless there is one. *Collective* the first time.
    #[cfg(feature = "train")]
    pub(crate) fn make_metric_group(&self) -> Result<()> {
        if self.inner.metrics.get().is_none() {
            let group = self.world().group()?;
            self.inner.metrics.get_or_init(|| group);
        }
        Ok(())
    }

    #[cfg(feature = "train")]
    pub(crate) fn metric_group(&self) -> Result<&ProcessGroup> {
        let missing = || Error::Use("metrics of all ranks are for what `ddp.training(…)` returns".into());
        self.inner.metrics.get().ok_or_else(missing)
    }

    /// This rank's device: the GPU with its local rank, if there are GPUs of a kind that is built in, else the processor. Add `.autodiff()`
    /// for training.
    ///
    /// `BURN_DEVICE` (`cuda`, `wgpu`, `flex`, …) chooses the kind, as for Burn's default device. Which GPUs there are, drivers decide, by
    /// `CUDA_VISIBLE_DEVICES` and its like.
    ///
    /// # Errors
    ///
    /// [`Error::Use`] if the machine has fewer GPUs than ranks, unless `BURN_DDP_SHARE_DEVICES=1` wants them shared; if `BURN_DEVICE` names
    /// what is not built in; if burn-ddp was built without any backend.
    pub fn device(&self) -> Result<Device> {
        crate::device::of_rank(self.local_rank(), self.world().local_world_size())
    }

    /// This rank's device of a kind: `ddp.device_of(|local_rank| Device::cuda(local_rank))`.
    pub fn device_of(&self, device: impl FnOnce(usize) -> Device) -> Device {
        device(self.local_rank())
    }

    /// Seeds `device`: the same seed on every rank while the model is made, and another one for each rank after [`Ddp::wrap`] and with
    /// each batch that a training loader hands out. So dropout differs between ranks, repeats between runs, and goes on in a run that is
    /// [resumed](crate::data::ShardedLoader::resume) as if it had not been interrupted.
    ///
    /// Burn's Flex backend has one generator per process, so with ranks as threads random numbers do not repeat.
    pub fn seed(&self, device: &Device, seed: u64) {
        device.seed(seed);
        *self.seeded() = Some(Seed::new(device, seed));
    }

    /// The seed of this rank after a `wrap`.
    pub(crate) fn next_seed_of_rank(&self) -> Option<u64> {
        Some(self.seeded().as_mut()?.of_next_wrap(self.rank()))
    }

    /// The batch of the step that begins at item `first` of an epoch's order is handed out: random numbers begin anew.
    pub(crate) fn seed_batch(&self, loader: u64, epoch: usize, first: usize) {
        if let Some(seed) = &*self.seeded() {
            seed.seed_batch(self.rank(), loader, epoch, first);
        }
    }

    fn seeded(&self) -> MutexGuard<'_, Option<Seed>> {
        self.inner.seed.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Makes `model` data-parallel: the same type back, rank 0's weights and buffers on every rank, and gradients averaged over
    /// all ranks inside `loss.backward()`. *Collective*.
    ///
    /// Freeze, load and apply LoRA before; see [`WrapConfig`] for accumulation, sums and bucket sizes. The optimizer must be
    /// the same on every rank. Wrapping again is an error; [`Ddp::unwrap`] is the inverse.
    ///
    /// # Errors
    ///
    /// On every rank: [`Error::ModelsDiffer`] naming the first parameter that differs and both shapes; [`Error::Use`] for a
    /// model that is wrapped already, spans devices, has no autodiff, or lives on a backend without support.
    ///
    /// # Example
    ///
    /// ```
    /// # use burn::{nn::LinearConfig, prelude::*};
    /// # use burn_ddp::prelude::*;
    /// let errors = Ddp::spawn(2, |ddp| {
    ///     let device = ddp.device()?.autodiff();
    ///     let features = 3 + ddp.rank(); // a bug: each rank makes another model
    ///     Ok(ddp.wrap(LinearConfig::new(features, 1).init(&device)).unwrap_err().to_string())
    /// })?;
    /// assert_eq!(errors[0], "the ranks do not hold the same model: weight is [3, 1] f32 on rank 0, but [4, 1] f32 on rank 1");
    /// assert_eq!(errors[0], errors[1]);
    /// # Ok::<(), burn_ddp::Error>(())
    /// ```
    #[track_caller]
    pub fn wrap<M: Module + 'static>(&self, model: M) -> Result<M> {
        self.wrap_with(model, &WrapConfig::new())
    }

    /// [`Ddp::wrap`] with settings, which must be the same on every rank. *Collective*.
    ///
    /// # Errors
    ///
    /// As [`Ddp::wrap`].
    #[track_caller]
    pub fn wrap_with<M: Module + 'static>(&self, model: M, config: &WrapConfig) -> Result<M> {
        crate::wrap::wrap(self, model, config)
    }

    /// The plain model again: same parameters and ids, no taps. Gradients held for accumulation are discarded.
    ///
    /// # Errors
    ///
    /// [`Error::Use`] if the model carries other reparameterizations (LoRA), which Burn cannot keep while removing one.
    pub fn unwrap<M: Module>(&self, model: M) -> Result<M> {
        crate::wrap::unwrap(model)
    }

    /// `loss.backward()` with failures as errors instead of panics. *Collective* for the ranks that hold `model`.
    ///
    /// With accumulation, the first `k - 1` backwards of a step return gradients that are empty for `model`.
    ///
    /// # Errors
    ///
    /// [`Error::Comm`] if a peer failed, [`Error::Use`] if `model` is not wrapped, [`Error::Backward`] if the loss does not
    /// depend on it or the backward cannot deliver averages. After an error the ranks are no longer in step.
    pub fn backward<const D: usize, M: Module>(&self, loss: &Tensor<D>, model: &M) -> Result<Gradients> {
        intercept::checked_backward(self, loss, model)
    }

    /// Backwards inside `f` only sum up gradients in the reducer and return none; the next one outside reduces them all. For
    /// accumulation with an irregular number of micro-batches; each rank may have another number of them.
    ///
    /// # Errors
    ///
    /// [`Error::Use`] if the model is not wrapped.
    pub fn no_sync<M: Module, T>(&self, model: &M, f: impl FnOnce() -> T) -> Result<T> {
        match intercept::find(model).as_slice() {
            [tapped] => Ok(tapped.hold(f)),
            _ => Err(Error::Use("no_sync needs one wrapped model; in a world of 1 wrap it with accumulation".into())),
        }
    }

    /// Throws away gradients of micro-batches that were not reduced yet. Every rank must do the same.
    pub fn discard<M: Module>(&self, model: &M) {
        intercept::find(model).iter().for_each(|t| t.discard());
    }

    /// Says how many items the following backwards stand for, until the next batch is read from a loader. Only needed with
    /// loaders that are not ours, or with two of ours in one step.
    ///
    /// # Errors
    ///
    /// [`Error::Use`] if `items` is negative or not finite.
    pub fn weight(&self, items: f64) -> Result<()> {
        self.inner.weights.set(items)
    }

    pub(crate) fn weights(&self) -> &Weights {
        &self.inner.weights
    }

    /// A backward of a wrapped model begins: what it stands for. A peer that left its epoch before this backward is an error.
    pub(crate) fn begin_backward(&self) -> Result<Batch> {
        let batch = self.inner.weights.take()?;
        if let Some(step) = batch.step {
            self.world().advance(backward_track(step.track), step.position)?;
        }
        Ok(batch)
    }

    pub(crate) fn meter(&self) -> &Meter {
        &self.inner.meter
    }

    /// The number of the next loader; the same on every rank, since loaders are built in the same order.
    pub(crate) fn next_loader_id(&self) -> u64 {
        self.inner.loaders.fetch_add(1, Ordering::Relaxed)
    }

    /// Where the time of this rank's steps went so far, and what it communicated.
    #[must_use]
    pub fn stats(&self) -> Stats {
        self.inner.meter.total()
    }

    /// The same of the last step alone; nothing before the first has ended.
    #[must_use]
    pub fn last_step(&self) -> Stats {
        self.inner.meter.last_step()
    }

    /// The rank that the others wait for, as far as is known: the same on all ranks, and `None` as long as nobody is conspicuous.
    ///
    /// It becomes known with the [replica check](WrapConfig::with_replica_check), by default every 100 steps, and is also told through
    /// `tracing`, once, on rank 0: a warning of the target `burn_ddp::straggler`.
    #[must_use]
    pub fn straggler(&self) -> Option<Straggler> {
        self.inner.meter.straggler()
    }

    /// The mean of a number over all ranks. *Collective*.
    ///
    /// # Errors
    ///
    /// [`Error::Comm`] if a peer failed.
    #[track_caller]
    pub fn mean(&self, value: impl Into<f64>) -> Result<f64> {
        self.reduce_scalar(value.into(), ReduceOp::Mean)
    }

    /// The sum of a number over all ranks. *Collective*.
    ///
    /// # Errors
    ///
    /// [`Error::Comm`] if a peer failed.
    #[track_caller]
    pub fn sum(&self, value: impl Into<f64>) -> Result<f64> {
        self.reduce_scalar(value.into(), ReduceOp::Sum)
    }

    #[track_caller]
    fn reduce_scalar(&self, value: f64, op: ReduceOp) -> Result<f64> {
        let mut value = [value];
        self.group().all_reduce(&mut value, op)?;
        Ok(value[0])
    }

    /// Waits until every rank has come here. *Collective*.
    ///
    /// # Errors
    ///
    /// [`Error::Comm`] if a peer failed or does not come in time.
    #[track_caller]
    pub fn barrier(&self) -> Result<()> {
        Ok(self.group().barrier()?)
    }

    /// Runs `f` on rank 0 first and then, if that went well, on the others: for downloads into a shared cache. *Collective*.
    ///
    /// # Errors
    ///
    /// Rank 0 gets the error of `f`; the others get [`Error::Rank`] with its text, and do not run `f`.
    ///
    /// # Example
    ///
    /// ```
    /// # use burn_ddp::prelude::*;
    /// use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
    /// let calls = AtomicUsize::new(0);
    /// let order = Ddp::spawn(2, |ddp| ddp.rank_zero_first(|| Ok(calls.fetch_add(1, SeqCst))))?;
    /// assert_eq!(order, [0, 1]);
    /// # Ok::<(), burn_ddp::Error>(())
    /// ```
    #[track_caller]
    pub fn rank_zero_first<T>(&self, f: impl FnOnce() -> anyhow::Result<T>) -> anyhow::Result<T> {
        if self.is_main() {
            let result = f();
            let told: Result<(), String> = result.as_ref().map(|_| ()).map_err(|e| format!("{e:#}"));
            let heard = self.group().broadcast_object(Some(told), 0);
            // The others may be gone by then: the cause comes first.
            let value = result?;
            heard?.ok();
            Ok(value)
        } else {
            let told: Result<(), String> = self.group().broadcast_object(None, 0)?;
            told.map_err(|reason| Error::Rank { rank: 0, reason })?;
            f()
        }
    }

    /// [`Ddp::finish`] waits for it.
    pub(crate) fn note_background_write(&self, write: &Arc<BackgroundWrite>) {
        self.inner.background_writes.lock().unwrap_or_else(PoisonError::into_inner).push(write.clone());
    }

    /// Ends the job: checkpoints that are under way, the last barrier, then goodbye. *Collective*. Leaving without it is fine where nobody
    /// waits any more.
    ///
    /// # Errors
    ///
    /// [`Error::Comm`] if a peer failed or does not come in time; [`Error::File`] if a checkpoint could not be written.
    #[track_caller]
    pub fn finish(self) -> Result<()> {
        let background_writes = std::mem::take(&mut *self.inner.background_writes.lock().unwrap_or_else(PoisonError::into_inner));
        for write in background_writes {
            write.wait(self.group())?;
        }
        self.barrier()?;
        self.world().leave();
        Ok(())
    }
}

/// The track of backwards beside that of a loader's steps.
pub(crate) fn backward_track(track: u64) -> u64 {
    track | 1 << 63
}
