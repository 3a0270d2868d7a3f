//! The store in which the ranks of one generation meet. Node 0's launcher hosts it; any launcher can fail the meeting
//! when one of its ranks exits before it has joined.

use std::cell::Cell;
use std::thread;
use std::time::Duration;

use burn_ddp_comm::{JobKey, StoreClient, StoreServer, fail_join};

use crate::error::LaunchError;
use crate::job_authentication::{Trust, address};

/// Longest time to connect to the ranks' store.
const REACH: Duration = Duration::from_secs(5);

/// Store of one generation. It has a port of its own, so processes left over from an earlier generation cannot reach
/// it.
pub(crate) struct RankStore {
    /// Serves until it is dropped.
    server: StoreServer,
}

impl RankStore {
    /// Opens the store on a free port of `host`, a name or address of this machine.
    pub(crate) fn open(host: &str, job: &str, generation: u32, trust: &Trust) -> Result<Self, LaunchError> {
        let server = StoreServer::bind((host, 0), &trust.key(job, generation));
        Ok(Self { server: server.map_err(|error| LaunchError::Store(error.into()))? })
    }

    pub(crate) fn port(&self) -> u16 {
        self.server.local_addr().port()
    }
}

/// Fails the meeting of the ranks once one of them has exited and cannot join any more.
pub(crate) struct JoinAbort {
    address: String,
    job: JobKey,
    announced: Cell<bool>,
}

impl JoinAbort {
    /// For the ranks that meet at `host:port`.
    pub(crate) fn new(host: &str, port: u16, job: &str, generation: u32, trust: &Trust) -> Self {
        Self { address: address(host, port), job: trust.key(job, generation), announced: Cell::new(false) }
    }

    /// Reports that `rank` will not join, and why. Has no effect on ranks that have already met. Does not block.
    pub(crate) fn announce(&self, rank: usize, cause: String) {
        // One missing rank is enough to fail the meeting.
        if self.announced.replace(true) {
            return;
        }
        let (address, job) = (self.address.clone(), self.job.clone());
        let started = thread::Builder::new().name("burn-ddp-absence".into()).spawn(move || {
            let store = StoreClient::connect(&address, &job, REACH);
            if let Err(error) = store.and_then(|store| fail_join(&store, &job, &[rank], &cause)) {
                tracing::debug!(%error, rank, "cannot report a missing rank to the ranks that wait for it");
            }
        });
        if let Err(error) = started {
            tracing::warn!(%error, rank, "cannot report a missing rank to the ranks that wait for it");
        }
    }
}
