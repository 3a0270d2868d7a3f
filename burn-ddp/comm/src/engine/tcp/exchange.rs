//! One exchange of frames with all peers at once.

use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags};

use super::group_links::GroupLinks;
use super::link::{End, Link, ReadError, Receiving, Sending};
use super::spin::Spin;
use crate::call::Call;
use crate::engine::Piece;
use crate::membership::{Membership, Watch};
use crate::net::wait::{Waker, wait};
use crate::{Error, Result};

/// Time after the end of a data connection within which the control connections may still report why.
pub(super) const GRACE: Duration = Duration::from_secs(1);

/// Bytes of all peers' pieces together: pieces are reduced while they are in the second cache level.
const PIECES_BYTES: usize = 512 * 1024;

/// Smallest piece: smaller ones would cost more in system calls than their place in the cache saves.
const MIN_PIECE_BYTES: usize = 64 * 1024;

/// Bytes of one peer's piece if there are `peers` of them: whole elements of any type.
pub(super) fn piece_bytes(peers: usize) -> usize {
    (PIECES_BYTES / peers.max(2)).max(MIN_PIECE_BYTES) / 64 * 64
}

/// A peer whose connection ended too early, when, and how. Remembered, since a connection reports its end only once.
pub(super) type Ended = (usize, Instant, End);

/// One exchange under way.
pub(super) struct Exchange<'a, 's, 'r> {
    pub(super) call: &'a Call,
    pub(super) membership: &'a Membership,
    pub(super) waker: &'a Waker,
    /// Frames written, and still to be written, with their receivers.
    pub(super) sending: &'a mut [(usize, Sending<'s>)],
    /// Frames read, and still to be read.
    pub(super) receiving: &'a mut [Receiving<'r>],
    /// Number of frames, from the front of `sending` and of `receiving`, that must be complete before the exchange
    /// returns.
    pub(super) needed: (usize, usize),
    /// Early ends of connections, in order.
    pub(super) ended: &'a mut Vec<Ended>,
    pub(super) watch: Watch<'a>,
}

impl Exchange<'_, '_, '_> {
    /// Writes and reads frames until the needed ones are complete and nothing more moves without a wait. `take`, if
    /// given, gets a piece of all payloads whenever every frame has filled its room.
    pub(super) fn run(
        mut self,
        links: &mut GroupLinks,
        spin: &mut Spin,
        mut take: Option<&mut dyn FnMut(Piece<'_>)>,
    ) -> Result<()> {
        unblock(links);
        loop {
            let mut moved = self.progress(links)?;
            if let Some(taking) = &mut take
                && self.receiving.iter().all(|receive| receive.has_begun() && !receive.wants())
            {
                self.hand_over(links.count(), taking);
                self.receiving.iter_mut().for_each(Receiving::advance);
                if self.receiving.iter().all(Receiving::is_complete) {
                    take = None;
                }
                moved = true;
            }
            if moved {
                continue;
            }
            if take.is_none() && self.is_through() {
                return Ok(());
            }
            // No spin once a frame has begun: its sender is busy, and so may be the kernel on its behalf.
            let is_short =
                self.sending.iter().all(|(_, send)| send.is_out()) && !self.receiving.iter().any(Receiving::has_begun);
            if !(is_short && self.ended.is_empty() && spin.until(|| self.look_again(links))?) {
                self.wait(links)?;
            }
        }
    }

    fn is_through(&self) -> bool {
        self.sending[..self.needed.0].iter().all(|(_, send)| send.is_out())
            && self.receiving[..self.needed.1].iter().all(Receiving::is_complete)
    }

    fn look_again(&mut self, links: &mut GroupLinks) -> Result<bool> {
        unblock(links);
        self.progress(links)
    }

    fn hand_over(&self, count: usize, take: &mut dyn FnMut(Piece<'_>)) {
        let mut weights = vec![self.call.weight; count];
        self.receiving.iter().for_each(|receive| weights[receive.peer()] = receive.weight());
        let rows: Vec<&[u8]> = self.receiving.iter().map(Receiving::piece).collect();
        let start = self.receiving.first().map_or(0, Receiving::begin);
        take(Piece { start, rows: &rows, weights: &weights });
    }

    /// Writes and reads what can be moved now; true if anything moved. Frames of peers that are not connected yet stay.
    fn progress(&mut self, links: &mut GroupLinks) -> Result<bool> {
        let Self { call, sending, receiving, ended, .. } = self;
        let arrived = links.take_arrived(call)?;
        let mut moved = !arrived.is_empty();
        // A peer that seemed to be gone had connected before it closed the group.
        ended.retain(|(peer, ..)| !arrived.contains(peer));
        let mut end = |peer: usize, cause: End| ended.push((peer, Instant::now(), cause));
        for nth in 0..sending.len() {
            let has_turn = sending[nth].1.before().is_none_or(|before| sending[before].1.is_out());
            let (peer, send) = &mut sending[nth];
            if send.is_out() || !has_turn {
                continue;
            }
            let Some(link) = links.get_or_await(*peer)? else { continue };
            match link.write(send) {
                Ok(wrote) => moved |= wrote,
                Err(cause) => end(*peer, cause),
            }
        }
        for nth in 0..receiving.len() {
            let has_turn = receiving[nth].before().is_none_or(|before| receiving[before].is_complete());
            let receive = &mut receiving[nth];
            if !receive.wants() || !has_turn {
                continue;
            }
            let peer = receive.peer();
            let Some(link) = links.get_or_await(peer)? else { continue };
            match link.read(receive) {
                Ok(read) => moved |= read,
                Err(ReadError::Ended(cause)) => end(peer, cause),
                Err(ReadError::Wrong(error)) => return Err(*error),
            }
        }
        Ok(moved)
    }

    /// Waits until something can be written or read; ends by an error if nothing more will come.
    fn wait(&mut self, links: &mut GroupLinks) -> Result<()> {
        // Once a connection has ended, only the reason is missing, and the membership may know it already.
        if !self.ended.is_empty() {
            self.explain()?;
        }
        if self.ended.is_empty()
            && let Some(peer) = links.find_gone(self.call)
        {
            self.ended.push((peer, Instant::now(), End::Closed));
            // The peer may have connected, sent its frames and closed: `progress` takes what has arrived by now.
            return Ok(());
        }
        let mut interest = vec![PollFlags::empty(); links.count()];
        for (peer, _) in self.sending.iter().filter(|(_, send)| !send.is_out()) {
            interest[*peer] |= PollFlags::OUT;
        }
        for receive in self.receiving.iter().filter(|receive| receive.wants()) {
            interest[receive.peer()] |= PollFlags::IN;
        }
        let question = links.next_question();
        let mut fds = vec![PollFd::new(self.waker, PollFlags::IN)];
        let mut polled = Vec::with_capacity(links.count());
        for (peer, (link, interest)) in links.all().iter().zip(interest).enumerate() {
            for fd in link.iter().flat_map(|link| link.polled(interest)) {
                fds.push(fd);
                polled.push(peer);
            }
        }
        let first_ended = self.ended.first();
        let grace_end = first_ended.map(|(_, at, _)| *at + GRACE);
        if grace_end.is_some_and(|at| Instant::now() >= at)
            && let Some((peer, _, cause)) = first_ended
        {
            return Err(self.unexplained(*peer, cause));
        }
        let waiting_for = self.waiting_for();
        let until = self.watch.look(&waiting_for)?;
        let until = grace_end.or(question).map_or(until, |at| at.min(until));
        wait(&mut fds, Some(until)).map_err(|e| Error::Internal { message: format!("poll: {e}") })?;
        let is_ready = |fd: &PollFd<'_>| !fd.revents().is_empty();
        let rung = fds.first().is_some_and(is_ready);
        let ready: Vec<bool> = fds.iter().skip(1).map(is_ready).collect();
        for (peer, _) in polled.into_iter().zip(ready).filter(|(_, ready)| *ready) {
            links.get(peer).into_iter().for_each(Link::unblock);
        }
        if rung {
            self.waker.clear();
            self.explain()?;
        }
        Ok(())
    }

    fn waiting_for(&self) -> Vec<usize> {
        let sending = self.sending[..self.needed.0].iter().filter(|(_, send)| !send.is_out()).map(|(peer, _)| *peer);
        let missing = self.receiving[..self.needed.1].iter().filter(|receive| !receive.is_complete());
        let mut waiting: Vec<usize> = sending.chain(missing.map(Receiving::peer)).collect();
        waiting.sort_unstable();
        waiting.dedup();
        waiting
    }

    /// Fails if the world has ended, or a peer with an ended connection has left it.
    fn explain(&self) -> Result<()> {
        self.membership.check()?;
        let mut ended = self.ended.iter().map(|(peer, ..)| self.call.world_rank(*peer));
        match ended.find(|rank| self.membership.has_left(*rank)) {
            Some(rank) => Err(self.membership.left_error(rank)),
            None => Ok(()),
        }
    }

    /// The error for a connection that ended although its rank neither died nor left the world.
    fn unexplained(&self, peer: usize, end: &End) -> Error {
        let peer = self.call.world_rank(peer);
        match end {
            End::Closed => self.membership.left_error(peer),
            End::Broken(cause) => self.membership.lost_error(peer, format!("its data connection broke: {cause}")),
        }
    }
}

fn unblock(links: &mut GroupLinks) {
    links.all().iter_mut().flatten().for_each(Link::unblock);
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::thread;

    use super::super::connector::tests::{barrier, connector};
    use super::*;
    use crate::auth::handshake::{Purpose, agreed};
    use crate::auth::secure_stream::SecureStream;

    /// Outcome of an exchange in which rank 0 receives from ranks 1 and 2 of three, where rank 1 seemed to be gone;
    /// `meanwhile` gets a function that connects a rank to rank 0.
    fn receive(awaits: bool, meanwhile: impl FnOnce(&dyn Fn(u32) -> SecureStream) + Send) -> Result<()> {
        let connector = connector(0, &[([127, 0, 0, 1], 9).into(); 3]);
        let (membership, board) = (connector.membership.clone(), connector.reach.links.clone());
        let (call, waker) = (barrier(0, 3), Arc::new(Waker::new().unwrap()));
        let mut links = GroupLinks::new(connector, 7, 3, &waker);
        if awaits {
            links.connect(&call, 1..3).unwrap();
        }
        let connect = move |rank: u32| {
            let [listener, client] = SecureStream::pair(agreed()).unwrap();
            board.put(Purpose::Data { rank, group: 7, flow: 0, opened: false }, listener);
            client
        };
        thread::scope(|scope| {
            scope.spawn(move || meanwhile(&connect));
            let mut receiving = [1, 2].map(|peer| Receiving::new(peer, &call, 0, &mut []));
            let ended = &mut vec![(1, Instant::now(), End::Closed)];
            let (membership, watch) = (&*membership, Watch::new(&membership, &call));
            let (waker, receiving) = (&*waker, &mut receiving);
            let needed = (0, 2);
            let exchange =
                Exchange { call: &call, membership, waker, sending: &mut [], receiving, needed, ended, watch };
            exchange.run(&mut links, &mut Spin::new(membership), None)
        })
    }

    #[test]
    fn the_end_of_a_connection_is_remembered_while_another_peer_is_thought_to_be_gone() {
        let begin = Instant::now();
        let error = receive(true, |connect| {
            let second = connect(2);
            second.socket().send(b"a header's first bytes").unwrap();
            drop(second);
            thread::sleep(GRACE / 4);
            // Rank 1 was not gone, only late, and stays.
            let _connection = connect(1);
            thread::sleep(2 * GRACE);
        });
        let error = error.unwrap_err();
        assert_eq!(error.rank(), Some(2), "{error}");
        assert!(begin.elapsed() < 20 * GRACE, "{:?}", begin.elapsed());
    }

    #[test]
    fn a_frame_of_a_peer_that_is_not_connected_to_is_an_error_at_once() {
        let error = receive(false, |_| {}).unwrap_err();
        assert!(matches!(&error, Error::Internal { message } if message.contains("rank 1 of a group")), "{error}");
    }
}
