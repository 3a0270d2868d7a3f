//! The monitor: the thread that serves a rank's control connections and accepts connections for the rank.

use std::collections::BTreeSet;
use std::io::{self, ErrorKind};
use std::net::TcpListener;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags};

use super::exit_cause::cause_of_exit;
use super::fallback_connections::CutOff;
use super::{CLOSED, PRESENT, Shared, ends};
use crate::auth::handshake::{Purpose, Role};
use crate::auth::job_key::LinkKey;
use crate::auth::unauthenticated_connections::{Introduced, Strangers};
use crate::membership::{ControlMessage, Envelope, Membership};
use crate::net::encrypted_messages::WireReader;
use crate::net::wait::wait;
use crate::net::{bind_and_connect, descriptors};
use crate::poison_free_locks::lock;

/// Time in which a monitor whose rank has left waits for its peers to close their ends.
pub(super) const LINGER: Duration = Duration::from_secs(5);
/// Most connections accepted before the existing ones are served again.
const ACCEPTS_PER_TURN: usize = 64;
/// Most times per period that a rank passes on the heartbeats of other ranks that it has collected.
const PASSED_ON_PER_BEAT: u32 = 4;
/// Pause after a failed accept, typically for lack of file descriptors.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

pub(super) struct Monitor {
    shared: Arc<Shared>,
    /// `None` once the handle is dropped.
    listener: Option<TcpListener>,
    accept_after: Option<Instant>,
    strangers: Strangers,
    /// Reading ends, by rank; `None` for ranks without a connection or whose connection has ended. Empty until all
    /// neighbours are connected.
    readers: Vec<Option<WireReader>>,
    /// Set together with `readers`.
    membership: Option<Arc<Membership>>,
    cut_off: Option<CutOff>,
    /// Ranks with a fallback connection on which no message has come yet. If such a connection ends, it is not known
    /// whether the rank gave it up, was just leaving, or has died.
    unheard: BTreeSet<usize>,
    /// Time of the next heartbeat or check for silence. Set while the rank takes part.
    look_at: Option<Instant>,
    /// Time to pass on the collected heartbeats of other ranks. Set while there are some.
    pass_on_at: Option<Instant>,
    /// Time to end even if peers have not closed their ends. Set when the handle is dropped.
    end: Option<Instant>,
}

impl Monitor {
    pub(super) fn new(listener: TcpListener, shared: Arc<Shared>) -> Self {
        let listener = Some(listener);
        let strangers = Strangers::new(Role::Rank(shared.rank as u32));
        Self {
            shared,
            listener,
            accept_after: None,
            strangers,
            readers: Vec::new(),
            membership: None,
            cut_off: None,
            unheard: BTreeSet::new(),
            look_at: None,
            pass_on_at: None,
            end: None,
        }
    }

    pub(super) fn run(mut self) {
        loop {
            match self.turn() {
                Ok(true) => {}
                Ok(false) => return,
                Err(e) => {
                    // Without a monitor, deaths would go unnoticed, so this rank must not go on.
                    if let Some(membership) = self.membership.take() {
                        membership.fail(crate::Error::Internal {
                            message: format!("the monitor of rank {} ended: {e}", self.shared.rank),
                        });
                    }
                    return;
                }
            }
        }
    }

    /// Waits for an event and handles it; `false` when all is done.
    fn turn(&mut self) -> io::Result<bool> {
        let ready = self.wait()?;
        let mut ready = ready.into_iter();
        let listener_ready = ready.next().unwrap_or(false);

        self.shared.waker.clear();
        self.adopt_mesh();
        self.adopt_connections();
        // First the messages of peers, which are older than this rank's own events.
        for rank in ready
            .by_ref()
            .take(self.readers.len())
            .enumerate()
            .filter_map(|(rank, ready)| ready.then_some(rank))
            .collect::<Vec<_>>()
        {
            self.flush(rank);
            self.read(rank);
        }
        self.tend();
        let strangers: Vec<bool> = ready.collect();
        for stranger in self.strangers.hear(&strangers) {
            self.meet(stranger);
        }
        if listener_ready {
            self.accept();
        }
        Ok(!self.finished())
    }

    /// Waits for events. Returns, in this order, whether the listener, each peer and each stranger is ready.
    fn wait(&mut self) -> io::Result<Vec<bool>> {
        let (now, mut beats_wait) = (Instant::now(), false);
        if self.accept_after.is_some_and(|at| at <= now) {
            self.accept_after = None;
        }
        let nothing = PollFd::new(&self.shared.waker, PollFlags::empty());
        let mut fds = vec![PollFd::new(&self.shared.waker, PollFlags::IN)];
        fds.push(match &self.listener {
            Some(listener) if self.accept_after.is_none() => PollFd::new(listener, PollFlags::IN),
            _ => nothing.clone(),
        });
        {
            let senders = lock(&self.shared.senders);
            for (rank, reader) in self.readers.iter().enumerate() {
                let sender = senders[rank].as_ref().filter(|sender| !sender.broken);
                let pending = sender.is_some_and(|sender| sender.wire.wants_write());
                beats_wait |= sender.is_some_and(|sender| !sender.beats.is_empty());
                fds.push(match reader {
                    Some(wire) if pending => PollFd::from_borrowed_fd(wire.as_fd(), PollFlags::IN | PollFlags::OUT),
                    Some(wire) => PollFd::from_borrowed_fd(wire.as_fd(), PollFlags::IN),
                    None => nothing.clone(),
                });
            }
        }
        fds.extend(self.strangers.poll_fds());
        if beats_wait && self.pass_on_at.is_none() {
            let heartbeat = self.membership.as_ref().map(|membership| membership.options().heartbeat);
            self.pass_on_at = heartbeat.map(|heartbeat| now + heartbeat / PASSED_ON_PER_BEAT);
        }
        let deadlines = [self.strangers.deadline(), self.accept_after, self.look_at, self.pass_on_at, self.end];
        wait(&mut fds, deadlines.into_iter().flatten().min())?;
        Ok(fds[1..].iter().map(|fd| !fd.revents().is_empty()).collect())
    }

    /// Takes over the reading ends and the membership once [`Control::attach`](super::Control::attach) has set them.
    fn adopt_mesh(&mut self) {
        if let Some(mesh) = lock(&self.shared.mesh).take() {
            self.readers = mesh.readers;
            let heartbeat = mesh.membership.options().heartbeat;
            self.membership = Some(mesh.membership);
            self.cut_off = Some(CutOff::new(mesh.directory, heartbeat));
        }
    }

    /// Takes over fallback connections.
    fn adopt_connections(&mut self) {
        let Some(membership) = &self.membership else { return };
        for (rank, stream) in self.shared.links.take_control() {
            match ends(stream, membership) {
                Ok((reader, sender)) => {
                    self.readers[rank] = Some(reader);
                    self.unheard.insert(rank);
                    self.shared.introduce(rank, sender, membership);
                    // The new neighbour is due a heartbeat at once.
                    self.look_at = Some(Instant::now());
                }
                Err(error) => {
                    // The peer connects again.
                    self.shared.links.forget_control(rank);
                    tracing::warn!(rank = self.shared.rank, peer = rank, %error, "a fallback connection broke at once");
                }
            }
        }
    }

    /// Writes bytes that the socket to `rank` had no room for.
    fn flush(&mut self, rank: usize) {
        if let Some(sender) = &mut lock(&self.shared.senders)[rank] {
            sender.flush();
        }
    }

    /// Receives a peer's messages until there are no more.
    fn read(&mut self, rank: usize) {
        let Some(membership) = &self.membership else { return };
        while let Some(wire) = &mut self.readers[rank] {
            let present = self.shared.phase.load(Ordering::Acquire) == PRESENT;
            let received = match wire.next::<Envelope<ControlMessage>>() {
                Ok(None) => return,
                // After this rank's goodbye, a failure still ends the calls that other threads are in.
                Ok(Some(envelope)) if present || matches!(envelope.message, ControlMessage::Fail { .. }) => self
                    .shared
                    .receive(rank, envelope, membership)
                    .map_err(|cause| io::Error::new(ErrorKind::InvalidData, cause)),
                Ok(Some(_)) => Ok(()),
                Err(e) => Err(e),
            };
            match received {
                Ok(()) if self.unheard.remove(&rank) => {
                    tracing::info!(rank = self.shared.rank, peer = rank, "first message on the fallback connection");
                }
                Ok(()) => {}
                Err(e) => {
                    self.readers[rank] = None;
                    // False for bytes that were changed on their way, and for a machine that does not answer.
                    let ended = !matches!(e.kind(), ErrorKind::InvalidData | ErrorKind::TimedOut);
                    if self.unheard.remove(&rank) && ended {
                        // The peer may have ended, or only given up the handshake. If it is still there, it connects
                        // again; otherwise this rank's own probes find that out.
                        lock(&self.shared.senders)[rank] = None;
                        self.shared.links.forget_control(rank);
                        membership.disconnected(rank);
                    } else if present && !membership.has_left(rank) {
                        let cause = lock(&self.shared.senders)[rank].as_ref().and_then(|sender| sender.cause.clone());
                        membership.peer_lost(rank, describe(&e, cause, membership, rank));
                    }
                }
            }
        }
    }

    /// Sends due heartbeats and checks peers for silence.
    fn tend(&mut self) {
        let Some(membership) =
            self.membership.as_ref().filter(|_| self.shared.phase.load(Ordering::Acquire) == PRESENT)
        else {
            (self.look_at, self.pass_on_at) = (None, None);
            return;
        };
        let now = Instant::now();
        // The first check was due when the world began, so that a stop of this process since then shows as a delay.
        let planned = self.look_at.or_else(|| membership.next_look(now));
        let late = planned.map_or(Duration::ZERO, |at| now.saturating_duration_since(at));
        let due = membership.due(now);
        let passes_on = self.pass_on_at.take_if(|at| *at <= now).is_some();
        if !due.is_empty() || passes_on {
            let message = &membership.heartbeat();
            for (peer, sender) in lock(&self.shared.senders).iter_mut().enumerate() {
                let Some(sender) = sender else { continue };
                let own = due.contains(&peer).then_some(message);
                if own.is_some() || passes_on {
                    sender.beat(self.shared.rank, own);
                }
            }
        }
        for (peer, silent) in membership.look(now, late) {
            self.shared.report_silence(peer, silent, membership);
        }
        if let Some(cut_off) = &mut self.cut_off {
            cut_off.connect(&self.shared, membership, now);
        }
        self.look_at = membership.next_look(now);
    }

    /// Accepts a stranger that knows the key and whose connection is expected; else refuses it.
    fn meet(&self, stranger: Introduced) {
        let LinkKey { key, tag } = &self.shared.key;
        let Some(proved) = stranger.prove(key) else {
            let same_job = stranger.tag() == *tag;
            return stranger.turn_away(same_job);
        };
        let purpose = proved.purpose;
        match self.shared.links.admit(purpose) {
            Err(cause) => stranger.refuse(proved, &cause),
            Ok(()) => {
                if let Some(stream) = stranger.welcome(proved) {
                    self.shared.links.put(purpose, stream);
                    if matches!(purpose, Purpose::Control { .. }) {
                        // Has the next turn adopt it, if the world has begun.
                        self.shared.waker.wake();
                    }
                }
            }
        }
    }

    fn accept(&mut self) {
        let Some(listener) = &self.listener else { return };
        for _ in 0..ACCEPTS_PER_TURN {
            match listener.accept().and_then(|(stream, from)| Ok((bind_and_connect::ready(stream)?, from))) {
                Ok((socket, from)) => self.strangers.receive(socket, Some(from.ip())),
                Err(e) if e.kind() == ErrorKind::WouldBlock => return,
                Err(e) => {
                    tracing::warn!("rank {} could not accept a connection: {e}", self.shared.rank);
                    self.accept_after = Some(Instant::now() + ACCEPT_PAUSE);
                    self.make_room(&e);
                    return;
                }
            }
        }
    }

    /// If descriptors are short, closes unauthenticated connections. If there are none to close, this rank fails.
    fn make_room(&mut self, e: &io::Error) {
        let Some(why) = descriptors::shortage(e, self.shared.links.world_size()) else { return };
        if self.strangers.deadline().is_some() {
            return self.strangers.clear();
        }
        match &self.membership {
            Some(membership) => membership.fail_self(why),
            None => self.shared.links.fail(why),
        }
    }

    /// Once the handle is dropped: accepts no connections, and waits a while for the peers to close; true when done.
    fn finished(&mut self) -> bool {
        if self.shared.phase.load(Ordering::Acquire) != CLOSED {
            return false;
        }
        self.listener = None;
        self.strangers.clear();
        // A rank that connected only just now also hears why this one leaves.
        self.adopt_mesh();
        self.adopt_connections();
        self.shared.links.close();
        let end = *self.end.get_or_insert_with(|| Instant::now() + LINGER);
        Instant::now() >= end || self.readers.iter().all(Option::is_none)
    }
}

/// Description of the failure of `rank`, whose control connection ended with `error`.
fn describe(error: &io::Error, cause: Option<String>, membership: &Membership, rank: usize) -> String {
    match (error.kind(), cause) {
        (ErrorKind::UnexpectedEof | ErrorKind::ConnectionReset | ErrorKind::BrokenPipe, None) => {
            let (me, peer) = (&membership.peers()[membership.rank()], &membership.peers()[rank]);
            let seen = (me.host == peer.host).then(|| cause_of_exit(peer.pid)).flatten();
            let how = seen.unwrap_or_else(|| "was killed, crashed, or exited before its work was done".to_owned());
            format!("its process ended without a goodbye: it {how}")
        }
        // A router reported that the machine is unreachable, or no answer came at all.
        (ErrorKind::TimedOut | ErrorKind::HostUnreachable | ErrorKind::NetworkUnreachable, _) => {
            let seconds = membership.options().machine_timeout().as_secs_f64();
            format!("its machine has not answered for {seconds} s: it is down, or the network between is cut")
        }
        (ErrorKind::InvalidData, _) => format!("it broke the protocol of the control connection: {error}"),
        (_, Some(cause)) => cause,
        (_, None) => format!("its control connection broke: {error}"),
    }
}

#[cfg(test)]
mod tests {
    use std::net::SocketAddr;

    use super::super::tests::{alone_with, directory, key};
    use super::super::{Control, Directory, MESSAGE_CAP};
    use super::*;
    use crate::Error;
    use crate::net::dial_rank::{Dial, Undialled};
    use crate::net::encrypted_messages::Wire;
    use crate::net::interface::Interface;
    use crate::net::peer_addresses::PeerAddress;

    const PATIENCE: Duration = Duration::from_secs(60);

    /// Two ranks on each of two machines.
    const MACHINES: [usize; 4] = [0, 0, 1, 1];
    /// Rank that only a fallback connection leads to, since ranks 1 and 2 have left.
    const LATE: usize = 3;

    /// Rank 3's connection to rank 0, which listens at `address`.
    fn connect(address: SocketAddr) -> Result<Wire, Undialled> {
        let (to, purpose) = (PeerAddress::new("127.0.0.1", address.port()), Purpose::Control { rank: LATE as u32 });
        let dial = Dial { to: &to, via: &Interface::default(), key: &key(), peer: 0, purpose };
        let deadline = Instant::now() + PATIENCE;
        dial.connect(deadline, crate::auth::handshake::by(deadline), None)
            .map(|stream| Wire::new(stream, MESSAGE_CAP).unwrap())
    }

    /// Rank 0, cut off from rank 3, with the addresses of the others in `directory`; and the address of rank 0.
    fn cut_off(directory: Directory) -> (Arc<Control>, Arc<Membership>, SocketAddr) {
        let (control, membership, address) = alone_with(&MACHINES, directory);
        [1, 2].iter().for_each(|rank| membership.receive(*rank, ControlMessage::Goodbye));
        (control, membership, address)
    }

    /// Rank 0, to which rank 3 connects after the world began, and that connection.
    fn connected_late() -> (Arc<Control>, Arc<Membership>, Wire) {
        let (control, membership, address) = cut_off(Directory::default());
        let Ok(connection) = connect(address) else { panic!("no connection") };
        (control, membership, connection)
    }

    /// Waits until rank 3 takes part no more. Returns the error that a call that waits for it returns.
    fn end(membership: &Membership) -> Error {
        let deadline = Instant::now() + PATIENCE;
        while !membership.has_left(LATE) {
            if let Err(cause) = membership.check() {
                return cause;
            }
            assert!(Instant::now() < deadline, "rank 3 takes part");
            std::thread::sleep(Duration::from_millis(1));
        }
        membership.left_error(LATE)
    }

    #[test]
    fn a_late_connection_that_ends_before_its_first_message_is_no_goodbye() {
        let closed = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        let (_control, membership, address) = cut_off(directory(closed));
        drop(connect(address));
        let error = end(&membership);
        assert!(matches!(&error, Error::PeerLost { peer, .. } if peer.rank == LATE), "{error}");
        assert_eq!(membership.check(), Ok(()), "rank 3 may have left in peace");
    }

    #[test]
    fn a_rank_that_gave_up_its_late_connection_makes_another() {
        let (_control, membership, address) = cut_off(Directory::default());
        drop(connect(address));
        let deadline = Instant::now() + PATIENCE;
        // The second connection is refused until the monitor has noticed the end of the first.
        let mut connection = loop {
            match connect(address) {
                Ok(connection) => break connection,
                Err(cause) => assert!(Instant::now() < deadline, "{cause}"),
            }
            std::thread::sleep(Duration::from_millis(1));
        };
        assert!(!membership.has_left(LATE), "it is there");
        let heartbeat = ControlMessage::Heartbeat(crate::membership::Heartbeat { idle_ms: 77, ..Default::default() });
        for message in [heartbeat, ControlMessage::Goodbye] {
            connection.send(&Envelope { origin: LATE, message }, deadline).unwrap();
        }
        assert!(matches!(end(&membership), Error::PeerLeft { .. }));
    }

    #[test]
    fn on_a_late_connection_a_message_decides_how_the_rank_ended() {
        let (_control, membership, mut connection) = connected_late();
        let goodbye = Envelope { origin: LATE, message: ControlMessage::Goodbye };
        connection.send(&goodbye, Instant::now() + PATIENCE).unwrap();
        drop(connection);
        assert!(matches!(end(&membership), Error::PeerLeft { .. }));

        let (_control, membership, mut connection) = connected_late();
        let heartbeat = Envelope { origin: LATE, message: ControlMessage::Heartbeat(Default::default()) };
        connection.send(&heartbeat, Instant::now() + PATIENCE).unwrap();
        drop(connection);
        let error = end(&membership);
        assert!(matches!(error, Error::PeerLost { .. }), "{error}");
        assert_eq!(membership.check(), Err(error), "its death ends the world");
    }
}
