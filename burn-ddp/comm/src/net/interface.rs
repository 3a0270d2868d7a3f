//! Addresses of this machine on which a rank listens and from which it connects.

use std::io;
use std::net::{IpAddr, Ipv6Addr, SocketAddr};

use crate::{Error, Result};

/// Addresses of the chosen network interface, in the system's order; none if the system is to choose.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Interface {
    addresses: Vec<IpAddr>,
    /// Scope id of the link by which the store was reached, for link-local addresses; 0 if the store's is not one.
    zone: u32,
}

impl Interface {
    /// Finds an interface by its name or by one of this machine's addresses.
    ///
    /// # Errors
    /// [`Error::Environment`] if this machine has no such interface; the message lists those that it has.
    pub(crate) fn find(text: &str) -> Result<Interface> {
        let all: Vec<(String, IpAddr)> = if_addrs::get_if_addrs()
            .map_err(|e| Error::environment(format!("cannot list this machine's network interfaces: {e}")))?
            .into_iter()
            .map(|interface| (interface.name.clone(), interface.ip()))
            .collect();
        let addresses = choose(text, &all);
        if addresses.is_empty() {
            let what = match text.parse::<IpAddr>() {
                Ok(_) => "is no address of this machine",
                Err(_) => "is no network interface of this machine that is up and has an address",
            };
            return Err(Error::environment(format!("the interface {text:?} {what}; it has {}", listed(&all))));
        }
        Ok(Interface { addresses, zone: 0 })
    }

    /// The same addresses, with the scope id of the link by which the store was reached.
    pub(crate) fn with_zone(self, zone: u32) -> Interface {
        Interface { zone, ..self }
    }

    /// `address` with the scope id of the link by which the store was reached, if it is link-local and has none. Ranks
    /// post their addresses without, since a scope id means nothing on another machine.
    pub(crate) fn in_zone(&self, mut address: SocketAddr) -> SocketAddr {
        if let SocketAddr::V6(address) = &mut address
            && address.ip().is_unicast_link_local()
            && address.scope_id() == 0
        {
            address.set_scope_id(self.zone);
        }
        address
    }

    /// Address from which to connect to `target`; `None` leaves it to the system.
    pub(crate) fn toward(&self, target: IpAddr) -> io::Result<Option<IpAddr>> {
        if self.addresses.is_empty() || target.is_loopback() {
            return Ok(None);
        }
        let same_family = |address: &&IpAddr| address.is_ipv4() == target.is_ipv4();
        match self.addresses.iter().find(same_family) {
            Some(address) => Ok(Some(*address)),
            None => {
                let family = if target.is_ipv4() { "IPv4" } else { "IPv6" };
                let here: Vec<String> = self.addresses.iter().map(IpAddr::to_string).collect();
                let message = format!("the chosen interface has no {family} address, only {}", here.join(", "));
                Err(io::Error::new(io::ErrorKind::AddrNotAvailable, message))
            }
        }
    }

    /// Address of the chosen interface on which to listen, of the family of `like` if it has one; `None` if no
    /// interface was chosen.
    pub(crate) fn listens(&self, like: IpAddr) -> Option<IpAddr> {
        let same_family = |address: &&IpAddr| address.is_ipv4() == like.is_ipv4();
        self.addresses.iter().find(same_family).or(self.addresses.first()).copied()
    }
}

/// Addresses among `all` that `text` means.
fn choose(text: &str, all: &[(String, IpAddr)]) -> Vec<IpAddr> {
    if let Ok(ip) = text.parse::<IpAddr>() {
        // All of 127.0.0.0/8 is this machine, though not all of it is listed.
        let is_here = ip.is_loopback() || all.iter().any(|(_, address)| *address == ip);
        return if is_here { vec![ip] } else { Vec::new() };
    }
    // A link-local address means nothing without the name of the link.
    let usable = |ip: &IpAddr| !matches!(ip, IpAddr::V6(ip) if Ipv6Addr::is_unicast_link_local(ip));
    all.iter().filter(|(name, ip)| name == text && usable(ip)).map(|(_, ip)| *ip).collect()
}

fn listed(all: &[(String, IpAddr)]) -> String {
    let shown: Vec<String> = all.iter().map(|(name, ip)| format!("{name} ({ip})")).collect();
    if shown.is_empty() { "none".to_owned() } else { shown.join(", ") }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ip(text: &str) -> IpAddr {
        text.parse().unwrap()
    }

    fn all() -> Vec<(String, IpAddr)> {
        [("lo", "127.0.0.1"), ("eth0", "10.0.0.7"), ("eth0", "fe80::1"), ("eth0", "2001:db8::7"), ("ib0", "10.1.0.7")]
            .map(|(name, address)| (name.to_owned(), ip(address)))
            .into()
    }

    #[test]
    fn names_and_addresses_of_this_machine_are_found() {
        assert_eq!(choose("eth0", &all()), [ip("10.0.0.7"), ip("2001:db8::7")]);
        assert_eq!(choose("10.1.0.7", &all()), [ip("10.1.0.7")]);
        assert_eq!(choose("127.0.0.9", &all()), [ip("127.0.0.9")]);
        for other in ["eth1", "eth", "10.0.0.8", ""] {
            assert!(choose(other, &all()).is_empty(), "{other}");
        }
    }

    #[test]
    fn what_does_not_exist_is_told_with_what_does() {
        for text in ["no-such0", "192.0.2.1"] {
            let error = Interface::find(text).unwrap_err().to_string();
            assert!(error.contains(text) && error.contains("127.0.0.1"), "{error}");
        }
        assert_eq!(Interface::find("127.0.0.1").unwrap().addresses, [ip("127.0.0.1")]);
    }

    #[test]
    fn the_address_fits_the_other_end() {
        let eth0 = Interface { addresses: choose("eth0", &all()), zone: 0 };
        assert_eq!(eth0.toward(ip("10.9.9.9")).unwrap(), Some(ip("10.0.0.7")));
        assert_eq!(eth0.toward(ip("2001:db8::9")).unwrap(), Some(ip("2001:db8::7")));
        assert_eq!(eth0.toward(ip("127.0.0.1")).unwrap(), None, "loopback is reached from loopback");
        assert_eq!(eth0.listens(ip("::1")), Some(ip("2001:db8::7")));
        let ib0 = Interface { addresses: choose("ib0", &all()), zone: 0 };
        assert!(ib0.toward(ip("2001:db8::9")).unwrap_err().to_string().contains("no IPv6 address, only 10.1.0.7"));
        assert_eq!(ib0.listens(ip("::1")), Some(ip("10.1.0.7")));
        assert_eq!(Interface::default().toward(ip("10.9.9.9")).unwrap(), None);
    }

    #[test]
    fn an_address_of_a_link_gets_the_link_of_the_store() {
        let via = Interface::default().with_zone(3);
        let zoned = |text: &str| via.in_zone(text.parse().unwrap()).to_string();
        assert_eq!(zoned("[fe80::1]:7"), "[fe80::1%3]:7");
        for other in ["[fe80::1%2]:7", "[2001:db8::7]:7", "10.0.0.7:7"] {
            assert_eq!(zoned(other), other);
        }
    }
}
