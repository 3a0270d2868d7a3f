//! Where the ranks of a job meet, and the variables that say so.

use std::path::PathBuf;

use burn_ddp_comm::{LaunchEnv, Meeting, StoreServer};

use crate::error::LaunchError;

/// The rendezvous store of one job, on a free loopback port.
pub(crate) struct JobStore {
    /// Serves, this job's ranks only, until it is dropped.
    server: StoreServer,
    job_id: String,
    nproc: usize,
    /// To which ranks append whom they blame. Removed on drop.
    faults: Option<PathBuf>,
}

impl JobStore {
    pub(crate) fn open(job_id: String, nproc: usize) -> Result<Self, LaunchError> {
        let server = StoreServer::bind_for_job("127.0.0.1:0", &job_id).map_err(|e| LaunchError::Store(e.into()))?;
        Ok(Self { server, faults: create_faults(&job_id), job_id, nproc })
    }

    /// The variables that tell one rank who it is and where the store is.
    pub(crate) fn variables(&self, rank: usize) -> Vec<(String, String)> {
        let address = self.server.local_addr();
        let env = LaunchEnv {
            rank,
            world_size: self.nproc,
            local_rank: rank,
            local_world_size: self.nproc,
            node_rank: 0,
            meeting: Meeting::Launcher { host: address.ip().to_string(), port: address.port() },
            job_id: self.job_id.clone(),
            launcher: "burnrun",
            faults: self.faults.clone(),
        };
        env.variables()
    }

    /// The rank that the first report blames.
    pub(crate) fn culprit(&self) -> Option<usize> {
        let reports = std::fs::read_to_string(self.faults.as_ref()?).ok()?;
        reports.lines().next()?.parse().ok()
    }
}

impl Drop for JobStore {
    fn drop(&mut self) {
        if let Some(file) = &self.faults {
            let _ = std::fs::remove_file(file);
        }
    }
}

/// Without this file the report blames the first rank to end, which usually is right.
fn create_faults(job_id: &str) -> Option<PathBuf> {
    use std::os::unix::fs::OpenOptionsExt;
    let file = std::env::temp_dir().join(format!("burn-ddp-{job_id}.faults"));
    match std::fs::OpenOptions::new().write(true).create_new(true).mode(0o600).open(&file) {
        Ok(_) => Some(file),
        Err(error) => {
            tracing::warn!(%error, file = %file.display(), "ranks cannot report who failed first");
            None
        }
    }
}
