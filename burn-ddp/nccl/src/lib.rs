//! GPU collectives for burn-ddp on NCCL, which is loaded at run time. Knows nothing of Burn; builds and tests without CUDA.
//!
//! The engines of [`NcclFabric`] reduce what is in a device's memory by NCCL, and leave what is in the host's memory to the world's own
//! engines, unless [`HostMemory`] says otherwise.
//!
//! ```no_run
//! use std::sync::Arc;
//! use burn_ddp_comm::{LaunchEnv, WorldOptions, World};
//! use burn_ddp_nccl::{HostMemory, NcclFabric};
//!
//! let env = LaunchEnv::detect()?.expect("a launcher");
//! let world = World::join(&env, WorldOptions::default())?;
//! let ordinal = world.local_rank();
//! world.set_fabric(|own, membership| {
//!     NcclFabric::load(own, membership, ordinal, HostMemory::ByHost).map(|fabric| Arc::new(fabric) as _)
//! })?;
//! let group = world.group()?; // reduces on the device
//! # Ok::<(), burn_ddp_comm::Error>(())
//! ```
//!
//! # Map
//!
//! | what | where |
//! |---|---|
//! | the way in | [`NcclFabric`], [`HostMemory`] |
//! | elements on a device, and the events around their reduction | [`DeviceReduce`], [`Piece`] |
//! | can all ranks use NCCL? | [`capability()`], [`RankInfo`], [`decide`] |
//! | devices, streams, events, memory | [`Device`], [`Stream`], [`Event`], [`DeviceBuffer`] |
//! | communicators | [`Communicator`] |
//! | the foreign functions, and how they are loaded | [`Driver`], [`Nccl`], `dlopen.rs` |
//! | an order of launches that all ranks agree on | `launch_order.rs` |
//! | what was enqueued and nobody waits for | `watchdog.rs` |
//! | devices and NCCL in host memory, for tests | `fake/` |
//!
//! Install, failure, numerics, and what needs a GPU to be verified: the README.
#![deny(unsafe_code)]

mod capability;
mod communicator;
mod device;
mod engine;
mod fabric;
mod dlopen;
mod launch_order;
mod pause;
mod device_reduce;
mod staging;
mod watchdog;

pub mod driver;
#[cfg(any(test, feature = "fake"))]
pub mod fake;
pub mod nccl;

pub use capability::{Decision, DeviceInfo, RankInfo, capability, decide};
pub use communicator::{Alive, Communicator, Fault, How};
pub use device::{Device, DeviceBuffer, Event, HostBuffer, Region, Stream};
pub use driver::Driver;
pub use fabric::{HostMemory, NcclFabric};
pub use nccl::{Nccl, UniqueId};
pub use device_reduce::{DeviceReduce, Piece};
