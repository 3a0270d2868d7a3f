//! Files and directories that a killed job has left half written.

use std::fs::{self, DirEntry};
use std::io::ErrorKind;

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
