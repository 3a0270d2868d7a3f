//! One durable model file, the hash of a model, and the comparison of replicas.

use std::fs::File;
use std::path::{Path, PathBuf};

use burn::module::Module;

use super::schema::Snapshot;
use super::{digest, running_stats};
use crate::ddp::Ddp;
use crate::intercept::bypass;
use crate::{Result, agreement};

/// SHA-256 of all parameters and buffers (paths, dtypes, shapes, bytes) in hexadecimal: equal on two ranks if and only
/// if their models are.
///
/// # Errors
///
/// [`Error::Invalid`](crate::Error::Invalid) if a value cannot be read from its device.
pub fn param_hash<M: Module>(model: &M) -> Result<String> {
    Ok(snapshot(model)?.hash())
}

/// Values of this moment: nothing pending, running statistics up to date.
fn snapshot<M: Module>(model: &M) -> Result<Snapshot> {
    bypass(|| Snapshot::of(&model.valid()))
}

impl Ddp {
    /// Writes rank 0's model to `path` (with Burn's extension `.bpk` if it has none), so that plain Burn reads it with
    /// `load_file`, and returns the path. *Collective*; all ranks hold the file's content when it returns.
    ///
    /// The file appears complete or not at all: it is written under a temporary name, synced, then renamed.
    ///
    /// # Errors
    ///
    /// [`Error::File`](crate::Error::File) on every rank if rank 0 could not write; an existing file is untouched then.
    /// [`Error::ReplicasDiffer`](crate::Error::ReplicasDiffer) if the ranks do not hold the same parameters; the file
    /// is written nevertheless, with rank 0's.
    #[track_caller]
    pub fn save<M: Module>(&self, model: &M, path: impl AsRef<Path>) -> Result<PathBuf> {
        let path = with_extension(path.as_ref());
        agreement::on_main(self.group(), || {
            write(model, &path).map_err(|e| format!("could not write {}: {e}", path.display()))
        })?;
        self.check_replicas(model)?;
        Ok(path)
    }

    /// Checks that all ranks hold the same parameters, bit by bit. *Collective*. Running statistics may differ between
    /// two reductions, and are not compared.
    ///
    /// # Errors
    ///
    /// [`Error::ReplicasDiffer`](crate::Error::ReplicasDiffer) on every rank, naming the first parameter that differs
    /// and the rank.
    #[track_caller]
    pub fn check_replicas<M: Module>(&self, model: &M) -> Result<()> {
        let is_buffer = running_stats::which(model);
        let snapshot = snapshot(model)?;
        let mut floats = is_buffer.into_iter();
        let (mut paths, mut digests) = (Vec::new(), Vec::new());
        for (i, entry) in snapshot.schema.entries.iter().enumerate() {
            let is_buffer = snapshot.schema.is_float[i] && floats.next().unwrap_or(false);
            if !is_buffer {
                paths.push(entry.path.as_str());
                digests.push(digest::digest(snapshot.values[i].as_bytes()));
            }
        }
        let all = self.group().all_gather_object(&digests)?;
        digest::compare(&paths, &all, None)
    }
}

fn with_extension(path: &Path) -> PathBuf {
    match path.extension() {
        Some(_) => path.to_path_buf(),
        None => path.with_extension("bpk"),
    }
}

fn write<M: Module>(model: &M, path: &Path) -> std::result::Result<(), String> {
    let dir = match path.parent() {
        Some(dir) if !dir.as_os_str().is_empty() => dir,
        _ => Path::new("."),
    };
    // The guard removes the file unless it was renamed.
    let temporary = tempfile::Builder::new()
        .prefix(".burn-ddp-")
        .suffix(".bpk")
        // The mode of ordinary files, by the umask: temporary files are private by default.
        .permissions(std::os::unix::fs::PermissionsExt::from_mode(0o666))
        .tempfile_in(dir)
        .map_err(|e| e.to_string())?
        .into_temp_path();
    bypass(|| model.valid().into_record()).save(&temporary).map_err(|e| e.to_string())?;
    File::open(&temporary).and_then(|f| f.sync_all()).map_err(|e| e.to_string())?;
    temporary.persist(path).map_err(|e| e.to_string())?;
    File::open(dir).and_then(|d| d.sync_all()).map_err(|e| e.to_string())
}
