//! An authenticated connection to another rank's listener. The attempt ends when the world ends.

use std::fmt;
use std::io::{self, ErrorKind};
use std::net::Shutdown;
use std::sync::{Arc, Mutex, Weak};
use std::time::Instant;

use socket2::Socket;

use super::interface::Interface;
use super::peer_addresses::PeerAddress;
use super::{bind_and_connect, descriptors};
use crate::auth::handshake::{HANDSHAKE_DEADLINE, Introduction, Purpose, Refusal, Role, introduce};
use crate::auth::job_key::LinkKey;
use crate::auth::secure_stream::SecureStream;
use crate::membership::{Membership, Wake};
use crate::poison_free_locks::lock;

/// A connection to be made.
pub(crate) struct Dial<'a> {
    pub(crate) to: &'a PeerAddress,
    /// Local interface from which to connect.
    pub(crate) via: &'a Interface,
    /// Key that both ends must prove to know.
    pub(crate) key: &'a LinkKey,
    /// Rank that listens there.
    pub(crate) peer: usize,
    pub(crate) purpose: Purpose,
}

/// Reason that there is no connection.
pub(crate) enum Undialled {
    /// This rank cannot look up the peer's host name.
    Unresolved(io::Error),
    Unconnected(io::Error),
    Refused(Refusal),
}

impl Dial<'_> {
    /// Connects and performs the handshake. Gives up at `until` if the listener has not greeted by then. Tries again
    /// for a while if it closes the connection, as a busy listener does. Waits for its answer beyond `until`, as long
    /// as `answer_by` allows, see [`introduce`]. Ends at once when `membership`, if there is one, notes that the world
    /// has ended or the peer has left.
    pub(crate) fn connect(
        &self,
        until: Instant,
        mut answer_by: impl FnMut() -> Option<Instant>,
        membership: Option<&Arc<Membership>>,
    ) -> Result<SecureStream, Undialled> {
        let Dial { to, via, key, peer, purpose } = self;
        // A listener that has too many connections at a time closes some before their handshake: another attempt helps.
        let insist_until = until.min(Instant::now() + HANDSHAKE_DEADLINE);
        let me = Introduction { key: &key.key, tag: key.tag, to: Role::Rank(*peer as u32), purpose: *purpose };
        let addresses = to.look_up().map_err(Undialled::Unresolved)?;
        loop {
            let socket = bind_and_connect::connect_any(&addresses, via, until).map_err(Undialled::Unconnected)?;
            let hangup = membership.map(|membership| Hangup::new(&socket, membership, *peer)).transpose();
            let hangup = hangup.map_err(Undialled::Unconnected)?;
            match introduce(socket, &me, until, &mut answer_by) {
                Ok(stream) => {
                    hangup.inspect(|hangup| hangup.disarm());
                    return Ok(stream);
                }
                Err(Refusal::NotOurs(e))
                    if e.kind() != ErrorKind::TimedOut
                        && Instant::now() < insist_until
                        && !hangup.is_some_and(|hangup| hangup.is_due()) =>
                {
                    std::thread::sleep(bind_and_connect::RETRY);
                }
                Err(refusal) => return Err(Undialled::Refused(refusal)),
            }
        }
    }
}

impl Undialled {
    /// The reason and the fix if this machine lacks descriptors or ports; see [`descriptors::shortage`].
    pub(crate) fn shortage(&self, world_size: usize) -> Option<String> {
        match self {
            Self::Unconnected(e) => descriptors::shortage(e, world_size),
            Self::Unresolved(_) | Self::Refused(_) => None,
        }
    }

    /// True if the process that listens there has refused the connection.
    pub(crate) fn is_verdict(&self) -> bool {
        matches!(self, Self::Refused(Refusal::Refused(_) | Refusal::Misdirected(_)))
    }

    /// True if the peer does not listen any more: its port is closed, or another process has it.
    pub(crate) fn is_gone(&self) -> bool {
        match self {
            Self::Unconnected(e) => e.kind() == ErrorKind::ConnectionRefused,
            Self::Refused(refusal) => matches!(refusal, Refusal::Misdirected(_)),
            Self::Unresolved(_) => false,
        }
    }

    /// True if the peer gave no answer in time, to the attempt to connect or in the handshake.
    pub(crate) fn is_silence(&self) -> bool {
        match self {
            Self::Unconnected(e) | Self::Refused(Refusal::NotOurs(e)) => e.kind() == ErrorKind::TimedOut,
            Self::Unresolved(_) | Self::Refused(Refusal::Refused(_) | Refusal::Misdirected(_)) => false,
        }
    }
}

impl fmt::Display for Undialled {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unresolved(e) | Self::Unconnected(e) => e.fmt(f),
            Self::Refused(refusal) => refusal.fmt(f),
        }
    }
}

/// Ends a handshake that is in vain. The membership wakes it when the world ends or a rank leaves.
struct Hangup {
    /// `None` once the handshake is over: the connection may carry what the peer sent before it left.
    socket: Mutex<Option<Socket>>,
    membership: Arc<Membership>,
    peer: usize,
}

impl Hangup {
    fn new(socket: &Socket, membership: &Arc<Membership>, peer: usize) -> io::Result<Arc<Hangup>> {
        let socket = Mutex::new(Some(socket.try_clone()?));
        let hangup = Arc::new(Hangup { socket, membership: membership.clone(), peer });
        let weak: Weak<dyn Wake> = Arc::downgrade(&hangup) as Weak<dyn Wake>;
        membership.add_waker(weak);
        // The membership does not announce earlier changes again.
        hangup.wake();
        Ok(hangup)
    }

    /// True if the world has ended or the peer has left.
    fn is_due(&self) -> bool {
        self.membership.check().is_err() || self.membership.has_left(self.peer)
    }

    fn disarm(&self) {
        *lock(&self.socket) = None;
    }
}

impl Wake for Hangup {
    fn wake(&self) {
        // A peer that has left may have accepted this end before, and sent data that are still to be read: then only
        // the sending side is shut down. Either way the handshake meets the end of the connection.
        let how = match self.membership.check() {
            Err(_) => Shutdown::Both,
            Ok(()) if self.membership.has_left(self.peer) => Shutdown::Write,
            Ok(()) => return,
        };
        if let Some(socket) = &*lock(&self.socket) {
            let _ = socket.shutdown(how);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::net::{SocketAddr, TcpListener, TcpStream};
    use std::thread;
    use std::time::Duration;

    use super::*;
    use crate::auth::hmac_key::KEY_BYTES;
    use crate::auth::unauthenticated_connections::Strangers;
    use crate::engine::tcp::{Reach, TcpFabric};
    use crate::membership::ControlMessage;
    use crate::membership::control::Links;
    use crate::net::peer_addresses::PeerAddresses;
    use crate::post_mortem::Event;
    use crate::world_member::Seat;
    use crate::{JobKey, LaunchEnv, Machines, Meeting, PeerInfo, World, WorldOptions};

    const PATIENCE: Duration = Duration::from_secs(60);

    /// Rank 0 of two, a connection with rank 1, and its hangup.
    fn begun() -> (Arc<Membership>, Socket, TcpStream, Arc<Hangup>) {
        let peers = (0..2).map(|rank| PeerInfo::here(rank, rank, 0)).collect();
        let membership = Membership::new(0, peers, Machines::new(&[(); 2]), WorldOptions::default());
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let mine = Socket::from(TcpStream::connect(listener.local_addr().unwrap()).unwrap());
        let hangup = Hangup::new(&mine, &membership, 1).unwrap();
        (membership, mine, listener.accept().unwrap().0, hangup)
    }

    #[test]
    fn a_goodbye_leaves_a_link_alone_that_was_just_welcomed() {
        let (membership, mut mine, mut theirs, hangup) = begun();
        hangup.disarm();
        // The membership holds on to it while it wakes all waits.
        membership.receive(1, ControlMessage::Goodbye);
        mine.write_all(b"mine").unwrap();
        drop(mine);
        let mut got = Vec::new();
        theirs.read_to_end(&mut got).unwrap();
        assert_eq!(got, b"mine");
    }

    #[test]
    fn what_a_peer_sent_before_its_goodbye_is_read_and_nothing_more_is_sent() {
        let (membership, mut mine, mut theirs, _hangup) = begun();
        membership.receive(1, ControlMessage::Goodbye);
        assert!(mine.write_all(b"mine").is_err());
        theirs.write_all(b"theirs").unwrap();
        drop(theirs);
        let mut got = Vec::new();
        mine.read_to_end(&mut got).unwrap();
        assert_eq!(got, b"theirs");
    }

    /// Address of rank 0, which is stopped in the middle of every handshake: it greets each client and answers none.
    fn stopped_after_its_greeting() -> SocketAddr {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        thread::spawn(move || {
            let mut strangers = Strangers::new(Role::Rank(0));
            for client in listener.incoming() {
                strangers.receive(bind_and_connect::ready(client.unwrap()).unwrap(), None);
            }
        });
        address
    }

    /// Rank 1 of two, which dials rank 0 at `address` for data.
    fn rank_1(address: SocketAddr, options: WorldOptions) -> (World, Arc<Membership>) {
        let peers: Vec<_> = (0..2).map(|rank| PeerInfo::here(rank, rank, 0)).collect();
        let machines = Machines::new(&[(); 2]);
        let membership = Membership::new(1, peers.clone(), machines.clone(), options.clone());
        let addresses = PeerAddresses::new(vec![(address.ip().to_string(), address.port()); 2]);
        let key = JobKey::trusting_network("job", 0).links(&[1; KEY_BYTES]);
        let reach = Reach { rank: 1, addresses, key, via: Interface::default(), links: Arc::new(Links::new(1, 2)) };
        let fabric = Arc::new(TcpFabric::new(reach, membership.clone()));
        let (member, keep_alive) = (membership.clone(), None);
        let seat = Seat { rank: 1, local_world_size: 2, machines, peers, membership: member, fabric, keep_alive };
        (World::from_seat(seat, options), membership)
    }

    #[test]
    fn a_peer_that_is_stopped_in_the_middle_of_a_handshake_is_reported_as_a_stall() {
        let directory = tempfile::tempdir().unwrap();
        let events = directory.path().join("events");
        std::fs::File::create_new(&events).unwrap();
        let options = WorldOptions { stall: Duration::from_millis(500), timeout: PATIENCE, ..WorldOptions::default() };
        let (world, membership) = rank_1(stopped_after_its_greeting(), options);
        let meeting = Meeting::Rank0 { host: "localhost".into(), port: 1 };
        membership.report_to(&LaunchEnv { events: Some(events.clone()), ..LaunchEnv::new(1, 2, meeting, "job") });
        let (reported, ended) = thread::scope(|scope| {
            let call = scope.spawn(|| world.group().map(drop));
            let deadline = Instant::now() + PATIENCE / 4;
            let reported = loop {
                let written = std::fs::read_to_string(&events).unwrap();
                let first = written.lines().next().and_then(Event::parse);
                if first.is_some() || Instant::now() >= deadline {
                    break first;
                }
                thread::sleep(Duration::from_millis(5));
            };
            membership.fail_self("the test is over".to_owned());
            (reported, call.join().unwrap())
        });
        assert!(ended.unwrap_err().to_string().contains("the test is over"), "the end of the world ends the handshake");
        let Some(Event::Stall { rank: 1, waiting_for, call, .. }) = reported else { panic!("no stall: {reported:?}") };
        assert_eq!(waiting_for, [0]);
        assert!(call.starts_with("World::group (group 1) called at "), "{call}");
    }
}
