//! Layers that know of other ranks.

mod moments;
mod ops;
mod sync_batch_norm;

pub use ops::{SyncBatchNormBackend, SyncedBatch};
pub use sync_batch_norm::SyncBatchNorm;
