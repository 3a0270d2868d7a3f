//! The order in which several groups launch on one device: the same on all ranks, without a coordinator.
//!
//! Collectives of two communicators that are launched in one order on one device and in another order on the next can
//! wait for each other forever. So each launch gets a timestamp that its ranks agree on, and each rank launches by
//! timestamp: the total order of Skeen, in K. Birman and T. Joseph, "Reliable communication in the presence of
//! failures", ACM TOCS 5 (1), 1987.
//!
//! A call takes part only after all its ranks have entered it, so no group waits for calls that a program makes late or
//! never. Each rank then proposes its clock; the largest proposal becomes the timestamp, ties go to the smaller group
//! number. A call is launched when no other call that is pending on this rank comes before it in this order, or still
//! can: a timestamp is never smaller than the rank's own proposal, and later proposals are larger than all earlier
//! timestamps.

use std::collections::BTreeMap;
use std::sync::{Condvar, Mutex, PoisonError};
use std::time::Duration;

use crate::poison_free_lock::lock;

/// Calls that wait for their launch on one device.
#[derive(Debug, Default)]
pub(crate) struct LaunchOrder {
    state: Mutex<State>,
    /// Notified when a call gets its timestamp, and when one leaves.
    changed: Condvar,
}

#[derive(Debug, Default)]
struct State {
    /// Not smaller than any proposal or timestamp so far.
    clock: u64,
    /// One entry per group, since a group has at most one call here at a time.
    pending: BTreeMap<u64, Stamp>,
}

#[derive(Clone, Copy, Debug)]
struct Stamp {
    time: u64,
    agreed: bool,
}

/// A call's turn in the order; dropped when the call is launched or has failed.
#[derive(Debug)]
pub(crate) struct Turn<'a> {
    order: &'a LaunchOrder,
    group: u64,
    /// Timestamp that this rank proposes.
    pub(crate) proposal: u64,
}

impl LaunchOrder {
    /// Adds a call of `group` that all ranks of the group have entered.
    pub(crate) fn propose(&self, group: u64) -> Turn<'_> {
        let mut state = lock(&self.state);
        state.clock += 1;
        let proposal = state.clock;
        state.pending.insert(group, Stamp { time: proposal, agreed: false });
        Turn { order: self, group, proposal }
    }
}

impl Turn<'_> {
    /// Sets the timestamp: the largest of all ranks' proposals.
    pub(crate) fn agree(&self, time: u64) {
        let mut state = lock(&self.order.state);
        state.clock = state.clock.max(time);
        state.pending.insert(self.group, Stamp { time, agreed: true });
        self.order.changed.notify_all();
    }

    /// Waits for this call's turn, at most for `patience`; true if it has come.
    pub(crate) fn wait(&self, patience: Duration) -> bool {
        let waiting = |state: &mut State| !state.is_first(self.group);
        let waited = self.order.changed.wait_timeout_while(lock(&self.order.state), patience, waiting);
        let (state, _) = waited.unwrap_or_else(PoisonError::into_inner);
        state.is_first(self.group)
    }
}

impl State {
    fn is_first(&self, group: u64) -> bool {
        let Some(mine) = self.pending.get(&group).filter(|stamp| stamp.agreed) else { return false };
        self.pending.iter().all(|(other, stamp)| *other == group || (stamp.time, *other) > (mine.time, group))
    }
}

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        lock(&self.order.state).pending.remove(&self.group);
        self.order.changed.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn now(turn: &Turn<'_>) -> bool {
        turn.wait(Duration::ZERO)
    }

    #[test]
    fn a_call_waits_for_those_that_may_come_before_it() {
        let order = LaunchOrder::default();
        let (a, b) = (order.propose(1), order.propose(2));
        assert!(!now(&a), "not agreed");
        b.agree(b.proposal);
        assert!(!now(&b), "a could get the time it proposed");
        a.agree(7);
        assert!(now(&b) && !now(&a), "a comes later");
        drop(b);
        assert!(now(&a));
    }

    #[test]
    fn later_proposals_are_behind_what_was_agreed() {
        let order = LaunchOrder::default();
        let a = order.propose(9);
        a.agree(100);
        let b = order.propose(1);
        assert_eq!(b.proposal, 101);
        assert!(now(&a));
    }

    #[test]
    fn ties_go_to_the_smaller_group() {
        let order = LaunchOrder::default();
        let (a, b) = (order.propose(3), order.propose(2));
        a.agree(5);
        b.agree(5);
        assert!(now(&b) && !now(&a));
    }

    /// Every rank of every interleaving launches common groups in the same order: calls of overlapping groups,
    /// proposals and agreements in a random order on each rank.
    #[test]
    fn ranks_agree_whatever_the_timing() {
        // Groups by their ranks.
        const GROUPS: [&[usize]; 4] = [&[0, 1, 2], &[0, 1], &[1, 2], &[0, 2]];
        let mut seed = 1_u64;
        let mut random = |below: usize| {
            seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (seed >> 33) as usize % below
        };
        for _ in 0..300 {
            let orders: Vec<LaunchOrder> = (0..3).map(|_| LaunchOrder::default()).collect();
            let mut launched: [Vec<(usize, u64)>; 3] = Default::default();
            // For each group its round and the agreed time; for each group and rank the turn, whether it knows the
            // time, and whether it was launched.
            let mut rounds = [0_u64; 4];
            let mut times = [None; 4];
            let mut turns: [[Option<Turn<'_>>; 3]; 4] = Default::default();
            let (mut knows, mut gone) = ([[false; 3]; 4], [[false; 3]; 4]);
            while rounds.iter().any(|round| *round < 5) {
                let (group, rank) = (random(4), random(3));
                let members = GROUPS[group];
                if !members.contains(&rank) || rounds[group] == 5 || gone[group][rank] {
                    continue;
                }
                match (&turns[group][rank], times[group]) {
                    (None, _) => {
                        turns[group][rank] = Some(orders[rank].propose(group as u64));
                        let proposals = members.iter().map(|r| turns[group][*r].as_ref().map(|turn| turn.proposal));
                        times[group] = proposals.collect::<Option<Vec<u64>>>().and_then(|all| all.into_iter().max());
                    }
                    (Some(turn), Some(time)) if !knows[group][rank] => {
                        turn.agree(time);
                        knows[group][rank] = true;
                    }
                    (Some(turn), Some(_)) if turn.wait(Duration::ZERO) => {
                        launched[rank].push((group, rounds[group]));
                        turns[group][rank] = None;
                        gone[group][rank] = true;
                        if members.iter().all(|r| gone[group][*r]) {
                            (gone[group], knows[group], times[group]) = ([false; 3], [false; 3], None);
                            rounds[group] += 1;
                        }
                    }
                    _ => {}
                }
            }
            for (a, b) in [(0, 1), (1, 2), (0, 2)] {
                let common = |rank: usize, other: usize| -> Vec<(usize, u64)> {
                    launched[rank].iter().copied().filter(|(group, _)| GROUPS[*group].contains(&other)).collect()
                };
                assert_eq!(common(a, b), common(b, a));
            }
        }
    }
}
