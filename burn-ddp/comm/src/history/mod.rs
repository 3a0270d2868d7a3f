//! Calls of a rank: all that are under way, and the last ones that ended.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use self::call_log::Seen;
use crate::call::{CallingThread, GroupId, Members};
use crate::clock::nanos;
use crate::membership::{BlockedGroup, Heartbeat, PendingCall};
use crate::poison_free_locks::lock;
use crate::post_mortem::{Record, millis, since_1970};

mod call_log;
mod site_cell;

pub(crate) use call_log::Log;

/// Most pending calls in a heartbeat. A rank has at most one pending call per thread.
const BEAT_CALLS: usize = 8;
/// Most awaited ranks that a heartbeat names per call.
const BEAT_RANKS: usize = 64;
/// Most blocked groups in a heartbeat.
const BEAT_GROUPS: usize = 64;

/// Calls of one rank. Each of its groups writes a log; heartbeats and reports read all logs.
#[derive(Debug)]
pub(crate) struct History {
    /// Number of finished calls that are kept.
    cap: usize,
    groups: Mutex<Groups>,
}

#[derive(Debug, Default)]
struct Groups {
    /// Logs of the groups that exist.
    logs: Vec<Arc<Log>>,
    /// Calls of groups that were dropped; at most `cap` of them.
    past: VecDeque<Seen>,
    /// Threads that have made calls on groups that were dropped.
    past_callers: Vec<CallingThread>,
    /// Number of the last group of all ranks, 0 before the first.
    last_group: u64,
}

impl History {
    /// Keeps the last `cap` calls.
    pub(crate) fn new(cap: usize) -> History {
        History { cap, groups: Mutex::default() }
    }

    /// The log of a new group.
    pub(crate) fn open(&self, group: u64, members: Arc<Members>) -> Arc<Log> {
        let log = Arc::new(Log::new(group, members, self.cap));
        let mut groups = lock(&self.groups);
        groups.logs.push(log.clone());
        if !GroupId(group).is_sub_group() {
            groups.last_group = groups.last_group.max(group);
        }
        log
    }

    /// Closes the log of a group that was dropped; keeps its calls.
    pub(crate) fn close(&self, log: &Arc<Log>) {
        let mut groups = lock(&self.groups);
        groups.logs.retain(|other| !Arc::ptr_eq(other, log));
        groups.past_callers.extend(log.callers());
        groups.past_callers.retain(|thread| !thread.has_ended());
        groups.past_callers.sort_by_key(CallingThread::id);
        groups.past_callers.dedup_by_key(|thread| thread.id());
        groups.past.extend(log.seen().into_iter().filter(|call| call.ended.is_some()));
        groups.past.make_contiguous().sort_by_key(|call| call.started);
        let surplus = groups.past.len().saturating_sub(self.cap);
        groups.past.drain(..surplus);
    }

    /// Heartbeat of this rank, which is in `step`.
    pub(crate) fn heartbeat(&self, step: Option<u64>) -> Heartbeat {
        let groups = lock(&self.groups);
        let (mut pending, mut callers) = (Vec::new(), Vec::new());
        let mut last = groups.past.back().cloned();
        for log in &groups.logs {
            for call in log.last(2) {
                if call.ended.is_some() {
                    last = last.filter(|last| last.ended_at() >= call.ended_at()).or(Some(call));
                } else if pending.len() < BEAT_CALLS {
                    callers.push(log.caller());
                    pending.push(PendingCall {
                        since_ms: millis(call.started.elapsed()),
                        waiting_for: log.awaited().into_iter().take(BEAT_RANKS).collect(),
                        call: call.info,
                    });
                }
            }
        }
        let blocked = groups.blocked(&pending, &callers);
        let last = last.filter(|_| self.cap > 0);
        let idle = last.as_ref().map_or(Duration::ZERO, |last| last.started.elapsed().saturating_sub(last.took()));
        Heartbeat { step, pending, last: last.map(|last| last.info), idle_ms: millis(idle), blocked }
    }

    /// Calls under way, for a report.
    pub(crate) fn pending(&self) -> Vec<PendingCall> {
        let groups = lock(&self.groups);
        let pending = |log: &Arc<Log>| {
            let call = log.last(1).pop().filter(|call| call.ended.is_none())?;
            let since_ms = millis(call.started.elapsed());
            Some(PendingCall { call: call.info, since_ms, waiting_for: log.awaited() })
        };
        groups.logs.iter().filter_map(pending).collect()
    }

    /// Calls under way and the last ones that ended, in the order in which they began, for a report.
    pub(crate) fn records(&self) -> Vec<Record> {
        let mut calls: Vec<Seen> = {
            let groups = lock(&self.groups);
            groups.logs.iter().flat_map(|log| log.seen()).chain(groups.past.iter().cloned()).collect()
        };
        calls.sort_by_key(|call| call.started);
        let mut surplus = calls.iter().filter(|call| call.ended.is_some()).count().saturating_sub(self.cap);
        calls.retain(|call| {
            let dropped = call.ended.is_some() && surplus > 0;
            surplus -= usize::from(dropped);
            !dropped
        });
        let (now, since) = (Instant::now(), since_1970());
        let record = |call: Seen| Record {
            group: call.info.group,
            sequence: call.info.sequence,
            peer: call.info.root.filter(|_| call.info.collective.counterpart().is_some()),
            call: call.info.operation(),
            site: call.info.site.to_string(),
            step: call.info.step,
            started: since.saturating_sub(now.saturating_duration_since(call.started.instant())).as_micros() as u64,
            took_us: call.ended.map(|_| call.took().as_micros() as u64),
            ok: call.ended.is_some_and(|(_, ok)| ok),
            ranks: call.ranks,
        };
        calls.into_iter().map(record).collect()
    }
}

impl Groups {
    /// Groups whose callers are all blocked in the `pending` calls, which were made by the threads `callers`.
    fn blocked(&self, pending: &[PendingCall], callers: &[u64]) -> Vec<BlockedGroup> {
        // The call in which a thread is blocked: its own, or that of a thread for which it waits.
        let call_of = |thread: CallingThread| {
            let index = thread.chain().find_map(|thread| callers.iter().position(|caller| *caller == thread.id()))?;
            (!pending[index].waiting_for.is_empty()).then_some(index as u32)
        };
        let blocked = |group, place, threads: Vec<CallingThread>| {
            let mut calls = threads.into_iter().map(call_of).collect::<Option<Vec<u32>>>()?;
            calls.sort_unstable();
            calls.dedup();
            (!calls.is_empty()).then_some(BlockedGroup { group, place, calls })
        };
        if pending.is_empty() {
            return Vec::new();
        }
        let next = || blocked(self.last_group + 1, 0, self.callers());
        let made = self.logs.iter().filter_map(|log| blocked(log.group(), log.place(), log.callers()));
        made.chain(next()).take(BEAT_GROUPS).collect()
    }

    /// All threads that have made calls and have not ended.
    fn callers(&self) -> Vec<CallingThread> {
        let past = self.past_callers.iter().filter(|thread| !thread.has_ended()).cloned();
        self.logs.iter().flat_map(|log| log.callers()).chain(past).collect()
    }
}

impl Seen {
    /// Its duration; zero while it is pending.
    fn took(&self) -> Duration {
        self.ended.map_or(Duration::ZERO, |(ticks, _)| nanos(ticks))
    }

    fn ended_at(&self) -> u64 {
        self.started.0 + self.ended.map_or(0, |(ticks, _)| ticks)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::call::{Call, CallInfo, Collective};

    fn call(sequence: u64, members: &Arc<Members>) -> Call {
        let info = CallInfo { step: Some(9), ..CallInfo::bare(Collective::Barrier, 1, sequence, "a.rs:1:1") };
        Call::new(info, members.clone(), 0, Duration::from_secs(1))
    }

    /// Makes calls with these sequence numbers; the last one fails.
    fn calls(log: &Log, members: &Arc<Members>, sequences: std::ops::Range<u64>) {
        for sequence in sequences.clone() {
            let call = call(sequence, members);
            log.begin(&call);
            log.end(&call, sequence + 1 != sequences.end);
        }
    }

    #[test]
    fn the_last_calls_are_kept_and_those_under_way() {
        let (history, members) = (History::new(3), Arc::new(Members::all(3)));
        let log = history.open(1, members.clone());
        calls(&log, &members, 0..5);
        members.expect(2);
        log.begin(&call(5, &members));
        let records = history.records();
        assert_eq!(records.iter().map(|record| record.sequence).collect::<Vec<_>>(), [3, 4, 5]);
        assert_eq!(records.iter().map(|record| record.ok).collect::<Vec<_>>(), [true, false, false]);
        assert_eq!(records.iter().filter(|record| record.took_us.is_none()).count(), 1);
        assert_eq!(history.pending()[0].waiting_for, [2]);

        let beat = history.heartbeat(Some(9));
        assert_eq!((beat.pending.len(), beat.pending[0].call.sequence), (1, 5));
        assert_eq!((beat.step, beat.last.unwrap().sequence), (Some(9), 4));
    }

    #[test]
    fn the_calls_of_groups_that_are_gone_are_remembered() {
        let (history, members) = (History::new(4), Arc::new(Members::all(2)));
        let (first, second) = (history.open(1, members.clone()), history.open(2, members.clone()));
        calls(&first, &members, 0..3);
        history.close(&first);
        assert_eq!(history.heartbeat(None).last.unwrap().sequence, 2);
        calls(&second, &members, 3..5);
        let sequences = |history: &History| history.records().iter().map(|call| call.sequence).collect::<Vec<_>>();
        assert_eq!(sequences(&history), [1, 2, 3, 4]);
        history.close(&second);
        assert_eq!(sequences(&history), [1, 2, 3, 4]);
        assert!(history.pending().is_empty());
        assert_eq!(history.heartbeat(None).last.unwrap().sequence, 4);
    }

    #[test]
    fn nothing_is_kept_if_that_is_wanted() {
        let (history, members) = (History::new(0), Arc::new(Members::all(2)));
        let log = history.open(1, members.clone());
        calls(&log, &members, 0..1);
        assert!(history.records().is_empty() && history.heartbeat(None).last.is_none());
        log.begin(&call(1, &members));
        assert_eq!(history.records().len(), 1, "it is not done");
        history.close(&log);
        assert!(history.records().is_empty());
    }

    #[test]
    fn a_group_is_blocked_while_all_threads_are_that_call_on_it() {
        let (history, members) = (History::new(3), [0; 2].map(|_| Arc::new(Members::all(2))));
        let (one, other) = (history.open(1, members[0].clone()), history.open(2, members[1].clone()));
        let blocked = || history.heartbeat(None).blocked.iter().map(|group| group.group).collect::<Vec<_>>();
        calls(&other, &members[1], 0..1);
        one.begin(&call(0, &members[0]));
        assert_eq!(blocked(), [0_u64; 0], "it computes");
        members[0].expect(1);
        assert_eq!(blocked(), [1, 2, 3], "the third is the next of all ranks");
        let another = std::thread::scope(|scope| {
            let another = scope.spawn(|| {
                calls(&other, &members[1], 1..2);
                blocked()
            });
            another.join().unwrap()
        });
        assert_eq!(another, [1], "a thread that may call is alive");
        assert_eq!(blocked(), [1, 2, 3], "it has ended");
        let worker = CallingThread::new();
        lock(&history.groups).past_callers.push(worker);
        assert_eq!(blocked(), [1, 2], "a worker of a group that is gone is alive");
    }

    #[test]
    fn a_heartbeat_is_small_whatever_happens() {
        let history = History::new(1);
        for group in 0..1000 {
            let members = Arc::new(Members::all(10_000));
            (0..10_000).for_each(|rank| members.expect(rank));
            history.open(group, members.clone()).begin(&call(group, &members));
        }
        assert!(postcard::to_stdvec(&history.heartbeat(None)).unwrap().len() < 4096);
    }
}
