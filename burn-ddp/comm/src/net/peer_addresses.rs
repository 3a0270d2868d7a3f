//! Addresses where the ranks of a world listen. Each host name is looked up once: ranks do not move while their world
//! exists, and training must not depend on a name server.

use std::collections::HashMap;
use std::io;
use std::net::SocketAddr;
use std::sync::{Arc, OnceLock};

use super::bind_and_connect;

/// Listening addresses by rank. Clones share the results of look-ups.
#[derive(Clone, Debug, Default)]
pub(crate) struct PeerAddresses(Arc<[PeerAddress]>);

/// Listening address of a rank.
#[derive(Debug)]
pub(crate) struct PeerAddress {
    host: String,
    port: u16,
    /// Addresses of the host, with port 0. Set by the first look-up that succeeds, of any rank on that host.
    found: Arc<OnceLock<Vec<SocketAddr>>>,
}

impl PeerAddresses {
    /// Addresses of these hosts and ports, in rank order.
    pub(crate) fn new(by_rank: impl IntoIterator<Item = (String, u16)>) -> PeerAddresses {
        let mut hosts: HashMap<String, Arc<OnceLock<Vec<SocketAddr>>>> = HashMap::new();
        let address = |(host, port): (String, u16)| PeerAddress {
            found: hosts.entry(host.clone()).or_default().clone(),
            host,
            port,
        };
        PeerAddresses(by_rank.into_iter().map(address).collect())
    }

    /// Address of `rank`.
    pub(crate) fn get(&self, rank: usize) -> Option<&PeerAddress> {
        self.0.get(rank)
    }

    /// Number of ranks.
    pub(crate) fn count(&self) -> usize {
        self.0.len()
    }

    /// Looks up all names that were not looked up yet. Stops at the first failure: that name and the rest are looked up
    /// when they are needed.
    pub(crate) fn look_up_all(&self) {
        if let Err(error) = self.0.iter().try_for_each(|address| address.look_up().map(drop)) {
            tracing::debug!(%error, "not all host names were looked up");
        }
    }
}

impl PeerAddress {
    /// Address of a rank that listens on `host` at `port`.
    #[cfg(test)]
    pub(crate) fn new(host: impl Into<String>, port: u16) -> PeerAddress {
        PeerAddress { host: host.into(), port, found: Arc::default() }
    }

    /// Addresses of the host, with the port.
    ///
    /// # Errors
    /// The name cannot be looked up; the rank itself may be well. The next call tries again.
    pub(crate) fn look_up(&self) -> io::Result<Vec<SocketAddr>> {
        self.look_up_by(|host| bind_and_connect::resolve(host, 0))
    }

    fn look_up_by(&self, resolve: impl FnOnce(&str) -> io::Result<Vec<SocketAddr>>) -> io::Result<Vec<SocketAddr>> {
        let found = match self.found.get() {
            Some(found) => found,
            None => {
                let looked_up = resolve(&self.host).map_err(|e| {
                    io::Error::new(e.kind(), format!("the host name {:?} cannot be looked up: {e}", self.host))
                })?;
                self.found.get_or_init(|| looked_up)
            }
        };
        let with_port = |mut address: SocketAddr| {
            address.set_port(self.port);
            address
        };
        Ok(found.iter().copied().map(with_port).collect())
    }
}

impl std::fmt::Display for PeerAddress {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&bind_and_connect::join(&self.host, self.port))
    }
}

#[cfg(test)]
mod tests {
    use std::io::ErrorKind;

    use super::*;

    #[test]
    fn a_name_is_looked_up_once_for_all_ranks_on_its_host_and_again_after_a_failure() {
        let addresses = [("node1", 7), ("node1", 8), ("node2", 9)].map(|(host, port)| (host.to_owned(), port));
        let addresses = PeerAddresses::new(addresses);
        let clone = addresses.clone();
        let of = |rank: usize| clone.get(rank).unwrap();
        let failed = of(0).look_up_by(|_| Err(ErrorKind::TimedOut.into())).unwrap_err();
        assert!(failed.to_string().contains("\"node1\" cannot be looked up"), "{failed}");
        let at = |port: u16| vec![SocketAddr::from(([10, 0, 0, 1], port))];
        assert_eq!(of(0).look_up_by(|_| Ok(at(0))).unwrap(), at(7));
        // The name server is gone.
        let gone = |host: &str| panic!("{host} is looked up again");
        assert_eq!(addresses.get(0).unwrap().look_up_by(gone).unwrap(), at(7));
        assert_eq!(addresses.get(1).unwrap().look_up_by(gone).unwrap(), at(8));
        assert!(of(2).look_up_by(|_| Err(ErrorKind::NotFound.into())).is_err(), "another host");
        assert!(addresses.get(3).is_none() && addresses.count() == 3);
        assert_eq!(of(2).to_string(), "node2:9");
    }

    #[test]
    fn addresses_of_one_host_need_no_look_up() {
        let addresses = PeerAddresses::new([("127.0.0.1".to_owned(), 7), ("localhost".to_owned(), 8)]);
        addresses.look_up_all();
        assert!(addresses.0.iter().all(|address| address.found.get().is_some()));
    }
}
