//! Parameters of which each rank holds a part: their rows of dimension 0.
//!
//! A read gathers the parts of all ranks, under the same hook as any read of a wrapped model (`../README.md`). The
//! graph does not keep what was gathered: the node of the hook is memory-bound, so Burn gathers anew when a layer's
//! backward asks for the value. The last hook of a parameter leaves each rank the average of its own rows. Gathers and
//! reductions are done in the host's memory, or, where the group's engine is NCCL, on the device, for which nothing
//! waits.
//!
//! | | |
//! |---|---|
//! | `shard_group` | the collectives of all parts, tagged, and their errors in words |
//! | `gathered_read` | value of a read; the same again in backward |
//! | `device_call` | a gather or a reduction on the device |
//! | `gather_cache` | values that a step reads several times |
//! | `sharded_gradients` | from the gradient of the whole to the average of a part |
//! | `part_for_files` | this rank's part of a parameter, for files and hashes |
//! | `parts_and_wholes` | a model cut into parts, and whole again |
//! | `sums_over_parts` | norms of gradients |

mod device_call;
mod gather_cache;
mod gathered_read;
#[cfg(all(test, feature = "flex"))]
mod on_device_tests;
mod part_for_files;
mod parts_and_wholes;
mod shard_group;
mod sharded_gradients;
mod sums_over_parts;

pub(super) use gathered_read::{Regather, evaluated, gathered};
pub(crate) use part_for_files::{Part, parts};
#[cfg(feature = "train")]
pub(crate) use parts_and_wholes::own_rows;
pub(crate) use parts_and_wholes::{
    ShardedParameter, SteppedSlot, cut, refuse_parts_without_tap, refuse_sharded, sharded_parameters, sharded_paths,
    step_by_elements, tell_peers_of_parts, whole,
};
pub(crate) use shard_group::MOST_SHARED_BYTES;
pub(super) use shard_group::{CHANGES_BITS, ShardGroup};
pub(super) use sharded_gradients::ShardedGradients;
pub(crate) use sums_over_parts::sums_over_parts;
