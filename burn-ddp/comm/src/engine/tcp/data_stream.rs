//! The bytes of a data connection, as they are or encrypted; reading and writing never block.
//!
//! An encrypted connection carries records: a little-endian `u16` length and that many bytes, sealed under the keys of
//! the connection and the record's number. A record that was changed, left out, repeated or moved on its way is an
//! error; no byte of a record reaches the caller before all of it was authenticated.

use std::io::{self, ErrorKind, IoSlice, Read};
use std::net::TcpStream;
use std::os::fd::{AsFd, BorrowedFd};

use rustix::net::{SendAncillaryBuffer, sendmsg};

use crate::auth::secure_stream::{RECORD_CAP, SEAL_BYTES, SecureStream, SessionKeys};
use crate::net::SEND_FLAGS;

/// Bytes of the length in front of a record.
const LENGTH: usize = 2;
/// Most payload in a record: sealed, sent and opened while it is in the cache. Pieces of a payload are longer, so most
/// records are opened into the place where their bytes are wanted.
const PART_BYTES: usize = 32 * 1024;
/// Most header bytes in one record.
const HEADER_CAP: usize = RECORD_CAP - SEAL_BYTES - PART_BYTES;
/// Room for incoming records: at first enough for small ones, and for several large ones once a large one has come.
const SMALL_ROOM: usize = 4096;
const LARGE_ROOM: usize = 4 * PART_BYTES;

/// A data connection that does not block.
pub(super) struct DataStream {
    socket: TcpStream,
    sealing: Option<Box<Sealing>>,
}

/// State of an encrypted connection.
struct Sealing {
    keys: SessionKeys,
    /// Number of the next record, for each direction.
    sealed: u64,
    opened: u64,
    /// The latest outgoing record, of which the first `sent` bytes are out.
    outgoing: Vec<u8>,
    sent: usize,
    /// Bytes of the caller in that record.
    covers: usize,
    /// Bytes that came, in `incoming[begin..end]`: whole records and the beginning of one.
    incoming: Vec<u8>,
    begin: usize,
    end: usize,
    /// An opened record that was longer than the caller's room, of which the first `given` bytes were read.
    plain: Vec<u8>,
    given: usize,
}

impl DataStream {
    /// Takes over a connection; `encrypt`, the same on both ends, encrypts what it carries.
    pub(super) fn new(stream: SecureStream, encrypt: bool) -> io::Result<DataStream> {
        let (socket, keys) = stream.into_parts();
        socket.set_nonblocking(true)?;
        Ok(DataStream { socket: socket.into(), sealing: encrypt.then(|| Box::new(Sealing::new(keys))) })
    }

    /// Sends some of `header` and then `payload`; returns the number of bytes sent, at least one.
    ///
    /// After `WouldBlock` the next call must pass the same bytes: some may be encrypted already.
    pub(super) fn write(&mut self, header: &[u8], payload: &[u8]) -> io::Result<usize> {
        match &mut self.sealing {
            None => send(&self.socket, header, payload),
            Some(sealing) => sealing.write(&self.socket, header, payload),
        }
    }

    /// Reads into `out`, which is not empty; returns the number of bytes, 0 at the end of the connection.
    pub(super) fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
        match &mut self.sealing {
            None => read(&self.socket, out),
            Some(sealing) => sealing.read(&self.socket, out),
        }
    }
}

impl AsFd for DataStream {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

impl Sealing {
    fn new(keys: SessionKeys) -> Sealing {
        Sealing {
            keys,
            sealed: 0,
            opened: 0,
            outgoing: Vec::new(),
            sent: 0,
            covers: 0,
            incoming: vec![0; SMALL_ROOM],
            begin: 0,
            end: 0,
            plain: Vec::new(),
            given: 0,
        }
    }

    fn write(&mut self, socket: &TcpStream, header: &[u8], payload: &[u8]) -> io::Result<usize> {
        if self.sent == self.outgoing.len() {
            self.seal(header, payload)?;
        }
        while self.sent < self.outgoing.len() {
            self.sent += send(socket, &self.outgoing[self.sent..], &[])?;
        }
        Ok(self.covers)
    }

    /// Makes the next outgoing record.
    fn seal(&mut self, header: &[u8], payload: &[u8]) -> io::Result<()> {
        let header = &header[..header.len().min(HEADER_CAP)];
        let payload = &payload[..payload.len().min(PART_BYTES)];
        self.covers = header.len() + payload.len();
        let length = u16::try_from(self.covers + SEAL_BYTES).map_err(io::Error::other)?;
        self.outgoing.clear();
        self.sent = 0;
        self.outgoing.extend_from_slice(&length.to_le_bytes());
        if header.is_empty() {
            self.keys.seal(self.sealed, payload, &mut self.outgoing)?;
        } else {
            self.keys.seal(self.sealed, &[header, payload].concat(), &mut self.outgoing)?;
        }
        self.sealed += 1;
        Ok(())
    }

    fn read(&mut self, socket: &TcpStream, out: &mut [u8]) -> io::Result<usize> {
        loop {
            let rest = &self.plain[self.given..];
            if !rest.is_empty() {
                let n = rest.len().min(out.len());
                out[..n].copy_from_slice(&rest[..n]);
                self.given += n;
                return Ok(n);
            }
            let length = self.incoming[self.begin..self.end].first_chunk::<LENGTH>();
            let length = length.map(|length| usize::from(u16::from_le_bytes(*length)));
            let need = LENGTH + length.unwrap_or(0);
            if length.is_none() || self.end - self.begin < need {
                match self.receive(socket, need)? {
                    0 => return Ok(0),
                    _ => continue,
                }
            }
            let record = self.begin + LENGTH..self.begin + need;
            self.begin += need;
            let Some(holds) = record.len().checked_sub(SEAL_BYTES).filter(|holds| *holds > 0) else {
                return Err(io::Error::new(ErrorKind::InvalidData, "an encrypted record without content"));
            };
            let sealed = &self.incoming[record];
            let number = self.opened;
            self.opened += 1;
            if holds <= out.len() {
                return self.keys.open_into(number, sealed, out);
            }
            self.given = 0;
            self.keys.open(number, sealed, &mut self.plain)?;
        }
    }

    /// Reads what the socket has, with room for a record of `need` bytes in all; returns 0 at the end of the
    /// connection.
    fn receive(&mut self, socket: &TcpStream, need: usize) -> io::Result<usize> {
        if self.incoming.len() - self.begin < need || self.begin == self.end {
            self.incoming.copy_within(self.begin..self.end, 0);
            self.end -= self.begin;
            self.begin = 0;
        }
        if self.incoming.len() < need {
            self.incoming.resize(LARGE_ROOM, 0);
        }
        let n = read(socket, &mut self.incoming[self.end..])?;
        self.end += n;
        Ok(n)
    }
}

fn read(mut socket: &TcpStream, out: &mut [u8]) -> io::Result<usize> {
    loop {
        match socket.read(out) {
            Err(e) if e.kind() == ErrorKind::Interrupted => {}
            result => return result,
        }
    }
}

fn send(socket: &TcpStream, first: &[u8], second: &[u8]) -> io::Result<usize> {
    let slices = [IoSlice::new(first), IoSlice::new(second)];
    loop {
        match sendmsg(socket, &slices, &mut SendAncillaryBuffer::default(), SEND_FLAGS) {
            Err(rustix::io::Errno::INTR) => {}
            result => return Ok(result?),
        }
    }
}

/// Reads of any size from an encrypted connection: of bytes from an attacker on the path, without keys, or of a peer's
/// records.
#[cfg(feature = "fuzzing")]
pub(crate) fn fuzz(bytes: &[u8]) {
    use std::io::Write;
    // Within what a socket buffers, so that one thread suffices; each record costs it a thousand bytes besides.
    let bytes = &bytes[..bytes.len().min(16 * 1024)];
    const RECORDS: usize = 64;
    let [kind, size, rest @ ..] = bytes else { return };
    static KEYS: std::sync::OnceLock<[SessionKeys; 2]> = std::sync::OnceLock::new();
    let keys = KEYS.get_or_init(crate::auth::handshake::agreed);
    let Ok(ends) = SecureStream::pair(keys.clone()) else { return };
    let [mut theirs, mut ours] = ends.map(|end| DataStream::new(end, true).expect("a socket"));
    let has_keys = kind % 4 != 0;
    let mut said = Vec::new();
    if has_keys {
        for part in rest.split(|byte| byte == kind).filter(|part| !part.is_empty()).take(RECORDS) {
            theirs.write(&part[..part.len() / 2], &part[part.len() / 2..]).expect("the buffer takes it");
            said.extend_from_slice(part);
        }
    } else {
        (&theirs.socket).write_all(rest).expect("the buffer takes it");
    }
    drop(theirs);
    let (mut heard, mut room) = (Vec::new(), vec![0; usize::from(*size) + 1]);
    let end = loop {
        match ours.read(&mut room) {
            Ok(0) => break Ok(()),
            Ok(n) => heard.extend_from_slice(&room[..n]),
            Err(e) => break Err(e),
        }
    };
    assert_eq!(heard, said);
    assert!(!has_keys || end.is_ok(), "{end:?}");
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::time::Duration;

    use super::*;
    use crate::auth::handshake::agreed;

    /// Two ends of a connection; each encrypts if it says so.
    fn pair(encrypt: [bool; 2]) -> [DataStream; 2] {
        let [a, b] = SecureStream::pair(agreed()).unwrap();
        [DataStream::new(a, encrypt[0]).unwrap(), DataStream::new(b, encrypt[1]).unwrap()]
    }

    fn bytes(len: usize) -> Vec<u8> {
        (0..len).map(|at| (at % 251) as u8).collect()
    }

    /// All that can be read, in reads of these sizes over and over; and the end, if one came.
    fn read_all(stream: &mut DataStream, sizes: &[usize]) -> (Vec<u8>, Option<io::Result<()>>) {
        let mut all = Vec::new();
        for size in sizes.iter().cycle() {
            let mut some = vec![0; *size];
            match stream.read(&mut some) {
                Ok(0) => return (all, Some(Ok(()))),
                Ok(n) => all.extend_from_slice(&some[..n]),
                Err(e) if e.kind() == ErrorKind::WouldBlock => return (all, None),
                Err(e) => return (all, Some(Err(e))),
            }
        }
        (all, None)
    }

    /// As [`read_all`], of a connection that the other end has closed. Its end may come late: a child process of
    /// another test has the socket open, too, between fork and exec.
    fn read_to_end(stream: &mut DataStream, sizes: &[usize]) -> (Vec<u8>, Option<io::Result<()>>) {
        stream.socket.set_nonblocking(false).unwrap();
        stream.socket.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
        read_all(stream, sizes)
    }

    /// The records of `parts`, sealed by a fresh end, and the end that is to open them.
    fn records(parts: &[&[u8]]) -> (Vec<Vec<u8>>, DataStream, DataStream) {
        let [mut from, to] = pair([true; 2]);
        let mut seal = |part: &&[u8]| {
            let sealing = from.sealing.as_mut().unwrap();
            sealing.seal(&[], part).unwrap();
            sealing.sent = sealing.outgoing.len();
            sealing.outgoing.clone()
        };
        (parts.iter().map(&mut seal).collect(), from, to)
    }

    /// Data that an end reads from these bytes, and true if it met the announced end of the connection.
    fn opened(from: DataStream, mut to: DataStream, bytes: &[u8]) -> (Vec<u8>, bool) {
        from.socket.set_nonblocking(false).unwrap();
        (&from.socket).write_all(bytes).unwrap();
        drop(from);
        let (all, end) = read_to_end(&mut to, &[100]);
        (all, matches!(end, Some(Ok(()))))
    }

    #[test]
    fn bytes_arrive_whole_and_in_order_in_reads_of_any_size() {
        for encrypt in [false, true] {
            for sizes in [&[1][..], &[4096, 100_000], &[PART_BYTES], &[7, 65_536, 1]] {
                let [mut a, mut b] = pair([encrypt; 2]);
                let sent = bytes(300_000);
                let (mut out, mut got) = (0, Vec::new());
                while got.len() < sent.len() {
                    let header = &sent[out..sent.len().min(out + 80)];
                    let payload = &sent[out + header.len()..];
                    match a.write(header, payload) {
                        Ok(n) => out += n,
                        Err(e) => assert_eq!(e.kind(), ErrorKind::WouldBlock),
                    }
                    let (some, end) = read_all(&mut b, sizes);
                    got.extend(some);
                    assert!(end.is_none(), "{end:?}");
                    if out == sent.len() {
                        std::thread::sleep(Duration::from_millis(1));
                    }
                }
                assert!(got == sent, "encrypted: {encrypt}, reads of {sizes:?}");
                drop(a);
                assert!(matches!(read_to_end(&mut b, sizes), (rest, Some(Ok(()))) if rest.is_empty()));
            }
        }
    }

    #[test]
    fn a_record_holds_nothing_that_can_be_read() {
        let (records, ..) = records(&[b"gradients of a layer", b"gradients of a layer"]);
        assert_eq!(records[0].len(), LENGTH + 20 + SEAL_BYTES);
        assert!(!records[0].windows(4).any(|bytes| b"gradients of a layer".windows(4).any(|text| text == bytes)));
        assert_ne!(records[0][LENGTH..], records[1][LENGTH..], "the same bytes look different each time");
    }

    #[test]
    fn no_changed_bit_is_accepted() {
        let whole = records(&[b"gradients"]).0[0].len();
        for bit in 0..8 * whole {
            let (mut records, from, to) = records(&[b"gradients", b"weights"]);
            records[0][bit / 8] ^= 1 << (bit % 8);
            // A length that grew takes in a part of the next record.
            let (got, _) = opened(from, to, &records.concat());
            assert!(got.is_empty(), "bit {bit}: {got:?}");
        }
    }

    #[test]
    fn records_that_are_dropped_repeated_or_swapped_are_refused() {
        let said: [&[u8]; 3] = [b"one", b"two", b"three"];
        for (order, good) in [(&[1, 2][..], 0), (&[0, 2], 1), (&[0, 0], 1), (&[1, 0], 0), (&[0, 1, 1], 2)] {
            let (records, from, to) = records(&said);
            let sent: Vec<u8> = order.iter().flat_map(|nth: &usize| records[*nth].clone()).collect();
            let (got, in_peace) = opened(from, to, &sent);
            assert_eq!(got, said[..good].concat(), "{order:?}");
            assert!(!in_peace, "{order:?} was not noticed");
        }
    }

    #[test]
    fn a_reflected_record_an_empty_one_and_a_plain_one_are_refused() {
        let (records, from, to) = records(&[b"one"]);
        // The sender's own record comes back to it.
        let (got, in_peace) = opened(to, from, &records[0]);
        assert!(got.is_empty() && !in_peace);
        for junk in [&[0, 0][..], &[16, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16], &[7; 2000]] {
            let [from, to] = pair([true; 2]);
            assert_eq!(opened(from, to, junk), (Vec::new(), false), "{junk:?}");
        }
    }
}
