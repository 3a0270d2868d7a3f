//! Sockets below the store, the control mesh and the tcp engine.
//!
//! - [`handshake`]: both sides prove that they know the [`key`]; nothing else is parsed before;
//! - [`strangers`]: those who have not proved it yet, and their limits;
//! - [`local`]: unix sockets between processes of one user;
//! - [`wire`]: length-prefixed, capped postcard messages over a non-blocking socket;
//! - [`wait`]: `poll` with a deadline, and the waker that interrupts it;
//! - [`interface`]: the addresses to listen on and to connect from;
//! - [`address`]: host names, loopback, binding and connecting with errors a person can act on.

pub(crate) mod address;
pub(crate) mod handshake;
pub(crate) mod interface;
pub(crate) mod key;
pub(crate) mod local;
pub(crate) mod strangers;
pub(crate) mod wait;
pub(crate) mod wire;
