//! Averages of the ranks' gradients: buckets, their buffers and their reductions. `README.md` has the states of a
//! bucket.

mod abandoned_steps;
mod accumulation;
mod aligned_bytes;
mod bucket_plan;
mod buffer_ring;
mod communication_worker;
mod device_loan;
mod leaf_nodes;
mod memory;
mod not_finite;
mod packing;
mod piggyback;
mod presence_flags;
mod readback;
mod reducer;
mod reducer_settings;
mod steps_without_backward;
mod store;
mod sums_for_checkpoint;

pub use accumulation::GradientReduction;
pub(crate) use accumulation::{Boundary, Contribution, HeldBatches, HeldLeaves, HeldSums, MicroBatch, Sum};
pub(crate) use aligned_bytes::AlignedBytes;
pub(crate) use bucket_plan::{Caps, Slot, sum_dtype};
pub use device_loan::DeviceLoan;
pub(crate) use leaf_nodes::{Nodes, OwnRun, Rows};
pub(crate) use memory::shared_bytes;
pub use memory::{GradientMemory, HostCopy};
pub(crate) use not_finite::{Culprit, FirstNotFinite};
pub(crate) use packing::{first_not_finite, is_finite, pack};
pub(crate) use piggyback::{Piggyback, PiggybackResult};
pub(crate) use reducer::Reducer;
pub(crate) use reducer_settings::ReducerSettings;
pub(crate) use store::{Outcome, open as open_store};
