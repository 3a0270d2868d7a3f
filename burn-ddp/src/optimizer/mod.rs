//! Optimizers on several ranks: their state, averages in front of them, clipping.

pub(crate) mod clip;
pub(crate) mod distributed;
mod element_wise;
pub(crate) mod state;
pub(crate) mod state_in_parts;
