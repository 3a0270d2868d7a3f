//! The directory of checkpoints on rank 0's machine: its lock, its entries, and writing a new entry durably.

use std::collections::BTreeMap;
use std::fs::{self, File, TryLockError};
use std::io::{self, Write};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};

use super::leftover;
use super::manifest::{self, Checksum, VerifyError};
use super::writer::Contents;

/// Prefix of what is not yet, or no longer, a checkpoint.
const TEMPORARY: &str = ".burn-ddp-";
const LOCK: &str = ".lock";
const PREFIX: &str = "step-";
/// Number of times that the directory is listed while another job removes what was listed.
const LISTINGS: usize = 100;

/// Name of a checkpoint: its step, and how often that step was saved before. Later checkpoints compare greater.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Name {
    step: u64,
    attempt: u32,
}

#[derive(Debug)]
pub(super) struct Directory {
    path: PathBuf,
    owned: Mutex<Option<Owned>>,
    /// Checkpoints that this process has written or compared with their checksums: true if complete, false if damaged.
    known: Mutex<BTreeMap<Name, bool>>,
}

/// State of the job that writes here.
#[derive(Debug)]
struct Owned {
    _lock: Lock,
    /// Step of the newest complete checkpoint.
    newest: Option<u64>,
}

/// A file lock, held until it is dropped or the process ends.
#[derive(Debug)]
struct Lock(File);

impl Drop for Lock {
    fn drop(&mut self) {
        // Closing does not unlock: a child process between fork and exec has the file open, too.
        let _ = self.0.unlock();
    }
}

impl Directory {
    pub(super) fn new(path: &Path) -> Self {
        Directory { path: path.to_path_buf(), owned: Mutex::default(), known: Mutex::default() }
    }

    /// Makes the directory and those above it that are missing, durably.
    pub(super) fn make(&self) -> Result<(), String> {
        make_dirs(&self.path, sync_dir).map_err(|e| format!("cannot make {}: {e}", self.path.display()))
    }

    /// Locks the directory for this job, and removes what earlier jobs left unfinished.
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
        for entry in entries.map_err(|e| self.read_error(&e))? {
            if entry.file_name().to_string_lossy().starts_with(TEMPORARY) {
                leftover::remove(&entry);
            }
        }
        let newest = match self.names()?.first() {
            Some(name) if self.known().get(name) == Some(&true) => Some(*name),
            _ => self.newest_entry()?.map(|(name, _)| name),
        };
        let newest = newest.map(|name| name.step);
        *owned = Some(Owned { _lock: lock, newest });
        Ok(())
    }

    /// Writes `contents` as a new checkpoint, then removes all but the `keep` newest that are complete. Needs
    /// [`own`](Directory::own).
    pub(super) fn write(&self, contents: Contents, keep: Option<usize>) -> Result<(), String> {
        let step = contents.manifest.step;
        let mut owned = self.owned();
        let Some(owned) = owned.as_mut() else { return Err("does not own the directory of checkpoints".into()) };
        if let Some(newest) = owned.newest.filter(|newest| step < *newest) {
            return Err(format!(
                "cannot save step {step}: {} holds a checkpoint of step {newest}; \
                 go on from that (`latest`), or use another directory",
                self.path.display()
            ));
        }
        let failed = |e: &dyn std::fmt::Display| {
            format!("cannot write the checkpoint of step {step} to {}: {e}", self.path.display())
        };
        let earlier = self.names().map_err(|e| failed(&e))?.into_iter().find(|other| other.step == step);
        let name = Name { step, attempt: earlier.map_or(0, |other| other.attempt + 1) };
        self.commit(&self.path.join(name.to_string()), contents).map_err(|e| failed(&e))?;
        self.known().insert(name, true);
        owned.newest = Some(step);
        if let Err(e) = self.prune(keep) {
            tracing::warn!("cannot remove old checkpoints from {}: {e}", self.path.display());
        }
        Ok(())
    }

    /// Path and manifest of the newest complete checkpoint.
    pub(super) fn newest(&self) -> Result<Option<(PathBuf, String)>, String> {
        let entry = self.newest_entry()?;
        Ok(entry.map(|(name, manifest)| (self.path.join(name.to_string()), manifest)))
    }

    fn newest_entry(&self) -> Result<Option<(Name, String)>, String> {
        'listing: for _ in 0..LISTINGS {
            let names = self.names()?;
            for name in &names {
                let path = self.path.join(name.to_string());
                match self.verify(*name) {
                    Ok(manifest) => return Ok(Some((*name, manifest))),
                    Err(e @ VerifyError::Corrupt(_)) => {
                        tracing::warn!("skipping the corrupt checkpoint {}: {e}", path.display())
                    }
                    // Another job removes a checkpoint when it has written a newer one.
                    Err(VerifyError::Vanished) => continue 'listing,
                    Err(e @ VerifyError::Unsupported(_)) => return Err(format!("cannot load {}: {e}", path.display())),
                    Err(e @ VerifyError::Unreadable(_)) => {
                        return Err(format!(
                            "cannot read {}: {e}; try again, or move it away to go on from an older checkpoint",
                            path.display()
                        ));
                    }
                }
            }
            // A listing may miss what is renamed meanwhile.
            if self.names()? == names {
                return Ok(None);
            }
        }
        Err(format!("cannot read {}: checkpoints are removed faster than they are read", self.path.display()))
    }

    /// Compares a checkpoint with its checksums, and notes what is found.
    fn verify(&self, name: Name) -> Result<String, VerifyError> {
        let found = manifest::verify(&self.path.join(name.to_string()));
        match &found {
            Ok(_) => drop(self.known().insert(name, true)),
            Err(VerifyError::Corrupt(_)) => drop(self.known().insert(name, false)),
            Err(_) => {}
        }
        found
    }

    /// Names of all checkpoints, the newest first.
    fn names(&self) -> Result<Vec<Name>, String> {
        let mut names = Vec::new();
        for entry in fs::read_dir(&self.path).map_err(|e| self.read_error(&e))? {
            names.extend(Name::parse(&entry.map_err(|e| self.read_error(&e))?.file_name().to_string_lossy()));
        }
        names.sort_unstable();
        names.reverse();
        Ok(names)
    }

    fn commit(&self, target: &Path, mut contents: Contents) -> io::Result<()> {
        // Removed on drop, unless it was renamed.
        let temporary = self.temporary()?;
        let checksums = contents.files.iter().map(|(name, bytes)| (name.clone(), Checksum::of(bytes)));
        contents.manifest.files = checksums.collect();
        let manifest = contents.manifest.to_files().map_err(io::Error::other)?;
        let files = contents.files.iter().map(|(name, bytes)| (name.as_str(), bytes));
        for (name, bytes) in files.chain(manifest.iter().map(|(name, bytes)| (*name, bytes))) {
            let mut file = File::create_new(temporary.path().join(name))?;
            file.write_all(bytes)?;
            file.sync_all()?;
        }
        sync_dir(temporary.path())?;
        fs::rename(temporary.path(), target)?;
        let _renamed = temporary.keep();
        sync_dir(&self.path)
    }

    /// Removes the checkpoints older than the `keep` newest complete ones. Damaged ones do not count.
    fn prune(&self, keep: Option<usize>) -> Result<(), String> {
        let Some(keep) = keep else { return Ok(()) };
        let mut complete = 0;
        for name in self.names()? {
            if complete < keep.max(1) {
                complete += usize::from(self.is_complete(name));
            } else {
                self.remove(name).map_err(|e| format!("{name}: {e}"))?;
            }
        }
        Ok(())
    }

    /// True if the checkpoint is complete. Reads it, unless this process has read or written it before.
    fn is_complete(&self, name: Name) -> bool {
        let known = self.known().get(&name).copied();
        known.unwrap_or_else(|| match self.verify(name) {
            Ok(_) => true,
            Err(e) => {
                tracing::warn!("{} does not count as a checkpoint: {e}", self.path.join(name.to_string()).display());
                false
            }
        })
    }

    fn remove(&self, name: Name) -> io::Result<()> {
        // Renamed first: a checkpoint never shows with some of its files removed.
        let temporary = self.temporary()?;
        fs::rename(self.path.join(name.to_string()), temporary.path().join("removed"))?;
        temporary.close()
    }

    fn temporary(&self) -> io::Result<tempfile::TempDir> {
        let mut builder = tempfile::Builder::new();
        // The umask decides about permissions, as for any directory; temporary files are private by default.
        builder.prefix(TEMPORARY).permissions(fs::Permissions::from_mode(0o777)).tempdir_in(&self.path)
    }

    fn read_error(&self, e: &io::Error) -> String {
        format!("cannot read {}: {e}", self.path.display())
    }

    fn owned(&self) -> MutexGuard<'_, Option<Owned>> {
        self.owned.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn known(&self) -> MutexGuard<'_, BTreeMap<Name, bool>> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Name {
    /// The inverse of `to_string`; `None` for anything else in the directory.
    fn parse(text: &str) -> Option<Self> {
        let numbers = text.strip_prefix(PREFIX)?;
        let (step, attempt) = numbers.split_once('.').unwrap_or((numbers, "0"));
        let name = Name { step: step.parse().ok()?, attempt: attempt.parse().ok()? };
        (name.to_string() == text).then_some(name)
    }
}

impl std::fmt::Display for Name {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Name { step, attempt } = self;
        match attempt {
            0 => write!(f, "{PREFIX}{step:08}"),
            _ => write!(f, "{PREFIX}{step:08}.{attempt}"),
        }
    }
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
        let first = Directory::new(dir.path());
        first.own().unwrap();
        let second = Directory::new(dir.path());
        assert!(second.own().unwrap_err().contains("another job does"));
        // The file as a child process has it between fork and exec.
        let inherited = first.owned().as_ref().unwrap()._lock.0.try_clone().unwrap();
        drop(first);
        second.own().unwrap();
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

    #[test]
    fn names_are_parsed_back_and_nothing_else_is_a_checkpoint() {
        for (step, attempt) in [(0, 0), (123, 0), (123, 2), (1_234_567_890_123, 0), (u64::MAX, 7)] {
            let name = Name { step, attempt };
            assert_eq!(Name::parse(&name.to_string()), Some(name));
        }
        assert_eq!(Name { step: 123, attempt: 0 }.to_string(), "step-00000123");
        for other in ["step-", "step-123", "step-00000123.0", "step-00000123.x", "step-+0000012", ".lock", "model.bpk"]
        {
            assert_eq!(Name::parse(other), None, "{other}");
        }
    }
}
