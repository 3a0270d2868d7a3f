//! One exchange of frames with all peers at the same time.

use std::time::{Duration, Instant};

use burn_ddp_comm::engine::Piece;
use burn_ddp_comm::frame::{PREFIX_BYTES, Prefix};
use burn_ddp_comm::membership::{Membership, Watch};
use burn_ddp_comm::{Call, Error, Result};

use crate::channel::{Channel, Key, Receiving, Sending, WINDOW, Waiting};
use crate::error::own_failure;
use crate::ffi::{Completed, Failure};
use crate::fragments::{FIRST_ROOM, Fragments};

/// Time from a peer's end to the error for it: the control connections may explain the end, and earlier messages
/// arrive.
const GRACE: Duration = Duration::from_secs(1);

/// Message that a rank sends in place of a frame when it closes its side of a group. Shorter than any frame.
pub(crate) const CLOSING: &[u8] = b".";

/// Reason why nothing more comes from a peer.
enum End {
    /// The peer closed its side of the group.
    Closed,
    /// The peer left the world.
    Left,
    /// A call of MPI failed.
    Broken(Failure),
}

/// One exchange under way.
pub(crate) struct Exchange<'a, 'b> {
    call: &'a Call,
    membership: &'a Membership,
    fragments: Fragments,
    sending: Vec<Sending<'a>>,
    receiving: &'a mut [Receiving<'b>],
    /// First peer from which nothing more comes, with the time and the reason.
    ended: Option<(usize, Instant, End)>,
    watch: Watch<'a>,
    completed: Vec<Completed<Key>>,
}

impl<'a, 'b> Exchange<'a, 'b> {
    pub(crate) fn new(
        call: &'a Call,
        membership: &'a Membership,
        fragments: Fragments,
        sending: Vec<Sending<'a>>,
        receiving: &'a mut [Receiving<'b>],
    ) -> Exchange<'a, 'b> {
        let watch = Watch::new(membership, call);
        Exchange { call, membership, fragments, sending, receiving, ended: None, watch, completed: Vec::new() }
    }

    /// Sends and receives all frames. If there is a `take`, it gets the peers' frames, fragment by fragment.
    pub(crate) fn run(mut self, channel: &mut Channel, mut take: Option<&mut dyn FnMut(Piece<'_>)>) -> Result<()> {
        channel.pause.reset();
        loop {
            let mut moved = self.begin(channel)?;
            moved |= self.complete(channel)?;
            if let Some(take) = &mut take {
                while self.hand_over(channel, take) {
                    moved = true;
                }
            }
            let fragments = self.fragments;
            if self.sending.iter().all(|send| send.is_out(fragments))
                && self.receiving.iter().all(|receive| receive.is_complete(fragments))
            {
                return Ok(());
            }
            if moved {
                channel.pause.reset();
                continue;
            }
            self.wait(channel)?;
        }
    }

    /// Begins as many sends and receives as [`WINDOW`] allows; true if it began any.
    fn begin(&mut self, channel: &mut Channel) -> Result<bool> {
        let mut moved = false;
        if matches!(self.ended, Some((.., End::Broken(_)))) {
            return Ok(false);
        }
        for (nth, send) in self.sending.iter_mut().enumerate() {
            let len = send.payload.len();
            while send.begun < self.fragments.count(len) && send.under_way < WINDOW {
                let bytes = &send.payload[self.fragments.range(send.begun, len)];
                let buffer = if send.begun == 0 {
                    let mut buffer = channel.first_buffer();
                    buffer.clear();
                    self.call.header(send.peer, len).encode(&mut buffer);
                    buffer.extend_from_slice(bytes);
                    buffer
                } else {
                    let mut buffer = channel.buffer(self.fragments);
                    buffer[..bytes.len()].copy_from_slice(bytes);
                    buffer
                };
                let len = if send.begun == 0 { buffer.len() } else { bytes.len() };
                let route = channel.route(send.peer)?;
                if let Err(failure) = channel.requests.send(route.process, route.send, buffer, len, Key::Sent(nth)) {
                    end(&mut self.ended, send.peer, End::Broken(failure));
                    return Ok(moved);
                }
                send.begun += 1;
                send.under_way += 1;
                moved = true;
            }
        }
        for (from, receive) in self.receiving.iter_mut().enumerate() {
            let count = if receive.weight.is_some() { self.fragments.count(receive.len) } else { 1 };
            while receive.begun < count && receive.begun - receive.taken < WINDOW && !channel.closed[receive.peer] {
                let nth = receive.begun;
                let (buffer, len) = if nth == 0 {
                    let mut buffer = channel.first_buffer();
                    buffer.resize(FIRST_ROOM, 0);
                    (buffer, FIRST_ROOM)
                } else {
                    let buffer = channel.buffer(self.fragments);
                    (buffer, self.fragments.range(nth, receive.len).len())
                };
                let (route, key) = (channel.route(receive.peer)?, Key::Received { from, nth });
                if let Err(failure) = channel.requests.receive(route.process, route.receive, buffer, len, key) {
                    end(&mut self.ended, receive.peer, End::Broken(failure));
                    return Ok(moved);
                }
                receive.begun += 1;
                moved = true;
            }
        }
        Ok(moved)
    }

    /// Takes completed messages from MPI; true if there were any.
    fn complete(&mut self, channel: &mut Channel) -> Result<bool> {
        let mut completed = std::mem::take(&mut self.completed);
        if let Err(failure) = channel.requests.poll(&mut completed) {
            let peer = self.waiting_for().first().copied().unwrap_or_default();
            end(&mut self.ended, peer, End::Broken(failure));
        }
        let moved = !completed.is_empty();
        for Completed { key, buffer, len } in completed.drain(..) {
            match (key, len) {
                (Key::Sent(nth), Ok(_)) => {
                    self.sending[nth].under_way -= 1;
                    channel.recycle(self.fragments, buffer);
                }
                (Key::Received { from, nth }, Ok(len)) => self.arrived(channel, (from, nth), buffer, len)?,
                (Key::Sent(nth), Err(failure)) => end(&mut self.ended, self.sending[nth].peer, End::Broken(failure)),
                (Key::Received { from, .. }, Err(failure)) => {
                    end(&mut self.ended, self.receiving[from].peer, End::Broken(failure));
                }
            }
        }
        self.completed = completed;
        Ok(moved)
    }

    /// Handles fragment `nth` of the frame `receiving[from]`: the first `len` bytes of `buffer`.
    fn arrived(
        &mut self,
        channel: &mut Channel,
        (from, nth): (usize, usize),
        buffer: Vec<u8>,
        len: usize,
    ) -> Result<()> {
        let receive = &mut self.receiving[from];
        let peer = receive.peer;
        let mut skip = 0;
        if nth == 0 {
            if buffer[..len] == *CLOSING {
                channel.closed[peer] = true;
                end(&mut self.ended, peer, End::Closed);
                return Ok(());
            }
            let (header_bytes, weight) = read_header(self.call, peer, &buffer[..len], receive.len)?;
            receive.weight = Some(weight);
            skip = header_bytes;
        }
        let range = self.fragments.range(nth, receive.len);
        if len != skip + range.len() {
            let message = format!("a message of {len} bytes, expected {}", skip + range.len());
            return Err(wrong(self.call, peer, message));
        }
        match &mut receive.room {
            Some(room) => {
                room[range].copy_from_slice(&buffer[skip..len]);
                receive.taken += 1;
                channel.recycle(self.fragments, buffer);
            }
            None => receive.waiting[nth % WINDOW] = Some(Waiting { buffer, skip }),
        }
        Ok(())
    }

    /// Passes the next fragment of all peers to `take`, if it has come from all.
    fn hand_over(&mut self, channel: &mut Channel, take: &mut dyn FnMut(Piece<'_>)) -> bool {
        let (next, len) = self.receiving.first().map_or((0, 0), |receive| (receive.taken, receive.len));
        if self.receiving.is_empty() || next == self.fragments.count(len) {
            return false;
        }
        let range = self.fragments.range(next, len);
        let waiting = self.receiving.iter().map(|receive| receive.waiting[next % WINDOW].as_ref());
        let Some(rows) = waiting
            .map(|part| part.and_then(|part| part.buffer.get(part.skip..part.skip + range.len())))
            .collect::<Option<Vec<&[u8]>>>()
        else {
            return false;
        };
        let mut weights = vec![self.call.weight; channel.routes.len()];
        self.receiving.iter().for_each(|receive| weights[receive.peer] = receive.weight());
        take(Piece { start: range.start, rows: &rows, weights: &weights });
        for receive in self.receiving.iter_mut() {
            receive.taken += 1;
            if let Some(waiting) = receive.waiting[next % WINDOW].take() {
                channel.recycle(self.fragments, waiting.buffer);
            }
        }
        true
    }

    /// Pauses after a poll that moved nothing. Fails if the exchange cannot end any more.
    fn wait(&mut self, channel: &mut Channel) -> Result<()> {
        self.membership.check()?;
        let needed = self.needed();
        if matches!(&self.ended, Some((peer, _, End::Left)) if !needed.contains(peer)) {
            self.ended = None; // All that is needed from it has come.
        }
        let has_left = |peer: &usize| self.membership.has_left(self.call.world_rank(*peer));
        if let Some(peer) = needed.into_iter().find(has_left) {
            end(&mut self.ended, peer, End::Left);
        }
        if let Some((peer, since, cause)) = &self.ended {
            let rank = self.call.world_rank(*peer);
            let explained = match cause {
                End::Closed => self.membership.has_left(rank),
                End::Broken(failure) => *failure == Failure::Finalized,
                End::Left => false,
            };
            if explained || since.elapsed() >= GRACE {
                return Err(match cause {
                    End::Closed | End::Left => self.membership.left_error(rank),
                    End::Broken(failure @ Failure::Finalized) => own_failure(self.membership, failure),
                    End::Broken(failure) => self.membership.lost_error(rank, format!("MPI cannot reach it: {failure}")),
                });
            }
        }
        let waiting_for = self.waiting_for();
        self.watch.look(&waiting_for)?;
        channel.pause.wait();
        Ok(())
    }

    /// Peers whose next fragment has not come. If there are none, the peers that do not take this rank's frames; these
    /// may otherwise be waiting for the same ranks.
    fn waiting_for(&self) -> Vec<usize> {
        let has_next = |receive: &Receiving<'_>| receive.waiting[receive.taken % WINDOW].is_some();
        let missing =
            self.receiving.iter().filter(|receive| !receive.is_complete(self.fragments) && !has_next(receive));
        let missing: Vec<usize> = missing.map(|receive| receive.peer).collect();
        if missing.is_empty() { self.needed() } else { sorted(missing) }
    }

    /// Peers without which this exchange cannot end.
    fn needed(&self) -> Vec<usize> {
        let sending = self.sending.iter().filter(|send| !send.is_out(self.fragments)).map(|send| send.peer);
        let missing = self.receiving.iter().filter(|receive| !receive.is_complete(self.fragments));
        sorted(sending.chain(missing.map(|receive| receive.peer)).collect())
    }
}

fn sorted(mut peers: Vec<usize>) -> Vec<usize> {
    peers.sort_unstable();
    peers.dedup();
    peers
}

/// Length in bytes of the header at the beginning of `message`, and the weight in it.
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
