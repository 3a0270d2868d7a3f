//! Accepted connections, from their welcome until they are claimed.

use std::collections::{HashMap, HashSet};
use std::sync::{Condvar, Mutex};
use std::time::Instant;

use rustix::net::{RecvFlags, recv};

use crate::auth::handshake::Purpose;
use crate::auth::secure_stream::SecureStream;
use crate::membership::Wake;
use crate::poison_free_locks::{lock, wait_timeout};
use crate::{Error, Result};

/// Most connections that wait. Peers connect for groups that this rank is about to make, so they are few.
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
    /// Added by the monitor, removed by `claim`.
    waiting: HashMap<Purpose, SecureStream>,
    /// All that ever arrived: none may arrive twice.
    known: HashSet<Purpose>,
    closed: bool,
    /// Reason that no connection will come, before there is a membership to say so.
    fault: Option<String>,
}

impl Board {
    /// Forgets the connection for `purpose` if it waits and has ended: its client gave up in the handshake, and comes
    /// again.
    fn forget_ended(&mut self, purpose: Purpose) {
        if self.waiting.get(&purpose).is_some_and(has_ended) {
            self.waiting.remove(&purpose);
            self.known.remove(&purpose);
        }
    }
}

/// True if the peer has closed a connection over which it has sent nothing.
fn has_ended(stream: &SecureStream) -> bool {
    let peek = RecvFlags::PEEK | RecvFlags::DONTWAIT;
    matches!(recv(stream.socket(), &mut [0; 1], peek), Ok((_, 0)))
}

impl Links {
    pub(crate) fn new(rank: usize, world_size: usize) -> Self {
        Self { rank, world_size, board: Mutex::default(), changed: Condvar::new() }
    }

    /// Checks that a connection for `purpose` may be welcomed.
    ///
    /// # Errors
    /// The answer if not.
    pub(crate) fn admit(&self, purpose: Purpose) -> Result<(), String> {
        let (Purpose::Control { rank } | Purpose::Data { rank, .. }) = purpose else {
            return Err("this is a rank, not the store".to_owned());
        };
        let (me, size) = (self.rank, self.world_size);
        // The higher of two ranks connects.
        if rank as usize <= me || rank as usize >= size {
            return Err(format!("rank {me} of {size} expects no connection from rank {rank}"));
        }
        let mut board = lock(&self.board);
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

    /// Adds a welcomed connection, to be claimed.
    pub(crate) fn put(&self, purpose: Purpose, stream: SecureStream) {
        let mut board = lock(&self.board);
        if !board.closed && board.known.insert(purpose) {
            board.waiting.insert(purpose, stream);
            self.changed.notify_all();
        }
    }

    /// Waits for the connection for `purpose`; `None` at the deadline. `check` is called after each change of the
    /// membership; its error ends the wait.
    pub(crate) fn claim(
        &self,
        purpose: Purpose,
        deadline: Instant,
        check: impl Fn() -> Result<()>,
    ) -> Result<Option<SecureStream>> {
        self.wait(deadline, |board| {
            board.forget_ended(purpose);
            match board.waiting.remove(&purpose) {
                Some(stream) => Ok(Some(stream)),
                None => check().map(|()| None),
            }
        })
    }

    /// Waits for an error of `check`, which is called after each change of the membership; `Ok` at the deadline.
    pub(crate) fn watch(&self, deadline: Instant, check: impl Fn() -> Result<()>) -> Result<()> {
        self.wait(deadline, |_| check().map(|()| None::<()>)).map(drop)
    }

    /// Waits until `look` finds something on the board, which it sees at each change; `None` at the deadline.
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

    /// Forgets the connections for a group that is gone, and closes those that were not claimed.
    pub(crate) fn forget(&self, group: u64) {
        let of_another = |purpose: &Purpose| !matches!(purpose, Purpose::Data { group: other, .. } if *other == group);
        let mut board = lock(&self.board);
        board.known.retain(of_another);
        board.waiting.retain(|purpose, _| of_another(purpose));
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
        // Between a claimant's check and its wait the lock is held, so this cannot slip in between.
        let _board = lock(&self.board);
        self.changed.notify_all();
    }
}
