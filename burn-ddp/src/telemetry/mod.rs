//! Where the time of steps goes: counted on each rank, compared between ranks.

pub(crate) mod meter;
pub(crate) mod stats;
pub(crate) mod straggler;
