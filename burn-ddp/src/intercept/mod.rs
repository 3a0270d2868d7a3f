//! Takes gradients out of Burn's backward, and puts averages into it. `README.md` beside this file has the protocol.
//!
//! | step | file |
//! |---|---|
//! | a parameter is read | `parameter_tap`, `autodiff_nodes` (what goes into the graph), `parameter_read`, `hook_depth` |
//! | its gradient comes | `hook`, `backward_lifecycle` (first hook to first gate) |
//! | averages go onto leaves | `gate`; for parameters that this rank did not use: `locally_unused_parameters`, `unused_parameter_averages`, `average_for_visitors`, `tied_clones` |
//! | state | `wrapped_model_setup`, `wrapped_model` (of all copies), `model_state` (in tensors of the backend), `synced_statistics` |
//! | checks and errors | `tap_and_replica_checks`, `absent_gradients` (no rank has one), `identical_data_check` (all ranks train on the same data), `short_step_warning`, `checked_backward` (`Ddp::backward`), `backward_failure` |
//! | parameters in parts | `shard/` |
//! | outside of backward | `model_walk` (finds the taps of a model), `tap_bypass` (ignores them), `shadow_collectives` (ranks without data) |

mod absent_gradients;
mod autodiff_nodes;
mod average_for_visitors;
mod averaged_gradient;
mod backward_failure;
mod backward_lifecycle;
mod checked_backward;
#[cfg(all(test, feature = "flex"))]
pub(crate) mod fake_device;
mod gate;
mod gradient_lookup_warning;
mod hook;
mod hook_depth;
mod identical_data_check;
mod load_save_mappers;
mod locally_unused_parameters;
mod model_state;
mod model_walk;
mod parameter_read;
mod parameter_tap;
mod shadow_collectives;
mod shard;
mod short_step_warning;
mod synced_statistics;
mod tap_and_replica_checks;
mod tap_bypass;
#[cfg(all(test, feature = "flex"))]
mod tests;
mod tied_clones;
mod unused_parameter_averages;
#[cfg(all(test, feature = "flex"))]
mod warning_test_model;
mod wrapped_model;
mod wrapped_model_setup;

pub use autodiff_nodes::DdpBackend;
pub(crate) use backward_failure::{fail, tell_peers};
pub(crate) use checked_backward::{checked_backward, refused};
pub(crate) use hook_depth::{rung_above, untracked};
pub(crate) use load_save_mappers::without_mappers;
#[cfg(feature = "train")]
pub(crate) use load_save_mappers::{answers, note_part};
pub(crate) use locally_unused_parameters::MAX_DIMS;
pub use model_state::ModelOpening;
pub(crate) use model_walk::{TAP_NAME, find, read_all, taps};
pub(crate) use parameter_tap::Tap;
#[cfg(feature = "train")]
pub(crate) use shard::own_rows;
pub(crate) use shard::{
    MOST_SHARED_BYTES, Part, ShardedParameter, SteppedSlot, cut, parts, refuse_parts_without_tap, refuse_sharded,
    sharded_parameters, sharded_paths, step_by_elements, sums_over_parts, tell_peers_of_parts, whole,
};
pub(crate) use synced_statistics::SyncedStatistics;
#[cfg(feature = "train")]
pub(crate) use tap_bypass::is_bypassed;
pub(crate) use tap_bypass::{bypass, element_wise, replace};
pub use wrapped_model::TapHandle;
pub(crate) use wrapped_model::WrappedModel;
pub(crate) use wrapped_model_setup::open_model;
