//! A directory of checkpoints: finding the complete ones, choosing one of them, and writing a new one.

use std::any::Any;
use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, ErrorKind, Write};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tempfile::TempDir;

use super::best_checkpoint::Best;
use super::checkpoint_name::Name;
use super::manifest::{self, Checksum, Manifest, VerifyError};
use super::storage::Storage;
use super::storage_choice;
use super::writer::{Content, Contents};
use crate::file_failure::{FileFailure, FileWork};

/// Largest number of listings of the directory while another job keeps removing listed checkpoints.
const LISTINGS: usize = 100;

/// Path and manifest of a complete checkpoint.
pub(super) type Found = Option<(PathBuf, String)>;

/// Result of a search for a complete checkpoint.
struct Search {
    complete: Option<(Name, String)>,
    /// Damaged checkpoints that were verified before the complete one was found, each with its damage.
    damaged: Vec<String>,
}

/// Checkpoints to verify, in this order.
struct Candidates {
    names: Vec<Name>,
    /// Checkpoints whose manifest is damaged, so that they have no place in the order; each with its damage.
    damaged: Vec<String>,
}

/// Manifests of checkpoints.
#[derive(Default)]
struct Manifests {
    complete: Vec<(Name, Manifest)>,
    /// Checkpoints whose manifest is damaged, each with its damage.
    damaged: Vec<String>,
}

impl From<Vec<Name>> for Candidates {
    fn from(names: Vec<Name>) -> Self {
        Candidates { names, damaged: Vec::new() }
    }
}

/// Checkpoints that stay when a new one is written.
#[derive(Clone, Debug, Default)]
pub(super) struct Keep {
    /// Number of newest complete checkpoints; `None` for all, or, with `best`, for the newest alone.
    pub(super) last: Option<usize>,
    /// Number of best complete checkpoints, with the metric and its direction.
    pub(super) best: Option<(usize, String, Best)>,
}

#[derive(Debug)]
pub(super) struct Directory {
    path: PathBuf,
    pub(super) storage: Arc<dyn Storage>,
    owned: Mutex<Option<Owned>>,
    /// Checkpoints that this process has written or compared with their checksums: true if complete, false if damaged.
    known: Mutex<BTreeMap<Name, bool>>,
}

/// State of the job that writes here.
#[derive(Debug)]
struct Owned {
    _lock: Box<dyn Any + Send>,
    /// Step of the newest complete checkpoint.
    newest: Option<u64>,
}

impl Directory {
    pub(super) fn new(path: &Path) -> Self {
        let storage = storage_choice::open(path);
        Directory { path: path.to_path_buf(), storage, owned: Mutex::default(), known: Mutex::default() }
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// Locks the directory for this job, and removes unfinished checkpoints of earlier jobs.
    fn own(&self) -> Result<(), FileFailure> {
        let mut owned = self.owned();
        if owned.is_some() {
            return Ok(());
        }
        let lock = self.storage.own()?;
        let newest = match self.names()?.first() {
            Some(name) if self.known().get(name) == Some(&true) => Some(*name),
            _ => self.first_complete(|names| Ok(names.into()))?.complete.map(|(name, _)| name),
        };
        let newest = newest.map(|name| name.step);
        *owned = Some(Owned { _lock: lock, newest });
        Ok(())
    }

    /// Locks the directory for this job, which saves a checkpoint of `step` next.
    pub(super) fn begin(&self, step: u64) -> Result<(), FileFailure> {
        self.own()?;
        let newest = self.owned().as_ref().and_then(|owned| owned.newest);
        if let Some(newest) = newest.filter(|newest| step < *newest) {
            let reason = format!(
                "cannot save step {step}: {} holds a checkpoint of step {newest}; \
                 go on from that (`latest`), or use another directory",
                self.path.display()
            );
            return Err(FileFailure::from(reason).at(&self.path));
        }
        Ok(())
    }

    /// Makes a temporary directory for the files of a checkpoint of `step`. It is removed on drop.
    pub(super) fn temporary_of(&self, step: u64) -> Result<TempDir, FileFailure> {
        self.storage.temporary().map_err(|e| self.writing(step).failed(e))
    }

    /// The writing of a checkpoint, for errors.
    pub(super) fn writing(&self, step: u64) -> FileWork {
        let cannot = format!("cannot write the checkpoint of step {step} to {}", self.path.display());
        FileWork { cannot, path: Some(self.path.clone()) }
    }

    /// Writes the files of `contents` that are not in the `temporary` directory yet, makes the directory a new
    /// checkpoint, and removes the checkpoints that `keep` does not keep. [`begin`](Directory::begin) must have
    /// succeeded before. Returns the path of the checkpoint.
    pub(super) fn write(&self, contents: Contents, temporary: TempDir, keep: &Keep) -> Result<PathBuf, FileFailure> {
        let step = contents.manifest.step;
        let mut owned = self.owned();
        let Some(owned) = owned.as_mut() else { return Err("does not own the directory of checkpoints".into()) };
        let writing = self.writing(step);
        let earlier = self.names().map_err(|e| writing.failed(e))?.into_iter().find(|other| other.step == step);
        let name = Name { step, attempt: earlier.map_or(0, |other| other.attempt + 1) };
        fill(temporary.path(), contents).map_err(|e| writing.failed(e))?;
        self.storage.commit(&name.to_string(), temporary).map_err(|e| writing.failed(e))?;
        self.known().insert(name, true);
        owned.newest = Some(step);
        if let Err(e) = self.prune(keep) {
            tracing::warn!("cannot remove old checkpoints from {}: {e}", self.path.display());
        }
        Ok(self.path.join(name.to_string()))
    }

    /// The newest complete checkpoint.
    pub(super) fn newest(&self) -> Result<Found, FileFailure> {
        self.found_by(self.first_complete(|names| Ok(names.into()))?)
    }

    /// The newest complete checkpoint of `step`.
    pub(super) fn at(&self, step: u64) -> Result<Found, FileFailure> {
        let of_step =
            |names: Vec<Name>| Ok(names.into_iter().filter(|name| name.step == step).collect::<Vec<_>>().into());
        self.found_by(self.first_complete(of_step)?)
    }

    /// The complete checkpoint that is best by `metric`.
    pub(super) fn best(&self, metric: &str, best: Best) -> Result<Found, FileFailure> {
        let by_metric = |names: Vec<Name>| {
            let Manifests { complete, damaged } = self.manifests(names)?;
            Ok(Candidates { names: best.sort(metric, &complete).into_iter().copied().collect(), damaged })
        };
        self.found_by(self.first_complete(by_metric)?)
    }

    /// The result of `search`. If all checkpoints are damaged, it is an error and not `None`: a caller would take
    /// `None` for an empty directory, and begin the training anew.
    fn found_by(&self, search: Search) -> Result<Found, FileFailure> {
        match search.complete {
            None => self.refuse_damaged(&search.damaged).map(|()| None),
            complete => Ok(complete.map(|entry| self.found(entry))),
        }
    }

    /// Fails if there are damaged checkpoints.
    fn refuse_damaged(&self, damaged: &[String]) -> Result<(), FileFailure> {
        if damaged.is_empty() {
            return Ok(());
        }
        let reason = format!(
            "cannot load a checkpoint from {}, damaged: {}. To begin without, move what is damaged away, or use \
             another directory",
            self.path.display(),
            damaged.join("; ")
        );
        Err(FileFailure::from(reason).at(&self.path).of_kind(ErrorKind::InvalidData))
    }

    /// All checkpoints whose manifests are complete, the newest first. An error if all are damaged.
    pub(super) fn list(&self) -> Result<Vec<(PathBuf, String)>, FileFailure> {
        let (mut found, mut damaged) = (Vec::new(), Vec::new());
        for name in self.names()? {
            match self.manifest(name)? {
                Some(Ok(manifest)) => found.push(self.found((name, manifest))),
                Some(Err(damage)) => damaged.push(damage),
                None => {}
            }
        }
        if found.is_empty() {
            self.refuse_damaged(&damaged)?;
        }
        Ok(found)
    }

    fn found(&self, (name, manifest): (Name, String)) -> (PathBuf, String) {
        (self.path.join(name.to_string()), manifest)
    }

    /// Manifests of these checkpoints, in their order.
    fn manifests(&self, names: Vec<Name>) -> Result<Manifests, FileFailure> {
        let mut found = Manifests::default();
        for name in names {
            match self.manifest(name)? {
                Some(Ok(text)) => {
                    let path = self.path.join(name.to_string());
                    let failed = |e: String| VerifyError::Unsupported(e).failure("cannot load", &path);
                    let manifest = Manifest::parse(&text).map_err(failed)?;
                    found.complete.push((name, manifest));
                }
                Some(Err(damage)) => found.damaged.push(damage),
                None => {}
            }
        }
        Ok(found)
    }

    /// Text of a checkpoint's manifest, or its damage, which is also logged. `None` if the checkpoint was removed.
    fn manifest(&self, name: Name) -> Result<Option<Result<String, String>>, FileFailure> {
        let path = self.path.join(name.to_string());
        match manifest::read(&*self.storage, &name.to_string()) {
            Ok((text, _)) => Ok(Some(Ok(text))),
            Err(VerifyError::Vanished) => Ok(None),
            Err(e @ VerifyError::Corrupt(_)) => {
                tracing::warn!("skipping the corrupt checkpoint {}: {e}", path.display());
                Ok(Some(Err(format!("{name}: {e}"))))
            }
            Err(e) => Err(e.failure("cannot read", &path)),
        }
    }

    /// The first complete checkpoint in the order that `order` makes of all checkpoints, which it gets newest first.
    fn first_complete(
        &self,
        order: impl Fn(Vec<Name>) -> Result<Candidates, FileFailure>,
    ) -> Result<Search, FileFailure> {
        'listing: for _ in 0..LISTINGS {
            let names = self.names()?;
            let Candidates { names: ordered, mut damaged } = order(names.clone())?;
            for name in ordered {
                let path = self.path.join(name.to_string());
                match self.verify(name) {
                    Ok(manifest) => return Ok(Search { complete: Some((name, manifest)), damaged }),
                    Err(e @ VerifyError::Corrupt(_)) => {
                        tracing::warn!("skipping the corrupt checkpoint {}: {e}", path.display());
                        damaged.push(format!("{name}: {e}"));
                    }
                    // Another job removes a checkpoint when it has written a newer one.
                    Err(VerifyError::Vanished) => continue 'listing,
                    Err(e @ VerifyError::Unsupported(_)) => return Err(e.failure("cannot load", &path)),
                    Err(VerifyError::Unreadable(kind, e)) => {
                        let e = format!("{e}; try again, or move it away to go on from an older checkpoint");
                        return Err(VerifyError::Unreadable(kind, e).failure("cannot read", &path));
                    }
                }
            }
            // A listing may miss a checkpoint that is renamed meanwhile.
            if self.names()? == names {
                return Ok(Search { complete: None, damaged });
            }
        }
        Err(self.cannot_read("checkpoints are removed faster than they are read"))
    }

    /// Compares a checkpoint with its checksums, and notes in `known` whether it is complete.
    fn verify(&self, name: Name) -> Result<String, VerifyError> {
        let found = manifest::verify(&*self.storage, &name.to_string());
        match &found {
            Ok(_) => drop(self.known().insert(name, true)),
            Err(VerifyError::Corrupt(_)) => drop(self.known().insert(name, false)),
            Err(_) => {}
        }
        found
    }

    /// Names of all checkpoints, the newest first.
    fn names(&self) -> Result<Vec<Name>, FileFailure> {
        let found = self.storage.names().map_err(|e| self.cannot_read(e))?;
        let mut names: Vec<Name> = found.iter().filter_map(|name| Name::parse(name)).collect();
        names.sort_unstable();
        names.reverse();
        Ok(names)
    }

    fn cannot_read(&self, cause: impl Into<FileFailure>) -> FileFailure {
        FileFailure::of("cannot read", &self.path, cause)
    }

    /// Removes the checkpoints that are older than the newest complete ones that `keep` keeps, except the best ones.
    /// Damaged ones do not count. Nothing is removed if a checkpoint cannot be read now, since it may be one of the
    /// best.
    fn prune(&self, keep: &Keep) -> Result<(), FileFailure> {
        if keep.last.is_none() && keep.best.is_none() {
            return Ok(());
        }
        let last = keep.last.unwrap_or(1);
        let names = self.names()?;
        let mut best = Vec::new();
        if let Some((n, metric, direction)) = &keep.best {
            let manifests = self.manifests(names.clone())?.complete;
            for name in direction.sort(metric, &manifests) {
                if best.len() < *n && self.is_complete(*name)? {
                    best.push(*name);
                }
            }
        }
        let mut complete = 0;
        for name in names {
            if complete < last.max(1) {
                complete += usize::from(self.is_complete(name)?);
            } else if !best.contains(&name) {
                self.storage.remove(&name.to_string()).map_err(|e| format!("{name}: {e}"))?;
            }
        }
        Ok(())
    }

    /// True if the checkpoint is complete. Reads it, unless this process has read or written it before; an error if it
    /// cannot be read now.
    fn is_complete(&self, name: Name) -> Result<bool, FileFailure> {
        if let Some(known) = self.known().get(&name) {
            return Ok(*known);
        }
        match self.verify(name) {
            Ok(_) => Ok(true),
            Err(VerifyError::Unreadable(_, reason)) => Err(format!("{name}: {reason}").into()),
            Err(e) => {
                tracing::warn!("{} does not count as a checkpoint: {e}", self.path.join(name.to_string()).display());
                Ok(false)
            }
        }
    }

    fn owned(&self) -> MutexGuard<'_, Option<Owned>> {
        self.owned.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn known(&self) -> MutexGuard<'_, BTreeMap<Name, bool>> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Writes the files of `contents` that are not in `folder` yet, the manifest last.
fn fill(folder: &Path, mut contents: Contents) -> io::Result<()> {
    let write = |name: &str, bytes: &[u8]| {
        let mut file = File::create_new(folder.join(name))?;
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
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, Ordering};

    use super::*;

    const MODEL: &str = "model.bpk";

    /// A folder whose models cannot be read for a while.
    #[derive(Debug)]
    struct Unsteady {
        folder: Arc<dyn Storage>,
        fails: Arc<AtomicBool>,
    }

    impl Storage for Unsteady {
        fn own(&self) -> Result<Box<dyn Any + Send>, FileFailure> {
            self.folder.own()
        }

        fn names(&self) -> io::Result<Vec<String>> {
            self.folder.names()
        }

        fn contains(&self, name: &str) -> io::Result<bool> {
            self.folder.contains(name)
        }

        fn open(&self, name: &str, file: &str) -> io::Result<File> {
            let fails = file == MODEL && self.fails.load(Ordering::Relaxed);
            if fails { Err(ErrorKind::TimedOut.into()) } else { self.folder.open(name, file) }
        }

        fn temporary(&self) -> io::Result<TempDir> {
            self.folder.temporary()
        }

        fn commit(&self, name: &str, temporary: TempDir) -> io::Result<()> {
            self.folder.commit(name, temporary)
        }

        fn remove(&self, name: &str) -> io::Result<()> {
            self.folder.remove(name)
        }
    }

    #[test]
    fn a_checkpoint_that_cannot_be_read_for_a_while_is_not_removed() {
        let path = tempfile::tempdir().unwrap();
        for step in 1..=3 {
            let folder = path.path().join(Name { step, attempt: 0 }.to_string());
            std::fs::create_dir(&folder).unwrap();
            let mut manifest = Manifest::new(step, 1);
            manifest.files.insert(MODEL.into(), Checksum::of(b"weights"));
            manifest.values.insert("loss".into(), step.into());
            std::fs::write(folder.join(MODEL), b"weights").unwrap();
            for (name, bytes) in manifest.to_files().unwrap() {
                std::fs::write(folder.join(name), bytes).unwrap();
            }
        }
        let fails = Arc::new(AtomicBool::new(true));
        let mut directory = Directory::new(path.path());
        directory.storage = Arc::new(Unsteady { folder: directory.storage.clone(), fails: fails.clone() });
        let keep = Keep { last: Some(1), best: Some((1, "loss".into(), Best::Lowest)) };
        let steps = || directory.names().unwrap().iter().map(|name| name.step).collect::<Vec<_>>();
        let error = directory.prune(&keep).unwrap_err().to_string();
        assert!(error.contains(MODEL), "{error}");
        assert_eq!(steps(), [3, 2, 1]);
        fails.store(false, Ordering::Relaxed);
        directory.prune(&keep).unwrap();
        assert_eq!(steps(), [3, 1]);
    }
}
