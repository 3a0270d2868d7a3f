//! The directory into which the ranks of a generation write their reports.

use std::fmt;
use std::fs::{self, DirEntry, File};
use std::io;
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::time::Duration;

use rustix::fs::{FlockOperation, flock};
use rustix::process::geteuid;

use crate::error::LaunchError;
use crate::output::log_dir::JobDir;

/// Names of temporary directories begin with this.
const PREFIX: &str = "burn-ddp-";
/// Age after which a directory without a lock counts as abandoned. A launcher locks its new directory at once.
const ABANDONED: Duration = Duration::from_secs(60);
/// File in a temporary directory with the [`Origin`] of its launcher.
const ORIGIN: &str = ".launcher";

/// Directory for reports. A temporary one is removed on drop; by the guardian if this process was killed; by the next
/// launcher of this user if both were killed.
pub(crate) enum ReportDir {
    Permanent(PathBuf),
    Temporary {
        path: PathBuf,
        /// Lock on the directory. The kernel frees it when this process ends, also if it is killed.
        _lock: File,
    },
}

impl ReportDir {
    pub(crate) fn create(
        job_dir: Option<&JobDir>,
        generation: u32,
        node: usize,
        job_id: &str,
    ) -> Result<Self, LaunchError> {
        if let Some(dir) = job_dir {
            let made = dir.generation(generation);
            let failed = |source| LaunchError::LogDir { path: dir.path().to_owned(), source };
            return made.map(Self::Permanent).map_err(failed);
        }
        let directory = std::env::temp_dir();
        let origin = Origin::own();
        remove_abandoned(&directory, &origin);
        let path = directory.join(format!("{PREFIX}{job_id}-{node}"));
        // An empty container has no /tmp.
        let made = fs::create_dir_all(directory)
            .and_then(|()| fs::DirBuilder::new().mode(0o700).create(&path))
            .and_then(|()| fs::write(path.join(ORIGIN), origin.to_string()))
            .and_then(|()| File::open(&path));
        match made {
            Ok(opened) => {
                if let Err(error) = flock(&opened, FlockOperation::NonBlockingLockExclusive) {
                    tracing::debug!(%error, path = %path.display(), "no locks in this file system");
                }
                Ok(Self::Temporary { path, _lock: opened })
            }
            Err(source) => Err(LaunchError::LogDir { path, source }),
        }
    }

    pub(crate) fn path(&self) -> &Path {
        match self {
            Self::Permanent(path) | Self::Temporary { path, .. } => path,
        }
    }

    /// Path that the guardian removes if this process is killed; `None` for a permanent directory.
    pub(crate) fn temporary(&self) -> Option<&Path> {
        match self {
            Self::Permanent(_) => None,
            Self::Temporary { path, .. } => Some(path),
        }
    }
}

impl Drop for ReportDir {
    fn drop(&mut self) {
        if let Some(path) = self.temporary()
            && let Err(error) = fs::remove_dir_all(path)
        {
            tracing::warn!(%error, path = %path.display(), "a temporary directory cannot be removed");
        }
    }
}

/// Machine of a launcher and its boot. It is compared because machines may share a temporary directory whose locks they
/// do not share.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Origin {
    host: String,
    /// Id of the boot; empty if the system has none.
    boot: String,
}

impl Origin {
    fn own() -> Self {
        let host = rustix::system::uname().nodename().to_string_lossy().into_owned();
        let boot = fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
        Self { host, boot: boot.trim().to_owned() }
    }

    fn parse(text: &str) -> Option<Self> {
        let (host, boot) = text.split_once('\n')?;
        Some(Self { host: host.to_owned(), boot: boot.trim().to_owned() })
    }
}

impl fmt::Display for Origin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{}\n{}", self.host, self.boot)
    }
}

/// Removes the directories in `temporary` whose launchers, on this machine, were killed together with their guardians.
fn remove_abandoned(temporary: &Path, own: &Origin) {
    for entry in fs::read_dir(temporary).into_iter().flatten().flatten() {
        match is_abandoned(&entry, own) {
            Ok(None) => {}
            // The lock is held during the removal, so that two launchers that start together do not both remove it.
            Ok(Some(_lock)) => match fs::remove_dir_all(entry.path()) {
                Ok(()) => tracing::info!(path = %entry.path().display(), "removed the files of a killed launcher"),
                Err(error) => tracing::debug!(%error, path = %entry.path().display(), "cannot remove a directory"),
            },
            // Usually another launcher has removed the entry in the meantime.
            Err(error) => tracing::debug!(%error, path = %entry.path().display(), "cannot examine a directory"),
        }
    }
}

/// The lock on an abandoned directory; `None` if the entry is anything else.
fn is_abandoned(entry: &DirEntry, own: &Origin) -> io::Result<Option<File>> {
    let named = entry.file_name().to_str().is_some_and(is_report_dir);
    if !named || !entry.file_type()?.is_dir() {
        return Ok(None);
    }
    let about = entry.metadata()?;
    let is_old = about.modified()?.elapsed().is_ok_and(|age| age > ABANDONED);
    if !is_old || about.uid() != geteuid().as_raw() {
        return Ok(None);
    }
    let Some(origin) = Origin::parse(&fs::read_to_string(entry.path().join(ORIGIN))?) else { return Ok(None) };
    if origin.host != own.host {
        return Ok(None);
    }
    let opened = File::open(entry.path())?;
    let is_locked = flock(&opened, FlockOperation::NonBlockingLockExclusive).is_err();
    // A directory of an earlier boot is abandoned even if it seems locked: its launcher cannot be running.
    Ok((origin.boot != own.boot || !is_locked).then_some(opened))
}

/// True for a name that [`ReportDir::create`] gives.
fn is_report_dir(name: &str) -> bool {
    name.strip_prefix(PREFIX).and_then(|rest| rest.split_once('-')).is_some_and(|(job, node)| {
        let digits = |text: &str, radix| !text.is_empty() && text.chars().all(|c| c.is_digit(radix));
        job.len() == 16 && digits(job, 16) && digits(node, 10)
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::SystemTime;

    #[test]
    fn only_old_directories_without_a_launcher_are_abandoned() {
        let temporary = tempfile::tempdir().unwrap();
        let own = Origin { host: "node1".into(), boot: "b".into() };
        let make_by = |name: &str, age: u64, host: &str, boot: &str| {
            let path = temporary.path().join(name);
            fs::create_dir(&path).unwrap();
            fs::write(path.join("report"), "").unwrap();
            if !host.is_empty() {
                fs::write(path.join(ORIGIN), Origin { host: host.into(), boot: boot.into() }.to_string()).unwrap();
            }
            let then = SystemTime::now() - Duration::from_secs(age);
            let opened = File::open(&path).unwrap();
            opened.set_modified(then).unwrap();
            opened
        };
        let make = |name: &str, age: u64| make_by(name, age, "node1", "b");
        make("burn-ddp-0123456789abcdef-0", 3600);
        make_by("burn-ddp-0123456789abcdef-1", 3600, "node1", "an earlier start");
        make_by("burn-ddp-00000000000000cc-0", 3600, "node2", "b");
        make_by("burn-ddp-00000000000000dd-0", 3600, "", "");
        make("burn-ddp-0123456789abcdef-12", 61);
        let held = make("burn-ddp-00000000000000aa-0", 3600);
        flock(&held, FlockOperation::NonBlockingLockExclusive).unwrap();
        make("burn-ddp-00000000000000bb-0", 1);
        for name in ["burn-ddp-0123-0", "burn-ddp-my-experiment", "burn-ddp-0123456789abcdef-", "other"] {
            make(name, 3600);
        }
        remove_abandoned(temporary.path(), &own);
        assert_eq!(Origin::parse(&own.to_string()), Some(own));
        let mut left: Vec<_> =
            fs::read_dir(temporary.path()).unwrap().map(|entry| entry.unwrap().file_name()).collect();
        left.sort();
        let expected = [
            "burn-ddp-00000000000000aa-0",
            "burn-ddp-00000000000000bb-0",
            "burn-ddp-00000000000000cc-0",
            "burn-ddp-00000000000000dd-0",
            "burn-ddp-0123-0",
            "burn-ddp-0123456789abcdef-",
            "burn-ddp-my-experiment",
            "other",
        ];
        assert_eq!(left, expected);
    }
}
