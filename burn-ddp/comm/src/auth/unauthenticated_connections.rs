//! Accepted connections that have proved nothing yet, called strangers, and limits on their number.
//!
//! A stranger costs a socket and [`OPENING_BYTES`] bytes for at most [`HANDSHAKE_DEADLINE`]. There are at most
//! [`STRANGERS_CAP`] of them, or a quarter of the process's file descriptors if that is fewer, and at most
//! [`SOURCE_CAP`] from one source. A connection beyond a limit takes the place of the oldest stranger from its
//! own source, or from the source with most strangers. No stranger is closed for another within [`GRACE`], in which an
//! honest peer is done: then the new connection is closed, and its client tries again.

use std::io::{self, ErrorKind, Read, Write};
use std::net::IpAddr;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags};
use socket2::Socket;

use super::handshake::{Answer, Greeting, HANDSHAKE_DEADLINE, OPENING_BYTES, Opening, Proved, Role, begins_like_ours};
use super::hmac_key::Key;
use super::secure_stream::SecureStream;
use crate::auth::job_key::JobTag;
use crate::net::descriptors;

/// Most strangers at a time.
const STRANGERS_CAP: usize = 256;
/// Most strangers from one source.
const SOURCE_CAP: usize = 192;
/// Time in which no stranger is closed for a newer one.
const GRACE: Duration = Duration::from_millis(200);

/// The strangers of one listener.
pub(crate) struct Strangers {
    role: Role,
    /// Most strangers at a time, and most from one source.
    caps: [usize; 2],
    /// In the order they came.
    all: Vec<Stranger>,
}

struct Stranger {
    socket: Socket,
    source: Option<IpAddr>,
    greeting: Greeting,
    opening: [u8; OPENING_BYTES],
    have: usize,
    since: Instant,
}

/// A stranger whose opening message has come in full; its proof of the secret is not checked yet.
pub(crate) struct Introduced {
    socket: Socket,
    greeting: Greeting,
    opening: Opening,
}

impl Strangers {
    pub(crate) fn new(role: Role) -> Self {
        // The process needs most of its descriptors for other things.
        let quarter = descriptors::limit().map_or(STRANGERS_CAP, |limit| (limit / 4) as usize).clamp(1, STRANGERS_CAP);
        Self { role, caps: [quarter, (quarter * SOURCE_CAP).div_ceil(STRANGERS_CAP)], all: Vec::new() }
    }

    /// Adds a fresh connection, or closes it if there is no place for it.
    pub(crate) fn receive(&mut self, socket: Socket, source: Option<IpAddr>) {
        let source = source.map(network);
        let now = Instant::now();
        let from_there = self.all.iter().filter(|stranger| stranger.source == source).count();
        let [cap, source_cap] = self.caps;
        if from_there >= source_cap && !self.evict(source, now) {
            return;
        }
        if self.all.len() >= cap && !self.evict(self.most_frequent(), now) {
            return;
        }
        match Stranger::greet(socket, source, self.role, now) {
            Ok(stranger) => self.all.push(stranger),
            Err(e) => tracing::debug!("a connection ended before it was greeted: {e}"),
        }
    }

    /// Closes the oldest stranger from `source` unless it is younger than [`GRACE`]; true if it was closed.
    fn evict(&mut self, source: Option<IpAddr>, now: Instant) -> bool {
        let oldest = self.all.iter().position(|stranger| stranger.source == source);
        match oldest.filter(|i| now >= self.all[*i].since + GRACE) {
            Some(i) => {
                self.all.remove(i);
                true
            }
            None => false,
        }
    }

    fn most_frequent(&self) -> Option<IpAddr> {
        let count = |source| self.all.iter().filter(|stranger| stranger.source == source).count();
        self.all.iter().map(|stranger| stranger.source).max_by_key(|source| count(*source)).flatten()
    }

    /// File descriptors to poll, one for each stranger.
    pub(crate) fn poll_fds(&self) -> impl Iterator<Item = PollFd<'_>> {
        self.all.iter().map(|stranger| PollFd::new(&stranger.socket, PollFlags::IN))
    }

    /// Deadline of the oldest stranger.
    pub(crate) fn deadline(&self) -> Option<Instant> {
        self.all.first().map(|oldest| oldest.since + HANDSHAKE_DEADLINE)
    }

    /// Reads from the strangers that are ready (in the order of [`poll_fds`](Self::poll_fds)), closes those that take
    /// too long, and returns those whose opening is complete.
    pub(crate) fn hear(&mut self, ready: &[bool]) -> Vec<Introduced> {
        let now = Instant::now();
        let mut done = Vec::new();
        let mut ready = ready.iter().copied();
        for mut stranger in std::mem::take(&mut self.all) {
            let said = if ready.next().unwrap_or(false) { stranger.hear() } else { Ok(false) };
            match said {
                Ok(true) => done.extend(stranger.introduced()),
                Ok(false) if now < stranger.since + HANDSHAKE_DEADLINE => self.all.push(stranger),
                Ok(false) => stranger.turn_away("it took too long"),
                Err(e) => stranger.turn_away(&e.to_string()),
            }
        }
        done
    }

    pub(crate) fn clear(&mut self) {
        self.all.clear();
    }
}

impl Stranger {
    /// Sends the greeting without waiting: it fits into the buffer of a fresh socket.
    fn greet(socket: Socket, source: Option<IpAddr>, role: Role, since: Instant) -> io::Result<Self> {
        let greeting = Greeting::new(role)?;
        if (&socket).write(&greeting.0)? != greeting.0.len() {
            return Err(ErrorKind::WriteZero.into());
        }
        Ok(Self { socket, source, greeting, opening: [0; OPENING_BYTES], have: 0, since })
    }

    /// Reads the bytes that have come, never more than the opening; true once the opening is complete.
    fn hear(&mut self) -> io::Result<bool> {
        while self.have < OPENING_BYTES {
            match (&self.socket).read(&mut self.opening[self.have..]) {
                Ok(0) => return Err(ErrorKind::UnexpectedEof.into()),
                Ok(n) => self.have += n,
                Err(e) if e.kind() == ErrorKind::Interrupted => {}
                Err(e) if e.kind() == ErrorKind::WouldBlock => return Ok(false),
                Err(e) => return Err(e),
            }
            if !begins_like_ours(&self.opening[..self.have]) {
                return Err(io::Error::new(ErrorKind::InvalidData, "it does not speak burn-ddp's protocol"));
            }
        }
        Ok(true)
    }

    fn introduced(self) -> Option<Introduced> {
        let Self { socket, greeting, opening, .. } = self;
        let opening = Opening(opening);
        match opening.check() {
            Ok(()) => Some(Introduced { socket, greeting, opening }),
            Err(foreign) => {
                tracing::debug!(?foreign, "refused an unauthenticated connection");
                None
            }
        }
    }

    fn turn_away(self, cause: &str) {
        tracing::debug!(from = ?self.source, cause, "refused an unauthenticated connection");
    }
}

impl Introduced {
    pub(crate) fn tag(&self) -> JobTag {
        self.opening.tag()
    }

    /// Address of the other end, if it is no local socket.
    pub(crate) fn source(&self) -> Option<IpAddr> {
        Some(self.socket.peer_addr().ok()?.as_socket()?.ip().to_canonical())
    }

    /// Purpose of the connection, if the other end knows `key`.
    pub(crate) fn prove(&self, key: &Key) -> Option<Proved> {
        self.opening.prove(key, &self.greeting)
    }

    /// Accepts the connection; `None` if the client is gone.
    pub(crate) fn welcome(self, proved: Proved) -> Option<SecureStream> {
        let (answer, keys) = proved.answer(Ok(())).ok()?;
        self.say(&answer).then_some(SecureStream { socket: self.socket, keys })
    }

    /// Closes a connection that knows the key, and sends the reason.
    pub(crate) fn refuse(self, proved: Proved, cause: &str) {
        tracing::debug!(purpose = ?proved.purpose, cause, "a connection was refused");
        if let Ok((answer, _)) = proved.answer(Err(cause)) {
            self.say(&answer);
        }
    }

    /// Closes a connection that does not know the key.
    pub(crate) fn turn_away(self, same_job: bool) {
        tracing::debug!(same_job, "a connection without the secret was refused");
        self.say(&Answer::unsealed(same_job));
    }

    /// Sends without waiting: an answer fits into the buffer of a fresh socket.
    fn say(&self, answer: &Answer) -> bool {
        (&self.socket).write(&answer.0).is_ok_and(|n| n == answer.0.len())
    }
}

/// Source that `ip` counts for: its /64 network for IPv6, since one machine may use all addresses of it.
fn network(ip: IpAddr) -> IpAddr {
    match ip.to_canonical() {
        IpAddr::V6(ip) if !ip.is_loopback() => IpAddr::from((ip.to_bits() >> 64 << 64).to_be_bytes()),
        ip => ip,
    }
}

#[cfg(test)]
mod tests {
    use std::net::{Ipv4Addr, Ipv6Addr, TcpListener, TcpStream};

    use super::*;

    /// A stranger's two ends; its own does not block.
    fn connection(listener: &TcpListener) -> (TcpStream, Socket) {
        let stream = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        stream.set_nonblocking(true).unwrap();
        let socket = Socket::from(listener.accept().unwrap().0);
        socket.set_nonblocking(true).unwrap();
        (stream, socket)
    }

    fn is_open(mut stream: &TcpStream) -> bool {
        let mut sink = [0; 256];
        loop {
            match stream.read(&mut sink) {
                Ok(0) => return false,
                Ok(_) => {}
                Err(e) => return e.kind() == ErrorKind::WouldBlock,
            }
        }
    }

    #[test]
    fn who_crowds_loses_its_own_places_and_nobody_loses_one_in_its_grace() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let (crowd, other) = (IpAddr::from([10, 0, 0, 1]), IpAddr::from([10, 0, 0, 2]));
        let mut strangers = Strangers::new(Role::Store);
        let mut crowding = Vec::new();
        for _ in 0..SOURCE_CAP + 50 {
            let (stream, socket) = connection(&listener);
            strangers.receive(socket, Some(crowd));
            crowding.push(stream);
        }
        // None of the first is older than its grace, if this machine is not very slow.
        assert_eq!(strangers.all.len(), SOURCE_CAP);
        let (honest, socket) = connection(&listener);
        strangers.receive(socket, Some(other));
        assert_eq!(strangers.all.len(), SOURCE_CAP + 1);

        std::thread::sleep(GRACE);
        for _ in 0..20 {
            let (stream, socket) = connection(&listener);
            strangers.receive(socket, Some(crowd));
            crowding.push(stream);
        }
        assert_eq!(strangers.all.len(), SOURCE_CAP + 1);
        assert!(is_open(&honest), "another source pays nothing");
        assert!(is_open(crowding.last().unwrap()), "the newest of the crowd is in");
        // The end may come late: a child process of another test has the socket open, too, between fork and exec.
        let deadline = Instant::now() + Duration::from_secs(60);
        while is_open(&crowding[0]) {
            assert!(Instant::now() < deadline, "the oldest of the crowd is still in");
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    #[test]
    fn many_sources_share_the_places() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut strangers = Strangers::new(Role::Rank(0));
        let mut streams = Vec::new();
        for i in 0..STRANGERS_CAP + 10 {
            let (stream, socket) = connection(&listener);
            strangers.receive(socket, Some(IpAddr::from([10, 0, 1, (i % 2) as u8])));
            streams.push(stream);
        }
        assert!(strangers.all.len() <= STRANGERS_CAP);
        std::thread::sleep(GRACE);
        let (newcomer, socket) = connection(&listener);
        strangers.receive(socket, Some(IpAddr::from([10, 0, 2, 1])));
        assert!(is_open(&newcomer));
    }

    #[test]
    fn what_is_not_ours_is_turned_away_by_its_first_bytes() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut strangers = Strangers::new(Role::Store);
        for (said, stays) in [(&b"GET "[..], false), (b"burn-ddq", false), (b"burn-d", true), (b"", true)] {
            let (mut stream, socket) = connection(&listener);
            strangers.receive(socket, None);
            stream.write_all(said).unwrap();
            let deadline = Instant::now() + if stays { Duration::from_millis(20) } else { Duration::from_secs(60) };
            while !strangers.all.is_empty() && Instant::now() < deadline {
                assert!(strangers.hear(&[true]).is_empty());
                std::thread::sleep(Duration::from_millis(1));
            }
            assert_eq!(strangers.all.len(), usize::from(stays), "{said:?}");
            strangers.clear();
        }
    }

    #[test]
    fn sources_are_networks() {
        let v6 = |text: &str| IpAddr::V6(text.parse::<Ipv6Addr>().unwrap());
        assert_eq!(network(v6("2001:db8::1")), network(v6("2001:db8::ffff:2")));
        assert_ne!(network(v6("2001:db8::1")), network(v6("2001:db8:0:1::1")));
        assert_eq!(network(v6("::ffff:10.0.0.1")), IpAddr::V4(Ipv4Addr::new(10, 0, 0, 1)));
        assert_eq!(network(v6("::1")), v6("::1"));
    }
}
