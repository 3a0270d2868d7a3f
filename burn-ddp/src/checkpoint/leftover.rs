//! Removal of files and directories that a killed job has left half written.

use std::fs::{self, DirEntry};
use std::io::{self, ErrorKind};
use std::path::Path;

/// Removes what is in a folder under names that begin with `prefix`.
pub(super) fn remove_all(folder: &Path, prefix: &str) -> io::Result<()> {
    for entry in fs::read_dir(folder)? {
        let entry = entry?;
        if entry.file_name().to_string_lossy().starts_with(prefix) {
            remove(&entry);
        }
    }
    Ok(())
}

/// Removes a leftover. A failure costs space only: it is logged.
pub(crate) fn remove(entry: &DirEntry) {
    let path = entry.path();
    tracing::info!(path = %path.display(), "removing what a killed job has left");
    let removed = match entry.file_type() {
        Ok(kind) if kind.is_dir() => fs::remove_dir_all(&path),
        _ => fs::remove_file(&path),
    };
    match removed {
        Err(e) if e.kind() != ErrorKind::NotFound => tracing::warn!("cannot remove {}: {e}", path.display()),
        _ => {}
    }
}
