//! One authenticated connection to another rank's listener, given up when the world ends.

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
    /// Key that both ends prove to know.
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
    /// Connects and proves to know the key. Tries again until `until` where the listener may have been too busy. Awaits
    /// the end of a handshake that the listener has begun by then for as long as `answer_by` says, see [`introduce`].
    /// Ends as soon as `membership`, if there is one, knows that the world has ended or the peer has left.
    pub(crate) fn connect(
        &self,
        until: Instant,
        mut answer_by: impl FnMut() -> Option<Instant>,
        membership: Option<&Arc<Membership>>,
    ) -> Result<SecureStream, Undialled> {
        let Dial { to, via, key, peer, purpose } = self;
        // Among many connections at a time the listener may drop one unheard; it hears the next.
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
    /// The reason and the fix if it is for want of descriptors or ports here; see [`descriptors::shortage`].
    pub(crate) fn shortage(&self, world_size: usize) -> Option<String> {
        match self {
            Self::Unconnected(e) => descriptors::shortage(e, world_size),
            Self::Unresolved(_) | Self::Refused(_) => None,
        }
    }

    /// True if the process that listens there does not want the connection.
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

    /// True if nothing has answered so far.
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

/// Ends a handshake that is in vain: the membership wakes it.
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
        // What happened before is not announced again.
        hangup.wake();
        Ok(hangup)
    }

    fn is_due(&self) -> bool {
        self.membership.check().is_err() || self.membership.has_left(self.peer)
    }

    fn disarm(&self) {
        *lock(&self.socket) = None;
    }
}

impl Wake for Hangup {
    fn wake(&self) {
        // A peer that has left may have let this end in before, and sent something: that is still read. Either way the
        // handshake meets the end of the connection.
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
    use std::net::{TcpListener, TcpStream};

    use super::*;
    use crate::membership::ControlMessage;
    use crate::{Machines, PeerInfo, WorldOptions};

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
}
