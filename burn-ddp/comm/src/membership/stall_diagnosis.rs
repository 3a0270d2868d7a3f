//! The reason that a collective waits, found by following waits from rank to rank, to the rank for which all others
//! wait.

use std::collections::VecDeque;
use std::time::Duration;

use super::control_messages::Heartbeat;
use super::peer_info::list_ranks;
use crate::call::CallInfo;

/// Most ranks that a diagnosis describes.
const DESCRIBED: usize = 4;

/// Activity of a rank, as far as it is known.
pub(crate) struct Activity {
    /// How it ended, as part of a sentence, if it takes part no more.
    pub(crate) left: Option<&'static str>,
    /// The silent rank that would pass on its messages, if there is one: then its heartbeat is out of date.
    pub(crate) hidden_by: Option<usize>,
    /// Duration of its silence, if it is suspected.
    pub(crate) silent: Option<Duration>,
    /// Its last heartbeat, if there was one.
    pub(crate) beat: Option<Heartbeat>,
}

/// Reason that a collective waits.
#[derive(Debug, Default, PartialEq)]
pub(crate) struct Diagnosis {
    /// The rank that keeps the others waiting, if it is a single one.
    pub(crate) culprit: Option<usize>,
    /// Description of what the awaited ranks do instead of the call; empty if nothing is known.
    pub(crate) text: String,
    /// Pairs of ranks that are both in the call, of which the first waits for data of the second.
    pub(crate) data_missing: Vec<(usize, usize)>,
}

/// Sign that a rank keeps the others waiting, in growing order of certainty.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Sign {
    Idle,
    Left,
    Silent,
}

/// Ranks whose part in `call` has not arrived, where this rank waits for `waiting_for`. An awaited rank that is in the
/// call, too, may wait for others, for instance as the relay of another machine's data: it is replaced by the ranks
/// that it waits for, unless it is silent or out of sight. Returns `waiting_for` itself if no rank remains.
pub(crate) fn missing(call: &CallInfo, waiting_for: &[usize], known: impl Fn(usize) -> Option<Activity>) -> Vec<usize> {
    let mut queue = waiting_for.to_vec();
    let mut seen = Vec::new();
    let mut missing = Vec::new();
    while let Some(rank) = queue.pop() {
        if seen.contains(&rank) {
            continue;
        }
        seen.push(rank);
        match known(rank) {
            Some(Activity { left: None, hidden_by: None, silent: None, beat: Some(beat) }) => {
                match beat.pending.iter().find(|pending| same_call(&pending.call, call)) {
                    Some(same) => queue.extend(&same.waiting_for),
                    None => missing.push(rank),
                }
            }
            _ => missing.push(rank),
        }
    }
    if missing.is_empty() {
        return waiting_for.to_vec();
    }
    missing.sort_unstable();
    missing
}

/// Finds the reason that `call` of rank `me` waits for the ranks `waiting_for`, from the `known` activity of each rank.
pub(crate) fn diagnose(
    me: usize,
    call: &CallInfo,
    waiting_for: &[usize],
    known: impl Fn(usize) -> Option<Activity>,
) -> Diagnosis {
    let mut queue: VecDeque<usize> = waiting_for.iter().copied().collect();
    let mut waits: Vec<(usize, usize)> = waiting_for.iter().map(|rank| (me, *rank)).collect();
    let mut in_call = Vec::new();
    let mut seen = Vec::new();
    let mut signs = Vec::new();
    let mut lines = Vec::new();
    while let Some(rank) = queue.pop_front() {
        if seen.contains(&rank) {
            continue;
        }
        seen.push(rank);
        let Some(Activity { left, hidden_by, silent, beat }) = known(rank) else { continue };
        if let Some(how) = left {
            signs.push((Sign::Left, rank));
            lines.push(format!("rank {rank} {how}"));
            continue;
        }
        if let Some(hidden_by) = hidden_by {
            lines.push(format!("rank {rank} is out of sight, since its messages come through rank {hidden_by}"));
            queue.push_back(hidden_by);
            continue;
        }
        if let Some(silent) = silent {
            signs.push((Sign::Silent, rank));
            lines.push(format!(
                "rank {rank} has been silent for {:.1} s: its process is stopped, or its machine is overloaded or \
                 cut off",
                silent.as_secs_f64()
            ));
            continue;
        }
        let Some(beat) = beat else { continue };
        if let Some(same) = beat.pending.iter().find(|pending| same_call(&pending.call, call)) {
            queue.extend(&same.waiting_for);
            waits.extend(same.waiting_for.iter().map(|awaited| (rank, *awaited)));
            in_call.push(rank);
            continue;
        }
        if beat.pending.is_empty() {
            signs.push((Sign::Idle, rank));
            lines.push(idle(rank, &beat));
            continue;
        }
        // Calls before this one are out of date: a rank of this call's group cannot still be in them.
        for pending in beat.pending.iter().filter(|pending| !earlier(&pending.call, call)) {
            queue.extend(&pending.waiting_for);
            let whom = if pending.waiting_for.is_empty() { "" } else { ", waiting for " };
            let ranks = if whom.is_empty() { String::new() } else { list_ranks(&pending.waiting_for) };
            let seconds = pending.since_ms as f64 / 1e3;
            lines.push(format!("rank {rank} is in {} for {seconds:.1} s{whom}{ranks}", pending.call));
        }
    }
    let surest = signs.iter().map(|(sign, _)| *sign).max();
    let mut suspects = signs.iter().filter(|(sign, _)| Some(*sign) == surest).map(|(_, rank)| *rank);
    let culprit = suspects.next().filter(|_| suspects.next().is_none());
    let more = lines.len().saturating_sub(DESCRIBED);
    lines.truncate(DESCRIBED);
    if more > 0 {
        lines.push(format!("{more} more"));
    }
    waits.retain(|(_, awaited)| in_call.contains(awaited));
    Diagnosis { culprit, text: lines.join("; "), data_missing: waits }
}

fn same_call(a: &CallInfo, b: &CallInfo) -> bool {
    let same = a.collective.counterpart().unwrap_or(a.collective) == b.collective;
    same && (a.group, a.sequence) == (b.group, b.sequence)
}

/// True if `a` is an earlier call of the same group than `b`, and so is over.
fn earlier(a: &CallInfo, b: &CallInfo) -> bool {
    // Calls between two ranks have no place: they are not ordered with the collectives.
    a.group == b.group && a.place().zip(b.place()).is_some_and(|(a, b)| a < b)
}

fn idle(rank: usize, beat: &Heartbeat) -> String {
    let step = beat.step.map(|step| format!(" (step {step})")).unwrap_or_default();
    match &beat.last {
        Some(last) => {
            let seconds = beat.idle_ms as f64 / 1e3;
            format!("rank {rank}{step} is in no collective; the last it finished, {seconds:.1} s ago, was {last}")
        }
        None => format!("rank {rank}{step} is in no collective"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::call::Collective;
    use crate::membership::control_messages::PendingCall;

    fn call(group: u64, sequence: u64) -> CallInfo {
        CallInfo::bare(Collective::Barrier, group, sequence, format!("r.rs:{sequence}:1").as_str())
    }

    fn known(beat: Heartbeat) -> Option<Activity> {
        Some(Activity { left: None, hidden_by: None, silent: None, beat: Some(beat) })
    }

    fn in_call(call: CallInfo, waiting_for: &[usize]) -> Heartbeat {
        let pending = vec![PendingCall { call, since_ms: 3000, waiting_for: waiting_for.to_vec() }];
        Heartbeat { pending, ..Heartbeat::default() }
    }

    fn idle_after(call: CallInfo) -> Heartbeat {
        Heartbeat { last: Some(call), idle_ms: 31_000, step: Some(27), ..Heartbeat::default() }
    }

    #[test]
    fn the_chain_is_followed_to_the_rank_that_is_in_no_collective() {
        // 0 waits for 1 in group 1; 1 waits for 2 in group 2; 2 computes.
        let diagnosis = diagnose(0, &call(1, 5), &[1], |rank| match rank {
            1 => known(in_call(call(2, 8), &[2])),
            2 => known(idle_after(call(2, 7))),
            _ => None,
        });
        assert_eq!(diagnosis.culprit, Some(2));
        for part in [
            "rank 1 is in barrier #8 of group 2 called at r.rs:8:1 for 3.0 s, waiting for rank 2",
            "rank 2 (step 27) is in no collective; the last it finished, 31.0 s ago, was barrier #7 of group 2",
        ] {
            assert!(diagnosis.text.contains(part), "{}", diagnosis.text);
        }
    }

    #[test]
    fn those_in_the_same_call_are_not_blamed() {
        let diagnosis = diagnose(0, &call(1, 5), &[1, 2], |rank| match rank {
            1 => known(in_call(call(1, 5), &[2])),
            _ => known(idle_after(call(1, 4))),
        });
        assert_eq!(diagnosis.culprit, Some(2));
        assert!(!diagnosis.text.contains("rank 1"), "{}", diagnosis.text);
    }

    #[test]
    fn a_rank_in_the_call_stands_for_those_that_it_waits_for() {
        let state = |rank| match rank {
            // The leaders of two machines. The first waits for its neighbour and for the other leader.
            0 => known(in_call(call(1, 5), &[1, 2])),
            2 => known(in_call(call(1, 5), &[0, 3])),
            1 => known(in_call(call(1, 5), &[])),
            _ => known(idle_after(call(1, 4))),
        };
        assert_eq!(missing(&call(1, 5), &[0], state), [3]);
        assert_eq!(missing(&call(1, 5), &[2, 4], state), [3, 4]);
        // If rank 0 is in another call, or sent no heartbeat, its own part is missing.
        assert_eq!(missing(&call(1, 6), &[0], state), [0]);
        assert_eq!(missing(&call(1, 5), &[0], |_| None), [0]);
        // A silent rank is missing, whatever it said before.
        let silent = |rank| match rank {
            2 => Some(Activity { silent: Some(Duration::from_secs(9)), ..state(2)? }),
            _ => state(rank),
        };
        assert_eq!(missing(&call(1, 5), &[0], silent), [2]);
        // A rank whose messages come through a silent one, which need not be in the group: its heartbeat is old.
        let hidden = |rank| match rank {
            3 => Some(Activity { hidden_by: Some(2), ..known(in_call(call(1, 5), &[]))? }),
            _ => silent(rank),
        };
        assert_eq!(missing(&call(1, 5), &[3], hidden), [3]);
        // Ranks of one call that wait for each other while data are on their way.
        assert_eq!(missing(&call(1, 5), &[1], |rank| known(in_call(call(1, 5), &[1 - rank]))), [1]);
    }

    #[test]
    fn a_silent_rank_is_blamed_before_one_that_computes() {
        let silent = Some(Duration::from_secs(9));
        let silent = Activity { left: None, hidden_by: None, silent, beat: Some(in_call(call(1, 5), &[])) };
        let silent = std::cell::Cell::new(Some(silent));
        let diagnosis = diagnose(0, &call(1, 5), &[1, 2], |rank| match rank {
            1 => known(idle_after(call(1, 4))),
            _ => silent.take(),
        });
        assert_eq!(diagnosis.culprit, Some(2));
        assert!(diagnosis.text.contains("rank 2 has been silent for 9.0 s"), "{}", diagnosis.text);
    }

    #[test]
    fn a_rank_behind_a_silent_one_is_unknown_and_not_blamed() {
        let diagnosis = diagnose(0, &call(1, 5), &[3], |rank| {
            let (hidden_by, silent) = if rank == 3 { (Some(1), None) } else { (None, Some(Duration::from_secs(9))) };
            Some(Activity { left: None, hidden_by, silent, beat: Some(idle_after(call(1, 4))) })
        });
        assert_eq!(diagnosis.culprit, Some(1));
        assert!(diagnosis.text.starts_with("rank 3 is out of sight, since its messages come through rank 1; rank 1"));
    }

    #[test]
    fn two_who_wait_for_each_other_are_both_shown_and_neither_blamed() {
        let diagnosis = diagnose(0, &call(1, 5), &[1], |rank| match rank {
            0 => known(in_call(call(1, 5), &[1])),
            _ => known(in_call(call(2, 8), &[0])),
        });
        assert_eq!(diagnosis.culprit, None);
        assert!(diagnosis.text.contains("rank 1 is in barrier #8 of group 2"), "{}", diagnosis.text);
    }

    #[test]
    fn several_idle_ranks_are_described_but_none_alone_blamed() {
        let diagnosis = diagnose(0, &call(1, 5), &[1, 2, 3, 4, 5, 6], |_| known(idle_after(call(1, 4))));
        assert_eq!(diagnosis.culprit, None);
        assert!(diagnosis.text.ends_with("; 2 more"), "{}", diagnosis.text);
    }

    #[test]
    fn what_is_out_of_date_is_not_repeated() {
        let diagnosis = diagnose(0, &call(1, 5), &[1], |_| known(in_call(call(1, 4), &[0])));
        assert_eq!(diagnosis, Diagnosis::default());
    }

    #[test]
    fn the_two_sides_of_a_transfer_are_one_call() {
        let side = |collective, peer| CallInfo { collective, root: Some(peer), ..call(1, 5) };
        // 2 waits for 1, which passes on what it first needs from 0.
        let diagnosis = diagnose(2, &side(Collective::Recv, 1), &[1], |rank| match rank {
            1 => known(in_call(side(Collective::Send, 2), &[0])),
            _ => known(idle_after(call(1, 4))),
        });
        assert_eq!(diagnosis.culprit, Some(0));
        assert!(diagnosis.text.starts_with("rank 0 (step 27) is in no collective"), "{}", diagnosis.text);
    }

    #[test]
    fn nothing_known_is_nothing_said() {
        assert_eq!(diagnose(0, &call(1, 5), &[1], |_| None), Diagnosis::default());
    }
}
