//! A failure of work on files, in a form that rank 0 can send to the other ranks.

use std::ffi::OsString;
use std::fmt;
use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::Error;

/// The kinds of I/O errors that reach other ranks, by their index here. Any other kind arrives as
/// [`ErrorKind::Other`].
const KINDS: [ErrorKind; 28] = [
    ErrorKind::Other,
    ErrorKind::NotFound,
    ErrorKind::PermissionDenied,
    ErrorKind::AlreadyExists,
    ErrorKind::StorageFull,
    ErrorKind::QuotaExceeded,
    ErrorKind::ReadOnlyFilesystem,
    ErrorKind::NotADirectory,
    ErrorKind::IsADirectory,
    ErrorKind::DirectoryNotEmpty,
    ErrorKind::InvalidInput,
    ErrorKind::InvalidData,
    ErrorKind::InvalidFilename,
    ErrorKind::FileTooLarge,
    ErrorKind::UnexpectedEof,
    ErrorKind::ResourceBusy,
    ErrorKind::StaleNetworkFileHandle,
    ErrorKind::TimedOut,
    ErrorKind::NotConnected,
    ErrorKind::Unsupported,
    ErrorKind::OutOfMemory,
    ErrorKind::BrokenPipe,
    ErrorKind::ConnectionRefused,
    ErrorKind::ConnectionReset,
    ErrorKind::ConnectionAborted,
    ErrorKind::HostUnreachable,
    ErrorKind::NetworkUnreachable,
    ErrorKind::Interrupted,
];

/// The parts of an [`Error::File`] that do not depend on the rank.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct FileFailure {
    reason: String,
    path: Option<OsString>,
    /// Index in [`KINDS`].
    kind: Option<u8>,
}

/// Work on a file or directory, for the errors of its steps.
#[derive(Debug)]
pub(crate) struct FileWork {
    /// Beginning of the errors, with the path: `cannot write the checkpoint of step 3 to …`.
    pub(crate) cannot: String,
    /// `None` for work in memory.
    pub(crate) path: Option<PathBuf>,
}

impl FileWork {
    /// The failure of this work by `cause`.
    pub(crate) fn failed(&self, cause: impl Into<FileFailure>) -> FileFailure {
        let failure = cause.into().within(&self.cannot);
        match &self.path {
            Some(path) => failure.at(path),
            None => failure,
        }
    }
}

impl FileFailure {
    /// `cannot path: cause`, such as `cannot read a/file: cause`; for `path` unless `cause` names another one.
    pub(crate) fn of(cannot: &str, path: &Path, cause: impl Into<FileFailure>) -> Self {
        cause.into().within(format_args!("{cannot} {}", path.display())).at(path)
    }

    /// Puts `cannot: ` in front of the reason.
    pub(crate) fn within(self, cannot: impl fmt::Display) -> Self {
        FileFailure { reason: format!("{cannot}: {}", self.reason), ..self }
    }

    /// Adds the path of the file or directory, unless there is one.
    pub(crate) fn at(self, path: &Path) -> Self {
        FileFailure { path: self.path.or_else(|| Some(path.into())), ..self }
    }

    /// Sets the kind of the error.
    pub(crate) fn of_kind(self, kind: ErrorKind) -> Self {
        let index = KINDS.iter().position(|known| *known == kind).unwrap_or_default();
        FileFailure { kind: Some(index as u8), ..self }
    }

    /// The error of `rank`; `None` for this rank.
    pub(crate) fn into_error(self, rank: Option<usize>) -> Error {
        let FileFailure { reason, path, kind } = self;
        let kind = kind.map(|index| KINDS.get(usize::from(index)).copied().unwrap_or(ErrorKind::Other));
        Error::File { rank, path: path.map(PathBuf::from), kind, reason }
    }
}

impl fmt::Display for FileFailure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.reason)
    }
}

impl From<String> for FileFailure {
    fn from(reason: String) -> Self {
        FileFailure { reason, path: None, kind: None }
    }
}

impl From<&str> for FileFailure {
    fn from(reason: &str) -> Self {
        reason.to_owned().into()
    }
}

impl From<io::Error> for FileFailure {
    fn from(error: io::Error) -> Self {
        FileFailure::from(error.to_string()).of_kind(error.kind())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Ddp, main_first};

    #[test]
    fn path_and_kind_reach_every_rank() {
        let read = |ddp: Ddp| {
            let path = Path::new("no/such/file");
            let read = || Ok(std::fs::read(path).map_err(|e| FileFailure::of("cannot read", path, e))?.len());
            Ok(main_first::on_main(ddp.group(), read).unwrap_err())
        };
        for error in Ddp::spawn(2, read).unwrap() {
            assert!(error.to_string().starts_with("rank 0 cannot read no/such/file: "), "{error}");
            let Error::File { rank, path, kind, .. } = error else { panic!("{error}") };
            assert_eq!((rank, kind), (Some(0), Some(ErrorKind::NotFound)));
            assert_eq!(path.as_deref(), Some(Path::new("no/such/file")));
        }
    }

    #[test]
    fn a_cause_keeps_its_path_and_an_unknown_kind_is_other() {
        let cause = FileFailure::from(io::Error::from(ErrorKind::AddrInUse)).at(Path::new("inner"));
        let Error::File { rank, path, kind, reason } =
            FileFailure::of("cannot read", Path::new("outer"), cause).into_error(None)
        else {
            panic!("another error")
        };
        assert_eq!((rank, kind), (None, Some(ErrorKind::Other)));
        assert_eq!(path.as_deref(), Some(Path::new("inner")));
        assert!(reason.starts_with("cannot read outer: "), "{reason}");
    }
}
