//! The meeting point of the communicators of one unique id, where the ranks' parts of a collective come together.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::sync::{Condvar, Mutex, PoisonError};

use super::fake_reduction::{Kind, reduce};
use super::fake_stream::GLANCE;
use crate::poison_free_lock::lock;

/// Communicators of one unique id.
pub(super) struct FakeRendezvous {
    pub(super) id: u64,
    pub(super) size: usize,
    pub(super) state: Mutex<RendezvousState>,
    pub(super) changed: Condvar,
}

/// State of a rendezvous.
#[derive(Default)]
pub(super) struct RendezvousState {
    /// Devices of the ranks that joined, by rank.
    pub(super) joined: BTreeMap<usize, usize>,
    /// Number of ranks that have finalized or aborted their communicator.
    pub(super) finalized: usize,
    /// Collectives under way, by their number.
    rounds: HashMap<u64, Round>,
    /// Messages sent and not received, by sender and receiver.
    mail: HashMap<(usize, usize), VecDeque<Vec<u8>>>,
}

#[derive(Default)]
struct Round {
    parts: BTreeMap<usize, Part>,
    outputs: Option<Vec<Vec<u8>>>,
    taken: usize,
}

/// One rank's side of a collective.
pub(super) struct Part {
    pub(super) what: What,
    pub(super) count: usize,
    pub(super) dtype: i32,
    /// Operator of a reduction; for a scaled sum with this rank's factor alone.
    pub(super) kind: Option<Kind>,
    pub(super) input: Vec<u8>,
}

/// Kind of a collective.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum What {
    AllReduce,
    Reduce(usize),
    Broadcast(usize),
    AllGather,
    ReduceScatter,
}

impl FakeRendezvous {
    pub(super) fn new(id: u64, size: usize) -> FakeRendezvous {
        FakeRendezvous { id, size, state: Mutex::default(), changed: Condvar::new() }
    }

    /// Waits for the other ranks' parts of collective `nth`; returns this rank's output, or `None` if it was aborted. A
    /// collective whose parts do not fit together never ends, as on a device, and is reported to `misused`.
    pub(super) fn meet(
        &self,
        rank: usize,
        nth: u64,
        part: Part,
        aborted: &dyn Fn() -> bool,
        misused: &dyn Fn(String),
    ) -> Option<Vec<u8>> {
        let mut state = lock(&self.state);
        let round = state.rounds.entry(nth).or_default();
        round.parts.insert(rank, part);
        if round.parts.len() == self.size {
            let first = &round.parts[&0];
            let odd = round.parts.iter().find(|(_, part)| !part.fits(first));
            match odd {
                Some((odd, _)) => misused(format!("ranks 0 and {odd} launched different collectives as number {nth}")),
                None => round.outputs = Some(outputs(&round.parts)),
            }
        }
        self.changed.notify_all();
        loop {
            if aborted() {
                return None;
            }
            let round = state.rounds.get_mut(&nth)?;
            if let Some(outputs) = &mut round.outputs {
                let output = std::mem::take(&mut outputs[rank]);
                round.taken += 1;
                if round.taken == self.size {
                    state.rounds.remove(&nth);
                }
                return Some(output);
            }
            state = self.glance(state);
        }
    }

    pub(super) fn send(&self, from: usize, to: usize, bytes: Vec<u8>) {
        lock(&self.state).mail.entry((from, to)).or_default().push_back(bytes);
        self.changed.notify_all();
    }

    pub(super) fn receive(&self, from: usize, to: usize, aborted: &dyn Fn() -> bool) -> Option<Vec<u8>> {
        let mut state = lock(&self.state);
        loop {
            if aborted() {
                return None;
            }
            if let Some(bytes) = state.mail.get_mut(&(from, to)).and_then(VecDeque::pop_front) {
                return Some(bytes);
            }
            state = self.glance(state);
        }
    }

    fn glance<'a>(
        &self,
        state: std::sync::MutexGuard<'a, RendezvousState>,
    ) -> std::sync::MutexGuard<'a, RendezvousState> {
        self.changed.wait_timeout(state, GLANCE).unwrap_or_else(PoisonError::into_inner).0
    }
}

impl Part {
    fn fits(&self, other: &Part) -> bool {
        let scaled = |part: &Part| matches!(part.kind, Some(Kind::Scaled(_)));
        let alike = self.kind == other.kind || (scaled(self) && scaled(other));
        self.what == other.what && self.count == other.count && self.dtype == other.dtype && alike
    }
}

fn outputs(parts: &BTreeMap<usize, Part>) -> Vec<Vec<u8>> {
    let first = &parts[&0];
    let rows: Vec<&[u8]> = parts.values().map(|part| part.input.as_slice()).collect();
    let kind = || match &first.kind {
        Some(Kind::Scaled(_)) => Kind::Scaled(
            parts
                .values()
                .flat_map(|part| if let Some(Kind::Scaled(own)) = &part.kind { own.clone() } else { Vec::new() })
                .collect(),
        ),
        Some(kind) => kind.clone(),
        None => Kind::Sum,
    };
    let all = |output: Vec<u8>| vec![output; parts.len()];
    match first.what {
        What::AllReduce => all(reduce(first.dtype, &kind(), &rows)),
        What::Reduce(root) => {
            let mut outputs = vec![Vec::new(); parts.len()];
            outputs[root] = reduce(first.dtype, &kind(), &rows);
            outputs
        }
        What::Broadcast(root) => all(rows[root].to_vec()),
        What::AllGather => all(rows.concat()),
        What::ReduceScatter => {
            let reduced = reduce(first.dtype, &kind(), &rows);
            reduced.chunks_exact((reduced.len() / parts.len()).max(1)).map(<[u8]>::to_vec).collect()
        }
    }
}
