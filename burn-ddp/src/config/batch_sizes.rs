//! Batch sizes of a job: `train_batch = micro_batch × accumulation × world`.

use super::DdpConfig;
use crate::{Error, Result};

/// Items of a step; from [`DdpConfig::batch`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BatchSizes {
    /// Items of all ranks per optimizer step.
    pub train: usize,
    /// Items of one rank per backward.
    pub micro: usize,
    /// Backwards per optimizer step.
    pub accumulation: usize,
}

impl DdpConfig {
    /// The batch sizes of a job of `world_size` ranks, by DeepSpeed's rule `train_batch = micro_batch × accumulation ×
    /// world`. A size that is not set follows from the others; the accumulation is 1 if it does not follow.
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`] with the numbers if they do not satisfy the rule, or if the file sets neither `train_batch`
    /// nor `micro_batch`.
    ///
    /// ```
    /// use burn_ddp::{BatchSizes, DdpConfig, WrapConfig};
    ///
    /// let config = DdpConfig { train_batch: Some(128), micro_batch: Some(16), ..DdpConfig::default() };
    /// assert_eq!(config.batch(4)?, BatchSizes { train: 128, micro: 16, accumulation: 2 });
    ///
    /// let config = DdpConfig { wrap: WrapConfig::new().with_accumulation(2), ..config };
    /// let error = config.batch(3).unwrap_err().to_string();
    /// assert_eq!(error, "train_batch 128 ≠ micro_batch 16 × accumulation 2 × world 3 = 96");
    /// # Ok::<(), burn_ddp::Error>(())
    /// ```
    pub fn batch(&self, world_size: usize) -> Result<BatchSizes> {
        let world = world_size;
        let product = |factors: &[usize]| {
            let product = factors.iter().try_fold(1_usize, |product, factor| product.checked_mul(*factor));
            product.filter(|product| *product > 0).ok_or_else(|| {
                Error::invalid(format!(
                    "micro_batch, accumulation and the world size must each be at least 1, with a product that fits \
                     into a number: they are {factors:?}"
                ))
            })
        };
        let divide = |train: usize, what: &str, factors: &[usize]| {
            let by = product(factors)?;
            if train > 0 && train.is_multiple_of(by) {
                return Ok(train / by);
            }
            Err(Error::invalid(format!("train_batch {train} does not divide by {what} × world {world} = {by}")))
        };
        let (train, micro, accumulation) = match (self.train_batch, self.micro_batch, self.wrap.accumulation()) {
            (Some(train), Some(micro), Some(accumulation)) => (train, micro, accumulation),
            (Some(train), Some(micro), None) => {
                (train, micro, divide(train, &format!("micro_batch {micro}"), &[micro, world])?)
            }
            (Some(train), None, accumulation) => {
                let k = accumulation.unwrap_or(1);
                (train, divide(train, &format!("accumulation {k}"), &[k, world])?, k)
            }
            (None, Some(micro), accumulation) => {
                let k = accumulation.unwrap_or(1);
                (product(&[micro, k, world])?, micro, k)
            }
            (None, None, _) => return Err(Error::invalid("the config says neither train_batch nor micro_batch")),
        };
        let all = product(&[micro, accumulation, world])?;
        if train != all {
            return Err(Error::invalid(format!(
                "train_batch {train} ≠ micro_batch {micro} × accumulation {accumulation} × world {world} = {all}"
            )));
        }
        Ok(BatchSizes { train, micro, accumulation })
    }
}
