//! Saving a model as a durable file.

use std::path::{Path, PathBuf};
use std::{fs, io};

use burn::module::Module;

use super::safetensors;
use super::schema::Snapshot;
use super::sync_buffers::sync_wrapped;
use crate::checkpoint::leftover;
use crate::ddp::Ddp;
use crate::intercept::{bypass, find, whole};
use crate::{Result, main_first};

impl Ddp {
    /// Writes rank 0's model to `path` (with Burn's extension `.bpk` if it has none), so that plain Burn reads it with
    /// `load_file`, and returns the path. *Collective*; all ranks hold the file's content when it returns.
    ///
    /// The file appears complete or not at all: it is written under a temporary name, synced, then renamed. What a
    /// killed save to `path` has left is removed; so only one job at a time may save to it. Rank 0 may write for
    /// longer than the deadline of a collective: the others wait as long as it lives.
    ///
    /// The ranks bring running statistics together first, as [`sync_buffers`](Self::sync_buffers) does. Of [local
    /// parameters](crate::WrapConfig::with_local_parameters) the file holds rank 0's, with a warning the first time.
    ///
    /// # Errors
    ///
    /// [`Error::File`](crate::Error::File) on every rank if rank 0 could not write; an existing file is untouched then.
    /// [`Error::ReplicasDiffer`](crate::Error::ReplicasDiffer) if the ranks do not hold the same parameters; the file
    /// is written nevertheless, with rank 0's. Parameters that differ by rounding are no error, as in
    /// [`check_replicas`](Self::check_replicas).
    #[track_caller]
    pub fn save<M: Module>(&self, model: &M, path: impl AsRef<Path>) -> Result<PathBuf> {
        self.save_with(model, with_extension(path.as_ref(), "bpk"), |model, path| {
            bypass(|| model.into_record()).save(path).map_err(|e| e.to_string())
        })
    }

    /// Writes rank 0's model to `path` (with the extension `.safetensors` if it has none) for other programs, and
    /// returns the path. *Collective*; in all else as [`save`](Self::save). Rank 0 needs memory for a copy of the
    /// model.
    ///
    /// Names are the paths of parameters and buffers in the model, such as `conv.weight`. Values have Burn's layout: a
    /// `Linear`'s weight is `[d_input, d_output]`, the transpose of torch's.
    ///
    /// # Errors
    ///
    /// Those of [`save`](Self::save); [`Error::File`](crate::Error::File) also for quantized parameters.
    #[track_caller]
    pub fn save_safetensors<M: Module>(&self, model: &M, path: impl AsRef<Path>) -> Result<PathBuf> {
        self.save_with(model, with_extension(path.as_ref(), "safetensors"), |model, path| {
            let snapshot = bypass(|| Snapshot::of(&model)).map_err(|e| e.to_string())?;
            safetensors::save(snapshot, path)
        })
    }

    /// Writes rank 0's model, whole and up to date, by `write`.
    #[track_caller]
    fn save_with<M: Module>(
        &self,
        model: &M,
        path: PathBuf,
        write: impl FnOnce(M, &Path) -> std::result::Result<(), String>,
    ) -> Result<PathBuf> {
        let _saving = self.state().meter.saving();
        sync_wrapped(self.group(), model)?;
        find(model).iter().for_each(|wrapped| wrapped.warn_of_local());
        // `valid` brings running statistics up to date.
        let whole = whole(bypass(|| model.valid()), self.is_main())?;
        main_first::on_main(self.group(), || {
            if let Err(e) = remove_leftovers(&path) {
                tracing::warn!("cannot look for leftovers of {}: {e}", path.display());
            }
            write(whole, &path).map_err(|e| format!("could not write {}: {e}", path.display()))
        })?;
        self.check_replicas(model)?;
        Ok(path)
    }
}

fn with_extension(path: &Path, extension: &str) -> PathBuf {
    match path.extension() {
        Some(_) => path.to_path_buf(),
        None => path.with_extension(extension),
    }
}

/// Removes the temporary files of killed writes to `path`.
fn remove_leftovers(path: &Path) -> io::Result<()> {
    let Some(name) = path.file_name().map(|name| name.to_string_lossy()) else { return Ok(()) };
    let dir = path.parent().filter(|dir| !dir.as_os_str().is_empty()).unwrap_or(Path::new("."));
    for entry in fs::read_dir(dir)? {
        let entry = entry?;
        if is_temporary(&entry.file_name().to_string_lossy(), &name) {
            leftover::remove(&entry);
        }
    }
    Ok(())
}

/// True for temporary names, Burn's and ours, of the file `name`: `<name>.<process>-<number>.tmp`.
fn is_temporary(other: &str, name: &str) -> bool {
    let is_number = |text: &str| !text.is_empty() && text.bytes().all(|b| b.is_ascii_digit());
    let numbers = other.strip_prefix(name).and_then(|rest| rest.strip_prefix('.')?.strip_suffix(".tmp"));
    numbers.and_then(|numbers| numbers.split_once('-')).is_some_and(|(a, b)| is_number(a) && is_number(b))
}
