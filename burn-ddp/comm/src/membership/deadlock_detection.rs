//! Detection of deadlocks: ranks that wait for each other in different calls, for ever.
//!
//! A call waits for the ranks that have not made it. Such a rank cannot make it while all its threads that call on the
//! group are blocked in other calls, and never makes it if those calls wait for ever. [`circle`] starts from all
//! pending calls and removes those that may still end, until no more can be removed; the calls that remain wait for
//! each other in a circle. A transfer between two ranks counts as two calls, one on each of them that waits for the
//! other.
//!
//! A heartbeat describes a state that may have changed since. So a circle is an error only if it has stayed the same
//! while every rank in it has sent [`BEATS`] heartbeats, and this process was not stopped meanwhile.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use super::control_messages::{BlockedGroup, Heartbeat, PendingCall};
use super::deadlocked_call::StuckCall;
use crate::call::CallInfo;

/// Heartbeats of each rank in which nothing changes before a circle is an error.
const BEATS: u64 = 3;

/// Looks for circles of waits. There is one per process.
#[derive(Debug)]
pub(crate) struct WaitCircles {
    heartbeat: Duration,
    start: Instant,
    last_look: Instant,
    suspicion: Option<Suspicion>,
}

/// A circle that was found, with the number of heartbeats that each rank in it had sent by then.
#[derive(Debug)]
struct Suspicion {
    calls: Vec<CallKey>,
    beats: BTreeMap<usize, u64>,
}

/// Last heartbeat of each rank, with its number.
type NumberedBeats<'a> = BTreeMap<usize, (u64, &'a Heartbeat)>;

/// Group of a call and its place. For a transfer between two ranks, [`TRANSFER`] and the rank stand for the place.
type CallKey = (u64, u64);

/// Marks the key of a transfer; greater than all places.
const TRANSFER: u64 = 1 << 63;

impl WaitCircles {
    pub(crate) fn new(heartbeat: Duration, now: Instant) -> WaitCircles {
        WaitCircles { heartbeat, start: now, last_look: now, suspicion: None }
    }

    /// True if it is time for a [`look`](Self::look): once per heartbeat.
    pub(crate) fn is_due(&self, now: Instant) -> bool {
        now.saturating_duration_since(self.last_look) >= self.heartbeat
    }

    /// Number of heartbeats that this process has sent, or would have sent, by `now`.
    pub(crate) fn own_beats(&self, now: Instant) -> u64 {
        (now.saturating_duration_since(self.start).as_nanos() / self.heartbeat.as_nanos().max(1)) as u64
    }

    /// Forgets the circle that was found, if there was one.
    pub(crate) fn forget(&mut self) {
        self.suspicion = None;
    }

    /// Looks for a circle in the last heartbeats of the ranks that are alive, each with its number. Returns the circle
    /// if it has lasted for [`BEATS`] heartbeats.
    pub(crate) fn look(&mut self, beats: &NumberedBeats<'_>, now: Instant) -> Option<Vec<StuckCall>> {
        let stopped = now.saturating_duration_since(self.last_look) > 2 * self.heartbeat;
        self.last_look = now;
        if stopped {
            self.forget();
        }
        let latest = beats.iter().map(|(rank, (_, beat))| (*rank, *beat)).collect();
        let Some((calls, stuck)) = circle(&latest) else {
            self.forget();
            return None;
        };
        let suspicion = match self.suspicion.take().filter(|suspicion| suspicion.calls == calls) {
            Some(suspicion) => self.suspicion.insert(suspicion),
            None => self.suspicion.insert(Suspicion { calls, beats: BTreeMap::new() }),
        };
        let mut lasts = true;
        for rank in stuck.iter().flat_map(|stuck| &stuck.ranks) {
            let number = beats.get(rank).map_or(0, |(number, _)| *number);
            lasts &= number >= *suspicion.beats.entry(*rank).or_insert(number) + BEATS;
        }
        lasts.then_some(stuck)
    }
}

/// A call under way on some ranks.
struct UnderWay<'a> {
    /// The ranks in it.
    ranks: BTreeSet<usize>,
    /// The call as the first of them made it.
    call: &'a CallInfo,
    awaited: BTreeSet<usize>,
}

/// A rank that a call waits for, and the calls in which its threads are blocked.
type Missing = (usize, Vec<CallKey>);

/// A circle of calls that wait for each other, found in the last heartbeats of all ranks. The call with the lowest key
/// comes first.
fn circle(beats: &BTreeMap<usize, &Heartbeat>) -> Option<(Vec<CallKey>, Vec<StuckCall>)> {
    let mut calls: BTreeMap<CallKey, UnderWay<'_>> = BTreeMap::new();
    for (rank, beat) in beats {
        for pending in &beat.pending {
            let key = key(*rank, &pending.call);
            let (ranks, awaited) = (BTreeSet::new(), BTreeSet::new());
            let under_way = calls.entry(key).or_insert(UnderWay { ranks, call: &pending.call, awaited });
            under_way.ranks.insert(*rank);
            under_way.awaited.extend(&pending.waiting_for);
        }
    }
    // All ranks are in one call: the usual wait.
    if calls.len() < 2 {
        return None;
    }
    let mut stuck: BTreeMap<CallKey, Vec<Missing>> = calls
        .iter()
        .map(|(key, call)| {
            let missing = call.awaited.difference(&call.ranks);
            (*key, missing.filter_map(|rank| Some((*rank, blocked_in(*rank, beats.get(rank)?, *key)?))).collect())
        })
        .collect();
    // A call may end if each rank that it waits for has a thread that is free, or in a call that may end.
    loop {
        let may_go_on =
            |missing: &[Missing]| !missing.iter().any(|(_, calls)| calls.iter().all(|call| stuck.contains_key(call)));
        let free: Vec<CallKey> = stuck.iter().filter(|(_, missing)| may_go_on(missing)).map(|(key, _)| *key).collect();
        if free.is_empty() {
            break;
        }
        free.iter().for_each(|key| drop(stuck.remove(key)));
    }
    // Each of the calls that remain waits for another of them, so following the waits leads into a circle.
    let next = |key: CallKey| {
        let mut missing =
            stuck.get(&key)?.iter().filter(|(_, calls)| calls.iter().all(|call| stuck.contains_key(call)));
        missing.next().and_then(|(_, calls)| calls.first().copied())
    };
    let mut way = vec![*stuck.keys().next()?];
    let mut keys = loop {
        let key = next(*way.last()?)?;
        match way.iter().position(|seen| *seen == key) {
            Some(first) => break way.split_off(first),
            None => way.push(key),
        }
    };
    let lowest = keys.iter().enumerate().min_by_key(|(_, key)| **key).map_or(0, |(nth, _)| nth);
    keys.rotate_left(lowest);
    let described = keys.iter().map(|key| {
        let UnderWay { ranks, call, .. } = &calls[key];
        let next = next(*key);
        let missing = stuck[key].iter().filter(|(_, calls)| calls.first().copied() == next).map(|(rank, _)| *rank);
        StuckCall {
            ranks: ranks.iter().copied().collect(),
            call: (*call).clone(),
            purpose: None,
            missing: missing.collect(),
        }
    });
    let described = described.collect();
    Some((keys, described))
}

/// The key of a call that `rank` is in.
fn key(rank: usize, call: &CallInfo) -> CallKey {
    (call.group, call.place().unwrap_or(TRANSFER | rank as u64))
}

/// Calls in which those threads of `rank` are blocked that could make the call of this key, if all of them are blocked.
/// `None` if a thread may still make the call, or the rank has made it already.
fn blocked_in(rank: usize, beat: &Heartbeat, (group, place): CallKey) -> Option<Vec<CallKey>> {
    let blocked = |blocked: &&BlockedGroup| blocked.group == group && blocked.place < place;
    let BlockedGroup { calls, .. } = beat.blocked.iter().find(blocked)?;
    let pending = calls.iter().map(|call| beat.pending.get(*call as usize)).collect::<Option<Vec<_>>>()?;
    if place & TRANSFER != 0 {
        // The other rank may be in its own half of this transfer: then it is not missing.
        let peer = (place & !TRANSFER) as usize;
        let fits = |pending: &&PendingCall| {
            let with_peer = pending.call.root == Some(peer) || pending.waiting_for.contains(&peer);
            pending.call.group == group && pending.call.place().is_none() && with_peer
        };
        if pending.iter().any(fits) {
            return None;
        }
    }
    let calls: Vec<CallKey> = pending.iter().map(|pending| key(rank, &pending.call)).collect();
    (!calls.is_empty()).then_some(calls)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::call::Collective;

    const BEAT: Duration = Duration::from_secs(1);

    fn call(group: u64, sequence: u64) -> CallInfo {
        CallInfo::bare(Collective::Barrier, group, sequence, format!("r.rs:{group}:{sequence}").as_str())
    }

    fn in_call(call: &CallInfo, waiting_for: &[usize]) -> PendingCall {
        PendingCall { call: call.clone(), since_ms: 0, waiting_for: waiting_for.to_vec() }
    }

    /// A rank with one thread, which is blocked in `call`; the last calls on other groups were `places`.
    fn blocked(call: &CallInfo, waiting_for: &[usize], places: &[(u64, u64)]) -> Heartbeat {
        let own = (call.group, call.place().unwrap_or(1));
        let groups = places.iter().chain([&own]);
        let blocked = groups.map(|(group, place)| BlockedGroup { group: *group, place: *place, calls: vec![0] });
        Heartbeat { pending: vec![in_call(call, waiting_for)], blocked: blocked.collect(), ..Heartbeat::default() }
    }

    fn found(beats: &[Heartbeat]) -> Option<Vec<StuckCall>> {
        circle(&beats.iter().enumerate().collect()).map(|(_, stuck)| stuck)
    }

    /// Rank 0 in a call of group 1, the others in one of group 2.
    fn mistake(ranks: usize) -> Vec<Heartbeat> {
        let others: Vec<usize> = (1..ranks).collect();
        let mut beats = vec![blocked(&call(1, 4), &others, &[(2, 8)])];
        beats.extend(others.iter().map(|_| blocked(&call(2, 7), &[0], &[(1, 5)])));
        beats
    }

    #[test]
    fn a_circle_is_described_with_both_calls() {
        let stuck = found(&mistake(3)).unwrap();
        let text = stuck.iter().map(StuckCall::to_string).collect::<Vec<_>>().join("; ");
        for part in [
            "rank 0 is in barrier #4 of group 1 called at r.rs:1:4, which waits for ranks 1 and 2",
            "ranks 1 and 2 are in barrier #7 of group 2 called at r.rs:2:7, which waits for rank 0",
        ] {
            assert!(text.contains(part), "{text}");
        }
    }

    #[test]
    fn a_thread_that_may_come_breaks_it() {
        let stuck = mistake(2);
        assert!(found(&stuck).is_some());
        // Rank 1 has a thread for group 1 that computes.
        let mut free = stuck.clone();
        free[1].blocked.retain(|blocked| blocked.group != 1);
        assert_eq!(found(&free), None);
        // It has made the call already, and only its data are still on their way.
        let mut ahead = stuck.clone();
        ahead[1].blocked[0].place = 6;
        assert_eq!(found(&ahead), None);
        // No heartbeat of it has come.
        assert_eq!(found(&stuck[..1]), None);
        // One of its two threads is in a call that goes on.
        let mut two = stuck;
        two[1].pending.push(in_call(&call(3, 0), &[]));
        two[1].blocked[0].calls.push(1);
        assert_eq!(found(&two), None);
    }

    #[test]
    fn a_chain_that_ends_at_a_rank_that_computes_is_no_circle() {
        let beats =
            [blocked(&call(1, 4), &[1], &[(2, 8)]), blocked(&call(2, 7), &[2], &[(1, 5)]), Heartbeat::default()];
        assert_eq!(found(&beats), None);
    }

    #[test]
    fn ranks_in_one_call_do_not_wait_for_each_other() {
        // Two large reductions at a time, of two threads each, over a slow network.
        let threads = |waiting_for: usize| {
            let pending = vec![in_call(&call(1, 4), &[waiting_for]), in_call(&call(2, 7), &[waiting_for])];
            let blocked = [(1, 6), (2, 9)].map(|(group, place)| BlockedGroup { group, place, calls: vec![0, 1] });
            Heartbeat { pending, blocked: blocked.into(), ..Heartbeat::default() }
        };
        assert_eq!(found(&[threads(1), threads(0)]), None);
    }

    #[test]
    fn three_calls_in_a_circle_are_found_beside_others() {
        let beats = [
            blocked(&call(1, 0), &[1, 3], &[(2, 1), (3, 1)]),
            blocked(&call(2, 0), &[2, 3], &[(1, 1), (3, 1)]),
            blocked(&call(3, 0), &[0, 3], &[(1, 1), (2, 1)]),
            Heartbeat::default(),
        ];
        let stuck = found(&beats).unwrap();
        assert_eq!(stuck.iter().map(|stuck| stuck.call.group).collect::<Vec<_>>(), [1, 2, 3]);
        assert_eq!(stuck.iter().map(|stuck| stuck.missing.clone()).collect::<Vec<_>>(), [[1], [2], [0]]);
    }

    fn send(group: u64, to: usize) -> CallInfo {
        CallInfo { collective: Collective::Send, root: Some(to), ..call(group, 0) }
    }

    fn recv(group: u64, from: usize) -> CallInfo {
        CallInfo { collective: Collective::Recv, ..send(group, from) }
    }

    #[test]
    fn a_transfer_and_a_collective_that_wait_for_each_other_are_found() {
        // Rank 1 sends to rank 2, which waits for rank 0 in a barrier, and that for rank 1.
        let barrier = |waiting_for| blocked(&call(1, 7), &[waiting_for], &[(1, 9)]);
        let beats = [barrier(1), blocked(&send(1, 2), &[2], &[(1, 8)]), barrier(0)];
        let stuck = found(&beats).unwrap();
        assert_eq!(stuck.iter().map(|stuck| stuck.ranks.clone()).collect::<Vec<_>>(), [vec![0, 2], vec![1]]);
        assert_eq!(stuck.iter().map(|stuck| stuck.missing.clone()).collect::<Vec<_>>(), [[1], [2]]);
        // In another group, too.
        let beats = [blocked(&send(1, 1), &[1], &[(1, 3), (2, 8)]), blocked(&call(2, 7), &[0], &[(1, 5), (2, 9)])];
        assert!(found(&beats).is_some());
    }

    #[test]
    fn transfers_under_way_accuse_nobody() {
        let transfer = |call: CallInfo, peer: usize| blocked(&call, &[peer], &[(1, 8)]);
        assert_eq!(found(&[transfer(send(1, 1), 1), transfer(recv(1, 0), 0)]), None);
        // Rank 1 passes on what it gets from rank 0 to rank 2.
        let passes_on = blocked(&send(1, 2), &[0, 2], &[(1, 8)]);
        assert_eq!(found(&[transfer(send(1, 1), 1), passes_on, transfer(recv(1, 1), 1)]), None);
        // The peer computes.
        assert_eq!(found(&[transfer(send(1, 1), 1), Heartbeat::default()]), None);
    }

    #[test]
    fn ranks_that_all_send_first_are_found() {
        let sends = |to: usize| blocked(&send(1, to), &[to], &[(1, 8)]);
        assert_eq!(found(&[sends(1), sends(2), sends(0)]).unwrap().len(), 3);
    }

    /// Looks at `beats` once per heartbeat from `start` on; the beats of rank 1 come as `number` says.
    fn looks(beats: &[Heartbeat], number: impl Fn(u64) -> u64, times: impl Fn(u64) -> Duration) -> Option<u64> {
        let start = Instant::now();
        let mut circles = WaitCircles::new(BEAT, start);
        (1..100).find(|nth| {
            let now = start + times(*nth);
            let numbered = beats
                .iter()
                .enumerate()
                .map(|(rank, beat)| (rank, (if rank == 1 { number(*nth) } else { *nth }, beat)));
            circles.look(&numbered.collect(), now).is_some()
        })
    }

    #[test]
    fn a_circle_is_an_error_after_three_heartbeats_of_each_rank() {
        let regular = |nth: u64| BEAT * nth as u32;
        let beats = mistake(2);
        assert_eq!(looks(&beats, |nth| nth, regular), Some(4));
        assert_eq!(looks(&beats, |nth| nth / 2, regular), Some(6), "its heartbeats come late");
        assert_eq!(looks(&beats, |_| 9, regular), None, "it is stopped");
        assert_eq!(looks(&beats, |nth| nth, |nth| 5 * BEAT * nth as u32), None, "this process is stopped all the time");
        assert_eq!(looks(&beats, |nth| nth, |_| Duration::ZERO), Some(4), "a clock that stands still");
        let jump = |nth: u64| BEAT * nth as u32 + if nth >= 3 { Duration::from_secs(1 << 30) } else { Duration::ZERO };
        assert_eq!(looks(&beats, |nth| nth, jump), Some(6), "a clock that jumps starts it anew");
    }

    #[test]
    fn a_circle_that_changes_is_progress() {
        let start = Instant::now();
        let mut circles = WaitCircles::new(BEAT, start);
        for nth in 0..20 {
            let beats = [blocked(&call(1, nth), &[1], &[(2, 8)]), blocked(&call(2, 7), &[0], &[(1, 1)])];
            let numbered = beats.iter().enumerate().map(|(rank, beat)| (rank, (nth, beat)));
            assert_eq!(circles.look(&numbered.collect(), start + BEAT * nth as u32), None);
        }
    }
}
