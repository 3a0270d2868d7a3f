//! A fake machine with devices and NCCL in host memory, for tests where there is no GPU.
//!
//! It is asynchronous, as the real one is: each stream is a thread that does the enqueued work in order, calls of
//! communicators that do not block return before they have enqueued anything, and each communicator waits on its stream
//! for those of the other ranks. So a missing wait gives wrong numbers, and launches in different orders on two devices
//! wait for each other until a deadline passes. Addresses are numbers that mean nothing to the host, and access outside
//! of an allocation is an error. Each device can be made to [fail](Fault).
//!
//! Reductions are those of burn-ddp's host engines, bit by bit, so that the conformance suite of these engines runs
//! here. NCCL itself adds in another order, and in the elements' type.
//!
//! | what | where |
//! |---|---|
//! | the machine as tests see it | `fake_machine.rs` |
//! | its state: handles, memory, injected faults | `fake_state.rs` |
//! | streams, which are threads, and events | `fake_stream.rs` |
//! | the driver's functions | `fake_driver.rs` |
//! | NCCL's functions | `fake_nccl.rs` |
//! | communicators, and the launch of their collectives | `fake_comm.rs`, `fake_launch.rs` |
//! | where the ranks' parts of a collective meet, and their arithmetic | `fake_rendezvous.rs`, `fake_reduction.rs` |

mod fake_comm;
mod fake_driver;
mod fake_launch;
mod fake_machine;
mod fake_nccl;
mod fake_reduction;
mod fake_rendezvous;
mod fake_state;
mod fake_stream;

pub use fake_machine::Machine;
pub use fake_state::Fault;
