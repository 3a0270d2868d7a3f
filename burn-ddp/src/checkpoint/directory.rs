//! The directory of checkpoints on rank 0's machine: its lock, its entries, and writing a new entry durably.

use std::collections::BTreeMap;
use std::fs::{self, File, TryLockError};
use std::io::{self, Write};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};

use tempfile::TempDir;

use super::leftover;
use super::manifest::{self, Checksum, Manifest, VerifyError};
use super::metric::Best;
use super::writer::{Content, Contents};

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

/// Path and manifest of a complete checkpoint.
pub(super) type Found = Option<(PathBuf, String)>;

/// Checkpoints that stay when a new one is written.
#[derive(Clone, Debug, Default)]
pub(super) struct Keep {
    /// Number of the newest complete ones; `None` for all, or, with `best`, for the newest.
    pub(super) last: Option<usize>,
    /// Number of the best complete ones, with the metric and its direction.
    pub(super) best: Option<(usize, String, Best)>,
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

    /// Locks the directory for this job, and removes what earlier jobs left unfinished.
    fn own(&self) -> Result<(), String> {
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

    /// Locks the directory for this job, which saves a checkpoint of `step` next.
    pub(super) fn begin(&self, step: u64) -> Result<(), String> {
        self.own()?;
        let newest = self.owned().as_ref().and_then(|owned| owned.newest);
        if let Some(newest) = newest.filter(|newest| step < *newest) {
            return Err(format!(
                "cannot save step {step}: {} holds a checkpoint of step {newest}; \
                 go on from that (`latest`), or use another directory",
                self.path.display()
            ));
        }
        Ok(())
    }

    /// Makes a temporary directory for the files of a checkpoint of `step`. It is removed on drop.
    pub(super) fn temporary_of(&self, step: u64) -> Result<TempDir, String> {
        self.temporary().map_err(|e| format!("{}: {e}", self.cannot_write(step)))
    }

    /// The work that failed, for errors.
    pub(super) fn cannot_write(&self, step: u64) -> String {
        format!("cannot write the checkpoint of step {step} to {}", self.path.display())
    }

    /// Writes those of `contents` that are not in their `temporary` directory yet, makes that a new checkpoint, and
    /// removes those that are not to be kept. Needs [`begin`](Directory::begin).
    pub(super) fn write(&self, contents: Contents, temporary: TempDir, keep: &Keep) -> Result<(), String> {
        let step = contents.manifest.step;
        let mut owned = self.owned();
        let Some(owned) = owned.as_mut() else { return Err("does not own the directory of checkpoints".into()) };
        let failed = |e: &dyn std::fmt::Display| format!("{}: {e}", self.cannot_write(step));
        let earlier = self.names().map_err(|e| failed(&e))?.into_iter().find(|other| other.step == step);
        let name = Name { step, attempt: earlier.map_or(0, |other| other.attempt + 1) };
        self.commit(&self.path.join(name.to_string()), contents, temporary).map_err(|e| failed(&e))?;
        self.known().insert(name, true);
        owned.newest = Some(step);
        if let Err(e) = self.prune(keep) {
            tracing::warn!("cannot remove old checkpoints from {}: {e}", self.path.display());
        }
        Ok(())
    }

    /// The newest complete checkpoint.
    pub(super) fn newest(&self) -> Result<Found, String> {
        Ok(self.newest_entry()?.map(|entry| self.found(entry)))
    }

    /// The newest complete checkpoint of `step`.
    pub(super) fn at(&self, step: u64) -> Result<Found, String> {
        let of_step = |names: Vec<Name>| Ok(names.into_iter().filter(|name| name.step == step).collect());
        Ok(self.first_complete(of_step)?.map(|entry| self.found(entry)))
    }

    /// The complete checkpoint that is best by `metric`.
    pub(super) fn best(&self, metric: &str, best: Best) -> Result<Found, String> {
        let by_metric = |names: Vec<Name>| {
            let manifests = self.manifests(names)?;
            Ok(best.sort(metric, &manifests).into_iter().copied().collect())
        };
        Ok(self.first_complete(by_metric)?.map(|entry| self.found(entry)))
    }

    /// All checkpoints whose manifests are complete, the newest first.
    pub(super) fn list(&self) -> Result<Vec<(PathBuf, String)>, String> {
        let mut found = Vec::new();
        for name in self.names()? {
            found.extend(self.manifest(name)?.map(|manifest| self.found((name, manifest))));
        }
        Ok(found)
    }

    fn found(&self, (name, manifest): (Name, String)) -> (PathBuf, String) {
        (self.path.join(name.to_string()), manifest)
    }

    /// Manifests of those of the checkpoints that have a complete one, in the order of `names`.
    fn manifests(&self, names: Vec<Name>) -> Result<Vec<(Name, Manifest)>, String> {
        let mut manifests = Vec::new();
        for name in names {
            if let Some(text) = self.manifest(name)? {
                let path = self.path.join(name.to_string());
                let manifest = Manifest::parse(&text).map_err(|e| format!("cannot load {}: {e}", path.display()))?;
                manifests.push((name, manifest));
            }
        }
        Ok(manifests)
    }

    /// Text of a checkpoint's manifest; `None`, with a warning in the log, if it is damaged.
    fn manifest(&self, name: Name) -> Result<Option<String>, String> {
        let path = self.path.join(name.to_string());
        match manifest::read(&path) {
            Ok((text, _)) => Ok(Some(text)),
            Err(VerifyError::Vanished) => Ok(None),
            Err(e @ VerifyError::Corrupt(_)) => {
                tracing::warn!("skipping the corrupt checkpoint {}: {e}", path.display());
                Ok(None)
            }
            Err(e) => Err(format!("cannot read {}: {e}", path.display())),
        }
    }

    fn newest_entry(&self) -> Result<Option<(Name, String)>, String> {
        self.first_complete(Ok)
    }

    /// The first complete checkpoint of those that `order` returns, which gets all of them, the newest first.
    fn first_complete(
        &self,
        order: impl Fn(Vec<Name>) -> Result<Vec<Name>, String>,
    ) -> Result<Option<(Name, String)>, String> {
        'listing: for _ in 0..LISTINGS {
            let names = self.names()?;
            for name in order(names.clone())? {
                let path = self.path.join(name.to_string());
                match self.verify(name) {
                    Ok(manifest) => return Ok(Some((name, manifest))),
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

    fn commit(&self, target: &Path, mut contents: Contents, temporary: TempDir) -> io::Result<()> {
        let write = |name: &str, bytes: &[u8]| {
            let mut file = File::create_new(temporary.path().join(name))?;
            file.write_all(bytes)?;
            file.sync_all()
        };
        for (name, content) in contents.files {
            let checksum = match content {
                Content::Memory(bytes) => {
                    write(&name, &bytes)?;
                    Checksum::of(&bytes)
                }
                Content::Written(checksum) => checksum,
            };
            contents.manifest.files.insert(name, checksum);
        }
        for (name, bytes) in contents.manifest.to_files().map_err(io::Error::other)? {
            write(name, &bytes)?;
        }
        sync_dir(temporary.path())?;
        fs::rename(temporary.path(), target)?;
        let _renamed = temporary.keep();
        sync_dir(&self.path)
    }

    /// Removes the checkpoints that are older than the last complete ones that `keep` wants, but for the best ones.
    /// Damaged ones do not count.
    fn prune(&self, keep: &Keep) -> Result<(), String> {
        if keep.last.is_none() && keep.best.is_none() {
            return Ok(());
        }
        let last = keep.last.unwrap_or(1);
        let names = self.names()?;
        let mut best = Vec::new();
        if let Some((n, metric, direction)) = &keep.best {
            let manifests = self.manifests(names.clone())?;
            let sorted = direction.sort(metric, &manifests).into_iter().copied();
            best.extend(sorted.filter(|name| self.is_complete(*name)).take(*n));
        }
        let mut complete = 0;
        for name in names {
            if complete < last.max(1) {
                complete += usize::from(self.is_complete(name));
            } else if !best.contains(&name) {
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

    /// A directory that is removed on drop.
    fn temporary(&self) -> io::Result<TempDir> {
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

/// Makes the directory and those above it that are missing, durably. Returns its absolute path.
pub(super) fn make(path: &Path) -> Result<PathBuf, String> {
    let made = make_dirs(path, sync_dir).and_then(|()| path.canonicalize());
    made.map_err(|e| format!("cannot make {}: {e}", path.display()))
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
