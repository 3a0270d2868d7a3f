//! Waits for sockets with a deadline, and a waker that ends such a wait.

use std::io::{self, Read, Write};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, Timespec, poll};

/// The instant `timeout` from now; a century, if the clock cannot express it.
pub(crate) fn deadline_in(timeout: Duration) -> Instant {
    let now = Instant::now();
    now.checked_add(timeout).unwrap_or_else(|| now + Duration::from_secs(100 * 365 * 24 * 3600))
}

/// Waits until one of `fds` is ready; `false` at the deadline. An interrupting signal does not end the wait.
pub(crate) fn wait(fds: &mut [PollFd<'_>], deadline: Option<Instant>) -> io::Result<bool> {
    loop {
        let left = match deadline {
            None => None,
            Some(at) => {
                let left = at.saturating_duration_since(Instant::now());
                Some(Timespec::try_from(left).map_err(io::Error::other)?)
            }
        };
        match poll(fds, left.as_ref()) {
            Ok(0) if deadline.is_some_and(|at| Instant::now() < at) => {}
            Ok(ready) => return Ok(ready > 0),
            Err(rustix::io::Errno::INTR) => {}
            Err(e) => return Err(e.into()),
        }
    }
}

/// Interrupts a [`wait`] from another thread by a byte in a socket pair. Waking never blocks; several wakes before the
/// wait count as one.
#[derive(Debug)]
pub(crate) struct Waker {
    /// Written by the thread that wakes.
    ring: UnixStream,
    /// Polled and emptied by the thread that waits.
    bell: UnixStream,
}

impl Waker {
    pub(crate) fn new() -> io::Result<Self> {
        let (ring, bell) = UnixStream::pair()?;
        ring.set_nonblocking(true)?;
        bell.set_nonblocking(true)?;
        Ok(Self { ring, bell })
    }

    pub(crate) fn wake(&self) {
        // An error means that the buffer is full: a wake is pending already.
        let _ = (&self.ring).write(&[1]);
    }

    /// Forgets the wakes so far. Call it before looking at the state that they announce, never after.
    pub(crate) fn clear(&self) {
        let mut sink = [0; 64];
        while matches!((&self.bell).read(&mut sink), Ok(n) if n == sink.len()) {}
    }
}

impl AsFd for Waker {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.bell.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use rustix::event::PollFlags;

    use super::*;

    fn ready_within(waker: &Waker, time: Duration) -> bool {
        let mut fds = [PollFd::new(waker, PollFlags::IN)];
        wait(&mut fds, Some(Instant::now() + time)).unwrap()
    }

    #[test]
    fn a_wake_ends_the_wait_until_it_is_cleared() {
        let waker = Waker::new().unwrap();
        assert!(!ready_within(&waker, Duration::from_millis(5)));
        std::thread::scope(|s| {
            s.spawn(|| waker.wake());
            assert!(ready_within(&waker, Duration::from_secs(10)));
        });
        waker.clear();
        assert!(!ready_within(&waker, Duration::ZERO));
    }

    #[test]
    fn any_number_of_wakes_neither_blocks_nor_remains() {
        let waker = Waker::new().unwrap();
        for _ in 0..1_000_000 {
            waker.wake();
        }
        waker.clear();
        assert!(!ready_within(&waker, Duration::ZERO));
    }

    #[test]
    fn the_deadline_is_not_undercut() {
        let waker = Waker::new().unwrap();
        let begin = Instant::now();
        assert!(!ready_within(&waker, Duration::from_micros(1500)));
        assert!(begin.elapsed() >= Duration::from_micros(1500));
    }
}
