//! The directory of checkpoints on rank 0's machine: what is in it, and how something gets there.

use std::fs::{self, File, TryLockError};
use std::io::{self, Write};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};

use super::writer::Contents;
use super::manifest::{self, Unfit};

/// Of what is not, or no longer, a checkpoint.
const TEMPORARY: &str = ".burn-ddp-";
const LOCK: &str = ".lock";
const PREFIX: &str = "step-";

/// Where a checkpoint stands among the others: its step, and how often that step was saved before.
type Place = (u64, u32);

#[derive(Debug)]
pub(super) struct Directory {
    path: PathBuf,
    owned: Mutex<Option<Owned>>,
}

/// What the one job that writes knows.
#[derive(Debug)]
struct Owned {
    _lock: Lock,
    /// Step of the newest complete checkpoint.
    newest: Option<u64>,
}

/// Held until it is dropped, or the process ends.
#[derive(Debug)]
struct Lock(File);

impl Drop for Lock {
    fn drop(&mut self) {
        // Closing would not do: a program that another thread is about to start has the file open as well until it runs.
        let _ = self.0.unlock();
    }
}

impl Directory {
    pub(super) fn new(path: &Path) -> Self {
        Directory { path: path.to_path_buf(), owned: Mutex::new(None) }
    }

    pub(super) fn make(&self) -> Result<(), String> {
        let make = || {
            if self.path.is_dir() {
                return Ok(());
            }
            fs::create_dir_all(&self.path)?;
            sync_dir(&parent(&self.path))
        };
        make().map_err(|e: io::Error| format!("cannot make {}: {e}", self.path.display()))
    }

    /// From now on only this job writes here. Removes what earlier ones left unfinished.
    pub(super) fn own(&self) -> Result<(), String> {
        let mut owned = self.owned();
        if owned.is_some() {
            return Ok(());
        }
        let path = self.path.join(LOCK);
        let failed = |e: io::Error| format!("cannot lock {}: {e}", path.display());
        let lock = File::options().create(true).truncate(false).write(true).open(&path).map_err(failed)?;
        lock.try_lock().map_err(|e| match e {
            TryLockError::WouldBlock => format!("cannot save to {}: another job does", self.path.display()),
            TryLockError::Error(e) => failed(e),
        })?;
        let lock = Lock(lock);
        let entries = fs::read_dir(&self.path).and_then(|entries| entries.collect::<io::Result<Vec<_>>>());
        for entry in entries.map_err(|e| self.unreadable(&e))? {
            if entry.file_name().to_string_lossy().starts_with(TEMPORARY) {
                tracing::info!(path = %entry.path().display(), "removing a checkpoint that was not finished");
                fs::remove_dir_all(entry.path())
                    .map_err(|e| format!("cannot remove {}: {e}", entry.path().display()))?;
            }
        }
        let newest = self.newest_place()?.map(|((step, _), _)| step);
        *owned = Some(Owned { _lock: lock, newest });
        Ok(())
    }

    /// Makes a checkpoint of `contents`, then removes all but the `keep` newest. Called after [`own`](Directory::own).
    pub(super) fn write(&self, contents: Contents, keep: Option<usize>) -> Result<(), String> {
        let step = contents.manifest.step;
        let mut owned = self.owned();
        let Some(owned) = owned.as_mut() else { return Err("does not own the directory of checkpoints".into()) };
        if let Some(newest) = owned.newest.filter(|newest| step < *newest) {
            return Err(format!(
                "cannot save step {step}: {} holds a checkpoint of step {newest}; go on from that (`latest`), or use another directory",
                self.path.display()
            ));
        }
        let written = self.commit(contents);
        written.map_err(|e| format!("cannot write the checkpoint of step {step} to {}: {e}", self.path.display()))?;
        owned.newest = Some(step);
        if let Err(e) = self.prune(keep) {
            tracing::warn!("cannot remove old checkpoints from {}: {e}", self.path.display());
        }
        Ok(())
    }

    /// Path and manifest of the newest complete checkpoint.
    pub(super) fn newest(&self) -> Result<Option<(PathBuf, String)>, String> {
        let found = self.newest_place()?;
        Ok(found.map(|(place, manifest)| (self.path.join(name(place)), manifest)))
    }

    fn newest_place(&self) -> Result<Option<(Place, String)>, String> {
        for place in self.places().map_err(|e| self.unreadable(&e))? {
            let path = self.path.join(name(place));
            match manifest::verify(&path) {
                Ok(manifest) => return Ok(Some((place, manifest))),
                Err(Unfit::Damaged(reason)) => {
                    tracing::warn!("passing over the checkpoint {}: {reason}", path.display())
                }
                Err(Unfit::Foreign(reason)) => return Err(format!("cannot load {}: {reason}", path.display())),
            }
        }
        Ok(None)
    }

    /// All checkpoints, the newest first.
    fn places(&self) -> io::Result<Vec<Place>> {
        let mut places = Vec::new();
        for entry in fs::read_dir(&self.path)? {
            places.extend(place(&entry?.file_name().to_string_lossy()));
        }
        places.sort_unstable();
        places.reverse();
        Ok(places)
    }

    fn commit(&self, contents: Contents) -> io::Result<()> {
        let step = contents.manifest.step;
        // Removes it all unless it was renamed.
        let temporary = self.temporary()?;
        let manifest = contents.manifest.to_files().map_err(io::Error::other)?;
        let files = contents.files.iter().map(|(name, bytes)| (name.as_str(), bytes));
        for (name, bytes) in files.chain(manifest.iter().map(|(name, bytes)| (*name, bytes))) {
            let mut file = File::create_new(temporary.path().join(name))?;
            file.write_all(bytes)?;
            file.sync_all()?;
        }
        sync_dir(temporary.path())?;
        let again = self.places()?.into_iter().find(|(other, _)| *other == step).map_or(0, |(_, again)| again + 1);
        fs::rename(temporary.path(), self.path.join(name((step, again))))?;
        let _renamed = temporary.keep();
        sync_dir(&self.path)
    }

    /// The newest was complete a moment ago, and stays.
    fn prune(&self, keep: Option<usize>) -> io::Result<()> {
        let Some(keep) = keep else { return Ok(()) };
        for place in self.places()?.into_iter().skip(keep.max(1)) {
            // Its name is gone at once, its files one after another.
            let temporary = self.temporary()?;
            fs::rename(self.path.join(name(place)), temporary.path().join("removed"))?;
            temporary.close()?;
        }
        Ok(())
    }

    fn temporary(&self) -> io::Result<tempfile::TempDir> {
        let mut builder = tempfile::Builder::new();
        // As any directory: the umask decides, not the privacy of temporary files.
        builder.prefix(TEMPORARY).permissions(fs::Permissions::from_mode(0o777)).tempdir_in(&self.path)
    }

    fn unreadable(&self, e: &io::Error) -> String {
        format!("cannot read {}: {e}", self.path.display())
    }

    fn owned(&self) -> MutexGuard<'_, Option<Owned>> {
        self.owned.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn name((step, again): Place) -> String {
    match again {
        0 => format!("{PREFIX}{step:08}"),
        _ => format!("{PREFIX}{step:08}.{again}"),
    }
}

/// The inverse of [`name`].
fn place(text: &str) -> Option<Place> {
    let (step, again) = text.strip_prefix(PREFIX)?.split_once('.').unwrap_or((text.strip_prefix(PREFIX)?, "0"));
    let place = (step.parse().ok()?, again.parse().ok()?);
    (name(place) == text).then_some(place)
}

fn parent(path: &Path) -> PathBuf {
    match path.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent.to_path_buf(),
        _ => PathBuf::from("."),
    }
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
        let first = Directory::new(dir.path());
        first.own().unwrap();
        let second = Directory::new(dir.path());
        assert!(second.own().unwrap_err().contains("another job does"));
        // What a child has between fork and exec.
        let inherited = first.owned().as_ref().unwrap()._lock.0.try_clone().unwrap();
        drop(first);
        second.own().unwrap();
        drop(inherited);
    }

    #[test]
    fn names_and_places_go_together_and_nothing_else_is_a_checkpoint() {
        for place_of in [(0, 0), (123, 0), (123, 2), (1_234_567_890_123, 0), (u64::MAX, 7)] {
            assert_eq!(place(&name(place_of)), Some(place_of));
        }
        assert_eq!(name((123, 0)), "step-00000123");
        for other in ["step-", "step-123", "step-00000123.0", "step-00000123.x", "step-+0000012", ".lock", "model.bpk"]
        {
            assert_eq!(place(other), None, "{other}");
        }
    }
}
