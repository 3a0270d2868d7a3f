//! Stores that the launcher hosts or visits, and who may come: where launchers meet, and where ranks meet.

use std::cell::Cell;
use std::fs::{self, File, OpenOptions};
use std::hash::{BuildHasher, Hasher, RandomState};
use std::io;
use std::net::TcpListener;
use std::os::fd::AsRawFd;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use burn_ddp_comm::{JobKey, LaunchEnv, Secret, Store, StoreClient, StoreServer, fail_join};

use crate::error::LaunchError;
use crate::launcher::Launcher;

/// How long the ranks' store is tried to be reached.
const REACH: Duration = Duration::from_secs(5);

/// What proves that somebody belongs to the job.
pub(crate) enum Trust {
    /// A secret, in a file that ranks read.
    Secret {
        secret: Secret,
        path: PathBuf,
        /// Holds a secret of this job alone, which goes with this process.
        _own: Option<File>,
    },
    /// Nothing: whoever reaches the job's ports may join.
    Network,
}

impl Trust {
    pub(crate) fn of(launcher: &Launcher) -> Result<Self, LaunchError> {
        let trusted =
            || std::env::var("BURN_DDP_TRUST_NETWORK").is_ok_and(|value| ["1", "true"].contains(&value.trim()));
        match &launcher.secret_file {
            Some(path) => {
                let path = std::path::absolute(path).map_err(|source| LaunchError::Store(source.into()))?;
                let secret = Secret::read(&path).map_err(|error| LaunchError::Usage(error.to_string()))?;
                Ok(Self::Secret { secret, path, _own: None })
            }
            None if launcher.nnodes > 1 && trusted() => Ok(Self::Network),
            None if launcher.nnodes > 1 => Err(LaunchError::Usage(
                "a job on several machines needs a secret, or any stranger could join it: run `burnrun secret FILE` on one machine, \
                 copy FILE to the others, and add --secret-file FILE on all; if nobody else can reach these machines, \
                 BURN_DDP_TRUST_NETWORK=1 does without"
                    .into(),
            )),
            None => Self::for_this_job(),
        }
    }

    /// A secret that only this process and its ranks ever see.
    fn for_this_job() -> Result<Self, LaunchError> {
        let secret = Secret::generate().map_err(|error| LaunchError::Store(error.into()))?;
        let file = unnamed(&std::env::temp_dir().join(format!("burn-ddp-{}.secret", random_id())));
        let file = file.and_then(|file| secret.write_to(file.try_clone()?).map(|()| file));
        let file =
            file.map_err(|source| LaunchError::System { doing: "hand the job's secret to its ranks", source })?;
        Ok(Self::Secret { secret, path: name_of(&file), _own: Some(file) })
    }

    fn key(&self, job: &str, generation: u32) -> JobKey {
        match self {
            Self::Secret { secret, .. } => JobKey::new(secret, job, generation),
            Self::Network => JobKey::trusting_network(job, generation),
        }
    }

    /// Serves the launchers' meeting where `listener` listens.
    pub(crate) fn serve(&self, listener: TcpListener, job: &str) -> Result<StoreServer, LaunchError> {
        StoreServer::serve(listener, &self.key(job, 0)).map_err(|source| LaunchError::Store(source.into()))
    }

    /// Visits the launchers' meeting.
    pub(crate) fn connect(
        &self,
        host: &str,
        port: u16,
        job: &str,
        attempt: Duration,
        answer_within: Duration,
    ) -> burn_ddp_comm::Result<Arc<dyn Store>> {
        let store = StoreClient::connect(&address(host, port), &self.key(job, 0), attempt)?;
        Ok(Arc::new(store.answer_within(answer_within)))
    }

    /// Tells a rank what it needs to prove.
    pub(crate) fn describe(&self, env: &mut LaunchEnv) {
        match self {
            Self::Secret { path, .. } => env.secret_file = Some(path.clone()),
            Self::Network => env.trust_network = true,
        }
    }
}

/// Where the ranks of one generation meet, on a port of its own: what is left of an earlier generation does not find it.
pub(crate) struct RankStore {
    /// Serves until it is dropped.
    server: StoreServer,
}

impl RankStore {
    /// On a free port of the address of `host`, which is this machine.
    pub(crate) fn open(host: &str, job: &str, generation: u32, trust: &Trust) -> Result<Self, LaunchError> {
        let server = StoreServer::bind((host, 0), &trust.key(job, generation));
        Ok(Self { server: server.map_err(|error| LaunchError::Store(error.into()))? })
    }

    pub(crate) fn port(&self) -> u16 {
        self.server.local_addr().port()
    }
}

/// Ends the wait of the ranks that are about to meet, once one of them cannot come any more.
pub(crate) struct Absence {
    address: String,
    job: JobKey,
    told: Cell<bool>,
}

impl Absence {
    /// For the ranks that meet at `host:port`.
    pub(crate) fn new(host: &str, port: u16, job: &str, generation: u32, trust: &Trust) -> Self {
        Self { address: address(host, port), job: trust.key(job, generation), told: Cell::new(false) }
    }

    /// Ranks that have met notice nothing. Does not block.
    pub(crate) fn tell(&self, rank: usize, cause: String) {
        // One that is missing is enough: the others cannot meet again either.
        if self.told.replace(true) {
            return;
        }
        let (address, job) = (self.address.clone(), self.job.clone());
        let told = thread::Builder::new().name("burn-ddp-absence".into()).spawn(move || {
            let store = StoreClient::connect(&address, &job, REACH);
            if let Err(error) = store.and_then(|store| fail_join(&store, &job, &[rank], &cause)) {
                tracing::debug!(%error, rank, "the ranks that are about to meet were not told that one is missing");
            }
        });
        if let Err(error) = told {
            tracing::warn!(%error, rank, "the ranks that are about to meet were not told that one is missing");
        }
    }
}

fn address(host: &str, port: u16) -> String {
    if host.contains(':') { format!("[{host}]:{port}") } else { format!("{host}:{port}") }
}

/// Sixteen digits that nobody else has; no secret.
pub(crate) fn random_id() -> String {
    format!("{:016x}", RandomState::new().build_hasher().finish())
}

/// A file without a name, so that nothing stays behind however this process ends.
pub(crate) fn unnamed(path: &Path) -> io::Result<File> {
    let file = OpenOptions::new().read(true).append(true).create_new(true).mode(0o600).open(path)?;
    fs::remove_file(path)?;
    Ok(file)
}

/// The name of an open file, for other processes.
pub(crate) fn name_of(file: &File) -> PathBuf {
    format!("/proc/{}/fd/{}", std::process::id(), file.as_raw_fd()).into()
}
