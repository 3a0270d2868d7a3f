//! The tcp fabric: groups whose ranks reach each other over sockets.

use std::sync::Arc;

use super::NAME;
use super::connector::{Connector, Reach};
use super::group_links::GroupLinks;
use super::transport::TcpTransport;
use crate::Result;
use crate::call::Call;
use crate::engine::{Engine, Fabric, HostEngine};
use crate::membership::Membership;

/// Opens a rank's groups over sockets.
pub(crate) struct TcpFabric {
    connector: Arc<Connector>,
}

impl TcpFabric {
    pub(crate) fn new(reach: Reach, membership: Arc<Membership>) -> Self {
        Self { connector: Arc::new(Connector { reach, membership }) }
    }

    /// This rank's transport in a new group. No link is connected yet.
    pub(in crate::engine) fn transport(&self, call: &Call) -> Result<TcpTransport> {
        let (rank, membership) = (call.group_rank()?, self.connector.membership.clone());
        let waker = membership.new_waker()?;
        let links = GroupLinks::new(self.connector.clone(), call.info.group, call.members.count(), &waker);
        Ok(TcpTransport::new(rank, links, membership, waker))
    }
}

impl Fabric for TcpFabric {
    fn name(&self) -> &'static str {
        NAME
    }

    fn open(&self, call: &Call) -> Result<Box<dyn Engine>> {
        Ok(Box::new(HostEngine::new(self.transport(call)?)))
    }
}
