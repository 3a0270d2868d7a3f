//! Where the ranks of a job meet, and the variables that say so.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Read};
use std::os::fd::AsRawFd;
use std::os::unix::fs::OpenOptionsExt;
use std::path::PathBuf;

use burn_ddp_comm::post_mortem::Event;
use burn_ddp_comm::{JobKey, LaunchEnv, Meeting, Secret, StoreServer};

use crate::error::LaunchError;

/// The rendezvous store of one job, on a free loopback port.
pub(crate) struct JobStore {
    /// Serves, this job's ranks only, until it is dropped.
    server: StoreServer,
    job_id: String,
    nproc: usize,
    /// Holds the job's secret, for its ranks to read.
    secret: File,
    /// To which ranks append what happens.
    events: Option<File>,
}

impl JobStore {
    pub(crate) fn open(job_id: String, nproc: usize) -> Result<Self, LaunchError> {
        let error = |e: burn_ddp_comm::Error| LaunchError::Store(e.into());
        let secret = Secret::generate().map_err(error)?;
        let server = StoreServer::bind("127.0.0.1:0", &JobKey::new(&secret, &job_id, 0)).map_err(error)?;
        let secret = share(&secret, &job_id).map_err(|e| LaunchError::Store(Box::new(e)))?;
        Ok(Self { server, secret, events: create_events(&job_id), job_id, nproc })
    }

    /// The variables that tell one rank who it is and where the store is.
    pub(crate) fn variables(&self, rank: usize) -> Vec<(String, String)> {
        let address = self.server.local_addr();
        let meeting = Meeting::Launcher { host: address.ip().to_string(), port: address.port() };
        let mut env = LaunchEnv::new(rank, self.nproc, meeting, &self.job_id);
        env.secret_file = Some(name_of(&self.secret));
        env.events = self.events.as_ref().map(name_of);
        env.variables()
    }

    /// The rank that caused the first failure.
    pub(crate) fn culprit(&self) -> Option<usize> {
        let mut events = String::new();
        self.events.as_ref()?.read_to_string(&mut events).ok()?;
        let mut failures =
            events.lines().filter_map(Event::parse).filter(|event| matches!(event, Event::Failed { .. }));
        match failures.next()? {
            Event::Failed { culprit, .. } => culprit,
            _ => None,
        }
    }
}

/// A file with the secret.
fn share(secret: &Secret, job_id: &str) -> io::Result<File> {
    let file = unnamed(job_id, "secret")?;
    secret.write_to(file.try_clone()?)?;
    Ok(file)
}

/// Without it the report blames the first rank to end, which usually is right.
fn create_events(job_id: &str) -> Option<File> {
    unnamed(job_id, "events").inspect_err(|error| tracing::warn!(%error, "ranks cannot report who failed first")).ok()
}

/// A file without a name, so that nothing stays behind however this process ends; ranks of this user reach it through this process.
fn unnamed(job_id: &str, what: &str) -> io::Result<File> {
    let path = std::env::temp_dir().join(format!("burn-ddp-{job_id}.{what}"));
    let file = OpenOptions::new().read(true).append(true).create_new(true).mode(0o600).open(&path)?;
    fs::remove_file(&path)?;
    Ok(file)
}

/// The name of an open file, for other processes.
fn name_of(file: &File) -> PathBuf {
    format!("/proc/{}/fd/{}", std::process::id(), file.as_raw_fd()).into()
}
