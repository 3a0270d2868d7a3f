//! Waits for what peers publish in their cells, spinning or yielding first, then asleep; and one rank's view of its
//! group's segment.

use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use rustix::thread::sched_getcpu;

use super::doorbell::publication;
use super::layout::Layout;
use super::rank_cell::{Cell, Pair};
use super::segment::Segment;
use crate::call::Call;
use crate::frame::{PREFIX_BYTES, Prefix};
use crate::membership::{Membership, Wake, Watch};
use crate::{Error, Result};

/// Looks before sleeping peers are woken: a sign that is due soon comes within them.
const FIRST_LOOKS: u32 = 300;
/// Time to spin, where there is a core for every rank and no missing peer shares this rank's core.
const SPIN: Duration = Duration::from_micros(100);
/// Looks for the awaited sign between two looks at the clock.
const LOOKS: u32 = 32;
/// Times to yield before sleeping, where a missing peer may need this rank's core.
const YIELDS: u32 = 8;
/// Number of long waits of which one sleeps at once, if a peer shares this rank's core though there is a core for every
/// rank: the kernel mainly looks for an idle core when it wakes a thread.
const SLEEP_EVERY: u32 = 64;
/// Number of long waits that sleep at once after a yield that took long: then the core went to another thread, for as
/// much as a time slice.
const SLEEPS_AFTER_SLOW_YIELD: u32 = 8;
/// A yield to a peer that has little to do is shorter.
const SLOW_YIELD: Duration = Duration::from_micros(100);
/// Time after a peer closed its side of the group within which the control connections may still report why.
const GRACE: Duration = Duration::from_secs(1);

/// A sign awaited from a peer.
pub(super) trait Sign {
    /// True if the sign of `peer` is there.
    fn is_there(&self, peer: usize) -> bool;

    /// Called once when it is there.
    fn arrived(&self, _peer: usize) -> Result<()> {
        Ok(())
    }

    /// Called now and then while it is missing. Fails if the peer is in another call, so that the sign will never come.
    fn instead(&self, _peer: usize) -> Result<()> {
        Ok(())
    }
}

impl<F: Fn(usize) -> bool> Sign for F {
    fn is_there(&self, peer: usize) -> bool {
        self(peer)
    }
}

/// One rank's view of its group. Ranks are group ranks, unless named world ranks.
pub(super) struct Board {
    segment: Arc<Segment>,
    layout: Layout,
    rank: usize,
    size: usize,
    /// All ranks but this one.
    peers: Vec<usize>,
    membership: Arc<Membership>,
    /// True if there is a core for every rank of this machine.
    spins: bool,
    /// Number of waits that took long.
    long_waits: AtomicU32,
    /// Number of the first of them that may yield on a core of its own again.
    yields_from: AtomicU32,
    /// Registered with the membership for as long as the board lives.
    _alarm: Arc<Alarm>,
}

/// Rings this rank's doorbell when the membership changes.
struct Alarm {
    segment: Arc<Segment>,
    cell: usize,
}

impl Wake for Alarm {
    fn wake(&self) {
        self.segment.at::<Cell>(self.cell).bell.ring();
    }
}

impl Board {
    pub(super) fn new(segment: Segment, size: usize, rank: usize, membership: Arc<Membership>, spins: bool) -> Board {
        let segment = Arc::new(segment);
        let layout = Layout::new(size);
        let alarm = Arc::new(Alarm { segment: segment.clone(), cell: layout.cell(rank) });
        let weak: Weak<dyn Wake> = Arc::downgrade(&alarm) as Weak<dyn Wake>;
        membership.add_waker(weak);
        let peers = (0..size).filter(|peer| *peer != rank).collect();
        let (long_waits, yields_from) = Default::default();
        Board { segment, layout, rank, size, peers, membership, spins, long_waits, yields_from, _alarm: alarm }
    }

    pub(super) fn rank(&self) -> usize {
        self.rank
    }

    pub(super) fn size(&self) -> usize {
        self.size
    }

    pub(super) fn peers(&self) -> &[usize] {
        &self.peers
    }

    pub(super) fn membership(&self) -> &Membership {
        &self.membership
    }

    pub(super) fn segment(&self) -> &Segment {
        &self.segment
    }

    pub(super) fn layout(&self) -> &Layout {
        &self.layout
    }

    pub(super) fn cell(&self, rank: usize) -> &Cell {
        self.segment.at(self.layout.cell(rank))
    }

    pub(super) fn mine(&self) -> &Cell {
        self.cell(self.rank)
    }

    /// The words of `from` for `to` alone.
    pub(super) fn pair(&self, from: usize, to: usize) -> &Pair {
        self.segment.at(self.layout.pair(from, to))
    }

    /// Wakes the peers that sleep for this rank, which has published something.
    pub(super) fn wake_sleepers(&self) {
        publication();
        let mut woken = false;
        for peer in &self.peers {
            woken |= self.cell(*peer).bell.wake_for(self.rank);
        }
        if woken {
            // The sleeper may have believed that this rank shares its core, and spins again if that is over.
            self.mine().bell.runs_on(sched_getcpu());
        }
    }

    /// True if one of `peers` last ran on the core of this rank: it can go on only when this rank leaves the core.
    fn shares_core(&self, peers: &[usize]) -> bool {
        let core = sched_getcpu();
        self.mine().bell.runs_on(core);
        peers.iter().any(|peer| self.cell(*peer).bell.last_ran_on(core))
    }

    /// Waits for `sign` of all `peers`; wakes the peers that sleep for what this rank has published before.
    #[inline]
    pub(super) fn wait(&self, call: &Call, peers: &[usize], sign: &impl Sign) -> Result<()> {
        let all_there = || peers.iter().all(|peer| sign.is_there(*peer));
        let looks = if self.spins { FIRST_LOOKS } else { 1 };
        let there = (0..looks).any(|_| all_there());
        self.wake_sleepers();
        if !there && !all_there() {
            return self.wait_long(call, peers, sign);
        }
        peers.iter().try_for_each(|peer| sign.arrived(*peer))
    }

    /// The wait that takes longer: it spins or yields, then sleeps; and watches deadline, membership and stalls.
    #[cold]
    fn wait_long(&self, call: &Call, peers: &[usize], sign: &impl Sign) -> Result<()> {
        let mut wait = Wait {
            board: self,
            call,
            missing: peers.to_vec(),
            watch: Watch::new(&self.membership, call),
            closed: Default::default(),
        };
        let spin_end = Instant::now() + SPIN;
        let mut yields = if self.may_yield() { YIELDS } else { 0 };
        while wait.look(sign)? {
            let core_of_its_own = self.spins && !self.shares_core(&wait.missing);
            if core_of_its_own && Instant::now() < spin_end {
                for _ in 0..LOOKS {
                    std::hint::spin_loop();
                    if wait.missing.iter().all(|peer| sign.is_there(*peer)) {
                        break;
                    }
                }
            } else if !core_of_its_own && yields > 0 {
                yields = if self.yield_core() { yields - 1 } else { 0 };
            } else {
                wait.sleep(sign)?;
            }
        }
        Ok(())
    }

    /// True if a long wait that begins now may yield.
    fn may_yield(&self) -> bool {
        let nth = self.long_waits.fetch_add(1, Ordering::Relaxed);
        !self.spins || !nth.is_multiple_of(SLEEP_EVERY) && nth >= self.yields_from.load(Ordering::Relaxed)
    }

    /// Yields; false if this took so long that it should not be done again.
    fn yield_core(&self) -> bool {
        let began = Instant::now();
        rustix::thread::sched_yield();
        let quick = !self.spins || began.elapsed() < SLOW_YIELD;
        if !quick {
            let next = self.long_waits.load(Ordering::Relaxed).saturating_add(SLEEPS_AFTER_SLOW_YIELD);
            self.yields_from.store(next, Ordering::Relaxed);
        }
        quick
    }

    /// The error for a call of `peer` that differs from this rank's `call`. Both ranks show each other their header.
    #[cold]
    pub(super) fn mismatch(&self, call: &Call, peer: usize) -> Error {
        let mut header = Vec::new();
        call.header(peer, 0).encode(&mut header);
        self.mine().mailbox.post(&header);
        self.wake_sleepers();
        // The peer may sleep for a third rank.
        self.cell(peer).bell.ring();
        if let Err(error) = self.wait(call, &[peer], &|peer| self.cell(peer).mailbox.is_there()) {
            return error;
        }
        let world_rank = call.world_rank(peer);
        let wrong = |message| Error::Protocol {
            peer: world_rank,
            message,
            during: Some(Box::new(call.info_for(peer).clone())),
        };
        let bytes = self.cell(peer).mailbox.read();
        let Some((prefix, site)) = bytes.split_first_chunk::<PREFIX_BYTES>() else {
            return wrong(format!("a header of {} bytes", bytes.len()));
        };
        match Prefix::decode(prefix) {
            Err(message) => wrong(message),
            Ok(prefix) => {
                let site = &site[..prefix.site_bytes().min(site.len())];
                let unlike = call.check_header(peer, &prefix.finish(site), 0).err();
                unlike.unwrap_or_else(|| wrong("an announcement that differs from the header of its call".to_owned()))
            }
        }
    }
}

/// Ends the waits of peers that still need something from this rank on this group.
impl Drop for Board {
    fn drop(&mut self) {
        self.mine().closed.publish(1);
        publication();
        for peer in &self.peers {
            self.cell(*peer).bell.ring();
        }
    }
}

/// A wait that takes long.
struct Wait<'a> {
    board: &'a Board,
    call: &'a Call,
    missing: Vec<usize>,
    watch: Watch<'a>,
    /// Time at which a peer was found to have closed its side.
    closed: std::cell::Cell<Option<Instant>>,
}

impl Wait<'_> {
    /// Removes the peers whose sign is there from `missing`; true if any peer is left.
    fn look(&mut self, sign: &impl Sign) -> Result<bool> {
        let mut nth = 0;
        while let Some(&peer) = self.missing.get(nth) {
            if sign.is_there(peer) {
                self.missing.swap_remove(nth);
                sign.arrived(peer)?;
            } else {
                nth += 1;
            }
        }
        Ok(!self.missing.is_empty())
    }

    /// Sleeps for one of the missing peers, until something changes.
    fn sleep(&mut self, sign: &impl Sign) -> Result<()> {
        self.check(sign)?;
        let next_look = self.watch.look(&self.missing)?.saturating_duration_since(Instant::now());
        let grace = self.closed.get().map_or(next_look, |since| GRACE.saturating_sub(since.elapsed()));
        // A peer that seems to share this rank's core shows by its ring where it runs now.
        let core = sched_getcpu();
        let shares_core = |peer: &&usize| self.board.cell(**peer).bell.last_ran_on(core);
        let Some(&peer) = self.missing.iter().find(shares_core).or(self.missing.last()) else { return Ok(()) };
        self.board.mine().bell.sleep(peer, next_look.min(grace), || {
            let came = self.missing.iter().any(|peer| sign.is_there(*peer));
            // A change after this look ends the sleep: the rank that makes it rings.
            if came { Ok(false) } else { self.check(sign).map(|()| true) }
        })
    }

    /// Fails if a missing sign will never come.
    fn check(&self, sign: &impl Sign) -> Result<()> {
        let board = self.board;
        board.membership.check()?;
        for &peer in &self.missing {
            let left = board.membership.has_left(self.call.world_rank(peer));
            let closed = board.cell(peer).closed.has_reached(1);
            // A sign that the peer published before it left counts.
            if sign.is_there(peer) {
                continue;
            }
            if !left && !closed {
                sign.instead(peer)?;
                continue;
            }
            let since = self.closed.get().unwrap_or_else(Instant::now);
            self.closed.set(Some(since));
            if left || since.elapsed() >= GRACE {
                return Err(board.membership.left_error(self.call.world_rank(peer)));
            }
        }
        Ok(())
    }
}
