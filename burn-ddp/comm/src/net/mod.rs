//! Sockets below the store, the control mesh and the tcp engine.
//!
//! - [`hello`]: who connects and why; the only thing that is parsed before a connection is trusted;
//! - [`wire`]: length-prefixed, capped postcard messages over a non-blocking socket;
//! - [`wait`]: `poll` with a deadline, and the waker that interrupts it;
//! - [`address`]: host names, loopback, binding and connecting with errors a person can act on.

pub(crate) mod address;
pub(crate) mod hello;
pub(crate) mod wait;
pub(crate) mod wire;
