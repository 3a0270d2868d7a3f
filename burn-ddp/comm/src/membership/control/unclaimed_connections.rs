//! Accepted connections, from the end of their handshake until a thread of the rank claims them.

use std::collections::{HashMap, HashSet};
use std::sync::{Condvar, Mutex, Weak};
use std::time::Instant;

use rustix::io::Errno;
use rustix::net::{RecvFlags, recv};

use crate::auth::handshake::Purpose;
use crate::auth::secure_stream::SecureStream;
use crate::membership::Wake;
use crate::net::wait::Waker;
use crate::poison_free_locks::{lock, wait_timeout};
use crate::{Error, Result};

/// Most connections that wait. They are few: peers connect for groups that this rank is about to make.
const WAITING_CAP: usize = 16 * 1024;

/// Connections that the monitor accepted and that wait to be claimed.
#[derive(Debug)]
pub(crate) struct Links {
    rank: usize,
    world_size: usize,
    board: Mutex<Board>,
    /// Notified when a connection arrives, and when the membership changes.
    changed: Condvar,
}

#[derive(Debug, Default)]
struct Board {
    /// Connections that are not claimed yet. Added by the monitor, removed by the threads that claim them.
    waiting: HashMap<Purpose, SecureStream>,
    /// Purposes of all connections that arrived, until they are forgotten: none may arrive twice.
    known: HashSet<Purpose>,
    /// Groups that are open on this rank, each with the waker to call when a connection for it arrives.
    open_groups: HashMap<u64, Weak<Waker>>,
    /// True once this rank has said goodbye: it opens no more groups.
    left: bool,
    closed: bool,
    /// Reason that no connection will come, from a failure before the membership exists.
    fault: Option<String>,
}

impl Board {
    /// True if this rank has closed the group of the connection. Such a connection is accepted and dropped, by which
    /// the client learns that the group is closed here. No record of closed groups is needed: the client says
    /// (`opened`) that all ranks had opened the group, so one that is not open is closed.
    fn is_of_closed_group(&self, purpose: Purpose) -> bool {
        matches!(purpose, Purpose::Data { group, opened: true, .. } if !self.open_groups.contains_key(&group))
    }

    /// True if no thread of this rank will claim the connection. Such a connection is accepted and dropped, upon which
    /// the client checks whether this rank has left.
    fn is_unwanted(&self, purpose: Purpose) -> bool {
        let is_open = |group| self.open_groups.contains_key(&group);
        self.is_of_closed_group(purpose)
            || matches!(purpose, Purpose::Data { group, .. } if self.left && !is_open(group))
    }

    /// Forgets the connection for `purpose` if it is unclaimed and has ended: its client gave up in the handshake, and
    /// connects again.
    fn forget_ended(&mut self, purpose: Purpose) {
        if self.waiting.get(&purpose).is_some_and(has_ended) {
            self.waiting.remove(&purpose);
            self.known.remove(&purpose);
        }
    }
}

/// Number of bytes that a peer has sent and that are not read yet, at most 1. Leaves them there.
fn peek(stream: &SecureStream) -> std::result::Result<usize, Errno> {
    recv(stream.socket(), &mut [0; 1], RecvFlags::PEEK | RecvFlags::DONTWAIT).map(|(_, bytes)| bytes)
}

/// True if the connection is closed or broken, with no bytes left to read. The kernel reports a break only once.
fn has_ended(stream: &SecureStream) -> bool {
    match peek(stream) {
        Ok(bytes) => bytes == 0,
        Err(e) => e != Errno::AGAIN && e != Errno::INTR,
    }
}

/// True if the peer has sent bytes, which can be read even if it has closed the connection since.
fn has_bytes(stream: &SecureStream) -> bool {
    peek(stream).is_ok_and(|bytes| bytes > 0)
}

impl Links {
    pub(crate) fn new(rank: usize, world_size: usize) -> Self {
        Self { rank, world_size, board: Mutex::default(), changed: Condvar::new() }
    }

    /// Checks that a connection for `purpose` may be accepted.
    ///
    /// # Errors
    /// The reason, for the client, if not.
    pub(crate) fn admit(&self, purpose: Purpose) -> Result<(), String> {
        let (Purpose::Control { rank } | Purpose::Data { rank, .. }) = purpose else {
            return Err("this is a rank, not the store".to_owned());
        };
        let (me, size) = (self.rank, self.world_size);
        let mut board = lock(&self.board);
        // The higher of two ranks connects. A lower one only asks by a connection whether the group is closed.
        let least = if board.is_of_closed_group(purpose) { 0 } else { me + 1 };
        if !(least..size).contains(&(rank as usize)) {
            return Err(format!("rank {me} of {size} expects no connection from rank {rank}"));
        }
        let purpose = purpose.whenever();
        board.forget_ended(purpose);
        if board.closed {
            return Err(format!("rank {me} has left"));
        }
        if board.known.contains(&purpose) {
            return Err(format!("rank {rank} is already connected to rank {me}: is it running twice?"));
        }
        if board.waiting.len() >= WAITING_CAP {
            return Err(format!("too many connections wait for rank {me}"));
        }
        Ok(())
    }

    /// Takes the control connections, each with the rank at its other end.
    pub(super) fn take_control(&self) -> Vec<(usize, SecureStream)> {
        let is_control = |purpose: &Purpose, _: &mut SecureStream| matches!(purpose, Purpose::Control { .. });
        let taken = lock(&self.board).waiting.extract_if(is_control).collect::<Vec<_>>();
        let with_rank = |(purpose, stream)| match purpose {
            Purpose::Control { rank } => Some((rank as usize, stream)),
            _ => None,
        };
        taken.into_iter().filter_map(with_rank).collect()
    }

    /// Adds an accepted connection, to be claimed.
    pub(crate) fn put(&self, purpose: Purpose, stream: SecureStream) {
        let mut board = lock(&self.board);
        if !board.closed && !board.is_unwanted(purpose) && board.known.insert(purpose.whenever()) {
            board.waiting.insert(purpose.whenever(), stream);
            self.changed.notify_all();
            if let Purpose::Data { group, .. } = purpose
                && let Some(waker) = board.open_groups.get(&group).and_then(Weak::upgrade)
            {
                waker.wake();
            }
        }
    }

    /// Waits for the connection for `purpose`, [whenever](Purpose::whenever) it was made; `None` at the deadline.
    /// `check` is called after each change of the membership; its error ends the wait.
    pub(crate) fn claim(
        &self,
        purpose: Purpose,
        deadline: Instant,
        check: impl Fn() -> Result<()>,
    ) -> Result<Option<SecureStream>> {
        let purpose = purpose.whenever();
        self.wait(deadline, |board| {
            board.forget_ended(purpose);
            match board.waiting.remove(&purpose) {
                Some(stream) => Ok(Some(stream)),
                None => check().map(|()| None),
            }
        })
    }

    /// The flows of a link, the first one first, if all of them have arrived.
    ///
    /// A peer sends its first bytes on the first flow, after all flows are made; it may have closed the link since. If
    /// a flow has ended and there are no such bytes, the peer gave the flow up in its handshake, and makes it again.
    pub(crate) fn take_all(&self, flows: &[Purpose]) -> Option<Vec<SecureStream>> {
        let mut board = lock(&self.board);
        let flows: Vec<_> = flows.iter().map(|flow| flow.whenever()).collect();
        let waiting: Vec<_> = flows.iter().map(|flow| board.waiting.get(flow)).collect::<Option<_>>()?;
        if waiting.iter().any(|stream| has_ended(stream)) && !waiting.first().is_some_and(|first| has_bytes(first)) {
            return None;
        }
        Some(flows.iter().filter_map(|flow| board.waiting.remove(flow)).collect())
    }

    /// Waits for an error of `check`, which is called after each change of the membership; `Ok` at the deadline.
    pub(crate) fn watch(&self, deadline: Instant, check: impl Fn() -> Result<()>) -> Result<()> {
        self.wait(deadline, |_| check().map(|()| None::<()>)).map(drop)
    }

    /// Waits until `look`, which is called at each change of the board, returns something; `None` at the deadline.
    fn wait<T>(&self, deadline: Instant, mut look: impl FnMut(&mut Board) -> Result<Option<T>>) -> Result<Option<T>> {
        let mut board = lock(&self.board);
        loop {
            if let Some(found) = look(&mut board)? {
                return Ok(Some(found));
            }
            if let Some(fault) = &board.fault {
                return Err(Error::environment(format!("rank {} cannot go on: {fault}", self.rank)));
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Ok(None);
            }
            board = wait_timeout(&self.changed, board, left);
        }
    }

    /// Lets `rank` make its control connection anew.
    pub(super) fn forget_control(&self, rank: usize) {
        lock(&self.board).known.remove(&Purpose::Control { rank: rank as u32 });
    }

    /// Notes that `group` is open on this rank. Wakes `waker` when a connection for the group arrives.
    pub(crate) fn open_group(&self, group: u64, waker: Weak<Waker>) {
        lock(&self.board).open_groups.insert(group, waker);
    }

    /// Notes that `group` is closed on this rank. Closes its connections that are not claimed, or that arrive later.
    pub(crate) fn close_group(&self, group: u64) {
        let of_another = |purpose: &Purpose| !matches!(purpose, Purpose::Data { group: other, .. } if *other == group);
        let mut board = lock(&self.board);
        board.open_groups.remove(&group);
        board.known.retain(of_another);
        board.waiting.retain(|purpose, _| of_another(purpose));
    }

    /// Notes that this rank has said goodbye. Closes connections for groups that are not open here, also later ones.
    pub(super) fn leave(&self) {
        let mut board = lock(&self.board);
        board.left = true;
        let waiting = std::mem::take(&mut board.waiting);
        let wanted = waiting.into_iter().filter(|(purpose, _)| !board.is_unwanted(*purpose)).collect();
        board.waiting = wanted;
    }

    /// Ends the waits because of `fault`.
    pub(crate) fn fail(&self, fault: String) {
        lock(&self.board).fault.get_or_insert(fault);
        self.changed.notify_all();
    }

    pub(crate) fn world_size(&self) -> usize {
        self.world_size
    }

    /// Closes the connections that wait, and admits no more.
    pub(crate) fn close(&self) {
        let mut board = lock(&self.board);
        board.closed = true;
        board.waiting.clear();
    }
}

impl Wake for Links {
    fn wake(&self) {
        // A claiming thread holds this lock from its check until it waits, so the notification cannot get lost between.
        let _board = lock(&self.board);
        self.changed.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::auth::handshake::agreed;

    #[test]
    fn a_lower_rank_is_answered_only_about_a_closed_group() {
        let links = Links::new(1, 3);
        let waker = Waker::new().unwrap().into();
        [7, 8].iter().for_each(|group| links.open_group(*group, std::sync::Arc::downgrade(&waker)));
        links.close_group(7);
        // A lower rank, a higher one, and one outside of the world.
        let admitted =
            |group, opened| [0, 2, 3].map(|rank| links.admit(Purpose::Data { rank, group, flow: 0, opened }).is_ok());
        assert_eq!(admitted(7, true), [true, true, false]);
        assert_eq!(admitted(8, true), [false, true, false]);
        // A group that other ranks are opening will be opened on this rank, too.
        assert_eq!(admitted(9, false), [false, true, false]);
        assert!(links.admit(Purpose::Control { rank: 0 }).is_err());
    }

    #[test]
    fn a_connection_is_claimed_whenever_it_was_made() {
        let links = Links::new(0, 2);
        let flow = |group, opened| Purpose::Data { rank: 1, group, flow: 0, opened };
        let waker = Waker::new().unwrap().into();
        for (group, made, claimed) in [(7, false, true), (8, true, false), (9, true, true)] {
            links.open_group(group, std::sync::Arc::downgrade(&waker));
            let [listener, _client] = SecureStream::pair(agreed()).unwrap();
            links.put(flow(group, made), listener);
            let now = Instant::now();
            assert!(links.claim(flow(group, claimed), now, || Ok(())).unwrap().is_some(), "group {group}");
            let [again, _client] = SecureStream::pair(agreed()).unwrap();
            links.close_group(group);
            links.open_group(group, std::sync::Arc::downgrade(&waker));
            links.put(flow(group, made), again);
            assert!(links.take_all(&[flow(group, claimed)]).is_some(), "group {group}");
        }
    }

    #[test]
    fn a_client_whose_connection_was_reset_may_come_again() {
        let (links, purpose) = (Links::new(0, 2), Purpose::Data { rank: 1, group: 7, flow: 0, opened: false });
        let [listener, client] = SecureStream::pair(agreed()).unwrap();
        // Bytes that the client leaves unread reset the connection.
        listener.socket().send(b"welcome").unwrap();
        drop(client);
        links.put(purpose, listener);
        assert_eq!(links.admit(purpose), Ok(()));
    }

    #[test]
    fn a_link_that_was_used_and_closed_is_taken_and_one_that_was_given_up_is_not() {
        let links = Links::new(0, 2);
        let flows = |group| [0, 1].map(|flow| Purpose::Data { rank: 1, group, flow, opened: false });
        let clients = |group| {
            flows(group).map(|flow| {
                let [listener, client] = SecureStream::pair(agreed()).unwrap();
                links.put(flow, listener);
                client
            })
        };
        // A small message uses only the first flow.
        let [first, second] = clients(7);
        first.socket().send(b"x").unwrap();
        drop((first, second));
        assert_eq!(links.take_all(&flows(7)).map(|taken| taken.len()), Some(2));

        let [_first, second] = clients(8);
        drop(second);
        assert!(links.take_all(&flows(8)).is_none());
        assert_eq!(links.admit(flows(8)[1]), Ok(()));
    }

    #[test]
    fn closed_groups_leave_nothing_behind() {
        let links = Links::new(0, 2);
        let waker = Waker::new().unwrap().into();
        let connection = |group, opened| {
            let [listener, client] = SecureStream::pair(agreed()).unwrap();
            links.put(Purpose::Data { rank: 1, group, flow: 0, opened }, listener);
            client
        };
        // One group stays open, as the first group of a job does.
        for group in 0..10_001 {
            links.open_group(group, std::sync::Arc::downgrade(&waker));
            // Only one group in a thousand gets connections, since their handshakes take time.
            let early = (group % 1000 == 1).then(|| connection(group, false));
            if group > 0 {
                links.close_group(group);
            }
            if let Some(early) = early {
                let late = connection(group, true);
                assert!(has_ended(&early) && has_ended(&late), "closed, and dropped");
            }
        }
        let board = lock(&links.board);
        let left = (board.open_groups.len(), board.known.len(), board.waiting.len());
        assert_eq!(left, (1, 0, 0));
        assert!(board.open_groups.capacity() < 100);
    }
}
