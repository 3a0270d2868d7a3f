//! Schedules that bring a buffer from one machine to all others.

use super::{Exchanged, Step};
use crate::engine::host_engine::fit_one_exchange;
use crate::topology::Machines;

/// Bytes of a broadcast that a machine passes on while it receives the next.
const CHAIN_BYTES: usize = 1 << 20;

/// Schedules by which the first ranks of several machines pass on a buffer that one machine has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::engine::two_level) enum BroadcastSchedule {
    /// The machine sends it to each other one.
    Direct,
    /// Each machine sends it to the next, chunk by chunk, so each cable carries it once.
    Chain,
}

impl BroadcastSchedule {
    /// The schedule for a buffer of `bytes`.
    pub(in crate::engine::two_level) fn choose(machines: &Machines, bytes: usize) -> BroadcastSchedule {
        let receivers = machines.count() - 1;
        match receivers == 1 || fit_one_exchange(bytes, receivers) {
            true => BroadcastSchedule::Direct,
            false => BroadcastSchedule::Chain,
        }
    }
}

/// Steps of the first rank of `machine` in a broadcast of `len` bytes that machine `root` has. In the first step it
/// hears of the call from the first rank of every other machine. In each step what arrives lies behind what leaves.
pub(in crate::engine::two_level) fn broadcast(
    machines: &Machines,
    machine: usize,
    root: usize,
    len: usize,
) -> Vec<Step> {
    let leader = |machine: usize| machines.ranks_of(machine)[0];
    let count = machines.count();
    let is_chain = BroadcastSchedule::choose(machines, len) == BroadcastSchedule::Chain;
    let all = if is_chain { 0..0 } else { 0..len };
    let others = (0..count).filter(|other| *other != machine);
    let send = |other| Exchanged { peer: leader(other), range: if machine == root { all.clone() } else { 0..0 } };
    let receive = |other| Exchanged { peer: leader(other), range: if other == root { all.clone() } else { 0..0 } };
    let (sends, receives) = (others.clone().map(send).collect(), others.map(receive).collect());
    let mut steps = vec![Step { number: 0, sends, receives }];
    if is_chain {
        // The machines stand in the order of their numbers, from the root on. In round `n` the machine at `place` sends
        // chunk `n - place`.
        let place = (machine + count - root) % count;
        let at = |place: usize| leader((root + place) % count);
        let chunks = len.div_ceil(CHAIN_BYTES);
        let bytes = |chunk: usize| chunk * CHAIN_BYTES..((chunk + 1) * CHAIN_BYTES).min(len);
        let exchanged = |peer: usize, chunk: usize| Exchanged { peer: at(peer), range: bytes(chunk) };
        let is_chunk = |chunk: &usize| *chunk < chunks;
        for round in 0..chunks + count {
            let going = round.checked_sub(place).filter(|_| place + 1 < count).filter(is_chunk);
            let coming = (round + 1).checked_sub(place).filter(|_| place > 0).filter(is_chunk);
            let sends = going.map(|chunk| exchanged(place + 1, chunk)).into_iter().collect();
            let receives = coming.map(|chunk| exchanged(place - 1, chunk)).into_iter().collect();
            steps.push(Step { number: round + 1, sends, receives });
        }
        steps.retain(|step| !step.sends.is_empty() || !step.receives.is_empty());
    }
    steps
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::two_level::schedule::simulation_tests::blocks;

    #[test]
    fn small_buffers_and_two_machines_need_no_chain() {
        // One cable carries what a broadcast sends between two machines in any case.
        assert_eq!(BroadcastSchedule::choose(&blocks(&[4, 4]), usize::MAX), BroadcastSchedule::Direct);
        let three = blocks(&[1, 2, 1]);
        assert_eq!(BroadcastSchedule::choose(&three, 32 * 1024), BroadcastSchedule::Direct);
        assert_eq!(BroadcastSchedule::choose(&three, 32 * 1024 + 1), BroadcastSchedule::Chain);
    }
}
