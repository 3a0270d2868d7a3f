//! Samplers: orders of the items of a training loader that the program chooses.

use super::DataError;
use super::permutation::stream;

/// The items of each epoch, over all ranks, in order: for [`sampler`](super::LoaderBuilder::sampler).
///
/// An epoch may repeat items of the dataset and leave others out: drawn by weight ([`WeightedSampler`]), of similar
/// length side by side, easy ones first. The loader cuts the order into steps and shares like any other order.
///
/// ```
/// # use burn::{data::dataloader::batcher::Batcher, data::dataset::InMemDataset, tensor::Device};
/// # struct Together;
/// # impl Batcher<u32, Vec<u32>> for Together {
/// #     fn batch(&self, items: Vec<u32>, _: &Device) -> Vec<u32> {
/// #         items
/// #     }
/// # }
/// use burn_ddp::data::{Sampler, permutation};
/// use burn_ddp::prelude::*;
///
/// /// Steps of texts of similar length, in a new order every epoch.
/// struct ByLength {
///     lengths: Vec<u32>,
///     step: usize,
/// }
///
/// impl Sampler for ByLength {
///     fn len(&self) -> usize {
///         self.lengths.len()
///     }
///
///     fn dataset_len(&self) -> Option<usize> {
///         Some(self.lengths.len())
///     }
///
///     fn order(&self, epoch: usize) -> Vec<usize> {
///         let mut items: Vec<usize> = (0..self.len()).collect();
///         items.sort_by_key(|item| self.lengths[*item]);
///         let steps: Vec<&[usize]> = items.chunks(self.step).collect();
///         permutation(steps.len(), 42, epoch as u64).into_iter().flat_map(|step| steps[step].to_vec()).collect()
///     }
/// }
///
/// let batches = Ddp::spawn(2, |ddp| {
///     let lengths = vec![9, 1, 8, 2, 7, 3];
///     let sampler = ByLength { lengths: lengths.clone(), step: 2 };
///     assert!(!sampler.is_empty()); // a loader needs an item for each rank
///     let train = ddp.loader(Together).batch_size(1).sampler(sampler).build(InMemDataset::new(lengths))?;
///     Ok(train.iter().collect::<Result<Vec<_>, _>>()?.concat())
/// })?;
/// for (one, other) in batches[0].iter().zip(&batches[1]) {
///     assert!(one.abs_diff(*other) <= 4); // the two batches of a step: 1 and 2, 3 and 7, 8 and 9
/// }
/// # Ok::<(), burn_ddp::Error>(())
/// ```
pub trait Sampler: Send + Sync {
    /// Number of items of an epoch, the same in each.
    fn len(&self) -> usize;

    /// True if epochs have no items.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Items of the dataset for which the sampler was made, if it knows them: `build` refuses a dataset of another
    /// length.
    fn dataset_len(&self) -> Option<usize> {
        None
    }

    /// Indices in the dataset of the items of `epoch`: [`len`](Self::len) indices, the same on every rank, in every
    /// call and in a resumed run. A [`Position`](super::Position) keeps a digest of them.
    fn order(&self, epoch: usize) -> Vec<usize>;
}

/// Draws items with probabilities in proportion to their weights, with replacement: torch's `WeightedRandomSampler`.
///
/// The draws depend on the weights, the seed and the epoch only.
///
/// ```
/// use burn_ddp::data::{Sampler, WeightedSampler};
///
/// // Two classes, one of them rare: each makes half of an epoch.
/// let labels = [0, 0, 0, 0, 0, 0, 0, 0, 0, 1];
/// let weights: Vec<f64> = labels.iter().map(|label| if *label == 0 { 1.0 / 9.0 } else { 1.0 }).collect();
/// let sampler = WeightedSampler::new(&weights, 1000, 42)?;
/// let rare = sampler.order(0).into_iter().filter(|item| labels[*item] == 1).count();
/// assert!((400..600).contains(&rare));
/// # Ok::<(), burn_ddp::data::DataError>(())
/// ```
#[derive(Debug, Clone)]
pub struct WeightedSampler {
    /// Sums of the weights up to and including each item.
    sums: Vec<f64>,
    samples: usize,
    seed: u64,
}

impl WeightedSampler {
    /// A sampler that draws `samples` items per epoch, of a dataset with one item per weight.
    ///
    /// # Errors
    ///
    /// [`DataError::Sampler`] if a weight is negative or not finite, or their sum is 0 or not finite.
    pub fn new(weights: &[f64], samples: usize, seed: u64) -> Result<Self, DataError> {
        let invalid = |reason: String| Err(DataError::Sampler { reason });
        if let Some(item) = weights.iter().position(|weight| !weight.is_finite() || *weight < 0.0) {
            return invalid(format!("the weight of item {item} is {}: use a finite one, 0 or more", weights[item]));
        }
        let add = |sum: &mut f64, weight: &f64| {
            *sum += weight;
            Some(*sum)
        };
        let sums: Vec<f64> = weights.iter().scan(0.0, add).collect();
        match sums.last() {
            Some(sum) if sum.is_finite() && *sum > 0.0 => Ok(Self { sums, samples, seed }),
            sum => {
                invalid(format!("the weights sum up to {}: use weights with a finite sum above 0", sum.unwrap_or(&0.0)))
            }
        }
    }
}

impl Sampler for WeightedSampler {
    fn len(&self) -> usize {
        self.samples
    }

    fn dataset_len(&self) -> Option<usize> {
        Some(self.sums.len())
    }

    fn order(&self, epoch: usize) -> Vec<usize> {
        let mut next = stream(self.seed, epoch as u64, b"burn-ddp/weights");
        let total = self.sums.last().copied().unwrap_or(0.0);
        // The last item with a positive weight, since rounding must not select one after it.
        let last = self.sums.partition_point(|sum| *sum < total);
        let mut draw = || {
            let uniform = (next() >> 11) as f64 / (1u64 << 53) as f64;
            self.sums.partition_point(|sum| *sum <= uniform * total).min(last)
        };
        (0..self.samples).map(|_| draw()).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn weights_that_give_no_probabilities_are_refused() {
        let reason = |weights: &[f64]| WeightedSampler::new(weights, 1, 0).unwrap_err().to_string();
        assert!(reason(&[1.0, -0.5]).contains("the weight of item 1 is -0.5"));
        assert!(reason(&[f64::NAN]).contains("the weight of item 0 is NaN"));
        assert!(reason(&[0.0, 0.0]).contains("sum up to 0") && reason(&[]).contains("sum up to 0"));
        assert!(reason(&[f64::MAX, f64::MAX]).contains("sum up to inf: use weights with a finite sum above 0"));
    }

    /// A checkpoint of today must resume in every later release.
    #[test]
    fn draws_never_change_and_differ_between_epochs_and_seeds() {
        let draws = |seed, epoch| WeightedSampler::new(&[1.0, 2.0, 3.0, 4.0], 8, seed).unwrap().order(epoch);
        assert_eq!(draws(42, 0), [3, 0, 2, 2, 1, 3, 2, 2]);
        assert!(draws(42, 0) != draws(42, 1) && draws(42, 0) != draws(43, 0));
    }

    /// torch.multinomial draws each item with probability `weight / sum`: the counts are binomial.
    #[test]
    fn items_come_in_proportion_to_their_weights() {
        let weights = [0.5, 0.0, 1.5, 3.0, 0.0];
        let samples = 100_000;
        let order = WeightedSampler::new(&weights, samples, 7).unwrap().order(3);
        for (item, weight) in weights.iter().enumerate() {
            let probability = weight / 5.0;
            let count = order.iter().filter(|drawn| **drawn == item).count() as f64;
            let deviation = (samples as f64 * probability * (1.0 - probability)).sqrt();
            assert!((count - samples as f64 * probability).abs() <= 4.0 * deviation, "item {item}: {count}");
        }
    }

    proptest! {
        #[test]
        fn items_of_weight_0_are_never_drawn(weights in prop::collection::vec(0u8..3, 1..20), seed: u64, epoch: usize) {
            let weights: Vec<f64> = weights.into_iter().map(f64::from).collect();
            prop_assume!(weights.iter().any(|weight| *weight > 0.0));
            let order = WeightedSampler::new(&weights, 50, seed).unwrap().order(epoch);
            prop_assert_eq!(order.len(), 50);
            prop_assert!(order.into_iter().all(|item| weights[item] > 0.0));
        }
    }
}
