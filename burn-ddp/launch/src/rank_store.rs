//! The store in which the ranks of one generation meet: node 0's launcher hosts it, and any launcher can fail the
//! meeting.

use std::cell::Cell;
use std::thread;
use std::time::Duration;

use burn_ddp_comm::{JobKey, StoreClient, StoreServer, fail_join};

use crate::error::LaunchError;
use crate::job_authentication::{Trust, address};

/// Longest time to connect to the ranks' store.
const REACH: Duration = Duration::from_secs(5);

/// Store of one generation, on a port of its own: processes left over from an earlier generation do not find it.
pub(crate) struct RankStore {
    /// Serves until it is dropped.
    server: StoreServer,
}

impl RankStore {
    /// Opens it on a free port of the address of `host`, which is this machine.
    pub(crate) fn open(host: &str, job: &str, generation: u32, trust: &Trust) -> Result<Self, LaunchError> {
        let server = StoreServer::bind((host, 0), &trust.key(job, generation));
        Ok(Self { server: server.map_err(|error| LaunchError::Store(error.into()))? })
    }

    pub(crate) fn port(&self) -> u16 {
        self.server.local_addr().port()
    }
}

/// Fails the meeting of the ranks once one of them cannot come any more.
pub(crate) struct JoinAbort {
    address: String,
    job: JobKey,
    announced: Cell<bool>,
}

impl JoinAbort {
    /// Makes one for the ranks that meet at `host:port`.
    pub(crate) fn new(host: &str, port: u16, job: &str, generation: u32, trust: &Trust) -> Self {
        Self { address: address(host, port), job: trust.key(job, generation), announced: Cell::new(false) }
    }

    /// Reports that `rank` will not come, and why. Ranks that have met notice nothing. Does not block.
    pub(crate) fn announce(&self, rank: usize, cause: String) {
        // One that is missing is enough: the others cannot meet again either.
        if self.announced.replace(true) {
            return;
        }
        let (address, job) = (self.address.clone(), self.job.clone());
        let started = thread::Builder::new().name("burn-ddp-absence".into()).spawn(move || {
            let store = StoreClient::connect(&address, &job, REACH);
            if let Err(error) = store.and_then(|store| fail_join(&store, &job, &[rank], &cause)) {
                tracing::debug!(%error, rank, "cannot tell the joining ranks that one is missing");
            }
        });
        if let Err(error) = started {
            tracing::warn!(%error, rank, "cannot tell the joining ranks that one is missing");
        }
    }
}
