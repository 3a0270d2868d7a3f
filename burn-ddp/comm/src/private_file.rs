//! Files that only this user can read: what they hold is the program's business.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

/// Creates the file, or empties the one that is there.
pub(crate) fn create(path: &Path) -> io::Result<File> {
    OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(path)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    #[test]
    fn others_cannot_read_it() {
        let path = std::env::temp_dir().join(format!("burn-ddp-test-{}-private", std::process::id()));
        let file = super::create(&path).unwrap();
        let mode = file.metadata().unwrap().permissions().mode();
        std::fs::remove_file(&path).unwrap();
        assert_eq!(mode & 0o077, 0, "{mode:o}");
    }
}
