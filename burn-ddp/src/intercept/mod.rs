//! How gradients get out of Burn's backward, and averages into it. `README.md` beside this file has the protocol.
//!
//! | step | file |
//! |---|---|
//! | a parameter is read | `reparameterization`, `nodes` (what goes into the graph), `ladder`, `read` |
//! | its gradient comes | `hook`, `backward_pass` (first hook to first gate) |
//! | averages go onto leaves | `gate`, `stand_in` (parameters that this rank did not use) |
//! | state | `open_model`, `wrapped_model` (of all copies), `model_state` (in tensors of the backend), `synced_statistics` |
//! | what goes wrong | `checks`, `checked_backward` (`Ddp::backward`), `failure` |
//! | beside backward | `model_walk` (find taps in a model), `bypass` (pass them), `shadow` (ranks without data) |

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
mod reparameterization;
mod shadow;
mod stand_in;
mod synced_statistics;
#[cfg(all(test, feature = "flex"))]
mod tests;
mod wrapped_model;

pub(crate) use bypass::bypass;
pub(crate) use checked_backward::{checked_backward, refused};
pub(crate) use failure::{fail, tell_peers};
pub(crate) use ladder::{rung_above, untracked};
pub use model_state::ModelOpening;
pub(crate) use model_walk::{TAP_NAME, find};
pub use nodes::DdpBackend;
pub(crate) use open_model::open_model;
pub(crate) use reparameterization::{MAX_RANK, Tap};
pub(crate) use synced_statistics::SyncedStatistics;
pub use wrapped_model::TapHandle;
pub(crate) use wrapped_model::WrappedModel;
