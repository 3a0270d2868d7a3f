//! Locks on cores, so that no two launchers of this machine bind ranks to the same: a file per processor, locked for
//! as long as the job lives. The kernel unlocks the files of a launcher that is killed.

use std::fs::{self, File, OpenOptions, Permissions, TryLockError};
use std::io;
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};

/// Processors that this process holds, each with the lock of its file.
pub(super) struct CoreLocks {
    held: Vec<(u16, Lock)>,
    /// A lock on the directory, which keeps services that clean up old files out of it.
    _directory: Lock,
}

/// A locked file.
struct Lock(File);

/// Unlocks it, also for copies of the descriptor in child processes that are about to become other programs.
impl Drop for Lock {
    fn drop(&mut self) {
        // It was locked, and closing unlocks it too.
        let _ = self.0.unlock();
    }
}

/// Directory of the files, the same for all users of this machine.
pub(super) fn directory() -> PathBuf {
    std::env::temp_dir().join("burn-ddp-cores")
}

impl CoreLocks {
    /// Locks those of `processors` that are free; yields the locks, and the processors that other processes hold.
    pub(super) fn take(directory: &Path, processors: &[u16]) -> io::Result<(CoreLocks, Vec<u16>)> {
        if fs::create_dir(directory).is_ok() {
            // Other users make files as well, and none removes another's.
            fs::set_permissions(directory, Permissions::from_mode(0o1777))?;
        }
        let guard = File::open(directory)?;
        guard.lock_shared()?;
        let mut locks = CoreLocks { held: Vec::new(), _directory: Lock(guard) };
        let mut others = Vec::new();
        for processor in processors {
            let file = open(&directory.join(format!("cpu{processor}")))?;
            match file.try_lock() {
                Ok(()) => locks.held.push((*processor, Lock(file))),
                Err(TryLockError::WouldBlock) => others.push(*processor),
                Err(TryLockError::Error(e)) => return Err(e),
            }
        }
        Ok((locks, others))
    }

    /// Unlocks the processors for which `unused` holds.
    pub(super) fn give_back(&mut self, unused: impl Fn(u16) -> bool) {
        self.held.retain(|(processor, _)| !unused(*processor));
    }
}

/// A file that may be another user's: a lock needs no right to write it.
fn open(path: &Path) -> io::Result<File> {
    let plain = || OpenOptions::new().read(true).custom_flags(libc::O_NOFOLLOW).open(path);
    match plain() {
        Err(e) if e.kind() == io::ErrorKind::NotFound => {
            match OpenOptions::new().write(true).create_new(true).mode(0o644).open(path) {
                // Another launcher was faster.
                Err(e) if e.kind() == io::ErrorKind::AlreadyExists => plain(),
                other => other,
            }
        }
        other => other,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_core_is_held_by_one_process_at_a_time() {
        let directory = tempfile::tempdir().unwrap();
        let directory = directory.path().join("cores");
        let (mut one, others) = CoreLocks::take(&directory, &[0, 1, 2]).unwrap();
        assert_eq!(others, [0_u16; 0]);
        one.give_back(|processor| processor == 1);
        let (two, others) = CoreLocks::take(&directory, &[0, 1, 5]).unwrap();
        assert_eq!(others, [0]);
        assert_eq!(two.held.iter().map(|(processor, _)| *processor).collect::<Vec<_>>(), [1, 5]);
        drop(one);
        let (_, others) = CoreLocks::take(&directory, &[0, 1]).unwrap();
        assert_eq!(others, [1]);
    }

    #[test]
    fn a_link_is_not_followed() {
        let directory = tempfile::tempdir().unwrap();
        let target = directory.path().join("target");
        std::os::unix::fs::symlink(&target, directory.path().join("cpu0")).unwrap();
        assert!(CoreLocks::take(directory.path(), &[0]).is_err());
        assert!(!target.exists());
    }
}
