//! What a rank is calling, and what it called last.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use crate::call::{Awaited, Call, CallInfo};
use crate::health::lock;
use crate::post_mortem::{Pending, Record, since_1970};

/// Most pending calls in a heartbeat. A rank has one per thread that calls.
const BEAT_CALLS: usize = 8;
/// Most ranks named in a heartbeat's call.
const BEAT_RANKS: usize = 64;

/// The calls of one rank. Written by the threads that call, read by whoever reports.
#[derive(Debug)]
pub(crate) struct History {
    inner: Mutex<Inner>,
}

#[derive(Debug)]
struct Inner {
    /// How many that are done are kept.
    cap: usize,
    next_id: u64,
    /// Oldest first.
    done: VecDeque<Done>,
    pending: Vec<UnderWay>,
}

#[derive(Debug)]
struct UnderWay {
    id: u64,
    info: CallInfo,
    started: Instant,
    awaited: Option<Arc<Awaited>>,
}

#[derive(Debug)]
struct Done {
    info: CallInfo,
    started: Instant,
    took: Duration,
    ok: bool,
}

/// What a rank tells the others of itself at every heartbeat.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Heartbeat {
    /// The training step, if the program says.
    pub step: Option<u64>,
    /// The collectives it is in.
    pub pending: Vec<PendingCall>,
    /// The last collective it finished.
    pub last: Option<CallInfo>,
    /// How long ago that was, in milliseconds.
    pub idle_ms: u64,
}

/// A collective that a rank is in.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct PendingCall {
    /// What it called.
    pub call: CallInfo,
    /// How long ago, in milliseconds.
    pub since_ms: u64,
    /// Whose part has not come.
    pub waiting_for: Vec<usize>,
}

impl History {
    /// Keeps the last `cap` calls.
    pub(crate) fn new(cap: usize) -> History {
        History { inner: Mutex::new(Inner { cap, next_id: 0, done: VecDeque::new(), pending: Vec::new() }) }
    }

    /// A call begins; the number by which it [ends](Self::end).
    pub(crate) fn begin(&self, call: &Call) -> u64 {
        let mut inner = lock(&self.inner);
        let id = inner.next_id;
        inner.next_id += 1;
        inner.pending.push(UnderWay {
            id,
            info: call.info.clone(),
            started: call.started,
            awaited: call.awaited.clone(),
        });
        id
    }

    pub(crate) fn end(&self, id: u64, ok: bool) {
        let mut inner = lock(&self.inner);
        let Some(nth) = inner.pending.iter().position(|call| call.id == id) else { return };
        let UnderWay { info, started, .. } = inner.pending.swap_remove(nth);
        if inner.done.len() >= inner.cap {
            inner.done.pop_front();
        }
        if inner.cap > 0 {
            inner.done.push_back(Done { info, started, took: started.elapsed(), ok });
        }
    }

    /// What is to be told of this rank, which is in `step`.
    pub(crate) fn heartbeat(&self, step: Option<u64>) -> Heartbeat {
        let inner = lock(&self.inner);
        let pending = inner.pending.iter().take(BEAT_CALLS).map(|call| PendingCall {
            call: call.info.clone(),
            since_ms: millis(call.started.elapsed()),
            waiting_for: call.waiting_for().into_iter().take(BEAT_RANKS).collect(),
        });
        let last = inner.done.back();
        let idle = last.map_or(Duration::ZERO, |done| done.started.elapsed().saturating_sub(done.took));
        Heartbeat { step, pending: pending.collect(), last: last.map(|done| done.info.clone()), idle_ms: millis(idle) }
    }

    /// For a report: the calls under way.
    pub(crate) fn pending(&self) -> Vec<Pending> {
        let inner = lock(&self.inner);
        let pending = inner.pending.iter().map(|call| Pending {
            call: call.info.to_string(),
            group: call.info.group,
            sequence: call.info.sequence,
            since_ms: millis(call.started.elapsed()),
            waiting_for: call.waiting_for(),
        });
        pending.collect()
    }

    /// For a report: all calls that are known, in the order in which they began.
    pub(crate) fn records(&self) -> Vec<Record> {
        let inner = lock(&self.inner);
        let (now, since) = (Instant::now(), since_1970());
        let record = |info: &CallInfo, started: Instant, took: Option<Duration>, ok| Record {
            group: info.group,
            sequence: info.sequence,
            call: info.operation(),
            site: info.site.to_string(),
            step: info.step,
            started: since.saturating_sub(now.saturating_duration_since(started)).as_micros() as u64,
            took_us: took.map(|took| took.as_micros() as u64),
            ok,
        };
        let done = inner.done.iter().map(|done| record(&done.info, done.started, Some(done.took), done.ok));
        let pending = inner.pending.iter().map(|call| record(&call.info, call.started, None, false));
        let mut records: Vec<Record> = done.chain(pending).collect();
        records.sort_by_key(|record| record.started);
        records
    }
}

impl UnderWay {
    fn waiting_for(&self) -> Vec<usize> {
        self.awaited.as_ref().map(|awaited| awaited.ranks()).unwrap_or_default()
    }
}

pub(crate) fn millis(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::call::Collective;

    fn call(sequence: u64) -> Call {
        let info = CallInfo {
            collective: Collective::Barrier,
            reduce: None,
            dtype: None,
            len_elems: 0,
            root: None,
            tag: 0,
            group: 1,
            sequence,
            site: "a.rs:1:1".into(),
            step: Some(9),
        };
        Call::new(info, 0, Duration::from_secs(1))
    }

    #[test]
    fn the_last_calls_are_kept_and_those_under_way() {
        let history = History::new(3);
        for sequence in 0..5 {
            let id = history.begin(&call(sequence));
            history.end(id, sequence != 4);
        }
        let awaited = Arc::new(Awaited::new(3));
        awaited.expect(2);
        history.begin(&Call { awaited: Some(awaited), ..call(5) });
        let records = history.records();
        assert_eq!(records.iter().map(|record| record.sequence).collect::<Vec<_>>(), [2, 3, 4, 5]);
        assert_eq!(records.iter().map(|record| record.ok).collect::<Vec<_>>(), [true, true, false, false]);
        assert_eq!(records.iter().filter(|record| record.took_us.is_none()).count(), 1);
        assert_eq!(history.pending()[0].waiting_for, [2]);

        let beat = history.heartbeat(Some(9));
        assert_eq!((beat.pending.len(), beat.pending[0].call.sequence), (1, 5));
        assert_eq!((beat.step, beat.last.unwrap().sequence), (Some(9), 4));
    }

    #[test]
    fn nothing_is_kept_if_that_is_wanted() {
        let history = History::new(0);
        history.end(history.begin(&call(0)), true);
        assert!(history.records().is_empty());
    }

    #[test]
    fn a_heartbeat_is_small_whatever_happens() {
        let history = History::new(1);
        for sequence in 0..1000 {
            let awaited = Arc::new(Awaited::new(10_000));
            (0..10_000).for_each(|rank| awaited.expect(rank));
            history.begin(&Call { awaited: Some(awaited), ..call(sequence) });
        }
        assert!(postcard::to_stdvec(&history.heartbeat(None)).unwrap().len() < 4096);
    }
}
