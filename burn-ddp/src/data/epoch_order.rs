//! The order of the items of a training loader, and the digest that tells it from another order.

use std::sync::Arc;

use burn_ddp_comm::ProcessGroup;
use serde::{Deserialize, Serialize};
use xxhash_rust::xxh3::Xxh3;

use super::{DataError, Sampler, permutation};

/// The orders of all epochs of a training loader: the dataset's, shuffled, or those of a sampler.
#[derive(Clone)]
pub(super) struct EpochOrder {
    sampler: Option<Arc<dyn Sampler>>,
    /// Items of the dataset.
    dataset: usize,
    /// Place in the order of the loader's first item: 0, unless it reads a slice.
    first: usize,
    /// With a sampler: the digest of its first epoch.
    digest: OrderDigest,
    /// Group in which the ranks compare what their samplers draw.
    group: Option<Arc<ProcessGroup>>,
}

/// Tells an order from another one: ranks compare it, and a position keeps it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct OrderDigest {
    /// Items of an epoch over all ranks.
    pub(super) items: usize,
    /// Seed of the shuffle.
    pub(super) seed: Option<u64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    sampler: Option<SampledDigest>,
}

/// Digest of one epoch of a sampler.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
struct SampledDigest {
    /// Items of the dataset.
    dataset: usize,
    epoch: usize,
    /// Of the epoch's indices.
    digest: u64,
}

impl EpochOrder {
    /// The order of a dataset of `dataset` items. Draws the first epoch of a sampler.
    ///
    /// # Errors
    ///
    /// As [`indices`](Self::indices).
    pub(super) fn new(dataset: usize, seed: Option<u64>, sampler: Option<Arc<dyn Sampler>>) -> Result<Self, DataError> {
        let items = sampler.as_ref().map_or(dataset, |sampler| sampler.len());
        let order = Self { sampler, dataset, first: 0, digest: OrderDigest::plain(items, seed), group: None };
        Ok(Self { digest: order.digest_of(0)?, ..order })
    }

    /// The order of `items` items from the place `first` on.
    pub(super) fn slice(&self, first: usize, items: usize) -> Self {
        Self { first: self.first + first, digest: OrderDigest { items, ..self.digest }, ..self.clone() }
    }

    /// True if the program draws the orders: ranks may draw others.
    pub(super) fn is_sampled(&self) -> bool {
        self.sampler.is_some()
    }

    /// The same order, which the ranks compare in `group`, epoch by epoch.
    pub(super) fn compared_in(self, group: ProcessGroup) -> Self {
        Self { group: Some(Arc::new(group)), ..self }
    }

    /// The group in which the ranks compare what their samplers draw, if they have some.
    pub(super) fn group(&self) -> Option<&ProcessGroup> {
        self.group.as_deref()
    }

    pub(super) fn first(&self) -> usize {
        self.first
    }

    /// The digest, with a sampler that of its first epoch.
    pub(super) fn digest(&self) -> OrderDigest {
        self.digest
    }

    /// The digest to compare with that of another run: of the same epoch, which a sampler draws again.
    ///
    /// # Errors
    ///
    /// As [`indices`](Self::indices).
    pub(super) fn digest_like(&self, other: &OrderDigest) -> Result<OrderDigest, DataError> {
        self.digest_of(other.sampler.map_or(0, |sampler| sampler.epoch))
    }

    fn digest_of(&self, epoch: usize) -> Result<OrderDigest, DataError> {
        let sampler = self.sample(epoch)?.map(|(_, digest)| digest);
        Ok(OrderDigest { sampler, ..self.digest })
    }

    /// Indices in the dataset of the items of `epoch`, and the digest of its order; `None` if the indices count up from
    /// [`first`](Self::first). A shuffle permutes the items of a slice only.
    ///
    /// # Errors
    ///
    /// [`DataError::SamplerMismatch`] and [`DataError::Sampler`] if the sampler gives no order of the dataset.
    pub(super) fn indices(&self, epoch: usize) -> Result<Option<(Vec<usize>, OrderDigest)>, DataError> {
        let (first, digest) = (self.first, self.digest);
        if let Some((order, sampler)) = self.sample(epoch)? {
            let digest = OrderDigest { sampler: Some(sampler), ..digest };
            return Ok(Some((order[first..first + digest.items].to_vec(), digest)));
        }
        let shuffled = |seed| {
            let order = permutation(digest.items, seed, epoch as u64);
            (order.into_iter().map(|place| first + place).collect(), digest)
        };
        Ok(digest.seed.map(shuffled))
    }

    /// The sampler's order of `epoch`, checked, with its digest.
    fn sample(&self, epoch: usize) -> Result<Option<(Vec<usize>, SampledDigest)>, DataError> {
        let (Some(sampler), dataset) = (&self.sampler, self.dataset) else { return Ok(None) };
        let (number, len) = (epoch.saturating_add(1), sampler.len());
        let invalid = |reason: String| Err(DataError::Sampler { reason });
        if let Some(made_for) = sampler.dataset_len().filter(|made_for| *made_for != dataset) {
            return Err(DataError::SamplerMismatch { sampler: made_for, dataset });
        }
        let order = sampler.order(epoch);
        if len == 0 || order.len() != len {
            let items = order.len();
            return invalid(format!(
                "its `len` is {len}, and epoch {number} has {items} item(s): both must be equal, and more than 0"
            ));
        }
        if let Some(index) = order.iter().find(|index| **index >= dataset) {
            return invalid(format!("epoch {number} has item {index} of a dataset of {dataset} item(s)"));
        }
        let mut digest = Xxh3::new();
        order.iter().for_each(|index| digest.update(&(*index as u64).to_le_bytes()));
        Ok(Some((order, SampledDigest { dataset, epoch, digest: digest.digest() })))
    }
}

impl OrderDigest {
    /// The order of a dataset of `items` items, shuffled if there is a `seed`.
    pub(super) fn plain(items: usize, seed: Option<u64>) -> Self {
        Self { items, seed, sampler: None }
    }

    /// The differences to the order of the loader that resumes.
    pub(super) fn differences(&self, resuming: &Self) -> Vec<String> {
        let mut differs = Vec::new();
        if self.items != resuming.items {
            differs.push(format!("its order had {} item(s), this one has {}", self.items, resuming.items));
        }
        let dataset = |order: &Self| order.sampler.map(|sampler| sampler.dataset);
        if let (Some(before), Some(now)) = (dataset(self), dataset(resuming))
            && before != now
        {
            differs.push(format!("its dataset had {before} item(s), this one has {now}"));
        }
        let order = |order: &Self| (order.seed, order.sampler.map(|sampler| sampler.digest));
        if order(self) != order(resuming) {
            differs.push(format!("its order was {self}, this one is {resuming}"));
        }
        differs
    }
}

impl std::fmt::Display for OrderDigest {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match (self.sampler, self.seed) {
            (Some(SampledDigest { epoch, digest, .. }), _) => {
                let (items, number) = (self.items, epoch.saturating_add(1));
                write!(f, "a sampler's, {items} item(s) with digest {digest:016x} in epoch {number}")
            }
            (None, Some(seed)) => write!(f, "shuffled with seed {seed}"),
            (None, None) => f.write_str("that of the dataset"),
        }
    }
}
