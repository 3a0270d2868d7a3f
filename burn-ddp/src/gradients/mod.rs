//! From gradients of one rank to averaged gradients. `README.md` beside this file has the states of a bucket.

mod accumulation;
mod bucket_plan;
mod memory;
mod piggyback;
mod readback;
mod reducer;
mod store;
mod worker;

pub(crate) use accumulation::Buffer;
pub(crate) use bucket_plan::{Caps, Slot};
pub(crate) use memory::shared_bytes;
pub use memory::{GradientMemory, HostCopy};
pub(crate) use piggyback::Piggyback;
pub(crate) use readback::Unread;
pub use reducer::GradientReduction;
pub(crate) use reducer::{Reducer, Settings};
pub use store::DeviceLoan;
pub(crate) use store::device_store::Kept;
