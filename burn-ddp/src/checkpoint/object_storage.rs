//! Checkpoints on S3-compatible storage. An object appears as a whole. A checkpoint exists if its manifest does, which
//! is written last and removed first.
//!
//! A checkpoint's files are written to a local folder and uploaded from there, and downloaded to be read: formats and
//! checksums are the same as in a folder.

use std::any::Any;
use std::fs::{self, File};
use std::hash::{BuildHasher, RandomState};
use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::SystemTime;

use object_store::ObjectStoreExt;
use tempfile::TempDir;
use xxhash_rust::xxh3::xxh3_64;

use super::checkpoint_name::Name;
use super::leftover;
use super::manifest::MANIFEST;
use super::object_connection::{self, Connection, Settings};
use super::object_transfer::{self, AFTER_FAILURE};
use super::storage::{Storage, TEMPORARY};
use crate::file_failure::FileFailure;

/// Object with the token of the job that saves here.
const OWNER: &str = ".burn-ddp-owner";

#[derive(Debug)]
pub(super) struct ObjectStorage {
    url: PathBuf,
    /// Made at the first call: ranks other than 0 need no credentials.
    opened: OnceLock<Opened>,
    /// The token of this job, once it owns the prefix.
    token: Mutex<Option<String>>,
}

#[derive(Debug)]
struct Opened {
    connection: Connection,
    /// Prefix of the local folders of this directory.
    local_prefix: String,
}

impl Opened {
    fn new(url: &Path, endpoint: &str, connection: Connection) -> Self {
        let hash = xxh3_64(format!("{endpoint} {}", url.display()).as_bytes());
        Opened { connection, local_prefix: format!("{TEMPORARY}{hash:016x}-") }
    }
}

impl ObjectStorage {
    pub(super) fn new(url: &Path) -> Self {
        ObjectStorage { url: url.to_path_buf(), opened: OnceLock::new(), token: Mutex::default() }
    }

    fn opened(&self) -> io::Result<&Opened> {
        if self.opened.get().is_none() {
            let Settings { store, prefix, endpoint } =
                object_connection::settings(&self.url).map_err(io::Error::other)?;
            // Fails if another thread has opened it meanwhile; that one's is used then.
            let _ = self.opened.set(Opened::new(&self.url, &endpoint, Connection::new(Arc::new(store), prefix)?));
        }
        self.opened.get().ok_or_else(|| ErrorKind::NotConnected.into())
    }

    fn connection(&self) -> io::Result<&Connection> {
        Ok(&self.opened()?.connection)
    }

    fn token(&self) -> MutexGuard<'_, Option<String>> {
        self.token.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Checks that no other job has taken the prefix.
    async fn check_owner(&self, connection: &Connection) -> io::Result<()> {
        let found = match connection.store.get(&connection.key(OWNER)).await {
            Err(object_store::Error::NotFound { .. }) => {
                let reason = format!("{OWNER}, which this job has written to {}, was removed", self.url.display());
                return Err(io::Error::new(ErrorKind::NotFound, reason));
            }
            found => found?.bytes().await?,
        };
        match self.token().as_ref() {
            Some(token) if found == token.as_bytes() => Ok(()),
            _ => Err(self.taken("has begun to save to")),
        }
    }

    /// Does `work` if this job owns the prefix, and fails if another one has taken it meanwhile.
    async fn as_owner<T>(&self, connection: &Connection, work: impl Future<Output = io::Result<T>>) -> io::Result<T> {
        self.check_owner(connection).await?;
        let done = work.await?;
        self.check_owner(connection).await?;
        Ok(done)
    }

    fn taken(&self, how: &str) -> io::Error {
        let reason = format!("another job {how} {} since this one did", self.url.display());
        io::Error::new(ErrorKind::AlreadyExists, reason)
    }

    /// Removes the leftovers of killed jobs: parts of uploads, and checkpoints without a manifest.
    async fn remove_leftovers(&self, connection: &Connection) -> io::Result<()> {
        connection.abort_uploads(None).await?;
        let objects = connection.list(&connection.prefix).await?;
        self.remove_incomplete(connection, &objects).await
    }

    /// Removes those files of `objects`, a listing, whose checkpoint has no manifest.
    async fn remove_incomplete(&self, connection: &Connection, objects: &[Vec<String>]) -> io::Result<()> {
        let complete = complete(objects);
        for parts in objects {
            if let [checkpoint, file] = parts.as_slice()
                && Name::parse(checkpoint).is_some()
                && !complete.contains(checkpoint)
                // A job that had not ended may have completed it since.
                && !connection.exists(&connection.file(checkpoint, MANIFEST)).await?
            {
                tracing::info!("removing {checkpoint}/{file}, which a killed job has left");
                object_transfer::delete(&connection.store, &connection.file(checkpoint, file)).await?;
            }
        }
        Ok(())
    }

    /// Removes the objects of a checkpoint, the manifest first.
    async fn remove_objects(&self, connection: &Connection, name: &str) -> io::Result<()> {
        let objects = connection.list(&connection.key(name)).await?;
        let mut files: Vec<&String> = objects.iter().filter_map(|parts| parts.get(1)).collect();
        files.sort_by_key(|file| *file != MANIFEST);
        for file in files {
            object_transfer::delete(&connection.store, &connection.file(name, file)).await?;
        }
        Ok(())
    }

    /// Uploads the files of a checkpoint, the manifest last.
    async fn upload(&self, connection: &Connection, name: &str, folder: &Path) -> io::Result<()> {
        self.check_owner(connection).await?;
        if !complete(&connection.list(&connection.key(name)).await?).is_empty() {
            return Err(self.taken("has saved this step to"));
        }
        // Leftovers of a save of this step that failed.
        connection.abort_uploads(Some(name)).await?;
        self.remove_objects(connection, name).await?;
        let failed = |file: &str, e: io::Error| {
            let e = object_connection::with_advice(e);
            io::Error::new(e.kind(), format!("{file}: {e}"))
        };
        for entry in fs::read_dir(folder)? {
            let file = entry?.file_name().to_string_lossy().into_owned();
            if file != MANIFEST {
                let (to, record) = (connection.file(name, &file), connection.upload(name, &file));
                let from = File::open(folder.join(&file))?;
                let owner = self.check_owner(connection);
                let put = object_transfer::put(&connection.store, &from, &to, &record, owner);
                put.await.map_err(|e| match e.kind() {
                    ErrorKind::AlreadyExists => self.taken("has begun to save to"),
                    _ => failed(&file, e),
                })?;
            }
        }
        let (manifest, to) = (fs::read(folder.join(MANIFEST))?, connection.file(name, MANIFEST));
        let put = async {
            let put = object_transfer::put_new(&connection.store, &to, manifest.into());
            put.await.map_err(|e| match e.kind() {
                ErrorKind::AlreadyExists => self.taken("has saved this step to"),
                _ => failed(MANIFEST, e),
            })
        };
        // A job that takes the prefix during this request finds files without a manifest, and removes them.
        self.as_owner(connection, put).await
    }
}

/// Names of those checkpoints that have a manifest.
fn complete(objects: &[Vec<String>]) -> Vec<String> {
    objects.iter().filter(|parts| parts.len() == 2 && parts[1] == MANIFEST).map(|parts| parts[0].clone()).collect()
}

impl Storage for ObjectStorage {
    fn own(&self) -> Result<Box<dyn Any + Send>, FileFailure> {
        let failed = |e: io::Error| FileFailure::of("cannot save to", &self.url, e);
        let Opened { connection, local_prefix } = self.opened().map_err(failed)?;
        let random = RandomState::new().hash_one((std::process::id(), SystemTime::now()));
        let token = format!("{random:016x}");
        *self.token() = Some(token.clone());
        let owned = connection.wait(async {
            connection.store.put(&connection.key(OWNER), token.into()).await?;
            Ok(self.remove_leftovers(connection).await)
        });
        // Leftovers do no harm: a save first removes objects under the name of its checkpoint.
        if let Err(e) = owned.map_err(failed)? {
            tracing::warn!("leftovers of killed jobs stay in {}: {e}", self.url.display());
        }
        let folder = std::env::temp_dir();
        if let Err(e) = leftover::remove_all(&folder, local_prefix) {
            tracing::warn!("cannot look for leftovers in {}: {e}", folder.display());
        }
        Ok(Box::new(()))
    }

    fn names(&self) -> io::Result<Vec<String>> {
        let connection = self.connection()?;
        Ok(complete(&connection.wait(connection.list(&connection.prefix))?))
    }

    fn contains(&self, name: &str) -> io::Result<bool> {
        let connection = self.connection()?;
        connection.wait(connection.exists(&connection.file(name, MANIFEST)))
    }

    fn open(&self, name: &str, file: &str) -> io::Result<File> {
        let connection = self.connection()?;
        connection.wait(object_transfer::get(&connection.store, &connection.file(name, file)))
    }

    fn temporary(&self) -> io::Result<TempDir> {
        tempfile::Builder::new().prefix(&self.opened()?.local_prefix).tempdir()
    }

    fn commit(&self, name: &str, temporary: TempDir) -> io::Result<()> {
        let connection = self.connection()?;
        connection.wait(async {
            let uploaded = self.upload(connection, name, temporary.path()).await;
            // Another job's checkpoint may have this name.
            if uploaded.as_ref().is_err_and(|e| e.kind() != ErrorKind::AlreadyExists) {
                let remove = async {
                    self.check_owner(connection).await?;
                    self.remove_objects(connection, name).await
                };
                match tokio::time::timeout(AFTER_FAILURE, remove).await {
                    Ok(Ok(())) => {}
                    Ok(Err(e)) => tracing::warn!("what was uploaded of {name} to {} is left: {e}", self.url.display()),
                    Err(_) => {
                        tracing::warn!("what was uploaded of {name} to {} is left: no answer", self.url.display())
                    }
                }
            }
            uploaded
        })
    }

    fn remove(&self, name: &str) -> io::Result<()> {
        let connection = self.connection()?;
        connection.wait(async {
            self.check_owner(connection).await?;
            self.remove_objects(connection, name).await
        })
    }
}

/// Checks a URL and the settings in the environment. Returns the URL without slashes at its end.
pub(super) fn check(url: &Path) -> Result<PathBuf, FileFailure> {
    object_connection::settings(url).map_err(|e| FileFailure::from(e).at(url))?;
    Ok(PathBuf::from(url.to_string_lossy().trim_end_matches('/')))
}

#[cfg(test)]
mod tests {
    use std::io::Read;

    use object_store::memory::InMemory;
    use object_store::multipart::MultipartStore;
    use object_store::path::Path as Key;

    use super::*;

    /// Storage of a job that saves to `bucket`. Tests with different URLs do not remove each other's local folders.
    fn job(url: &str, bucket: &Arc<InMemory>) -> ObjectStorage {
        let storage = ObjectStorage::new(Path::new(url));
        let connection = Connection::new(bucket.clone(), Key::from("run")).unwrap();
        storage.opened.set(Opened::new(&storage.url, "", connection)).unwrap();
        storage
    }

    /// All objects but the token of the owner.
    fn objects(storage: &ObjectStorage) -> Vec<String> {
        let connection = storage.connection().unwrap();
        let mut found: Vec<_> = connection.wait(connection.list(&connection.prefix)).unwrap();
        found.retain(|parts| parts[0] != OWNER);
        found.iter().map(|parts| parts.join("/")).collect()
    }

    /// Saves these files and a manifest.
    fn save(storage: &ObjectStorage, name: &str, files: &[(&str, &[u8])]) -> io::Result<()> {
        let folder = storage.temporary()?;
        for (file, bytes) in files.iter().chain([&(MANIFEST, &b"{}"[..])]) {
            fs::write(folder.path().join(file), bytes)?;
        }
        storage.commit(name, folder)
    }

    fn put(storage: &ObjectStorage, key: Key, bytes: &str) {
        let connection = storage.connection().unwrap();
        let put = async { Ok(connection.store.put(&key, bytes.to_string().into()).await?) };
        connection.wait(put).unwrap();
    }

    #[test]
    fn files_of_any_length_come_back() {
        let storage = job("s3://files", &Arc::default());
        storage.own().unwrap();
        // None, one part, its end, three parts.
        let lengths = [0, 5, 16 << 20, (16 << 20) + 1, (40 << 20) + 3];
        for len in lengths {
            let bytes: Vec<u8> = (0..len).map(|i: u32| (i % 251) as u8).collect();
            save(&storage, "step-00000001", &[("model.bpk", &bytes)]).unwrap();
            let mut read = Vec::new();
            storage.open("step-00000001", "model.bpk").unwrap().read_to_end(&mut read).unwrap();
            assert!(read == bytes, "{len} bytes");
            storage.remove("step-00000001").unwrap();
        }
        save(&storage, "step-00000001", &[("model.bpk", b"1")]).unwrap();
        assert_eq!(
            objects(&storage),
            ["step-00000001/manifest.json", "step-00000001/model.bpk"],
            "no record of an upload"
        );
        assert_eq!(storage.open("step-00000001", "none").unwrap_err().kind(), ErrorKind::NotFound);
    }

    #[test]
    fn a_checkpoint_is_there_with_its_manifest_and_the_next_job_removes_what_has_none() {
        let bucket = Arc::default();
        let killed = job("s3://killed", &bucket);
        killed.own().unwrap();
        save(&killed, "step-00000001", &[("model.bpk", b"1")]).unwrap();
        let connection = killed.connection().unwrap();
        put(&killed, connection.file("step-00000002", "model.bpk"), "2");
        put(&killed, connection.key("notes"), "of the user");
        put(&killed, connection.file("step-notes", "day-1"), "of the user");
        let upload = connection.wait(async { Ok(bucket.create_multipart(&Key::from("any")).await?) }).unwrap();
        put(&killed, connection.upload("step-00000002", "optimizer.bpk"), &upload);
        assert_eq!(killed.names().unwrap(), ["step-00000001"]);
        assert!(killed.contains("step-00000001").unwrap() && !killed.contains("step-00000002").unwrap());
        let next = job("s3://killed", &bucket);
        assert_eq!(next.names().unwrap(), ["step-00000001"], "reading changes nothing");
        assert_eq!(objects(&next).len(), 6);
        next.own().unwrap();
        assert_eq!(
            objects(&next),
            ["notes", "step-00000001/manifest.json", "step-00000001/model.bpk", "step-notes/day-1"]
        );
        let again = connection.wait(async { Ok(bucket.put_part(&Key::from("any"), &upload, 0, "".into()).await?) });
        assert!(again.is_err(), "the upload was aborted");
        next.remove("step-00000001").unwrap();
        assert_eq!(objects(&next), ["notes", "step-notes/day-1"]);
    }

    #[test]
    fn a_job_that_lost_its_prefix_to_a_later_one_saves_nothing_more() {
        let bucket = Arc::default();
        let (first, second) = (job("s3://taken", &bucket), job("s3://taken", &bucket));
        first.own().unwrap();
        save(&first, "step-00000001", &[]).unwrap();
        second.own().unwrap();
        save(&second, "step-00000002", &[("model.bpk", b"2")]).unwrap();
        let refused = save(&first, "step-00000002", &[("model.bpk", b"1")]).unwrap_err().to_string();
        assert_eq!(refused, "another job has begun to save to s3://taken since this one did");
        let mut read = String::new();
        second.open("step-00000002", "model.bpk").unwrap().read_to_string(&mut read).unwrap();
        assert_eq!(read, "2");
    }

    /// The job that takes the prefix removes files whose manifest is on its way: such a save is no checkpoint, and no
    /// older one may be removed for it.
    #[test]
    fn a_job_that_loses_its_prefix_during_a_request_has_not_saved_and_removes_nothing() {
        let bucket = Arc::default();
        let (first, second) = (job("s3://lost", &bucket), job("s3://lost", &bucket));
        first.own().unwrap();
        save(&first, "step-00000001", &[]).unwrap();
        let connection = first.connection().unwrap();
        let manifest = async {
            connection.store.put(&connection.key(OWNER), "another".into()).await?;
            Ok(connection.store.put(&connection.file("step-00000002", MANIFEST), "{}".into()).await?)
        };
        let saved = connection.wait(first.as_owner(connection, manifest)).map(drop);
        assert_eq!(saved.unwrap_err().kind(), ErrorKind::AlreadyExists);
        second.own().unwrap();
        let refused = first.remove("step-00000001").unwrap_err().to_string();
        assert_eq!(refused, "another job has begun to save to s3://lost since this one did");
        assert_eq!(objects(&second), ["step-00000001/manifest.json", "step-00000002/manifest.json"]);
    }

    #[test]
    fn a_checkpoint_that_is_completed_after_the_listing_stays() {
        let storage = job("s3://late", &Arc::default());
        storage.own().unwrap();
        let connection = storage.connection().unwrap();
        for file in ["model.bpk", "optimizer.bpk"] {
            put(&storage, connection.file("step-00000001", file), "late");
            put(&storage, connection.file("step-00000002", file), "left");
        }
        let listed = connection.wait(connection.list(&connection.prefix)).unwrap();
        put(&storage, connection.file("step-00000001", MANIFEST), "{}");
        connection.wait(storage.remove_incomplete(connection, &listed)).unwrap();
        let of_step = ["manifest.json", "model.bpk", "optimizer.bpk"].map(|file| format!("step-00000001/{file}"));
        assert_eq!(objects(&storage), of_step);
    }

    #[test]
    fn a_checkpoint_of_another_job_stays_as_it_is() {
        let storage = job("s3://stays", &Arc::default());
        storage.own().unwrap();
        let name = "step-00000001";
        put(&storage, storage.connection().unwrap().file(name, MANIFEST), "of another job");
        let refused = save(&storage, name, &[("model.bpk", b"1")]).unwrap_err().to_string();
        assert_eq!(refused, "another job has saved this step to s3://stays since this one did");
        assert_eq!(objects(&storage), ["step-00000001/manifest.json"]);
        let there = io::read_to_string(storage.open(name, MANIFEST).unwrap()).unwrap();
        assert_eq!(there, "of another job");
    }

    #[test]
    fn a_save_removes_what_one_that_failed_has_left() {
        let storage = job("s3://again", &Arc::default());
        storage.own().unwrap();
        let (name, connection) = ("step-00000001", storage.connection().unwrap());
        put(&storage, connection.file(name, "optimizer.bpk"), "left");
        let upload = async { Ok(connection.store.create_multipart(&Key::from("any")).await?) };
        put(&storage, connection.upload(name, "model.bpk"), &connection.wait(upload).unwrap());
        save(&storage, name, &[("model.bpk", b"1")]).unwrap();
        assert_eq!(objects(&storage), ["step-00000001/manifest.json", "step-00000001/model.bpk"]);
    }

    #[test]
    fn slashes_at_the_end_name_the_same_directory() {
        assert_eq!(check(Path::new("s3://bucket/a//")), Ok("s3://bucket/a".into()));
    }

    #[test]
    fn a_program_with_an_async_runtime_saves_and_drops() {
        tokio::runtime::Builder::new_current_thread().build().unwrap().block_on(async {
            let storage = job("s3://runtime", &Arc::default());
            storage.own().unwrap();
            save(&storage, "step-00000001", &[]).unwrap();
        });
    }
}
