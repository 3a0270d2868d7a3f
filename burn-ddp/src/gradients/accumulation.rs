//! Several micro-batches and ranks as one gradient: weights, and sums until the reduction.

use burn_ddp_comm::DType;
use half::{bf16, f16};

/// Combination of the gradients of several ranks and micro-batches into one.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum GradientReduction {
    /// `Σ nᵢ gᵢ / Σ nᵢ`: right when the loss is a mean over the items of a batch. `nᵢ` comes from the loader or from
    /// [`Ddp::weighted`](crate::Ddp::weighted) and is 1 without either.
    #[default]
    Mean,
    /// `Σ gᵢ`: right when the loss is a sum over items, and what `torch.nn.DataParallel` does. A batch of weight 0
    /// counts nothing.
    Sum,
}

/// Time at which the gradients of a backward, and those held of earlier ones, are reduced.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Boundary {
    /// At the end of the backward, if its micro-batch is the last one of a step by their number.
    Counted,
    /// At the end of the backward: no further micro-batch of the step comes.
    Now,
    /// In a later backward.
    Later,
}

/// Treatment of the gradients of one backward.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Contribution {
    /// Left out, since the backward has weight 0: its gradients count as absent, even NaN.
    Ignored,
    /// The only gradient of the slot in this step.
    Whole,
    /// Added to the sum over micro-batches, multiplied by this.
    Added(f64),
}

/// The running backward, as needed for the gradients of sharded parameters, which the reducer does not reduce.
#[derive(Clone, Copy, Debug)]
pub(crate) struct MicroBatch {
    pub(crate) contribution: Contribution,
    /// True if the backward ends with a reduction.
    pub(crate) reducing: bool,
    /// Divisor of sums before they are reduced.
    pub(crate) divisor: f64,
    /// Items this rank contributes to the mean; `None` if the reduction is a sum.
    pub(crate) weight_of_mean: Option<f64>,
}

/// Micro-batches that a rank holds between backwards, as a checkpoint has them.
#[derive(Clone, Copy, Debug, PartialEq, serde::Serialize, serde::Deserialize)]
pub(crate) struct HeldBatches {
    pub(crate) count: usize,
    /// Items of all held micro-batches.
    pub(crate) items: f64,
    /// The reduction that the sums are for.
    pub(crate) reduction: GradientReduction,
}

/// Micro-batches since the last reduction, the running one included.
#[derive(Debug)]
pub(super) struct MicroBatches {
    reduction: GradientReduction,
    per_step: usize,
    count: usize,
    items: f64,
    /// Items of the running backward.
    weight: f64,
    /// True if the running backward ends with a reduction.
    pub(super) reducing: bool,
}

impl MicroBatches {
    pub(super) fn new(reduction: GradientReduction, per_step: usize) -> Self {
        MicroBatches { reduction, per_step, count: 0, items: 0.0, weight: 1.0, reducing: true }
    }

    /// Starts a micro-batch of `weight` items.
    pub(super) fn begin(&mut self, weight: f64, boundary: Boundary) {
        self.count += 1;
        self.weight = weight;
        self.items += weight;
        self.reducing = match boundary {
            Boundary::Counted => self.count >= self.per_step,
            Boundary::Now => true,
            Boundary::Later => false,
        };
    }

    pub(super) fn clear(&mut self) {
        self.count = 0;
        self.items = 0.0;
    }

    pub(super) fn held(&self) -> HeldBatches {
        HeldBatches { count: self.count, items: self.items, reduction: self.reduction }
    }

    /// Makes `held` the micro-batches since the last reduction.
    pub(super) fn restore(&mut self, held: HeldBatches) {
        (self.count, self.items) = (held.count, held.items);
    }

    /// Number of micro-batches since the last reduction.
    pub(super) fn count(&self) -> usize {
        self.count
    }

    /// Items of all micro-batches since the last reduction.
    pub(super) fn items(&self) -> f64 {
        self.items
    }

    /// Treatment of the gradients of the running backward.
    pub(super) fn contribution(&self) -> Contribution {
        if self.weight <= 0.0 {
            Contribution::Ignored
        } else if self.reducing && self.count == 1 {
            Contribution::Whole
        } else {
            Contribution::Added(match self.reduction {
                GradientReduction::Mean => self.weight,
                GradientReduction::Sum => 1.0,
            })
        }
    }

    pub(super) fn current(&self) -> MicroBatch {
        MicroBatch {
            contribution: self.contribution(),
            reducing: self.reducing,
            divisor: self.divisor(),
            weight_of_mean: self.weight_of_mean(),
        }
    }

    /// Divisor of sums before they are reduced.
    pub(super) fn divisor(&self) -> f64 {
        match self.reduction {
            GradientReduction::Mean => self.items,
            GradientReduction::Sum => 1.0,
        }
    }

    /// Items this rank contributes to the mean; `None` if the reduction is a sum.
    pub(super) fn weight_of_mean(&self) -> Option<f64> {
        (self.reduction == GradientReduction::Mean).then_some(self.items)
    }
}

/// A gradient summed over micro-batches: in f64 for f64, in f32 for everything narrower; rounded once, when it is
/// written.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Sum {
    F32(Vec<f32>),
    F64(Vec<f64>),
}

impl Sum {
    pub(crate) fn zeros(dtype: DType, len_elems: usize) -> Self {
        match dtype {
            DType::F64 => Sum::F64(vec![0.0; len_elems]),
            _ => Sum::F32(vec![0.0; len_elems]),
        }
    }

    /// The sum of these bytes, which are f64 if `dtype` is, and f32 otherwise.
    pub(crate) fn from_bytes(dtype: DType, bytes: &[u8]) -> Self {
        fn read<T: bytemuck::AnyBitPattern>(bytes: &[u8]) -> Vec<T> {
            bytes.chunks_exact(size_of::<T>()).map(bytemuck::pod_read_unaligned).collect()
        }
        match dtype {
            DType::F64 => Sum::F64(read(bytes)),
            _ => Sum::F32(read(bytes)),
        }
    }

    pub(crate) fn bytes(&self) -> &[u8] {
        match self {
            Sum::F32(sum) => bytemuck::cast_slice(sum),
            Sum::F64(sum) => bytemuck::cast_slice(sum),
        }
    }

    /// Type of the elements.
    pub(crate) fn dtype(&self) -> DType {
        match self {
            Sum::F32(_) => DType::F32,
            Sum::F64(_) => DType::F64,
        }
    }

    /// Adds `weight * gradient`. A weight of 1 adds the gradient as it is; at weight 0 the gradient is ignored, even
    /// NaN.
    pub(crate) fn add(&mut self, dtype: DType, gradient: &[u8], weight: f64) {
        if weight == 0.0 {
            return;
        }
        match self {
            Sum::F64(sum) => zip(sum, gradient, |s, x: f64| *s += weight * x),
            Sum::F32(sum) => {
                let w = weight as f32;
                match dtype {
                    DType::F32 => zip(sum, gradient, |s, x: f32| *s += w * x),
                    DType::F16 => zip(sum, gradient, |s, x: f16| *s += w * x.to_f32()),
                    DType::BF16 => zip(sum, gradient, |s, x: bf16| *s += w * x.to_f32()),
                    other => unreachable!("gradients are floats, got {other}"),
                }
            }
        }
    }

    /// Writes `sum / divisor` as `dtype`.
    pub(crate) fn write(&self, dtype: DType, divisor: f64, out: &mut [u8]) {
        match self {
            Sum::F64(sum) => fill(out, sum, |s| f64::to_ne_bytes(s / divisor)),
            Sum::F32(sum) => {
                let d = divisor as f32;
                match dtype {
                    DType::F32 => fill(out, sum, |s| (s / d).to_ne_bytes()),
                    DType::F16 => fill(out, sum, |s| f16::from_f32(s / d).to_ne_bytes()),
                    DType::BF16 => fill(out, sum, |s| bf16::from_f32(s / d).to_ne_bytes()),
                    other => unreachable!("gradients are floats, got {other}"),
                }
            }
        }
    }
}

fn zip<A, T: bytemuck::AnyBitPattern>(sum: &mut [A], gradient: &[u8], add: impl Fn(&mut A, T)) {
    for (s, x) in sum.iter_mut().zip(gradient.chunks_exact(size_of::<T>())) {
        add(s, bytemuck::pod_read_unaligned(x));
    }
}

fn fill<A: Copy, const N: usize>(out: &mut [u8], sum: &[A], value: impl Fn(A) -> [u8; N]) {
    for (o, &s) in out.chunks_exact_mut(N).zip(sum) {
        o.copy_from_slice(&value(s));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn weighted_sums_round_once() {
        // 1/256 is lost when it is added to 1 in bf16 one at a time; summed in f32 it is not.
        let one = bf16::from_f32(1.0).to_ne_bytes();
        let small = bf16::from_f32(1.0 / 256.0).to_ne_bytes();
        let mut sum = Sum::zeros(DType::BF16, 1);
        sum.add(DType::BF16, &one, 1.0);
        for _ in 0..4 {
            sum.add(DType::BF16, &small, 1.0);
        }
        let mut out = [0u8; 2];
        sum.write(DType::BF16, 1.0, &mut out);
        assert_eq!(bf16::from_ne_bytes(out).to_f32(), 1.015625);
    }

    #[test]
    fn weight_zero_ignores_nan_and_weights_multiply() {
        let mut sum = Sum::zeros(DType::F64, 1);
        sum.add(DType::F64, &f64::NAN.to_ne_bytes(), 0.0);
        sum.add(DType::F64, &2.0f64.to_ne_bytes(), 3.0);
        sum.add(DType::F64, &5.0f64.to_ne_bytes(), 1.0);
        let mut out = [0u8; 8];
        sum.write(DType::F64, 4.0, &mut out);
        assert_eq!(f64::from_ne_bytes(out), 11.0 / 4.0);
    }
}
