//! Signs of life of the other ranks: heard, silent, silent for too long.
//!
//! Every rank sends a heartbeat per period. A peer that misses two is suspected: its process may be stopped, its
//! machine overloaded or cut off. For neighbours, which share a control connection with this rank, the silence on that
//! connection counts; for other ranks, the report of the rank that passes on their messages. A silent peer is lost only
//! after the peer timeout, and only if the user set one: the kernel notices by itself that a machine is gone, and a
//! stopped process may go on.

use std::time::{Duration, Instant};

use super::control_messages::Heartbeat;
use crate::WorldOptions;

/// Longest pause between two heartbeats to a silent peer, in periods.
const SLOWEST_BEAT: u32 = 16;

/// Signs of life of a rank's peers. Takes the time as an argument, reads no clock.
#[derive(Debug)]
pub(crate) struct Liveness {
    heartbeat: Duration,
    peer_timeout: Option<Duration>,
    /// By rank; `None` for this rank and for ranks that left or ended unheard.
    peers: Vec<Option<Heard>>,
}

#[derive(Debug)]
struct Heard {
    /// True if this rank has a connection to it.
    near: bool,
    /// Time at which it was last heard.
    last: Instant,
    suspected: bool,
    /// True if it was given an extra period since it was last heard, see [`Liveness::excuse`].
    excused: bool,
    /// True once it was silent for longer than the peer timeout; stays so.
    lost: bool,
    /// Its last heartbeat, and the number of its heartbeats.
    beat: Option<Heartbeat>,
    beats: u64,
    /// Time of this rank's next heartbeat to it.
    next_beat: Instant,
}

impl Heard {
    fn new(near: bool, now: Instant) -> Heard {
        Heard { near, last: now, suspected: false, excused: false, lost: false, beat: None, beats: 0, next_beat: now }
    }
}

/// Change of a peer's state.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Change {
    Suspect { peer: usize, silent: Duration },
    Recovered { peer: usize },
    Lost { peer: usize, silent: Duration },
}

impl Liveness {
    /// State of all ranks of the world except `rank`, as if heard `now`. Neighbours are those for which `is_near`
    /// holds.
    pub(crate) fn new(
        rank: usize,
        world_size: usize,
        is_near: impl Fn(usize) -> bool,
        options: &WorldOptions,
        now: Instant,
    ) -> Liveness {
        let heard = |peer| (peer != rank).then(|| Heard::new(is_near(peer), now));
        Liveness {
            heartbeat: options.heartbeat,
            peer_timeout: options.peer_timeout,
            peers: (0..world_size).map(heard).collect(),
        }
    }

    /// Notes that this rank has had a connection to `peer` since `now`.
    pub(crate) fn connected(&mut self, peer: usize, now: Instant) {
        if let Some(Some(heard)) = self.peers.get_mut(peer) {
            (heard.near, heard.last, heard.next_beat) = (true, now, now);
        }
    }

    /// Notes that `peer`, which [`forget`](Self::forget) removed, takes part.
    pub(crate) fn reappeared(&mut self, peer: usize, now: Instant) {
        if let Some(heard) = self.peers.get_mut(peer) {
            heard.get_or_insert_with(|| Heard::new(false, now));
        }
    }

    /// Notes that this rank has no connection to `peer` any more.
    pub(crate) fn disconnected(&mut self, peer: usize) {
        if let Some(Some(heard)) = self.peers.get_mut(peer) {
            heard.near = false;
        }
    }

    /// True if this rank has a connection to `peer`, which takes part.
    pub(crate) fn is_near(&self, peer: usize) -> bool {
        matches!(self.peers.get(peer), Some(Some(Heard { near: true, .. })))
    }

    /// Notes that a message of `peer` has come.
    pub(crate) fn heard(&mut self, peer: usize, now: Instant) -> Option<Change> {
        let heard = self.peers.get_mut(peer)?.as_mut()?;
        heard.last = now;
        heard.excused = false;
        std::mem::take(&mut heard.suspected).then(|| {
            heard.next_beat = now;
            Change::Recovered { peer }
        })
    }

    /// Notes the report that `peer`, which is no neighbour, has been silent to the rank that passes on its messages.
    pub(crate) fn reported_silent(&mut self, peer: usize, silent: Duration, now: Instant) -> Option<Change> {
        let heard = self.peers.get_mut(peer)?.as_mut().filter(|heard| !heard.near && !heard.suspected)?;
        heard.suspected = true;
        heard.last = now.checked_sub(silent).map_or(heard.last, |at| heard.last.min(at));
        Some(Change::Suspect { peer, silent })
    }

    /// Notes the heartbeat of `peer`.
    pub(crate) fn beat(&mut self, peer: usize, beat: Heartbeat) {
        if let Some(Some(heard)) = self.peers.get_mut(peer) {
            heard.beat = Some(beat);
            heard.beats += 1;
        }
    }

    /// Removes `peer`, which left or ended unheard.
    pub(crate) fn forget(&mut self, peer: usize) {
        if let Some(heard) = self.peers.get_mut(peer) {
            *heard = None;
        }
    }

    /// Does not count `time`, in which this process itself was stopped or starved, as silence of its peers. The first
    /// time since a peer was heard, gives it an extra period: it may have been stopped together with this process.
    pub(crate) fn excuse(&mut self, time: Duration, now: Instant) {
        for heard in self.peers.iter_mut().flatten() {
            let more = if std::mem::replace(&mut heard.excused, true) { Duration::ZERO } else { self.heartbeat };
            heard.last = (heard.last + time + more).min(now);
        }
    }

    /// Neighbours that became suspected or lost since the last look.
    pub(crate) fn look(&mut self, now: Instant) -> Vec<Change> {
        let suspect_after = self.suspect_after();
        let mut changes = Vec::new();
        for (peer, heard) in self.peers.iter_mut().enumerate() {
            let Some(heard) = heard.as_mut().filter(|heard| heard.near) else { continue };
            let silent = now.saturating_duration_since(heard.last);
            if silent >= suspect_after && !heard.suspected {
                heard.suspected = true;
                changes.push(Change::Suspect { peer, silent });
            }
            if !heard.lost && self.peer_timeout.is_some_and(|timeout| silent >= timeout) {
                heard.lost = true;
                changes.push(Change::Lost { peer, silent });
            }
        }
        changes
    }

    /// Neighbours to which a heartbeat is due. The longer a peer is silent, the rarer they are, since it may not read.
    pub(crate) fn due(&mut self, now: Instant) -> Vec<usize> {
        let mut due = Vec::new();
        for (peer, heard) in self.peers.iter_mut().enumerate() {
            let Some(heard) = heard.as_mut().filter(|heard| heard.near && heard.next_beat <= now) else { continue };
            let silent = now.saturating_duration_since(heard.last);
            heard.next_beat = now + (silent / 4).clamp(self.heartbeat, self.heartbeat * SLOWEST_BEAT);
            due.push(peer);
        }
        due
    }

    /// Time of the next heartbeat or check.
    pub(crate) fn next_look(&self, now: Instant) -> Option<Instant> {
        let next = self.peers.iter().flatten().filter(|heard| heard.near).flat_map(|heard| {
            let suspect = (!heard.suspected).then(|| heard.last + self.suspect_after());
            let lost = self.peer_timeout.filter(|_| !heard.lost).map(|timeout| heard.last + timeout);
            [Some(heard.next_beat), suspect, lost]
        });
        // At most a period from now: a look that comes later shows that this process itself was stopped.
        next.flatten().chain([now + self.heartbeat]).min()
    }

    /// Delay of a check beyond which this process itself must have been stopped.
    pub(crate) fn late(&self) -> Duration {
        self.heartbeat / 2
    }

    /// Time since `peer` was last heard; `None` for this rank and for ranks that left.
    pub(crate) fn silence(&self, peer: usize, now: Instant) -> Option<Duration> {
        Some(now.saturating_duration_since(self.peers.get(peer)?.as_ref()?.last))
    }

    /// True if `peer` is suspected.
    pub(crate) fn suspects(&self, peer: usize) -> bool {
        matches!(self.peers.get(peer), Some(Some(Heard { suspected: true, .. })))
    }

    /// Last heartbeat of `peer`.
    pub(crate) fn last_beat(&self, peer: usize) -> Option<&Heartbeat> {
        self.peers.get(peer)?.as_ref()?.beat.as_ref()
    }

    /// Peers that are not suspected, each with its last heartbeat and the number of that.
    pub(crate) fn beats(&self) -> impl Iterator<Item = (usize, (u64, &Heartbeat))> {
        let alive = self.peers.iter().enumerate().filter_map(|(peer, heard)| Some((peer, heard.as_ref()?)));
        alive
            .filter(|(_, heard)| !heard.suspected)
            .filter_map(|(peer, Heard { beats, beat, .. })| Some((peer, (*beats, beat.as_ref()?))))
    }

    /// Silence from which on a peer is suspected: two missed heartbeats, and some allowance.
    fn suspect_after(&self) -> Duration {
        self.heartbeat * 9 / 4
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const BEAT: Duration = Duration::from_secs(1);

    /// Rank 0 of three, and the time of its start.
    fn rank_0(peer_timeout: Option<Duration>) -> (Liveness, Instant) {
        let now = Instant::now();
        let options = WorldOptions { heartbeat: BEAT, peer_timeout, ..WorldOptions::default() };
        (Liveness::new(0, 3, |_| true, &options, now), now)
    }

    #[test]
    fn two_missed_heartbeats_make_a_suspect_once() {
        let (mut liveness, start) = rank_0(None);
        assert_eq!(liveness.heard(2, start + BEAT), None);
        assert_eq!(liveness.look(start + 2 * BEAT), []);
        let silent = BEAT * 5 / 2;
        assert_eq!(liveness.look(start + silent), [Change::Suspect { peer: 1, silent }]);
        assert_eq!(liveness.look(start + 3 * BEAT), []);
        assert_eq!(liveness.heard(1, start + 3 * BEAT), Some(Change::Recovered { peer: 1 }));
        assert_eq!(liveness.heard(1, start + 3 * BEAT), None);
    }

    #[test]
    fn a_rank_without_a_connection_is_suspected_on_report_alone_until_it_is_heard() {
        let start = Instant::now();
        let options = WorldOptions { heartbeat: BEAT, peer_timeout: Some(5 * BEAT), ..WorldOptions::default() };
        let mut liveness = Liveness::new(0, 3, |peer| peer == 1, &options, start);
        let now = start + 100 * BEAT;
        liveness.heard(1, now);
        assert_eq!(liveness.look(now), []);
        assert_eq!(liveness.due(now), [1]);
        let silent = 3 * BEAT;
        assert_eq!(liveness.reported_silent(1, silent, now), None, "this rank hears it itself");
        assert_eq!(liveness.reported_silent(2, silent, now), Some(Change::Suspect { peer: 2, silent }));
        assert_eq!(liveness.reported_silent(2, 2 * silent, now + silent), None);
        assert!(liveness.suspects(2) && liveness.silence(2, now) >= Some(silent));
        assert_eq!(liveness.heard(2, now + 2 * silent), Some(Change::Recovered { peer: 2 }));
        assert!(!liveness.suspects(2));
        let later = now + 200 * BEAT;
        liveness.heard(1, later);
        liveness.connected(2, later);
        assert_eq!((liveness.is_near(2), liveness.look(later + BEAT), liveness.due(later)), (true, vec![], vec![1, 2]));
        assert!(matches!(liveness.look(later + 3 * BEAT)[..], [_, Change::Suspect { peer: 2, .. }]));
    }

    #[test]
    fn the_first_check_is_due_at_once() {
        let (liveness, start) = rank_0(Some(5 * BEAT));
        assert_eq!(liveness.next_look(start + 9 * BEAT), Some(start));
    }

    #[test]
    fn silence_alone_loses_nobody_unless_the_user_says_after_what_time() {
        let (mut liveness, start) = rank_0(None);
        liveness.heard(2, start + 999 * BEAT);
        let long = liveness.look(start + 1000 * BEAT);
        assert!(matches!(long[..], [Change::Suspect { peer: 1, .. }]), "{long:?}");

        let (mut liveness, start) = rank_0(Some(5 * BEAT));
        liveness.heard(2, start + 4 * BEAT);
        let silent = 5 * BEAT;
        let lost = liveness.look(start + silent);
        assert_eq!(lost, [Change::Suspect { peer: 1, silent }, Change::Lost { peer: 1, silent }]);
        assert_eq!(liveness.look(start + 6 * BEAT), []);
        liveness.due(start + 6 * BEAT);
        assert!(liveness.next_look(start + 6 * BEAT).unwrap() > start + 6 * BEAT);
    }

    #[test]
    fn those_who_left_and_this_rank_are_not_listened_to() {
        let (mut liveness, start) = rank_0(Some(5 * BEAT));
        liveness.forget(1);
        liveness.forget(2);
        assert_eq!(liveness.look(start + 10 * BEAT), []);
        assert_eq!(liveness.due(start + 10 * BEAT), [0_usize; 0]);
        assert_eq!(liveness.silence(0, start), None);
    }

    #[test]
    fn who_was_stopped_itself_accuses_nobody() {
        let (mut liveness, start) = rank_0(Some(5 * BEAT));
        liveness.excuse(99 * BEAT, start + 100 * BEAT);
        assert_eq!(liveness.look(start + 101 * BEAT), []);
    }

    #[test]
    fn who_was_stopped_too_has_a_heartbeat_to_say_so_but_only_one() {
        let (mut liveness, start) = rank_0(Some(5 * BEAT));
        // Silent for nearly as long as it may be when both are stopped for three heartbeats.
        liveness.excuse(3 * BEAT, start + 7 * BEAT);
        assert_eq!(liveness.look(start + 7 * BEAT).iter().filter(|c| matches!(c, Change::Lost { .. })).count(), 0);
        // A rank whose looks always come late still finds a dead peer.
        let lost = (1..20).any(|look| {
            let now = start + 7 * BEAT + look * 2 * BEAT;
            liveness.excuse(BEAT, now);
            liveness.look(now).iter().any(|change| matches!(change, Change::Lost { .. }))
        });
        assert!(lost);
    }

    #[test]
    fn heartbeats_are_due_once_per_period_and_rarely_for_the_silent() {
        let (mut liveness, start) = rank_0(None);
        let mut sent = [0; 3];
        for tenth in 0..6000 {
            let now = start + BEAT * tenth / 10;
            liveness.heard(2, now);
            liveness.look(now);
            liveness.due(now).into_iter().for_each(|peer| sent[peer] += 1);
            assert!(liveness.next_look(now).unwrap() > now);
        }
        assert_eq!((sent[0], sent[2]), (0, 600));
        assert!((30..100).contains(&sent[1]), "{sent:?}");
        let now = start + BEAT * 600;
        assert_eq!(liveness.heard(1, now), Some(Change::Recovered { peer: 1 }));
        assert!(liveness.due(now).contains(&1), "who is back is answered at once");
    }
}
