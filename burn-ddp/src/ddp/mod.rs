//! The handle of one rank.

mod init;
mod shared_state;
mod spawn;
mod split;

use std::sync::Arc;

use burn::tensor::Device;
use burn_ddp_comm::{ProcessGroup, World};

use crate::agreement::list_ranks;
use crate::telemetry::Telemetry;
use crate::{Result, seed};
use shared_state::SharedState;

/// One rank's membership in a data-parallel job: its number, its peers, and everything they do together.
///
/// Cheap to clone, `Send` and `Sync`. Methods marked *collective* must be called by every rank, in the same order.
/// [`split`](Self::split) makes a handle for a part of the ranks; for it "every rank" means every rank of this part.
/// Errors name ranks by their numbers in the job.
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
///     let grads = ddp.backward(&model.forward(x).sum(), &model)?.expect("a step");
///     Ok(grads.get::<2>(model.weight.id).unwrap().into_scalar::<f32>())
/// })?;
/// assert_eq!(gradients, [1.0, 1.0]);
/// # Ok::<(), burn_ddp::Error>(())
/// ```
#[derive(Clone)]
pub struct Ddp {
    state: Arc<SharedState>,
    /// Keeps this rank in the job. Handles, wrapped models and loaders hold one; nodes of Burn's graphs hold `None`,
    /// since Burn may keep them for ever.
    _presence: Option<Arc<Presence>>,
}

/// Makes the rank leave the job when the last holder is dropped.
struct Presence(World);

impl Drop for Presence {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.0.fail_with_panic();
        } else {
            self.0.leave();
        }
    }
}

impl std::fmt::Debug for Ddp {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Ddp(rank {} of {}, engine {}", self.rank(), self.world_size(), self.engine())?;
        match self.state.is_part() {
            true => write!(f, ", {} of the job)", list_ranks(self.group().ranks())),
            false => write!(f, ")"),
        }
    }
}

impl Ddp {
    fn new(world: World, group: ProcessGroup) -> Self {
        let presence = Some(Arc::new(Presence(world.clone())));
        Ddp { state: Arc::new(SharedState::new(world, group)), _presence: presence }
    }

    /// A handle that does not keep the rank in the job: for autodiff nodes, which Burn may hold for long.
    pub(crate) fn without_presence(&self) -> Ddp {
        Ddp { state: self.state.clone(), _presence: None }
    }

    /// State that all handles of this rank share.
    pub(crate) fn state(&self) -> &SharedState {
        &self.state
    }

    /// This rank's number, `0..world_size`. In a [part](Self::split) of the job it is the number in this part, and
    /// `ddp.world().rank()` that in the job.
    ///
    /// # Example
    ///
    /// ```
    /// # use burn_ddp::prelude::*;
    /// let ranks = Ddp::spawn(3, |ddp| Ok((ddp.rank(), ddp.world_size())))?;
    /// assert_eq!(ranks, [(0, 3), (1, 3), (2, 3)]);
    /// # Ok::<(), burn_ddp::Error>(())
    /// ```
    #[must_use]
    pub fn rank(&self) -> usize {
        self.state.group.rank()
    }

    /// Number of ranks in the job, or in the [part](Self::split) that the handle is for.
    ///
    /// # Example
    ///
    /// A learning rate that grows with the number of ranks, and so with the items of a step:
    ///
    /// ```
    /// # use burn_ddp::prelude::*;
    /// let rates = Ddp::spawn(2, |ddp| Ok(0.1 * ddp.world_size() as f64))?;
    /// assert_eq!(rates, [0.2, 0.2]);
    /// # Ok::<(), burn_ddp::Error>(())
    /// ```
    #[must_use]
    pub fn world_size(&self) -> usize {
        self.state.group.world_size()
    }

    /// This rank's number among all ranks of the job on its machine, which chooses its device.
    ///
    /// # Example
    ///
    /// ```
    /// # use burn_ddp::prelude::*;
    /// let places = Ddp::spawn(2, |ddp| Ok((ddp.local_rank(), ddp.local_world_size())))?;
    /// assert_eq!(places, [(0, 2), (1, 2)]); // threads are on one machine
    /// # Ok::<(), burn_ddp::Error>(())
    /// ```
    #[must_use]
    pub fn local_rank(&self) -> usize {
        self.state.world.local_rank()
    }

    /// Number of ranks of the job on this machine.
    ///
    /// # Example
    ///
    /// Cores for each rank of a machine with 16:
    ///
    /// ```
    /// # use burn_ddp::prelude::*;
    /// let cores = Ddp::spawn(2, |ddp| Ok(16 / ddp.local_world_size()))?;
    /// assert_eq!(cores, [8, 8]);
    /// # Ok::<(), burn_ddp::Error>(())
    /// ```
    #[must_use]
    pub fn local_world_size(&self) -> usize {
        self.state.world.local_world_size()
    }

    /// True on rank 0, which prints and writes files. Each [part](Self::split) of the job has its own rank 0.
    ///
    /// # Example
    ///
    /// ```
    /// # use burn_ddp::prelude::*;
    /// Ddp::spawn(2, |ddp| {
    ///     let loss = ddp.mean(0.5)?; // a collective: on every rank
    ///     if ddp.is_main() {
    ///         println!("loss {loss}");
    ///     }
    ///     Ok(())
    /// })?;
    /// # Ok::<(), burn_ddp::Error>(())
    /// ```
    #[must_use]
    pub fn is_main(&self) -> bool {
        self.rank() == 0
    }

    /// Name of the engine that carries the collectives: `threads`, `shm`, `tcp`, `shm+tcp` or `mpi`; `nccl` once NCCL
    /// reduces the gradients of a [wrapped](Self::wrap) model. The previous engine then still carries the collectives
    /// on host memory.
    ///
    /// # Example
    ///
    /// ```
    /// # use burn_ddp::prelude::*;
    /// assert_eq!(Ddp::spawn(2, |ddp| Ok(ddp.engine()))?, ["threads", "threads"]);
    /// # Ok::<(), burn_ddp::Error>(())
    /// ```
    #[must_use]
    pub fn engine(&self) -> &'static str {
        match self.state.is_part() {
            true => self.state.group.engine(),
            false => self.state.world.engine(),
        }
    }

    /// The world of all ranks of the job: for groups of your own and for [`World::fail`].
    ///
    /// # Example
    ///
    /// ```
    /// # use burn_ddp::prelude::*;
    /// let numbers = Ddp::spawn(2, |job| {
    ///     let part = job.split(Some(job.rank() as u64), 0)?.expect("a part of one rank");
    ///     Ok((part.rank(), part.world().rank()))
    /// })?;
    /// assert_eq!(numbers, [(0, 0), (0, 1)]); // in its part, in the job
    /// # Ok::<(), burn_ddp::Error>(())
    /// ```
    #[must_use]
    pub fn world(&self) -> &World {
        &self.state.world
    }

    /// The group of all ranks of this handle, for collectives on slices and serde values.
    ///
    /// # Example
    ///
    /// ```
    /// # use burn_ddp::prelude::*;
    /// let names = Ddp::spawn(2, |ddp| Ok(ddp.group().all_gather_object(&format!("rank-{}.log", ddp.rank()))?))?;
    /// assert_eq!(names[0], ["rank-0.log", "rank-1.log"]);
    /// assert_eq!(names[0], names[1]);
    /// # Ok::<(), burn_ddp::Error>(())
    /// ```
    #[must_use]
    pub fn group(&self) -> &ProcessGroup {
        &self.state.group
    }

    /// This rank's device: the GPU whose index is the local rank, if a backend that is built in finds GPUs, else the
    /// processor. Add `.autodiff()` for training.
    ///
    /// `BURN_DEVICE` (`cuda`, `wgpu`, `flex`, …) chooses the kind of device, as for Burn's default device. The driver
    /// decides which GPUs a process sees, by `CUDA_VISIBLE_DEVICES` and similar variables.
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`](crate::Error::Invalid) if the machine has fewer GPUs than ranks, unless
    /// `BURN_DDP_SHARE_DEVICES=1` lets ranks share GPUs; if `BURN_DEVICE` names a kind that is not built in; if
    /// burn-ddp was built without any backend.
    ///
    /// # Example
    ///
    /// ```
    /// # use burn::{nn::LinearConfig, prelude::*};
    /// # use burn_ddp::prelude::*;
    /// let ddp = Ddp::init()?;
    /// let device = ddp.device()?.autodiff();
    /// let model = LinearConfig::new(2, 1).init(&device);
    /// assert_eq!(model.forward(Tensor::<2>::ones([4, 2], &device)).dims(), [4, 1]);
    /// # Ok::<(), burn_ddp::Error>(())
    /// ```
    pub fn device(&self) -> Result<Device> {
        crate::device::of_rank(self.local_rank(), self.world().local_world_size())
    }

    /// Seeds `device`: with `seed` on every rank until the model is wrapped, then with a seed of the rank's own,
    /// renewed by [`Ddp::wrap`] and by each batch that a training loader hands out. So dropout differs between ranks,
    /// repeats between runs, and in a [resumed](crate::data::ShardedLoader::resume) run is that of a run without
    /// interruption. Call it in place of `device.seed(seed)`, which after `wrap` would make all ranks draw the same
    /// numbers. It communicates nothing.
    ///
    /// Burn's backends have one random generator per process. If the ranks are threads ([`Ddp::spawn`]), they share it,
    /// so random numbers do not repeat between runs; rank 0 logs a warning.
    ///
    /// # Example
    ///
    /// ```
    /// # use burn::nn::LinearConfig;
    /// # use burn_ddp::prelude::*;
    /// let ddp = Ddp::init()?;
    /// let device = ddp.device()?.autodiff();
    /// let init = || {
    ///     ddp.seed(&device, 42); // before the model is made
    ///     LinearConfig::new(2, 1).init(&device)
    /// };
    /// assert_eq!(param_hash(&ddp.wrap(init())?)?, param_hash(&init())?);
    /// # Ok::<(), burn_ddp::Error>(())
    /// ```
    pub fn seed(&self, device: &Device, seed: u64) {
        seed::warn_of_threads(self);
        self.state.set_seed(device, seed);
    }

    /// Weight of the training loader's last batch: its number of items (or tokens) on this rank; 1 without a loader.
    ///
    /// A mean loss times this number can be summed over steps and ranks.
    ///
    /// # Example
    ///
    /// ```
    /// # use burn::prelude::*;
    /// # use burn::data::dataloader::batcher::Batcher;
    /// # use burn::data::dataset::InMemDataset;
    /// # use burn_ddp::prelude::*;
    /// # struct Stack;
    /// # impl Batcher<f32, Tensor<1>> for Stack {
    /// #     fn batch(&self, items: Vec<f32>, device: &Device) -> Tensor<1> {
    /// #         Tensor::from_floats(&items[..], device)
    /// #     }
    /// # }
    /// let means = Ddp::spawn(2, |ddp| {
    ///     let items = InMemDataset::new(vec![1.0, 2.0, 3.0]); // two on rank 0, one on rank 1
    ///     let train = ddp.loader(Stack).batch_size(2).build(items)?;
    ///     let mut mean = 0.0;
    ///     for batch in train.iter() {
    ///         let loss = batch?.mean().into_scalar::<f32>() as f64; // the mean over this rank's items
    ///         mean = ddp.sum(loss * ddp.batch_items())? / ddp.sum(ddp.batch_items())?;
    ///         ddp.skip_batch()?; // only looked at
    ///     }
    ///     Ok(mean)
    /// })?;
    /// assert_eq!(means, [2.0, 2.0]); // over all three items
    /// # Ok::<(), burn_ddp::Error>(())
    /// ```
    #[must_use]
    pub fn batch_items(&self) -> f64 {
        self.state.batch_weight.items()
    }

    /// Counters of this rank's steps, the slowest rank, why a run is slow, and curves for TensorBoard.
    ///
    /// # Example
    ///
    /// ```
    /// # use burn::{nn::LinearConfig, prelude::*};
    /// # use burn_ddp::prelude::*;
    /// Ddp::spawn(2, |ddp| {
    ///     # let device = ddp.device()?.autodiff();
    ///     # let model = ddp.wrap(LinearConfig::new(4, 1).init(&device))?;
    ///     ddp.backward(&model.forward(Tensor::<2>::ones([1, 4], &device)).sum(), &model)?;
    ///     let step = ddp.telemetry().last_step();
    ///     println!("{:?} of {:?} waiting for averages", step.wait, step.time());
    ///     assert!(step.steps == 1 && ddp.telemetry().straggler().is_none());
    ///     Ok(())
    /// })?;
    /// # Ok::<(), burn_ddp::Error>(())
    /// ```
    #[must_use]
    pub fn telemetry(&self) -> Telemetry {
        Telemetry::new(self.without_presence())
    }

    /// Waits until every rank has called it. *Collective*. Costs one step, in which only headers travel.
    ///
    /// # Errors
    ///
    /// [`Error::Comm`](crate::Error::Comm) if a peer failed or does not come in time.
    ///
    /// # Example
    ///
    /// ```
    /// # use burn_ddp::prelude::*;
    /// # use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
    /// let came = AtomicUsize::new(0);
    /// Ddp::spawn(3, |ddp| {
    ///     came.fetch_add(1, SeqCst);
    ///     ddp.barrier()?;
    ///     assert_eq!(came.load(SeqCst), 3); // on every rank
    ///     Ok(())
    /// })?;
    /// # Ok::<(), burn_ddp::Error>(())
    /// ```
    #[track_caller]
    pub fn barrier(&self) -> Result<()> {
        Ok(self.group().barrier()?)
    }

    /// Ends the job: waits for checkpoints that are being written and for all ranks, logs the
    /// [report](Telemetry::report), then leaves the job. *Collective*. A rank may end without it if no other rank waits
    /// for it any more.
    ///
    /// The handle of a [part](Self::split) waits for the checkpoints and the ranks of this part; the rank stays in the
    /// job. Costs a [barrier](Self::barrier), the report's small all-gather, and another one per directory of
    /// checkpoints with an asynchronous save.
    ///
    /// # Errors
    ///
    /// [`Error::Comm`](crate::Error::Comm) if a peer failed or does not come in time;
    /// [`Error::File`](crate::Error::File) if a checkpoint could not be written.
    ///
    /// # Example
    ///
    /// ```
    /// # use burn_ddp::prelude::*;
    /// # let directory = tempfile::tempdir()?;
    /// # let directory = directory.path();
    /// Ddp::spawn(2, |ddp| {
    ///     let checkpoints = ddp.checkpoints(directory)?.asynchronous(true);
    ///     checkpoints.save(1, |c| c.value("loss", &0.5))?;
    ///     Ok(ddp.finish()?) // an error on every rank if the checkpoint could not be written
    /// })?;
    /// # anyhow::Ok(())
    /// ```
    #[track_caller]
    pub fn finish(self) -> Result<()> {
        self.state.finish_background_writes()?;
        self.barrier()?;
        let report = self.telemetry().report()?;
        if let Some(report) = report.filter(|_| self.is_main()) {
            tracing::info!(target: "burn_ddp::report", "{report}");
        }
        if !self.state.is_part() {
            self.world().leave();
        }
        Ok(())
    }
}
