//! Length-prefixed postcard messages over a non-blocking socket.
//!
//! A message is a little-endian `u32` length and that many bytes. The length is compared with the connection's cap
//! before anything is allocated, memory grows only with bytes that arrived, and nothing is read beyond the message
//! asked for.

use std::io::{self, ErrorKind, Read, Write};
use std::os::fd::{AsFd, BorrowedFd};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags};
use serde::Serialize;
use serde::de::DeserializeOwned;
use socket2::Socket;

use super::wait::wait;

/// Deadline for the rest of a message after its first byte, and for a peer to read an answer.
pub(crate) const MESSAGE_DEADLINE: Duration = Duration::from_secs(10);

const PREFIX: usize = 4;
/// Most bytes of one read, so that a claimed length costs the sender bytes before it costs us memory.
const READ_STEP: usize = 64 * 1024;

/// One connection that carries messages.
#[derive(Debug)]
pub(crate) struct Wire {
    socket: Socket,
    /// Longest body accepted, in bytes.
    cap: usize,
    /// The incomplete incoming message, prefix included.
    incoming: Vec<u8>,
    /// Time at which the first byte of `incoming` arrived.
    incoming_since: Option<Instant>,
    /// Bytes that the socket did not take yet.
    outgoing: Vec<u8>,
    /// Time at which `outgoing` began to wait.
    outgoing_since: Option<Instant>,
}

impl Wire {
    /// Takes over a connected socket; messages longer than `cap` bytes are refused.
    pub(crate) fn new(socket: impl Into<Socket>, cap: usize) -> io::Result<Self> {
        let socket = socket.into();
        socket.set_nonblocking(true)?;
        Ok(Self { socket, cap, incoming: Vec::new(), incoming_since: None, outgoing: Vec::new(), outgoing_since: None })
    }

    pub(crate) fn stream(&self) -> &Socket {
        &self.socket
    }

    /// Queues a message; [`flush`](Self::flush) sends.
    pub(crate) fn queue(&mut self, message: &impl Serialize) -> io::Result<()> {
        let body = postcard::to_stdvec(message).map_err(invalid)?;
        let len = u32::try_from(body.len()).map_err(invalid)?;
        if self.outgoing.is_empty() {
            self.outgoing_since = Some(Instant::now());
        }
        self.outgoing.extend_from_slice(&len.to_le_bytes());
        self.outgoing.extend_from_slice(&body);
        Ok(())
    }

    /// Sends what the socket takes now; `true` when nothing is left. Never blocks.
    pub(crate) fn flush(&mut self) -> io::Result<bool> {
        let mut sent = 0;
        let result = loop {
            if sent == self.outgoing.len() {
                break Ok(true);
            }
            match (&self.socket).write(&self.outgoing[sent..]) {
                Ok(n) => sent += n,
                Err(e) if e.kind() == ErrorKind::Interrupted => {}
                Err(e) if e.kind() == ErrorKind::WouldBlock => break Ok(false),
                Err(e) => break Err(e),
            }
        };
        self.outgoing.drain(..sent);
        if self.outgoing.is_empty() {
            self.outgoing_since = None;
        }
        result
    }

    pub(crate) fn wants_write(&self) -> bool {
        !self.outgoing.is_empty()
    }

    pub(crate) fn unsent_bytes(&self) -> usize {
        self.outgoing.len()
    }

    /// The next whole message, if its bytes are there. Never blocks. The end of the stream is `UnexpectedEof`; a length
    /// over the cap or bytes that are no `T` are `InvalidData`.
    pub(crate) fn next<T: DeserializeOwned>(&mut self) -> io::Result<Option<T>> {
        if !self.read_message()? {
            return Ok(None);
        }
        let (message, rest) = postcard::take_from_bytes(&self.incoming[PREFIX..]).map_err(invalid)?;
        if !rest.is_empty() {
            return Err(invalid("bytes after the end of the message"));
        }
        self.incoming.clear();
        self.incoming.shrink_to(READ_STEP);
        self.incoming_since = None;
        Ok(Some(message))
    }

    /// Reads on; true if `incoming` holds a whole message.
    fn read_message(&mut self) -> io::Result<bool> {
        loop {
            let have = self.incoming.len();
            let need = match self.incoming.first_chunk::<PREFIX>() {
                None => PREFIX,
                Some(prefix) => {
                    let len = u32::from_le_bytes(*prefix) as usize;
                    if len > self.cap {
                        return Err(invalid(format!("a message of {len} bytes; at most {} are accepted", self.cap)));
                    }
                    PREFIX + len
                }
            };
            if have >= PREFIX && have == need {
                return Ok(true);
            }
            self.incoming.resize(have + (need - have).min(READ_STEP), 0);
            let read = (&self.socket).read(&mut self.incoming[have..]);
            self.incoming.truncate(have + *read.as_ref().unwrap_or(&0));
            match read {
                Ok(0) => return Err(ErrorKind::UnexpectedEof.into()),
                Ok(_) if self.incoming_since.is_none() => self.incoming_since = Some(Instant::now()),
                Ok(_) => {}
                Err(e) if e.kind() == ErrorKind::Interrupted => {}
                Err(e) if e.kind() == ErrorKind::WouldBlock => return Ok(false),
                Err(e) => return Err(e),
            }
        }
    }

    /// Time at which this connection is given up because the peer neither finishes its message nor reads ours.
    pub(crate) fn stalled_at(&self) -> Option<Instant> {
        let since = match (self.incoming_since, self.outgoing_since) {
            (Some(a), Some(b)) => a.min(b),
            (a, b) => a.or(b)?,
        };
        Some(since + MESSAGE_DEADLINE)
    }

    /// Sends a message and waits until the socket has taken it.
    pub(crate) fn send(&mut self, message: &impl Serialize, deadline: Instant) -> io::Result<()> {
        self.queue(message)?;
        while !self.flush()? {
            self.wait(PollFlags::OUT, deadline)?;
        }
        Ok(())
    }

    /// Waits for the next message.
    pub(crate) fn recv<T: DeserializeOwned>(&mut self, deadline: Instant) -> io::Result<T> {
        loop {
            if let Some(message) = self.next()? {
                return Ok(message);
            }
            self.wait(PollFlags::IN, deadline)?;
        }
    }

    fn wait(&self, flags: PollFlags, deadline: Instant) -> io::Result<()> {
        match wait(&mut [PollFd::new(&self.socket, flags)], Some(deadline))? {
            true => Ok(()),
            false => Err(ErrorKind::TimedOut.into()),
        }
    }
}

impl AsFd for Wire {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

fn invalid(cause: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> io::Error {
    io::Error::new(ErrorKind::InvalidData, cause)
}

#[cfg(test)]
mod tests {
    use std::net::{TcpListener, TcpStream};

    use super::*;

    fn pair(cap: usize) -> (Wire, Wire) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let a = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let b = listener.accept().unwrap().0;
        (Wire::new(a, cap).unwrap(), Wire::new(b, cap).unwrap())
    }

    fn soon() -> Instant {
        Instant::now() + Duration::from_secs(10)
    }

    #[test]
    fn messages_arrive_whole_and_in_order() {
        let (mut a, mut b) = pair(1 << 20);
        let big = vec![7_u8; 500_000];
        std::thread::scope(|s| {
            s.spawn(|| {
                a.send(&"first", soon()).unwrap();
                a.send(&big, soon()).unwrap();
            });
            assert_eq!(b.recv::<String>(soon()).unwrap(), "first");
            assert_eq!(b.recv::<Vec<u8>>(soon()).unwrap(), big);
        });
        assert_eq!(b.next::<String>().unwrap(), None, "nothing is there, and nothing is waited for");
    }

    #[test]
    fn a_length_over_the_cap_is_refused_before_its_bytes_come() {
        let (a, mut b) = pair(16);
        (&a.socket).write_all(&u32::MAX.to_le_bytes()).unwrap();
        let error = b.recv::<String>(soon()).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidData);
        assert!(error.to_string().contains("4294967295 bytes"), "{error}");
    }

    #[test]
    fn bytes_after_a_message_belong_to_the_next_reader() {
        let (mut a, mut b) = pair(64);
        a.queue(&1_u8).unwrap();
        a.flush().unwrap();
        (&a.socket).write_all(b"raw").unwrap();
        assert_eq!(b.recv::<u8>(soon()).unwrap(), 1);
        let mut raw = [0; 3];
        b.socket.set_nonblocking(false).unwrap();
        b.socket.read_exact(&mut raw).unwrap();
        assert_eq!(&raw, b"raw");
    }

    #[test]
    fn trailing_bytes_in_a_message_are_refused() {
        let (mut a, mut b) = pair(64);
        a.send(&(1_u8, 2_u8), soon()).unwrap();
        assert_eq!(b.recv::<u8>(soon()).unwrap_err().kind(), ErrorKind::InvalidData);
    }

    #[test]
    fn a_half_message_stalls_the_connection_and_only_from_its_first_byte() {
        let (a, mut b) = pair(64);
        assert_eq!(b.stalled_at(), None);
        (&a.socket).write_all(&[9]).unwrap();
        let short = Instant::now() + Duration::from_millis(20);
        assert_eq!(b.recv::<u8>(short).unwrap_err().kind(), ErrorKind::TimedOut);
        assert!(b.stalled_at().is_some());
    }

    #[test]
    fn the_end_of_the_stream_is_told_apart() {
        let (a, mut b) = pair(64);
        drop(a);
        assert_eq!(b.recv::<u8>(soon()).unwrap_err().kind(), ErrorKind::UnexpectedEof);
    }
}
