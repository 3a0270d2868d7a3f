//! Several micro-batches and ranks as one gradient: weights, and sums until the reduction.

use std::collections::BTreeSet;

use burn_ddp_comm::DType;
use half::{bf16, f16};

use super::leaf_nodes::{Nodes, OwnRun, Rows};
use super::reducer_settings::ReducerSettings;
use crate::batch_weight::Leaf;

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
    /// The only gradient of the slot in this step, of this leaf.
    Whole { leaf: usize },
    /// Added to the sum of its leaf, multiplied by `weight`. Without logical ranks all micro-batches are leaf 0.
    Added { weight: f64, leaf: usize },
}

/// The running backward, as needed for the gradients of sharded parameters, which the reducer does not reduce.
#[derive(Clone, Debug)]
pub(crate) struct MicroBatch {
    pub(crate) contribution: Contribution,
    /// True if the backward ends with a reduction.
    pub(crate) reducing: bool,
    /// Divisor of sums before they are reduced; 1 where the root of a tree divides.
    pub(crate) divisor: f64,
    /// Items this rank contributes to the mean; `None` if the reduction is a sum.
    pub(crate) weight_of_mean: Option<f64>,
    /// With logical ranks: weights of the leaves since the last reduction.
    weights: Nodes<f64>,
}

impl MicroBatch {
    /// Weights of the rows of leaves; none if the reduction is a sum.
    pub(crate) fn weights_of_rows(&self, rows: &Rows) -> Vec<f64> {
        self.weight_of_mean.map_or(Vec::new(), |_| rows.weights(&self.weights))
    }
}

/// Micro-batches that a rank holds between backwards, as a checkpoint has them.
#[derive(Clone, Debug, PartialEq, serde::Serialize, serde::Deserialize)]
pub(crate) struct HeldBatches {
    pub(crate) count: usize,
    /// Items of all held micro-batches.
    pub(crate) items: f64,
    /// The reduction that the sums are for.
    pub(crate) reduction: GradientReduction,
    /// With logical ranks: the leaves that are done, and the weights of the subtrees that are held, by first leaf.
    #[serde(default)]
    pub(crate) leaves: Option<HeldLeaves>,
}

/// Sums that a rank holds between backwards.
#[derive(Clone, Debug, Default, serde::Serialize, serde::Deserialize)]
pub(crate) struct HeldSums {
    /// Slot and first leaf of each sum of gradients.
    pub(crate) gradients: Vec<(usize, usize)>,
    /// Number of the dtype, and first leaf, of each sum of running statistics.
    pub(crate) statistics: Vec<(usize, usize)>,
}

/// Leaves of a rank between backwards.
#[derive(Clone, Debug, Default, PartialEq, serde::Serialize, serde::Deserialize)]
pub(crate) struct HeldLeaves {
    /// Leaves of the job.
    pub(crate) of: usize,
    /// Leaves of the rank that had a backward in this step.
    pub(crate) done: BTreeSet<usize>,
    /// Weights by first leaf of a subtree.
    pub(crate) weights: Vec<(usize, f64)>,
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
    /// This rank's leaves, with logical ranks.
    run: Option<OwnRun>,
    /// True if gradients are added up the tree over all leaves; false where the engine adds in an order of its own.
    tree: bool,
    /// Leaf of the last micro-batch of the step.
    last: Option<usize>,
    /// Leaves of this rank that had a micro-batch in the step, and the loader's step, if there is one.
    done: BTreeSet<usize>,
    step: Option<(u64, u64, u64)>,
    /// Weights of the leaves so far.
    weights: Nodes<f64>,
}

impl MicroBatches {
    pub(super) fn new(settings: &ReducerSettings) -> Self {
        MicroBatches {
            reduction: settings.reduction,
            per_step: settings.accumulation,
            count: 0,
            items: 0.0,
            weight: 1.0,
            reducing: true,
            run: settings.run,
            tree: settings.tree().is_some(),
            last: None,
            done: BTreeSet::new(),
            step: None,
            weights: Nodes::default(),
        }
    }

    /// Starts a micro-batch of `weight` items: with logical ranks that of `leaf`, or of the next one.
    ///
    /// # Errors
    ///
    /// A text, if the leaf had a micro-batch in this step, or is one of another step.
    pub(super) fn begin(&mut self, weight: f64, leaf: Option<Leaf>, boundary: Boundary) -> Result<(), String> {
        let mut completes = self.count + 1 >= self.per_step;
        if let Some(run) = self.run {
            let own = run.leaves();
            let next = self.last.map_or(own.start, |last| last + 1);
            let next = || (next..own.end).find(|leaf| !self.done.contains(leaf));
            let follows = |leaf: &usize| own.contains(leaf) && !self.done.contains(leaf);
            let other_step = leaf.zip(self.step).is_some_and(|(leaf, held)| leaf.step != held);
            let of_batch = leaf.map(|leaf| leaf.leaf);
            match of_batch.or_else(next).filter(|leaf| follows(leaf) && !other_step) {
                // A rank that has no further leaf takes part in the rest of the step with weight 0.
                _ if leaf.is_some_and(|leaf| !leaf.counts) && !other_step => {}
                None => {
                    return Err(format!(
                        "gradients of the logical ranks {:?} of a step are held, and the next backward is of another \
                        step: the last one of this process ({}) had no backward, or only added up; reduce them with \
                        `ddp.flush(&model)?`, on every rank",
                        self.done,
                        own.end - 1
                    ));
                }
                Some(leaf) => {
                    self.last = Some(leaf);
                    self.done.insert(leaf);
                    if weight > 0.0 {
                        self.weights.push(Some(run), leaf, weight, |left, right| left + right);
                    }
                }
            }
            self.step = leaf.map(|leaf| leaf.step);
            completes = match leaf {
                Some(leaf) => leaf.ends_step,
                None => (self.leaf() + 1..own.end).all(|leaf| self.done.contains(&leaf)),
            };
        }
        self.count += 1;
        self.weight = weight;
        self.items += weight;
        self.reducing = match boundary {
            Boundary::Counted => completes,
            Boundary::Now => true,
            Boundary::Later => false,
        };
        Ok(())
    }

    /// Starts a reduction of what is held, without a micro-batch of its own.
    pub(super) fn begin_flush(&mut self) {
        (self.weight, self.reducing) = (0.0, true);
    }

    pub(super) fn clear(&mut self) {
        self.count = 0;
        self.items = 0.0;
        self.last = None;
        self.done.clear();
        self.step = None;
        self.weights = Nodes::default();
    }

    pub(super) fn held(&self) -> HeldBatches {
        let leaves = self.run.filter(|_| self.tree).map(|run| HeldLeaves {
            of: run.division.count(),
            done: self.done.clone(),
            weights: self.weights.iter().copied().collect(),
        });
        HeldBatches { count: self.count, items: self.items, reduction: self.reduction, leaves }
    }

    /// Makes `held` the micro-batches since the last reduction.
    pub(super) fn restore(&mut self, held: HeldBatches) {
        (self.count, self.items) = (held.count, held.items);
        if let Some(leaves) = held.leaves {
            self.done = leaves.done;
            leaves.weights.into_iter().for_each(|(leaf, weight)| self.weights.restore(leaf, weight));
        }
    }

    /// Leaf of the running backward; 0 without logical ranks.
    pub(super) fn leaf(&self) -> usize {
        self.last.unwrap_or_default()
    }

    /// Leaf and weight of the running backward, if it counts.
    pub(super) fn own_leaf(&self) -> Option<(usize, f64)> {
        (self.weight > 0.0).then(|| (self.leaf(), self.weight))
    }

    /// Weights of the leaves since the last reduction.
    pub(super) fn weights(&self) -> &Nodes<f64> {
        &self.weights
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
            return Contribution::Ignored;
        }
        let weight = match self.reduction {
            GradientReduction::Mean => self.weight,
            GradientReduction::Sum => 1.0,
        };
        // The root of the tree divides, so a leaf that is alone on its rank has its weight in it, too.
        let is_plain = !self.tree || weight == 1.0 && self.run.is_some_and(|run| run.leaves().len() == 1);
        match self.reducing && self.count == 1 && is_plain {
            true => Contribution::Whole { leaf: self.leaf() },
            false => Contribution::Added { weight, leaf: if self.tree { self.leaf() } else { 0 } },
        }
    }

    pub(super) fn current(&self) -> MicroBatch {
        MicroBatch {
            contribution: self.contribution(),
            reducing: self.reducing,
            divisor: if self.tree { 1.0 } else { self.divisor() },
            weight_of_mean: self.weight_of_mean(),
            weights: self.weights.clone(),
        }
    }

    /// Divisor of sums before they are reduced. With logical ranks that of a rank alone, where nothing divides later.
    pub(super) fn divisor(&self) -> f64 {
        match self.reduction {
            GradientReduction::Mean if self.tree => {
                let all = self.weights.clone().fold(self.run, |left, right| left + right);
                all.into_iter().map(|(_, weight)| weight).sum()
            }
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

    /// `weight * gradient`, the first of a leaf's sum.
    pub(crate) fn of(dtype: DType, gradient: &[u8], weight: f64) -> Self {
        fn products<T: bytemuck::AnyBitPattern, A>(gradient: &[u8], product: impl Fn(T) -> A) -> Vec<A> {
            gradient.chunks_exact(size_of::<T>()).map(|x| product(bytemuck::pod_read_unaligned(x))).collect()
        }
        let w = weight as f32;
        match dtype {
            DType::F64 => Sum::F64(products(gradient, |x: f64| weight * x)),
            DType::F32 => Sum::F32(products(gradient, |x: f32| w * x)),
            DType::F16 => Sum::F32(products(gradient, |x: f16| w * x.to_f32())),
            DType::BF16 => Sum::F32(products(gradient, |x: bf16| w * x.to_f32())),
            other => unreachable!("gradients are floats, got {other}"),
        }
    }

    /// This sum and the next one.
    pub(crate) fn plus(mut self, right: Sum) -> Self {
        self.add(right.dtype(), right.bytes(), 1.0);
        self
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
            Sum::F64(sum) => match dtype {
                DType::F64 => fill(out, sum, |s| f64::to_ne_bytes(s / divisor)),
                DType::F32 => fill(out, sum, |s| ((s / divisor) as f32).to_ne_bytes()),
                DType::F16 => fill(out, sum, |s| f16::from_f64(s / divisor).to_ne_bytes()),
                DType::BF16 => fill(out, sum, |s| bf16::from_f64(s / divisor).to_ne_bytes()),
                other => unreachable!("gradients are floats, got {other}"),
            },
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
    fn sums_are_written_in_every_type() {
        for sum in [Sum::F64(vec![3.0, -1.0]), Sum::F32(vec![3.0, -1.0])] {
            let (mut f16s, mut bf16s) = ([0; 4], [0; 4]);
            sum.write(DType::F16, 2.0, &mut f16s);
            sum.write(DType::BF16, 2.0, &mut bf16s);
            assert_eq!(bytemuck::cast::<[u8; 4], [u16; 2]>(f16s).map(f16::from_bits).map(f16::to_f32), [1.5, -0.5]);
            assert_eq!(bytemuck::cast::<[u8; 4], [u16; 2]>(bf16s).map(bf16::from_bits).map(bf16::to_f32), [1.5, -0.5]);
        }
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
