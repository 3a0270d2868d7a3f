//! Look-ups of a host name, with a back-off.

use std::io::{self, ErrorKind};
use std::net::SocketAddr;
use std::time::{Duration, Instant};

use super::bind_and_connect;

/// Shortest and longest time for which the result of a look-up is used.
const PAUSES: [Duration; 2] = [Duration::from_millis(500), Duration::from_secs(5)];

/// A host to which connections are tried again and again. Its name is looked up at once, and again after pauses that
/// double, since the name may get another address, or its first one, meanwhile.
#[derive(Debug)]
pub(crate) struct NameLookup {
    host: String,
    found: Result<Vec<SocketAddr>, (ErrorKind, String)>,
    /// Time of the next look-up, and the pause after it.
    next: Instant,
    pause: Duration,
}

impl NameLookup {
    pub(crate) fn new(host: &str) -> NameLookup {
        let none = Err((ErrorKind::NotFound, "the name was not looked up".to_owned()));
        NameLookup { host: host.to_owned(), found: none, next: Instant::now(), pause: PAUSES[0] }
    }

    /// Addresses of the host as of the latest look-up, with `port`.
    pub(crate) fn addresses(&mut self, port: u16) -> io::Result<Vec<SocketAddr>> {
        self.addresses_by(port, |host| bind_and_connect::resolve(host, 0))
    }

    fn addresses_by(
        &mut self,
        port: u16,
        resolve: impl FnOnce(&str) -> io::Result<Vec<SocketAddr>>,
    ) -> io::Result<Vec<SocketAddr>> {
        if Instant::now() >= self.next {
            self.found = resolve(&self.host).map_err(|e| (e.kind(), e.to_string()));
            // A look-up may take seconds by itself.
            self.next = Instant::now() + self.pause;
            self.pause = PAUSES[1].min(2 * self.pause);
        }
        let mut found = self.found.clone().map_err(|(kind, cause)| io::Error::new(kind, cause))?;
        found.iter_mut().for_each(|address| address.set_port(port));
        Ok(found)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_is_looked_up_after_pauses() {
        let mut lookup = NameLookup::new("node1");
        let (begin, mut tries, mut lookups) = (Instant::now(), 0, Vec::new());
        while begin.elapsed() < Duration::from_millis(700) {
            let found = lookup.addresses_by(7, |host| {
                assert_eq!(host, "node1");
                lookups.push(Instant::now());
                match lookups.len() {
                    1 => Err(ErrorKind::NotFound.into()),
                    _ => Ok(vec![([10, 0, 0, 1], 0).into()]),
                }
            });
            match lookups.len() {
                1 => assert_eq!(found.unwrap_err().kind(), ErrorKind::NotFound),
                _ => assert_eq!(found.unwrap(), [([10, 0, 0, 1], 7).into()]),
            }
            tries += 1;
            std::thread::sleep(Duration::from_millis(10));
        }
        assert!(lookups.len() <= 2 && lookups.len() < tries, "{} look-ups in {tries} tries", lookups.len());
        assert!(lookups.windows(2).all(|pair| pair[1] - pair[0] >= PAUSES[0]));
        assert_eq!(lookup.pause, PAUSES[0] * if lookups.len() == 2 { 4 } else { 2 });
    }
}
