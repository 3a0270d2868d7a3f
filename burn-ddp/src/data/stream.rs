//! Sources that are read from front to back: one stream of items per worker of each rank.

use std::num::NonZeroUsize;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use burn::data::dataloader::batcher::Batcher;
use burn::data::dataset::DatasetError;
use burn::tensor::Device;

use super::prefetch::Load;

/// Items of a stream, in order.
pub type Stream<I> = Box<dyn Iterator<Item = Result<I, DatasetError>> + Send>;

/// A part of a source: number `index` of `of` parts, which together contain every item of the epoch once.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StreamShard {
    /// Its number, from 0.
    pub index: usize,
    /// Number of parts: ranks times workers.
    pub of: usize,
    /// The epoch, from 0, for sources whose order depends on the epoch.
    pub epoch: usize,
}

impl StreamShard {
    /// True if this part contains the file, record or block number `nth`, if the parts take them in turn.
    ///
    /// # Example
    ///
    /// ```
    /// use burn_ddp::data::StreamShard;
    ///
    /// let shard = StreamShard { index: 1, of: 4, epoch: 0 }; // as the second of two ranks with two workers
    /// let files: Vec<usize> = (0..10).filter(|nth| shard.has(*nth)).collect();
    /// assert_eq!(files, [1, 5, 9]);
    /// ```
    #[must_use]
    pub fn has(&self, nth: usize) -> bool {
        nth % self.of == self.index
    }
}

/// A source without random access: files of records, a database, a queue. For [`Ddp::stream`](crate::Ddp::stream).
///
/// torch's `IterableDataset`, with the division over ranks and workers as an argument.
///
/// # Example
///
/// ```
/// use burn::data::dataset::DatasetError;
/// use burn_ddp::data::{Stream, StreamShard, StreamSource};
///
/// /// Numbered files of lines.
/// struct Files(Vec<std::path::PathBuf>);
///
/// impl StreamSource<String> for Files {
///     fn open(&self, shard: StreamShard) -> Result<Stream<String>, DatasetError> {
///         let mut lines = Vec::new();
///         for (_, file) in self.0.iter().enumerate().filter(|(nth, _)| shard.has(*nth)) {
///             let text = std::fs::read_to_string(file).map_err(DatasetError::new)?;
///             lines.extend(text.lines().map(|line| Ok(line.to_string())));
///         }
///         Ok(Box::new(lines.into_iter())) // of files that fit into memory
///     }
/// }
///
/// let directory = tempfile::tempdir()?;
/// let files = ["one", "two", "three"].map(|name| directory.path().join(name));
/// for file in &files {
///     std::fs::write(file, file.file_name().unwrap().as_encoded_bytes())?;
/// }
/// let shard = StreamShard { index: 0, of: 2, epoch: 0 }; // the first of two ranks, without workers
/// let items = Files(files.to_vec()).open(shard)?.collect::<Result<Vec<_>, _>>()?;
/// assert_eq!(items, ["one", "three"]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub trait StreamSource<I>: Send + Sync {
    /// Opens a part. Every rank opens the parts of its own workers, once per epoch, on the thread that reads the first
    /// item of the part.
    ///
    /// A resumed run skips items by the iterator's `nth`, which by default reads them; an iterator that can seek should
    /// implement `nth`.
    ///
    /// # Errors
    ///
    /// The error of opening the part, which ends the epoch on all ranks.
    fn open(&self, shard: StreamShard) -> Result<Stream<I>, DatasetError>;
}

/// The streams of this rank in one epoch.
pub(super) struct Streams<I, O> {
    pub(super) source: Arc<dyn StreamSource<I>>,
    pub(super) batcher: Arc<dyn Batcher<I, O>>,
    pub(super) batch_size: NonZeroUsize,
    /// One per worker; each is used by one thread at a time.
    pub(super) streams: Vec<Mutex<Opened<I>>>,
    /// An item of this rank, for batches of weight 0.
    pub(super) spare: Mutex<Option<I>>,
}

/// The stream of one worker.
pub(super) struct Opened<I> {
    shard: StreamShard,
    /// `None` before the first read.
    items: Option<Stream<I>>,
    /// Batches to leave out before the first one.
    skip: usize,
}

impl<I> Opened<I> {
    pub(super) fn new(shard: StreamShard, skip: usize) -> Mutex<Self> {
        Mutex::new(Opened { shard, items: None, skip })
    }
}

/// A batch, and its number of items. `None` after the end of a worker's stream.
pub(super) type Portion<O> = Option<(O, usize)>;

impl<I: Clone + Send, O> Load<Portion<O>> for Streams<I, O> {
    /// The next batch of the stream whose turn comes at the batch number `indices[0]`.
    fn load(&self, indices: Vec<usize>, device: &Device) -> Result<Portion<O>, DatasetError> {
        let nth = indices.first().copied().unwrap_or(0);
        let mut opened = lock(&self.streams[nth % self.streams.len()]);
        let items = self.read(&mut opened)?;
        let Some(first) = items.first() else { return Ok(None) };
        lock(&self.spare).get_or_insert_with(|| first.clone());
        drop(opened);
        let len = items.len();
        Ok(Some((self.batcher.batch(items, device), len)))
    }
}

impl<I: Clone + Send, O> Streams<I, O> {
    /// Items of the next batch; none at the end.
    fn read(&self, opened: &mut Opened<I>) -> Result<Vec<I>, DatasetError> {
        let batch_size = self.batch_size.get();
        let items = match &mut opened.items {
            Some(items) => items,
            None => {
                let mut items = self.source.open(opened.shard)?;
                let skip = opened.skip.saturating_mul(batch_size);
                if let Some(last) = skip.checked_sub(1) {
                    items.nth(last).transpose()?;
                }
                opened.items.insert(items)
            }
        };
        items.take(batch_size).collect()
    }

    /// A batch of one item of this rank that was read before; `None` if the rank's part has none.
    pub(super) fn spare_batch(&self, device: &Device) -> Result<Option<O>, DatasetError> {
        let mut spare = lock(&self.spare);
        for opened in &self.streams {
            if spare.is_none() {
                // All items of the part were consumed before the run was resumed.
                *spare = self.source.open(lock(opened).shard)?.next().transpose()?;
            }
        }
        Ok(spare.clone().map(|item| self.batcher.batch(vec![item], device)))
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
