//! Layers that know of other ranks.

mod moments;
mod sync_batch_norm;
mod sync_batch_norm_node;

pub use sync_batch_norm::SyncBatchNorm;
pub use sync_batch_norm_node::{SyncBatchNormBackend, SyncedBatch};
