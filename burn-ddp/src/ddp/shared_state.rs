//! State that all clones of a handle share: its group, its counters, and the checkpoints that are being written. All
//! handles of a rank, also those of different groups, share the seed and the weights of batches.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use burn::tensor::Device;
use burn_ddp_comm::{ProcessGroup, World};

use crate::Result;
use crate::batch_weight::{Batch, BatchWeight};
use crate::checkpoint::background_write::OpenedDirectory;
use crate::job_leaves::JobLeaves;
use crate::seed::Seed;
use crate::stop::StopWish;
use crate::telemetry::step_meter::Meter;

/// State of one rank in the group of a handle. Each field is written by this rank's own threads only.
pub(crate) struct SharedState {
    pub(crate) world: World,
    /// Group of the user's calls and of `wrap`; each wrapped model has a group of its own.
    pub(crate) group: Arc<ProcessGroup>,
    /// True if `Ddp::split` made the handle.
    is_part: bool,
    /// Weight of the next backward: written by loaders, taken by calls that run a backward. Shared by all handles of
    /// this rank.
    pub(crate) batch_weight: Arc<BatchWeight>,
    /// Counters of steps: written by loaders and by the reducers of wrapped models.
    pub(crate) meter: Meter,
    /// Wish to stop: written by signals and by the program, agreed on by the reducers of wrapped models.
    pub(crate) stop: Arc<StopWish>,
    /// Logical ranks.
    pub(crate) leaves: JobLeaves,
    /// Name of the engine that carries collectives on host memory.
    pub(crate) host_engine: &'static str,
    /// Group of the differentiable collectives and their backwards. Made by the first such collective.
    graph_group: Mutex<Option<Arc<ProcessGroup>>>,
    /// Number of training loaders, and of evaluation loaders, built so far.
    loaders: [AtomicU32; 2],
    /// Number of batches that the program skipped, the same on every rank.
    skips: AtomicU64,
    /// State of the rank (seed, device, checkpoint directories), shared by the handles of all its parts of the job.
    of_rank: Arc<RankState>,
    /// Group of the metrics of Burn's trainer, which reduces them on a thread of its own. Made when a training begins.
    #[cfg(feature = "train")]
    metric_group: std::sync::OnceLock<ProcessGroup>,
}

/// State that the handles of one rank share, whatever their groups.
#[derive(Default)]
struct RankState {
    /// The seed, and the number of this rank in the handle that set it.
    seed: Mutex<Option<(Seed, usize)>>,
    /// Device of the model that was wrapped last: written by `wrap`, read by loaders that are built.
    model_device: Mutex<Option<Device>>,
    /// Directories of checkpoints: written when one is opened, read by [`Ddp::finish`](super::Ddp::finish), which waits
    /// for the checkpoints that are being written.
    checkpoint_directories: Mutex<Vec<OpenedDirectory>>,
    /// The CUDA device on which NCCL reduces gradients; empty until it does.
    #[cfg(feature = "nccl")]
    nccl_device: std::sync::OnceLock<usize>,
}

impl SharedState {
    /// State of the handle of the whole job.
    pub(super) fn new(world: World, group: ProcessGroup) -> Self {
        let host_engine = world.engine();
        Self::of(world, group, None, host_engine, Arc::default(), Arc::default())
    }

    /// State of a handle for `group`, a part of this handle's group.
    pub(super) fn part(&self, group: ProcessGroup) -> Self {
        let engine = group.engine();
        Self::of(self.world.clone(), group, Some(&self.stop), engine, self.batch_weight.clone(), self.of_rank.clone())
    }

    fn of(
        world: World,
        group: ProcessGroup,
        part_of: Option<&Arc<StopWish>>,
        host_engine: &'static str,
        batch_weight: Arc<BatchWeight>,
        of_rank: Arc<RankState>,
    ) -> Self {
        let group = Arc::new(group);
        SharedState {
            meter: Meter::new(world.clone(), group.clone()),
            world,
            group,
            is_part: part_of.is_some(),
            stop: Arc::new(part_of.map_or_else(StopWish::default, StopWish::part)),
            leaves: JobLeaves::default(),
            batch_weight,
            host_engine,
            graph_group: Mutex::new(None),
            loaders: [const { AtomicU32::new(0) }; 2],
            skips: AtomicU64::new(0),
            of_rank,
            #[cfg(feature = "train")]
            metric_group: std::sync::OnceLock::new(),
        }
    }

    /// True if `Ddp::split` made the handle, so that its group is not that of all ranks of the job.
    pub(crate) fn is_part(&self) -> bool {
        self.is_part
    }

    /// A further group of the ranks of this handle. *Collective*.
    #[track_caller]
    pub(crate) fn new_group(&self) -> Result<ProcessGroup> {
        if !self.is_part {
            return Ok(self.world.group()?);
        }
        let all = self.group.split(Some(0), 0)?;
        all.ok_or_else(|| crate::Error::invalid("a split left out a rank that named its color"))
    }

    /// Group of collectives in forwards and their backwards; they have the same order on all ranks. *Collective* the
    /// first time.
    #[track_caller]
    pub(crate) fn graph_group(&self) -> Result<Arc<ProcessGroup>> {
        let mut group = lock(&self.graph_group);
        match &*group {
            Some(group) => Ok(group.clone()),
            None => Ok(group.insert(Arc::new(self.new_group()?)).clone()),
        }
    }

    /// Makes the group of metrics, unless there is one. *Collective* the first time.
    #[cfg(feature = "train")]
    pub(crate) fn make_metric_group(&self) -> Result<()> {
        if self.metric_group.get().is_none() {
            let group = self.new_group()?;
            self.metric_group.get_or_init(|| group);
        }
        Ok(())
    }

    /// Group of metrics.
    ///
    /// # Errors
    ///
    /// [`crate::Error::Invalid`] if no training has begun.
    #[cfg(feature = "train")]
    pub(crate) fn metric_group(&self) -> Result<&ProcessGroup> {
        let missing = || crate::Error::invalid("metrics of all ranks need a training that `ddp.training(…)` has made");
        self.metric_group.get().ok_or_else(missing)
    }

    /// Begins a call that runs a backward, with the weight that the program gave it or without: returns its batch. An
    /// error if a peer left its epoch before this call.
    pub(crate) fn begin_backward(&self, items: Option<f64>) -> Result<Batch> {
        let batch = self.batch_weight.take(items)?;
        if let Some(step) = batch.step.filter(|_| batch.first) {
            self.world.advance(step.track.backwards(), step.at)?;
        }
        Ok(batch)
    }

    /// Number of batches that the program skipped.
    pub(crate) fn skips(&self) -> u64 {
        self.skips.load(Ordering::Relaxed)
    }

    /// Records that the last batch of the training loader gets no backward.
    pub(crate) fn skip_batch(&self) -> Result<()> {
        self.leaves.refuse_several("`skip_batch`", "give the batch a backward by `ddp.weighted(0.0)`")?;
        self.skips.fetch_add(1, Ordering::Relaxed);
        match self.batch_weight.skip() {
            Some(step) => Ok(self.world.advance(step.track.backwards(), step.at)?),
            None => Ok(()),
        }
    }

    /// The CUDA device on which NCCL reduces gradients; `None` until it does.
    #[cfg(feature = "nccl")]
    pub(crate) fn nccl_device(&self) -> Option<usize> {
        self.of_rank.nccl_device.get().copied()
    }

    /// Records that NCCL reduces on the CUDA device `ordinal` from now on.
    #[cfg(feature = "nccl")]
    pub(crate) fn set_nccl_device(&self, ordinal: usize) {
        self.of_rank.nccl_device.get_or_init(|| ordinal);
    }

    /// Number of the next training loader, or evaluation loader; the same on every rank, since loaders are built in the
    /// same order. Seeds of batches depend on the number of the training loader, and must not on evaluation.
    pub(crate) fn next_loader_id(&self, evaluates: bool) -> u32 {
        self.loaders[usize::from(evaluates)].load(Ordering::Relaxed)
    }

    /// Counts a loader, once all ranks have agreed on it.
    pub(crate) fn count_loader(&self, evaluates: bool) {
        self.loaders[usize::from(evaluates)].fetch_add(1, Ordering::Relaxed);
    }

    /// Seeds `device`, and from now on derives the seeds of this rank's wraps and batches from `seed` and from the
    /// rank's number in this group.
    pub(super) fn set_seed(&self, device: &Device, seed: u64) {
        device.seed(seed);
        self.continue_from_seed(device, seed);
    }

    /// From now on derives the seeds of this rank's wraps and batches from `seed`.
    pub(crate) fn continue_from_seed(&self, device: &Device, seed: u64) {
        *lock(&self.of_rank.seed) = Some((Seed::new(device, seed), self.group.rank()));
    }

    /// Device of the model that was wrapped last.
    pub(crate) fn model_device(&self) -> Option<Device> {
        lock(&self.of_rank.model_device).clone()
    }

    /// Records the device of a model that is wrapped.
    pub(crate) fn note_model_device(&self, device: &Device) {
        *lock(&self.of_rank.model_device) = Some(device.clone());
    }

    /// Seed of this rank after a `wrap`; `None` without [`Ddp::seed`](super::Ddp::seed).
    pub(crate) fn next_seed_of_rank(&self) -> Option<u64> {
        lock(&self.of_rank.seed).as_mut().map(|(seed, rank)| seed.of_next_wrap(*rank))
    }

    /// Seeds the random numbers that follow the batch of the step that begins at item `first` of an epoch's order:
    /// those of a leaf, or of this rank.
    pub(crate) fn seed_batch(&self, leaf: Option<usize>, loader: u32, epoch: usize, first: usize) {
        if let Some((seed, rank)) = &*lock(&self.of_rank.seed) {
            seed.seed_batch(leaf.unwrap_or(*rank), loader, epoch, first);
        }
    }

    /// Seeds the random numbers of a leaf of a step, in a program without a loader.
    pub(crate) fn seed_leaf(&self, leaf: usize, step: u64) {
        if let Some((seed, _)) = &*lock(&self.of_rank.seed) {
            seed.seed_leaf(leaf, step);
        }
    }

    /// True after `ddp.seed`.
    pub(crate) fn is_seeded(&self) -> bool {
        lock(&self.of_rank.seed).is_some()
    }

    /// The directories of checkpoints that this rank has opened, in the same order on all ranks.
    pub(crate) fn checkpoint_directories(&self) -> MutexGuard<'_, Vec<OpenedDirectory>> {
        lock(&self.of_rank.checkpoint_directories)
    }

    /// Waits for the checkpoints that are being written: those of this group, or all of this rank's if the group is the
    /// job's. *Collective*.
    #[track_caller]
    pub(super) fn finish_background_writes(&self) -> Result<()> {
        let own = |opened: &mut OpenedDirectory| !self.is_part || Arc::ptr_eq(&opened.group, &self.group);
        let opened: Vec<_> = self.checkpoint_directories().extract_if(.., own).collect();
        opened.iter().try_for_each(|opened| opened.background.wait(&opened.group))
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
