use std::collections::VecDeque;

use proptest::prelude::*;
use proptest::test_runner::TestCaseError;

use super::reduction_plan_tests::Case;
use super::*;
use crate::reduce::{Reduction, Terms};
use crate::topology::Machines;
use crate::{DType, ReduceOp};

pub(super) const DTYPES: [DType; 3] = [DType::F64, DType::F32, DType::F16];

pub(super) fn machines(identities: &[usize]) -> Machines {
    Machines::new(identities)
}

pub(super) fn blocks(sizes: &[usize]) -> Machines {
    let of_machine = |(machine, size): (usize, &usize)| vec![machine; *size];
    machines(&sizes.iter().enumerate().flat_map(of_machine).collect::<Vec<_>>())
}

pub(super) fn sum(dtype: DType, ranks: usize) -> Terms {
    Terms::new(dtype, Reduction::Op(ReduceOp::Sum), ranks).unwrap()
}

prop_compose! {
    /// Ranks on two to four machines, in any order.
    pub(super) fn placements()(
        mut identities in proptest::collection::vec(0_usize..4, 2..12),
    ) -> Vec<usize> {
        if identities.iter().all(|identity| *identity == identities[0]) {
            identities[0] = 4;
        }
        identities
    }
}

/// Weights of which one at least is not 0; `None` for a sum.
pub(super) fn weights() -> impl Strategy<Value = Option<Vec<f64>>> {
    let weight = prop_oneof![Just(0.0), Just(1.0), 0.1_f64..9.0];
    proptest::option::of(proptest::collection::vec(weight, 12))
}

pub(super) fn terms_of(dtype: DType, weights: Option<Vec<f64>>, ranks: usize) -> Terms {
    let Some(mut weights) = weights else { return sum(dtype, ranks) };
    weights.truncate(ranks);
    if weights.iter().all(|weight| *weight == 0.0) {
        weights[ranks - 1] = 1.0;
    }
    Terms::new(dtype, Reduction::Weighted(&weights), ranks).unwrap()
}

/// What a rank does next.
enum Doing {
    /// Meets the other ranks of its machine.
    Inside,
    /// Begins to exchange the frames of a step.
    Begin(Step),
    /// Waits for all frames up to a step.
    Wait(usize),
}

/// A rank that follows a schedule.
struct Follower {
    todo: VecDeque<Doing>,
    /// By the other rank, the numbers and lengths of frames that did not move yet.
    sends: Vec<VecDeque<(usize, usize)>>,
    receives: Vec<VecDeque<(usize, usize)>>,
}

impl Follower {
    /// True if no frame up to `step` is left.
    fn has_done(&self, step: usize) -> bool {
        let mut first = self.sends.iter().chain(&self.receives).filter_map(VecDeque::front);
        first.all(|(number, _)| *number > step)
    }
}

/// Bytes that each rank sends to each other one, by sender and receiver, when all ranks do what is in `todo`.
///
/// A frame moves only while both of its ends wait, as if nothing were between them that keeps a byte, and behind the
/// earlier frames between them. Fails if ranks wait for ever, or the ends of a frame differ.
fn follow(machines: &Machines, todo: Vec<Vec<Doing>>) -> std::result::Result<Vec<Vec<usize>>, TestCaseError> {
    let count = machines.rank_count();
    let none = || vec![VecDeque::new(); count];
    let follower = |todo: Vec<Doing>| Follower { todo: todo.into(), sends: none(), receives: none() };
    let mut ranks: Vec<Follower> = todo.into_iter().map(follower).collect();
    let mut bytes = vec![vec![0; count]; count];
    loop {
        let mut moved = false;
        for rank in &mut ranks {
            while let Some(Doing::Begin(_)) = rank.todo.front()
                && let Some(Doing::Begin(step)) = rank.todo.pop_front()
            {
                step.sends.iter().for_each(|to| rank.sends[to.peer].push_back((step.number, to.range.len())));
                step.receives
                    .iter()
                    .for_each(|from| rank.receives[from.peer].push_back((step.number, from.range.len())));
                moved = true;
            }
        }
        let waits = |rank: &Follower| matches!(rank.todo.front(), Some(Doing::Wait(_)));
        for (from, to) in (0..count).flat_map(|from| (0..count).map(move |to| (from, to))) {
            while waits(&ranks[from])
                && waits(&ranks[to])
                && let (Some(sent), Some(expected)) = (ranks[from].sends[to].front(), ranks[to].receives[from].front())
            {
                prop_assert_eq!(sent, expected, "number and bytes of a frame from {} to {}", from, to);
                bytes[from][to] += sent.1;
                ranks[from].sends[to].pop_front();
                ranks[to].receives[from].pop_front();
                moved = true;
            }
        }
        for rank in &mut ranks {
            if let Some(Doing::Wait(step)) = rank.todo.front()
                && rank.has_done(*step)
            {
                rank.todo.pop_front();
                moved = true;
            }
        }
        for machine in 0..machines.count() {
            let here = machines.ranks_of(machine);
            if here.iter().all(|rank| matches!(ranks[*rank].todo.front(), Some(Doing::Inside))) {
                here.iter().for_each(|rank| drop(ranks[*rank].todo.pop_front()));
                moved = true;
            }
        }
        if !moved {
            break;
        }
    }
    for (nth, rank) in ranks.iter().enumerate() {
        prop_assert!(rank.todo.is_empty() && rank.has_done(usize::MAX), "rank {} waits for ever", nth);
    }
    Ok(bytes)
}

/// Bytes between machines, by sender and receiver.
fn between(machines: &Machines, bytes: &[Vec<usize>]) -> Vec<Vec<usize>> {
    let mut sums = vec![vec![0; machines.count()]; machines.count()];
    for (from, to) in (0..bytes.len()).flat_map(|from| (0..bytes.len()).map(move |to| (from, to))) {
        sums[machines.machine_of(from)][machines.machine_of(to)] += bytes[from][to];
    }
    sums
}

/// The bytes that `predicted` says for each pair of machines.
fn predicted(machines: &Machines, predicted: impl Fn(usize, usize) -> usize) -> Vec<Vec<usize>> {
    let all = 0..machines.count();
    let of_pair = |from, to| if from == to { 0 } else { predicted(from, to) };
    all.clone().map(|from| all.clone().map(|to| of_pair(from, to)).collect()).collect()
}

/// Fails unless the frames of a chunk's plan lie where its partial results and results are.
fn check_places(case: &Case, rank: usize, plan: &Plan) {
    let Case { machines, partials, size, .. } = case;
    let ours = partials[machines.machine_of(rank)];
    // Partial results lie in the order of the pieces.
    let mut end = 0;
    let mut pieces = plan.pieces.iter().map(|(peer, range)| {
        end += range.len() * ours;
        (*peer, end - range.len() * ours..end)
    });
    let sent = plan.partials(0, (machines, rank), partials).sends;
    for to in sent {
        let place = pieces.by_ref().find(|(peer, _)| peer.is_some());
        assert_eq!(place, Some((Some(to.peer), to.range)), "rank {rank} sends other partial results");
    }
    assert!(pieces.all(|(peer, _)| peer.is_none()), "rank {rank} keeps partial results");
    // Results lie in the order of the elements that this rank puts together.
    let own: Vec<usize> = plan.own().flat_map(|element| vec![element; *size]).collect();
    for (to, wanted) in plan.results(0, *size).sends.iter().zip(&plan.receives) {
        let elements: Vec<usize> = wanted.range.clone().flat_map(|element| vec![element; *size]).collect();
        assert_eq!(
            (to.peer, &own[to.range.clone()]),
            (wanted.peer, &elements[..]),
            "rank {rank} returns other results"
        );
    }
}

/// What a rank does in a reduction of several chunks, of which it has a plan each. With weights, it hears of those of
/// all machines first.
fn reduction(case: &Case, rank: usize, plans: &[Plan], weighted: bool) -> Vec<Doing> {
    let Case { machines, partials, size, .. } = case;
    plans.iter().for_each(|plan| check_places(case, rank, plan));
    let mut todo = Vec::new();
    let weights: Vec<usize> = (0..machines.count()).map(|machine| 8 * machines.ranks_of(machine).len()).collect();
    if weighted {
        todo.push(Doing::Begin(announcements(machines, rank, &weights)));
    }
    for turn in turns(plans.len()) {
        match turn {
            Turn::SendPartials(nth) => {
                todo.extend([Doing::Inside, Doing::Begin(plans[nth].partials(nth, (machines, rank), partials))]);
            }
            Turn::PutTogether(nth) => {
                if nth == 0 && weighted {
                    todo.push(Doing::Wait(0));
                }
                todo.extend([Doing::Wait(steps_of(nth).0), Doing::Begin(plans[nth].results(nth, *size))]);
            }
            Turn::HandOut(nth) => todo.extend([Doing::Wait(steps_of(nth).1), Doing::Inside]),
        }
    }
    todo
}

proptest! {
    #[test]
    fn all_reduces_end_and_send_what_is_predicted(
        identities in placements(),
        dtype in proptest::sample::select(&DTYPES[..]),
        weights in weights(),
        len in 0_usize..400,
        most in 1_usize..200,
    ) {
        let (machines, weighted) = (machines(&identities), weights.is_some());
        let case = Case::all_reduce(machines, dtype, &terms_of(dtype, weights, identities.len()), len);
        let shares = Shares::new(&case.partials, case.size);
        let cut: Vec<_> = chunks(len, most).map(|chunk| segments(chunk, &shares)).collect();
        let todo = |rank| {
            let plans: Vec<Plan> = cut.iter().map(|cut| Plan::all_reduce(&case.machines, rank, cut)).collect();
            reduction(&case, rank, &plans, weighted)
        };
        let bytes = follow(&case.machines, (0..identities.len()).map(todo).collect())?;
        let elements = |machine: usize| cut.iter().map(|cut| cut[machine].len()).sum::<usize>();
        // Partial results of what the receiver puts together, results of what the sender does, and weights.
        let predicted = predicted(&case.machines, |from, to| {
            let of_weights = 8 * case.machines.ranks_of(from).len() * case.machines.ranks_of(to).len();
            elements(to) * case.partials[from] + elements(from) * case.size + usize::from(weighted) * of_weights
        });
        prop_assert_eq!(between(&case.machines, &bytes), predicted);
    }

    #[test]
    fn reduce_scatters_end_and_send_what_is_predicted(
        identities in placements(),
        dtype in proptest::sample::select(&DTYPES[..]),
        len in 0_usize..40,
        most in 1_usize..20,
    ) {
        let ranks = identities.len();
        let case = Case::reduce_scatter(machines(&identities), dtype, &sum(dtype, ranks), len);
        let todo = |rank| {
            let plan = |chunk| Plan::reduce_scatter(&case.machines, rank, len, chunk);
            reduction(&case, rank, &chunks(len, most).map(plan).collect::<Vec<_>>(), false)
        };
        let bytes = follow(&case.machines, (0..ranks).map(todo).collect())?;
        let rows = |to| case.machines.ranks_of(to).len();
        let predicted = predicted(&case.machines, |from, to| rows(to) * len * case.partials[from]);
        prop_assert_eq!(between(&case.machines, &bytes), predicted);
    }

    #[test]
    fn broadcasts_end_and_reach_each_machine_once(
        identities in placements(),
        root in 0_usize..4,
        len in prop_oneof![0_usize..100, 30_000_usize..70_000, 70_000_usize..5_000_000],
    ) {
        let machines = machines(&identities);
        let root = root % machines.count();
        let leaders: Vec<usize> = (0..machines.count()).map(|machine| machines.ranks_of(machine)[0]).collect();
        let todo = |rank| {
            let machine = machines.machine_of(rank);
            let steps = if rank == leaders[machine] { broadcast(&machines, machine, root, len) } else { vec![] };
            // No byte leaves before it has arrived, and what arrives lies behind what leaves.
            let mut there = if machine == root { len } else { 0 };
            for step in &steps {
                assert!(step.sends.iter().all(|to| to.range.end <= there), "{rank} sends what it does not have");
                for from in step.receives.iter().filter(|from| !from.range.is_empty()) {
                    assert_eq!(from.range.start, there, "{rank} gets bytes twice, or never");
                    there = from.range.end;
                }
            }
            assert!(there == len || rank != leaders[machine], "{rank} gets {there} of {len} bytes");
            let doing = |step: Step| {
                let number = step.number;
                [Doing::Begin(step), Doing::Wait(number)]
            };
            let exchanges = steps.into_iter().flat_map(doing);
            [Doing::Inside].into_iter().chain(exchanges).chain([Doing::Inside]).collect()
        };
        // Both ends of a frame mean the same bytes.
        for (from, to) in leaders.iter().flat_map(|from| leaders.iter().map(move |to| (*from, *to))) {
            let steps = |rank: usize| broadcast(&machines, machines.machine_of(rank), root, len);
            let with = |exchanged: Vec<Exchanged>, peer| exchanged.into_iter().filter(move |of| of.peer == peer);
            let sent = steps(from).into_iter().flat_map(|step| with(step.sends, to)).map(|of| of.range);
            let received = steps(to).into_iter().flat_map(|step| with(step.receives, from)).map(|of| of.range);
            prop_assert!(from == to || sent.eq(received), "from {} to {}", from, to);
        }
        let bytes = follow(&machines, (0..identities.len()).map(todo).collect())?;
        let is_chain = machines.count() > 2 && len * (machines.count() - 1) > 64 * 1024;
        let place = |machine: usize| (machine + machines.count() - root) % machines.count();
        let predicted = predicted(&machines, |from, to| match is_chain {
            true => if place(from) + 1 == place(to) { len } else { 0 },
            false => if from == root { len } else { 0 },
        });
        prop_assert_eq!(between(&machines, &bytes), predicted);
    }

    #[test]
    fn every_row_reaches_each_machine_once(identities in placements()) {
        let machines = machines(&identities);
        for machine in 0..machines.count() {
            let held = rows_by_local_rank(&machines, machine);
            let mut all = held.concat();
            all.sort_unstable();
            prop_assert_eq!(all, (0..identities.len()).collect::<Vec<_>>());
            for (holder, rows) in machines.ranks_of(machine).iter().zip(&held) {
                prop_assert_eq!(rows[0], *holder);
                for row in &rows[1..] {
                    prop_assert_eq!(counterpart(&machines, machine, *row), *holder, "{} sends its row there", row);
                }
            }
        }
    }
}
