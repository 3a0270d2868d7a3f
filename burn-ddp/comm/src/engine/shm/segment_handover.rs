//! One rank creates a segment and hands it to the others in turn; each maps it and makes its part present. In the end
//! all have it, or none has and all know why.
//!
//! ```text
//! member                         leader (rank 0 of the group)
//! connects ─ Hello ───────────►  is it a process of this user, does it know the key?
//!          ◄───────── Came ────  ranks still missing; again whenever one has come
//!          ◄──── Offer + fd ───  all are there, and it is this member's turn; or Verdict(why not)
//! maps it ── Mapped(how) ─────►
//!          ◄────── Verdict ────  all have mapped it, or the first reason why one has not
//! ```
//!
//! Members take turns, since what a control group has to spare is known only when the member before has taken its part.
//!
//! The sockets are abstract unix sockets, under names derived from the key of the world's connections. They keep
//! message boundaries, and are closed when the verdict has come.

use std::io::{self, ErrorKind, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::ops::Range;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags};
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags,
};
use serde::{Deserialize, Serialize};
use socket2::Socket;

use super::layout::Layout;
use super::segment::Segment;
use crate::auth::hmac_key::{KEY_BYTES, random};
use crate::auth::job_key::LinkKey;
use crate::call::Call;
use crate::engine::Unavailable;
use crate::membership::{Membership, Watch};
use crate::net::wait::{Waker, wait};
use crate::net::{descriptors, unix_socket};
use crate::{Error, Result};

/// Time after the end of a connection within which the control connections may still report why.
const GRACE: Duration = Duration::from_secs(1);
/// Time between two looks at states that do not announce changes: a leader that does not listen yet, a peer's goodbye.
const RETRY: Duration = Duration::from_millis(1);
/// Longest note: reasons are cut to fit.
const NOTE_BYTES: usize = 2048;
/// Text that a member signs, with its rank.
const HELLO: &[u8] = b"shm hello";

/// A message between leader and member.
#[derive(Clone, Debug, Serialize, Deserialize)]
enum Note {
    /// Group rank of the member that connects, and the proof that it belongs to the group.
    Hello { rank: u32, proof: [u8; KEY_BYTES] },
    /// Group ranks that have not come yet.
    Came { missing: Vec<u32> },
    /// The segment, of `len` bytes; its descriptor travels along.
    Offer { len: u64 },
    /// The sender has mapped the segment, or why it could not.
    Mapped(Result<(), String>),
    /// All have mapped the segment, or why one could not.
    Verdict(Result<(), String>),
}

/// One segment that is being handed over.
pub(super) struct Handover<'a> {
    pub(super) call: &'a Call,
    pub(super) membership: &'a Membership,
    pub(super) key: &'a LinkKey,
    /// This rank in the group.
    pub(super) rank: usize,
    /// Number of the segment in its group.
    pub(super) number: u64,
}

/// Hands a segment from this process to itself.
///
/// # Errors
/// If a step fails: a container or a security module may forbid it.
pub(crate) fn try_handover() -> io::Result<()> {
    let name: String = random()?.iter().map(|byte| format!("{byte:02x}")).collect();
    let listener = unix_socket::bind_packets(&name)?;
    let member = unix_socket::connect_packets(&name)?;
    let leader = listener.accept()?.0;
    unix_socket::check_peer(&leader)?;
    let (len, parts) = (Layout::new(1).len(), Layout::new(1).parts(0));
    let (segment, fd) = Segment::create(len)?;
    segment.populate(fd.as_fd(), &parts)?;
    write(&leader, &Note::Offer { len: len as u64 }, Some(&fd))?;
    let offered = read(&member)?.1.ok_or_else(|| io::Error::other("the segment's file descriptor did not arrive"))?;
    Segment::map(offered.as_fd(), len).map(drop)
}

/// The waits of a handover.
struct Waits<'a> {
    handover: &'a Handover<'a>,
    /// Woken when the membership changes.
    waker: Arc<Waker>,
    watch: Watch<'a>,
}

impl Handover<'_> {
    /// A segment of `len` bytes that all ranks of the group have mapped, or on all of them the reason why there is
    /// none. `parts` are the ranges that this rank makes present; the parts of all ranks cover the segment.
    ///
    /// # Errors
    /// Those of a collective.
    pub(super) fn share(&self, len: usize, parts: &[Range<usize>]) -> Result<Result<Segment, Unavailable>> {
        if self.size() == 1 {
            return Ok(self.create(len, parts).map(|(segment, _)| segment));
        }
        let waker = self.membership.new_waker()?;
        let mut waits = Waits { handover: self, waker, watch: Watch::new(self.membership, self.call) };
        if self.rank == 0 { self.lead(&mut waits, len, parts) } else { self.follow(&mut waits, len, parts) }
    }

    fn size(&self) -> usize {
        self.call.members.count()
    }

    fn others(&self) -> Vec<usize> {
        (0..self.size()).filter(|rank| *rank != self.rank).collect()
    }

    /// A new segment in which the leader's parts are present.
    fn create(&self, len: usize, parts: &[Range<usize>]) -> Result<(Segment, OwnedFd), Unavailable> {
        let made = Segment::create(len).and_then(|(segment, fd)| {
            segment.populate(fd.as_fd(), parts)?;
            Ok((segment, fd))
        });
        made.map_err(|e| self.not_created(len, &e))
    }

    fn lead(&self, waits: &mut Waits<'_>, len: usize, parts: &[Range<usize>]) -> Result<Result<Segment, Unavailable>> {
        let listener = unix_socket::bind_packets(&self.name()).map_err(|e| Error::Environment {
            message: format!("cannot listen on a local socket to share memory with the other ranks: {e}"),
        })?;
        let links = self.gather(waits, &listener)?;
        drop(listener);
        let mut made = self.create(len, parts);
        for (rank, link) in &links {
            let Ok((_, fd)) = &made else { break };
            self.send(waits, *rank, link, &Note::Offer { len: len as u64 }, Some(fd))?;
            match self.receive(waits, &[*rank], link)? {
                (Note::Mapped(Ok(())), _) => {}
                (Note::Mapped(Err(why)), _) => made = Err(Unavailable::OnPeer(why)),
                (other, _) => return Err(self.unexpected(*rank, &other)),
            }
        }
        let told = Note::Verdict(made.as_ref().map(drop).map_err(Unavailable::to_string));
        for (rank, link) in &links {
            self.send(waits, *rank, link, &told, None)?;
        }
        Ok(made.map(|(segment, _)| segment))
    }

    /// Waits until every member has connected and proved its rank; returns the connections, by rank.
    fn gather(&self, waits: &mut Waits<'_>, listener: &Socket) -> Result<Vec<(usize, Socket)>> {
        let mut missing: Vec<usize> = (1..self.size()).collect();
        // Connections that have not proved a rank yet.
        let mut strangers: Vec<Socket> = Vec::new();
        let mut links: Vec<(usize, Socket)> = Vec::new();
        while !missing.is_empty() {
            let mut fds = vec![PollFd::new(listener, PollFlags::IN)];
            fds.extend(strangers.iter().map(|stranger| PollFd::new(stranger, PollFlags::IN)));
            waits.wait(fds, &missing, None)?;
            loop {
                let socket = match listener.accept() {
                    Ok((socket, _)) => socket,
                    Err(e) => match descriptors::shortage(&e, self.membership.peers().len()) {
                        Some(why) => return Err(self.membership.own_error(why)),
                        None => break,
                    },
                };
                if unix_socket::check_peer(&socket).is_ok() && socket.set_nonblocking(true).is_ok() {
                    strangers.push(socket);
                }
            }
            let before = missing.len();
            let mut nth = 0;
            while let Some(stranger) = strangers.get(nth) {
                match read(stranger) {
                    Err(e) if e.kind() == ErrorKind::WouldBlock => nth += 1,
                    Ok((Note::Hello { rank, proof }, _)) if self.admits(&mut missing, rank, &proof) => {
                        links.push((rank as usize, strangers.swap_remove(nth)));
                    }
                    // Not a member of this group.
                    _ => drop(strangers.swap_remove(nth)),
                }
            }
            if missing.len() < before && !missing.is_empty() {
                let note = Note::Came { missing: missing.iter().map(|rank| *rank as u32).collect() };
                for (rank, link) in &links {
                    self.send(waits, *rank, link, &note, None)?;
                }
            }
        }
        links.sort_by_key(|(rank, _)| *rank);
        Ok(links)
    }

    fn admits(&self, missing: &mut Vec<usize>, rank: u32, proof: &[u8; KEY_BYTES]) -> bool {
        let known = missing.iter().position(|awaited| *awaited == rank as usize);
        match known.filter(|_| self.key.key.verify(&[HELLO, &rank.to_le_bytes()], proof)) {
            Some(nth) => {
                missing.swap_remove(nth);
                missing.sort_unstable();
                true
            }
            None => false,
        }
    }

    fn follow(
        &self,
        waits: &mut Waits<'_>,
        len: usize,
        parts: &[Range<usize>],
    ) -> Result<Result<Segment, Unavailable>> {
        let link = self.connect(waits)?;
        let rank = self.rank as u32;
        let proof = self.key.key.sign(&[HELLO, &rank.to_le_bytes()]);
        self.send(waits, 0, &link, &Note::Hello { rank, proof }, None)?;
        // The leader says which ranks are missing as soon as it knows; until then any rank may be.
        let mut missing = self.others();
        let (theirs, fd) = loop {
            match self.receive(waits, &missing, &link)? {
                (Note::Came { missing: still }, _) => {
                    missing = still.into_iter().map(|rank| rank as usize).collect();
                    if missing.is_empty() || missing.iter().any(|rank| *rank >= self.size()) {
                        missing = vec![0];
                    }
                }
                (Note::Offer { len }, Some(fd)) => break (len, fd),
                (Note::Verdict(Err(why)), _) => return Ok(Err(Unavailable::OnPeer(why))),
                (other, _) => return Err(self.unexpected(0, &other)),
            }
        };
        let mapped = if theirs == len as u64 {
            let filled = Segment::map(fd.as_fd(), len).and_then(|segment| {
                segment.populate(fd.as_fd(), parts)?;
                Ok(segment)
            });
            filled.map_err(|e| self.not_mapped(len, &e))
        } else {
            Err(Unavailable::SizesDiffer { rank: self.call.rank, own: len as u64, offered: theirs })
        };
        let told = Note::Mapped(mapped.as_ref().map(drop).map_err(Unavailable::to_string));
        self.send(waits, 0, &link, &told, None)?;
        match self.receive(waits, &[0], &link)? {
            (Note::Verdict(Ok(())), _) => Ok(mapped),
            (Note::Verdict(Err(why)), _) => Ok(Err(Unavailable::OnPeer(why))),
            (other, _) => Err(self.unexpected(0, &other)),
        }
    }

    /// A connection to the leader, once it listens.
    fn connect(&self, waits: &mut Waits<'_>) -> Result<Socket> {
        let name = self.name();
        loop {
            match unix_socket::connect_packets(&name) {
                Ok(socket) => return Ok(socket),
                Err(e) if matches!(e.kind(), ErrorKind::ConnectionRefused | ErrorKind::WouldBlock) => {
                    // Not known yet: the ranks for which the leader, and so this rank, waits.
                    waits.wait(Vec::new(), &self.others(), Some(Instant::now() + RETRY))?;
                }
                Err(e) => {
                    let message = format!("cannot reach rank {} by a local socket: {e}", self.call.world_rank(0));
                    return Err(Error::Environment { message });
                }
            }
        }
    }

    fn send(&self, waits: &mut Waits<'_>, rank: usize, to: &Socket, note: &Note, fd: Option<&OwnedFd>) -> Result<()> {
        match write(to, note, fd) {
            Ok(()) => Ok(()),
            Err(e) => Err(waits.explain(rank, &[rank], &e)),
        }
    }

    /// Waits for the next note on `link`; reports and errors name the ranks `missing`.
    fn receive(&self, waits: &mut Waits<'_>, missing: &[usize], link: &Socket) -> Result<(Note, Option<OwnedFd>)> {
        loop {
            match read(link) {
                Ok(note) => return Ok(note),
                Err(e) if e.kind() == ErrorKind::WouldBlock => {
                    waits.wait(vec![PollFd::new(link, PollFlags::IN)], missing, None)?;
                }
                Err(e) => {
                    let from = if self.rank == 0 { missing[0] } else { 0 };
                    return Err(waits.explain(from, missing, &e));
                }
            }
        }
    }

    /// The leader's address, which only ranks with the key can derive.
    fn name(&self) -> String {
        let (group, number) = (self.call.info.group.to_le_bytes(), self.number.to_le_bytes());
        // A group has a segment on each of its machines, and tests have several machines on one host.
        let leader = (self.call.world_rank(0) as u64).to_le_bytes();
        let key = self.key.key.derive(&[b"shm address", &group, &number, &leader]);
        key.bytes().iter().map(|byte| format!("{byte:02x}")).collect()
    }

    fn not_created(&self, len_bytes: usize, e: &io::Error) -> Unavailable {
        Unavailable::NotCreated { rank: self.call.rank, len_bytes, cause: e.to_string() }
    }

    fn not_mapped(&self, len_bytes: usize, e: &io::Error) -> Unavailable {
        Unavailable::NotMapped { rank: self.call.rank, len_bytes, cause: e.to_string() }
    }

    fn unexpected(&self, rank: usize, note: &Note) -> Error {
        let message = format!("{note:?} during the handover of shared memory");
        Error::Protocol { peer: self.call.world_rank(rank), message, during: None }
    }
}

impl Waits<'_> {
    /// Waits until one of `fds` is ready or `until` has passed. Ends by an error if the ranks `missing` cannot be
    /// waited for any longer.
    fn wait(&mut self, fds: Vec<PollFd<'_>>, missing: &[usize], until: Option<Instant>) -> Result<()> {
        let Handover { call, membership, .. } = self.handover;
        let waker = self.waker.clone();
        let mut fds: Vec<PollFd<'_>> = fds;
        fds.push(PollFd::new(&*waker, PollFlags::IN));
        loop {
            waker.clear();
            let limit = self.watch.look(missing)?;
            if let Some(gone) =
                missing.iter().map(|rank| call.world_rank(*rank)).find(|rank| membership.has_left(*rank))
            {
                return Err(membership.left_error(gone));
            }
            let limit = until.map_or(limit, |until| until.min(limit));
            wait(&mut fds, Some(limit)).map_err(|e| Error::Internal { message: format!("poll: {e}") })?;
            let ready = fds[..fds.len() - 1].iter().any(|fd| !fd.revents().is_empty());
            if ready || until.is_some_and(|until| Instant::now() >= until) {
                return Ok(());
            }
        }
    }

    /// The error for a connection to `rank` that ended: the control connections know the cause, or will in a moment. If
    /// they do not, `rank` may have given up waiting for the ranks `missing`, for which this rank waits as well.
    fn explain(&mut self, rank: usize, missing: &[usize], end: &io::Error) -> Error {
        let Handover { call, membership, .. } = self.handover;
        let peer = call.world_rank(rank);
        let grace = Instant::now() + GRACE;
        while Instant::now() < grace {
            if membership.has_left(peer) {
                return membership.left_error(peer);
            }
            if let Err(cause) = self.wait(Vec::new(), missing, Some(Instant::now() + RETRY)) {
                return cause;
            }
        }
        membership.lost_error(peer, format!("its local connection broke during the handover of shared memory: {end}"))
    }
}

fn write(to: &Socket, note: &Note, fd: Option<&OwnedFd>) -> io::Result<()> {
    let bytes = postcard::to_stdvec(&shortened(note)).map_err(io::Error::other)?;
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut ancillary = SendAncillaryBuffer::new(&mut space);
    let fds: Vec<_> = fd.map(AsFd::as_fd).into_iter().collect();
    if !fds.is_empty() && !ancillary.push(SendAncillaryMessage::ScmRights(&fds)) {
        return Err(io::Error::other("no room for a file descriptor"));
    }
    loop {
        match rustix::net::sendmsg(to, &[IoSlice::new(&bytes)], &mut ancillary, SendFlags::NOSIGNAL) {
            Ok(_) => return Ok(()),
            Err(rustix::io::Errno::INTR) => {}
            Err(e) => return Err(e.into()),
        }
    }
}

/// The note with its reason cut to what a socket takes at once: only people read reasons.
fn shortened(note: &Note) -> std::borrow::Cow<'_, Note> {
    use std::borrow::Cow;
    const MOST: usize = NOTE_BYTES / 4;
    let short = |why: &String| why.chars().take(MOST / 4).collect::<String>();
    match note {
        Note::Mapped(Err(why)) if why.len() > MOST => Cow::Owned(Note::Mapped(Err(short(why)))),
        Note::Verdict(Err(why)) if why.len() > MOST => Cow::Owned(Note::Verdict(Err(short(why)))),
        other => Cow::Borrowed(other),
    }
}

/// The next note, if there is one; the end of the connection is an error.
fn read(from: &Socket) -> io::Result<(Note, Option<OwnedFd>)> {
    let mut bytes = [0; NOTE_BYTES];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut ancillary = RecvAncillaryBuffer::new(&mut space);
    let flags = RecvFlags::CMSG_CLOEXEC | RecvFlags::DONTWAIT;
    // Linux finds the queue empty first, and then looks whether the peer has closed. It overlooks a note that comes in
    // between, just before the close. A second call finds that note.
    let mut ended = false;
    let got = loop {
        match rustix::net::recvmsg(from, &mut [IoSliceMut::new(&mut bytes)], &mut ancillary, flags) {
            Err(rustix::io::Errno::INTR) => {}
            Ok(got) if got.bytes == 0 && !ended => ended = true,
            other => break other?,
        }
    };
    let mut fds = ancillary.drain().filter_map(|message| match message {
        RecvAncillaryMessage::ScmRights(fds) => Some(fds),
        _ => None,
    });
    let fd = fds.next().and_then(|mut fds| fds.next());
    if got.bytes == 0 {
        return Err(ErrorKind::UnexpectedEof.into());
    }
    let note = postcard::from_bytes(&bytes[..got.bytes]).map_err(io::Error::other)?;
    Ok((note, fd))
}
