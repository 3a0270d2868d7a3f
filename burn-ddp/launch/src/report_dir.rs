//! The directory in which the ranks of a generation leave their reports.

use std::fs;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};

use crate::error::LaunchError;
use crate::output::log_dir::JobDir;

/// Directory for reports. A temporary one is removed by the drop, or else by the guardian.
pub(crate) enum ReportDir {
    Permanent(PathBuf),
    Temporary(PathBuf),
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
        let path = directory.join(format!("burn-ddp-{job_id}-{node}"));
        // An empty container has no /tmp.
        let made = fs::create_dir_all(directory).and_then(|()| fs::DirBuilder::new().mode(0o700).create(&path));
        made.map(|()| Self::Temporary(path.clone())).map_err(|source| LaunchError::LogDir { path, source })
    }

    pub(crate) fn path(&self) -> &Path {
        match self {
            Self::Permanent(path) | Self::Temporary(path) => path,
        }
    }

    /// Path to be removed if this process cannot.
    pub(crate) fn temporary(&self) -> Option<&Path> {
        match self {
            Self::Permanent(_) => None,
            Self::Temporary(path) => Some(path),
        }
    }
}

impl Drop for ReportDir {
    fn drop(&mut self) {
        if let Some(path) = self.temporary()
            && let Err(error) = fs::remove_dir_all(path)
        {
            tracing::warn!(%error, path = %path.display(), "a temporary directory stays behind");
        }
    }
}
