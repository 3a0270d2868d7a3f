//! The MNIST trainers, `mnist` and `mnist_learner`.
//!
//! | | |
//! |---|---|
//! | [`idx`] | reader of the database's file format |
//! | [`dataset`] | digits, and how they become a batch |
//! | `digit_source` | sources of the digits: the sample in this crate, a folder, Burn's download |
//! | [`model`] | the network |
//! | [`train_digits`] | `mnist`: options, data and loss for the [trainer](crate::trainer) |
//! | `learner` | `mnist_learner`: the same through Burn's trainer (crate feature `train`) |

pub mod dataset;
mod digit_source;
pub mod idx;
#[cfg(feature = "train")]
pub mod learner;
pub mod model;
pub mod train_digits;

pub use dataset::{MnistBatch, MnistBatcher, MnistDataset, MnistItem, Split};
pub use model::{Cnn, CnnConfig};
