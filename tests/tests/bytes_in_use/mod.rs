//! The allocator of a test program that counts the bytes in use, and their maximum.

#[path = "../counting_allocator/mod.rs"]
mod counting_allocator;

use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

use counting_allocator::Counting;

/// Bytes in use.
pub(crate) static LIVE: AtomicUsize = AtomicUsize::new(0);
/// Most bytes in use since a test has stored a number here.
pub(crate) static PEAK: AtomicUsize = AtomicUsize::new(0);

fn appears(bytes: usize) {
    PEAK.fetch_max(LIVE.fetch_add(bytes, Relaxed) + bytes, Relaxed);
}

fn goes(bytes: usize) {
    LIVE.fetch_sub(bytes, Relaxed);
}

#[global_allocator]
static ALLOCATOR: Counting = Counting { appears, goes };
