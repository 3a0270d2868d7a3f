//! Batch normalisation over the batch of all ranks.

use burn::backend::Dispatch;
use burn::module::{
    Content, DisplaySettings, Module, ModuleDisplay, ModuleDisplayDefault, ModuleMapper, ModuleVisitor, Param, ParamId,
};
use burn::nn::BatchNorm;
use burn::tensor::{Device, Tensor};

use super::moments::{Moments, per_channel, wide};
use super::sync_batch_norm_node::{SyncBatchNormBackend, SyncedBatch, weight_of_batch};
use crate::Result;
use crate::agreement::tell_peers;
use crate::intercept::{Tap, WrappedModel};

/// Batch normalisation whose mean and variance are those of the items of **all** ranks, as in `torch.nn.SyncBatchNorm`:
/// N ranks with b items each train like one with N·b.
///
/// A wrapper of Burn's [`BatchNorm`] with the same parameters, running statistics and settings under the same names: it
/// loads records of models with Burn's layer, and such models load its records. Declare the field of the model as
/// `SyncBatchNorm` and make it by `BatchNormConfig::new(channels).init(device).into()`; [`Ddp::wrap`](crate::Ddp::wrap)
/// connects it to the ranks. In a model that is not wrapped, in a world of 1 and in evaluation (`valid()`, or frozen)
/// it computes what Burn's layer does, bit for bit.
///
/// In training, each forward is a *collective* (an all-gather of count, mean and variance) and so is its backward (an
/// all-reduce of two sums per channel). Both are small, so their cost is that ranks wait for each other. All ranks must
/// make the same passes through the layer and run their backwards; each with any number of items, some also with none.
/// With accumulation, too, all ranks must have the same number of micro-batches.
///
/// Each rank counts by its number of items, also in the average of gradients: with the weights of
/// [`Ddp::weighted`](crate::Ddp::weighted) or of the loader, as [`Ddp::backward`](crate::Ddp::backward) uses them,
/// gradients are those of the mean over all items, whatever the split. A batch that weighs 0 is left out, even if it
/// holds NaN. The layer must know so in its forward: the loader says it, or a
/// [`scope`](crate::Weighted::scope) around forward and backward, `ddp.weighted(0.0).scope(&model, || ..)`; a weight 0
/// that only the backward gets is an error.
///
/// Running statistics are updated by the momentum as in Burn, with the biased variance (torch keeps the unbiased one),
/// and have the same bits on all ranks. If all layers with statistics are of this kind,
/// [`BufferPolicy::Local`](crate::BufferPolicy::Local) saves the cost of averaging them. Means and variances are merged
/// in f64; with half precision all other computations in the layer are in f32.
///
/// ```
/// use burn::nn::BatchNormConfig;
/// use burn::prelude::*;
/// use burn_ddp::nn::SyncBatchNorm;
/// use burn_ddp::prelude::*;
///
/// let normalised = Ddp::spawn(2, |ddp| {
///     let device = ddp.device()?.autodiff();
///     let norm: SyncBatchNorm = BatchNormConfig::new(1).init(&device).into();
///     let norm = ddp.wrap(norm)?;
///     let x = Tensor::<2>::from_floats([[ddp.rank() as f32]], &device); // 0 on rank 0, 1 on rank 1
///     Ok(norm.forward(x).into_scalar::<f32>().round())
/// })?;
/// assert_eq!(normalised, [-1.0, 1.0]); // alone, each of them would be 0
/// # Ok::<(), burn_ddp::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct SyncBatchNorm {
    /// Parameters, running statistics and settings.
    pub norm: BatchNorm,
}

impl From<BatchNorm> for SyncBatchNorm {
    fn from(norm: BatchNorm) -> Self {
        SyncBatchNorm { norm }
    }
}

impl From<SyncBatchNorm> for BatchNorm {
    fn from(sync: SyncBatchNorm) -> Self {
        sync.norm
    }
}

impl SyncBatchNorm {
    /// Normalises `[items, channels, …]`, and keeps shape and dtype; halves are normalised in f32. *Collective* in
    /// training.
    ///
    /// With `c` channels it costs one step, in which a rank sends `16 c + 16` bytes to each other rank, and its
    /// backward one step with `16 c` bytes (two, if the sums of all ranks together exceed 64 KiB). No communication in
    /// evaluation.
    ///
    /// # Panics
    ///
    /// As Burn's layer, if the input has another number of channels. In training also, with the full report, if a peer
    /// failed or made another call, since a forward cannot return an error; and if no rank has an item.
    #[track_caller]
    pub fn forward<const D: usize>(&self, input: Tensor<D>) -> Tensor<D> {
        let tapped = self.norm.gamma.reparameterization::<Tap>().map(Tap::model);
        let training = input.device().is_autodiff() && self.norm.training.is_enabled();
        // Burn's layer does not take other types than that of its running statistics.
        let mixes =
            wide(input.dtype()) != input.dtype() && wide(input.dtype()) == self.norm.running_mean.value().dtype();
        match tapped {
            // A `match`, since inside a closure the reported call site would be the closure's line.
            Some(tapped) if training && (mixes || tapped.ddp.world_size() > 1) => {
                match self.forward_train(input, tapped) {
                    Ok(normalised) => normalised,
                    Err(error) => {
                        tell_peers(&tapped.ddp, &error);
                        panic!("{error}")
                    }
                }
            }
            _ if mixes && !training => self.evaluate(input),
            _ => self.norm.forward(input),
        }
    }

    /// Normalises a half by the running statistics, in their type.
    fn evaluate<const D: usize>(&self, input: Tensor<D>) -> Tensor<D> {
        let (dtype, statistics) = (input.dtype(), self.norm.running_mean.value().dtype());
        let [channels] = self.norm.gamma.dims();
        let mut shape = [1; D];
        shape[1] = channels;
        let per_channel = |x: Tensor<1>| x.cast(statistics).reshape(shape);
        let deviation = per_channel(self.norm.running_var.value()).add_scalar(self.norm.epsilon).sqrt();
        let normalised = (input.cast(statistics) - per_channel(self.norm.running_mean.value())) / deviation;
        let scaled = normalised * per_channel(self.norm.gamma.val()) + per_channel(self.norm.beta.val());
        scaled.cast(dtype)
    }

    #[track_caller]
    fn forward_train<const D: usize>(&self, input: Tensor<D>, tapped: &WrappedModel) -> Result<Tensor<D>> {
        let [channels] = self.norm.gamma.dims();
        burn::tensor::assert_shape!(input, [_, channels, ..]);
        let device = input.device();
        let group = tapped.ddp.state().graph_group()?;
        let counts = weight_of_batch(&tapped.ddp) > 0.0;
        let own = Moments::of(input.clone().inner())?;
        let all = own.gather(&group, counts)?;
        let absent = all.count == 0.0;
        let counts = (own.count > 0.0).then_some(counts);
        let moments = if absent { own } else { all };
        let dtype = wide(input.dtype());
        let tensor = |values: &[f64]| per_channel(values, dtype, &device);
        let (mean, variance) = (tensor(&moments.means), tensor(&moments.variances));
        if !absent {
            self.update(&mean, &variance);
        }
        let batch = SyncedBatch {
            ddp: tapped.ddp.clone(),
            group,
            count: moments.count,
            counts,
            weighs_items: tapped.weighs_items(),
            epsilon: self.norm.epsilon,
        };
        Ok(Tensor::from_dispatch(Dispatch::sync_batch_norm(
            input.into_dispatch(),
            self.norm.gamma.val().into_dispatch(),
            self.norm.beta.val().into_dispatch(),
            mean.into_dispatch(),
            variance.into_dispatch(),
            batch,
        )))
    }

    /// Updates the running statistics by those of a batch, as Burn's layer does.
    fn update(&self, mean: &Tensor<1>, variance: &Tensor<1>) {
        let momentum = self.norm.momentum;
        for (state, new) in [(&self.norm.running_mean, mean), (&self.norm.running_var, variance)] {
            let old = state.value_sync().to_device(&new.device());
            let new = new.clone().cast(old.dtype()).mul_scalar(momentum);
            state.update(old.mul_scalar(1.0 - momentum).add(new).detach());
        }
    }
}

/// Every method is the inner layer's, so that parameters have the same paths as in Burn's layer.
impl Module for SyncBatchNorm {
    fn collect_devices(&self, devices: Vec<Device>) -> Vec<Device> {
        self.norm.collect_devices(devices)
    }

    fn fork(self, device: &Device) -> Self {
        self.norm.fork(device).into()
    }

    fn to_device(self, device: &Device) -> Self {
        self.norm.to_device(device).into()
    }

    fn visit<V: ModuleVisitor>(&self, visitor: &mut V) {
        self.norm.visit(visitor);
    }

    fn map<M: ModuleMapper>(self, mapper: &mut M) -> Self {
        let was_tapped = self.norm.gamma.reparameterization::<Tap>().is_some();
        let norm = self.norm.map(mapper);
        // `wrap` attaches taps by mapping.
        if let Some(tapped) = norm.gamma.reparameterization::<Tap>().map(Tap::model).filter(|_| !was_tapped) {
            let mut ids = Ids(Vec::new());
            norm.running_mean.visit(&mut ids);
            norm.running_var.visit(&mut ids);
            tapped.note_synced_norm(&ids.0);
        }
        norm.into()
    }

    fn train(self) -> Self {
        self.norm.train().into()
    }

    fn valid(&self) -> Self {
        self.norm.valid().into()
    }

    fn materialize(self) -> Self {
        self.norm.materialize().into()
    }
}

struct Ids(Vec<ParamId>);

impl ModuleVisitor for Ids {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        self.0.push(param.id);
    }
}

impl ModuleDisplay for SyncBatchNorm {
    fn custom_settings(&self) -> Option<DisplaySettings> {
        self.norm.custom_settings()
    }

    fn custom_content(&self, content: Content) -> Option<Content> {
        self.norm.custom_content(content)
    }
}

impl ModuleDisplayDefault for SyncBatchNorm {
    fn content(&self, content: Content) -> Option<Content> {
        self.norm.content(content).map(|content| content.set_top_level_type("SyncBatchNorm"))
    }

    fn num_params(&self) -> usize {
        Module::num_params(&self.norm)
    }
}

impl std::fmt::Display for SyncBatchNorm {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.format(DisplaySettings::default()))
    }
}
