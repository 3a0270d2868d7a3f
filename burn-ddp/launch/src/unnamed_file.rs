//! Files without a name: other processes open them by `/proc`, and they vanish with this process however it ends.

use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

/// Creates a file without a name, so that nothing stays behind however this process ends.
pub(crate) fn unnamed(path: &Path) -> io::Result<File> {
    let file = OpenOptions::new().read(true).append(true).create_new(true).mode(0o600).open(path)?;
    fs::remove_file(path)?;
    Ok(file)
}

/// The name of an open file, for other processes.
pub(crate) fn name_of(file: &File) -> PathBuf {
    format!("/proc/{}/fd/{}", std::process::id(), file.as_raw_fd()).into()
}
