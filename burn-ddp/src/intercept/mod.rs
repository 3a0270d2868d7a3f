//! The way of gradients out of Burn's backward, and of averages into it. `README.md` beside this file has the protocol.
//!
//! | step | file |
//! |---|---|
//! | a parameter is read | `tap`, `nodes` (what goes into the graph), `read`, `ladder` |
//! | its gradient comes | `hook`, `backward_pass` (first hook to first gate) |
//! | averages go onto leaves | `gate`; of parameters that this rank did not use: `unused_parameters`, `waiting_averages` |
//! | state | `open_model`, `wrapped_model` (of all copies), `model_state` (in tensors of the backend), `synced_statistics` |
//! | checks and errors | `checks`, `checked_backward` (`Ddp::backward`), `failure` |
//! | outside of backward | `model_walk` (finds the taps of a model), `bypass` (ignores them), `shadow` (ranks without data) |

mod backward_pass;
mod bypass;
mod checked_backward;
mod checks;
mod failure;
#[cfg(all(test, feature = "flex"))]
pub(crate) mod fake_device;
mod gate;
mod hook;
mod ladder;
mod model_state;
mod model_walk;
mod nodes;
mod open_model;
mod read;
mod shadow;
mod synced_statistics;
mod tap;
#[cfg(all(test, feature = "flex"))]
mod tests;
mod unused_parameters;
mod waiting_averages;
mod wrapped_model;

pub(crate) use bypass::bypass;
pub(crate) use checked_backward::{checked_backward, refused};
pub(crate) use failure::{fail, tell_peers};
pub(crate) use ladder::{rung_above, untracked};
pub use model_state::ModelOpening;
pub(crate) use model_walk::{TAP_NAME, find, read_all, taps};
pub use nodes::DdpBackend;
pub(crate) use open_model::open_model;
pub(crate) use synced_statistics::SyncedStatistics;
pub(crate) use tap::Tap;
pub(crate) use unused_parameters::MAX_RANK;
pub use wrapped_model::TapHandle;
pub(crate) use wrapped_model::WrappedModel;
