//! How gradients get out of Burn's backward, and averages into it. `README.md` beside this file has the protocol.

mod backward_pass;
mod bypass;
#[cfg(all(test, feature = "flex"))]
pub(crate) mod fake_device;
#[cfg(all(test, feature = "flex"))]
pub(crate) mod fake_gpu;
mod nodes;
mod reparameterization;
mod stand_in;
#[cfg(all(test, feature = "flex"))]
mod tests;
mod wrapped_model;

pub(crate) use bypass::bypass;
pub use nodes::{DdpBackend, TapHandle};
pub(crate) use nodes::{rung_above, untracked};
pub(crate) use reparameterization::{MAX_RANK, TAP_NAME, Tap, bypassed, find, note_values};
pub(crate) use wrapped_model::{SyncedStatistics, WrappedModel, fail, tell_peers};
