//! One exchange of frames with all peers at once.

use std::ffi::c_int;
use std::time::{Duration, Instant};

use burn_ddp_comm::engine::{Piece, Stall};
use burn_ddp_comm::frame::{PREFIX_BYTES, Prefix};
use burn_ddp_comm::membership::Membership;
use burn_ddp_comm::{Call, Error, Result};

use crate::ffi::{Failure, Flights, Landed};
use crate::idle::Idle;
use crate::fragments::{FIRST_ROOM, Pieces};

/// How long after MPI or a goodbye says that nothing more comes the control connections may take to tell why, and messages to arrive
/// that were sent before.
const GRACE: Duration = Duration::from_secs(1);

/// How many pieces of a frame are under way at a time: one that moves, and one that is filled or read.
const WINDOW: usize = 2;

/// Takes a frame's place when a rank closes its side of a group. Shorter than any frame.
pub(crate) const CLOSING: &[u8] = b".";

/// How a peer is reached.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Route {
    /// Its process.
    pub(crate) process: c_int,
    /// The tag of what goes there.
    pub(crate) send: c_int,
    /// The tag of what comes from there.
    pub(crate) receive: c_int,
}

/// A transport's way to MPI.
pub(crate) struct Wires {
    /// By group rank; that of this rank is not used.
    pub(crate) routes: Vec<Route>,
    /// By group rank: who has closed its side.
    pub(crate) closed: Vec<bool>,
    pub(crate) flights: Flights<Key>,
    pub(crate) idle: Idle,
    /// Memory for first messages and for those behind them, kept.
    firsts: Vec<Vec<u8>>,
    rest: Vec<Vec<u8>>,
}

impl Wires {
    pub(crate) fn new(routes: Vec<Route>, flights: Flights<Key>, idle: Idle) -> Wires {
        Wires { closed: vec![false; routes.len()], routes, flights, idle, firsts: Vec::new(), rest: Vec::new() }
    }
}

/// A message under way, by its place in the exchange.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Key {
    Sent(usize),
    Received { from: usize, piece: usize },
}

/// A frame to a peer.
pub(crate) struct Sending<'a> {
    pub(crate) peer: usize,
    pub(crate) payload: &'a [u8],
    /// How many pieces have been given to MPI, and how many of them it still has.
    begun: usize,
    under_way: usize,
}

impl<'a> Sending<'a> {
    pub(crate) fn new(peer: usize, payload: &'a [u8]) -> Sending<'a> {
        Sending { peer, payload, begun: 0, under_way: 0 }
    }

    fn is_out(&self, pieces: Pieces) -> bool {
        self.under_way == 0 && self.begun == pieces.count(self.payload.len())
    }
}

/// A frame from a peer.
pub(crate) struct Receiving<'a> {
    pub(crate) peer: usize,
    pub(crate) len: usize,
    /// Where the payload goes; `None` if it is taken piece by piece.
    room: Option<&'a mut [u8]>,
    /// In the header, which has come if this is something.
    weight: Option<f64>,
    /// How many pieces have been asked for, and how many of them have been taken.
    begun: usize,
    taken: usize,
    /// Pieces that wait to be taken, by their number modulo their count.
    held: [Option<Held>; WINDOW],
}

struct Held {
    buffer: Vec<u8>,
    /// Bytes before the payload.
    skip: usize,
}

impl<'a> Receiving<'a> {
    pub(crate) fn new(peer: usize, len: usize, room: Option<&'a mut [u8]>) -> Receiving<'a> {
        Receiving { peer, len, room, weight: None, begun: 0, taken: 0, held: [None, None] }
    }

    /// Once the exchange is done.
    pub(crate) fn weight(&self) -> f64 {
        self.weight.unwrap_or(f64::NAN)
    }

    fn is_complete(&self, pieces: Pieces) -> bool {
        self.taken == pieces.count(self.len)
    }
}

/// Why nothing more comes from a peer.
enum End {
    /// It closed its side of the group.
    Closed,
    /// It said goodbye.
    Left,
    /// MPI cannot reach it.
    Broken(Failure),
}

/// One exchange under way.
pub(crate) struct Exchange<'a, 'b> {
    call: &'a Call,
    membership: &'a Membership,
    pieces: Pieces,
    sending: Vec<Sending<'a>>,
    receiving: &'a mut [Receiving<'b>],
    /// The first peer from which nothing more comes, since when, and why.
    ended: Option<(usize, Instant, End)>,
    stall: Stall,
    landed: Vec<Landed<Key>>,
}

impl<'a, 'b> Exchange<'a, 'b> {
    pub(crate) fn new(
        call: &'a Call,
        membership: &'a Membership,
        pieces: Pieces,
        sending: Vec<Sending<'a>>,
        receiving: &'a mut [Receiving<'b>],
    ) -> Exchange<'a, 'b> {
        receiving.iter().for_each(|receive| call.expect(receive.peer));
        let stall = Stall::new(call, membership.options().stall);
        Exchange { call, membership, pieces, sending, receiving, ended: None, stall, landed: Vec::new() }
    }

    /// Sends and receives all. If there is a `take`, it gets what came from all, piece by piece.
    pub(crate) fn run(mut self, wires: &mut Wires, mut take: Option<&mut dyn FnMut(Piece<'_>)>) -> Result<()> {
        wires.idle.reset();
        loop {
            let mut moved = self.begin(wires)?;
            moved |= self.land(wires)?;
            if let Some(take) = &mut take {
                while self.hand_over(wires, take) {
                    moved = true;
                }
            }
            let pieces = self.pieces;
            if self.sending.iter().all(|send| send.is_out(pieces))
                && self.receiving.iter().all(|receive| receive.is_complete(pieces))
            {
                return Ok(());
            }
            if moved {
                wires.idle.reset();
                continue;
            }
            self.wait(wires)?;
        }
    }

    /// Gives MPI what it may have now; whether that was anything.
    fn begin(&mut self, wires: &mut Wires) -> Result<bool> {
        let mut moved = false;
        if matches!(self.ended, Some((.., End::Broken(_)))) {
            return Ok(false);
        }
        for (nth, send) in self.sending.iter_mut().enumerate() {
            let len = send.payload.len();
            while send.begun < self.pieces.count(len) && send.under_way < WINDOW {
                let bytes = &send.payload[self.pieces.range(send.begun, len)];
                let buffer = if send.begun == 0 {
                    let mut buffer = wires.firsts.pop().unwrap_or_default();
                    buffer.clear();
                    self.call.header(send.peer, len).encode(&mut buffer);
                    buffer.extend_from_slice(bytes);
                    buffer
                } else {
                    let mut buffer = wires.rest.pop().unwrap_or_else(|| vec![0; self.pieces.len]);
                    buffer[..bytes.len()].copy_from_slice(bytes);
                    buffer
                };
                let len = if send.begun == 0 { buffer.len() } else { bytes.len() };
                let route = route(wires, send.peer)?;
                if let Err(failure) = wires.flights.send(route.process, route.send, buffer, len, Key::Sent(nth)) {
                    end(&mut self.ended, send.peer, End::Broken(failure));
                    return Ok(moved);
                }
                send.begun += 1;
                send.under_way += 1;
                moved = true;
            }
        }
        for (from, receive) in self.receiving.iter_mut().enumerate() {
            let count = if receive.weight.is_some() { self.pieces.count(receive.len) } else { 1 };
            while receive.begun < count && receive.begun - receive.taken < WINDOW && !wires.closed[receive.peer] {
                let piece = receive.begun;
                let (buffer, len) = if piece == 0 {
                    let mut buffer = wires.firsts.pop().unwrap_or_default();
                    buffer.resize(FIRST_ROOM, 0);
                    (buffer, FIRST_ROOM)
                } else {
                    let buffer = wires.rest.pop().unwrap_or_else(|| vec![0; self.pieces.len]);
                    (buffer, self.pieces.range(piece, receive.len).len())
                };
                let (route, key) = (route(wires, receive.peer)?, Key::Received { from, piece });
                if let Err(failure) = wires.flights.receive(route.process, route.receive, buffer, len, key) {
                    end(&mut self.ended, receive.peer, End::Broken(failure));
                    return Ok(moved);
                }
                receive.begun += 1;
                moved = true;
            }
        }
        Ok(moved)
    }

    /// Takes from MPI what is done; whether anything was.
    fn land(&mut self, wires: &mut Wires) -> Result<bool> {
        let mut landed = std::mem::take(&mut self.landed);
        if let Err(failure) = wires.flights.land(&mut landed) {
            let peer = self.waiting_for().first().copied().unwrap_or_default();
            end(&mut self.ended, peer, End::Broken(failure));
        }
        let moved = !landed.is_empty();
        for Landed { key, buffer, len } in landed.drain(..) {
            match (key, len) {
                (Key::Sent(nth), Ok(_)) => {
                    self.sending[nth].under_way -= 1;
                    recycle(wires, self.pieces, buffer);
                }
                (Key::Received { from, piece }, Ok(len)) => self.arrived(wires, from, piece, buffer, len)?,
                (Key::Sent(nth), Err(failure)) => end(&mut self.ended, self.sending[nth].peer, End::Broken(failure)),
                (Key::Received { from, .. }, Err(failure)) => {
                    end(&mut self.ended, self.receiving[from].peer, End::Broken(failure));
                }
            }
        }
        self.landed = landed;
        Ok(moved)
    }

    fn arrived(&mut self, wires: &mut Wires, from: usize, piece: usize, buffer: Vec<u8>, len: usize) -> Result<()> {
        let receive = &mut self.receiving[from];
        let peer = receive.peer;
        let mut skip = 0;
        if piece == 0 {
            if buffer[..len] == *CLOSING {
                wires.closed[peer] = true;
                end(&mut self.ended, peer, End::Closed);
                return Ok(());
            }
            let (header_bytes, weight) = read_header(self.call, peer, &buffer[..len], receive.len)?;
            receive.weight = Some(weight);
            skip = header_bytes;
        }
        let range = self.pieces.range(piece, receive.len);
        if len != skip + range.len() {
            let message = format!("a message of {len} bytes, expected {}", skip + range.len());
            return Err(wrong(self.call, peer, message));
        }
        match &mut receive.room {
            Some(room) => {
                room[range].copy_from_slice(&buffer[skip..len]);
                receive.taken += 1;
                recycle(wires, self.pieces, buffer);
                if receive.is_complete(self.pieces) {
                    self.call.arrived(peer);
                }
            }
            None => receive.held[piece % WINDOW] = Some(Held { buffer, skip }),
        }
        Ok(())
    }

    /// Gives `take` the next piece of all, if it has come from all.
    fn hand_over(&mut self, wires: &mut Wires, take: &mut dyn FnMut(Piece<'_>)) -> bool {
        let (next, len) = self.receiving.first().map_or((0, 0), |receive| (receive.taken, receive.len));
        if self.receiving.is_empty() || next == self.pieces.count(len) {
            return false;
        }
        let range = self.pieces.range(next, len);
        let held = self.receiving.iter().map(|receive| receive.held[next % WINDOW].as_ref());
        let Some(rows) = held
            .map(|held| held.and_then(|held| held.buffer.get(held.skip..held.skip + range.len())))
            .collect::<Option<Vec<&[u8]>>>()
        else {
            return false;
        };
        let mut weights = vec![self.call.weight; wires.routes.len()];
        self.receiving.iter().for_each(|receive| weights[receive.peer] = receive.weight());
        take(Piece { start: range.start, rows: &rows, weights: &weights });
        for receive in self.receiving.iter_mut() {
            receive.taken += 1;
            if let Some(held) = receive.held[next % WINDOW].take() {
                recycle(wires, self.pieces, held.buffer);
            }
            if receive.is_complete(self.pieces) {
                self.call.arrived(receive.peer);
            }
        }
        true
    }

    /// Nothing has moved: ends by an error if nothing more will.
    fn wait(&mut self, wires: &mut Wires) -> Result<()> {
        self.membership.check()?;
        let needed = self.needed();
        if matches!(&self.ended, Some((peer, _, End::Left)) if !needed.contains(peer)) {
            self.ended = None; // All that was needed of it has come.
        }
        let has_left = |peer: &usize| self.membership.has_left(self.call.world_rank(*peer));
        if let Some(peer) = needed.into_iter().find(has_left) {
            end(&mut self.ended, peer, End::Left);
        }
        if let Some((peer, since, cause)) = &self.ended {
            let rank = self.call.world_rank(*peer);
            let explained = matches!(cause, End::Closed) && self.membership.has_left(rank);
            if explained || since.elapsed() >= GRACE {
                return Err(match cause {
                    End::Closed | End::Left => self.membership.left_error(rank),
                    End::Broken(failure) => self.membership.lost_error(rank, format!("MPI cannot reach it: {failure}")),
                });
            }
        }
        if Instant::now() >= self.call.deadline() {
            return Err(self.call.timed_out(self.waiting_for()));
        }
        if self.stall.is_due() {
            self.membership.stalled(self.call, self.waiting_for());
        }
        wires.idle.pause();
        Ok(())
    }

    /// Whose part has not come; those who do not take theirs only if all have: they may be waiting for the same ranks.
    fn waiting_for(&self) -> Vec<usize> {
        let has_next = |receive: &Receiving<'_>| receive.held[receive.taken % WINDOW].is_some();
        let missing = self.receiving.iter().filter(|receive| !receive.is_complete(self.pieces) && !has_next(receive));
        let missing: Vec<usize> = missing.map(|receive| receive.peer).collect();
        if missing.is_empty() { self.needed() } else { sorted(missing) }
    }

    /// Everybody without whom this cannot be done.
    fn needed(&self) -> Vec<usize> {
        let sending = self.sending.iter().filter(|send| !send.is_out(self.pieces)).map(|send| send.peer);
        let missing = self.receiving.iter().filter(|receive| !receive.is_complete(self.pieces));
        sorted(sending.chain(missing.map(|receive| receive.peer)).collect())
    }
}

fn sorted(mut peers: Vec<usize>) -> Vec<usize> {
    peers.sort_unstable();
    peers.dedup();
    peers
}

/// The bytes of the header at the beginning of `message`, and the weight in it.
fn read_header(call: &Call, peer: usize, message: &[u8], payload_bytes: usize) -> Result<(usize, f64)> {
    let short = || wrong(call, peer, format!("a message of {} bytes, which is no frame", message.len()));
    let (prefix, behind) = message.split_first_chunk::<PREFIX_BYTES>().ok_or_else(short)?;
    let prefix = Prefix::decode(prefix).map_err(|message| wrong(call, peer, message))?;
    let site_bytes = prefix.site_bytes();
    let header = prefix.finish(behind.get(..site_bytes).ok_or_else(short)?);
    call.check_header(peer, &header, payload_bytes)?;
    Ok((PREFIX_BYTES + site_bytes, header.weight))
}

fn wrong(call: &Call, peer: usize, message: String) -> Error {
    Error::Protocol { peer: call.world_rank(peer), message, during: Some(Box::new(call.info_for(peer).clone())) }
}

fn end(ended: &mut Option<(usize, Instant, End)>, peer: usize, cause: End) {
    let waits = matches!(ended, None | Some((.., End::Left)));
    let same = matches!((&*ended, &cause), (Some((was, _, End::Left)), End::Left) if *was == peer);
    if waits && !same {
        *ended = Some((peer, Instant::now(), cause));
    }
}

fn recycle(wires: &mut Wires, pieces: Pieces, buffer: Vec<u8>) {
    // First messages are shorter than the others ever are.
    if buffer.len() == pieces.len { wires.rest.push(buffer) } else { wires.firsts.push(buffer) }
}

fn route(wires: &Wires, peer: usize) -> Result<Route> {
    let message = || format!("an exchange with rank {peer}, which is not in the group");
    wires.routes.get(peer).copied().ok_or_else(|| Error::Internal { message: message() })
}
