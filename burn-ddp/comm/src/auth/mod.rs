//! Authentication: the job's secret, the keys derived from it, and the proof at the start of every connection.
//!
//! - `secret`: 32 random bytes in a file;
//! - `sealed_secret`: the same on its way to a rank, where others may read;
//! - `job_key`: the keys of one job and restart, derived from it;
//! - `hmac_key`: HMAC-SHA256;
//! - `handshake`: both sides prove that they know the key and agree on keys of the connection; nothing else is parsed
//!   before;
//! - `noise`: the two variants of Noise that it is made of;
//! - `secure_stream`: the connection afterwards, and its keys;
//! - `unauthenticated_connections`: connections without a proof yet, and their limits.

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
