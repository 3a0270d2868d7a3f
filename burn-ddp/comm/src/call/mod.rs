//! A call of a collective on one rank: its identity, its deadline, and its comparison with the calls of peers.
//!
//! Engines know the ranks of a group by their position in it, their *group ranks*. Errors show world ranks, and ranks
//! compare their calls by world ranks; a [`Call`] knows both.

use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::clock::Ticks;
use crate::frame::Header;
use crate::{Error, Result};

pub(crate) mod call_arguments;
mod call_signature;
mod call_site;
mod calling_thread;
mod collective_kind;
mod members;
pub(crate) mod users_call_site;

pub use call_signature::{CallInfo, GroupId, RankCall};
pub use call_site::CallSite;
pub use calling_thread::CallingThread;
pub use collective_kind::Collective;
pub use members::Members;
pub use users_call_site::attribute_calls;

/// A call under way on this rank.
#[derive(Clone, Debug)]
pub struct Call {
    /// Signature of the call, as this rank makes it.
    pub info: CallInfo,
    /// Receiving half of a `send_recv` with two other ranks: the group rank of the sender, and the signature that must
    /// fit the sender's call. `info` is then the sending half.
    pub receives: Option<Box<(usize, CallInfo)>>,
    /// This rank in the world.
    pub rank: usize,
    /// This rank's weight; 1 where weights have no meaning.
    pub weight: f64,
    /// Number of the exchange within this call: each exchange of a call has a number of its own.
    pub stage: u8,
    /// Time that the call may take.
    pub timeout: Duration,
    /// Time at which the call began.
    started: Ticks,
    /// Members of the group, and the members that the call waits for, which exchanges keep up to date.
    pub members: Arc<Members>,
}

impl Call {
    /// A call made now by the rank `rank` of the world.
    pub fn new(info: CallInfo, members: Arc<Members>, rank: usize, timeout: Duration) -> Call {
        Call { info, receives: None, rank, weight: 1.0, stage: 0, timeout, started: Ticks::now(), members }
    }

    /// Turns this into another call of the same rank and group, made now. The caller has set `info` already.
    pub(crate) fn renew(&mut self, weight: f64) {
        self.receives = None;
        self.weight = weight;
        self.stage = 0;
        self.started = Ticks::now();
    }

    /// Time at which the call began. Reads the clock.
    pub fn started(&self) -> Instant {
        self.started.instant()
    }

    /// Deadline of the call. Reads the clock.
    pub fn deadline(&self) -> Instant {
        after(self.started(), self.timeout)
    }

    pub(crate) fn started_ticks(&self) -> Ticks {
        self.started
    }

    /// A copy of this call for its next exchange.
    pub fn next_stage(&self) -> Call {
        Call { stage: self.stage + 1, ..self.clone() }
    }

    /// A copy of this call for the exchange with the number `stage`.
    pub(crate) fn at_stage(&self, stage: u8) -> Call {
        Call { stage, ..self.clone() }
    }

    /// A copy of this call among some of its members.
    pub(crate) fn among(&self, members: &Arc<Members>) -> Call {
        Call { members: members.clone(), ..self.clone() }
    }

    /// The half of a `send_recv` with two other ranks that concerns the peer at a group rank.
    pub(crate) fn half_for(&self, peer: usize) -> Call {
        Call { info: self.info_for(peer).clone(), receives: None, ..self.clone() }
    }

    /// The signature that the call of the peer at a group rank must fit.
    pub fn info_for(&self, peer: usize) -> &CallInfo {
        match self.receives.as_deref() {
            Some((from, info)) if *from == peer => info,
            _ => &self.info,
        }
    }

    /// This rank in the group.
    ///
    /// # Errors
    /// [`Error::Internal`] if this rank is not in the group.
    pub fn group_rank(&self) -> Result<usize> {
        let find = self.members.ranks().iter().position(|rank| *rank == self.rank);
        find.ok_or_else(|| Error::Internal {
            message: format!("rank {} calls {} without being in the group", self.rank, self.info),
        })
    }

    /// The world rank of a group rank.
    pub fn world_rank(&self, peer: usize) -> usize {
        self.members.world_rank(peer)
    }

    /// Notes that the exchange waits for the peer at a group rank.
    pub fn expect(&self, peer: usize) {
        self.members.expect(peer);
    }

    /// Notes that the part of the peer at a group rank has arrived.
    pub fn arrived(&self, peer: usize) {
        self.members.arrived(peer);
    }

    /// The header of this rank's next frame to the peer at a group rank.
    pub fn header(&self, peer: usize, payload_bytes: usize) -> Header {
        Header {
            info: self.info_for(peer).clone(),
            from: self.rank,
            stage: self.stage,
            weight: self.weight,
            payload_bytes: payload_bytes as u64,
        }
    }

    /// Checks that the call of the peer at a group rank fits this one.
    ///
    /// # Errors
    /// [`Error::Mismatch`], which shows both calls.
    pub fn check_info(&self, peer: usize, theirs: &CallInfo) -> Result<()> {
        let mine = self.info_for(peer);
        if mine.agrees(theirs) {
            return Ok(());
        }
        let peer = self.world_rank(peer);
        let mine = Box::new(RankCall { rank: self.rank, call: mine.clone() });
        let theirs = Box::new(RankCall { rank: peer, call: theirs.clone() });
        let (first, second) = if self.rank < peer { (mine, theirs) } else { (theirs, mine) };
        Err(Error::Mismatch { first, second })
    }

    /// Checks the header of a frame from the peer at a group rank, from which `payload_bytes` are expected.
    ///
    /// # Errors
    /// [`Error::Mismatch`] if the peer is in another call. [`Error::Protocol`] if it is in the same call, but the frame
    /// has another sender, stage or length than expected.
    pub fn check_header(&self, peer: usize, header: &Header, payload_bytes: usize) -> Result<()> {
        self.check_info(peer, &header.info)?;
        let expected = (self.world_rank(peer), self.stage, payload_bytes as u64);
        let got = (header.from, header.stage, header.payload_bytes);
        if expected != got {
            return Err(Error::Protocol {
                peer: expected.0,
                message: format!(
                    "a frame of rank {}, stage {}, {} bytes; expected rank {}, stage {}, {} bytes",
                    got.0, got.1, got.2, expected.0, expected.1, expected.2
                ),
                during: Some(Box::new(self.info_for(peer).clone())),
            });
        }
        Ok(())
    }

    /// The error if the deadline passes before the parts of the group ranks `waiting_for` have arrived.
    pub fn timed_out(&self, waiting_for: Vec<usize>) -> Error {
        Error::Timeout {
            reporter: self.rank,
            waiting_for: self.world_ranks(&waiting_for),
            culprit: None,
            timeout: self.timeout,
            call: Box::new(self.info.clone()),
            why: String::new(),
        }
    }

    /// The world ranks of group ranks, ascending.
    pub fn world_ranks(&self, peers: &[usize]) -> Vec<usize> {
        let mut ranks: Vec<usize> = peers.iter().map(|peer| self.world_rank(*peer)).collect();
        ranks.sort_unstable();
        ranks
    }
}

/// The end of `timeout`. One that `Instant` cannot express means "never", and becomes a century.
fn after(start: Instant, timeout: Duration) -> Instant {
    const CENTURY: Duration = Duration::from_secs(100 * 365 * 24 * 3600);
    start.checked_add(timeout).unwrap_or_else(|| start + CENTURY)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn call(ranks: &[usize], rank: usize) -> Call {
        let info = CallInfo::bare(Collective::Barrier, 1, 57, "src/main.rs:10:5");
        Call::new(info, Arc::new(Members::new(ranks)), rank, Duration::from_secs(1))
    }

    #[test]
    fn a_frame_of_another_stage_rank_or_size_is_refused() {
        let mine = call(&[0, 1, 2], 0);
        let theirs = Call { rank: 1, ..mine.clone() };
        assert_eq!(mine.check_header(1, &theirs.header(0, 40), 40), Ok(()));
        for result in [
            mine.check_header(1, &theirs.next_stage().header(0, 40), 40),
            mine.check_header(2, &theirs.header(0, 40), 40),
            mine.check_header(1, &theirs.header(0, 41), 40),
        ] {
            assert!(matches!(result, Err(Error::Protocol { .. })), "{result:?}");
        }
    }

    #[test]
    fn what_is_shown_are_ranks_of_the_world() {
        let mine = call(&[5, 3, 4], 5);
        let theirs = Call { rank: 3, ..mine.clone() };
        assert_eq!(mine.check_header(1, &theirs.header(0, 0), 0), Ok(()));
        let Error::Timeout { waiting_for, .. } = mine.timed_out(vec![1, 2]) else { panic!("no timeout") };
        assert_eq!(waiting_for, [3, 4]);
        let other = CallInfo { sequence: 58, ..theirs.info.clone() };
        let Err(Error::Mismatch { first, second }) = mine.check_info(1, &other) else { panic!("no mismatch") };
        assert_eq!((first.rank, second.rank), (3, 5));
    }

    #[test]
    fn both_halves_of_a_send_recv_are_compared() {
        let info = |collective, root| CallInfo { root: Some(root), ..CallInfo::bare(collective, 1, 0, "a.rs:1:1") };
        let receives = Some(Box::new((2, info(Collective::Recv, 2))));
        let mine = Call { info: info(Collective::Send, 1), receives, ..call(&[0, 1, 2], 0) };
        assert_eq!(mine.check_info(1, &info(Collective::Recv, 0)), Ok(()));
        assert_eq!(mine.check_info(2, &info(Collective::Send, 0)), Ok(()));
        assert!(mine.check_info(2, &info(Collective::Recv, 0)).is_err());
    }

    #[test]
    fn an_endless_timeout_does_not_overflow() {
        let members = Arc::new(Members::all(1));
        let info = CallInfo::bare(Collective::Barrier, 1, 0, "a.rs:1:1");
        let call = Call::new(info, members, 0, Duration::MAX);
        assert!(call.deadline() > Instant::now() + Duration::from_secs(1_000_000));
    }
}
