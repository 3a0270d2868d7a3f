//! burn-ddp's loaders as Burn's `DataLoader`: errors of Burn's type, progress in items over all ranks, moves to another
//! device, slices.

use std::iter::Once;
use std::sync::Arc;

use burn::data::dataloader::{DataLoader, DataLoaderIterator, Progress};
use burn::data::dataset::DatasetError;
use burn::tensor::Device;

use super::{DataError, Epoch, EvalBatches, EvalLoader, ShardedLoader};

impl<O: Send + 'static> DataLoader<O> for ShardedLoader<O> {
    /// The next epoch.
    fn iter<'a>(&'a self) -> Box<dyn DataLoaderIterator<O> + 'a> {
        Box::new(BurnBatches(ShardedLoader::iter(self)))
    }

    /// Items of an epoch, over all ranks.
    fn num_items(&self) -> usize {
        ShardedLoader::num_items(self)
    }

    /// The same loader, counting the same epochs, with batches on `device`.
    fn to_device(&self, device: &Device) -> Arc<dyn DataLoader<O>> {
        Arc::new(self.on_device(device))
    }

    /// A further loader for the items `start..end` of the dataset, which all ranks share as they share this one. All
    /// ranks must make the same slices; that is not checked. A slice beyond the dataset yields an error as its only
    /// batch.
    fn slice(&self, start: usize, end: usize) -> Arc<dyn DataLoader<O>> {
        loader_or_error(self.sliced(start, end))
    }
}

impl<O: Send + 'static> DataLoader<O> for EvalLoader<O> {
    fn iter<'a>(&'a self) -> Box<dyn DataLoaderIterator<O> + 'a> {
        Box::new(BurnBatches(EvalLoader::iter(self)))
    }

    /// Items of the dataset, over all ranks.
    fn num_items(&self) -> usize {
        EvalLoader::num_items(self)
    }

    /// The same loader with batches on `device`.
    fn to_device(&self, device: &Device) -> Arc<dyn DataLoader<O>> {
        Arc::new(self.on_device(device))
    }

    /// A loader for the items `start..end` of the dataset, which all ranks share as they share this one. A slice beyond
    /// the dataset yields an error as its only batch.
    fn slice(&self, start: usize, end: usize) -> Arc<dyn DataLoader<O>> {
        loader_or_error(self.sliced(start, end))
    }
}

fn loader_or_error<O: 'static, L: DataLoader<O> + 'static>(loader: Result<L, DataError>) -> Arc<dyn DataLoader<O>> {
    match loader {
        Ok(loader) => Arc::new(loader),
        Err(error) => Arc::new(FailedLoader(error)),
    }
}

/// A loader whose only batch is an error, since `DataLoader::slice` cannot return an error.
#[derive(Clone)]
struct FailedLoader(DataError);

impl<O: 'static> DataLoader<O> for FailedLoader {
    fn iter<'a>(&'a self) -> Box<dyn DataLoaderIterator<O> + 'a> {
        Box::new(BurnBatches(std::iter::once(Err(self.0.clone()))))
    }

    fn num_items(&self) -> usize {
        0
    }

    fn to_device(&self, _: &Device) -> Arc<dyn DataLoader<O>> {
        Arc::new(self.clone())
    }

    fn slice(&self, _: usize, _: usize) -> Arc<dyn DataLoader<O>> {
        Arc::new(self.clone())
    }
}

/// Batches whose errors have Burn's type.
struct BurnBatches<B>(B);

impl<O, B: Iterator<Item = Result<O, DataError>>> Iterator for BurnBatches<B> {
    type Item = Result<O, DatasetError>;

    fn next(&mut self) -> Option<Self::Item> {
        self.0.next().map(|batch| batch.map_err(DatasetError::new))
    }
}

impl<O, B: Iterator<Item = Result<O, DataError>> + CountItems> DataLoaderIterator<O> for BurnBatches<B> {
    fn progress(&self) -> Progress {
        let (processed, total) = self.0.count_items();
        Progress::new(processed, total, Some("items".to_string()))
    }
}

/// Progress in items over all ranks.
trait CountItems {
    /// Items processed, and all items.
    fn count_items(&self) -> (usize, usize);
}

impl<O: Send + 'static> CountItems for Epoch<O> {
    fn count_items(&self) -> (usize, usize) {
        self.progress_in_items()
    }
}

impl<O: Send + 'static> CountItems for EvalBatches<O> {
    fn count_items(&self) -> (usize, usize) {
        self.progress_in_items()
    }
}

impl<O> CountItems for Once<Result<O, DataError>> {
    fn count_items(&self) -> (usize, usize) {
        (0, 0)
    }
}
