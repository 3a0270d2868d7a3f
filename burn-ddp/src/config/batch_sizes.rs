//! Batch sizes of a job: `train_batch = micro_batch × logical ranks`, which the processes share.

use super::DdpConfig;
use crate::{Error, Result};

/// Items of a step; from [`DdpConfig::batch`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BatchSizes {
    /// Items of all ranks per optimizer step.
    pub train: usize,
    /// Items of a backward.
    pub micro: usize,
    /// Backwards of each rank per optimizer step.
    pub accumulation: usize,
}

impl DdpConfig {
    /// The batch sizes of a job of `world_size` ranks. With `train_batch` and `micro_batch` a step has `train_batch ÷
    /// micro_batch` micro-batches, the [logical ranks](Self::logical_ranks) of the job, on any number of ranks up to
    /// this one. Otherwise they follow from DeepSpeed's rule `train_batch = micro_batch × accumulation × world`; the
    /// accumulation is 1 if it does not follow.
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
    /// assert_eq!(config.batch(3)?.accumulation, 3); // 8 micro-batches on 3 ranks: 3, 3 and 2
    ///
    /// let config = DdpConfig { wrap: WrapConfig::new().with_accumulation(2), ..config };
    /// let error = config.batch(3).unwrap_err().to_string();
    /// assert!(error.starts_with("train_batch 128 ÷ micro_batch 16 = 8 micro-batches are 3 on each of 3 ranks"));
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
            (Some(train), Some(micro), accumulation) => {
                let leaves = self.leaves(train, micro)?;
                let each = leaves.div_ceil(world.max(1));
                if world == 0 || leaves < world {
                    return Err(Error::invalid(format!(
                        "train_batch {train} ÷ micro_batch {micro} = {leaves} micro-batches for {world} ranks: each \
                        needs one at least"
                    )));
                }
                if let Some(k) = accumulation.filter(|k| *k != each) {
                    return Err(Error::invalid(format!(
                        "train_batch {train} ÷ micro_batch {micro} = {leaves} micro-batches are {each} on each of \
                        {world} ranks, and not the accumulation {k}: leave the accumulation out"
                    )));
                }
                return Ok(BatchSizes { train, micro, accumulation: each });
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

    /// Number of logical ranks that the file asks for, `train_batch ÷ micro_batch`: see
    /// [`Ddp::set_logical_ranks`](crate::Ddp::set_logical_ranks). `None` unless it sets both. A job that joins with its
    /// [`options`](Self::options) has them.
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`] if the micro-batch does not divide the batch.
    ///
    /// ```
    /// use burn_ddp::DdpConfig;
    ///
    /// let config = DdpConfig { train_batch: Some(128), micro_batch: Some(16), ..DdpConfig::default() };
    /// assert_eq!(config.logical_ranks()?, Some(8));
    /// # Ok::<(), burn_ddp::Error>(())
    /// ```
    pub fn logical_ranks(&self) -> Result<Option<usize>> {
        match (self.train_batch, self.micro_batch) {
            (Some(train), Some(micro)) => self.leaves(train, micro).map(Some),
            _ => Ok(None),
        }
    }

    fn leaves(&self, train: usize, micro: usize) -> Result<usize> {
        match micro > 0 && train > 0 && train.is_multiple_of(micro) {
            true => Ok(train / micro),
            false => Err(Error::invalid(format!("train_batch {train} does not divide by micro_batch {micro}"))),
        }
    }
}
