//! The autodiff node of batch normalisation over all ranks.

use std::sync::Arc;

use burn::backend::autodiff::checkpoint::base::Checkpointer;
use burn::backend::autodiff::checkpoint::strategy::CheckpointStrategy;
use burn::backend::autodiff::grads::Gradients;
use burn::backend::autodiff::ops::{Backward, Ops, OpsKind};
use burn::backend::autodiff::{Autodiff, NodeId};
use burn::backend::tensor::FloatTensor;
use burn::backend::{Backend, TensorMetadata, backend_extension};
use burn::tensor::{Shape, TensorData};
use burn_ddp_comm::{ProcessGroup, ReduceOp};

use super::moments::{values, wide};
use crate::backends::extend_backends;
use crate::ddp::Ddp;
use crate::differentiable::{abandon, read};
use crate::intercept;
use crate::tensor_conversion::cast;
use crate::{Error, Result};

/// The batch of all ranks, by which a [`SyncBatchNorm`](super::SyncBatchNorm) normalises. Opaque: made by that layer,
/// passed through [`SyncBatchNormBackend`].
#[derive(Clone, Debug)]
pub struct SyncedBatch {
    /// A handle that does not keep the rank in the job, since Burn may keep the node for long.
    pub(super) ddp: Ddp,
    pub(super) group: Arc<ProcessGroup>,
    /// Elements of each channel, over all ranks whose batch counts.
    pub(super) count: f64,
    /// True if this rank's items count; `None` without items.
    pub(super) counts: Option<bool>,
    /// True if the average of gradients counts each rank by its items.
    pub(super) weighs_items: bool,
    pub(super) epsilon: f64,
}

/// Extension of a Burn backend for [`SyncBatchNorm`](super::SyncBatchNorm), which calls it.
#[backend_extension(
    Flex: cfg(feature = "flex"),
    NdArray: cfg(feature = "ndarray"),
    LibTorch: cfg(feature = "tch"),
    Cube: cfg(feature = "cube"),
    Autodiff
)]
pub trait SyncBatchNormBackend: Backend {
    /// Normalises `x`, `[items, channels, …]`, by `mean` and `variance`, which are those of the batch over all ranks;
    /// all but `x` are `[channels]`. With autodiff, the gradient of `x` includes the dependence of mean and variance on
    /// the `x` of every rank.
    fn sync_batch_norm(
        x: FloatTensor<Self>,
        gamma: FloatTensor<Self>,
        beta: FloatTensor<Self>,
        mean: FloatTensor<Self>,
        variance: FloatTensor<Self>,
        batch: SyncedBatch,
    ) -> FloatTensor<Self> {
        let dtype = x.dtype();
        let y = Self::batch_norm(
            widened::<Self>(x),
            widened::<Self>(gamma),
            widened::<Self>(beta),
            widened::<Self>(mean),
            widened::<Self>(variance),
            batch.epsilon,
        );
        cast::<Self>(y, dtype)
    }
}

extend_backends!(SyncBatchNormBackend {});

impl<B: SyncBatchNormBackend, C: CheckpointStrategy> SyncBatchNormBackend for Autodiff<B, C> {
    fn sync_batch_norm(
        x: FloatTensor<Self>,
        gamma: FloatTensor<Self>,
        beta: FloatTensor<Self>,
        mean: FloatTensor<Self>,
        variance: FloatTensor<Self>,
        batch: SyncedBatch,
    ) -> FloatTensor<Self> {
        let (mean, variance) = (mean.into_primitive(), variance.into_primitive());
        let parents = [x.node(), gamma.node(), beta.node()];
        // Compute-bound, so that gradient checkpointing never repeats the collective.
        match Backward::<B, 3>::prepare::<C>(SyncBatchNormOps, parents).compute_bound().stateful() {
            OpsKind::Tracked(mut prep) => {
                let state = State {
                    x: prep.checkpoint(&x),
                    gamma: prep.checkpoint(&gamma),
                    mean: mean.clone(),
                    variance: variance.clone(),
                    batch: batch.clone(),
                };
                let (x, gamma, beta) = (x.into_primitive(), gamma.into_primitive(), beta.into_primitive());
                prep.finish(state, B::sync_batch_norm(x, gamma, beta, mean, variance, batch))
            }
            OpsKind::UnTracked(prep) => {
                let (x, gamma, beta) = (x.into_primitive(), gamma.into_primitive(), beta.into_primitive());
                prep.finish(B::sync_batch_norm(x, gamma, beta, mean, variance, batch))
            }
        }
    }
}

#[derive(Clone, Debug)]
struct State<T> {
    x: NodeId,
    gamma: NodeId,
    mean: T,
    variance: T,
    batch: SyncedBatch,
}

#[derive(Debug)]
struct SyncBatchNormOps;

impl<B: Backend> Backward<B, 3> for SyncBatchNormOps {
    type State = State<FloatTensor<B>>;

    /// With x̂ the normalised input: the gradient of β is Σ dy and that of γ is Σ dy·x̂, over this rank's items, since
    /// the reduction of parameters' gradients adds those of the other ranks. The gradient of x is γ/σ · (dy − Σ dy / n
    /// − x̂ · Σ dy·x̂ / n), with sums and the count n over the items of all ranks.
    fn backward(self, ops: Ops<Self::State, 3>, grads: &mut Gradients, checkpointer: &mut Checkpointer) {
        let [x_node, gamma_node, beta_node] = ops.parents;
        let State { x, gamma, mean, variance, batch } = ops.state;
        let x = checkpointer.retrieve_node_output::<FloatTensor<B>>(x);
        let gamma = checkpointer.retrieve_node_output::<FloatTensor<B>>(gamma);
        let (x_dtype, gamma_dtype) = (x.dtype(), gamma.dtype());
        let layout = Channels::of(&x.shape());
        let dy = widened::<B>(grads.consume::<B>(&ops.node));

        let deviation = B::float_sqrt(B::float_add_scalar(widened::<B>(variance), batch.epsilon.into()));
        let inverse = layout.spread::<B>(B::float_recip(deviation));
        let normalized = B::float_sub(widened::<B>(x), layout.spread::<B>(widened::<B>(mean)));
        let normalized = B::float_mul(normalized, inverse.clone());
        let sum_dy = layout.sum::<B>(dy.clone());
        let sum_dy_normalized = layout.sum::<B>(B::float_mul(dy.clone(), normalized.clone()));

        if let Some(node) = x_node {
            let sums = [sum_dy.clone(), sum_dy_normalized.clone()];
            let means = batch.means::<B>(sums).unwrap_or_else(|error| abandon(&batch.ddp, error));
            let [mean_dy, mean_dy_normalized] = means.map(|mean| layout.spread::<B>(mean));
            let scale = B::float_mul(layout.spread::<B>(widened::<B>(gamma)), inverse);
            let centred = B::float_sub(dy, mean_dy);
            let projected = B::float_mul(normalized, mean_dy_normalized);
            let dx = B::float_mul(scale, B::float_sub(centred, projected));
            grads.register::<B>(node.id, cast::<B>(dx, x_dtype));
        }
        if let Some(node) = gamma_node {
            grads.register::<B>(node.id, cast::<B>(sum_dy_normalized, gamma_dtype));
        }
        if let Some(node) = beta_node {
            grads.register::<B>(node.id, cast::<B>(sum_dy, gamma_dtype));
        }
    }
}

impl SyncedBatch {
    /// From this rank's sums, one per channel, the means over the items of all ranks. *Collective*: one all-reduce.
    ///
    /// The average of parameters' gradients will weight this rank's gradient by its own items. But each sum should
    /// count by the items of the rank from whose loss it came. So sums are multiplied by the weight of their rank, and
    /// the result is divided by that of the rank that receives it.
    fn means<B: Backend>(&self, sums: [FloatTensor<B>; 2]) -> Result<[FloatTensor<B>; 2]> {
        let device = sums[0].device();
        let dtype = sums[0].dtype();
        let weight = match weight_of_batch(&self.ddp) {
            items if self.weighs_items || items == 0.0 => items,
            _ => 1.0,
        };
        if let Some(counts) = self.counts.filter(|counts| *counts != (weight > 0.0)) {
            let forward = if counts { "counted" } else { "left out" };
            return Err(Error::invalid(format!(
                "the backward weighs {weight}, but the forward through `SyncBatchNorm`, which did not know that, \
                {forward} its batch: let forward and backward run in `ddp.weighted({weight}).scope(&model, || ..)`"
            )));
        }
        intercept::has_weight_0(false)?;
        let mut all = Vec::new();
        for sum in sums {
            // The batch of weight 0 may hold NaN.
            let weighted = |sum| if weight > 0.0 { sum * weight } else { 0.0 };
            all.extend(values(read::<B>(sum)?)?.into_iter().map(weighted));
        }
        self.group.all_reduce(&mut all, ReduceOp::Sum)?;
        // The average ignores the gradients of a rank of weight 0.
        let divisor = if weight > 0.0 { weight * self.count } else { f64::INFINITY };
        all.iter_mut().for_each(|sum| *sum /= divisor);
        let tensor = |means: &[f64]| {
            let data = TensorData::new(means.to_vec(), [means.len()]).convert_dtype(dtype);
            B::float_from_data(data, &device)
        };
        let (first, second) = all.split_at(all.len() / 2);
        Ok([tensor(first), tensor(second)])
    }
}

/// Weight of this rank's batch: that of the call that runs, or of the loader's last batch.
pub(super) fn weight_of_batch(ddp: &Ddp) -> f64 {
    intercept::weight_of_backward().unwrap_or_else(|| ddp.state().batch_weight.items())
}

/// Layout of `[items, channels, …]`.
struct Channels {
    channels: usize,
    /// Elements of each channel.
    each: usize,
    /// `[1, channels, 1, …]`
    spread: Shape,
}

impl Channels {
    fn of(shape: &Shape) -> Self {
        let channels = shape[1];
        let mut spread = vec![1; shape.num_dims()];
        spread[1] = channels;
        Channels { channels, each: shape.num_elements() / channels, spread: Shape::from(spread) }
    }

    /// Sums over all but the channels: `[channels]`.
    fn sum<B: Backend>(&self, x: FloatTensor<B>) -> FloatTensor<B> {
        let rows = B::float_reshape(B::float_swap_dims(x, 0, 1), Shape::new([self.channels, self.each]));
        B::float_reshape(B::float_sum_dim(rows, 1), Shape::new([self.channels]))
    }

    /// `[channels]` so that it broadcasts over the rest.
    fn spread<B: Backend>(&self, x: FloatTensor<B>) -> FloatTensor<B> {
        B::float_reshape(x, self.spread.clone())
    }
}

/// Half precision in f32, the rest as it is.
fn widened<B: Backend>(x: FloatTensor<B>) -> FloatTensor<B> {
    let dtype = wide(x.dtype());
    cast::<B>(x, dtype)
}
