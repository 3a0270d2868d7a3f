//! Probes on idle connections, by which the kernel notices that a machine, or the network to it, is gone.

use std::io;
use std::os::fd::AsFd;
use std::time::Duration;

/// Unanswered probes after which a connection is given up. Only Linux lets a program choose; other systems have their
/// own number.
const PROBES: u32 = 4;

/// Has the kernel send probes while the connection is idle. They keep firewalls and NAT from forgetting the connection,
/// and end it if no answer comes for `timeout`. A stopped process does not end it, since its kernel still answers.
pub(crate) fn probe_when_idle(socket: &impl AsFd, timeout: Duration) -> io::Result<()> {
    let probe = Duration::from_secs((whole_seconds(timeout).as_secs() / u64::from(PROBES)).clamp(1, 30));
    let probes = socket2::TcpKeepalive::new().with_time(probe).with_interval(probe);
    socket2::SockRef::from(socket).set_tcp_keepalive(&probes)?;
    #[cfg(target_os = "linux")]
    rustix::net::sockopt::set_tcp_keepcnt(socket, PROBES)?;
    Ok(())
}

/// Has the kernel end the connection also if data that were sent are not acknowledged for `timeout`.
///
/// Only for connections whose peer always reads: the kernel counts a peer that acknowledges, but has no room in its
/// buffer, as silent. A data connection to a rank that computes for long would be ended.
#[cfg_attr(not(target_os = "linux"), expect(unused_variables, reason = "the kernel has no such limit"))]
pub(crate) fn limit_silence(socket: &impl AsFd, timeout: Duration) -> io::Result<()> {
    #[cfg(target_os = "linux")]
    rustix::net::sockopt::set_tcp_user_timeout(socket, whole_seconds(timeout).as_millis() as u32)?;
    Ok(())
}

/// `timeout` in the range that the kernel takes: at least a second, at most a day.
fn whole_seconds(timeout: Duration) -> Duration {
    timeout.clamp(Duration::from_secs(1), Duration::from_secs(24 * 3600))
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use std::net::{TcpListener, TcpStream};

    use super::*;

    #[test]
    fn options_are_set() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let stream = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let socket = socket2::SockRef::from(&stream);
        for (timeout, probe) in [(Duration::from_secs(30), 7), (Duration::ZERO, 1), (Duration::MAX, 30)] {
            probe_when_idle(&stream, timeout).unwrap();
            assert!(socket.keepalive().unwrap());
            let seconds = rustix::net::sockopt::tcp_keepidle(&stream).unwrap().as_secs();
            assert_eq!(seconds, probe);
            limit_silence(&stream, timeout).unwrap();
        }
    }
}
