//! Calls of one group on one rank: written at every call without a lock, read rarely.
//!
//! One thread at a time writes: the thread whose turn it is in the group. Readers copy an entry, and use the copy only
//! if the entry's version was even and did not change meanwhile (a seqlock).

use std::sync::atomic::{AtomicU64, Ordering, fence};
use std::sync::{Arc, Mutex};

use super::site_cell::SiteCell;
use crate::call::{Call, CallInfo, CallingThread, Collective, GroupId, Members};
use crate::clock::Ticks;
use crate::poison_free_locks::lock;
use crate::tensor_type::Shape;
use crate::{DType, ReduceOp};

/// Code that stands for no reduce op or no dtype.
const NO_CODE: u8 = u8::MAX;
/// Number that stands for no root or no step.
const NO_NUMBER: u64 = u64::MAX;
/// Attempts to read an entry while it is being written.
const LOOKS: usize = 1000;

/// The last calls of a group.
#[derive(Debug)]
pub(crate) struct Log {
    group: u64,
    members: Arc<Members>,
    /// Number of calls that readers get; there may be more entries.
    cap: usize,
    /// Number of calls that have begun. Call `n` is in entry `n % entries.len()`.
    begun: AtomicU64,
    /// [Place](CallInfo::place) of the last collective that has begun, not of a call between two ranks; 0 before the
    /// first.
    place: AtomicU64,
    /// Id of the thread that made the last call.
    caller: AtomicU64,
    /// Threads that have made calls. Added to by the thread whose turn it is.
    callers: Mutex<Vec<CallingThread>>,
    /// Ring of the last calls. Its length is a power of two: a division would cost more than all the rest of `begin`.
    entries: Box<[Entry]>,
}

#[derive(Debug, Default)]
struct Entry {
    /// Odd while the entry is being written; afterwards twice the number of calls begun until then, its own included.
    version: AtomicU64,
    /// Codes of the collective, the reduce op and the dtype, and the digest.
    kind: AtomicU64,
    len_elems: AtomicU64,
    shape: AtomicU64,
    root: AtomicU64,
    tag: AtomicU64,
    sequence: AtomicU64,
    step: AtomicU64,
    started: AtomicU64,
    /// 0 while the call is pending; then its duration in ticks, shifted left by two, with bit 0 set, and bit 1 set if
    /// it succeeded.
    ended: AtomicU64,
    site: SiteCell,
}

/// A copy of an entry.
#[derive(Clone, Debug)]
pub(crate) struct Seen {
    pub(crate) info: CallInfo,
    pub(crate) started: Ticks,
    /// `None` while the call is pending; then its duration in ticks, and true if it succeeded.
    pub(crate) ended: Option<(u64, bool)>,
    /// The members of the call's group, if the group is a sub-group; else empty.
    pub(crate) ranks: Vec<usize>,
}

impl Log {
    /// A log of the last `cap` calls, at least one.
    pub(super) fn new(group: u64, members: Arc<Members>, cap: usize) -> Log {
        let cap = cap.max(1);
        let entries = (0..cap.next_power_of_two()).map(|_| Entry::default()).collect();
        let (begun, place, caller) = (AtomicU64::new(0), AtomicU64::new(0), AtomicU64::new(0));
        Log { group, members, cap, begun, place, caller, callers: Mutex::default(), entries }
    }

    /// Notes that `call` begins. Only by the thread whose turn it is.
    #[inline]
    pub(crate) fn begin(&self, call: &Call) {
        let number = self.begun.load(Ordering::Relaxed);
        let entry = self.entry(number);
        let info = &call.info;
        let caller = CallingThread::current_id();
        if self.caller.load(Ordering::Relaxed) != caller {
            self.add_caller(caller);
        }
        if let Some(place) = info.place() {
            self.place.store(place, Ordering::Relaxed);
        }
        entry.version.store(2 * number + 1, Ordering::Relaxed);
        fence(Ordering::Release);
        let codes = [
            info.collective.code(),
            info.reduce.map_or(NO_CODE, ReduceOp::code),
            info.dtype.map_or(NO_CODE, DType::code),
        ];
        let [collective, reduce, dtype] = codes.map(u64::from);
        for (cell, value) in [
            (&entry.kind, collective | reduce << 8 | dtype << 16 | u64::from(info.digest) << 32),
            (&entry.len_elems, info.len_elems),
            (&entry.shape, info.shape.map_or(0, Shape::code)),
            (&entry.root, info.root.map_or(NO_NUMBER, |root| root as u64)),
            (&entry.tag, info.tag),
            (&entry.sequence, info.sequence),
            (&entry.step, info.step.unwrap_or(NO_NUMBER)),
            (&entry.started, call.started_ticks().0),
            (&entry.ended, 0),
        ] {
            cell.store(value, Ordering::Relaxed);
        }
        entry.site.set(&info.site);
        entry.version.store(2 * number + 2, Ordering::Release);
        self.begun.store(number + 1, Ordering::Release);
    }

    #[cold]
    fn add_caller(&self, id: u64) {
        self.caller.store(id, Ordering::Relaxed);
        let mut callers = lock(&self.callers);
        callers.retain(|thread| !thread.has_ended());
        if callers.iter().all(|thread| thread.id() != id) {
            callers.push(CallingThread::current());
        }
    }

    /// Runs `wait`, which blocks until the thread that made the last call has finished that call.
    pub(crate) fn await_caller<R>(&self, wait: impl FnOnce() -> R) -> R {
        let id = self.caller();
        let caller = lock(&self.callers).iter().find(|thread| thread.id() == id).cloned();
        match caller {
            Some(caller) => caller.awaited(wait),
            None => wait(),
        }
    }

    /// Number of the group.
    pub(super) fn group(&self) -> u64 {
        self.group
    }

    /// [Place](CallInfo::place) of the last collective that has begun, not of a call between two ranks; 0 before the
    /// first.
    pub(super) fn place(&self) -> u64 {
        self.place.load(Ordering::Relaxed)
    }

    /// Id of the thread that made the last call.
    pub(super) fn caller(&self) -> u64 {
        self.caller.load(Ordering::Relaxed)
    }

    /// Threads that have made calls and have not ended.
    pub(super) fn callers(&self) -> Vec<CallingThread> {
        lock(&self.callers).iter().filter(|thread| !thread.has_ended()).cloned().collect()
    }

    /// Notes that the call that began last has ended. Only by the thread whose turn it is.
    #[inline]
    pub(crate) fn end(&self, call: &Call, ok: bool) {
        let Some(number) = self.begun.load(Ordering::Relaxed).checked_sub(1) else { return };
        let took = Ticks::now().0.saturating_sub(call.started_ticks().0);
        self.entry(number).ended.store(took << 2 | u64::from(ok) << 1 | 1, Ordering::Relaxed);
    }

    /// Ranks that the pending call waits for.
    pub(super) fn awaited(&self) -> Vec<usize> {
        self.members.awaited()
    }

    /// Calls that are kept, oldest first.
    pub(super) fn seen(&self) -> Vec<Seen> {
        self.last(self.cap)
    }

    /// The last `count` of the calls that are kept, oldest first.
    pub(super) fn last(&self, count: usize) -> Vec<Seen> {
        let begun = self.begun.load(Ordering::Acquire);
        let first = begun.saturating_sub(count.min(self.cap) as u64);
        (first..begun).filter_map(|number| self.see(number)).collect()
    }

    fn entry(&self, number: u64) -> &Entry {
        &self.entries[number as usize & (self.entries.len() - 1)]
    }

    /// Call `number`, unless a later call has overwritten its entry.
    fn see(&self, number: u64) -> Option<Seen> {
        let entry = self.entry(number);
        for _ in 0..LOOKS {
            let version = entry.version.load(Ordering::Acquire);
            let seen = self.copy(entry);
            fence(Ordering::Acquire);
            if entry.version.load(Ordering::Relaxed) == version && version.is_multiple_of(2) {
                return seen.filter(|_| version == 2 * number + 2);
            }
            std::hint::spin_loop();
        }
        None
    }

    fn copy(&self, entry: &Entry) -> Option<Seen> {
        let read = |cell: &AtomicU64| cell.load(Ordering::Relaxed);
        let number = |cell: &AtomicU64| Some(read(cell)).filter(|number| *number != NO_NUMBER);
        let kind = read(&entry.kind);
        let [collective, reduce, dtype, ..] = kind.to_le_bytes();
        let info = CallInfo {
            reduce: ReduceOp::from_code(reduce),
            dtype: DType::from_code(dtype),
            len_elems: read(&entry.len_elems),
            root: number(&entry.root).map(|root| root as usize),
            tag: read(&entry.tag),
            digest: (kind >> 32) as u32,
            shape: Shape::from_code(read(&entry.shape)),
            step: number(&entry.step),
            ..CallInfo::bare(Collective::from_code(collective)?, self.group, read(&entry.sequence), entry.site.get())
        };
        let ended = Some(read(&entry.ended)).filter(|ended| *ended != 0);
        let ended = ended.map(|ended| (ended >> 2, ended & 2 != 0));
        let ranks = if GroupId(self.group).is_sub_group() { self.members.ranks().to_vec() } else { Vec::new() };
        Some(Seen { info, started: Ticks(read(&entry.started)), ended, ranks })
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicBool;
    use std::time::Duration;

    use super::*;

    fn call(sequence: u64) -> Call {
        // Fields that depend on each other: a mixture of two calls shows.
        let info = CallInfo {
            reduce: Some(ReduceOp::Sum),
            dtype: Some(DType::F32),
            len_elems: 3 * sequence,
            root: Some(sequence as usize),
            tag: !sequence,
            digest: !sequence as u32,
            shape: Some(Shape::of(&[3, sequence as usize])),
            step: Some(sequence),
            ..CallInfo::bare(Collective::AllReduce, 1, sequence, std::panic::Location::caller())
        };
        Call::new(info, Arc::new(Members::all(2)), 0, Duration::from_secs(1))
    }

    #[test]
    fn an_entry_is_what_was_called() {
        let log = Log::new(1, Arc::new(Members::all(2)), 2);
        for sequence in 0..5 {
            let call = call(sequence);
            log.begin(&call);
            log.end(&call, sequence == 3);
        }
        let seen = log.seen();
        assert_eq!(seen.iter().map(|seen| seen.info.sequence).collect::<Vec<_>>(), [3, 4]);
        assert_eq!(seen[1].info, call(4).info);
        assert_eq!(seen.iter().map(|seen| seen.ended.map(|(_, ok)| ok)).collect::<Vec<_>>(), [Some(true), Some(false)]);
        log.begin(&call(5));
        assert_eq!(log.last(1)[0].ended, None);
    }

    #[test]
    fn readers_never_see_a_mixture() {
        let log = Log::new(1, Arc::new(Members::all(2)), 3);
        let stop = AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while !stop.load(Ordering::Relaxed) {
                    for seen in log.seen() {
                        let CallInfo { sequence, len_elems, root, tag, step, .. } = seen.info;
                        assert_eq!((len_elems, tag), (3 * sequence, !sequence));
                        assert_eq!((root, step), (Some(sequence as usize), Some(sequence)));
                    }
                }
            });
            for sequence in 0..200_000 {
                let call = call(sequence);
                log.begin(&call);
                log.end(&call, true);
            }
            stop.store(true, Ordering::Relaxed);
        });
    }
}
