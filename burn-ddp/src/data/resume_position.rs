//! Position of a training loader, to be saved in a checkpoint: taking it, checking it and resuming from it.

use serde::{Deserialize, Serialize};

use super::DataError;
use super::sharded_loader::ShardedLoader;
use crate::agreement;

/// Items that all ranks together have consumed: the state of a [`ShardedLoader`] in a checkpoint.
///
/// It depends neither on the world size nor on the batch size, and is the same on every rank. Serialize it with serde.
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
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Position {
    epoch: usize,
    /// Serialized by the field's name in the first format of checkpoints.
    #[serde(rename = "read")]
    consumed: usize,
    items: usize,
    seed: Option<u64>,
}

impl Position {
    pub(super) fn new(epoch: usize, consumed: usize, items: usize, seed: Option<u64>) -> Self {
        Self { epoch, consumed, items, seed }
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

    /// Items of the dataset.
    #[must_use]
    pub fn items(&self) -> usize {
        self.items
    }

    /// The seed of [`shuffle`](super::LoaderBuilder::shuffle), if epochs are shuffled.
    #[must_use]
    pub fn seed(&self) -> Option<u64> {
        self.seed
    }

    /// Checks that a loader of `items` items with this `seed` can go on from here.
    pub(super) fn check(&self, items: usize, seed: Option<u64>) -> Result<(), DataError> {
        let mut differs = Vec::new();
        if self.items != items {
            differs.push(format!("its dataset had {} item(s), this one has {items}", self.items));
        }
        if self.seed != seed {
            differs.push(format!("it was {}, this one is {}", order(self.seed), order(seed)));
        }
        if self.consumed >= self.items.max(1) {
            differs.push(format!("{} of its {} item(s) were consumed", self.consumed, self.items));
        }
        match differs.is_empty() {
            true => Ok(()),
            false => Err(DataError::PositionMismatch { difference: differs.join("; ") }),
        }
    }
}

impl std::fmt::Display for Position {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { epoch, consumed, items, seed } = self;
        write!(f, "epoch {epoch}, {consumed} of {items} item(s) consumed, {}", order(*seed))
    }
}

fn order(seed: Option<u64>) -> String {
    seed.map_or("not shuffled".to_string(), |seed| format!("shuffled with seed {seed}"))
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
        let (epoch, consumed) = self.cursor().position();
        Position::new(epoch, consumed, self.plan().items(), self.seed())
    }

    /// Makes the loader continue from `position`, in a world of any size and with any batch size: first with the rest
    /// of the interrupted epoch, then with whole epochs. *Collective*: all ranks pass the same position. Costs one
    /// small all-gather.
    ///
    /// The rest begins in the epoch's order at the first item that was not consumed, and is cut anew by an
    /// [`EpochPlan`](super::EpochPlan): every item of the epoch is loaded once with its true weight. With the same
    /// world size and batch size as before, the steps are those of a run without interruption. [`epochs`](Self::epochs)
    /// skips the numbers before the interrupted epoch, so the same loop serves the first run and the resumed one.
    ///
    /// # Errors
    ///
    /// On every rank alike, and the loader is unchanged: [`DataError::PositionMismatch`] if the position was saved with
    /// a dataset of another length, or with another shuffle seed; [`DataError::LoadersDiffer`] if the ranks pass
    /// different positions. [`DataError::Comm`] if a peer failed.
    ///
    /// # Example
    ///
    /// As in [`Position`].
    #[track_caller]
    pub fn resume(&self, position: &Position) -> crate::Result<()> {
        let settings = vec![("the position".to_string(), position.to_string())];
        if let Some(difference) = agreement::on_settings(self.ddp().group(), &settings).map_err(DataError::from)? {
            let loader = format!("loader {} (resumed)", self.id());
            return Err(DataError::LoadersDiffer { loader, difference }.into());
        }
        position.check(self.plan().items(), self.seed())?;
        self.cursor().resume(position.epoch, position.consumed);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_differs_is_named() {
        let position = Position::new(3, 40, 100, Some(42));
        assert!(position.check(100, Some(42)).is_ok());
        let error = |items, seed| position.check(items, seed).unwrap_err().to_string();
        let text = error(99, Some(42));
        assert!(text.contains("had 100 item(s), this one has 99") && !text.contains("seed 42"), "{text}");
        let text = error(99, None);
        assert!(text.contains("has 99") && text.contains("shuffled with seed 42, this one is not shuffled"), "{text}");
        assert!(error(100, Some(7)).contains("seed 42, this one is shuffled with seed 7"));
        assert!(Position::new(0, 100, 100, None).check(100, None).is_err(), "nothing would be left");
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
}
