//! Control connections between ranks of different processes.
//!
//! Each pair of ranks of one machine has one TCP connection for [`ControlMessage`]s, and so has each pair of
//! counterparts on two machines. Other ranks exchange messages [through these](relay), or
//! [connect](fallback_connections) when no counterparts are left. Every rank has one thread, the [`monitor`],
//! that serves its connections and its listener. So the peers notice a death at once, whatever they compute: the kernel
//! closes a dead process's sockets, and the end of a connection without a goodbye is a death.
//!
//! **A goodbye must not be lost**, or a clean exit would look like a death. The thread that leaves writes it, not the
//! monitor, since the process may exit right after; the kernel delivers bytes that were written. One event could
//! destroy them: a socket that is closed while it holds unread bytes is reset, and a reset discards bytes that the
//! network has not delivered yet. The unread bytes can only be a message that the peer sent at the same moment. If that
//! is the peer's goodbye, the peer no longer needs this one; if it is a failure, the world has ended anyway. If it is a
//! heartbeat or another rank's message, the goodbye is lost only if the network loses its packet at that moment, too.
//! In a process that lives on, the monitor keeps reading until the peers have closed (or [`LINGER`](monitor::LINGER) is
//! over), so that nothing is reset.

mod exit_cause;
mod fallback_connections;
mod monitor;
mod relay;
mod unclaimed_connections;

use std::collections::BTreeMap;
use std::io::{self, ErrorKind};
use std::net::{IpAddr, Shutdown, SocketAddr, TcpListener};
use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;

pub(crate) use fallback_connections::Directory;
pub(crate) use unclaimed_connections::Links;

use crate::auth::job_key::LinkKey;
use crate::auth::secure_stream::SecureStream;
use crate::membership::{ControlMessage, Envelope, Heartbeat, Membership, Outbox};
use crate::net::encrypted_messages::{Wire, WireReader, WireWriter};
use crate::net::interface::Interface;
use crate::net::wait::Waker;
use crate::net::{bind_and_connect, keep_alive};
use crate::poison_free_locks::lock;

/// Longest control message, in bytes; the membership caps the texts in them.
const MESSAGE_CAP: usize = 64 * 1024;
/// Bytes of control messages that a peer has not read, from which on it is given up.
const UNREAD_CAP: usize = 1024 * 1024;
/// Bytes of heartbeats at which a message is full and another begins. A heartbeat has a few kilobytes at most.
const BEATS_CAP: usize = MESSAGE_CAP / 2;

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
    /// The reading ends and the membership, set once all neighbours are connected, for the monitor to take.
    mesh: Mutex<Option<Mesh>>,
    /// Written by this rank's threads, read by the monitor after a wake.
    phase: AtomicU8,
    links: Arc<Links>,
    waker: Waker,
}

struct Mesh {
    readers: Vec<Option<WireReader>>,
    membership: Arc<Membership>,
    directory: Directory,
}

impl std::fmt::Debug for Mesh {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Mesh").finish_non_exhaustive()
    }
}

/// The rank takes part.
const PRESENT: u8 = 0;
/// It has said goodbye: of its peers, it heeds only a failure that ends the world.
const LEFT: u8 = 1;
/// The handle is dropped: the monitor waits until the peers have closed, then ends.
const CLOSED: u8 = 2;

/// The writing end of a control connection.
#[derive(Debug)]
struct Sender {
    wire: WireWriter,
    /// Heartbeats of other ranks, by rank, to be passed on together.
    beats: BTreeMap<usize, Heartbeat>,
    /// True after the goodbye: this direction is closed once everything is written.
    last: bool,
    /// True if nothing can be sent any more.
    broken: bool,
    /// Reason that it is broken, except for an end of the connection, which the reading end reports.
    cause: Option<String>,
}

impl Control {
    /// Starts the monitor on `listener`. Until [`attach`](Self::attach) the monitor only accepts connections, which
    /// wait in [`links`](Self::links).
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
        bind_and_connect::listener(&socket2::SockRef::from(&listener))?;
        let monitor = monitor::Monitor::new(listener, shared.clone());
        thread::Builder::new().name(format!("burn-ddp rank {rank}")).spawn(move || monitor.run())?;
        Ok(Control { shared })
    }

    /// The connections that were accepted and are not claimed yet.
    pub(crate) fn links(&self) -> &Arc<Links> {
        &self.shared.links
    }

    /// Hands over the control connections to the neighbours, by rank. From now on the monitor serves them and reports
    /// to `membership`. `directory` has the addresses of ranks, in case that some are cut off.
    pub(crate) fn attach(
        &self,
        streams: Vec<Option<SecureStream>>,
        membership: Arc<Membership>,
        directory: Directory,
    ) -> io::Result<()> {
        let mut senders = Vec::with_capacity(streams.len());
        let mut readers = Vec::with_capacity(streams.len());
        for stream in streams {
            let Some(stream) = stream else {
                senders.push(None);
                readers.push(None);
                continue;
            };
            let (reader, sender) = ends(stream, &membership)?;
            senders.push(Some(sender));
            readers.push(Some(reader));
        }
        *lock(&self.shared.senders) = senders;
        *lock(&self.shared.mesh) = Some(Mesh { readers, membership, directory });
        self.shared.waker.wake();
        Ok(())
    }
}

/// Both ends of a control connection.
fn ends(stream: SecureStream, membership: &Membership) -> io::Result<(WireReader, Sender)> {
    let timeout = membership.options().machine_timeout();
    keep_alive::probe_when_idle(stream.socket(), timeout)?;
    keep_alive::limit_silence(stream.socket(), timeout)?;
    let (reader, wire) = Wire::new(stream, MESSAGE_CAP)?.split();
    Ok((reader, Sender { wire, beats: BTreeMap::new(), last: false, broken: false, cause: None }))
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
            self.shared.links.leave();
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
    /// Sends this rank's heartbeat, if it is due, and those of others that it passes on. Sends nothing while the socket
    /// has no room: a peer that does not read needs no more heartbeats.
    fn beat(&mut self, rank: usize, own: Option<&ControlMessage>) {
        if self.wire.wants_write() || self.broken || self.last {
            return;
        }
        if let Some(message) = own {
            self.queue(&Envelope { origin: rank, message });
        }
        let mut beats = std::mem::take(&mut self.beats).into_iter().peekable();
        while beats.peek().is_some() {
            let mut bytes = 0;
            let some = std::iter::from_fn(|| {
                let beat = beats.next_if(|_| bytes < BEATS_CAP)?;
                bytes += postcard::to_stdvec(&beat).map_or(BEATS_CAP, |beat| beat.len());
                Some(beat)
            });
            let message = &ControlMessage::PassedOn(some.collect());
            self.queue(&Envelope { origin: rank, message });
        }
        // The monitor writes the bytes that remain.
        let _all_written = self.flush();
    }

    /// Sends `message`; `false` if bytes remain that the monitor has to write.
    fn send(&mut self, message: &Envelope<&ControlMessage>, last: bool) -> bool {
        if self.broken || self.last {
            return true;
        }
        self.last = last;
        self.queue(message);
        self.flush()
    }

    fn queue(&mut self, message: &Envelope<&ControlMessage>) {
        if let Err(e) = self.wire.queue(message) {
            self.give_up(format!("a control message could not be written: {e}"));
        }
        if self.wire.unsent_bytes() > UNREAD_CAP {
            self.give_up("it does not read its control connection".to_owned());
        }
    }

    /// As for [`send`](Self::send).
    fn flush(&mut self) -> bool {
        if self.broken {
            return true;
        }
        match self.wire.flush() {
            Ok(true) => {
                if self.last {
                    // The peer reads the goodbye, then the end of the stream. On an error, the peer is gone already.
                    let _ = self.wire.socket().shutdown(Shutdown::Write);
                }
                true
            }
            Ok(false) => false,
            // The reading end learns what happened to the peer, after it has read the peer's last messages.
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
        // The monitor then meets the end of the connection, and reports the cause.
        let _ = self.wire.socket().shutdown(Shutdown::Both);
    }
}

/// Listens on the address `local`, at any port, for connections of other ranks.
pub(crate) fn listen(local: IpAddr, via: &Interface) -> io::Result<(TcpListener, SocketAddr)> {
    let listener = TcpListener::bind(via.in_zone(SocketAddr::new(local, 0)))?;
    let address = listener.local_addr()?;
    Ok((listener, address))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::auth::handshake::agreed;
    use crate::membership::BlockedGroup;
    use crate::net::peer_addresses::PeerAddresses;

    /// Key of the worlds of these tests.
    pub(super) fn key() -> LinkKey {
        crate::JobKey::trusting_network("job", 0).links(&[1; crate::auth::hmac_key::KEY_BYTES])
    }

    /// Addresses of 16 ranks that all listen at this port of this machine.
    pub(super) fn directory(port: u16) -> Directory {
        let addresses = PeerAddresses::new(vec![("127.0.0.1".to_owned(), port); 16]);
        Directory { addresses, via: Interface::default() }
    }

    /// Rank 0 of a world on these machines, to which no other rank has connected, and the address where it listens.
    pub(super) fn alone(machines: &[usize]) -> (Arc<Control>, Arc<Membership>, SocketAddr) {
        alone_with(machines, Directory::default())
    }

    /// The same, with the addresses of the others.
    pub(super) fn alone_with(machines: &[usize], directory: Directory) -> (Arc<Control>, Arc<Membership>, SocketAddr) {
        let (listener, address) = listen([127, 0, 0, 1].into(), &Interface::default()).unwrap();
        let control = Arc::new(Control::start(listener, 0, machines.len(), key()).unwrap());
        let peers = (0..machines.len()).map(|rank| crate::PeerInfo::here(rank, rank, 0)).collect();
        let membership = Membership::new(0, peers, crate::Machines::new(machines), crate::WorldOptions::default());
        membership.set_outbox(Arc::downgrade(&(control.clone() as Arc<dyn Outbox>)));
        let streams = machines.iter().map(|_| None).collect();
        control.attach(streams, membership.clone(), directory).unwrap();
        (control, membership, address)
    }

    /// A sender to a rank, and the end at which that rank reads.
    fn connected() -> (Sender, WireReader) {
        let [a, b] = SecureStream::pair(agreed()).unwrap().map(|end| Wire::new(end, MESSAGE_CAP).unwrap().split());
        (Sender { wire: a.1, beats: BTreeMap::new(), last: false, broken: false, cause: None }, b.0)
    }

    #[test]
    fn heartbeats_of_others_travel_in_one_message() {
        let (mut sender, mut reader) = connected();
        let small = Heartbeat::default();
        let large = Heartbeat {
            blocked: vec![BlockedGroup { group: 1, place: 0, calls: Vec::new() }; 3000],
            ..Heartbeat::default()
        };
        for (beat, origins, messages) in [(&small, 0, 1), (&small, 1000, 2), (&large, 20, 6)] {
            for again in [0, 1] {
                (2..2 + origins)
                    .for_each(|origin| drop(sender.beats.insert(origin, Heartbeat { idle_ms: again, ..beat.clone() })));
            }
            sender.beat(7, Some(&ControlMessage::Heartbeat(small.clone())));
            let mut received = Vec::new();
            while received.len() < messages {
                received.extend(reader.next::<Envelope<ControlMessage>>().unwrap());
                sender.flush();
            }
            assert!(reader.next::<Envelope<ControlMessage>>().unwrap().is_none());
            assert!(received.iter().all(|envelope| envelope.origin == 7));
            assert_eq!(received.remove(0).message, ControlMessage::Heartbeat(small.clone()));
            let passed_on = received.into_iter().flat_map(|envelope| match envelope.message {
                ControlMessage::PassedOn(beats) => beats,
                other => panic!("{other:?}"),
            });
            let passed_on: Vec<_> = passed_on.map(|(origin, beat)| (origin, beat.idle_ms)).collect();
            assert_eq!(passed_on, (2..2 + origins).map(|origin| (origin, 1)).collect::<Vec<_>>(), "the latest of each");
        }
    }
}
