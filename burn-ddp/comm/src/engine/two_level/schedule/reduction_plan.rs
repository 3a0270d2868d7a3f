//! Reductions between machines: which rank reduces and sends what, and when.

use std::ops::Range;

use super::{Exchanged, Step};
use crate::engine::host_engine::fit_one_exchange;
use crate::engine::shm::part;
use crate::topology::Machines;

/// Schedules by which the ranks of several machines reduce a buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::engine::two_level) enum ReductionSchedule {
    /// The first rank of each machine sends all its machine's buffers to those of the others, and reduces all.
    OneExchange,
    /// Each rank gets the machines' partial results of its part of the elements, puts them together and returns the
    /// results; see [`Plan`].
    Parts,
}

impl ReductionSchedule {
    /// The schedule for a buffer of `bytes` per rank.
    pub(in crate::engine::two_level) fn choose(machines: &Machines, bytes: usize) -> ReductionSchedule {
        match fit_one_exchange(bytes, machines.rank_count()) {
            true => ReductionSchedule::OneExchange,
            false => ReductionSchedule::Parts,
        }
    }
}

/// Part of a rank in a reduction.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(in crate::engine::two_level) struct Plan {
    /// By local rank of this machine, the elements for which that rank makes the machine's partial results.
    pub(in crate::engine::two_level) work: Vec<Vec<Range<usize>>>,
    /// This rank's work in its order, each piece with the rank that puts its partial results together; `None` is this
    /// rank.
    pub(in crate::engine::two_level) pieces: Vec<(Option<usize>, Range<usize>)>,
    /// Ranks of other machines, and the elements for which they send partial results that this rank puts together.
    pub(in crate::engine::two_level) receives: Vec<Exchanged>,
    /// True if results go back to the ranks whose partial results they are made of.
    pub(in crate::engine::two_level) returns: bool,
}

/// `len` elements in chunks of about the same length, at most `most` each; one chunk at least.
pub(in crate::engine::two_level) fn chunks(len: usize, most: usize) -> impl Iterator<Item = Range<usize>> {
    let count = len.div_ceil(most.max(1)).max(1);
    (0..count).map(move |nth| part(len, 1, count, nth))
}

impl Plan {
    /// Plan of group rank `me` for an all-reduce in which each machine puts together one of `segments`.
    ///
    /// Each machine cuts segment `o` into as many parts as it has ranks. On machine `o`, rank `j` puts part `j`
    /// together; on any other machine, rank `j` makes that machine's partial results of part `j`.
    pub(in crate::engine::two_level) fn all_reduce(machines: &Machines, me: usize, segments: &[Range<usize>]) -> Plan {
        let here = machines.machine_of(me);
        let parts = |machine: usize, segment: &Range<usize>| {
            let (start, ranks) = (segment.start, machines.ranks_of(machine).to_vec());
            let (len, count) = (segment.len(), ranks.len());
            ranks.into_iter().enumerate().map(move |(nth, rank)| {
                let part = part(len, 1, count, nth);
                (rank, start + part.start..start + part.end)
            })
        };
        let work = vec![Vec::new(); machines.ranks_of(here).len()];
        let mut plan = Plan { work, pieces: vec![], receives: vec![], returns: true };
        for (machine, segment) in segments.iter().enumerate() {
            for (nth, (rank, part)) in parts(here, segment).enumerate().filter(|(_, (_, part))| !part.is_empty()) {
                plan.work[nth].push(part.clone());
                if rank != me {
                    continue;
                }
                if machine == here {
                    plan.pieces.push((None, part.clone()));
                    for other in (0..segments.len()).filter(|other| *other != here) {
                        let common = parts(other, segment).map(|(peer, theirs)| (peer, common(&theirs, &part)));
                        let common = common.filter(|(_, range)| !range.is_empty());
                        plan.receives.extend(common.map(|(peer, range)| Exchanged { peer, range }));
                    }
                } else {
                    let common = parts(machine, segment).map(|(peer, theirs)| (Some(peer), common(&theirs, &part)));
                    plan.pieces.extend(common.filter(|(_, range)| !range.is_empty()));
                }
            }
        }
        plan
    }

    /// Plan of group rank `me` for the elements `chunk` of each row of a reduce-scatter of rows of `len` elements: each
    /// rank puts its row together. The row of local rank `i` of any machine is the work of local rank `i` here, modulo
    /// the number of ranks here.
    pub(in crate::engine::two_level) fn reduce_scatter(
        machines: &Machines,
        me: usize,
        len: usize,
        chunk: Range<usize>,
    ) -> Plan {
        let here = machines.machine_of(me);
        let ranks = machines.ranks_of(here);
        let row = |rank: usize| rank * len + chunk.start..rank * len + chunk.end;
        let work = vec![Vec::new(); ranks.len()];
        let mut plan = Plan { work, pieces: vec![], receives: vec![], returns: false };
        for machine in 0..machines.count() {
            for (nth, rank) in machines.ranks_of(machine).iter().enumerate() {
                let worker = nth % ranks.len();
                plan.work[worker].push(row(*rank));
                if ranks[worker] == me {
                    plan.pieces.push(((*rank != me).then_some(*rank), row(*rank)));
                }
            }
            if machine != here {
                let theirs = machines.ranks_of(machine);
                let peer = theirs[machines.local_rank_of(me) % theirs.len()];
                plan.receives.push(Exchanged { peer, range: row(me) });
            }
        }
        plan
    }

    /// The elements that this rank puts together.
    pub(in crate::engine::two_level) fn own(&self) -> Range<usize> {
        self.pieces.iter().find(|(peer, _)| peer.is_none()).map_or(0..0, |(_, range)| range.clone())
    }

    /// The frames with the partial results of chunk `nth`. This rank's partial results lie in the order of the pieces.
    /// `partial_bytes` are the bytes per element of each machine.
    pub(in crate::engine::two_level) fn partials(
        &self,
        nth: usize,
        (machines, me): (&Machines, usize),
        partial_bytes: &[usize],
    ) -> Step {
        let (mut end, ours) = (0, partial_bytes[machines.machine_of(me)]);
        let send = |(peer, range): &(Option<usize>, Range<usize>)| {
            let start = end;
            end += range.len() * ours;
            Some(Exchanged { peer: (*peer)?, range: start..end })
        };
        let sends = self.pieces.iter().filter_map(send).collect();
        let receive = |from: &Exchanged| {
            let theirs = partial_bytes[machines.machine_of(from.peer)];
            Exchanged { peer: from.peer, range: 0..from.range.len() * theirs }
        };
        Step { number: steps_of(nth).0, sends, receives: self.receives.iter().map(receive).collect() }
    }

    /// The frames with the results of chunk `nth`, of `size` bytes per element.
    pub(in crate::engine::two_level) fn results(&self, nth: usize, size: usize) -> Step {
        let mut step = Step { number: steps_of(nth).1, ..Step::default() };
        if self.returns {
            let start = self.own().start;
            let send = |to: &Exchanged| {
                let range = (to.range.start - start) * size..(to.range.end - start) * size;
                Exchanged { peer: to.peer, range }
            };
            step.sends = self.receives.iter().map(send).collect();
            let receive = |(peer, range): &(Option<usize>, Range<usize>)| {
                Some(Exchanged { peer: (*peer)?, range: 0..range.len() * size })
            };
            step.receives = self.pieces.iter().filter_map(receive).collect();
        }
        step
    }
}

/// The steps in which the partial results of chunk `nth` travel, and its results. Frames travel in the order of their
/// steps: a chunk's results after the next chunk's partial results. Step 0 is that of the weights.
pub(in crate::engine::two_level) fn steps_of(nth: usize) -> (usize, usize) {
    (2 * nth + 1, 2 * nth + 4)
}

/// What a rank does next in a reduction of several chunks; each has the number of its chunk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::engine::two_level) enum Turn {
    /// Reduces the buffers of its machine's ranks to partial results, and sends them.
    SendPartials(usize),
    /// Waits for the partial results of other machines, puts its own elements together, and sends the results.
    PutTogether(usize),
    /// Waits for the results of other ranks, and hands them to the ranks of its machine.
    HandOut(usize),
}

/// The turns of each rank: partial results of a chunk leave before those of the chunk before are waited for, and the
/// results of the chunk before that are handed out.
pub(in crate::engine::two_level) fn turns(chunks: usize) -> impl Iterator<Item = Turn> {
    (0..chunks + 2)
        .flat_map(move |now| {
            let chunk = move |before: usize| now.checked_sub(before).filter(|nth| *nth < chunks);
            [chunk(0).map(Turn::SendPartials), chunk(1).map(Turn::PutTogether), chunk(2).map(Turn::HandOut)]
        })
        .flatten()
}

fn common(a: &Range<usize>, b: &Range<usize>) -> Range<usize> {
    let start = a.start.max(b.start);
    start..a.end.min(b.end).max(start)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::two_level::schedule::simulation_tests::blocks;

    #[test]
    fn small_buffers_take_one_exchange() {
        let two_by_four = blocks(&[4, 4]);
        let choose = |bytes| ReductionSchedule::choose(&two_by_four, bytes);
        assert_eq!(choose(8 * 1024), ReductionSchedule::OneExchange);
        assert_eq!(choose(8 * 1024 + 1), ReductionSchedule::Parts);
        assert_eq!(choose(usize::MAX), ReductionSchedule::Parts);
    }

    #[test]
    fn chunks_overlap() {
        use Turn::{HandOut, PutTogether, SendPartials};
        let of_three = [
            SendPartials(0),
            SendPartials(1),
            PutTogether(0),
            SendPartials(2),
            PutTogether(1),
            HandOut(0),
            PutTogether(2),
            HandOut(1),
            HandOut(2),
        ];
        assert_eq!(turns(3).collect::<Vec<_>>(), of_three);
    }
}
