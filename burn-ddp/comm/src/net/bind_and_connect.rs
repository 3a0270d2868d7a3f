//! Host names, loopback, binding and connecting.

use std::io::{self, ErrorKind};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, ToSocketAddrs, UdpSocket};
use std::thread;
use std::time::{Duration, Instant};

use socket2::{Domain, Protocol, Socket, Type};

use super::interface::Interface;

/// Longest attempt to connect to one address, so that the other addresses of a name are tried, too.
const ATTEMPT: Duration = Duration::from_secs(5);
/// Pause between two attempts to connect to a listener that may not have started yet.
pub(crate) const RETRY: Duration = Duration::from_millis(50);

/// True if `host` can only mean this machine, judged without a look-up.
pub(crate) fn is_loopback(host: &str) -> bool {
    host.eq_ignore_ascii_case("localhost") || host.parse::<IpAddr>().is_ok_and(|ip| ip.is_loopback())
}

/// Splits `host:port`; an IPv6 address stands in brackets.
pub(crate) fn split(text: &str) -> Option<(&str, u16)> {
    let (host, port) = text.rsplit_once(':')?;
    let port = port.parse().ok()?;
    let host = match host.strip_prefix('[') {
        Some(rest) => rest.strip_suffix(']')?,
        None if host.contains(':') => return None,
        None => host,
    };
    (!host.is_empty()).then_some((host, port))
}

/// `host:port`, with brackets around an IPv6 address.
pub(crate) fn join(host: &str, port: u16) -> String {
    if host.contains(':') { format!("[{host}]:{port}") } else { format!("{host}:{port}") }
}

/// Addresses of `host`. "localhost" is 127.0.0.1 whatever the resolver prefers, so that listener and client mean the
/// same address.
pub(crate) fn resolve(host: &str, port: u16) -> io::Result<Vec<SocketAddr>> {
    if host.eq_ignore_ascii_case("localhost") {
        return Ok(vec![SocketAddr::from(([127, 0, 0, 1], port))]);
    }
    let found: Vec<_> = (host, port).to_socket_addrs()?.collect();
    if found.is_empty() {
        return Err(io::Error::new(ErrorKind::NotFound, "the name has no address"));
    }
    Ok(found)
}

/// Connections that the kernel keeps for a listener until they are accepted, if its own limit allows. A thousand ranks
/// connect at once, and each that finds no room tries again only after seconds.
const BACKLOG: i32 = 4096;

/// Sets up a listener: non-blocking, with room for many connections at once.
pub(crate) fn listener(socket: &Socket) -> io::Result<()> {
    socket.listen(BACKLOG)?;
    socket.set_nonblocking(true)
}

/// Binds `host:port`. Tries for a second while the port is in use, since the process that has it may be just ending.
pub(crate) fn bind(host: &str, port: u16) -> io::Result<Vec<TcpListener>> {
    let give_up = Instant::now() + Duration::from_secs(1);
    loop {
        match bind_once(host, port) {
            Err(e) if e.kind() == ErrorKind::AddrInUse && Instant::now() < give_up => thread::sleep(RETRY),
            result => return result,
        }
    }
}

/// Binds `host:port` if it is free now, at all addresses of the name that this machine has, with one port.
pub(crate) fn bind_once(host: &str, port: u16) -> io::Result<Vec<TcpListener>> {
    bind_all(&resolve(host, port)?)
}

/// Ports that are tried for one that is free at several addresses.
const FREE_PORTS_TRIED: usize = 16;

/// Binds all of `addresses` that this machine has; port 0 means one free port for all. An error if the port is in use
/// at one of them: clients that connect there would reach another program.
pub(crate) fn bind_all(addresses: &[SocketAddr]) -> io::Result<Vec<TcpListener>> {
    let any_port = addresses.iter().all(|address| address.port() == 0);
    let mut left = if any_port { FREE_PORTS_TRIED } else { 1 };
    loop {
        left -= 1;
        match bind_each(addresses) {
            Err(e) if e.kind() == ErrorKind::AddrInUse && left > 0 => {}
            result => return result,
        }
    }
}

fn bind_each(addresses: &[SocketAddr]) -> io::Result<Vec<TcpListener>> {
    let first = TcpListener::bind(addresses)?;
    let bound = first.local_addr()?;
    let (mut listeners, mut ips) = (vec![first], vec![bound.ip()]);
    for &(mut address) in addresses {
        address.set_port(bound.port());
        if ips.contains(&address.ip()) {
            continue;
        }
        match TcpListener::bind(address) {
            Ok(listener) => listeners.push(listener),
            // A listener on the unspecified address serves the others already: then this is no error.
            Err(e) if e.kind() == ErrorKind::AddrInUse && !bound.ip().is_unspecified() => {
                return Err(io::Error::new(e.kind(), format!("{address}: {e}")));
            }
            // Other addresses lead to other machines.
            Err(error) => tracing::debug!(%address, %error, "not bound"),
        }
        ips.push(address.ip());
    }
    Ok(listeners)
}

/// Connects to one of `addresses`. One round, no retries. The socket does not block.
pub(crate) fn connect_any(addresses: &[SocketAddr], via: &Interface, deadline: Instant) -> io::Result<Socket> {
    let mut last = io::Error::from(ErrorKind::TimedOut);
    for (nth, &address) in addresses.iter().enumerate() {
        // Each address gets a share of the time, since the network may drop all packets to one of them.
        let share = deadline.saturating_duration_since(Instant::now()) / (addresses.len() - nth) as u32;
        let left = share.min(ATTEMPT);
        if left.is_zero() {
            break;
        }
        match connect_to(address, via, left) {
            Ok(socket) if is_itself(&socket) => last = ErrorKind::ConnectionRefused.into(),
            Ok(socket) => return ready(socket),
            Err(e) => last = e,
        }
    }
    Err(last)
}

/// Address of this machine from which packets to `host` would leave. Sends no packet.
pub(crate) fn from_where(host: &str, port: u16) -> io::Result<IpAddr> {
    let mut last = io::Error::from(ErrorKind::NotFound);
    for address in resolve(host, port)? {
        let any: IpAddr = if address.is_ipv4() { Ipv4Addr::UNSPECIFIED.into() } else { Ipv6Addr::UNSPECIFIED.into() };
        match UdpSocket::bind((any, 0)).and_then(|socket| socket.connect(address).and_then(|()| socket.local_addr())) {
            Ok(local) => return Ok(local.ip()),
            Err(e) => last = e,
        }
    }
    Err(last)
}

fn connect_to(address: SocketAddr, via: &Interface, timeout: Duration) -> io::Result<Socket> {
    let (address, from) = (via.in_zone(address), via.toward(address.ip())?);
    let socket = Socket::new(Domain::for_address(address), Type::STREAM, Some(Protocol::TCP))?;
    if let Some(from) = from {
        socket.bind(&via.in_zone(SocketAddr::new(from, 0)).into())?;
    }
    socket.connect_timeout(&address.into(), timeout)?;
    Ok(socket)
}

/// Sets up a fresh connection: non-blocking, without delay of small messages (`TCP_NODELAY`).
pub(crate) fn ready(socket: impl Into<Socket>) -> io::Result<Socket> {
    let socket = socket.into();
    socket.set_nonblocking(true)?;
    socket.set_tcp_nodelay(true)?;
    Ok(socket)
}

/// True if the socket is connected to itself: TCP does that if nothing listens at the port and the client was given the
/// same port.
fn is_itself(socket: &Socket) -> bool {
    matches!((socket.local_addr(), socket.peer_addr()), (Ok(a), Ok(b)) if a.as_socket() == b.as_socket())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn loopback_is_judged_by_name() {
        for host in ["localhost", "LOCALHOST", "127.0.0.1", "127.3.2.1", "::1"] {
            assert!(is_loopback(host), "{host}");
        }
        for host in ["node1", "10.0.0.1", "0.0.0.0", "::", "localhost.example"] {
            assert!(!is_loopback(host), "{host}");
        }
    }

    #[test]
    fn host_and_port_are_split_and_joined() {
        assert_eq!(split("node1:29500"), Some(("node1", 29500)));
        assert_eq!(split("[::1]:80"), Some(("::1", 80)));
        for junk in ["", "node1", ":29500", "node1:", "node1:port", "node1:65536", "node1:-1", "::1:80", "[::1:80"] {
            assert_eq!(split(junk), None, "{junk:?}");
        }
        assert_eq!(split(&join("::1", 80)), Some(("::1", 80)));
        assert_eq!(split(&join("node1", 80)), Some(("node1", 80)));
    }

    #[test]
    fn nobody_listens() {
        let free = bind("localhost", 0).unwrap()[0].local_addr().unwrap().port();
        let soon = Instant::now() + Duration::from_secs(5);
        let error = connect_any(&resolve("localhost", free).unwrap(), &Interface::default(), soon).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::ConnectionRefused);
    }

    #[test]
    fn a_name_with_two_addresses_is_served_on_both_and_reached_at_either() {
        if TcpListener::bind("[::1]:0").is_err() {
            return eprintln!("skipped: no IPv6 here");
        }
        let both: [SocketAddr; 2] = [([127, 0, 0, 1], 0).into(), (Ipv6Addr::LOCALHOST, 0).into()];
        let listeners = bind_all(&both).unwrap();
        let addresses: Vec<SocketAddr> = listeners.iter().map(|listener| listener.local_addr().unwrap()).collect();
        assert_eq!(addresses.len(), 2);
        assert_eq!(addresses[0].port(), addresses[1].port());
        let soon = || Instant::now() + Duration::from_secs(10);
        for address in &addresses {
            let socket = connect_any(&[*address], &Interface::default(), soon()).unwrap();
            assert_eq!(socket.peer_addr().unwrap().as_socket(), Some(*address));
        }
        // An address of another machine is not bound.
        let elsewhere = ([192, 0, 2, 1], 0).into();
        assert_eq!(bind_all(&[elsewhere, both[0]]).unwrap().len(), 1);
        assert!(bind_all(&[elsewhere]).is_err());
        // The unspecified address includes both.
        let everywhere = bind("::", 0).unwrap();
        for ip in [both[0].ip(), both[1].ip()] {
            let port = everywhere[0].local_addr().unwrap().port();
            connect_any(&[SocketAddr::new(ip, port)], &Interface::default(), soon()).unwrap();
        }
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn a_port_that_is_taken_at_one_of_the_addresses_is_in_use() {
        let here = |last: u8, port: u16| SocketAddr::from(([127, 0, 0, last], port));
        for taken in [2, 3] {
            let other = TcpListener::bind(here(taken, 0)).unwrap();
            let port = other.local_addr().unwrap().port();
            let error = bind_all(&[2, 3].map(|last| here(last, port))).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::AddrInUse);
            assert!(error.to_string().contains(&format!("127.0.0.{taken}:{port}")), "{error}");
        }
        assert_eq!(bind_all(&[here(2, 0), here(2, 0), here(3, 0)]).unwrap().len(), 2);
    }

    #[test]
    fn an_address_that_swallows_all_leaves_time_for_the_next() {
        let Ok(open) = TcpListener::bind("[::1]:0") else { return eprintln!("skipped: no IPv6 here") };
        // A listener with a full queue does not answer.
        let full = Socket::new(Domain::IPV4, Type::STREAM, None).unwrap();
        full.bind(&SocketAddr::from(([127, 0, 0, 1], 0)).into()).unwrap();
        full.listen(0).unwrap();
        let swallows = full.local_addr().unwrap().as_socket().unwrap();
        let fill = || {
            let socket = Socket::new(Domain::IPV4, Type::STREAM, None).unwrap();
            socket.set_nonblocking(true).unwrap();
            let _ = socket.connect(&swallows.into());
            socket
        };
        let _queue: Vec<Socket> = (0..8).map(|_| fill()).collect();
        thread::sleep(Duration::from_millis(50));
        let addresses = [swallows, open.local_addr().unwrap()];
        let deadline = Instant::now() + Duration::from_secs(2);
        let socket = connect_any(&addresses, &Interface::default(), deadline).unwrap();
        assert_eq!(socket.peer_addr().unwrap().as_socket(), Some(addresses[1]));
        let alone = connect_any(&addresses[..1], &Interface::default(), Instant::now() + Duration::from_millis(100));
        assert_eq!(alone.unwrap_err().kind(), ErrorKind::TimedOut);
    }
}
