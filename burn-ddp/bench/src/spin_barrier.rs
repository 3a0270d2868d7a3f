//! A spin barrier over counters in shared memory of processes, for the hardware's limits and for trainers that reduce
//! nothing.
//!
//! The only file of this program with `unsafe`.
#![allow(unsafe_code)]

use std::fs::File;
use std::os::fd::{AsRawFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;

use anyhow::{Context, Result};
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};

/// Distance of two counters: two cache lines, since processors fetch them in pairs.
const LINE_BYTES: usize = 128;
/// Number of reads before a waiting rank yields its core, if every rank has a core.
const SPINS: u32 = 100_000;
/// Number of reads before a waiting rank yields its core, if ranks outnumber cores.
const SPINS_CROWDED: u32 = 50;

/// Counters in a mapping of anonymous shared memory, [`LINE_BYTES`] apart.
pub(crate) struct SharedLines {
    start: NonNull<AtomicU64>,
    lines: usize,
    file: OwnedFd,
}

// SAFETY: the mapping belongs to no thread, and is reached only as atomics.
unsafe impl Send for SharedLines {}
// SAFETY: as above.
unsafe impl Sync for SharedLines {}

impl SharedLines {
    /// New counters, all 0. Children of this process inherit them under the number [`fd`](Self::fd).
    pub(crate) fn create(lines: usize) -> Result<SharedLines> {
        // Without CLOEXEC, so that children inherit the descriptor.
        let file = memfd_create("burn-ddp-bench", MemfdFlags::empty())?;
        ftruncate(&file, (lines * LINE_BYTES) as u64)?;
        SharedLines::map(file, lines)
    }

    /// Maps the counters that the parent of this process made.
    pub(crate) fn inherited(fd: i32) -> Result<SharedLines> {
        let file = File::options().read(true).write(true).open(format!("/proc/self/fd/{fd}"));
        let file = file.context("the driver's shared memory is not there")?;
        let lines = file.metadata()?.len() as usize / LINE_BYTES;
        SharedLines::map(file.into(), lines)
    }

    fn map(file: OwnedFd, lines: usize) -> Result<SharedLines> {
        let (len, access) = (lines * LINE_BYTES, ProtFlags::READ | ProtFlags::WRITE);
        // SAFETY: a new mapping at an address of the kernel's choice overlaps no memory of this process. The file has
        // `len` bytes: `create` has set its length, `inherited` has read it, and nothing shrinks the file.
        let start = unsafe { mmap(std::ptr::null_mut(), len, access, MapFlags::SHARED, &file, 0)? };
        let start = NonNull::new(start.cast()).context("mapped at 0")?;
        Ok(SharedLines { start, lines, file })
    }

    /// Descriptor by which children find the counters.
    pub(crate) fn fd(&self) -> i32 {
        self.file.as_raw_fd()
    }

    /// Counter `index`.
    ///
    /// # Panics
    /// If `index` is not below the number of counters.
    pub(crate) fn line(&self, index: usize) -> &AtomicU64 {
        assert!(index < self.lines, "line {index} of {}", self.lines);
        // SAFETY: the counter is inside the mapping, by the assertion above; it is aligned, since mappings begin at a
        // page; every bit pattern is a number; all processes access it as an atomic; the mapping lives as long as
        // `self`.
        unsafe { self.start.byte_add(index * LINE_BYTES).as_ref() }
    }
}

impl Drop for SharedLines {
    fn drop(&mut self) {
        // SAFETY: this mapping was made by `map` with this length, and no reference into it outlives `self`.
        let _ = unsafe { munmap(self.start.as_ptr().cast(), self.lines * LINE_BYTES) };
    }
}

/// Barrier of the ranks of a contender: each writes its own counter and reads the others'.
pub(crate) struct Meeting {
    lines: SharedLines,
    rank: usize,
    world: usize,
    times: u64,
    spins: u32,
}

impl Meeting {
    /// A barrier over `lines`, which has a counter for each rank.
    pub(crate) fn new(lines: SharedLines, rank: usize, world: usize) -> Meeting {
        let spins = if world <= crate::machine::cores() { SPINS } else { SPINS_CROWDED };
        Meeting { lines, rank, world, times: 0, spins }
    }

    /// Waits until all ranks have called this equally often.
    pub(crate) fn meet(&mut self) {
        self.times += 1;
        self.lines.line(self.rank).store(self.times, Ordering::Release);
        for other in (0..self.world).filter(|other| *other != self.rank) {
            let line = self.lines.line(other);
            let mut looks = 0;
            while line.load(Ordering::Acquire) < self.times {
                looks += 1;
                if looks > self.spins {
                    thread::yield_now();
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_meet() {
        let lines = SharedLines::create(3).unwrap();
        let fd = lines.fd();
        thread::scope(|scope| {
            for rank in 0..3 {
                scope.spawn(move || {
                    let mut meeting = Meeting::new(SharedLines::inherited(fd).unwrap(), rank, 3);
                    for _ in 0..1000 {
                        meeting.meet();
                    }
                });
            }
        });
        assert_eq!([0, 1, 2].map(|rank| lines.line(rank).load(Ordering::Relaxed)), [1000; 3]);
    }
}
