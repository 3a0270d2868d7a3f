//! Schedules that bring a row of each rank, or of each machine, to all machines.

use super::{Exchanged, Step};
use crate::topology::Machines;

/// The rank of `machine` with which `rank` of another machine exchanges data that all ranks of a machine have or get.
pub(in crate::engine::two_level) fn counterpart(machines: &Machines, machine: usize, rank: usize) -> usize {
    let ranks = machines.ranks_of(machine);
    ranks[machines.local_rank_of(rank) % ranks.len()]
}

/// For each rank of `machine`, the ranks whose rows it puts in at a gather: itself, and those of other machines that
/// send theirs to it.
pub(in crate::engine::two_level) fn rows_by_local_rank(machines: &Machines, machine: usize) -> Vec<Vec<usize>> {
    let mut rows: Vec<Vec<usize>> = machines.ranks_of(machine).iter().map(|rank| vec![*rank]).collect();
    for rank in (0..machines.rank_count()).filter(|rank| machines.machine_of(*rank) != machine) {
        rows[machines.local_rank_of(counterpart(machines, machine, rank))].push(rank);
    }
    rows
}

/// The exchange of rank `me` in which all ranks get what the ranks of each machine agree on: `lens[m]` bytes of machine
/// `m`, in the order of the machines.
pub(in crate::engine::two_level) fn announcements(machines: &Machines, me: usize, lens: &[usize]) -> Step {
    let here = machines.machine_of(me);
    let is_elsewhere = |rank: &usize| machines.machine_of(*rank) != here;
    let listens_to_me = |rank: &usize| counterpart(machines, here, *rank) == me;
    let listeners = (0..machines.rank_count()).filter(is_elsewhere).filter(listens_to_me);
    let others = (0..machines.count()).filter(|machine| *machine != here);
    let receive = |machine| Exchanged { peer: counterpart(machines, machine, me), range: 0..lens[machine] };
    Step {
        number: 0,
        sends: listeners.map(|peer| Exchanged { peer, range: 0..lens[here] }).collect(),
        receives: others.map(receive).collect(),
    }
}
