//! Where a directory of checkpoints is: in a local folder, or under a prefix in a bucket of S3-compatible storage.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::checkpoint_name::Name;
use super::local_folder::{self, LocalFolder};
use super::manifest::MANIFEST;
#[cfg(feature = "s3")]
use super::object_storage::{self, ObjectStorage};
use super::storage::Storage;
use crate::file_failure::FileFailure;

/// Makes the directory if it is a missing folder. Returns its absolute path, or its URL. The path of a single
/// checkpoint is refused: it contains no checkpoints, so the training would begin anew instead of being resumed.
pub(super) fn make(path: &Path) -> Result<PathBuf, FileFailure> {
    let name = path.file_name().map(|name| name.to_string_lossy());
    if name.is_some_and(|name| Name::parse(&name).is_some()) || path.join(MANIFEST).is_file() {
        let parent = path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
        let reason = format!(
            "cannot look for checkpoints in {}: that is a single checkpoint; give the directory that holds it, {}",
            path.display(),
            parent.display()
        );
        return Err(FileFailure::from(reason).at(path));
    }
    match scheme(path) {
        None => local_folder::make(path),
        #[cfg(feature = "s3")]
        Some("s3") => object_storage::check(path),
        #[cfg(not(feature = "s3"))]
        Some("s3") => Err(FileFailure::of("cannot open", path, "burn-ddp was built without its feature `s3`")),
        Some(_) => Err(FileFailure::of("cannot open", path, "checkpoints go to a folder or to s3://BUCKET/PREFIX")),
    }
}

/// The storage of a directory that was [made](make).
pub(super) fn open(path: &Path) -> Arc<dyn Storage> {
    #[cfg(feature = "s3")]
    if scheme(path).is_some() {
        return Arc::new(ObjectStorage::new(path));
    }
    Arc::new(LocalFolder::new(path))
}

/// The scheme of a URL; `None` for the path of a folder.
pub(crate) fn scheme(path: &Path) -> Option<&str> {
    let (scheme, _) = path.to_str()?.split_once("://")?;
    (!scheme.is_empty() && scheme.bytes().all(|c| c.is_ascii_alphanumeric())).then_some(scheme)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_url_is_no_folder() {
        let of = |path| scheme(Path::new(path));
        assert_eq!((of("s3://bucket/a"), of("gs://bucket")), (Some("s3"), Some("gs")));
        assert_eq!([of("out/ck"), of("/out//ck"), of("s3:/a"), of("a/b://c"), of("://a")], [None; 5]);
        let error = make(Path::new("gs://bucket/run")).unwrap_err().to_string();
        assert!(error.starts_with("cannot open gs://bucket/run: checkpoints go to"), "{error}");
        let error = make(Path::new("s3://bucket/run/step-00000004/")).unwrap_err().to_string();
        assert!(error.ends_with("give the directory that holds it, s3://bucket/run"), "{error}");
    }

    #[test]
    #[cfg(not(feature = "s3"))]
    fn a_bucket_needs_the_feature() {
        let error = crate::Ddp::spawn(2, |ddp| Ok(ddp.checkpoints("s3://bucket/run").unwrap_err().to_string()));
        let said = "rank 0 cannot open s3://bucket/run: burn-ddp was built without its feature `s3`";
        assert_eq!(error.unwrap(), [said, said]);
        assert!(!Path::new("s3:").exists(), "no folder of that name");
    }
}
