//! The link to a peer: frames out of and into the caller's memory, without blocking.

use std::io::{self, ErrorKind};

use rustix::event::{PollFd, PollFlags};

use super::flows::Flows;
use crate::call::Call;
use crate::frame::{PREFIX_BYTES, Prefix};
use crate::{Error, Result};

/// Bytes read at a time while a header is expected: the header, and with it most small payloads.
const READ_AHEAD_BYTES: usize = 4096;

/// Bytes written or read before the next link has its turn: still in the cache when the other side reads them.
const CHUNK_BYTES: usize = 256 * 1024;

/// The connection to a peer, of one or several flows.
pub(super) struct Link {
    flows: Flows,
    /// Bytes read together with a header, valid from `consumed` on: of several frames if the peer is an exchange ahead.
    ahead: Vec<u8>,
    consumed: usize,
    /// True if the last read found no bytes, or the last write no room: neither is tried again before
    /// [`Link::unblock`].
    read_blocked: bool,
    write_blocked: bool,
    /// True once a read has found the end of the connection.
    read_ended: bool,
    /// True once a write has failed, since the peer no longer reads.
    write_ended: bool,
}

/// A frame on its way out.
pub(super) struct Sending<'a> {
    header: &'a [u8],
    payload: &'a [u8],
    /// Number in the exchange of the frame that this one follows on the connection.
    before: Option<usize>,
}

impl<'a> Sending<'a> {
    pub(super) fn new(header: &'a [u8], payload: &'a [u8]) -> Self {
        Self { header, payload, before: None }
    }

    /// Makes this frame follow frame `before` of the same exchange, which goes to the same peer.
    #[cfg(target_os = "linux")]
    pub(super) fn after(self, before: Option<usize>) -> Self {
        Self { before, ..self }
    }

    pub(super) fn before(&self) -> Option<usize> {
        self.before
    }

    /// Bytes that are still to be written.
    #[cfg(target_os = "linux")]
    pub(super) fn len(&self) -> usize {
        self.header.len() + self.payload.len()
    }

    pub(super) fn is_out(&self) -> bool {
        self.header.is_empty() && self.payload.is_empty()
    }
}

/// A frame on its way in.
pub(super) struct Receiving<'a> {
    peer: usize,
    /// The call that the header must fit.
    call: &'a Call,
    /// Room for the payload: all of it, or the part from `begin` on.
    room: &'a mut [u8],
    begin: usize,
    /// Length that the payload must have.
    len: usize,
    /// The weight in the header.
    weight: f64,
    /// Bytes of the payload that have arrived; `None` before the header has.
    filled: Option<usize>,
    /// Number in the exchange of the frame that this one follows on the connection.
    before: Option<usize>,
}

impl<'a> Receiving<'a> {
    /// A frame with `len` bytes from `peer`, of which `room` holds one piece at a time.
    pub(super) fn new(peer: usize, call: &'a Call, len: usize, room: &'a mut [u8]) -> Self {
        Self { peer, call, room, begin: 0, len, weight: f64::NAN, filled: None, before: None }
    }

    /// A frame from `peer` that fills `room`, received as far as `filled` says.
    #[cfg(target_os = "linux")]
    pub(super) fn resumed(peer: usize, call: &'a Call, room: &'a mut [u8], filled: Option<usize>) -> Self {
        Self { filled, ..Self::new(peer, call, room.len(), room) }
    }

    /// Makes this frame follow frame `before` of the same exchange, which comes from the same peer.
    #[cfg(target_os = "linux")]
    pub(super) fn after(self, before: Option<usize>) -> Self {
        Self { before, ..self }
    }

    pub(super) fn before(&self) -> Option<usize> {
        self.before
    }

    #[cfg(target_os = "linux")]
    pub(super) fn filled(&self) -> Option<usize> {
        self.filled
    }

    pub(super) fn peer(&self) -> usize {
        self.peer
    }

    pub(super) fn weight(&self) -> f64 {
        self.weight
    }

    pub(super) fn is_complete(&self) -> bool {
        self.filled == Some(self.len)
    }

    /// True if there is more to read, and room for it.
    pub(super) fn wants(&self) -> bool {
        self.filled.is_none_or(|filled| filled < self.len.min(self.begin + self.room.len()))
    }

    /// True if the header has come.
    pub(super) fn has_begun(&self) -> bool {
        self.filled.is_some()
    }

    /// The bytes in the room, once it is full.
    pub(super) fn piece(&self) -> &[u8] {
        &self.room[..self.filled.unwrap_or(0).saturating_sub(self.begin)]
    }

    /// Bytes of the payload before the piece.
    pub(super) fn begin(&self) -> usize {
        self.begin
    }

    /// Makes room for the next piece.
    pub(super) fn advance(&mut self) {
        self.begin = self.filled.unwrap_or(0);
    }

    /// Room for the next bytes; a chunk at most, so that other connections and the other direction get their turn.
    fn rest(&mut self, filled: usize) -> &mut [u8] {
        let end = self.room.len().min(self.len - self.begin).min(filled - self.begin + CHUNK_BYTES);
        &mut self.room[filled - self.begin..end]
    }
}

/// The end of a connection.
pub(super) enum End {
    /// The peer closed it: it closed its group or world, or its process ended.
    Closed,
    /// The connection broke.
    Broken(String),
}

impl From<io::Error> for End {
    fn from(e: io::Error) -> Self {
        match e.kind() {
            ErrorKind::ConnectionReset | ErrorKind::BrokenPipe => Self::Closed,
            _ => Self::Broken(e.to_string()),
        }
    }
}

/// The reason for which a frame cannot be read.
pub(super) enum ReadError {
    /// The connection ended before the frame did.
    Ended(End),
    /// The header is wrong.
    Wrong(Box<Error>),
}

impl From<Error> for ReadError {
    fn from(error: Error) -> Self {
        Self::Wrong(Box::new(error))
    }
}

impl Link {
    pub(super) fn new(flows: Flows) -> Self {
        // Buffer sizes are left to the kernel, which grows them further than it lets us ask for.
        Self {
            flows,
            ahead: Vec::with_capacity(READ_AHEAD_BYTES),
            consumed: 0,
            read_blocked: false,
            write_blocked: false,
            read_ended: false,
            write_ended: false,
        }
    }

    /// Sockets to poll for `interest`. A direction that has ended is left out: it is always ready and never useful.
    pub(super) fn polled(&self, mut interest: PollFlags) -> impl Iterator<Item = PollFd<'_>> {
        if self.read_ended {
            interest.remove(PollFlags::IN);
        }
        if self.write_ended {
            interest.remove(PollFlags::OUT);
        }
        let directions = match self.flows.meet() {
            true => [interest, PollFlags::empty()],
            false => [interest & PollFlags::OUT, interest & PollFlags::IN],
        };
        let sockets = [self.flows.writes_to(), self.flows.reads_from()].into_iter().zip(directions);
        sockets
            .filter(|(_, interest)| !interest.is_empty())
            .map(|(socket, interest)| PollFd::from_borrowed_fd(socket, interest))
    }

    /// Allows reads and writes again: bytes may have come, or room been made.
    pub(super) fn unblock(&mut self) {
        self.read_blocked = false;
        self.write_blocked = false;
    }

    /// Writes what the socket takes, a chunk at most; true if it took anything. The error says how the connection
    /// ended.
    pub(super) fn write(&mut self, frame: &mut Sending<'_>) -> Result<bool, End> {
        if self.write_ended || self.write_blocked || frame.is_out() {
            return Ok(false);
        }
        let chunk = &frame.payload[..frame.payload.len().min(CHUNK_BYTES)];
        match self.flows.write(frame.header, chunk) {
            Ok(n) => {
                let of_header = n.min(frame.header.len());
                frame.header = &frame.header[of_header..];
                frame.payload = &frame.payload[n - of_header..];
                Ok(true)
            }
            Err(e) if e.kind() == ErrorKind::WouldBlock => {
                self.write_blocked = true;
                Ok(false)
            }
            Err(e) => {
                self.write_ended = true;
                Err(e.into())
            }
        }
    }

    /// Reads what has arrived, a chunk of the payload at most; true if there was anything.
    pub(super) fn read(&mut self, frame: &mut Receiving<'_>) -> Result<bool, ReadError> {
        let mut moved = false;
        loop {
            let Some(filled) = frame.filled else {
                frame.filled = self.header(frame)?;
                if frame.filled.is_none() && !self.read_ahead()? {
                    return Ok(moved);
                }
                moved = true;
                continue;
            };
            if !frame.wants() {
                return Ok(moved);
            }
            let read = self.receive(|flows| flows.read(frame.rest(filled)))?;
            frame.filled = Some(filled + read.unwrap_or(0));
            return Ok(moved || read.is_some());
        }
    }

    /// Takes the header from the bytes read ahead, checks it, and copies the payload bytes behind it. Returns the
    /// number of those bytes; `None` if the header is incomplete.
    fn header(&mut self, frame: &mut Receiving<'_>) -> Result<Option<usize>, ReadError> {
        let (peer, call) = (frame.peer, frame.call);
        let Some((prefix, rest)) = self.ahead[self.consumed..].split_first_chunk::<PREFIX_BYTES>() else {
            return Ok(None);
        };
        let prefix = Prefix::decode(prefix).map_err(|message| Error::Protocol {
            peer: call.world_rank(peer),
            message,
            during: None,
        })?;
        let Some((site, rest)) = rest.split_at_checked(prefix.site_bytes()) else { return Ok(None) };
        let len = frame.len;
        if call.check_header(peer, prefix.header(), len).is_err() {
            // Only the error needs the peer's call site.
            call.check_header(peer, &prefix.clone().finish(site), len)?;
        }
        frame.weight = prefix.header().weight;

        let here = rest.len().min(len).min(frame.room.len());
        frame.room[..here].copy_from_slice(&rest[..here]);
        self.consumed = self.ahead.len() - rest.len() + here;
        Ok(Some(here))
    }

    /// Reads bytes towards a header; `false` if none are there.
    fn read_ahead(&mut self) -> Result<bool, ReadError> {
        self.ahead.drain(..self.consumed);
        self.consumed = 0;
        let mut ahead = std::mem::take(&mut self.ahead);
        let have = ahead.len();
        // A header is shorter than `READ_AHEAD_BYTES`, so there is always room left while it is incomplete.
        ahead.resize(READ_AHEAD_BYTES, 0);
        let read = self.receive(|flows| flows.read(&mut ahead[have..]));
        ahead.truncate(have + read.as_ref().ok().copied().flatten().unwrap_or(0));
        self.ahead = ahead;
        Ok(read?.is_some())
    }

    /// One read; `None` if no bytes are there.
    fn receive(&mut self, read: impl FnOnce(&mut Flows) -> io::Result<usize>) -> Result<Option<usize>, ReadError> {
        if self.read_ended || self.read_blocked {
            return Ok(None);
        }
        let cause = match read(&mut self.flows) {
            Ok(0) => End::Closed,
            Ok(n) => return Ok(Some(n)),
            Err(e) if e.kind() == ErrorKind::WouldBlock => {
                self.read_blocked = true;
                return Ok(None);
            }
            Err(e) => e.into(),
        };
        self.read_ended = true;
        Err(ReadError::Ended(cause))
    }
}
