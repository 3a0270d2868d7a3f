//! Proof that a process belongs to the job. The stores of launchers and of ranks refuse a process without it.

use std::hash::{BuildHasher, Hasher, RandomState};
use std::io;
use std::net::SocketAddr;
use std::os::fd::RawFd;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use burn_ddp_comm::{JobKey, LaunchEnv, Secret, Store, StoreClient, StoreServer};

use crate::error::LaunchError;
use crate::handed_over_files::HandedOver;
use crate::job_spec::JobSpec;

/// Proof that a process belongs to the job.
pub(crate) enum Trust {
    /// A secret, in a file that ranks read.
    Secret {
        secret: Secret,
        path: PathBuf,
        /// File in memory with the secret, which ranks inherit; `None` if the secret is the user's file.
        own: Option<HandedOver>,
    },
    /// No proof: every process that reaches the job's ports may join.
    Network,
}

impl Trust {
    pub(crate) fn of(spec: &JobSpec) -> Result<Self, LaunchError> {
        let trusted =
            || std::env::var("BURN_DDP_TRUST_NETWORK").is_ok_and(|value| ["1", "true"].contains(&value.trim()));
        if let Some(secret) = &spec.secret {
            return Self::inherited(secret.clone());
        }
        match &spec.secret_file {
            Some(path) => {
                let path = std::path::absolute(path).map_err(|source| LaunchError::Store(source.into()))?;
                let secret = Secret::read(&path).map_err(|error| LaunchError::Usage(error.to_string()))?;
                Ok(Self::Secret { secret, path, own: None })
            }
            None if spec.nnodes > 1 && trusted() => Ok(Self::Network),
            None if spec.nnodes > 1 => Err(LaunchError::Usage(
                "a job on several machines needs a secret, or any stranger could join it: run `burnrun secret FILE` on \
                 one machine, copy FILE to the others, and add --secret-file FILE on all; if only trusted users can \
                 reach these machines, set BURN_DDP_TRUST_NETWORK=1 instead"
                    .into(),
            )),
            // A new secret that only this process and its ranks see.
            None => Self::inherited(Secret::generate().map_err(|error| LaunchError::Store(error.into()))?),
        }
    }

    /// A secret in a file without a name, which ranks inherit.
    fn inherited(secret: Secret) -> Result<Self, LaunchError> {
        let own = HandedOver::create("secret").and_then(|own| {
            secret.write_to(own.file().try_clone()?)?;
            own.seal()?;
            Ok(own)
        });
        let own = own.map_err(|source| LaunchError::System { doing: "hand the job's secret to its ranks", source })?;
        Ok(Self::Secret { secret, path: own.path(), own: Some(own) })
    }

    pub(crate) fn key(&self, job: &str, generation: u32) -> JobKey {
        match self {
            Self::Secret { secret, .. } => JobKey::new(secret, job, generation),
            Self::Network => JobKey::trusting_network(job, generation),
        }
    }

    /// Serves the store of the launchers' meeting at each of `addresses` that this machine has.
    pub(crate) fn serve(&self, addresses: &[SocketAddr], job: &str) -> io::Result<StoreServer> {
        StoreServer::serve(addresses, &self.key(job, 0))
    }

    /// Connects to the store of the launchers' meeting.
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

    /// Descriptor that ranks inherit.
    pub(crate) fn fd(&self) -> Option<RawFd> {
        match self {
            Self::Secret { own, .. } => own.as_ref().map(HandedOver::fd),
            Self::Network => None,
        }
    }

    /// Sets the variables that a rank needs for its proof.
    pub(crate) fn describe(&self, env: &mut LaunchEnv) {
        match self {
            Self::Secret { path, .. } => env.secret_file = Some(path.clone()),
            Self::Network => env.trust_network = true,
        }
    }
}

pub(crate) fn address(host: &str, port: u16) -> String {
    if host.contains(':') { format!("[{host}]:{port}") } else { format!("{host}:{port}") }
}

/// Sixteen random hexadecimal digits that tell jobs apart; they are not secret.
pub(crate) fn random_id() -> String {
    format!("{:016x}", RandomState::new().build_hasher().finish())
}
