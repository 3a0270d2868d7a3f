//! The system's allocator, which tells a test program of each block.

use std::alloc::{GlobalAlloc, Layout, System};

/// Passes every call on to the system's allocator, and each block's size in bytes to these functions.
pub(crate) struct Counting {
    /// Called before a block is allocated.
    pub(crate) appears: fn(usize),
    /// Called before a block is freed.
    pub(crate) goes: fn(usize),
}

// SAFETY: passes every call on to the system's allocator.
#[allow(unsafe_code)]
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        (self.appears)(layout.size());
        // SAFETY: the caller keeps the contract of `alloc`.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        (self.appears)(layout.size());
        // SAFETY: the caller keeps the contract of `alloc_zeroed`.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn dealloc(&self, memory: *mut u8, layout: Layout) {
        (self.goes)(layout.size());
        // SAFETY: the caller keeps the contract of `dealloc`.
        unsafe { System.dealloc(memory, layout) }
    }
}
