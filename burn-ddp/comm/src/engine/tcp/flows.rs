//! The sockets of a link: one stream of bytes over several flows (TCP connections), since networks limit the speed of
//! each.
//!
//! The bytes of each direction are cut into stripes of one length. Each stripe begins with the number of the flow that
//! carries the next stripe, so the receiver always knows where to read on. The sender prefers flows that have room, so
//! a flow that falls behind gets fewer stripes. Stripes of different flows travel at the same time in the kernel's
//! buffers. A single flow has no stripes.

use std::io::{self, ErrorKind};
use std::os::fd::{AsFd, BorrowedFd};

use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::data_stream::DataStream;

/// Bytes of a stripe: a bucket's slice has several, and the system calls that move a stripe cost little beside it.
const STRIPE_BYTES: usize = 64 * 1024;

/// The flows of a link, at least one.
pub(super) struct Flows {
    streams: Vec<DataStream>,
    written: Place,
    read: Place,
}

/// Place in the bytes of one direction.
struct Place {
    /// Flow of the stripe.
    flow: usize,
    /// Flow of the next stripe; `None` until it is known.
    next: Option<u8>,
    /// Bytes left of the stripe, its first byte included, which is `next`.
    left: usize,
}

impl Flows {
    /// The flows over `streams`, which both ends list in the same order.
    pub(super) fn new(streams: Vec<DataStream>) -> Flows {
        let start = || if streams.len() == 1 { Place::without_stripes() } else { Place::at_start_of(0) };
        Flows { written: start(), read: start(), streams }
    }

    /// Sends some of `header` and then `payload`; returns the number of bytes sent, possibly 0.
    ///
    /// After `WouldBlock` the next call must pass the same bytes, as with [`DataStream::write`].
    pub(super) fn write(&mut self, header: &[u8], payload: &[u8]) -> io::Result<usize> {
        let Flows { streams, written, .. } = self;
        if written.is_at_start() {
            let next = *written.next.get_or_insert_with(|| with_room(streams, written.flow));
            let bytes = if header.is_empty() { payload } else { header };
            let n = streams[written.flow].write(&[next], &bytes[..bytes.len().min(STRIPE_BYTES)])?;
            written.pass(n);
            return Ok(n - 1);
        }
        let header = &header[..header.len().min(written.left)];
        let payload = &payload[..payload.len().min(written.left - header.len())];
        let n = streams[written.flow].write(header, payload)?;
        written.pass(n);
        Ok(n)
    }

    /// Reads into `out`, which is not empty; returns the number of bytes, 0 at the end of the flow whose turn it is.
    pub(super) fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
        let Flows { streams, read, .. } = self;
        let count = streams.len();
        let stream = &mut streams[read.flow];
        if read.is_at_start() {
            let mut next = [0];
            if stream.read(&mut next)? == 0 {
                return Ok(0);
            }
            let [next] = next;
            if usize::from(next) >= count {
                return Err(io::Error::new(
                    ErrorKind::InvalidData,
                    format!("the peer goes on with flow {next} of {count}"),
                ));
            }
            read.next = Some(next);
            read.pass(1);
        }
        let len = out.len().min(read.left);
        let n = stream.read(&mut out[..len])?;
        read.pass(n);
        Ok(n)
    }

    /// The flow that takes the next bytes.
    pub(super) fn writes_to(&self) -> BorrowedFd<'_> {
        self.streams[self.written.flow].as_fd()
    }

    /// The flow that brings the next bytes.
    pub(super) fn reads_from(&self) -> BorrowedFd<'_> {
        self.streams[self.read.flow].as_fd()
    }

    /// True if the next bytes of both directions are on one flow.
    pub(super) fn meet(&self) -> bool {
        self.written.flow == self.read.flow
    }
}

impl Place {
    fn at_start_of(flow: usize) -> Place {
        Place { flow, next: None, left: 1 + STRIPE_BYTES }
    }

    /// The place in the bytes of a single flow: one stripe without end.
    fn without_stripes() -> Place {
        Place { flow: 0, next: Some(0), left: usize::MAX }
    }

    fn is_at_start(&self) -> bool {
        self.left == 1 + STRIPE_BYTES
    }

    fn pass(&mut self, n: usize) {
        self.left -= n;
        if self.left == 0 {
            *self = Place::at_start_of(usize::from(self.next.unwrap_or(0)));
        }
    }
}

/// The flow for the stripe after one on `flow`: the next in turn that has room, or else the next in turn.
fn with_room(streams: &[DataStream], flow: usize) -> u8 {
    let mut sockets: Vec<_> = streams.iter().map(|stream| PollFd::new(stream, PollFlags::OUT)).collect();
    // If `poll` fails, no flow counts as having room.
    let answered = poll(&mut sockets, Some(&Timespec { tv_sec: 0, tv_nsec: 0 })).is_ok();
    let has_room = |flow: &usize| answered && sockets[*flow].revents().contains(PollFlags::OUT);
    let in_turn = || (1..=streams.len()).map(|turn| (flow + turn) % streams.len());
    in_turn().find(has_room).or(in_turn().next()).unwrap_or(0) as u8
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use super::*;
    use crate::auth::handshake::agreed;
    use crate::auth::secure_stream::SecureStream;

    /// Two ends of a link of so many flows.
    fn pair(flows: usize, encrypt: bool) -> [Flows; 2] {
        let (mut left, mut right) = (Vec::new(), Vec::new());
        for _ in 0..flows {
            let [a, b] = SecureStream::pair(agreed()).unwrap().map(|end| DataStream::new(end, encrypt).unwrap());
            left.push(a);
            right.push(b);
        }
        [left, right].map(Flows::new)
    }

    #[test]
    fn bytes_arrive_in_order_over_any_number_of_flows() {
        let sent: Vec<u8> = (0..9 * STRIPE_BYTES + 77).map(|at| (at % 251) as u8).collect();
        for (flows, encrypt) in [(1, false), (2, false), (3, true), (4, false), (4, true)] {
            let [mut a, mut b] = pair(flows, encrypt);
            let (mut out, mut got, mut room) = (0, Vec::new(), vec![0; 100_000]);
            let deadline = Instant::now() + Duration::from_secs(60);
            while got.len() < sent.len() {
                let header = &sent[out..sent.len().min(out + 80)];
                if out < sent.len() {
                    match a.write(header, &sent[out + header.len()..]) {
                        Ok(n) => out += n,
                        Err(e) => assert_eq!(e.kind(), ErrorKind::WouldBlock),
                    }
                }
                match b.read(&mut room) {
                    Ok(n) => got.extend_from_slice(&room[..n]),
                    Err(e) => assert_eq!(e.kind(), ErrorKind::WouldBlock),
                }
                assert!(Instant::now() < deadline, "{} of {} bytes came", got.len(), sent.len());
            }
            assert!(got == sent, "{flows} flows, encrypted: {encrypt}");
        }
    }

    #[test]
    fn flows_take_turns_and_a_full_one_is_left_out() {
        for full in [None, Some(1)] {
            let [mut a, mut b] = pair(3, false);
            while let Some(flow) = full {
                match a.streams[flow].write(&[], &[0; STRIPE_BYTES]) {
                    Ok(_) => {}
                    Err(e) if e.kind() == ErrorKind::WouldBlock => break,
                    Err(e) => panic!("{e}"),
                }
            }
            let (mut flows, mut room) = (vec![], vec![0; STRIPE_BYTES]);
            let deadline = Instant::now() + Duration::from_secs(60);
            for _ in 0..4 {
                flows.push(a.written.flow);
                let (mut out, mut got) = (0, 0);
                while got < STRIPE_BYTES {
                    if out < STRIPE_BYTES {
                        out += a.write(&[], &[1; STRIPE_BYTES][out..]).unwrap_or(0);
                    }
                    got += b.read(&mut room).unwrap_or(0);
                    assert!(Instant::now() < deadline);
                }
            }
            assert_eq!(flows, if full.is_some() { [0, 2, 0, 2] } else { [0, 1, 2, 0] });
        }
    }

    #[test]
    fn a_flow_that_does_not_exist_is_refused() {
        let [mut a, mut b] = pair(2, false);
        a.written.next = Some(9);
        let (mut room, deadline) = (vec![0; STRIPE_BYTES], Instant::now() + Duration::from_secs(60));
        a.write(&[], b"gradients").unwrap();
        let refusal = loop {
            match b.read(&mut room) {
                Err(e) if e.kind() != ErrorKind::WouldBlock => break e,
                _ => assert!(Instant::now() < deadline),
            }
        };
        assert!(refusal.to_string().contains("flow 9 of 2"), "{refusal}");
    }

    #[test]
    fn the_end_of_a_flow_is_the_end_of_the_link_behind_what_came() {
        for closed in 0..3 {
            let [mut a, mut b] = pair(3, false);
            let (mut out, mut got, mut room) = (0, 0, vec![0; STRIPE_BYTES]);
            let deadline = Instant::now() + Duration::from_secs(60);
            while got < closed * STRIPE_BYTES {
                if out < closed * STRIPE_BYTES {
                    out += a.write(&[], &room[..(closed * STRIPE_BYTES - out).min(STRIPE_BYTES)]).unwrap_or(0);
                }
                got += b.read(&mut room).unwrap_or(0);
                assert!(Instant::now() < deadline);
            }
            assert_eq!(b.read.flow, closed);
            drop(a.streams.remove(closed));
            let end = loop {
                match b.read(&mut room) {
                    Err(e) if e.kind() == ErrorKind::WouldBlock => assert!(Instant::now() < deadline),
                    end => break end,
                }
            };
            assert!(matches!(end, Ok(0)), "flow {closed}: {end:?}");
        }
    }
}
