//! Layers that communicate with other ranks.

mod moments;
mod sync_batch_norm;
pub(crate) mod sync_batch_norm_node;

pub use sync_batch_norm::SyncBatchNorm;
