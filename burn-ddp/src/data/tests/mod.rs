//! The loaders over worlds of 1 to 4, as threads.

mod ahead;
mod default_device;
mod differing_ranks;
mod eval;
mod items_across_ranks;
mod left_early;
mod other_orders;
mod resume;
mod sampled;
mod stream;
mod train;

use std::time::Duration;

use burn::data::dataloader::batcher::Batcher;
use burn::data::dataset::{Dataset, DatasetError, InMemDataset};
use burn::tensor::Device;

use crate::batch_weight::Batch;
use crate::{Ddp, WorldOptions};

/// A batch is the list of its items.
struct Keep;

impl Batcher<usize, Vec<usize>> for Keep {
    fn batch(&self, items: Vec<usize>, _: &Device) -> Vec<usize> {
        items
    }
}

fn numbers(n: usize) -> InMemDataset<usize> {
    InMemDataset::new((0..n).collect())
}

/// A dataset whose items are their indices, except one that cannot be read.
struct Flaky {
    len: usize,
    bad: Option<usize>,
}

impl Dataset<usize> for Flaky {
    fn get(&self, index: usize) -> Result<usize, DatasetError> {
        assert!(index < self.len);
        match self.bad == Some(index) {
            true => Err(DatasetError::new(std::io::Error::other("disk on fire"))),
            false => Ok(index),
        }
    }

    fn len(&self) -> usize {
        self.len
    }
}

/// Long enough for any machine, short enough that a hang fails the test.
fn spawn<T: Send>(world: usize, f: impl Fn(Ddp) -> anyhow::Result<T> + Sync) -> Vec<T> {
    let options = WorldOptions { timeout: Duration::from_secs(60), ..WorldOptions::default() };
    Ddp::spawn_with(world, options, f).unwrap()
}

/// The batch that a call of `ddp.backward` would have now.
fn batch_of_call(ddp: &Ddp) -> crate::Result<Batch> {
    ddp.state().begin_backward(None)
}
