//! Finds the causes of slow steps in the counters of all ranks, as a pure function.

use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::time::Duration;

use super::report::{Bottleneck, Cause, Report};
use super::step_counters::Stats;
use super::straggler::{FACTOR, MIN_DELAY};

/// Smallest number of steps for a report.
const MIN_STEPS: u64 = 10;
/// A cause below this share of the step is no bottleneck.
const MIN_SHARE: f64 = 0.15;
/// Gradients count as many small tensors if a step has at least this number of them, of at most this average size, and
/// computes for at most this time per tensor. Then the fixed cost of operations takes most of the time.
const MANY_TENSORS: u64 = 200;
const SMALL_TENSOR_BYTES: u64 = 4096;
const FIXED_COST: Duration = Duration::from_micros(200);

/// Averages per step of one rank.
#[derive(Clone, Copy)]
struct PerStep {
    rank: usize,
    stats: Stats,
    work: Duration,
    data: Duration,
}

impl PerStep {
    fn new(rank: usize, stats: Stats) -> Self {
        let mut of = PerStep { rank, stats, work: Duration::ZERO, data: Duration::ZERO };
        (of.work, of.data) = (of.mean(stats.work()), of.mean(stats.data).min(of.mean(stats.work())));
        of
    }

    fn mean(&self, time: Duration) -> Duration {
        time.div_f64(self.stats.steps as f64)
    }
}

/// The report on the counters of each rank, by its number in the job, over all steps but the first; `None` if a rank
/// has too few steps.
///
/// A synchronous step takes the same time on all ranks, and the rank that works longest determines it, since the others
/// wait for that rank. So the parts of the step are those of that rank, which waits for communication only. The time by
/// which it works longer than the median of the other ranks is the cost of slow ranks.
pub(super) fn judge(ranks: &[(usize, Stats)]) -> Option<Report> {
    let steps = ranks.iter().map(|(_, stats)| stats.steps).min().filter(|steps| *steps >= MIN_STEPS)?;
    let mut ranks: Vec<PerStep> = ranks.iter().map(|(rank, stats)| PerStep::new(*rank, *stats)).collect();
    ranks.sort_by_key(|rank| rank.work);
    let (slowest, others) = ranks.split_last()?;
    let step = slowest.mean(slowest.stats.time());
    let wait = slowest.mean(slowest.stats.wait);
    let calls = slowest.mean(slowest.stats.calls);
    let saving = slowest.mean(slowest.stats.saving);
    let mut data = slowest.data;
    let mut found = Vec::new();

    if let Some(median) = others.get(others.len() / 2) {
        let delay = slowest.work.saturating_sub(median.work);
        if delay >= median.work.mul_f64(FACTOR - 1.0).max(MIN_DELAY) {
            let is_slow = |other: &&PerStep| other.work >= median.work + delay / 2;
            let mut slow: Vec<usize> = ranks.iter().filter(is_slow).map(|other| other.rank).collect();
            slow.sort_unstable();
            // Waiting for data beyond that of the other ranks is a cost of the ranks that wait, not of all ranks.
            let more_data = slowest.data.saturating_sub(median.data);
            data = slowest.data - more_data;
            let cause = match more_data >= delay / 2 {
                true => Cause::DataOfSomeRanks { ranks: slow, data: slowest.data, others: median.data },
                false => Cause::SlowRanks { ranks: slow, work: slowest.work, others: median.work },
            };
            found.push((cause, delay));
        }
    }
    found.push((Cause::Data, data));
    found.push((Cause::Saving, saving));
    found.push((Cause::OwnCollectives, calls));
    let Stats { steps: own_steps, bytes, collectives, tensors, overlapped, .. } = slowest.stats;
    let per_step = |count: u64| count.div_ceil(own_steps);
    let communication =
        Cause::Gradients { bytes: per_step(bytes), collectives: per_step(collectives), overlapped: overlapped > 0 };
    found.push((communication, wait));
    // A slow rank computes no more tensors than the others.
    let usual = others.get(others.len() / 2).unwrap_or(slowest);
    let compute = usual.work.saturating_sub(usual.data);
    let (tensors, tensor_bytes) = (per_step(tensors), bytes.checked_div(tensors).unwrap_or(0));
    let fixed_cost = FIXED_COST.mul_f64(tensors as f64);
    if tensors >= MANY_TENSORS && tensor_bytes <= SMALL_TENSOR_BYTES && compute <= fixed_cost {
        found.push((Cause::SmallTensors { tensors, bytes: tensor_bytes }, compute));
    }

    let share = |time: Duration| if step.is_zero() { 0.0 } else { time.as_secs_f64() / step.as_secs_f64() };
    found.sort_by_key(|(_, cost)| Reverse(*cost));
    let found = found.into_iter().map(|(cause, cost)| Bottleneck { cause, cost, share: share(cost) });
    Some(Report {
        steps,
        step,
        compute: slowest.work.saturating_sub(slowest.data),
        data: slowest.data,
        wait,
        calls,
        saving,
        bottlenecks: found.filter(|bottleneck| bottleneck.share >= MIN_SHARE).collect(),
        memory: BTreeMap::new(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const STEPS: u32 = 100;

    /// Milliseconds per step.
    #[derive(Clone, Copy, Default)]
    struct Ms {
        compute: f64,
        data: f64,
        wait: f64,
        calls: f64,
        saving: f64,
    }

    /// A transformer: 40 ms of compute per step, 50 tensors of 1 MiB, 3 ms of waiting.
    const HEALTHY: Ms = Ms { compute: 40.0, data: 0.2, wait: 3.0, calls: 0.1, saving: 0.5 };

    fn stats(ms: Ms, tensors: u64, tensor_bytes: u64) -> Stats {
        let time = |ms: f64| Duration::from_secs_f64(ms / 1e3) * STEPS;
        let (steps, tensors) = (u64::from(STEPS), tensors * u64::from(STEPS));
        Stats {
            steps,
            tensors,
            bytes: tensors * tensor_bytes,
            collectives: 10 * steps,
            backward: time(ms.compute / 2.0),
            outside: time(ms.compute / 2.0 + ms.data + ms.calls + ms.saving),
            data: time(ms.data),
            calls: time(ms.calls),
            saving: time(ms.saving),
            wait: time(ms.wait),
            ..Stats::default()
        }
    }

    fn report(ranks: &[Ms]) -> Report {
        let stats = ranks.iter().map(|ms| stats(*ms, 50, 1 << 20));
        judge(&stats.enumerate().collect::<Vec<_>>()).unwrap()
    }

    /// The causes found, the largest first.
    fn causes(ranks: &[Ms]) -> Vec<Cause> {
        report(ranks).bottlenecks.into_iter().map(|bottleneck| bottleneck.cause).collect()
    }

    /// Ranks that wait in backward for the slowest one.
    fn synchronous(mut ranks: Vec<Ms>) -> Vec<Ms> {
        let work = |ms: &Ms| ms.compute + ms.data;
        let longest = ranks.iter().map(work).fold(0.0, f64::max);
        ranks.iter_mut().for_each(|ms| ms.wait += longest - work(ms));
        ranks
    }

    #[test]
    fn a_healthy_run_has_no_bottleneck() {
        for world in [1, 2, 8] {
            let report = report(&vec![HEALTHY; world]);
            assert_eq!(report.bottlenecks, []);
            assert!(report.to_string().contains("no bottleneck"), "{report}");
        }
        // Ranks differ a little.
        let uneven = [40.0, 42.0, 41.0, 44.0].map(|compute| Ms { compute, ..HEALTHY });
        assert_eq!(causes(&synchronous(uneven.into())), []);
        // Some 2 ms do not matter in steps that take as long only by the factor.
        assert_eq!(
            causes(&synchronous([1.0, 2.9].map(|compute| Ms { compute, wait: 0.1, ..Ms::default() }).into())),
            []
        );
    }

    #[test]
    fn slow_loaders_of_all_ranks() {
        assert_eq!(causes(&[Ms { data: 30.0, ..HEALTHY }; 4]), [Cause::Data]);
        // The data of one rank are ready at once. The others are not slow ranks, since most ranks are like them.
        let most = [0.2, 30.0, 31.0, 30.0].map(|data| Ms { data, ..HEALTHY });
        assert_eq!(causes(&synchronous(most.into())), [Cause::Data]);
    }

    #[test]
    fn the_slow_loader_of_one_rank() {
        let ranks = synchronous([0.2, 30.2, 0.2].map(|data| Ms { data, ..HEALTHY }).into());
        let ms = |ms: f64| Duration::from_secs_f64(ms / 1e3);
        assert_eq!(causes(&ranks), [Cause::DataOfSomeRanks { ranks: vec![1], data: ms(30.2), others: ms(0.2) }]);
        // All wait, and one rank longest: both are said, the larger one first.
        let both = synchronous([20.0, 20.0, 60.0].map(|data| Ms { data, ..HEALTHY }).into());
        assert!(matches!(&causes(&both)[..], [Cause::DataOfSomeRanks { ranks, .. }, Cause::Data] if *ranks == [2]));
    }

    #[test]
    fn slow_ranks() {
        let one = synchronous([40.0, 40.0, 60.0, 41.0].map(|compute| Ms { compute, ..HEALTHY }).into());
        let report = report(&one);
        let [Bottleneck { cause, .. }] = &report.bottlenecks[..] else { panic!("{report}") };
        assert!(matches!(cause, Cause::SlowRanks { ranks, .. } if *ranks == [2]), "{report}");
        assert_eq!(report.bottlenecks[0].cost, Duration::from_millis(20));
        // One of two machines.
        let half = synchronous([40.0, 40.0, 70.0, 72.0].map(|compute| Ms { compute, ..HEALTHY }).into());
        assert!(matches!(&causes(&half)[..], [Cause::SlowRanks { ranks, .. }] if *ranks == [2, 3]));
        let two = synchronous([90.0, 40.0].map(|compute| Ms { compute, ..HEALTHY }).into());
        assert!(matches!(&causes(&two)[..], [Cause::SlowRanks { ranks, .. }] if *ranks == [0]));
    }

    #[test]
    fn a_slow_link() {
        let ranks = [Ms { wait: 60.0, ..HEALTHY }; 4];
        assert_eq!(causes(&ranks), [Cause::Gradients { bytes: 50 << 20, collectives: 10, overlapped: false }]);
        let own = [Ms { calls: 60.0, ..HEALTHY }; 4];
        assert_eq!(causes(&own), [Cause::OwnCollectives]);
    }

    #[test]
    fn many_small_tensors() {
        let causes = |ms, tensors, bytes| -> Vec<Cause> {
            let report = judge(&[(0, stats(ms, tensors, bytes)), (1, stats(ms, tensors, bytes))]).unwrap();
            report.bottlenecks.into_iter().map(|bottleneck| bottleneck.cause).collect()
        };
        assert_eq!(causes(HEALTHY, 2000, 64), [Cause::SmallTensors { tensors: 2000, bytes: 64 }]);
        // Much arithmetic for each, large ones, few.
        assert_eq!(causes(Ms { compute: 900.0, ..HEALTHY }, 2000, 64), []);
        assert_eq!(causes(HEALTHY, 2000, 1 << 16), []);
        assert_eq!(causes(HEALTHY, 20, 64), []);
    }

    #[test]
    fn saving_too_often() {
        assert_eq!(causes(&[Ms { saving: 30.0, ..HEALTHY }; 2]), [Cause::Saving]);
    }

    #[test]
    fn few_steps_are_not_judged() {
        let few = Stats { steps: MIN_STEPS - 1, ..stats(HEALTHY, 50, 1 << 20) };
        assert_eq!(judge(&[(0, few)]), None);
        assert_eq!(judge(&[(0, stats(HEALTHY, 50, 1 << 20)), (1, Stats::default())]), None);
        assert_eq!(judge(&[]), None);
        let no_time = Stats { steps: MIN_STEPS, ..Stats::default() };
        assert_eq!(judge(&[(0, no_time)]).unwrap().bottlenecks, []);
    }
}
