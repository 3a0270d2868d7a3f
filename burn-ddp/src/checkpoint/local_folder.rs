//! Checkpoints in a folder of rank 0's machine: the lock of the folder, and the syncs that make a checkpoint durable.

use std::any::Any;
use std::fs::{self, File, TryLockError};
use std::io::{self, ErrorKind};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use tempfile::TempDir;

use super::leftover;
use super::storage::{Storage, TEMPORARY};
use crate::file_failure::FileFailure;

const LOCK: &str = ".lock";

#[derive(Debug)]
pub(super) struct LocalFolder(PathBuf);

/// A file lock, held until it is dropped or the process ends.
#[derive(Debug)]
struct Lock(File);

impl Drop for Lock {
    fn drop(&mut self) {
        // Closing the file would not unlock it while a child process between fork and exec has it open, too.
        let _ = self.0.unlock();
    }
}

impl LocalFolder {
    pub(super) fn new(path: &Path) -> Self {
        LocalFolder(path.to_path_buf())
    }

    fn lock(&self) -> Result<Lock, FileFailure> {
        let path = self.0.join(LOCK);
        let failed = |e: io::Error| FileFailure::of("cannot lock", &path, e);
        let lock = File::options().create(true).truncate(false).write(true).open(&path).map_err(failed)?;
        lock.try_lock().map_err(|e| match e {
            TryLockError::WouldBlock => {
                FileFailure::of("cannot save to", &self.0, "another job saves there").of_kind(ErrorKind::ResourceBusy)
            }
            TryLockError::Error(e) => failed(e),
        })?;
        Ok(Lock(lock))
    }
}

impl Storage for LocalFolder {
    fn own(&self) -> Result<Box<dyn Any + Send>, FileFailure> {
        let lock = self.lock()?;
        leftover::remove_all(&self.0, TEMPORARY).map_err(|e| FileFailure::of("cannot read", &self.0, e))?;
        Ok(Box::new(lock))
    }

    fn names(&self) -> io::Result<Vec<String>> {
        fs::read_dir(&self.0)?.map(|entry| Ok(entry?.file_name().to_string_lossy().into_owned())).collect()
    }

    fn contains(&self, name: &str) -> io::Result<bool> {
        match fs::symlink_metadata(self.0.join(name)) {
            Ok(_) => Ok(true),
            Err(e) if e.kind() == ErrorKind::NotFound => Ok(false),
            Err(e) => Err(e),
        }
    }

    fn open(&self, name: &str, file: &str) -> io::Result<File> {
        File::open(self.0.join(name).join(file))
    }

    fn temporary(&self) -> io::Result<TempDir> {
        let mut builder = tempfile::Builder::new();
        // The umask decides about permissions, as for any directory; temporary files are private by default.
        builder.prefix(TEMPORARY).permissions(fs::Permissions::from_mode(0o777)).tempdir_in(&self.0)
    }

    fn commit(&self, name: &str, temporary: TempDir) -> io::Result<()> {
        sync_dir(temporary.path())?;
        fs::rename(temporary.path(), self.0.join(name))?;
        let _renamed = temporary.keep();
        sync_dir(&self.0)
    }

    fn remove(&self, name: &str) -> io::Result<()> {
        let temporary = self.temporary()?;
        fs::rename(self.0.join(name), temporary.path().join("removed"))?;
        temporary.close()
    }
}

/// Makes the directory and those above it that are missing, durably. Returns its absolute path.
pub(super) fn make(path: &Path) -> Result<PathBuf, FileFailure> {
    if path.is_file() {
        let failure = FileFailure::of("cannot keep checkpoints in", path, "that is a file; give a directory");
        return Err(failure.of_kind(ErrorKind::NotADirectory));
    }
    let made = make_dirs(path, sync_dir).and_then(|()| path.canonicalize());
    made.map_err(|e| FileFailure::of("cannot make the directory", path, e))
}

/// Makes a directory and those above it that are missing, and calls `sync` for the parent of each.
fn make_dirs(path: &Path, mut sync: impl FnMut(&Path) -> io::Result<()>) -> io::Result<()> {
    let missing: Vec<&Path> = path.ancestors().take_while(|level| !level.is_dir()).collect();
    fs::create_dir_all(path)?;
    missing.into_iter().rev().filter_map(Path::parent).try_for_each(|parent| match parent.as_os_str().is_empty() {
        true => sync(Path::new(".")),
        false => sync(parent),
    })
}

fn sync_dir(path: &Path) -> io::Result<()> {
    File::open(path)?.sync_all()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_program_being_started_does_not_keep_the_lock() {
        let dir = tempfile::tempdir().unwrap();
        let folder = LocalFolder::new(dir.path());
        let first = folder.lock().unwrap();
        assert!(folder.own().unwrap_err().to_string().contains("another job saves there"));
        // The file as a child process has it between fork and exec.
        let inherited = first.0.try_clone().unwrap();
        drop(first);
        folder.own().unwrap();
        drop(inherited);
    }

    #[test]
    fn the_parent_of_each_new_level_is_synced() {
        let root = tempfile::tempdir().unwrap();
        let at = |level: &str| root.path().join(level);
        let synced = |path: &str| {
            let mut synced = Vec::new();
            make_dirs(&at(path), |dir| {
                synced.push(dir.to_path_buf());
                sync_dir(dir)
            })
            .unwrap();
            assert!(at(path).is_dir());
            synced
        };
        assert_eq!(synced("a/b/c"), [root.path().to_path_buf(), at("a"), at("a/b")]);
        assert_eq!(synced("a/b/d"), [at("a/b")]);
        assert_eq!(synced("a/b/d"), [] as [PathBuf; 0]);
    }
}
