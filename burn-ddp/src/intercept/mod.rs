//! Takes gradients out of Burn's backward, and hands out their averages. `README.md` beside this file has the protocol.
//!
//! | step | file |
//! |---|---|
//! | a call of the door | `scope` (read it first), `step` (of each model), `overflow_verdict`, `trained` (models of a call, and their averages) |
//! | a parameter is read | `parameter_tap`, `tap_handle`, `autodiff_nodes` (what goes into the graph), `parameter_read`, `hook_depth` |
//! | its gradient comes | `hook` |
//! | state | `wrapped_model_setup`, `wrapped_model` (of all copies), `model_state` (in tensors of the backend), `synced_statistics` |
//! | checks | `replica_checks`, `identical_data_check` (all ranks train on the same data) |
//! | parameters in parts | `shard/`, `save_mappers` (no parts in records) |
//! | outside of backward | `model_walk` (finds the taps of a model), `tap_bypass` (ignores them), `shadow_collectives` (ranks without data) |

mod autodiff_nodes;
#[cfg(all(test, feature = "flex"))]
pub(crate) mod fake_device;
mod held_sums;
mod hook;
mod hook_depth;
mod identical_data_check;
mod model_state;
mod model_walk;
mod overflow_verdict;
mod parameter_read;
mod parameter_tap;
mod replica_checks;
mod save_mappers;
mod scope;
mod shadow_collectives;
mod shard;
mod step;
mod synced_statistics;
mod tap_bypass;
mod tap_handle;
#[cfg(all(test, feature = "flex"))]
mod tests;
mod trained;
mod wrapped_model;
mod wrapped_model_setup;

pub use autodiff_nodes::DdpBackend;
pub(crate) use hook_depth::{rung_above, untracked};
pub use model_state::ModelOpening;
pub(crate) use model_walk::{TAP_NAME, find, read_of_master, taps};
pub(crate) use parameter_tap::{MAX_DIMS, Tap};
pub(crate) use save_mappers::without_mappers;
#[cfg(feature = "train")]
pub(crate) use scope::catch;
pub(crate) use scope::{Call, fail, has_weight_0, reduce_held, refused, run, scaled, weight_of_backward};
#[cfg(feature = "train")]
pub(crate) use shard::own_rows;
pub(crate) use shard::{
    MOST_SHARED_BYTES, Part, ShardedParameter, SteppedSlot, cut, parts, refuse_parts_without_tap, refuse_sharded,
    sharded_parameters, sharded_paths, step_by_elements, sums_over_parts, tell_peers_of_parts, whole,
};
pub(crate) use step::THREADS;
pub(crate) use synced_statistics::SyncedStatistics;
#[cfg(feature = "train")]
pub(crate) use tap_bypass::{answers, is_bypassed};
pub(crate) use tap_bypass::{bypass, element_wise, replace};
pub use tap_handle::TapHandle;
#[cfg(feature = "train")]
pub(crate) use trained::prepare;
pub use trained::{Models, Own, Prepared, Trained};
pub(crate) use wrapped_model::WrappedModel;
pub(crate) use wrapped_model_setup::open_model;
