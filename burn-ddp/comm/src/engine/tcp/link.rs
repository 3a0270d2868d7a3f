//! One data connection: frames out of and into the caller's memory, without blocking.

use std::io::{self, ErrorKind, IoSlice, Read};
use std::net::TcpStream;
use std::os::fd::{AsFd, BorrowedFd};

use rustix::event::PollFlags;
use rustix::net::{SendAncillaryBuffer, SendFlags, sendmsg};

use crate::call::Call;
use crate::engine::Incoming;
use crate::frame::{PREFIX_BYTES, Prefix};
use crate::{Error, Result};

/// How much is read at a time while a header is expected: the header, and with it most small payloads.
const READ_AHEAD_BYTES: usize = 4096;

/// A connection to a peer.
pub(super) struct Link {
    stream: TcpStream,
    /// Bytes that came with a header, from `consumed` on; more than one frame's if the peer is an exchange ahead.
    ahead: Vec<u8>,
    consumed: usize,
    /// Reading met the end.
    read_ended: bool,
    /// Writing met a peer that no longer reads.
    write_ended: bool,
}

/// A frame on its way out.
pub(super) struct Sending<'a> {
    header: &'a [u8],
    payload: &'a [u8],
}

impl<'a> Sending<'a> {
    pub(super) fn new(header: &'a [u8], payload: &'a [u8]) -> Self {
        Self { header, payload }
    }
}

/// A frame on its way in.
pub(super) struct Receiving<'a, 'b> {
    incoming: &'a mut Incoming<'b>,
    /// Bytes of the payload that are there; `None` before the header.
    filled: Option<usize>,
}

impl<'a, 'b> Receiving<'a, 'b> {
    pub(super) fn new(incoming: &'a mut Incoming<'b>) -> Self {
        Self { incoming, filled: None }
    }

    pub(super) fn peer(&self) -> usize {
        self.incoming.peer
    }
}

/// How a connection ended.
pub(super) enum End {
    /// The peer closed it: it closed its group or world, or its process ended.
    Closed,
    /// Something else did.
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

/// Why a frame cannot be read.
pub(super) enum ReadError {
    /// The connection ended before it.
    Ended(End),
    /// What came is wrong.
    Wrong(Error),
}

impl Link {
    pub(super) fn new(stream: TcpStream) -> io::Result<Self> {
        stream.set_nonblocking(true)?;
        stream.set_nodelay(true)?;
        // Buffer sizes are left to the kernel, which grows them further than it lets us ask for.
        Ok(Self {
            stream,
            ahead: Vec::with_capacity(READ_AHEAD_BYTES),
            consumed: 0,
            read_ended: false,
            write_ended: false,
        })
    }

    /// What is worth polling for: a direction that has ended is always ready and never useful.
    pub(super) fn open(&self, mut interest: PollFlags) -> Option<PollFlags> {
        if self.read_ended {
            interest.remove(PollFlags::IN);
        }
        if self.write_ended {
            interest.remove(PollFlags::OUT);
        }
        (!interest.is_empty()).then_some(interest)
    }

    /// Writes what the socket takes; `true` when the frame is out. The error is how the connection ended.
    pub(super) fn write(&mut self, frame: &mut Sending<'_>) -> Result<bool, End> {
        if self.write_ended {
            return Ok(false);
        }
        loop {
            let slices = [IoSlice::new(frame.header), IoSlice::new(frame.payload)];
            match sendmsg(&self.stream, &slices, &mut SendAncillaryBuffer::default(), SendFlags::NOSIGNAL) {
                Ok(n) => {
                    let of_header = n.min(frame.header.len());
                    frame.header = &frame.header[of_header..];
                    frame.payload = &frame.payload[n - of_header..];
                    if frame.header.is_empty() && frame.payload.is_empty() {
                        return Ok(true);
                    }
                }
                Err(rustix::io::Errno::INTR) => {}
                Err(rustix::io::Errno::AGAIN) => return Ok(false),
                Err(e) => {
                    self.write_ended = true;
                    return Err(io::Error::from(e).into());
                }
            }
        }
    }

    /// Reads what is there; `true` when the frame is complete.
    pub(super) fn read(&mut self, frame: &mut Receiving<'_, '_>, call: &Call) -> Result<bool, ReadError> {
        loop {
            let filled = match frame.filled {
                Some(filled) => filled,
                None => match self.header(frame, call)? {
                    Some(filled) => filled,
                    None if self.read_ahead()? => continue,
                    None => return Ok(false),
                },
            };
            frame.filled = Some(filled);
            if filled == frame.incoming.payload.len() {
                return Ok(true);
            }
            match self.receive(|mut stream| stream.read(&mut frame.incoming.payload[filled..]))? {
                Some(n) => frame.filled = Some(filled + n),
                None => return Ok(false),
            }
        }
    }

    /// Takes the header out of what was read ahead, checks it, and takes what is there of the payload; how much that is. `None` if the
    /// header is incomplete.
    fn header(&mut self, frame: &mut Receiving<'_, '_>, call: &Call) -> Result<Option<usize>, ReadError> {
        let peer = frame.incoming.peer;
        let Some((prefix, rest)) = self.ahead[self.consumed..].split_first_chunk::<PREFIX_BYTES>() else {
            return Ok(None);
        };
        let prefix = Prefix::decode(prefix)
            .map_err(|message| ReadError::Wrong(Error::Protocol { peer, message, during: None }))?;
        let Some((site, rest)) = rest.split_at_checked(prefix.site_bytes()) else { return Ok(None) };
        let len = frame.incoming.payload.len();
        if call.check_header(peer, prefix.header(), len).is_err() {
            // Only now does it matter where the peer called.
            call.check_header(peer, &prefix.clone().finish(site), len).map_err(ReadError::Wrong)?;
        }
        frame.incoming.weight = prefix.header().weight;

        let here = rest.len().min(frame.incoming.payload.len());
        frame.incoming.payload[..here].copy_from_slice(&rest[..here]);
        self.consumed = self.ahead.len() - rest.len() + here;
        Ok(Some(here))
    }

    /// Reads towards a header; `false` if nothing is there.
    fn read_ahead(&mut self) -> Result<bool, ReadError> {
        self.ahead.drain(..self.consumed);
        self.consumed = 0;
        let mut ahead = std::mem::take(&mut self.ahead);
        let have = ahead.len();
        // A header is shorter than the room there is, so there always is some left while one is incomplete.
        ahead.resize(READ_AHEAD_BYTES, 0);
        let read = self.receive(|mut stream| stream.read(&mut ahead[have..]));
        ahead.truncate(have + read.as_ref().ok().copied().flatten().unwrap_or(0));
        self.ahead = ahead;
        Ok(read?.is_some())
    }

    /// One read; `None` if nothing is there.
    fn receive(&mut self, mut read: impl FnMut(&TcpStream) -> io::Result<usize>) -> Result<Option<usize>, ReadError> {
        if self.read_ended {
            return Ok(None);
        }
        let cause = loop {
            match read(&self.stream) {
                Ok(0) => break End::Closed,
                Ok(n) => return Ok(Some(n)),
                Err(e) if e.kind() == ErrorKind::Interrupted => {}
                Err(e) if e.kind() == ErrorKind::WouldBlock => return Ok(None),
                Err(e) => break e.into(),
            }
        };
        self.read_ended = true;
        Err(ReadError::Ended(cause))
    }
}

impl AsFd for Link {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.stream.as_fd()
    }
}
