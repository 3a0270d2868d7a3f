//! Position of a training loader, to be saved in a checkpoint: taking it, checking it and resuming from it.

use serde::{Deserialize, Serialize};

use super::deal::PartOfStep;
use super::epoch_order::OrderDigest;
use super::left_early::{LeftEarly, log_resume};
use super::sharded_loader::ShardedLoader;
use super::{DataError, EpochPlan};
use crate::agreement;

/// Items that all ranks together have consumed: the state of a [`ShardedLoader`] in a checkpoint.
///
/// It depends neither on the world size nor on the batch size, and is the same on every rank. Serialize it as JSON.
///
/// ```
/// # use burn::{data::dataloader::batcher::Batcher, data::dataset::InMemDataset, tensor::Device};
/// # struct Together;
/// # impl Batcher<u32, Vec<u32>> for Together {
/// #     fn batch(&self, items: Vec<u32>, _: &Device) -> Vec<u32> {
/// #         items
/// #     }
/// # }
/// use burn_ddp::data::{Position, ShardedLoader};
/// use burn_ddp::prelude::*;
///
/// fn loader(ddp: &Ddp) -> burn_ddp::Result<ShardedLoader<Vec<u32>>> {
///     ddp.loader(Together).batch_size(2).shuffle(42).build(InMemDataset::new((0..11).collect()))
/// }
///
/// // Two ranks load two steps of 4 items, and save where they are.
/// let saved = Ddp::spawn(2, |ddp| {
///     let train = loader(&ddp)?;
///     let read: Vec<_> = train.iter().take(2).collect::<Result<_, _>>()?;
///     let position = train.position();
///     assert_eq!((position.epoch(), position.consumed(), position.items()), (0, 8, 11));
///     assert_eq!(position.seed(), Some(42));
///     Ok((read.concat(), serde_json::to_string(&position)?))
/// })?;
/// let mut read: Vec<u32> = saved.iter().flat_map(|(read, _)| read.clone()).collect();
///
/// // Three ranks go on, and finish the epoch.
/// let rest = Ddp::spawn(3, |ddp| {
///     let train = loader(&ddp)?;
///     train.resume(&serde_json::from_str::<Position>(&saved[0].1)?)?;
///     Ok(train.iter().collect::<Result<Vec<_>, _>>()?.concat())
/// })?;
/// read.extend(rest.concat());
/// read.sort();
/// assert_eq!(read, (0..11).collect::<Vec<_>>()); // every item once
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Position {
    pub(super) epoch: usize,
    /// Serialized by the field's name in the first format of checkpoints.
    #[serde(rename = "read")]
    pub(super) consumed: usize,
    #[serde(flatten)]
    pub(super) order: OrderDigest,
    /// Items after which the epoch ends, of an interrupted epoch of a loader with `max_batches`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) end: Option<usize>,
    /// The part of the step at `consumed` that was handed out, with logical ranks.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) part: Option<PartOfStep>,
    /// The epoch before, if it was left early.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) left_early: Option<LeftEarly>,
}

impl Position {
    /// The position before the first epoch.
    pub(super) fn start(order: OrderDigest) -> Self {
        Self { epoch: 0, consumed: 0, order, end: None, part: None, left_early: None }
    }

    /// The present epoch, or, between two epochs, the next one.
    #[must_use]
    pub fn epoch(&self) -> usize {
        self.epoch
    }

    /// Items of the epoch that were handed out, over all ranks.
    #[must_use]
    pub fn consumed(&self) -> usize {
        self.consumed
    }

    /// Items of the epoch's order: those of the dataset, or those that a sampler draws.
    #[must_use]
    pub fn items(&self) -> usize {
        self.order.items
    }

    /// The seed of [`shuffle`](super::LoaderBuilder::shuffle), if epochs are shuffled.
    #[must_use]
    pub fn seed(&self) -> Option<u64> {
        self.order.seed
    }

    /// Checks that a loader with this `order`, whose rest of the epoch is `plan`, can go on from here.
    fn check(&self, order: &OrderDigest, plan: &EpochPlan) -> Result<(), DataError> {
        let mut differs = self.order.differences(order);
        let end = self.end.unwrap_or(self.order.items);
        if self.consumed >= end.max(1) {
            differs.push(format!("{} of its {end} item(s) were consumed", self.consumed));
        }
        let is = (plan.world_size(), plan.global_batch(), plan.step(0).end);
        if let Some(part) = self.part.as_ref().filter(|part| (part.leaves, part.items, part.end) != is) {
            differs.push(format!(
                "it was saved in the middle of a step of {} items on {} logical ranks up to item {}, and here that is \
                {} on {} up to {}",
                part.items, part.leaves, part.end, is.1, is.0, is.2
            ));
        }
        match differs.is_empty() {
            true => Ok(()),
            false => Err(DataError::PositionMismatch { difference: differs.join("; ") }),
        }
    }
}

impl std::fmt::Display for Position {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { epoch, consumed, order, end, part, .. } = self;
        let end = end.unwrap_or(order.items);
        write!(f, "epoch {epoch}, {consumed} of {end} item(s) consumed, the order {order}")?;
        match part {
            Some(part) => write!(f, ", of the step then the logical ranks {:?}", part.done),
            None => Ok(()),
        }
    }
}

impl<O: Send + 'static> ShardedLoader<O> {
    /// The position of all ranks together. Save it in a checkpoint to [`resume`](Self::resume) from it.
    ///
    /// A step counts as consumed when its batch is handed out, so save after the optimizer step; batches that workers
    /// loaded ahead do not count. After the last batch of an epoch the position is the beginning of the next epoch. If
    /// several epochs of this loader are iterated at once, it is the position in the epoch begun last. Not collective.
    ///
    /// # Example
    ///
    /// As in [`Position`].
    #[must_use]
    pub fn position(&self) -> Position {
        self.cursor().position()
    }

    /// Makes the loader continue from `position`, in a world of any size and with any batch size: first with the rest
    /// of the interrupted epoch, then with whole epochs. *Collective*: all ranks pass the same position. Costs one
    /// small all-gather; with a sampler, also drawing an epoch.
    ///
    /// The rest begins in the epoch's order at the first item that was not consumed, and is cut anew by an
    /// [`EpochPlan`](super::EpochPlan): every item of the epoch is loaded once with its true weight. With the same
    /// world size and batch size as before, the steps are those of a run without interruption. [`epochs`](Self::epochs)
    /// skips the numbers before the interrupted epoch, so the same loop serves the first run and the resumed one.
    ///
    /// The rest reaches to the end of the epoch, also if the program left earlier epochs before their end, about which
    /// rank 0 logs a warning; [`max_batches`](super::LoaderBuilder::max_batches) ends all epochs early, resumed or not.
    ///
    /// # Errors
    ///
    /// On every rank alike, and the loader is unchanged: [`DataError::PositionMismatch`] if the position was saved with
    /// another order (a dataset of another length, another shuffle seed, or a sampler that draws the last epoch
    /// otherwise); [`DataError::LoadersDiffer`] if the ranks pass different positions. [`DataError::Comm`] if a peer
    /// failed.
    ///
    /// # Example
    ///
    /// As in [`Position`].
    #[track_caller]
    pub fn resume(&self, position: &Position) -> crate::Result<()> {
        let order = self.order().digest_like(&position.order);
        let order_text = order.as_ref().map_or_else(DataError::to_string, OrderDigest::to_string);
        let settings = [("the position", position.to_string()), ("the order of the items", order_text)];
        let settings = settings.map(|(name, value)| (name.to_string(), value)).to_vec();
        let loader = format!("loader {}", self.id());
        if let Some(difference) = agreement::on_settings(self.ddp().group(), &settings).map_err(DataError::from)? {
            return Err(DataError::LoadersDiffer { loader: format!("{loader} (resumed)"), difference }.into());
        }
        position.check(&order?, &self.plan_from(position))?;
        let position = self.cursor().resume(position.clone());
        if position.consumed > 0 {
            let rest = self.plan_from(&position);
            let (left, all) = (rest.steps(), rest.consumed() / rest.global_batch() + rest.steps());
            let progress = format!("{left} of {all} batches are left");
            log_resume(self.ddp(), &loader, position.epoch, &progress, position.left_early);
        }
        Ok(())
    }
}

#[cfg(test)]
impl Position {
    /// A position of a loader without sampler.
    pub(super) fn new(epoch: usize, consumed: usize, items: usize, seed: Option<u64>) -> Self {
        Self { epoch, consumed, ..Self::start(OrderDigest::plain(items, seed)) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_differs_is_named() {
        let position = Position::new(3, 40, 100, Some(42));
        let plan = EpochPlan::new(100, 8, 16).unwrap().after(40);
        assert!(position.check(&OrderDigest::plain(100, Some(42)), &plan).is_ok());
        let error = |items, seed| position.check(&OrderDigest::plain(items, seed), &plan).unwrap_err().to_string();
        let text = error(99, Some(42));
        assert!(text.contains("had 100 item(s), this one has 99") && !text.contains("seed 42"), "{text}");
        let text = error(99, None);
        assert!(text.contains("has 99") && text.contains("with seed 42, this one is that of the dataset"), "{text}");
        assert!(error(100, Some(7)).contains("seed 42, this one is shuffled with seed 7"));
        let ended = Position::new(0, 100, 100, None);
        assert!(ended.check(&ended.order, &plan).is_err(), "nothing would be left");
        let part = Some(PartOfStep { leaves: 8, items: 16, end: 56, done: vec![0, 4] });
        let within = Position { part, ..position.clone() };
        assert!(within.check(&position.order, &plan).is_ok());
        for other in [EpochPlan::new(100, 8, 8), EpochPlan::new(100, 4, 16)] {
            let text = within.check(&position.order, &other.unwrap().after(40)).unwrap_err().to_string();
            assert!(text.contains("a step of 16 items on 8 logical ranks up to item 56"), "{text}");
        }
    }

    #[test]
    fn it_survives_being_written() {
        for position in [Position::new(0, 0, 1, None), Position::new(3, 40, 100, Some(u64::MAX))] {
            let text = serde_json::to_string(&position).unwrap();
            assert_eq!(serde_json::from_str::<Position>(&text).unwrap(), position);
        }
    }

    #[test]
    fn checkpoints_keep_their_format() {
        let text = r#"{"epoch":3,"read":40,"items":100,"seed":42}"#;
        let position = Position::new(3, 40, 100, Some(42));
        assert_eq!(serde_json::from_str::<Position>(text).unwrap(), position);
        assert_eq!(serde_json::to_string(&position).unwrap(), text);
    }

    #[test]
    fn what_is_no_position_is_an_error_that_says_why() {
        for (text, reason) in [
            (r#"{"epoch":3,"items":100,"seed":42}"#, "missing field `read`"),
            (r#"{"epoch":3,"read":40,"seed":42}"#, "missing field `items`"),
            (r#"{"epoch":3,"read":-1,"items":100,"seed":42}"#, "invalid value: integer `-1`"),
            (r#"{"epoch":3,"read":4,"items":9,"seed":null,"sampler":{"dataset":9}}"#, "missing field `epoch`"),
        ] {
            let error = serde_json::from_str::<Position>(text).unwrap_err().to_string();
            assert!(error.contains(reason), "{error}");
        }
    }
}
