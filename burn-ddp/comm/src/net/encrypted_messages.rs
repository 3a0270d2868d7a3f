//! Encrypted postcard messages over a non-blocking socket.
//!
//! A message travels in records: a little-endian `u16` length and that many bytes, sealed under the keys of the
//! connection and the record's number. The first byte of its content says whether it is the last record of its message,
//! the rest are bytes of the message. A record that was changed, left out, repeated or moved on its way ends the
//! connection by an error, before anything in it is parsed. A message longer than the connection's cap is refused
//! before its bytes come, memory grows only with bytes that arrived, and nothing is read beyond the message asked for.
//!
//! The end of a connection proves nothing, since any machine on the path can cause it. So ranks leave by a message.

use std::io::{self, ErrorKind, Read, Write};
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::time::Instant;

use rustix::event::{PollFd, PollFlags};
use serde::Serialize;
use serde::de::DeserializeOwned;
use socket2::Socket;

use super::wait::wait;
use crate::auth::secure_stream::{RECORD_CAP, SEAL_BYTES, SecureStream, SessionKeys};

/// Bytes of a record's length.
const LENGTH: usize = 2;
/// First byte of a record's content: more records of its message follow, or it is the last.
const MORE: u8 = 0;
const LAST: u8 = 1;
/// Most bytes of a message in a record.
const PART_CAP: usize = RECORD_CAP - SEAL_BYTES - 1;

/// One connection that carries messages.
#[derive(Debug)]
pub(crate) struct Wire {
    reader: WireReader,
    writer: WireWriter,
}

/// The receiving end of a connection.
#[derive(Debug)]
pub(crate) struct WireReader {
    socket: Arc<Socket>,
    keys: SessionKeys,
    /// Longest message accepted, in bytes.
    cap: usize,
    /// Number of the next record.
    number: u64,
    /// Bytes of the record that is being read, its length included.
    record: Vec<u8>,
    /// Content of the latest record.
    opened: Vec<u8>,
    /// Bytes of the message that is being read.
    message: Vec<u8>,
    /// Time at which the latest bytes of an incomplete message arrived.
    since: Option<Instant>,
}

/// The sending end of a connection.
#[derive(Debug)]
pub(crate) struct WireWriter {
    socket: Arc<Socket>,
    keys: SessionKeys,
    /// Number of the next record.
    number: u64,
    /// Sealed bytes that the socket has not taken yet.
    unsent: Vec<u8>,
    /// Time at which the socket last took some of them, or at which they began to wait; `None` if there are none.
    since: Option<Instant>,
}

impl Wire {
    /// Takes over a connection; messages longer than `cap` bytes are refused.
    pub(crate) fn new(stream: SecureStream, cap: usize) -> io::Result<Self> {
        let (socket, keys) = stream.into_parts();
        socket.set_nonblocking(true)?;
        let socket = Arc::new(socket);
        let (record, opened, message) = (Vec::new(), Vec::new(), Vec::new());
        let reader = WireReader {
            socket: socket.clone(),
            keys: keys.clone(),
            cap,
            number: 0,
            record,
            opened,
            message,
            since: None,
        };
        let writer = WireWriter { socket, keys, number: 0, unsent: Vec::new(), since: None };
        Ok(Self { reader, writer })
    }

    /// The receiving and the sending end, for two threads. They share the socket.
    pub(crate) fn split(self) -> (WireReader, WireWriter) {
        (self.reader, self.writer)
    }

    pub(crate) fn socket(&self) -> &Socket {
        &self.reader.socket
    }

    /// See [`WireWriter::queue`].
    pub(crate) fn queue(&mut self, message: &impl Serialize) -> io::Result<()> {
        self.writer.queue(message)
    }

    /// See [`WireWriter::flush`].
    pub(crate) fn flush(&mut self) -> io::Result<bool> {
        self.writer.flush()
    }

    pub(crate) fn wants_write(&self) -> bool {
        self.writer.wants_write()
    }

    /// See [`WireReader::next`].
    pub(crate) fn next<T: DeserializeOwned>(&mut self) -> io::Result<Option<T>> {
        self.reader.next()
    }

    /// Time since which the peer has sent no more of a message that it began, or read no more of one that waits for it;
    /// `None` if there is no such message. A peer on a slow link makes progress all the time and is not stalled.
    pub(crate) fn stalled_since(&self) -> Option<Instant> {
        match (self.reader.since, self.writer.since) {
            (Some(a), Some(b)) => Some(a.min(b)),
            (a, b) => a.or(b),
        }
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
        match wait(&mut [PollFd::new(self.socket(), flags)], Some(deadline))? {
            true => Ok(()),
            false => Err(ErrorKind::TimedOut.into()),
        }
    }
}

impl WireWriter {
    pub(crate) fn socket(&self) -> &Socket {
        &self.socket
    }

    /// Queues a message; [`flush`](Self::flush) sends.
    pub(crate) fn queue(&mut self, message: &impl Serialize) -> io::Result<()> {
        let body = postcard::to_stdvec(message).map_err(invalid)?;
        if self.unsent.is_empty() {
            self.since = Some(Instant::now());
        }
        let mut rest = &body[..];
        loop {
            let (part, behind) = rest.split_at(rest.len().min(PART_CAP));
            rest = behind;
            self.seal(part, if rest.is_empty() { LAST } else { MORE })?;
            if rest.is_empty() {
                return Ok(());
            }
        }
    }

    fn seal(&mut self, part: &[u8], place: u8) -> io::Result<()> {
        let len = u16::try_from(1 + part.len() + SEAL_BYTES).map_err(invalid)?;
        self.unsent.extend_from_slice(&len.to_le_bytes());
        self.keys.seal(self.number, &[&[place], part].concat(), &mut self.unsent)?;
        self.number += 1;
        Ok(())
    }

    /// Sends the bytes that the socket takes now; `true` if none are left. Never blocks.
    pub(crate) fn flush(&mut self) -> io::Result<bool> {
        let mut sent = 0;
        let result = loop {
            if sent == self.unsent.len() {
                break Ok(true);
            }
            match (&*self.socket).write(&self.unsent[sent..]) {
                Ok(n) => sent += n,
                Err(e) if e.kind() == ErrorKind::Interrupted => {}
                Err(e) if e.kind() == ErrorKind::WouldBlock => break Ok(false),
                Err(e) => break Err(e),
            }
        };
        self.unsent.drain(..sent);
        if self.unsent.is_empty() {
            self.since = None;
        } else if sent > 0 {
            self.since = Some(Instant::now());
        }
        result
    }

    pub(crate) fn wants_write(&self) -> bool {
        !self.unsent.is_empty()
    }

    pub(crate) fn unsent_bytes(&self) -> usize {
        self.unsent.len()
    }
}

impl WireReader {
    /// The next whole message, if its bytes are there. Never blocks. The end of the connection is `UnexpectedEof`; a
    /// record that is not the next one, a message over the cap or bytes that are no `T` are `InvalidData`.
    pub(crate) fn next<T: DeserializeOwned>(&mut self) -> io::Result<Option<T>> {
        loop {
            if !self.read_record()? {
                return Ok(None);
            }
            self.keys.open(self.number, &self.record[LENGTH..], &mut self.opened)?;
            self.number += 1;
            self.record.clear();
            match self.opened.split_first() {
                Some((&MORE, part @ [_, ..])) => self.message.extend_from_slice(part),
                Some((&LAST, part)) => {
                    self.message.extend_from_slice(part);
                    break;
                }
                _ => return Err(invalid("a record that does not belong to a message")),
            }
        }
        self.since = None;
        let parsed = match postcard::take_from_bytes(&self.message) {
            Ok((message, [])) => Ok(Some(message)),
            Ok(_) => Err(invalid("bytes after the end of the message")),
            Err(e) => Err(invalid(e)),
        };
        self.message.clear();
        self.message.shrink_to(RECORD_CAP);
        parsed
    }

    /// Reads more bytes of the record; true if it is complete.
    fn read_record(&mut self) -> io::Result<bool> {
        loop {
            let have = self.record.len();
            let need = match self.record.first_chunk::<LENGTH>() {
                None => LENGTH,
                Some(length) => LENGTH + self.check_length(u16::from_le_bytes(*length))?,
            };
            if have > LENGTH && have == need {
                return Ok(true);
            }
            self.record.resize(need, 0);
            let read = (&*self.socket).read(&mut self.record[have..]);
            self.record.truncate(have + *read.as_ref().unwrap_or(&0));
            match read {
                Ok(0) => return Err(ErrorKind::UnexpectedEof.into()),
                Ok(_) => self.since = Some(Instant::now()),
                Err(e) if e.kind() == ErrorKind::Interrupted => {}
                Err(e) if e.kind() == ErrorKind::WouldBlock => return Ok(false),
                Err(e) => return Err(e),
            }
        }
    }

    /// Checks the length of a record: it must hold some content, and no more than the cap of its message leaves.
    fn check_length(&self, length: u16) -> io::Result<usize> {
        let length = usize::from(length);
        let Some(part) = length.checked_sub(SEAL_BYTES + 1) else {
            return Err(invalid(format!("a record of {length} bytes, which holds nothing")));
        };
        let message = self.message.len() + part;
        if message > self.cap {
            return Err(invalid(format!("a message of {message} bytes or more; at most {} are accepted", self.cap)));
        }
        Ok(length)
    }
}

impl AsFd for Wire {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.reader.as_fd()
    }
}

impl AsFd for WireReader {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

fn invalid(cause: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> io::Error {
    io::Error::new(ErrorKind::InvalidData, cause)
}

/// A peer that knows the keys, and sends arbitrary bytes as the content of its records.
#[cfg(feature = "fuzzing")]
pub(crate) fn fuzz(bytes: &[u8]) {
    use crate::store::protocol::Request;
    const CAP: usize = 512;
    // Few enough bytes for a socket's buffer, so that one thread suffices.
    let bytes = &bytes[..bytes.len().min(16 * 1024)];
    let Some((first, rest)) = bytes.split_first() else { return };
    static KEYS: std::sync::OnceLock<[SessionKeys; 2]> = std::sync::OnceLock::new();
    let keys = KEYS.get_or_init(crate::auth::handshake::agreed);
    let Ok([theirs, ours]) = SecureStream::pair(keys.clone()) else { return };
    let mut theirs = Wire::new(theirs, CAP).expect("a socket").split().1;
    let mut ours = Wire::new(ours, CAP).expect("a socket");
    if first % 4 == 0 {
        // An attacker on the path, without the keys.
        theirs.unsent.extend_from_slice(rest);
    } else {
        for part in rest.split(|byte| byte == first) {
            theirs.seal(part.get(1..).unwrap_or_default(), part.first().copied().unwrap_or(LAST)).expect("a record");
        }
    }
    assert!(theirs.flush().expect("the buffer takes it"));
    drop(theirs);
    let end = loop {
        match ours.next::<Request>() {
            Ok(message) => {
                assert!(first % 4 != 0, "opened by chance");
                assert!(message.is_some(), "the other end is closed, there is nothing to wait for");
            }
            Err(e) => break e,
        }
    };
    assert!(matches!(end.kind(), ErrorKind::UnexpectedEof | ErrorKind::InvalidData), "{end}");
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::auth::handshake::agreed;

    fn pair(cap: usize) -> (Wire, Wire) {
        let [a, b] = SecureStream::pair(agreed()).unwrap();
        (Wire::new(a, cap).unwrap(), Wire::new(b, cap).unwrap())
    }

    fn soon() -> Instant {
        Instant::now() + Duration::from_secs(60)
    }

    /// Bytes of the records of `messages`, in order.
    fn sealed(a: &mut Wire, messages: &[&str]) -> Vec<Vec<u8>> {
        let sealed = |message: &&str| {
            a.queue(message).unwrap();
            std::mem::take(&mut a.writer.unsent)
        };
        messages.iter().map(sealed).collect()
    }

    #[test]
    fn messages_arrive_whole_and_in_order() {
        let (mut a, mut b) = pair(1 << 20);
        let big = vec![7_u8; 500_000];
        std::thread::scope(|s| {
            s.spawn(|| {
                a.send(&"first", soon()).unwrap();
                a.send(&(), soon()).unwrap();
                a.send(&big, soon()).unwrap();
            });
            assert_eq!(b.recv::<String>(soon()).unwrap(), "first");
            b.recv::<()>(soon()).unwrap();
            assert_eq!(b.recv::<Vec<u8>>(soon()).unwrap(), big);
        });
        assert_eq!(b.next::<String>().unwrap(), None, "nothing is there, and nothing is waited for");
    }

    #[test]
    fn a_record_holds_nothing_that_can_be_read() {
        let (mut a, _b) = pair(64);
        let [once, again] = &sealed(&mut a, &["attack at dawn", "attack at dawn"])[..] else { panic!() };
        assert_eq!((once.len(), again.len()), (34, 34), "length, seal, place, and a text of 15 bytes");
        assert!(!once.windows(4).any(|bytes| b"attack at dawn".windows(4).any(|text| text == bytes)));
        assert_ne!(once[2..], again[2..], "the same message looks different each time");
    }

    #[test]
    fn no_changed_bit_is_accepted() {
        let whole = sealed(&mut pair(64).0, &["attack"])[0].len();
        for bit in 0..8 * whole {
            let (mut a, mut b) = pair(64);
            let mut record = sealed(&mut a, &["attack"]).remove(0);
            record[bit / 8] ^= 1 << (bit % 8);
            // If the length grew, the reader needs more bytes: an honest record and the end of the stream follow.
            (&*a.writer.socket).write_all(&record).unwrap();
            a.send(&"attack", soon()).unwrap();
            drop(a);
            let error = b.recv::<String>(soon()).unwrap_err();
            assert!(matches!(error.kind(), ErrorKind::InvalidData | ErrorKind::UnexpectedEof), "bit {bit}: {error}");
        }
    }

    #[test]
    fn records_that_are_dropped_repeated_swapped_or_reflected_are_refused() {
        for order in [&[1, 2][..], &[0, 2], &[0, 0], &[1, 0], &[0, 1, 1], &[0, 1, 0]] {
            let (mut a, mut b) = pair(64);
            let records = sealed(&mut a, &["0", "1", "2"]);
            for (nth, record) in order.iter().enumerate() {
                (&*a.writer.socket).write_all(&records[*record]).unwrap();
                let heard = b.recv::<String>(soon());
                if nth == *record {
                    assert_eq!(heard.unwrap(), record.to_string());
                } else {
                    assert_eq!(heard.unwrap_err().kind(), ErrorKind::InvalidData, "{order:?}");
                    break;
                }
            }
        }
        // A record that is sent back to its sender, and one that is sent on another connection.
        let (mut a, b) = pair(64);
        let record = sealed(&mut a, &["0"]).remove(0);
        let (c, mut d) = pair(64);
        for (from, to) in [(&b, &mut a), (&c, &mut d)] {
            (&*from.writer.socket).write_all(&record).unwrap();
            assert_eq!(to.recv::<String>(soon()).unwrap_err().kind(), ErrorKind::InvalidData);
        }
    }

    #[test]
    fn a_message_over_the_cap_is_refused_before_its_bytes_come() {
        let (mut a, mut b) = pair(16);
        (&*a.writer.socket).write_all(&u16::MAX.to_le_bytes()).unwrap();
        let error = b.recv::<String>(soon()).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidData);
        assert!(error.to_string().contains("65518 bytes or more"), "{error}");
        // In several records.
        (a, b) = pair(100_000);
        a.queue(&vec![0_u8; 200_000]).unwrap();
        a.flush().unwrap();
        let error = b.recv::<Vec<u8>>(soon()).unwrap_err();
        assert!(error.to_string().contains("131036 bytes or more"), "{error}");
    }

    #[test]
    fn bytes_after_a_message_are_not_read() {
        let (mut a, mut b) = pair(64);
        a.queue(&1_u8).unwrap();
        a.flush().unwrap();
        (&*a.writer.socket).write_all(b"raw").unwrap();
        assert_eq!(b.recv::<u8>(soon()).unwrap(), 1);
        let mut raw = [0; 3];
        (&*b.reader.socket).read_exact(&mut raw).unwrap();
        assert_eq!(&raw, b"raw");
    }

    #[test]
    fn what_a_peer_with_the_keys_says_is_checked() {
        for (place, said) in [(LAST, &[1, 2][..]), (MORE, &[]), (2, &[1]), (LAST, &[])] {
            let (mut a, mut b) = pair(64);
            a.writer.seal(said, place).unwrap();
            a.flush().unwrap();
            assert_eq!(b.recv::<u8>(soon()).unwrap_err().kind(), ErrorKind::InvalidData, "{place} {said:?}");
        }
    }

    #[test]
    fn a_half_message_stalls_the_connection_and_only_from_its_first_byte() {
        let (a, mut b) = pair(64);
        assert_eq!(b.stalled_since(), None);
        (&*a.writer.socket).write_all(&[30]).unwrap();
        let short = Instant::now() + Duration::from_millis(20);
        assert_eq!(b.recv::<u8>(short).unwrap_err().kind(), ErrorKind::TimedOut);
        let first = b.stalled_since().unwrap();
        // A slow peer is not stalled.
        (&*a.writer.socket).write_all(&[0]).unwrap();
        let short = Instant::now() + Duration::from_millis(20);
        assert_eq!(b.recv::<u8>(short).unwrap_err().kind(), ErrorKind::TimedOut);
        assert!(b.stalled_since().unwrap() > first);
    }

    #[test]
    fn a_peer_that_reads_slowly_is_no_stalled_one() {
        let (mut a, b) = pair(64);
        a.queue(&vec![0_u8; 4 << 20]).unwrap();
        assert!(!a.flush().unwrap(), "more than a socket buffers");
        let first = a.stalled_since().unwrap();
        std::thread::sleep(Duration::from_millis(2));
        assert!(!a.flush().unwrap());
        assert_eq!(a.stalled_since().unwrap(), first, "nothing was read");
        (&*b.reader.socket).read_exact(&mut vec![0; 100_000]).unwrap();
        assert!(!a.flush().unwrap());
        assert!(a.stalled_since().unwrap() > first);
    }

    #[test]
    fn the_end_of_the_stream_is_told_apart() {
        let (a, mut b) = pair(64);
        drop(a);
        assert_eq!(b.recv::<u8>(soon()).unwrap_err().kind(), ErrorKind::UnexpectedEof);
    }
}
