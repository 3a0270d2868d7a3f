//! Where a training loader is, as a checkpoint holds it.

use serde::{Deserialize, Serialize};

use super::DataError;
use super::sharded_loader::ShardedLoader;

/// How far all ranks together have read: what a checkpoint holds of a [`ShardedLoader`].
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
/// // Two ranks read two steps of 4 items, and save where they are.
/// let saved = Ddp::spawn(2, |ddp| {
///     let train = loader(&ddp)?;
///     let read: Vec<_> = train.iter().take(2).collect::<Result<_, _>>()?;
///     Ok((read.concat(), serde_json::to_string(&train.position())?))
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
    read: usize,
    items: usize,
    seed: Option<u64>,
}

impl Position {
    pub(super) fn new(epoch: usize, read: usize, items: usize, seed: Option<u64>) -> Self {
        Self { epoch, read, items, seed }
    }

    /// The epoch that is read, or, between two epochs, the next one.
    #[must_use]
    pub fn epoch(&self) -> usize {
        self.epoch
    }

    /// Items of that epoch that were handed out, over all ranks.
    #[must_use]
    pub fn read(&self) -> usize {
        self.read
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

    /// Whether a loader of `items` items with this `seed` can go on from here.
    pub(super) fn check(&self, items: usize, seed: Option<u64>) -> Result<(), DataError> {
        let mut differs = Vec::new();
        if self.items != items {
            differs.push(format!("its dataset had {} item(s), this one has {items}", self.items));
        }
        if self.seed != seed {
            differs.push(format!("it was {}, this one is {}", order(self.seed), order(seed)));
        }
        if self.read >= self.items.max(1) {
            differs.push(format!("it says that {} of {} item(s) were read", self.read, self.items));
        }
        match differs.is_empty() {
            true => Ok(()),
            false => Err(DataError::PositionMismatch { difference: differs.join("; ") }),
        }
    }
}

impl std::fmt::Display for Position {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { epoch, read, items, seed } = self;
        write!(f, "epoch {epoch}, {read} of {items} item(s) read, {}", order(*seed))
    }
}

fn order(seed: Option<u64>) -> String {
    seed.map_or("not shuffled".to_string(), |seed| format!("shuffled with seed {seed}"))
}

impl<O: Send + 'static> ShardedLoader<O> {
    /// Where all ranks together are: what a checkpoint has to hold to [`resume`](Self::resume).
    ///
    /// A step counts as read from the moment its batch is handed out, so save after the optimizer step; batches that
    /// workers hold ready do not count. After the last batch of an epoch it is the beginning of the next one. If several
    /// epochs of this loader are read at once, it is that of the one begun last. Not collective.
    #[must_use]
    pub fn position(&self) -> Position {
        let (epoch, read) = self.count().at;
        Position::new(epoch, read, self.plan().items(), self.seed())
    }

    /// Goes on from `position`, in any world and with any batch size: what is read next is the rest of the epoch that was
    /// interrupted, then whole epochs. *Collective*: all ranks pass the same position.
    ///
    /// The rest is the epoch's order from the first unread item on, cut anew as an [`EpochPlan`](super::EpochPlan) cuts it:
    /// every item of the epoch is read once with its true weight. With the world and the batch size of before, the steps are
    /// those of a run without interruption. [`epochs`](Self::epochs) passes over the numbers before the interrupted epoch, so
    /// the same loop serves the first run and the resumed one.
    ///
    /// # Errors
    ///
    /// On every rank alike, and the loader is as before: [`DataError::PositionMismatch`] if the position is of a dataset of
    /// another length, or of another shuffle seed; [`DataError::LoadersDiffer`] if the ranks pass different positions.
    /// [`DataError::Comm`] if a peer failed.
    #[track_caller]
    pub fn resume(&self, position: &Position) -> crate::Result<()> {
        let facts = [("the position", position.to_string())].map(|(name, value)| (name.to_string(), value));
        super::agree::agree(self.ddp(), &format!("loader {} (resumed)", self.id()), &facts.to_vec())?;
        position.check(self.plan().items(), self.seed())?;
        self.count().resume(position.epoch, position.read);
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
}
