//! Where the ranks of a job meet, and the variables that say so.

use burn_ddp_comm::{LaunchEnv, Meeting, StoreServer};

use crate::error::LaunchError;

/// The rendezvous store of one job, on a free loopback port.
pub(crate) struct JobStore {
    /// Serves, this job's ranks only, until it is dropped.
    server: StoreServer,
    job_id: String,
    nproc: usize,
}

impl JobStore {
    pub(crate) fn open(job_id: String, nproc: usize) -> Result<Self, LaunchError> {
        let server = StoreServer::bind_for_job("127.0.0.1:0", &job_id).map_err(|e| LaunchError::Store(e.into()))?;
        Ok(Self { server, job_id, nproc })
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
        };
        env.variables()
    }
}
