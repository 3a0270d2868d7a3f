//! GPU collectives for burn-ddp on NCCL, which is loaded at run time. Independent of Burn; builds and tests without
//! CUDA.
//!
//! The engines of [`NcclFabric`] reduce elements in a device's memory by NCCL, and leave elements in the host's memory
//! to the world's own engines, unless [`HostMemory`] says otherwise.
//!
//! ```no_run
//! # // Not run: it takes GPUs and the processes of a launcher.
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
//! | entry point: the fabric that makes the groups' engines | [`NcclFabric`], [`HostMemory`] |
//! | elements on a device, and the events around their collective | [`DeviceElements`], [`Piece`] |
//! | can all ranks use NCCL? | [`capability()`], [`RankInfo`], [`decide`] |
//! | devices, streams, events, memory | [`Device`], [`Stream`], [`Event`], [`DeviceBuffer`] |
//! | communicators and their collectives | [`Communicator`], `collectives.rs`, [`NcclOp`] |
//! | functions of the driver and of NCCL, and how they are loaded | [`Driver`], [`Nccl`], `dlopen.rs` |
//! | one rank's device, shared by the engines of its groups | `rank_device_state.rs` |
//! | launches, in an order that all ranks agree on | `coordinated_launch.rs`, `launch_order.rs` |
//! | host memory through the device | `host_through_device.rs`, `staging_buffers.rs` |
//! | enqueued collectives that no thread waits for | `watchdog.rs` |
//! | a process that ends while threads use NCCL | `process_end.rs` |
//! | devices and NCCL in host memory, for tests | `fake/` |
//!
//! The README describes installation, failures, numerics, and the checks that need a GPU.
#![deny(unsafe_code)]

mod blocking_copy;
mod capability;
mod collectives;
mod communicator;
mod coordinated_launch;
mod device;
mod device_and_pinned_memory;
mod device_elements;
mod dlopen;
mod engine;
mod error;
mod event;
mod fabric;
mod host_through_device;
mod launch_order;
mod nccl_op;
mod poison_free_lock;
mod process_end;
mod rank_device_state;
mod staging_buffers;
mod stream;
mod wait;
mod watchdog;

pub mod driver;
#[cfg(any(test, feature = "fake"))]
pub mod fake;
pub mod nccl;

pub use capability::{Decision, DeviceInfo, RankInfo, capability, decide};
pub use communicator::Communicator;
pub use device::Device;
pub use device_and_pinned_memory::{DeviceBuffer, HostBuffer, Region};
pub use device_elements::{DeviceElements, Piece};
pub use driver::Driver;
pub use error::DeviceError;
pub use event::Event;
pub use fabric::NcclFabric;
pub use host_through_device::HostMemory;
pub use nccl::{Nccl, UniqueId};
pub use nccl_op::NcclOp;
pub use stream::Stream;
pub use wait::WaitCheck;
