//! What a directory of checkpoints needs of the storage that it is on.

use std::any::Any;
use std::fmt::Debug;
use std::fs::File;
use std::io;

use tempfile::TempDir;

/// Prefix of what is not yet, or no longer, a checkpoint.
pub(super) const TEMPORARY: &str = ".burn-ddp-";

/// The operations that a directory of checkpoints needs. A checkpoint has a name here, and its files have names in it.
/// Used on rank 0 alone.
pub(super) trait Storage: Debug + Send + Sync {
    /// Takes the directory for this job, and removes what earlier jobs left unfinished. What it returns is held as long
    /// as the job saves.
    fn own(&self) -> Result<Box<dyn Any + Send>, String>;

    /// Names of the checkpoints, and of anything else that is there.
    fn names(&self) -> io::Result<Vec<String>>;

    /// True if there is a checkpoint of this name.
    fn contains(&self, name: &str) -> io::Result<bool>;

    /// Opens a file of a checkpoint. [`io::ErrorKind::NotFound`] if it is not there.
    fn open(&self, name: &str, file: &str) -> io::Result<File>;

    /// Makes a local folder for the files of a new checkpoint. It is removed on drop.
    fn temporary(&self) -> io::Result<TempDir>;

    /// Makes the files of a [`temporary`](Storage::temporary) folder the new checkpoint `name`, durably: it appears
    /// complete or not at all.
    fn commit(&self, name: &str, temporary: TempDir) -> io::Result<()>;

    /// Removes a checkpoint, which never shows with some of its files removed.
    fn remove(&self, name: &str) -> io::Result<()>;
}
