//! Sockets below the store, the control connections and the tcp engine.
//!
//! - [`bind_and_connect`]: host names, loopback, binding and connecting with errors a person can act on;
//! - [`descriptors`]: how many file descriptors this process may have, and errors for lack of them;
//! - [`interface`]: the addresses to listen on and to connect from;
//! - [`name_lookup`]: a host name that is looked up again and again, with a back-off;
//! - [`peer_addresses`]: addresses of the ranks, looked up once;
//! - [`keep_alive`]: probes on idle connections;
//! - [`unix_socket`], `peer_user`: unix sockets between processes of one user;
//! - [`dial_rank`]: an authenticated connection to another rank;
//! - [`encrypted_messages`]: encrypted, capped postcard messages over a non-blocking socket;
//! - [`wait`]: `poll` with a deadline, and the waker that interrupts it.

pub(crate) mod bind_and_connect;
pub(crate) mod descriptors;
pub(crate) mod dial_rank;
pub(crate) mod encrypted_messages;
pub(crate) mod interface;
pub(crate) mod keep_alive;
pub(crate) mod name_lookup;
pub(crate) mod peer_addresses;
#[cfg(target_os = "linux")]
mod peer_user;
#[cfg(test)]
mod slow_link_tests;
#[cfg(test)]
mod tampering_relay_tests;
pub(crate) mod unix_socket;
pub(crate) mod wait;

use rustix::net::SendFlags;

/// Flags of every send: on a connection that the peer has closed it returns an error and raises no SIGPIPE. On Apple's
/// systems an option of the socket does that, which std and socket2 set.
#[cfg(not(target_vendor = "apple"))]
pub(crate) const SEND_FLAGS: SendFlags = SendFlags::NOSIGNAL;
#[cfg(target_vendor = "apple")]
pub(crate) const SEND_FLAGS: SendFlags = SendFlags::empty();
