//! What Burn's `DataLoader::slice` returns where it would need to return an error.

use std::marker::PhantomData;
use std::sync::Arc;

use burn::data::dataloader::{DataLoader, DataLoaderIterator, Progress};
use burn::data::dataset::DatasetError;
use burn::tensor::Device;

use super::DataError;

/// A loader whose only batch is an error.
#[derive(Clone)]
pub(super) struct Unreadable(pub(super) DataError);

impl<O: 'static> DataLoader<O> for Unreadable {
    fn iter<'a>(&'a self) -> Box<dyn DataLoaderIterator<O> + 'a> {
        Box::new(Once(Some(self.0.clone()), PhantomData))
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

struct Once<O>(Option<DataError>, PhantomData<O>);

impl<O> Iterator for Once<O> {
    type Item = Result<O, DatasetError>;

    fn next(&mut self) -> Option<Self::Item> {
        self.0.take().map(|error| Err(error.into_burn()))
    }
}

impl<O> DataLoaderIterator<O> for Once<O> {
    fn progress(&self) -> Progress {
        Progress::new(0, 0, Some("items".to_string()))
    }
}
