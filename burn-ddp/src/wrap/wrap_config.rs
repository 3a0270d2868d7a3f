//! Settings of `wrap`.

use burn::module::Module;
use serde::{Deserialize, Serialize};

use crate::agreement::Settings;
use crate::gradients::{Caps, GradientReduction};
use crate::loss_scaling::LossScaling;
use crate::model::running_stats::BufferPolicy;
use crate::model::schema::Schema;
use crate::precision::Precision;
use crate::{Error, Result};

/// Part of the model that each rank holds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Sharding {
    /// All parameters (the default).
    #[default]
    Off,
    /// A part of each large parameter, of its gradient and of its optimizer state, as in torch's FSDP and DeepSpeed's
    /// ZeRO-3.
    Parameters,
}

/// Settings of [`Ddp::wrap_with`](crate::Ddp::wrap_with), the same on every rank.
///
/// ```
/// use burn_ddp::{GradientReduction, WrapConfig};
/// let config = WrapConfig::new()
///     .with_accumulation(4) // micro-batches per step
///     .with_reduction(GradientReduction::Mean)
///     .with_replica_check(1000) // steps between comparisons
///     .with_exact_replicas(true)
///     .with_first_bucket_cap_bytes(1 << 20)
///     .with_bucket_cap_bytes(4 << 20)
///     .with_overlap(false)
///     .with_single_rank_reduction(true); // also in a world of 1, to measure what it costs
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct WrapConfig {
    /// Micro-batches per step; `None` means 1.
    accumulation: Option<usize>,
    /// Logical ranks of the config file that the settings come from, which the job must have.
    #[serde(skip)]
    pub(crate) logical_ranks: Option<usize>,
    pub(super) reduction: GradientReduction,
    /// Size limits of buckets; `None` means a default that depends on whether gradients are reduced in host memory,
    /// between machines, or on their device.
    first_bucket_cap_bytes: Option<usize>,
    bucket_cap_bytes: Option<usize>,
    pub(super) buffers: BufferPolicy,
    pub(super) replica_check: usize,
    pub(super) exact_replicas: bool,
    pub(super) exact: bool,
    /// `None`: the engine, the device and the number of cores decide.
    pub(super) overlap: Option<bool>,
    #[serde(rename = "alone")]
    pub(super) single_rank_reduction: bool,
    /// Paths of parameters, buffers and modules that each rank keeps for itself; `*` stands for any text.
    pub(super) local_parameters: Vec<String>,
    pub(super) sharding: Sharding,
    /// Least number of elements of a sharded parameter.
    sharding_above: usize,
    pub(super) compute_dtype: Precision,
    /// Paths of parameters and modules whose parameters are read as they are.
    pub(super) full_precision: Vec<String>,
    pub(super) reduce_dtype: Precision,
    pub(super) loss_scaling: Option<LossScaling>,
    pub(super) finite_gradients: bool,
}

impl Default for WrapConfig {
    fn default() -> Self {
        WrapConfig {
            accumulation: None,
            logical_ranks: None,
            reduction: GradientReduction::Mean,
            first_bucket_cap_bytes: None,
            bucket_cap_bytes: None,
            buffers: BufferPolicy::default(),
            replica_check: 100,
            exact_replicas: false,
            exact: false,
            overlap: None,
            single_rank_reduction: false,
            local_parameters: Vec::new(),
            sharding: Sharding::Off,
            sharding_above: 1 << 14,
            compute_dtype: Precision::F32,
            full_precision: Vec::new(),
            reduce_dtype: Precision::F32,
            loss_scaling: None,
            finite_gradients: false,
        }
    }
}

impl WrapConfig {
    /// The defaults: one backward per step, mean, buckets of 1 MiB (25 MiB for NCCL; between machines 1 to 25 MiB,
    /// measured in `wrap`), running statistics averaged, replicas compared every 100 steps.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Reduces in every `k`-th backward, which returns the mean over the items of all `k` micro-batches and all ranks.
    /// 1 by default.
    ///
    /// The other backwards return `None`: the optimizer makes no step. With [`Ddp::loader`](crate::Ddp::loader) the
    /// last batch of an epoch reduces, too, so that a remainder of fewer than `k` micro-batches is a step of its own.
    /// With other loaders, and with [`Ddp::weighted`](crate::Ddp::weighted), call [`Ddp::flush`](crate::Ddp::flush) at
    /// the end of an epoch.
    ///
    /// `k` micro-batches cost the communication of one backward, and memory for the sums: one more gradient of each
    /// parameter, in f32 or f64. ([Sharded](Self::with_sharding) parameters are also gathered in each backward.)
    ///
    /// # Example
    ///
    /// As in [`Ddp::wrap_with`](crate::Ddp::wrap_with).
    #[must_use]
    pub fn with_accumulation(mut self, k: usize) -> Self {
        self.accumulation = Some(k);
        self
    }

    /// Mean (the default) or sum of gradients.
    ///
    /// # Example
    ///
    /// ```
    /// # use burn::{nn::{Linear, LinearConfig}, prelude::*};
    /// # use burn_ddp::prelude::*;
    /// let gradients = Ddp::spawn(2, |ddp| {
    ///     # let device = ddp.device()?.autodiff();
    ///     let config = WrapConfig::new().with_reduction(GradientReduction::Sum);
    ///     let model: Linear = ddp.wrap_with(LinearConfig::new(1, 1).init(&device), &config)?;
    ///     let x = Tensor::<2>::full([1, 1], 1.0 + ddp.rank() as f64, &device); // 1 and 2
    ///     let loss = model.forward(x).sum(); // over items
    ///     let grads = ddp.backward(&loss, &model)?.expect("a step");
    ///     Ok(grads.get::<2>(model.weight.id).unwrap().into_scalar::<f32>())
    /// })?;
    /// assert_eq!(gradients, [3.0, 3.0]);
    /// # Ok::<(), burn_ddp::Error>(())
    /// ```
    #[must_use]
    pub fn with_reduction(mut self, reduction: GradientReduction) -> Self {
        self.reduction = reduction;
        self
    }

    /// Size limit of a bucket, the gradients that travel in one all-reduce: by default 1 MiB, and 25 MiB, as in torch,
    /// for gradients that NCCL reduces on their device (not measured here). Between
    /// machines all ranks make eleven all-reduces of 1 or 4 MiB in `wrap` if there are 8 MiB of gradients or more, and
    /// the default follows from rank 0's times: √(bytes of all gradients × bytes that the link carries in the fixed
    /// part of a call's time), 1 to 25 MiB. A larger gradient has a bucket of its own. The limit does not change
    /// results, except under NCCL.
    #[must_use]
    pub fn with_bucket_cap_bytes(mut self, bytes: usize) -> Self {
        self.bucket_cap_bytes = Some(bytes);
        self
    }

    /// Size limit of the first bucket: by default 256 KiB, and 1 MiB for NCCL. It is smaller than the others so that
    /// communication starts early.
    #[must_use]
    pub fn with_first_bucket_cap_bytes(mut self, bytes: usize) -> Self {
        self.first_bucket_cap_bytes = Some(bytes);
        self
    }

    /// Policy for running statistics such as BatchNorm's: averaged over the ranks by default.
    ///
    /// # Example
    ///
    /// ```
    /// # use burn::{nn::{BatchNorm, BatchNormConfig}, prelude::*};
    /// # use burn_ddp::prelude::*;
    /// let means = Ddp::spawn(2, |ddp| {
    ///     # let device = ddp.device()?.autodiff();
    ///     let config = WrapConfig::new().with_buffers(BufferPolicy::Broadcast);
    ///     let norm: BatchNorm = ddp.wrap_with(BatchNormConfig::new(1).init(&device), &config)?;
    ///     let x = Tensor::<2>::from_floats([[0.0], [2.0]], &device) + 10.0 * ddp.rank() as f32; // means of 1 and 11
    ///     ddp.backward(&norm.forward(x).sum(), &norm)?;
    ///     Ok(norm.running_mean.value().into_scalar::<f32>())
    /// })?;
    /// assert_eq!(means, [0.1, 0.1]); // a tenth of rank 0's
    /// # Ok::<(), burn_ddp::Error>(())
    /// ```
    #[must_use]
    pub fn with_buffers(mut self, policy: BufferPolicy) -> Self {
        self.buffers = policy;
        self
    }

    /// Number of steps between comparisons of the ranks' parameters, by digests: 100 by default, 0 for never. Steps 1,
    /// 2, 4, 8, … of the first interval are compared too (the first step is number 0), since that is where mistakes
    /// show.
    ///
    /// A step compares the parameters that got a gradient from its forward, and the frozen ones that were read. Where
    /// bits differ, the ranks compare how far the parameter has moved since the last comparison, and since they were
    /// last equal. Movements that differ by at most 1e-3 of their size (1e-2 for f16 and bf16), or by last bits of
    /// random signs, are rounding: training goes on, with a warning the first time and a count in
    /// [`Stats::rounded`](crate::Stats::rounded). A larger difference, or any difference in a parameter that did not
    /// move, fails the backward on every rank with [`Error::ReplicasDiffer`], which names the parameter and the rank.
    /// [Sharded](Self::with_sharding) parameters are not compared, as no two ranks hold the same rows.
    ///
    /// A comparison reads the parameters from their device, and gathers 8 bytes per parameter from each rank in one
    /// step; where bits differ, a second step gathers 1,000 bytes per parameter that differs.
    ///
    /// Ranks round differently where Burn does not compute the same bits twice: on Flex in sums over 4 Mi elements and
    /// more (norm clipping, LAMB, Adafactor, Muon), and on GPUs of different kinds. Such differences are not corrected:
    /// parameters and optimizer state of the ranks stay apart by as much, and each step moves all of them by the same
    /// average. [`broadcast_parameters`](crate::Collectives::broadcast_parameters) makes them equal again, as does
    /// loading a checkpoint.
    #[must_use]
    pub fn with_replica_check(mut self, every_steps: usize) -> Self {
        self.replica_check = every_steps;
        self
    }

    /// If true, one bit that differs between the ranks' parameters is an error, in comparisons of steps, `save` and
    /// `check_replicas`. By default differences by [rounding](Self::with_replica_check) are accepted.
    #[must_use]
    pub fn with_exact_replicas(mut self, exact: bool) -> Self {
        self.exact_replicas = exact;
        self
    }

    /// If true, refuses by name what keeps [logical ranks](crate::Ddp::set_logical_ranks) from training the same bits
    /// on any number of processes, as far as it can be seen: NCCL and GPUs, which add in ways of their own; Flex with
    /// several threads (`RAYON_NUM_THREADS=1` makes it one); ranks that are threads, with `ddp.seed`; running
    /// statistics that are not averaged; and in later calls a `SyncBatchNorm`, a stream, `ddp.accumulate`, a
    /// `ddp.flush` within a step, `ddp.join`, norms of sharded gradients, and `ddp.mean` and `ddp.sum` of floats. False
    /// by default.
    ///
    /// ```
    /// # use burn::nn::LinearConfig;
    /// # use burn_ddp::prelude::*;
    /// Ddp::spawn(1, |ddp| {
    ///     let model = LinearConfig::new(4, 4).init(&ddp.device()?.autodiff());
    ///     let error = ddp.wrap_with(model, &WrapConfig::new().with_exact(true)).unwrap_err().to_string();
    ///     assert!(error.contains("ddp.set_logical_ranks"), "{error}");
    ///     Ok(())
    /// })?;
    /// # Ok::<(), burn_ddp::Error>(())
    /// ```
    #[must_use]
    pub fn with_exact(mut self, exact: bool) -> Self {
        self.exact = exact;
        self
    }

    /// Reduces buckets on a thread while backward goes on; if false, the caller reduces all of them at the end of
    /// backward. The default is a thread where communication waits for a network, where a GPU computes, or where each
    /// rank of the machine has two cores; elsewhere the thread would compete with backward for the same cores. Does not
    /// change results.
    #[must_use]
    pub fn with_overlap(mut self, overlap: bool) -> Self {
        self.overlap = Some(overlap);
        self
    }

    /// In a world of 1, sends gradients through buckets and reductions as between ranks, and compares replicas, to
    /// measure the cost: there is nothing to average. By default a world of 1 does neither.
    #[must_use]
    pub fn with_single_rank_reduction(mut self, reduce: bool) -> Self {
        self.single_rank_reduction = reduce;
        self
    }

    /// Makes parameters and buffers *local*: each rank keeps its own values and gradients of them, which are neither
    /// broadcast nor averaged nor compared, like those in torch's `_ddp_params_and_buffers_to_ignore`. Their shapes may
    /// differ between ranks.
    ///
    /// Each name is the path of a parameter or buffer (`"experts.0.weight"`) or of a module, which stands for all that
    /// it holds (`"experts"`); `*` stands for any text (`"experts.*.bias"`). Names add up over several calls. A name
    /// that the model does not have is an error of `wrap`, which proposes the closest ones.
    ///
    /// `save` and checkpoints write rank 0's values and optimizer state of local parameters, with a warning the first
    /// time: a resumed run has those on **every** rank. To keep the values of the other ranks, each rank saves its own,
    /// for example by `model.experts.valid().save_file(path)` with another path on each rank, and loads them after the
    /// checkpoint and before `wrap`.
    ///
    /// Gradients of local parameters come from this rank's backward alone: a batch of weight 0 (an empty share of a
    /// step, [`Ddp::weighted`](crate::Ddp::weighted)) trains these parameters in full. Every backward returns these
    /// gradients, so [`with_accumulation`](Self::with_accumulation) of more than 1 and
    /// [`Ddp::accumulate`](crate::Ddp::accumulate) are errors, unless no local parameter is trained. The norm over all
    /// gradients differs between ranks: clip local gradients apart from the others.
    ///
    /// ```
    /// # use burn::nn::{Linear, LinearConfig};
    /// # use burn::prelude::*;
    /// # use burn_ddp::prelude::*;
    /// let gradients = Ddp::spawn(2, |ddp| {
    ///     let device = ddp.device()?.autodiff();
    ///     let config = WrapConfig::new().with_local_parameters(["bias"]);
    ///     let model: Linear = ddp.wrap_with(LinearConfig::new(1, 1).init(&device), &config)?;
    ///     let loss = model.forward(Tensor::<2>::ones([1, 1], &device)) * ddp.rank() as f32;
    ///     let grads = ddp.backward(&loss.sum(), &model)?.expect("a step");
    ///     let weight = grads.get::<2>(model.weight.id).unwrap().into_scalar::<f32>();
    ///     let bias = grads.get::<1>(model.bias.as_ref().unwrap().id).unwrap().into_scalar::<f32>();
    ///     Ok((weight, bias))
    /// })?;
    /// assert_eq!(gradients, [(0.5, 0.0), (0.5, 1.0)]);
    /// # Ok::<(), burn_ddp::Error>(())
    /// ```
    #[must_use]
    pub fn with_local_parameters<S: Into<String>>(mut self, names: impl IntoIterator<Item = S>) -> Self {
        self.local_parameters.extend(names.into_iter().map(Into::into));
        self
    }

    /// [`with_local_parameters`](Self::with_local_parameters) of those paths of `model` for which `is_local` returns
    /// true. For a path that several ranks have, `is_local` must return the same on each of them. Local paths (experts)
    /// may exist on some ranks only.
    ///
    /// ```
    /// # use burn::{nn::LinearConfig, tensor::Device};
    /// # use burn_ddp::WrapConfig;
    /// let model = LinearConfig::new(2, 1).init(&Device::default());
    /// let config = WrapConfig::new().with_local_parameters_where(&model, |path| path.ends_with("bias"))?;
    /// assert_eq!(config, WrapConfig::new().with_local_parameters(["bias"]));
    /// # Ok::<(), burn_ddp::Error>(())
    /// ```
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`] for a trainable parameter of a dtype that `wrap` does not take.
    pub fn with_local_parameters_where<M: Module>(self, model: &M, is_local: impl Fn(&str) -> bool) -> Result<Self> {
        let schema = Schema::of(model)?;
        Ok(self.with_local_parameters(schema.paths().into_iter().filter(|path| is_local(path))))
    }

    /// Divides large parameters between the ranks: each rank holds a part of their values, gradients and optimizer
    /// state. Off by default.
    ///
    /// A parameter, trained or frozen, is sharded if it has two dimensions or more, at least as many rows (dimension 0)
    /// as there are ranks, and at least [`with_sharding_above`](Self::with_sharding_above) elements; each rank holds
    /// some of the rows. Other parameters stay whole, as do clones of one `Param` (Burn's optimizers step only the
    /// first), bases under LoRA (Burn keeps one reparameterization per parameter), and parameters named
    /// `linear_inner.weight` (a third of a block of Burn's transformers), whose shape Burn takes without reading the
    /// value. In a world of 1 the part is the whole, and what is refused on several ranks is refused there, too.
    ///
    /// Make the model and its inputs on `device.autodiff().gradient_checkpointing()`: on other devices Burn's `Linear`,
    /// which reshapes its weight for some inputs of three dimensions or more, keeps it whole until backward.
    ///
    /// A read gathers the whole parameter from all ranks; backward gathers it again where a layer needs it. It is not
    /// kept in between, with two exceptions. A parameter that a step reads several times (a recurrent layer, tied
    /// weights) is gathered once and kept until the backward ends, up to 64 MiB of such parameters or the largest one.
    /// A frozen layer over trained ones keeps its whole weight until its backward, because Burn recomputes tracked
    /// values alone.
    ///
    /// Each gather, and the reduction of each gradient, is one step in which a rank sends about `(n - 1) b / n` bytes
    /// for a parameter of `b` bytes on `n` ranks. A step of `k` micro-batches sends `(2 k + 1) / 2` times the bytes of
    /// averaging.
    ///
    /// Every rank must read the same parameters in the same order, **also in evaluation**: a rank that skips a layer
    /// or evaluates alone is an error on all ranks. Forwards wait for the other ranks.
    /// All ranks must also change copies of the model (an EMA) in the same order; a copy that one rank alone has
    /// changed is an error when it is next read, saved or hashed. Pass each optimizer through
    /// [`Ddp::optimizer`](crate::Ddp::optimizer) before training.
    ///
    /// [`Ddp::save`](crate::Ddp::save), [checkpoints](crate::checkpoint), [`param_hash`](crate::param_hash) and
    /// [`Ddp::unwrap`](crate::Ddp::unwrap) work on whole parameters, so they are collective: each rank calls them.
    /// `wrap` and `unwrap` hold the whole model once in the memory of each rank; files and hashes gather one parameter
    /// at a time. Checkpoints load before or after `wrap`, on any number of ranks; Burn's own files load before it.
    /// Norms of gradients ([`clip_grad_norm`](crate::clip_grad_norm)) are over all ranks, and collective, too.
    /// [`Ddp::join`](crate::Ddp::join) and
    /// [`broadcast_optimizer_state`](crate::Collectives::broadcast_optimizer_state) refuse such a model.
    ///
    /// # Panics
    ///
    /// A forward panics if a gather fails. Burn's `into_record` and `save_file` panic for such a model, as they would
    /// save this rank's rows only.
    ///
    /// # Example
    ///
    /// ```
    /// # use burn::{nn::LinearConfig, prelude::*};
    /// # use burn_ddp::prelude::*;
    /// Ddp::spawn(2, |ddp| {
    ///     let device = ddp.device()?.autodiff().gradient_checkpointing();
    ///     let config = WrapConfig::new().with_sharding(Sharding::Parameters).with_sharding_above(1 << 16);
    ///     let model = ddp.wrap_with(LinearConfig::new(256, 256).with_bias(false).init(&device), &config)?;
    ///     let memory = ddp.telemetry().memory();
    ///     assert_eq!(memory.parameters, 256 * 256 * 4 / 2); // half of the weight
    ///     assert_eq!(model.forward(Tensor::<2>::ones([1, 256], &device)).dims(), [1, 256]); // on every rank
    ///     Ok(())
    /// })?;
    /// # Ok::<(), burn_ddp::Error>(())
    /// ```
    #[must_use]
    pub fn with_sharding(mut self, sharding: Sharding) -> Self {
        self.sharding = sharding;
        self
    }

    /// Least number of elements of a parameter that [`with_sharding`](Self::with_sharding) divides: 16384 by default.
    /// For smaller parameters the memory that sharding saves is not worth the time of the gathers.
    #[must_use]
    pub fn with_sharding_above(mut self, elements: usize) -> Self {
        self.sharding_above = elements;
        self
    }

    /// True if parameters may be divided between the ranks.
    #[cfg(feature = "train")]
    pub(crate) fn shards(&self) -> bool {
        self.sharding == Sharding::Parameters
    }

    /// True if parameters of this shape are divided between `world` ranks.
    pub(super) fn divides(&self, dims: &[usize], world: usize) -> bool {
        let large = dims.iter().product::<usize>() >= self.sharding_above.max(1);
        self.sharding == Sharding::Parameters && dims.len() > 1 && dims[0] >= world && large
    }

    /// Micro-batches per step, if set.
    pub(crate) fn accumulation(&self) -> Option<usize> {
        self.accumulation
    }

    pub(super) fn micro_batches(&self) -> usize {
        self.accumulation.unwrap_or(1)
    }

    /// True if the size of buckets is set.
    pub(super) fn sets_bucket_size(&self) -> bool {
        self.bucket_cap_bytes.is_some()
    }

    /// Size limits of buckets of gradients that are reduced on their device, or in host memory, where `measured` is the
    /// size for the link between machines.
    pub(super) fn caps(&self, on_device: bool, measured: Option<usize>) -> Caps {
        let (first_bytes, bytes) =
            if on_device { (1 << 20, 25 << 20) } else { (256 << 10, measured.unwrap_or(1 << 20)) };
        Caps {
            first_bytes: self.first_bucket_cap_bytes.unwrap_or(first_bytes),
            bytes: self.bucket_cap_bytes.unwrap_or(bytes),
        }
    }

    pub(crate) fn check(&self) -> Result<()> {
        if self.accumulation == Some(0) {
            return Err(Error::invalid("accumulation counts micro-batches per step: 1 or more"));
        }
        if self.bucket_cap_bytes == Some(0) || self.first_bucket_cap_bytes == Some(0) {
            return Err(Error::invalid("a bucket cap is a number of bytes: 1 or more"));
        }
        self.check_precision()
    }

    /// Settings by name, for the comparison between ranks. Local parameters are left out: ranks may have different
    /// ones, and [`agreement::on_model`](crate::agreement::on_model) compares all that is shared.
    pub(super) fn settings(&self) -> Settings {
        let compared = WrapConfig { local_parameters: Vec::new(), ..self.clone() };
        let value = serde_json::to_value(compared).unwrap_or_default();
        let fields = value.as_object().into_iter().flatten();
        let shown = |value: &serde_json::Value| if value.is_null() { "not set".to_owned() } else { value.to_string() };
        fields.map(|(name, value)| (name.clone(), shown(value))).collect()
    }
}
