//! Process groups and collectives between ranks, with deterministic numerics. Knows nothing of Burn or GPUs.
//!
//! ```
//! use burn_ddp_comm::{Error, ReduceOp, World};
//!
//! // Four ranks as threads of this process; a rank that is a process of its own calls `World::join`.
//! let means = World::spawn(4, |world| {
//!     let group = world.group()?;
//!     let mut x = [world.rank() as f32, 1.0];
//!     group.all_reduce(&mut x, ReduceOp::Mean)?;
//!     Ok::<_, Error>(x)
//! });
//! assert!(means.iter().all(|x| *x == Ok([1.5, 1.0])));
//!
//! // Ranks that call different collectives do not hang: each gets an error that shows both calls.
//! let results = World::spawn(2, |world| {
//!     let group = world.group()?;
//!     if world.rank() == 0 { group.barrier() } else { group.broadcast(&mut [0.0_f32], 0) }
//! });
//! let error = results[1].clone().unwrap_err().to_string();
//! assert!(error.contains("rank 0 called barrier #0 of group 1"), "{error}");
//! assert!(error.contains("rank 1 called broadcast #0 of group 1 (f32, root 0, 1 element)"), "{error}");
//! ```
//!
//! # Map
//!
//! | concept | items |
//! |---|---|
//! | joining: this rank, its peers and their machines | [`World`], [`LaunchEnv`], [`WorldOptions`], [`EngineChoice`], [`PeerInfo`], [`Machines`], [`fail_join`] |
//! | the key-value store in which processes find each other | [`Store`] and its implementations |
//! | authentication | [`Secret`], [`JobKey`] |
//! | collectives | [`ProcessGroup`], [`Pending`], [`ReduceOp`], [`DType`], [`Element`], [`SharedBuffer`] |
//! | errors | [`Error`] |
//! | the numerics contract | `reduce/`, described at [`ProcessGroup`] |
//! | engines, the transports under them, and the algorithms they share | [`engine`] |
//! | a call, as ranks compare it and as it travels | [`call`], [`frame`] |
//! | which ranks are alive, which have stopped, and the one cause that ends a world | [`membership`], [`Track`], [`Progress`], [`CallingThread`] |
//! | events and reports for the launcher | [`post_mortem`] |
//! | a trace of all ranks | [`timeline`] |
//!
//! There is no global state: a process can hold any number of worlds and ranks. Every wait has a deadline and names the
//! ranks it waited for. Nothing blocks in `Drop`. The crate never prints; it emits `tracing` events.
#![deny(unsafe_code)]
#![cfg_attr(
    not(target_os = "linux"),
    allow(dead_code, unused_imports, reason = "parts are for shared memory and local sockets, which need Linux")
)]

#[cfg(target_endian = "big")]
compile_error!("elements travel in little-endian order, as they are in memory");

pub mod call;
pub mod engine;
pub mod frame;
#[cfg(feature = "fuzzing")]
#[doc(hidden)]
pub mod fuzzing;
pub mod membership;
pub mod post_mortem;
pub mod timeline;

mod auth;
mod clock;
mod dtype;
mod enough_cores;
mod env;
mod error;
mod group;
mod history;
mod logical_ranks;
mod net;
mod pmi;
mod poison_free_locks;
mod poll_pause;
mod private_file;
mod reduce;
mod reduce_op;
mod rendezvous;
mod stop_signal;
mod store;
mod tensor_type;
mod topology;
mod world;
mod world_member;
mod world_options;

pub use auth::{JobKey, Secret};
pub use call::{Call, CallInfo, CallSite, CallingThread, Collective, GroupId, Members, RankCall, attribute_calls};
pub use dtype::{DType, Element};
pub use engine::{EngineChoice, OwnLeaves, PartReduction, RowDivision, SharedBuffer, SharedView};
pub use enough_cores::{Cores, core_per_rank};
pub use env::{HANDED_OVER, LaunchEnv, Meeting};
pub use error::{Error, Result};
pub use group::{MAX_OBJECT_BYTES, Pending, ProcessGroup};
pub use logical_ranks::LogicalRanks;
pub use membership::{BlockedGroup, Heartbeat, PeerInfo, PendingCall, Progress, StuckCall, Track};
pub use net::descriptors::largest_world;
pub use poll_pause::PollPause;
pub use reduce_op::ReduceOp;
pub use rendezvous::fail_join;
pub use stop_signal::StopSignal;
pub use store::{MemoryStore, Store, StoreClient, StoreServer};
pub use tensor_type::{Shape, TensorType};
pub use topology::Machines;
pub use world::World;
pub use world_options::WorldOptions;
