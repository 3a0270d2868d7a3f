//! The engine of groups that span machines, at least one of which has several of the group's ranks: inside a machine
//! through shared memory, between machines over tcp.
//!
//! | part | file |
//! |---|---|
//! | traffic between machines; pure functions | `schedule/` |
//! | exchanges between machines | `between_machines.rs` |
//! | reductions, chunk by chunk | `chunked_reduction.rs` |
//! | the collectives | `engine.rs` |
//! | opening a group | `fabric.rs` |
//!
//! The ranks of a machine first compare their calls. A rank sends a frame to another machine only after that, so a
//! frame speaks for all ranks of the sender's machine. Each collective ends with a step inside the machine, or with
//! frames from all other machines, so a rank that returns has heard, directly or through others, of the call of every
//! rank.

mod between_machines;
mod chunked_reduction;
mod engine;
mod fabric;
mod schedule;

pub(crate) use self::fabric::TwoLevelFabric;

pub(crate) const NAME: &str = "shm+tcp";
