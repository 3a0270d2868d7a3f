//! The straggler: the rank for which the other ranks wait.

use std::fmt;
use std::time::Duration;

use super::step_counters::Stats;

/// Length of a rank's report: number of steps since its last report, nanoseconds of work and of waiting for data in
/// them.
pub(crate) const REPORT_LEN: usize = 3;
/// Smallest number of steps for a comparison.
const MIN_STEPS: u64 = 5;
/// A rank is a straggler if it works 1.2 × the median of the others and at least 2 ms longer per step.
pub(super) const FACTOR: f64 = 1.2;
pub(super) const MIN_DELAY: Duration = Duration::from_millis(2);

/// A rank that the others wait for, from [`Telemetry::straggler`](super::Telemetry::straggler).
///
/// In a synchronous step all ranks take the same time, so the slow rank is not the one whose steps are long, but the
/// one that waits least: it works while the others wait for it.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize)]
pub struct Straggler {
    /// Number of the rank in the job.
    pub rank: usize,
    /// Name of the rank's machine.
    pub host: String,
    /// Number of steps that were compared.
    pub steps: u64,
    /// Work of the rank per step.
    pub work: Duration,
    /// Part of `work`: waiting for batches of training loaders.
    pub data: Duration,
    /// Work of the other ranks per step: their median.
    pub others: Duration,
}

impl fmt::Display for Straggler {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ms = |time: Duration| time.as_secs_f64() * 1e3;
        let Straggler { rank, host, steps, work, data, others } = self;
        write!(
            f,
            "rank {rank} (host {host}) is a straggler: {:.1} ms of work per step ({:.1} ms waiting for data), others \
             {:.1} ms, over {steps} steps",
            ms(*work),
            ms(*data),
            ms(*others)
        )
    }
}

/// The report of a rank on its `steps`.
pub(crate) fn report(steps: Stats) -> [i64; REPORT_LEN] {
    let nanos = |time: Duration| time.as_nanos() as i64;
    [steps.steps as i64, nanos(steps.work()), nanos(steps.data)]
}

/// The straggler among the ranks, by the reports of all; `name` returns the rank and the machine of the n-th of them.
pub(crate) fn find(reports: &[Vec<i64>], name: impl Fn(usize) -> (usize, String)) -> Option<Straggler> {
    let steps = reports.iter().map(|report| report[0]).min().filter(|steps| *steps >= MIN_STEPS as i64)?;
    let per_step =
        |rank: usize, nth: usize| Duration::from_nanos(reports[rank][nth].max(0) as u64 / reports[rank][0] as u64);
    let mut by_work: Vec<usize> = (0..reports.len()).collect();
    by_work.sort_by_key(|rank| per_step(*rank, 1));
    let (&slowest, others) = by_work.split_last()?;
    let others = per_step(*others.get(others.len() / 2)?, 1);
    let work = per_step(slowest, 1);
    let slow = work >= others.mul_f64(FACTOR) && work >= others + MIN_DELAY;
    slow.then(|| {
        let (data, (rank, host)) = (per_step(slowest, 2), name(slowest));
        Straggler { rank, host, steps: steps as u64, work, data, others }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(millis: &[i64], steps: i64) -> Option<Straggler> {
        let reports: Vec<Vec<i64>> =
            millis.iter().map(|ms| vec![steps, steps * ms * 1_000_000, steps * 1_000_000]).collect();
        find(&reports, |rank| (rank, format!("host{rank}")))
    }

    #[test]
    fn the_one_that_works_longest_is_named() {
        let found = of(&[10, 11, 15, 10], 98).unwrap();
        assert_eq!((found.rank, found.host.as_str(), found.steps), (2, "host2", 98));
        assert_eq!(
            found.to_string(),
            "rank 2 (host host2) is a straggler: 15.0 ms of work per step (1.0 ms waiting for data), others 10.0 ms, \
             over 98 steps"
        );
        assert_eq!(of(&[10, 30], 5).unwrap().rank, 1);
    }

    #[test]
    fn small_differences_few_steps_and_lone_ranks_are_no_stragglers() {
        assert_eq!(of(&[10, 11, 11, 10], 98), None);
        assert_eq!(of(&[10, 30], 4), None);
        assert_eq!(of(&[30], 98), None);
        assert_eq!(of(&[], 98), None);
        let tiny = [vec![10, 10_000, 0], vec![10, 19_000_000, 0]];
        assert_eq!(find(&tiny, |rank| (rank, String::new())), None, "1.9 ms per step");
    }
}
