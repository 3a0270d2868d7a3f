//! The shm engine: between ranks of one machine, through memory that all of them map.
//!
//! The calls of a group go through one [segment](segment). In it each rank has a [cell](rank_cell), where it publishes
//! its current call, with a small payload, and its progress. A waiting rank spins for a moment if there is a core for
//! every rank, or yields its core; then it sleeps until the rank that it waits for rings its [doorbell](doorbell).
//! Large messages go through [slots](slot_reductions) that stay in the caches; [shared buffers](in_place_buffer) are
//! reduced where they are.
//! `README.md` beside the parts describes the protocol.

mod atomics;
mod chunked_data_movement;
mod chunks;
mod doorbell;
mod eager_messages;
mod engine;
mod fabric;
mod futex;
mod in_place_buffer;
mod in_place_reductions;
mod in_place_rows;
mod layout;
#[cfg(all(test, loom))]
mod loom_machine;
#[cfg(all(test, loom))]
mod loom_models;
mod memory_limits;
mod peer_waits;
mod point_to_point_messages;
mod rank_cell;
mod segment;
mod segment_handover;
mod slot_reductions;

pub(in crate::engine) use self::chunked_data_movement::{Made, Parts};
pub(in crate::engine) use self::chunks::part;
pub(in crate::engine) use self::engine::ShmEngine;
pub(crate) use self::fabric::ShmFabric;
pub(crate) use self::in_place_buffer::{ArenaBuffer, ArenaView};
pub(crate) use self::segment_handover::try_handover;

pub(crate) const NAME: &str = "shm";
