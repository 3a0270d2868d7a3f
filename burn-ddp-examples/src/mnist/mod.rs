//! The parts of the MNIST trainer.
//!
//! | | |
//! |---|---|
//! | [`args`] | the command line |
//! | [`idx`] | reader of the database's file format |
//! | [`dataset`] | digits, and how they become a batch |
//! | [`source`] | where the digits come from: carried along, a folder, Burn's download |
//! | [`model`] | the network |
//! | [`train`] | training and evaluation over all ranks |
//! | [`learner`] | the same through Burn's trainer |

pub mod args;
pub mod dataset;
pub mod idx;
pub mod learner;
pub mod model;
pub mod source;
pub mod train;

pub use dataset::{MnistBatch, MnistBatcher, MnistDataset, MnistItem, Split};
pub use model::{Cnn, CnnConfig};
