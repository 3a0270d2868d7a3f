//! The collectives of burn-ddp over an installed MPI, for clusters whose network MPI supports best.
//!
//! After [`attach()`] a world's groups use MPI. Everything else stays as it is: the same calls, errors and deadlines,
//! and the same bits.
//!
//! ```no_run
//! # // Not run: it takes an installed MPI and the processes of `mpirun`.
//! use burn_ddp_comm::{WorldOptions, ReduceOp, World};
//!
//! // mpirun -n 4 target/release/program
//! let env = burn_ddp_mpi::detect()?.expect("started by mpirun");
//! let world = World::join(&env, WorldOptions::from_env()?)?;
//! burn_ddp_mpi::attach(&world)?;
//! assert_eq!(world.engine(), "mpi");
//!
//! let group = world.group()?;
//! let mut x = [world.rank() as f32];
//! group.all_reduce(&mut x, ReduceOp::Mean)?;
//! # Ok::<(), burn_ddp_comm::Error>(())
//! ```
//!
//! MPI carries messages from rank to rank, no more: the algorithms are those of
//! [`HostEngine`](burn_ddp_comm::engine::HostEngine), which the `tcp` engine has too. So sums have the same bits as
//! over threads, shared memory and tcp, under every MPI and on any number of machines; every rank's call is compared
//! with every other's; and a wait ends at its deadline, or as soon as a rank is known to be lost. While a group lives,
//! no blocking call of MPI is made.
//!
//! # Map
//!
//! | what | where |
//! |---|---|
//! | joining an MPI job | [`detect()`], [`attach()`] |
//! | groups: one communicator per world, separate tags for each group | `fabric.rs` |
//! | frames: the transport, one exchange, and the requests behind it | `transport.rs`, `exchange.rs`, `channel.rs` |
//! | how frames are cut into messages | `fragments.rs` |
//! | pauses between two polls of MPI | `wait.rs` |
//! | initialising and finalizing MPI | `lifecycle.rs` |
//! | the calls of MPI, and all `unsafe` | `ffi.rs` |
//!
//! # Finalizing MPI
//!
//! MPI is finalized when the process ends by `exit` or by returning from `main`, and only if all its ranks have dropped
//! their groups and left worlds that had not failed. Finalizing waits for all ranks, for as long as a collective may
//! take ([`WorldOptions::timeout`]). Otherwise MPI is not finalized: then nothing can hang, and `mpirun` sees a rank
//! that failed, as it should. A program that initialises MPI itself finalizes it after all groups are dropped: later
//! calls on them are errors.
//!
//! [`WorldOptions::timeout`]: burn_ddp_comm::WorldOptions::timeout
#![deny(unsafe_code)]

mod attach;
mod channel;
mod error;
mod exchange;
mod fabric;
mod ffi;
mod fragments;
mod launcher_detection;
mod lifecycle;
mod transport;
mod wait;

pub use attach::{attach, attach_threads};
pub use launcher_detection::detect;
