//! The store of ranks in one process.

use std::sync::{Condvar, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use super::Store;
use super::key_value_table::Table;
use crate::net::wait::deadline_in;
use crate::poison_free_locks::{lock, wait_timeout};
use crate::{Error, Result};

/// A [`Store`] within this process.
#[derive(Debug, Default)]
pub struct MemoryStore {
    /// Read and written by every call.
    table: Mutex<Table>,
    /// Notified by every write, awaited by `get`.
    written: Condvar,
}

impl MemoryStore {
    /// An empty store.
    pub fn new() -> Self {
        Self::default()
    }

    fn lock(&self) -> MutexGuard<'_, Table> {
        // A thread that panics with the lock leaves the table consistent, so a poisoned lock is no error.
        lock(&self.table)
    }

    fn write<R>(&self, change: impl FnOnce(&mut Table) -> Result<R, String>) -> Result<R> {
        let result = change(&mut self.lock());
        self.written.notify_all();
        result.map_err(refused)
    }
}

impl Store for MemoryStore {
    fn set(&self, key: &str, value: &[u8]) -> Result<()> {
        self.write(|table| table.set(key, value))
    }

    fn get(&self, key: &str, timeout: Duration) -> Result<Vec<u8>> {
        let deadline = deadline_in(timeout);
        let mut table = self.lock();
        loop {
            if let Some(value) = table.get(key).map_err(refused)? {
                return Ok(value.to_vec());
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(Error::StoreTimeout { key: key.to_owned(), waited: timeout });
            }
            table = wait_timeout(&self.written, table, left);
        }
    }

    fn set_new(&self, key: &str, value: &[u8]) -> Result<Option<Vec<u8>>> {
        self.write(|table| table.set_new(key, value))
    }

    fn add(&self, key: &str, delta: i64) -> Result<i64> {
        self.write(|table| table.add(key, delta))
    }

    fn keys(&self, prefix: &str) -> Result<Vec<String>> {
        self.lock().keys(prefix).map_err(refused)
    }
}

fn refused(message: String) -> Error {
    Error::Store { message }
}
