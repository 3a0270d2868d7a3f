//! Removal of incomplete files and directories of a killed job.

use std::fs::{self, DirEntry};
use std::io::{self, ErrorKind};
use std::path::Path;

/// Removes the entries of a folder whose names begin with `prefix`.
pub(super) fn remove_all(folder: &Path, prefix: &str) -> io::Result<()> {
    for entry in fs::read_dir(folder)? {
        let entry = entry?;
        if entry.file_name().to_string_lossy().starts_with(prefix) {
            remove(&entry);
        }
    }
    Ok(())
}

/// Removes a leftover. A failure is only logged, since a leftover takes space and nothing else.
pub(crate) fn remove(entry: &DirEntry) {
    let path = entry.path();
    tracing::info!(path = %path.display(), "removing a leftover of a killed job");
    let removed = match entry.file_type() {
        Ok(kind) if kind.is_dir() => fs::remove_dir_all(&path),
        _ => fs::remove_file(&path),
    };
    match removed {
        Err(e) if e.kind() != ErrorKind::NotFound => tracing::warn!("cannot remove {}: {e}", path.display()),
        _ => {}
    }
}
