//! Saving a model as a durable file.

use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

use burn::module::Module;

use super::burnpack_writer::{self, Sink};
use super::safetensors;
use super::schema::{Schema, Snapshot};
use super::sync_buffers::agreed_statistics;
use super::values::{Value, values};
use crate::checkpoint::{leftover, scheme};
use crate::ddp::Ddp;
use crate::file_failure::FileWork;
use crate::wrap::wrapped_in;
use crate::{Error, Result, agreement, main_first};

impl Ddp {
    /// Writes rank 0's model to `path` (with Burn's extension `.bpk` if it has none), so that plain Burn reads it with
    /// `load_file`, and returns the path. *Collective*; all ranks hold the file's content when it returns.
    ///
    /// The file appears complete or not at all: it is written under a temporary name, synced, then renamed. Temporary
    /// files of a killed save to `path` are removed; so only one job at a time may save to it. Rank 0 may write for
    /// longer than the deadline of a collective: the other ranks wait as long as rank 0 is alive. It reads one
    /// parameter after the other; each [sharded](crate::WrapConfig::with_sharding) one is gathered before.
    ///
    /// The file holds the running statistics that [`sync_buffers`](Self::sync_buffers) would set; the model keeps its
    /// own. Of [local parameters](crate::WrapConfig::with_local_parameters) the file holds rank 0's values; the first
    /// such save logs a warning.
    ///
    /// Costs some rounds of small messages, a gather of 8 bytes per parameter to compare the replicas, and an
    /// all-gather of each sharded parameter; other values do not travel.
    ///
    /// # Errors
    ///
    /// [`Error::File`](crate::Error::File) on every rank if rank 0 could not write; an existing file is untouched then.
    /// [`Error::ReplicasDiffer`](crate::Error::ReplicasDiffer) if the ranks do not hold the same parameters; the file
    /// is written nevertheless, with rank 0's. Parameters that differ by rounding are no error, as in
    /// [`check_replicas`](Self::check_replicas).
    ///
    /// # Example
    ///
    /// ```
    /// # use burn::{nn::LinearConfig, prelude::*};
    /// # use burn_ddp::prelude::*;
    /// # let directory = tempfile::tempdir()?;
    /// # let directory = directory.path();
    /// Ddp::spawn(2, |ddp| {
    ///     let device = ddp.device()?.autodiff();
    ///     let model = ddp.wrap(LinearConfig::new(2, 1).init(&device))?;
    ///     let path = ddp.save(&model, directory.join("model"))?; // on every rank
    ///     let plain = LinearConfig::new(2, 1).init(&Device::default()).load_file(&path); // model.bpk
    ///     assert_eq!(param_hash(&plain)?, param_hash(&model)?);
    ///     Ok(())
    /// })?;
    /// # anyhow::Ok(())
    /// ```
    #[track_caller]
    pub fn save<M: Module>(&self, model: &M, path: impl AsRef<Path>) -> Result<PathBuf> {
        let path = with_extension(path.as_ref(), "bpk");
        self.save_with(model, &path, |_, values| {
            let work = FileWork { cannot: format!("could not write {}", path.display()), path: Some(path.clone()) };
            let mut temporary = None;
            let mut sink = Sink::Absent;
            main_first::on_main(self.group(), || {
                let (file, at) = Temporary::create(&path).map_err(|e| work.failed(e))?;
                (sink, temporary) = (Sink::File(file, 0, None), Some(at));
                Ok(())
            })?;
            burnpack_writer::write(self.group(), values, &[], &mut sink, &work)?;
            main_first::on_main(self.group(), || {
                let published = temporary.map_or(Ok(()), |temporary| temporary.publish(&path));
                published.map_err(|e| work.failed(e))
            })
        })?;
        Ok(path)
    }

    /// Writes rank 0's model to `path` (with the extension `.safetensors` if it has none) for other programs, and
    /// returns the path. *Collective*. Otherwise it does what [`save`](Self::save) does, at the same cost. Rank 0 needs
    /// host memory for a copy of the model.
    ///
    /// Names are the paths of parameters and buffers in the model, such as `conv.weight`. Values have Burn's layout: a
    /// `Linear`'s weight is `[d_input, d_output]`, the transpose of torch's.
    ///
    /// # Errors
    ///
    /// Those of [`save`](Self::save); [`Error::File`](crate::Error::File) also for quantized parameters.
    ///
    /// # Example
    ///
    /// ```
    /// # use burn::nn::LinearConfig;
    /// # use burn_ddp::prelude::*;
    /// # let directory = tempfile::tempdir()?;
    /// # let directory = directory.path();
    /// Ddp::spawn(2, |ddp| {
    ///     let model = ddp.wrap(LinearConfig::new(2, 1).init(&ddp.device()?.autodiff()))?;
    ///     let path = ddp.save_safetensors(&model, directory.join("model"))?; // on every rank
    ///     assert_eq!(path, directory.join("model.safetensors"));
    ///     Ok(())
    /// })?;
    /// # anyhow::Ok(())
    /// ```
    #[track_caller]
    pub fn save_safetensors<M: Module>(&self, model: &M, path: impl AsRef<Path>) -> Result<PathBuf> {
        let path = with_extension(path.as_ref(), "safetensors");
        self.save_with(model, &path, |schema, values| {
            let (mut wholes, mut unread) = (Vec::new(), None);
            for value in values.into_iter().filter(|value| self.is_main() || value.is_sharded()) {
                match value.whole() {
                    // The sharded values that follow need all ranks: the error waits until they were gathered.
                    Err(e) if !value.is_sharded() => drop(unread.get_or_insert(e)),
                    whole => wholes.extend(Some(whole?).filter(|_| self.is_main())),
                }
            }
            main_first::on_main(self.group(), || {
                let work = FileWork { cannot: format!("could not write {}", path.display()), path: Some(path.clone()) };
                unread.map_or(Ok(()), |e| Err(work.failed(e.to_string())))?;
                safetensors::save(Snapshot { schema, values: wholes }, &path).map_err(|e| work.failed(e))
            })
        })?;
        Ok(path)
    }

    /// Synchronises running statistics, writes the model by `write`, and compares the ranks' parameters.
    #[track_caller]
    fn save_with<M: Module>(
        &self,
        model: &M,
        path: &Path,
        write: impl FnOnce(Schema, Vec<Value>) -> Result<()>,
    ) -> Result<()> {
        let _saving = self.state().meter.saving();
        let wrapped = wrapped_in(self.group(), model)?;
        let own_statistics = agreed_statistics(self.group(), model, &wrapped)?;
        wrapped.iter().for_each(|wrapped| wrapped.warn_of_local());
        let outcome = refuse_url(path).and_then(|()| values(model));
        let (schema, values) = agreement::on_outcome(self.group(), "save its model", outcome)?;
        main_first::on_main(self.group(), || {
            if let Err(e) = remove_leftovers(path) {
                let path = path.display();
                tracing::warn!(
                    "temporary files of interrupted saves of {path} may remain, as they cannot be listed: {e}"
                );
            }
            Ok(())
        })?;
        write(schema, values)?;
        drop(own_statistics);
        self.check_replicas(model)
    }
}

fn refuse_url(path: &Path) -> Result<()> {
    if scheme(path).is_none() {
        return Ok(());
    }
    Err(Error::invalid(format!("{} is not a path of a file; `ddp.checkpoints` can be on S3", path.display())))
}

fn with_extension(path: &Path, extension: &str) -> PathBuf {
    match path.extension() {
        Some(_) => path.to_path_buf(),
        None => path.with_extension(extension),
    }
}

/// A temporary file in the directory of the final one, with a name in Burn's pattern. Removed on drop.
pub(super) struct Temporary(PathBuf);

impl Temporary {
    pub(super) fn create(path: &Path) -> io::Result<(File, Self)> {
        static NUMBER: AtomicUsize = AtomicUsize::new(0);
        let mut name = path.file_name().ok_or(io::ErrorKind::IsADirectory)?.to_os_string();
        name.push(format!(".{}-{}.tmp", std::process::id(), NUMBER.fetch_add(1, Relaxed)));
        let temporary = path.with_file_name(name);
        let file = File::create_new(&temporary)?;
        Ok((file, Temporary(temporary)))
    }

    /// Gives the file its name, with the permissions of the file that it replaces.
    pub(super) fn publish(self, path: &Path) -> io::Result<()> {
        if let Some(replaced) = fs::symlink_metadata(path).ok().filter(fs::Metadata::is_file) {
            fs::set_permissions(&self.0, replaced.permissions())?;
        }
        // Afterwards no file has the temporary name, so its removal on drop does nothing.
        fs::rename(&self.0, path)?;
        File::open(directory_of(path))?.sync_all()
    }
}

impl Drop for Temporary {
    fn drop(&mut self) {
        // An error is ignored: the file was published, or its directory is gone.
        let _ = fs::remove_file(&self.0);
    }
}

fn directory_of(path: &Path) -> &Path {
    path.parent().filter(|dir| !dir.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

/// Removes the temporary files of killed writes to `path`.
fn remove_leftovers(path: &Path) -> io::Result<()> {
    let Some(name) = path.file_name().map(|name| name.to_string_lossy()) else { return Ok(()) };
    for entry in fs::read_dir(directory_of(path))? {
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
