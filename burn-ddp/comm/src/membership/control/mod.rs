//! Control connections between ranks of different processes.
//!
//! Ranks of one machine share one TCP connection per pair for [`ControlMessage`]s, and so do counterparts on two
//! machines; the others hear of each other [through them](relay). Every rank has one thread, the [monitor](monitor),
//! that serves its connections and its listener. So a death is noticed at once, whatever the rank itself is doing: the
//! kernel closes a dead process's sockets, and an end without a goodbye is a death.
//!
//! **A goodbye must not be lost**, or a clean exit would look like a death. It is written by the thread that leaves,
//! not by the monitor, since the process may exit right after; the kernel delivers what was written. One thing could
//! destroy it: a socket closed while it holds unread bytes is reset, and a reset discards what the network has not
//! delivered yet. Unread bytes can only be a message that the peer sent at the very same time: its own goodbye, and
//! then it no longer cares; a failure, and then the world has ended anyway; or a heartbeat or another rank's message,
//! where only a goodbye that the network loses at that moment is not sent again. In a process that lives on, the
//! monitor keeps reading until the peers have closed (or [`LINGER`](monitor::LINGER) is over), so that nothing is
//! reset.

mod monitor;
mod proc_exit;
mod relay;
mod unclaimed_connections;

use std::io::{self, ErrorKind};
use std::net::{Shutdown, SocketAddr, TcpListener};
use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;

pub(crate) use unclaimed_connections::Links;

use crate::auth::job_key::LinkKey;
use crate::auth::secure_stream::SecureStream;
use crate::membership::{ControlMessage, Envelope, Membership, Outbox};
use crate::net::wait::Waker;
use crate::net::wire::{Wire, WireReader, WireWriter};
use crate::net::{address, keep_alive};
use crate::poison_free_locks::lock;

/// Longest control message, in bytes; the membership caps the texts in them.
const MESSAGE_CAP: usize = 64 * 1024;
/// Bytes of unread control messages at which a peer is given up.
const UNREAD_CAP: usize = 1024 * 1024;

/// The control connections of one rank. Dropping it ends the monitor, without waiting for it.
#[derive(Debug)]
pub(crate) struct Control {
    shared: Arc<Shared>,
}

/// State that the rank's threads and its monitor share.
#[derive(Debug)]
struct Shared {
    rank: usize,
    /// Key that peers must prove to know.
    key: LinkKey,
    /// Writing ends, by rank; set once, when all neighbours are connected. `None` for ranks without a connection.
    senders: Mutex<Vec<Option<Sender>>>,
    /// Reading ends for the monitor, by rank, once all neighbours are connected, and the membership that they report
    /// to.
    mesh: Mutex<Option<Mesh>>,
    /// Written by this rank's threads, read by the monitor after a wake.
    phase: AtomicU8,
    links: Arc<Links>,
    waker: Waker,
}

struct Mesh {
    readers: Vec<Option<WireReader>>,
    membership: Arc<Membership>,
}

impl std::fmt::Debug for Mesh {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Mesh").finish_non_exhaustive()
    }
}

/// The rank takes part.
const PRESENT: u8 = 0;
/// It said goodbye: the state of peers is no longer its concern.
const LEFT: u8 = 1;
/// The handle is gone: let peers close, then end.
const CLOSED: u8 = 2;

/// The writing end of a control connection.
#[derive(Debug)]
struct Sender {
    wire: WireWriter,
    /// True after the goodbye: this direction is closed once everything is written.
    last: bool,
    /// True if nothing can be sent any more.
    broken: bool,
    /// Reason for that, where it is no end of the peer's side: the reading end meets that as well.
    cause: Option<String>,
}

impl Control {
    /// Starts the monitor on `listener`. Until [`attach`](Self::attach) it only accepts connections, which wait in
    /// [`links`](Self::links).
    pub(crate) fn start(listener: TcpListener, rank: usize, world_size: usize, key: LinkKey) -> io::Result<Control> {
        let shared = Arc::new(Shared {
            rank,
            key,
            senders: Mutex::new(Vec::new()),
            mesh: Mutex::new(None),
            phase: AtomicU8::new(PRESENT),
            links: Arc::new(Links::new(rank, world_size)),
            waker: Waker::new()?,
        });
        address::listener(&socket2::SockRef::from(&listener))?;
        let monitor = monitor::Monitor::new(listener, shared.clone());
        thread::Builder::new().name(format!("burn-ddp rank {rank}")).spawn(move || monitor.run())?;
        Ok(Control { shared })
    }

    /// The connections that were accepted.
    pub(crate) fn links(&self) -> &Arc<Links> {
        &self.shared.links
    }

    /// Hands over the control connections to the neighbours, by rank: from now on they are watched for `membership`.
    pub(crate) fn attach(&self, streams: Vec<Option<SecureStream>>, membership: Arc<Membership>) -> io::Result<()> {
        let mut senders = Vec::with_capacity(streams.len());
        let mut readers = Vec::with_capacity(streams.len());
        for stream in streams {
            let Some(stream) = stream else {
                senders.push(None);
                readers.push(None);
                continue;
            };
            let timeout = membership.options().machine_timeout();
            keep_alive::probe_when_idle(stream.socket(), timeout)?;
            keep_alive::limit_silence(stream.socket(), timeout)?;
            let (reader, writer) = Wire::new(stream, MESSAGE_CAP)?.split();
            senders.push(Some(Sender { wire: writer, last: false, broken: false, cause: None }));
            readers.push(Some(reader));
        }
        *lock(&self.shared.senders) = senders;
        *lock(&self.shared.mesh) = Some(Mesh { readers, membership });
        self.shared.waker.wake();
        Ok(())
    }
}

impl Outbox for Control {
    fn send_all(&self, message: &ControlMessage) {
        let goodbye = matches!(message, ControlMessage::Goodbye);
        let message = &Envelope { origin: self.shared.rank, message };
        let mut all_written = true;
        for sender in lock(&self.shared.senders).iter_mut().flatten() {
            all_written &= sender.send(message, goodbye);
        }
        if goodbye {
            self.shared.phase.fetch_max(LEFT, Ordering::AcqRel);
        }
        if !all_written || goodbye {
            self.shared.waker.wake();
        }
    }
}

impl Drop for Control {
    fn drop(&mut self) {
        self.shared.phase.store(CLOSED, Ordering::Release);
        self.shared.waker.wake();
    }
}

impl Sender {
    /// Sends a heartbeat if the socket has room: a peer that does not read needs no more of them.
    fn beat(&mut self, message: &Envelope<&ControlMessage>) -> bool {
        self.wire.wants_write() || self.send(message, false)
    }

    /// Writes what the socket takes; `false` if something remains for the monitor to write.
    fn send(&mut self, message: &Envelope<&ControlMessage>, last: bool) -> bool {
        if self.broken || self.last {
            return true;
        }
        self.last = last;
        if let Err(e) = self.wire.queue(message) {
            self.give_up(format!("a control message could not be written: {e}"));
        }
        if self.wire.unsent_bytes() > UNREAD_CAP {
            self.give_up("it does not read its control connection".to_owned());
        }
        self.flush()
    }

    /// As for [`send`](Self::send).
    fn flush(&mut self) -> bool {
        if self.broken {
            return true;
        }
        match self.wire.flush() {
            Ok(true) => {
                if self.last {
                    // The peer sees the goodbye, then the end. An error means that it is gone already.
                    let _ = self.wire.socket().shutdown(Shutdown::Write);
                }
                true
            }
            Ok(false) => false,
            // The reading end finds out what happened to the peer, after the peer's last messages.
            Err(e) => {
                self.broken = true;
                let ended = matches!(e.kind(), ErrorKind::BrokenPipe | ErrorKind::ConnectionReset);
                self.cause = (!ended).then(|| e.to_string());
                true
            }
        }
    }

    fn give_up(&mut self, cause: String) {
        (self.broken, self.cause) = (true, Some(cause));
        // Ends the reading end, and so reports the cause.
        let _ = self.wire.socket().shutdown(Shutdown::Both);
    }
}

/// Listens on the address `local`, at any port, for connections of other ranks.
pub(crate) fn listen(local: std::net::IpAddr) -> io::Result<(TcpListener, SocketAddr)> {
    let listener = TcpListener::bind((local, 0))?;
    let address = listener.local_addr()?;
    Ok((listener, address))
}
