//! Locks on cores, so that two launchers of this machine never bind ranks to the same core. The lock of a processor is
//! an abstract unix socket, bound for as long as the job lives. A lock file could be left behind, belong to another
//! user or be a link; an abstract socket has no file, and the kernel frees it however the launcher ends. Each network
//! namespace has its own abstract sockets: launchers in different ones do not see each other's locks.

use std::io;
use std::os::unix::net::UnixListener;
use std::time::{Duration, Instant};

/// Name of the lock that a launcher holds while it chooses processors.
const CHOICE: &str = "burn-ddp-cores";
/// Longest time that a launcher waits while others choose.
const PATIENCE: Duration = Duration::from_secs(10);

/// Processors that this process has locked.
pub(super) struct CoreLocks {
    held: Vec<(u16, UnixListener)>,
}

/// This process's turn to choose processors: no other launcher locks any while it is held.
pub(super) struct Turn(#[expect(dead_code, reason = "held")] UnixListener);

impl Turn {
    /// Waits for the turn.
    ///
    /// # Errors
    ///
    /// [`TimedOut`](io::ErrorKind::TimedOut) if another process keeps it for 10 seconds.
    pub(super) fn take() -> io::Result<Turn> {
        let deadline = Instant::now() + PATIENCE;
        loop {
            if let Some(lock) = lock(CHOICE)? {
                return Ok(Turn(lock));
            }
            if Instant::now() >= deadline {
                return Err(io::Error::new(
                    io::ErrorKind::TimedOut,
                    format!("another process has held the abstract unix socket {CHOICE} for 10 s"),
                ));
            }
            std::thread::sleep(Duration::from_millis(2));
        }
    }
}

impl CoreLocks {
    /// Locks each of `processors` that is free; returns the locks, and the processors that other processes have locked.
    pub(super) fn take(_: &Turn, processors: &[u16]) -> io::Result<(CoreLocks, Vec<u16>)> {
        let mut locks = CoreLocks { held: Vec::new() };
        let mut others = Vec::new();
        for processor in processors {
            match lock(&format!("burn-ddp-cpu{processor}"))? {
                Some(lock) => locks.held.push((*processor, lock)),
                None => others.push(*processor),
            }
        }
        Ok((locks, others))
    }

    /// Unlocks the processors for which `unused` holds.
    pub(super) fn give_back(&mut self, unused: impl Fn(u16) -> bool) {
        self.held.retain(|(processor, _)| !unused(*processor));
    }
}

/// Binds the abstract name `name`; `None` if another socket has it.
#[cfg(target_os = "linux")]
fn lock(name: &str) -> io::Result<Option<UnixListener>> {
    use std::os::linux::net::SocketAddrExt;
    use std::os::unix::net::SocketAddr;
    match UnixListener::bind_addr(&SocketAddr::from_abstract_name(name)?) {
        Ok(listener) => Ok(Some(listener)),
        Err(e) if e.kind() == io::ErrorKind::AddrInUse => Ok(None),
        Err(e) => Err(e),
    }
}

#[cfg(not(target_os = "linux"))]
fn lock(_: &str) -> io::Result<Option<UnixListener>> {
    Err(io::ErrorKind::Unsupported.into())
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use super::*;

    #[test]
    fn a_core_is_held_by_one_process_at_a_time() {
        // No machine has these.
        let [a, b, c, d] = [0, 1, 2, 5].map(|nth| 60_000 + nth);
        let turn = Turn::take().unwrap();
        let (mut one, others) = CoreLocks::take(&turn, &[a, b, c]).unwrap();
        assert_eq!(others, [0_u16; 0]);
        one.give_back(|processor| processor == b);
        let (two, others) = CoreLocks::take(&turn, &[a, b, d]).unwrap();
        assert_eq!(others, [a]);
        assert_eq!(two.held.iter().map(|(processor, _)| *processor).collect::<Vec<_>>(), [b, d]);
        drop(one);
        // A child process that another test starts has the socket open, too, between fork and exec.
        let deadline = Instant::now() + Duration::from_secs(60);
        while CoreLocks::take(&turn, &[a, b]).unwrap().1 != [b] {
            assert!(Instant::now() < deadline, "a core that was given back is still held");
        }
    }
}
