//! Memory that several processes map.
//!
//! A segment is a memfd. It has no name, so nothing is left behind when processes are killed. Its size is sealed, so no
//! process can cause a SIGBUS in another by shrinking it. All of its pages are made present before it is used, so that
//! missing memory is an error here; mostly the rank that writes a page makes it present.
#![allow(unsafe_code)]

use std::ffi::c_void;
use std::fmt;
use std::io;
use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::ptr::{self, NonNull};

use rustix::fs::{FallocateFlags, MemfdFlags, SealFlags};
use rustix::io::Errno;
use rustix::mm::{Advice, MapFlags, ProtFlags};

use super::memory_limits;
use super::rank_cell::{Cell, Pair};

/// Bytes of a huge page, where there are any.
const HUGE_PAGE_BYTES: usize = 2 << 20;
/// Bytes of the largest page that is not a huge one.
const LARGEST_PAGE_BYTES: usize = 64 << 10;
/// Seals that a peer's segment must have before it is mapped.
const SEALS: SealFlags = SealFlags::SHRINK.union(SealFlags::GROW);

/// A mapping, for reading and writing.
pub(super) struct Segment {
    base: NonNull<u8>,
    len: usize,
    /// Bytes of addresses, of which the first `len` have memory behind them.
    reserved: usize,
}

// SAFETY: the mapping belongs to the process, not to a thread; what threads do with its bytes is up to the users of the
// unsafe accessors.
unsafe impl Send for Segment {}
// SAFETY: as above; the safe accessor yields atomics only.
unsafe impl Sync for Segment {}

/// Types that may live in memory that other processes write.
///
/// # Safety
/// Made of atomics only, valid for any bits, without `Drop`.
pub(super) unsafe trait Shared: Sync {}

// SAFETY: atomics, in structs without padding that matters and without `Drop`.
unsafe impl Shared for Cell {}
// SAFETY: as above.
unsafe impl Shared for Pair {}

impl Segment {
    /// A new segment of `len` zero bytes, none of them present yet, and the file descriptor by which other processes
    /// map it.
    pub(super) fn create(len: usize) -> io::Result<(Segment, OwnedFd)> {
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let fd = match rustix::fs::memfd_create("burn-ddp", flags | MemfdFlags::NOEXEC_SEAL) {
            // Older kernels do not know `NOEXEC_SEAL`.
            Err(Errno::INVAL) => rustix::fs::memfd_create("burn-ddp", flags),
            other => other,
        }?;
        rustix::fs::ftruncate(&fd, len as u64)?;
        rustix::fs::fcntl_add_seals(&fd, SEALS | SealFlags::SEAL)?;
        Ok((Segment::map(fd.as_fd(), len)?, fd))
    }

    /// Makes the pages in `ranges` present: they lie near this rank's core and count as memory of its control group.
    /// `fd` is the segment's.
    ///
    /// # Errors
    /// Those of the system; also if the machine or a control group has less memory to spare, since some systems grant
    /// the memory and then kill a process.
    pub(super) fn populate(&self, fd: BorrowedFd<'_>, ranges: &[Range<usize>]) -> io::Result<()> {
        let wanted: usize = ranges.iter().map(ExactSizeIterator::len).sum();
        if let Some(spare) = memory_limits::spare().filter(|spare| wanted as u64 > spare.bytes) {
            return Err(io::Error::new(io::ErrorKind::OutOfMemory, spare.to_string()));
        }
        for range in ranges.iter().filter(|range| !range.is_empty()) {
            self.check(range);
            let start = range.start / LARGEST_PAGE_BYTES * LARGEST_PAGE_BYTES;
            let len = range.end.next_multiple_of(LARGEST_PAGE_BYTES).min(self.len) - start;
            let first = self.base.as_ptr().wrapping_add(start).cast();
            // SAFETY: advice about a mapping of this segment; its pages become present, none changes.
            match unsafe { rustix::mm::madvise(first, len, Advice::LinuxPopulateWrite) } {
                // Older kernels: `fallocate` sets the memory aside, and pages are mapped when touched.
                Err(Errno::INVAL) => {
                    rustix::fs::fallocate(fd, FallocateFlags::empty(), start as u64, len as u64)?;
                }
                result => result?,
            }
        }
        Ok(())
    }

    /// Maps a segment of `len` bytes that a peer created. Pages that other ranks have made present are mapped when they
    /// are touched: mapping all of them on all ranks would take most of the time in which a large world joins.
    pub(super) fn map(fd: BorrowedFd<'_>, len: usize) -> io::Result<Segment> {
        let (seals, size) = (rustix::fs::fcntl_get_seals(fd)?, rustix::fs::fstat(fd)?.st_size);
        if !seals.contains(SEALS) || u64::try_from(size).ok() != Some(len as u64) {
            return Err(io::Error::other(format!(
                "a segment of {size} bytes with {seals:?}; {len} bytes with {SEALS:?} expected"
            )));
        }
        let (base, reserved) = reserve(len)?;
        let segment = Segment { base, len, reserved };
        // SAFETY: the range was reserved by this call and no other code knows it.
        unsafe {
            rustix::mm::mmap(
                segment.pointer(),
                len,
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::SHARED | MapFlags::FIXED,
                fd,
                0,
            )?;
        }
        if len >= HUGE_PAGE_BYTES {
            // If the system does not allow huge pages, small ones serve.
            // SAFETY: advice about a mapping of this segment changes none of its bytes.
            let _ = unsafe { rustix::mm::madvise(segment.pointer(), len, Advice::LinuxHugepage) };
        }
        Ok(segment)
    }

    /// The `T` at `offset`.
    ///
    /// # Panics
    /// If there is none: offsets are computed by this process.
    pub(super) fn at<T: Shared>(&self, offset: usize) -> &T {
        let end = offset.checked_add(size_of::<T>());
        assert!(
            end.is_some_and(|end| end <= self.len) && offset.is_multiple_of(align_of::<T>()),
            "outside of a segment"
        );
        // SAFETY: in bounds and aligned, since pages are aligned further than any `T`; `Shared` says that any bits will
        // do and that writes by others are atomic.
        unsafe { self.base.add(offset).cast::<T>().as_ref() }
    }

    /// The bytes in `range`.
    ///
    /// # Safety
    /// No rank writes these bytes while the slice is alive.
    pub(super) unsafe fn bytes(&self, range: Range<usize>) -> &[u8] {
        self.check(&range);
        // SAFETY: in bounds of a mapping that lives as long as `self`; unwritten, as the caller vouches.
        unsafe { std::slice::from_raw_parts(self.base.add(range.start).as_ptr(), range.len()) }
    }

    /// The bytes in `range`, to be written.
    ///
    /// # Safety
    /// No other code, on any rank, reads or writes these bytes while the slice is alive.
    #[expect(clippy::mut_from_ref, reason = "the protocol between ranks allows one writer")]
    pub(super) unsafe fn bytes_mut(&self, range: Range<usize>) -> &mut [u8] {
        self.check(&range);
        // SAFETY: in bounds of a mapping that lives as long as `self`; exclusive, as the caller vouches.
        unsafe { std::slice::from_raw_parts_mut(self.base.add(range.start).as_ptr(), range.len()) }
    }

    fn check(&self, range: &Range<usize>) {
        assert!(range.start <= range.end && range.end <= self.len, "outside of a segment");
    }

    fn pointer(&self) -> *mut c_void {
        self.base.as_ptr().cast()
    }
}

impl Drop for Segment {
    fn drop(&mut self) {
        // SAFETY: the mapping is this value's; references into it borrowed from it. Unmapping what is mapped does not
        // fail.
        let _ = unsafe { rustix::mm::munmap(self.pointer(), self.reserved) };
    }
}

impl fmt::Debug for Segment {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Segment({} bytes)", self.len)
    }
}

/// Reserves addresses for at least `len` bytes, aligned for huge pages; returns the first, and how many.
fn reserve(len: usize) -> io::Result<(NonNull<u8>, usize)> {
    let too_much = || io::Error::from(io::ErrorKind::OutOfMemory);
    let len = len.checked_next_multiple_of(HUGE_PAGE_BYTES).ok_or_else(too_much)?;
    let room = len.checked_add(HUGE_PAGE_BYTES).ok_or_else(too_much)?;
    // SAFETY: a new private mapping at addresses of the kernel's choice.
    let start = unsafe { rustix::mm::mmap_anonymous(ptr::null_mut(), room, ProtFlags::empty(), MapFlags::PRIVATE)? };
    let skip = start.align_offset(HUGE_PAGE_BYTES);
    let (first, last) = (start.wrapping_byte_add(skip), start.wrapping_byte_add(skip + len));
    // SAFETY: both ends belong to the mapping just made, and nothing refers to them.
    unsafe {
        if skip > 0 {
            rustix::mm::munmap(start, skip)?;
        }
        if HUGE_PAGE_BYTES > skip {
            rustix::mm::munmap(last, HUGE_PAGE_BYTES - skip)?;
        }
    }
    let first = NonNull::new(first.cast()).ok_or_else(|| io::Error::other("a mapping at address 0"))?;
    Ok((first, len))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::shm::atomics::{AtomicU64, Ordering};

    // SAFETY: an atomic.
    unsafe impl Shared for AtomicU64 {}

    #[test]
    fn two_mappings_show_the_same_bytes() {
        for len in [1, 4096, 3 * HUGE_PAGE_BYTES + 5] {
            let len = len + 4096;
            let (one, fd) = Segment::create(len).unwrap();
            let other = Segment::map(fd.as_fd(), len).unwrap();
            drop(fd);
            one.at::<AtomicU64>(8).store(7, Ordering::Relaxed);
            assert_eq!(other.at::<AtomicU64>(8).load(Ordering::Relaxed), 7);
            // SAFETY: no other slice of this byte is alive.
            unsafe { one.bytes_mut(len - 1..len)[0] = 9 };
            // SAFETY: as above.
            assert_eq!(unsafe { other.bytes(len - 1..len) }, [9]);
        }
    }

    #[test]
    fn what_has_another_size_or_may_change_it_is_not_mapped() {
        let (_segment, fd) = Segment::create(4096).unwrap();
        assert!(Segment::map(fd.as_fd(), 8192).is_err());
        assert!(rustix::fs::ftruncate(&fd, 0).is_err());
        let open = rustix::fs::memfd_create("open", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).unwrap();
        rustix::fs::ftruncate(&open, 4096).unwrap();
        assert!(Segment::map(open.as_fd(), 4096).is_err());
    }

    /// A segment whose pages are all present.
    fn filled(len: usize) -> io::Result<Segment> {
        let (segment, fd) = Segment::create(len)?;
        segment.populate(fd.as_fd(), std::slice::from_ref(&(0..len)))?;
        Ok(segment)
    }

    #[test]
    fn more_than_there_is_is_an_error() {
        assert!(filled(1 << 46).is_err());
    }

    /// Variable that names the control group's directory to the process that the test below starts.
    const GROUP: &str = "BURN_DDP_TEST_GROUP";

    /// If `populate` did not check the limit, the kernel would kill the process.
    #[test]
    fn more_than_a_control_group_allows_is_an_error() {
        use std::process::Command;
        if let Ok(group) = std::env::var(GROUP) {
            std::fs::write(format!("{group}/cgroup.procs"), "0").unwrap();
            let error = filled(256 << 20).unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::OutOfMemory);
            assert!(error.to_string().contains(&group), "{error}");
            drop(filled(16 << 20).unwrap());
            return;
        }
        let name = format!("burn-ddp-test-{}", std::process::id());
        let limited = [("memory", "memory.limit_in_bytes"), ("", "memory.max")].into_iter().find_map(|(part, file)| {
            let group = std::path::Path::new("/sys/fs/cgroup").join(part).join(&name);
            std::fs::create_dir(&group).ok()?;
            if std::fs::write(group.join(file), (64 << 20).to_string()).is_ok() {
                return Some(group);
            }
            std::fs::remove_dir(&group).unwrap();
            None
        });
        let Some(group) = limited else {
            println!("skipped: this test needs the right to limit the memory of a control group");
            return;
        };
        let this = "engine::shm::segment::tests::more_than_a_control_group_allows_is_an_error";
        let program = std::env::current_exe().unwrap();
        let ended = Command::new(program).args(["--exact", this]).env(GROUP, &group).status();
        std::fs::remove_dir(&group).unwrap();
        assert!(ended.as_ref().is_ok_and(|status| status.success()), "{ended:?}");
    }

    #[test]
    #[should_panic(expected = "outside of a segment")]
    fn nothing_is_read_outside() {
        let (segment, _fd) = Segment::create(4096).unwrap();
        segment.at::<AtomicU64>(4096);
    }
}
