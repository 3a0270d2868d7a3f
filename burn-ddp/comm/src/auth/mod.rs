//! Authentication: the job's secret, the keys derived from it, and the proof at the start of every connection.
//!
//! - `secret`: 32 random bytes in a file;
//! - `sealed_secret`: the secret encrypted for one rank, for a channel that others may read;
//! - `job_key`: the keys of one job and restart, derived from the secret;
//! - `hmac_key`: HMAC-SHA256;
//! - `handshake`: both ends prove that they know the key and agree on session keys, before anything else is parsed;
//! - `noise`: the two variants of the Noise protocol that the handshake uses;
//! - `cipher`: ChaCha20-Poly1305, fast for small and for large messages;
//! - `secure_stream`: a connection after its handshake, with its session keys;
//! - `unauthenticated_connections`: accepted connections that have proved nothing yet, and limits on their number.

mod cipher;
pub(crate) mod handshake;
pub(crate) mod hmac_key;
pub(crate) mod job_key;
mod noise;
pub(crate) mod sealed_secret;
mod secret;
pub(crate) mod secure_stream;
pub(crate) mod unauthenticated_connections;

pub use job_key::JobKey;
pub use secret::Secret;
