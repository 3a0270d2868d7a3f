//! The threads fabric: finds the ranks of a group within the process.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};

use super::NAME;
use super::frame_queues::Hub;
use super::transport::ThreadsTransport;
use crate::Result;
use crate::call::Call;
use crate::engine::{Engine, Fabric, HostEngine};
use crate::membership::Membership;
use crate::poison_free_locks::lock;

/// Opens the groups of one rank among the threads of this process.
pub(crate) struct ThreadsFabric {
    job: Arc<Job>,
    membership: Arc<Membership>,
}

/// State shared by the ranks of a world.
struct Job {
    /// Groups that not all ranks have opened yet, with the number of ranks that have. By group number.
    opening: Mutex<HashMap<u64, (Arc<Hub>, usize)>>,
}

impl ThreadsFabric {
    /// The fabrics of all ranks, one per membership.
    pub(crate) fn all(memberships: &[Arc<Membership>]) -> Vec<ThreadsFabric> {
        let job = Arc::new(Job { opening: Mutex::new(HashMap::new()) });
        memberships
            .iter()
            .map(|membership| ThreadsFabric { job: job.clone(), membership: membership.clone() })
            .collect()
    }
}

impl Fabric for ThreadsFabric {
    fn name(&self) -> &'static str {
        NAME
    }

    fn open(&self, call: &Call) -> Result<Box<dyn Engine>> {
        let rank = call.group_rank()?;
        let hub = self.job.hub(call.info.group, call.members.count());
        let inbox = Arc::downgrade(&hub.inboxes[rank]);
        self.membership.add_waker(inbox);
        Ok(Box::new(HostEngine::new(ThreadsTransport { rank, hub, membership: self.membership.clone() })))
    }
}

impl Job {
    /// The hub of `group`: created when the first rank opens the group, and no longer kept here once the last has.
    fn hub(&self, group: u64, group_size: usize) -> Arc<Hub> {
        let mut opening = lock(&self.opening);
        let (hub, opened) = opening.entry(group).or_insert_with(|| (Arc::new(Hub::new(group_size)), 0));
        *opened += 1;
        let (hub, all_have_it) = (hub.clone(), *opened == group_size);
        if all_have_it {
            opening.remove(&group);
        }
        hub
    }
}
