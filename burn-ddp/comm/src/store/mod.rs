//! The key-value store through which ranks meet.
//!
//! Rank 0 or the launcher hosts a [`StoreServer`], to which each rank connects with a [`StoreClient`]; [`MemoryStore`]
//! serves the ranks of one process. After the rendezvous no step of a training needs the store.

mod client;
pub(crate) mod key_value_table;
mod memory;
pub(crate) mod protocol;
mod refusals;
mod server;

use std::time::Duration;

pub use client::StoreClient;
pub(crate) use client::{Place, Unreached};
pub use memory::MemoryStore;
pub(crate) use server::Serving;
pub use server::StoreServer;

use crate::Result;

/// Longest key, in bytes.
pub(crate) const KEY_CAP: usize = 1024;
/// Longest value, in bytes.
pub(crate) const VALUE_CAP: usize = 1024 * 1024;

/// A key-value store that all ranks see.
///
/// Each call is atomic. Keys are text of at most 1 KiB, values are bytes, at most 1 MiB. Only the host of a store can
/// [remove](StoreServer::forget) keys.
///
/// ```
/// use burn_ddp_comm::{MemoryStore, Store};
/// use std::time::Duration;
///
/// let store = MemoryStore::new();
/// std::thread::scope(|s| {
///     s.spawn(|| store.set("address", b"10.0.0.1:4000").unwrap());
///     assert_eq!(store.get("address", Duration::from_secs(10)).unwrap(), b"10.0.0.1:4000");
/// });
/// assert_eq!(store.set_new("address", b"10.0.0.2:4000")?, Some(b"10.0.0.1:4000".to_vec()));
/// assert_eq!(store.add("arrived", 1)?, 1);
/// assert!(store.get("nobody sets this", Duration::ZERO).is_err());
/// # Ok::<(), burn_ddp_comm::Error>(())
/// ```
pub trait Store: Send + Sync {
    /// Sets `key`, replacing its value if it has one.
    ///
    /// # Errors
    /// [`Error::Store`](crate::Error::Store): the store cannot be reached, is full, or key or value are too long.
    fn set(&self, key: &str, value: &[u8]) -> Result<()>;

    /// Returns the value of `key`; waits until it is set.
    ///
    /// # Errors
    /// [`Error::StoreTimeout`](crate::Error::StoreTimeout) if it was not set within `timeout`;
    /// [`Error::Store`](crate::Error::Store) as for [`set`](Store::set).
    fn get(&self, key: &str, timeout: Duration) -> Result<Vec<u8>>;

    /// Sets `key` if it is not set. Returns `None` if this call set it, and otherwise its value, which stays: of
    /// several callers exactly one gets `None`.
    ///
    /// # Errors
    /// As for [`set`](Store::set).
    fn set_new(&self, key: &str, value: &[u8]) -> Result<Option<Vec<u8>>>;

    /// Adds `delta` to the number that `key` holds as decimal text, or to 0 if `key` is not set. Returns the sum.
    ///
    /// # Errors
    /// As for [`set`](Store::set), and [`Error::Store`](crate::Error::Store) if `key` does not hold a number or the sum
    /// overflows.
    fn add(&self, key: &str, delta: i64) -> Result<i64>;

    /// Returns the keys that begin with `prefix`, sorted.
    ///
    /// # Errors
    /// As for [`set`](Store::set), and [`Error::Store`](crate::Error::Store) if their list is longer than 1 MiB.
    fn keys(&self, prefix: &str) -> Result<Vec<String>>;
}
