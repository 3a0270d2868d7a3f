//! The connection to a prefix in a bucket of S3-compatible storage: settings, errors, objects below the prefix.

use std::error::Error as _;
use std::ffi::OsString;
use std::fmt::Display;
use std::future::Future;
use std::io::{self, ErrorKind};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use futures_util::TryStreamExt;
use object_store::aws::{AmazonS3, AmazonS3Builder, AmazonS3ConfigKey};
use object_store::client::HttpError;
use object_store::path::Path as Key;
use object_store::{BackoffConfig, ClientConfigKey, Error, ObjectStoreExt, RetryConfig};
use tokio::runtime::{Builder, Runtime};

use super::object_transfer::{self, Store};

/// Variable with the seconds in which a request is tried again while the storage cannot be reached or fails.
const RETRY: &str = "BURN_DDP_STORAGE_RETRY";
/// A save ends within two and a half minutes after the storage became unreachable: 10 s may pass before the last try,
/// 30 s in it, and three times [`object_transfer::AFTER_FAILURE`] after it.
const DEFAULT_RETRY: Duration = Duration::from_secs(90);
/// Requests are tried again with the credentials of the first try, which are valid for five minutes.
const LONGEST_RETRY: Duration = Duration::from_secs(300);
/// Prefix of the objects that hold the ids of uploads under way.
const UPLOADS: &str = ".burn-ddp-uploads";

/// Objects below a prefix, and the thread that waits for requests.
#[derive(Debug)]
pub(super) struct Connection {
    pub(super) store: Arc<dyn Store>,
    pub(super) prefix: Key,
    /// `None` in `drop` only.
    runtime: Option<Runtime>,
}

impl Drop for Connection {
    fn drop(&mut self) {
        // Dropping a runtime would panic inside an async function of the caller.
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_background();
        }
    }
}

impl Connection {
    pub(super) fn new(store: Arc<dyn Store>, prefix: Key) -> io::Result<Self> {
        let runtime = Builder::new_current_thread().enable_all().build()?;
        Ok(Connection { store, prefix, runtime: Some(runtime) })
    }

    /// Waits for `work` on a thread of its own: the caller's thread may belong to an async runtime, which forbids
    /// blocking.
    pub(super) fn wait<T: Send>(&self, work: impl Future<Output = io::Result<T>> + Send) -> io::Result<T> {
        let runtime = self.runtime.as_ref().ok_or(ErrorKind::BrokenPipe)?;
        let done = std::thread::scope(|scope| {
            let thread = std::thread::Builder::new().name("object storage".into());
            let thread = thread.spawn_scoped(scope, || runtime.block_on(work))?;
            thread.join().unwrap_or_else(|_| Err(io::Error::other("a request panicked")))
        });
        done.map_err(with_advice)
    }

    pub(super) fn key(&self, name: &str) -> Key {
        self.prefix.clone().join(name)
    }

    pub(super) fn file(&self, checkpoint: &str, file: &str) -> Key {
        self.key(checkpoint).join(file)
    }

    /// Object with the id of the upload of a file.
    pub(super) fn upload(&self, checkpoint: &str, file: &str) -> Key {
        self.key(UPLOADS).join(checkpoint).join(file)
    }

    /// Names of all objects below a key, in parts below the prefix.
    pub(super) async fn list(&self, below: &Key) -> io::Result<Vec<Vec<String>>> {
        let objects: Vec<_> = self.store.list(Some(below)).try_collect().await?;
        let parts = |key: &Key| {
            let parts = key.prefix_match(&self.prefix)?;
            Some(parts.map(|part| part.as_ref().to_string()).collect())
        };
        Ok(objects.iter().filter_map(|object| parts(&object.location)).collect())
    }

    pub(super) async fn exists(&self, object: &Key) -> io::Result<bool> {
        match self.store.head(object).await {
            Ok(_) => Ok(true),
            Err(Error::NotFound { .. }) => Ok(false),
            Err(e) => Err(e.into()),
        }
    }

    /// Aborts uploads that did not end, of one checkpoint or of all.
    pub(super) async fn abort_uploads(&self, checkpoint: Option<&str>) -> io::Result<()> {
        let all = self.key(UPLOADS);
        let below = checkpoint.map_or(all.clone(), |checkpoint| all.join(checkpoint));
        for parts in self.list(&below).await? {
            if let [_, checkpoint, file] = parts.as_slice() {
                tracing::info!("aborting the upload of {checkpoint}/{file}, which did not end");
                let record = self.upload(checkpoint, file);
                let id = match self.store.get(&record).await {
                    // The upload has just ended.
                    Err(Error::NotFound { .. }) => continue,
                    id => id?.bytes().await?,
                };
                let id = String::from_utf8_lossy(&id);
                object_transfer::abort(&self.store, &self.file(checkpoint, file), &id, &record).await?;
            }
        }
        Ok(())
    }
}

/// Settings of the storage, from a URL and the environment.
pub(super) struct Settings {
    pub(super) store: AmazonS3,
    pub(super) prefix: Key,
    /// URL of the storage, if it is not Amazon's.
    pub(super) endpoint: String,
}

/// Reads `s3://BUCKET/PREFIX` and `AWS_*` variables.
pub(super) fn settings(url: &Path) -> Result<Settings, String> {
    let failed = |e: &dyn Display| format!("cannot open {}: {e}", url.display());
    let text = url.to_str().and_then(|url| url.strip_prefix("s3://")).unwrap_or_default();
    let (bucket, prefix) = text.split_once('/').unwrap_or((text, ""));
    if bucket.is_empty() {
        return Err(failed(&"write s3://BUCKET/PREFIX"));
    }
    let prefix = Key::parse(prefix.trim_end_matches('/')).map_err(|e| failed(&e))?;
    let retry_timeout = retry_time(std::env::var_os(RETRY)).map_err(|e| failed(&e))?;
    // The storage closes connections that are not used for a while, as between two saves.
    let idle = AmazonS3ConfigKey::Client(ClientConfigKey::PoolIdleTimeout);
    let mut builder = AmazonS3Builder::from_env().with_bucket_name(bucket).with_config(idle, "5 s");
    let endpoint = [AmazonS3ConfigKey::S3Endpoint, AmazonS3ConfigKey::Endpoint];
    let endpoint = endpoint.iter().find_map(|key| builder.get_config_value(key)).unwrap_or_default();
    if endpoint.starts_with("http://") {
        builder = builder.with_allow_http(true);
    }
    // Credentials are requested with the usual, shorter retries, so that missing credentials are an error soon.
    let credentials = builder.clone().build().map_err(|e| failed(&e))?.credentials().clone();
    // Waits grow from 0.1 to 10 seconds: the next is a random one below four times the last.
    let (init_backoff, max_backoff) = (Duration::from_millis(100), Duration::from_secs(10));
    let backoff = BackoffConfig { init_backoff, max_backoff, base: 4.0 };
    let retry = RetryConfig { backoff, max_retries: 1000, retry_timeout };
    let store = builder.with_credentials(credentials).with_retry(retry).build().map_err(|e| failed(&e))?;
    Ok(Settings { store, prefix, endpoint })
}

fn retry_time(variable: Option<OsString>) -> Result<Duration, String> {
    let Some(text) = variable else { return Ok(DEFAULT_RETRY) };
    let seconds = text.to_str().and_then(|text| text.trim().parse().ok());
    let time = seconds.and_then(|seconds| Duration::try_from_secs_f64(seconds).ok());
    time.filter(|time| *time <= LONGEST_RETRY)
        .ok_or_else(|| format!("{RETRY}={text:?} is not a number of seconds from 0 to {}", LONGEST_RETRY.as_secs()))
}

/// Adds advice on what to check to an error of the storage.
pub(super) fn with_advice(error: io::Error) -> io::Error {
    let of_storage = error.get_ref().and_then(|e| e.downcast_ref::<Error>());
    match of_storage.and_then(advice) {
        Some(advice) => io::Error::new(error.kind(), format!("{error}; {advice}")),
        None => error,
    }
}

fn advice(error: &Error) -> Option<&'static str> {
    let text = error.to_string();
    let mut causes = std::iter::successors(error.source(), |&e| e.source());
    let unreachable = causes.any(|e| e.is::<HttpError>());
    // For many requests the client gives the status in the text only.
    let has = |words: &[&str]| words.iter().any(|words| text.contains(words));
    if has(&["/latest/meta-data", "/latest/api/token"]) {
        // The address of the service for roles.
        Some(
            "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY: without them the role of the machine is asked, \
             and this one has none",
        )
    } else if has(&["NoSuchBucket"]) {
        Some("check the name of the bucket, AWS_REGION and AWS_ENDPOINT_URL")
    } else if has(&["status code: 401", "status code: 403"]) {
        Some(
            "check AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_SESSION_TOKEN and AWS_REGION, \
             and that this user may list, read, write and delete there",
        )
    } else if unreachable {
        Some("check AWS_ENDPOINT_URL and the network")
    } else {
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn urls_name_a_bucket_and_a_prefix() {
        let prefix = |url: &str| settings(Path::new(url)).map(|settings| settings.prefix.to_string());
        assert_eq!(prefix("s3://bucket/a/run-1/").as_deref(), Ok("a/run-1"));
        assert_eq!(prefix("s3://bucket").as_deref(), Ok(""));
        for wrong in ["s3://", "s3:///a", "s3://bucket/a//b"] {
            assert!(prefix(wrong).unwrap_err().starts_with(&format!("cannot open {wrong}: ")));
        }
    }

    #[test]
    fn requests_are_tried_again_as_long_as_the_variable_says() {
        let time = |text: &str| retry_time(Some(text.into())).map(|time| time.as_secs_f64());
        assert_eq!(retry_time(None), Ok(DEFAULT_RETRY));
        assert_eq!([time("0"), time(" 2.5 "), time("300")], [Ok(0.0), Ok(2.5), Ok(300.0)]);
        for wrong in ["", "-1", "301", "soon", "90s", "NaN", "inf"] {
            let said = format!("BURN_DDP_STORAGE_RETRY={wrong:?} is not a number of seconds from 0 to 300");
            assert_eq!(time(wrong), Err(said));
        }
    }
}
