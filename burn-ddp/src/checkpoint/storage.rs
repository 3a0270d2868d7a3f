//! The operations of a storage (local folder, object storage) that a directory of checkpoints uses.

use std::any::Any;
use std::fmt::Debug;
use std::fs::File;
use std::io;

use tempfile::TempDir;

use crate::file_failure::FileFailure;

/// Prefix of temporary directories: of checkpoints that are being written or removed.
pub(super) const TEMPORARY: &str = ".burn-ddp-";

/// A storage of checkpoints, used on rank 0 alone. Each checkpoint has a name in the storage, and each file a name in
/// its checkpoint.
pub(super) trait Storage: Debug + Send + Sync {
    /// Takes the directory for this job, and removes unfinished checkpoints of earlier jobs. The caller holds the
    /// returned guard as long as the job may save.
    fn own(&self) -> Result<Box<dyn Any + Send>, FileFailure>;

    /// Names of the checkpoints, and of anything else in the directory.
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
