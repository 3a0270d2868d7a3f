//! The keys of one job and restart, made from the job's secret.

use std::fmt;
use std::path::{Path, PathBuf};

use sha2::{Digest, Sha256};

use crate::Secret;
use crate::auth::hmac_key::Key;

/// Key that a process needs to use the store of a job: the job's name, its generation, and the keys derived from its
/// secret.
///
/// ```
/// use burn_ddp_comm::{JobKey, Secret, Store, StoreClient, StoreServer};
/// use std::time::Duration;
///
/// let secret = Secret::generate()?;
/// let server = StoreServer::bind("127.0.0.1:0", &JobKey::new(&secret, "job 7", 0))?;
/// let address = server.local_addr().to_string();
///
/// let store = StoreClient::connect(&address, &JobKey::new(&secret, "job 7", 0), Duration::from_secs(10))?;
/// store.set("key", b"value")?;
///
/// // A process of the generation before, or with another secret, is turned away.
/// let stranger = JobKey::new(&Secret::generate()?, "job 7", 0);
/// assert!(StoreClient::connect(&address, &stranger, Duration::from_secs(10)).is_err());
/// # Ok::<(), burn_ddp_comm::Error>(())
/// ```
#[derive(Clone)]
pub struct JobKey {
    name: String,
    tag: JobTag,
    store: Key,
    links: Key,
    /// File of the secret, for messages.
    secret_file: Option<PathBuf>,
}

/// Key that the ranks of one world prove to each other.
#[derive(Clone, Debug)]
pub(crate) struct LinkKey {
    pub(crate) key: Key,
    pub(crate) tag: JobTag,
}

/// Tag of a job, so that a process that reaches another job's listener gets a clear error. It proves nothing.
pub(crate) type JobTag = [u8; 8];

impl JobKey {
    /// Key of generation `restart_count` of the job.
    pub fn new(secret: &Secret, job_id: &str, restart_count: u32) -> JobKey {
        let secret_file = secret.file().map(Path::to_owned);
        JobKey { secret_file, ..Self::derive(secret.key(), job_id, restart_count) }
    }

    /// Key of a job without a secret: anyone who knows the job's name can derive it. For trusted networks, and for
    /// sockets that other users cannot reach.
    pub fn trusting_network(job_id: &str, restart_count: u32) -> JobKey {
        Self::derive(&Key::new([0; 32]), job_id, restart_count)
    }

    fn derive(secret: &Key, job_id: &str, restart_count: u32) -> JobKey {
        let restart = restart_count.to_le_bytes();
        let key = |purpose: &[u8]| secret.derive(&[purpose, job_id.as_bytes(), &restart]);
        let hash = Sha256::new().chain_update(restart).chain_update(job_id).finalize();
        let mut tag = JobTag::default();
        tag.copy_from_slice(&hash[..8]);
        let name = match restart_count {
            0 => job_id.to_owned(),
            n => format!("{job_id}, restart {n}"),
        };
        JobKey { name, tag, store: key(b"store"), links: key(b"links"), secret_file: None }
    }

    /// The job's id; after a restart, also the number of the restart.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// File that the secret was read from.
    pub(crate) fn secret_file(&self) -> Option<&Path> {
        self.secret_file.as_deref()
    }

    pub(crate) fn tag(&self) -> JobTag {
        self.tag
    }

    /// Key of connections to the store.
    pub(crate) fn store(&self) -> &Key {
        &self.store
    }

    /// Key of connections between the ranks of one world, whose rendezvous drew `token`.
    pub(crate) fn links(&self, token: &[u8]) -> LinkKey {
        LinkKey { key: self.links.derive(&[token]), tag: self.tag }
    }
}

impl fmt::Debug for JobKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "JobKey({:?})", self.name)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_job_generation_and_use_has_a_key_of_its_own() {
        let (secret, other) = (Secret::generate().unwrap(), Secret::generate().unwrap());
        let keys = [
            JobKey::new(&secret, "a", 0),
            JobKey::new(&secret, "a", 1),
            JobKey::new(&secret, "b", 0),
            JobKey::new(&other, "a", 0),
            JobKey::trusting_network("a", 0),
        ];
        let mut all: Vec<[u8; 32]> = keys
            .iter()
            .flat_map(|key| [key.store.clone(), key.links(b"1").key, key.links(b"2").key])
            .map(|key| *key.bytes())
            .collect();
        all.sort_unstable();
        all.dedup();
        assert_eq!(all.len(), 15);
        assert_eq!(JobKey::new(&secret, "a", 1).store.bytes(), keys[1].store.bytes());
        assert_eq!(format!("{:?}", keys[1]), "JobKey(\"a, restart 1\")");
    }
}
