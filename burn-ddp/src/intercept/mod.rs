//! The way of gradients out of Burn's backward, and of averages into it. `README.md` beside this file has the protocol.
//!
//! | step | file |
//! |---|---|
//! | a parameter is read | `parameter_tap`, `nodes` (what goes into the graph), `parameter_read`, `depth_ladder` |
//! | its gradient comes | `hook`, `begin_and_submit` (first hook to first gate) |
//! | averages go onto leaves | `gate`; of parameters that this rank did not use: `unused_parameters`, `unused_parameter_averages`, `shown_average`, `tied_clones` |
//! | state | `open_model`, `wrapped_model` (of all copies), `model_state` (in tensors of the backend), `synced_statistics` |
//! | checks and errors | `tap_and_replica_checks`, `same_gradients` (all ranks train on the same data), `short_steps`, `checked_backward` (`Ddp::backward`), `failure` |
//! | parameters in parts | `shard/` |
//! | outside of backward | `model_walk` (finds the taps of a model), `tap_bypass` (ignores them), `shadow_collectives` (ranks without data) |

mod begin_and_submit;
mod checked_backward;
mod depth_ladder;
mod failure;
#[cfg(all(test, feature = "flex"))]
pub(crate) mod fake_device;
mod gate;
mod gradient_of;
mod hook;
mod lookups;
mod model_state;
mod model_walk;
mod nodes;
mod open_model;
#[cfg(all(test, feature = "flex"))]
mod pair;
mod param_mappers;
mod parameter_read;
mod parameter_tap;
mod same_gradients;
mod shadow_collectives;
mod shard;
mod short_steps;
mod shown_average;
mod synced_statistics;
mod tap_and_replica_checks;
mod tap_bypass;
#[cfg(all(test, feature = "flex"))]
mod tests;
mod tied_clones;
mod unused_parameter_averages;
mod unused_parameters;
mod wrapped_model;

pub(crate) use checked_backward::{checked_backward, refused};
pub(crate) use depth_ladder::{rung_above, untracked};
pub(crate) use failure::{fail, tell_peers};
pub use model_state::ModelOpening;
pub(crate) use model_walk::{TAP_NAME, find, read_all, taps};
pub use nodes::DdpBackend;
pub(crate) use open_model::open_model;
pub(crate) use parameter_tap::Tap;
pub(crate) use shard::{
    Part, Rows, ShardedParameter, cut, parts, refuse_sharded, sharded_parameters, sharded_paths, sums_over_parts,
    tell_peers_of_parts, whole,
};
pub(crate) use synced_statistics::SyncedStatistics;
pub(crate) use tap_bypass::{bypass, replace};
pub(crate) use unused_parameters::MAX_DIMS;
pub use wrapped_model::TapHandle;
pub(crate) use wrapped_model::WrappedModel;
