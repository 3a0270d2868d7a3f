//! Connecting to another rank.

use std::fmt;
use std::io::{self, ErrorKind};
use std::net::Shutdown;
use std::sync::{Arc, Weak};
use std::time::Instant;

use socket2::Socket;

use super::interface::Interface;
use super::{address, descriptors};
use crate::auth::handshake::{HANDSHAKE_DEADLINE, Introduction, Purpose, Refusal, Role, introduce};
use crate::auth::job_key::LinkKey;
use crate::auth::secure_stream::SecureStream;
use crate::membership::{Membership, Wake};

/// A connection to be made.
pub(crate) struct Dial<'a> {
    pub(crate) to: (&'a str, u16),
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
    Unconnected(io::Error),
    Refused(Refusal),
}

impl Dial<'_> {
    /// Connects and proves to know the key. Tries again until `deadline` where the listener may have been too busy.
    /// Ends as soon as `membership`, if there is one, knows that the world has ended or the peer has left.
    pub(crate) fn connect(
        &self,
        deadline: Instant,
        membership: Option<&Arc<Membership>>,
    ) -> Result<SecureStream, Undialled> {
        let Dial { to, via, key, peer, purpose } = self;
        // Among many connections at a time the listener may drop one unheard; it hears the next.
        let insist_until = deadline.min(Instant::now() + HANDSHAKE_DEADLINE);
        let me = Introduction { key: &key.key, tag: key.tag, to: Role::Rank(*peer as u32), purpose: *purpose };
        loop {
            let socket = address::connect_once(to.0, to.1, via, deadline).map_err(Undialled::Unconnected)?;
            let hangup = membership.map(|membership| Hangup::new(&socket, membership, *peer)).transpose();
            let hangup = hangup.map_err(Undialled::Unconnected)?;
            match introduce(socket, &me, deadline) {
                Ok(stream) => return Ok(stream),
                Err(Refusal::NotOurs(e))
                    if e.kind() != ErrorKind::TimedOut
                        && Instant::now() < insist_until
                        && !hangup.is_some_and(|hangup| hangup.is_due()) =>
                {
                    std::thread::sleep(address::RETRY);
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
            Self::Refused(_) => None,
        }
    }

    /// True if nothing has answered so far.
    pub(crate) fn is_silence(&self) -> bool {
        match self {
            Self::Unconnected(e) | Self::Refused(Refusal::NotOurs(e)) => e.kind() == ErrorKind::TimedOut,
            Self::Refused(Refusal::Refused(_)) => false,
        }
    }
}

impl fmt::Display for Undialled {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unconnected(e) => e.fmt(f),
            Self::Refused(refusal) => refusal.fmt(f),
        }
    }
}

/// Ends a handshake that is in vain: the membership wakes it.
struct Hangup {
    socket: Socket,
    membership: Arc<Membership>,
    peer: usize,
}

impl Hangup {
    fn new(socket: &Socket, membership: &Arc<Membership>, peer: usize) -> io::Result<Arc<Hangup>> {
        let hangup = Arc::new(Hangup { socket: socket.try_clone()?, membership: membership.clone(), peer });
        let weak: Weak<dyn Wake> = Arc::downgrade(&hangup) as Weak<dyn Wake>;
        membership.add_waker(weak);
        // What happened before is not announced again.
        hangup.wake();
        Ok(hangup)
    }

    fn is_due(&self) -> bool {
        self.membership.check().is_err() || self.membership.has_left(self.peer)
    }
}

impl Wake for Hangup {
    fn wake(&self) {
        if self.is_due() {
            // The handshake meets the end of the connection.
            let _ = self.socket.shutdown(Shutdown::Both);
        }
    }
}
