//! Transfer of files to and from object storage, a few parts at a time, so that memory does not grow with a file.

use std::fs::File;
use std::future::Future;
use std::io::{self, ErrorKind};
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use object_store::multipart::{MultipartStore, PartId};
use object_store::path::Path;
use object_store::{Error, ObjectStore, ObjectStoreExt, PutMode};
use tokio::task::JoinSet;

/// Bytes of a part of a file that is longer.
const PART_BYTES: u64 = 16 << 20;
/// Number of parts that are transferred at the same time, and are in memory.
const AT_ONCE: usize = 4;
/// Parts that S3 allows one object.
const MAX_PARTS: u64 = 10_000;

/// Longest time of each step after a failed request, which may itself have taken two minutes: checking whether its
/// object exists after all, aborting its upload, removing its checkpoint. The next job removes what is left.
pub(super) const AFTER_FAILURE: Duration = Duration::from_secs(5);

/// A conditional request that took longer than this to fail is not repeated.
const AGAIN: Duration = Duration::from_secs(60);
/// Longest time of the repetition.
const SECOND: Duration = Duration::from_secs(30);

/// Lowest speed at which an object is read, when it is compared with the bytes that were written.
const SLOWEST_BYTES_PER_SECOND: f64 = 1e6;

/// Storage of objects, also in parts.
pub(super) trait Store: ObjectStore + MultipartStore {}

impl<S: ObjectStore + MultipartStore> Store for S {}

/// Uploads a file as a new object, which appears as a whole or not at all. Right before it appears, `allowed` must
/// return `Ok`. During an upload in parts the object `record` holds the upload's id, for [`abort`], since the storage
/// keeps the parts until they are aborted.
pub(super) async fn put(
    store: &Arc<dyn Store>,
    file: &File,
    to: &Path,
    record: &Path,
    allowed: impl Future<Output = io::Result<()>>,
) -> io::Result<()> {
    let len = file.metadata()?.len();
    if len <= PART_BYTES {
        let bytes = read(file, 0..len)?.into();
        allowed.await?;
        return put_new(store, to, bytes).await;
    }
    let id = store.create_multipart(to).await?;
    let upload = async {
        store.put(record, id.clone().into()).await?;
        let parts = put_parts(store, file, len, to, &id).await?;
        allowed.await?;
        if let Err(e) = store.complete_multipart(to, &id, parts).await {
            // The answer to a first request may have been lost; the second request then finds no upload.
            let there = tokio::time::timeout(AFTER_FAILURE, store.head(to)).await;
            if !matches!(there, Ok(Ok(object)) if object.size == len) {
                return Err(e.into());
            }
        }
        if let Err(e) = delete(store, record).await {
            tracing::warn!("{record} stays until the next job saves: {e}");
        }
        Ok(())
    };
    let uploaded = upload.await;
    if uploaded.is_err() {
        let reason = match tokio::time::timeout(AFTER_FAILURE, abort(store, to, &id, record)).await {
            Ok(Ok(())) => return uploaded,
            Ok(Err(e)) => e.to_string(),
            Err(_) => "no answer".into(),
        };
        tracing::warn!("parts of {to} stay until the next job saves: the upload cannot be aborted: {reason}");
    }
    uploaded
}

/// Makes a request, and repeats it once if it failed soon. The client itself does not repeat a conditional request, a
/// removal or an abort after a timeout or a lost connection.
async fn twice<T, F: Future<Output = io::Result<T>>>(request: impl Fn() -> F) -> io::Result<T> {
    let began = Instant::now();
    match request().await {
        Err(e) if e.kind() != ErrorKind::AlreadyExists && began.elapsed() < AGAIN => {
            tokio::time::timeout(SECOND, request()).await.unwrap_or(Err(e))
        }
        outcome => outcome,
    }
}

/// Removes an object, which may be gone already.
pub(super) async fn delete(store: &Arc<dyn Store>, at: &Path) -> io::Result<()> {
    let request = async || match store.delete(at).await {
        Ok(()) | Err(Error::NotFound { .. }) => Ok(()),
        Err(e) => Err(e.into()),
    };
    twice(request).await
}

/// Makes a new object. [`io::ErrorKind::AlreadyExists`] if there is another one.
pub(super) async fn put_new(store: &Arc<dyn Store>, to: &Path, bytes: Bytes) -> io::Result<()> {
    twice(|| put_new_once(store, to, bytes.clone())).await
}

async fn put_new_once(store: &Arc<dyn Store>, to: &Path, bytes: Bytes) -> io::Result<()> {
    let put = store.put_opts(to, bytes.clone().into(), PutMode::Create.into()).await;
    let error = match put {
        Ok(_) => return Ok(()),
        // With AWS_CONDITIONAL_PUT=disabled, for storage that has no such request.
        Err(Error::NotImplemented { .. }) => return Ok(store.put(to, bytes.into()).await.map(drop)?),
        Err(error) => error,
    };
    // The answer to a first request may have been lost; the second request then finds the object.
    let there = async { store.get(to).await?.bytes().await };
    let time = AFTER_FAILURE + Duration::from_secs_f64(bytes.len() as f64 / SLOWEST_BYTES_PER_SECOND);
    match tokio::time::timeout(time, there).await {
        Ok(Ok(there)) if there == bytes => Ok(()),
        Ok(Ok(_)) => Err(io::Error::new(ErrorKind::AlreadyExists, error)),
        // A storage that is still busy with the first request may refuse the second one as if the object existed.
        _ => Err(io::Error::other(error)),
    }
}

async fn put_parts(store: &Arc<dyn Store>, file: &File, len: u64, to: &Path, id: &str) -> io::Result<Vec<PartId>> {
    let mut parts = Vec::new();
    let start = |n, range| {
        let (store, to, id, bytes) = (store.clone(), to.clone(), id.to_string(), read(file, range)?);
        Ok(async move { store.put_part(&to, &id, n, bytes.into()).await })
    };
    each_part(len, start, |n, _, part| {
        parts.push((n, part));
        Ok(())
    })
    .await?;
    parts.sort_unstable_by_key(|(n, _)| *n);
    Ok(parts.into_iter().map(|(_, part)| part).collect())
}

/// Removes the parts of an upload that did not end, and its record.
pub(super) async fn abort(store: &Arc<dyn Store>, to: &Path, id: &str, record: &Path) -> io::Result<()> {
    let (id, abort) = (id.to_string(), async |id: &String| match store.abort_multipart(to, id).await {
        Ok(()) | Err(Error::NotFound { .. }) => Ok(()),
        Err(e) => Err(e.into()),
    });
    twice(|| abort(&id)).await?;
    delete(store, record).await
}

/// Downloads an object into a file without a name, which ends with its last handle.
pub(super) async fn get(store: &Arc<dyn Store>, from: &Path) -> io::Result<File> {
    get_into(tempfile::tempfile(), store, from).await
}

async fn get_into(temporary: io::Result<File>, store: &Arc<dyn Store>, from: &Path) -> io::Result<File> {
    let len = store.head(from).await?.size;
    // An error of this machine's disk says nothing about the object.
    let local =
        |e| io::Error::other(format!("cannot write a temporary file in {}: {e}", std::env::temp_dir().display()));
    let file = temporary.map_err(local)?;
    let start = |_, range| {
        let (store, from) = (store.clone(), from.clone());
        Ok(async move { store.get_range(&from, range).await })
    };
    each_part(len, start, |_, at, bytes| file.write_all_at(&bytes, at).map_err(local)).await?;
    Ok(file)
}

/// Runs the requests that `start` makes for the parts of `len` bytes, [`AT_ONCE`] at a time. Calls `done` with the
/// number and the offset of each part and what its request has returned, in any order.
async fn each_part<T: Send + 'static, F>(
    len: u64,
    mut start: impl FnMut(usize, Range<u64>) -> io::Result<F>,
    mut done: impl FnMut(usize, u64, T) -> io::Result<()>,
) -> io::Result<()>
where
    F: Future<Output = object_store::Result<T>> + Send + 'static,
{
    let bytes = PART_BYTES.max(len.div_ceil(MAX_PARTS));
    let mut ranges = (0..len.div_ceil(bytes)).map(|n| (n as usize, n * bytes..len.min((n + 1) * bytes)));
    let mut under_way = JoinSet::new();
    loop {
        for (n, range) in ranges.by_ref().take(AT_ONCE - under_way.len()) {
            let (at, request) = (range.start, start(n, range)?);
            under_way.spawn(async move { (n, at, request.await) });
        }
        let Some(ended) = under_way.join_next().await else { return Ok(()) };
        let (n, at, outcome) = ended.map_err(io::Error::other)?;
        done(n, at, outcome?)?;
    }
}

fn read(file: &File, range: Range<u64>) -> io::Result<Vec<u8>> {
    let mut bytes = vec![0; (range.end - range.start) as usize];
    file.read_exact_at(&mut bytes, range.start)?;
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use object_store::memory::InMemory;
    use object_store::throttle::{ThrottleConfig, ThrottledStore};

    use super::*;

    fn wait<T>(work: impl Future<Output = T>) -> T {
        tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(work)
    }

    #[test]
    fn a_new_object_is_made_once() {
        let store: Arc<dyn Store> = Arc::new(InMemory::new());
        let put = |bytes: &'static [u8]| wait(put_new(&store, &Path::from("a"), Bytes::from_static(bytes)));
        put(b"1").unwrap();
        put(b"1").expect("the same object: the first answer was lost");
        assert_eq!(put(b"2").unwrap_err().kind(), ErrorKind::AlreadyExists);
    }

    #[test]
    fn an_object_that_cannot_be_read_in_time_is_not_said_to_be_another_one() {
        let (there, at) = (InMemory::new(), Path::from("a"));
        wait(there.put(&at, "1".into())).unwrap();
        let wait_get_per_call = AFTER_FAILURE * 2;
        let config = ThrottleConfig { wait_get_per_call, ..ThrottleConfig::default() };
        let store: Arc<dyn Store> = Arc::new(ThrottledStore::new(there, config));
        let error = wait(put_new_once(&store, &at, Bytes::from_static(b"1"))).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Other, "{error}");
    }

    #[test]
    fn a_request_that_failed_is_made_once_more() {
        let attempt = |outcomes: [Result<(), ErrorKind>; 2]| {
            let made = AtomicUsize::new(0);
            let request = async || outcomes[made.fetch_add(1, Ordering::Relaxed)].map_err(io::Error::from);
            let outcome = wait(twice(request)).map_err(|e| e.kind());
            (outcome, made.into_inner())
        };
        assert_eq!(attempt([Err(ErrorKind::TimedOut), Ok(())]), (Ok(()), 2));
        assert_eq!(attempt([Err(ErrorKind::TimedOut); 2]), (Err(ErrorKind::TimedOut), 2));
        assert_eq!(attempt([Err(ErrorKind::AlreadyExists), Ok(())]), (Err(ErrorKind::AlreadyExists), 1));
    }

    #[test]
    fn a_missing_folder_for_temporary_files_is_no_missing_object() {
        let (store, at): (Arc<dyn Store>, _) = (Arc::new(InMemory::new()), Path::from("a"));
        let missing = || Err(ErrorKind::NotFound.into());
        assert_eq!(wait(get_into(missing(), &store, &at)).unwrap_err().kind(), ErrorKind::NotFound, "no object");
        wait(store.put(&at, "1".into())).unwrap();
        let error = wait(get_into(missing(), &store, &at)).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Other, "{error}");
        assert!(error.to_string().starts_with("cannot write a temporary file in "), "{error}");
    }
}
