//! Optimizers on several ranks: their state, averages in front of them, clipping.

pub(crate) mod clip;
pub(crate) mod ddp_optimizer;
pub(crate) mod distributed;
pub(crate) mod element_wise;
pub(crate) mod sharded_state;
pub(crate) mod state;
