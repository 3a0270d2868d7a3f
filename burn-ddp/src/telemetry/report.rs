//! `Telemetry::report`: why a run is slow, in words with numbers.

use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::fmt;
use std::time::Duration;

use super::Telemetry;
use super::bottleneck_analysis::judge;
use super::memory_use::MemoryUse;
use super::step_counters::Stats;
use crate::Result;
use crate::agreement::list_ranks;

/// The parts of a step's time, and the causes of slow steps; from [`Telemetry::report`]. `Display` puts it in words.
///
/// The rank that works longest determines the duration of a step, since the other ranks wait for it. So the parts of
/// the step are those of that rank. Times are averages per step. `step` is the sum of the parts.
#[derive(Clone, Debug, PartialEq, serde::Serialize)]
#[non_exhaustive]
pub struct Report {
    /// Number of steps over which times are averaged: all but the first, in which memory is allocated and kernels are
    /// compiled.
    pub steps: u64,
    /// Duration of a step.
    pub step: Duration,
    /// Part of the step: forward, backward, optimizer and everything that is not listed below.
    pub compute: Duration,
    /// Part of the step: waiting for batches of training loaders.
    pub data: Duration,
    /// Part of the step: waiting in backward for averaged gradients, which is communication that is not hidden.
    pub wait: Duration,
    /// Part of the step: collectives that the program calls by itself.
    pub calls: Duration,
    /// Part of the step: [`Ddp::save`](crate::Ddp::save) and
    /// [`Checkpoints::save`](crate::checkpoint::Checkpoints::save).
    pub saving: Duration,
    /// Causes that take at least 15 % of the step, the largest first. Empty if there is no bottleneck.
    pub bottlenecks: Vec<Bottleneck>,
    /// Memory that the wrapped models of each rank take, by rank, without the optimizer's state.
    pub memory: BTreeMap<usize, MemoryUse>,
}

/// A cause of slow steps, from [`Report::bottlenecks`]. `Display` adds what would help.
#[derive(Clone, Debug, PartialEq, serde::Serialize)]
#[non_exhaustive]
pub struct Bottleneck {
    /// Kind of the bottleneck.
    pub cause: Cause,
    /// Time per step that the cause takes: a step without it is faster by this at most.
    pub cost: Duration,
    /// `cost` as a share of the step, 0 to 1.
    pub share: f64,
}

/// Causes of slow steps. Ranks are numbers in the job; counts and times are averages per step.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize)]
#[non_exhaustive]
pub enum Cause {
    /// All or most ranks wait for their batches.
    Data,
    /// Some ranks wait longer for their batches than the others.
    DataOfSomeRanks {
        /// The ranks that wait.
        ranks: Vec<usize>,
        /// Waiting time of the slowest of `ranks`.
        data: Duration,
        /// Median waiting time of the other ranks.
        others: Duration,
    },
    /// Some ranks work longer than the others.
    SlowRanks {
        /// The slow ranks.
        ranks: Vec<usize>,
        /// Working time of the slowest of `ranks`.
        work: Duration,
        /// Median working time of the other ranks.
        others: Duration,
    },
    /// Backward waits for averaged gradients.
    Gradients {
        /// Bytes of gradients that a rank passes to collectives.
        bytes: u64,
        /// Number of collectives that carry them.
        collectives: u64,
        /// False if all of them began after backward had ended.
        overlapped: bool,
    },
    /// The model has so many small parameters that computing takes the fixed cost of its operations.
    SmallTensors {
        /// Number of gradient tensors.
        tensors: u64,
        /// Bytes of one of them on average, flags of the reduction included.
        bytes: u64,
    },
    /// The program's own collectives: [`Ddp::mean`](crate::Ddp::mean), [`Ddp::barrier`](crate::Ddp::barrier), ….
    OwnCollectives,
    /// Saving models and checkpoints.
    Saving,
}

impl Telemetry {
    /// Where the time of all steps so far went, and what makes them slow. *Collective*; blocks until every rank has
    /// called it. Costs one small all-gather. Every rank gets the same report; `None` before the eleventh step of a
    /// wrapped model.
    ///
    /// [`finish`](crate::Ddp::finish) logs the report on rank 0 (`tracing`, target `burn_ddp::report`, level `info`).
    ///
    /// # Errors
    ///
    /// [`Error::Comm`](crate::Error::Comm) if a peer failed or does not come in time.
    ///
    /// # Example
    ///
    /// ```
    /// # use burn::{nn::LinearConfig, prelude::*};
    /// # use burn_ddp::prelude::*;
    /// let reports = Ddp::spawn(2, |ddp| {
    ///     let device = ddp.device()?.autodiff();
    ///     let model = ddp.wrap(LinearConfig::new(4, 1).init(&device))?;
    ///     for _ in 0..20 {
    ///         ddp.backward(&model.forward(Tensor::<2>::ones([1, 4], &device)).sum(), &model)?;
    ///         std::thread::sleep(std::time::Duration::from_millis(20 * ddp.rank() as u64));
    ///     }
    ///     Ok(ddp.telemetry().report()?.expect("20 steps"))
    /// })?;
    /// println!("{}", reports[0]); // … bottleneck: rank 1 is slow …
    /// assert_eq!(reports[0], reports[1]);
    /// assert_eq!(reports[0].memory[&1].parameters, 20); // a weight of four elements, and a bias
    /// # Ok::<(), burn_ddp::Error>(())
    /// ```
    #[track_caller]
    pub fn report(&self) -> Result<Option<Report>> {
        let group = self.ddp.group();
        let own: (Stats, MemoryUse) = (self.meter().after_first_step(), self.memory());
        let (stats, memory): (Vec<Stats>, Vec<_>) = group.all_gather_object(&own)?.into_iter().unzip();
        let memory: BTreeMap<usize, MemoryUse> = group.ranks().iter().copied().zip(memory).collect();
        let ranks: Vec<(usize, Stats)> = group.ranks().iter().copied().zip(stats).collect();
        Ok(judge(&ranks).map(|report| Report { memory, ..report }))
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Report { steps, step, compute, data, wait, calls, saving, bottlenecks, memory } = self;
        write!(f, "{steps} steps of {:.1} ms: ", ms(*step))?;
        let parts = [
            ("compute", compute),
            ("data", data),
            ("waiting for gradients", wait),
            ("collectives of the program", calls),
            ("saving", saving),
        ];
        for (nth, (name, time)) in parts.into_iter().enumerate() {
            let share = 100.0 * time.as_secs_f64() / step.as_secs_f64().max(f64::MIN_POSITIVE);
            write!(f, "{}{share:.0} % {name}", if nth == 0 { "" } else { ", " })?;
        }
        match &bottlenecks[..] {
            [] => write!(f, "; no bottleneck beside compute"),
            all => all.iter().try_for_each(|bottleneck| write!(f, "; bottleneck: {bottleneck}")),
        }?;
        match memory.iter().max_by_key(|(rank, memory)| (memory.total(), Reverse(**rank))) {
            None => Ok(()),
            Some((rank, memory)) => write!(f, "; memory of rank {rank}, which holds most: {memory}"),
        }
    }
}

impl fmt::Display for Bottleneck {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let cost = format!("{:.1} ms per step, {:.0} %", ms(self.cost), 100.0 * self.share);
        match &self.cause {
            Cause::Data => write!(
                f,
                "the loaders ({cost}): all ranks wait for batches; more `num_workers`, a cheaper batcher, or data that \
                is decoded beforehand help"
            ),
            Cause::DataOfSomeRanks { ranks, data, others } => write!(
                f,
                "the loader of {} ({cost}): {:.1} ms of waiting for batches, other ranks {:.1} ms; look at the disk, \
                the network and the processor load there",
                list_ranks(ranks),
                ms(*data),
                ms(*others)
            ),
            Cause::SlowRanks { ranks, work, others } => write!(
                f,
                "slow {} ({cost}): {:.1} ms of work, other ranks {:.1} ms; look for other programs there, a slower \
                device, or larger batches than elsewhere",
                list_ranks(ranks),
                ms(*work),
                ms(*others)
            ),
            Cause::Gradients { bytes, collectives, overlapped } => write!(
                f,
                "communication of gradients ({cost}): {:.1} MiB in {collectives} collectives, {}; larger batches or \
                accumulation (`with_accumulation`) need less of it. If the link is fast enough for the bytes, ranks \
                are slow in turn: the timeline shows which",
                *bytes as f64 / f64::from(1 << 20),
                if *overlapped { "some of them during backward" } else { "none of them during backward" },
            ),
            Cause::SmallTensors { tensors, bytes } => write!(
                f,
                "many small parameters ({cost}): {tensors} of {bytes} bytes on average, so the fixed cost of \
                operations is what takes time; larger batches cost hardly more, and parameters joined to larger \
                ones cost less"
            ),
            Cause::OwnCollectives => write!(
                f,
                "collectives that the program calls ({cost}): call `ddp.mean` and its like in every 100th step only"
            ),
            Cause::Saving => {
                write!(f, "saving ({cost}): save less often, or checkpoints in the background (`asynchronous(true)`)")
            }
        }
    }
}

fn ms(time: Duration) -> f64 {
    time.as_secs_f64() * 1e3
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_report_says_shares_costs_and_what_helps() {
        let time = Duration::from_millis;
        let (compute, data, wait) = (time(30), time(50), time(20));
        let bottlenecks = vec![
            Bottleneck { cause: Cause::Data, cost: data, share: 0.5 },
            Bottleneck {
                cause: Cause::SlowRanks { ranks: vec![1, 3], work: time(80), others: time(60) },
                cost: time(20),
                share: 0.2,
            },
        ];
        let (calls, saving) = (Duration::ZERO, Duration::ZERO);
        let memory = (0..2).map(|rank| (rank, MemoryUse::default())).collect();
        let report = Report { steps: 99, step: time(100), compute, data, wait, calls, saving, bottlenecks, memory };
        assert_eq!(
            report.to_string(),
            "99 steps of 100.0 ms: 30 % compute, 50 % data, 20 % waiting for gradients, 0 % collectives of the \
             program, 0 % saving; bottleneck: the loaders (50.0 ms per step, 50 %): all ranks wait for batches; more \
             `num_workers`, a cheaper batcher, or data that is decoded beforehand help; bottleneck: slow ranks 1, 3 \
             (20.0 ms per step, 20 %): 80.0 ms of work, other ranks 60.0 ms; look for other programs there, a slower \
             device, or larger batches than elsewhere; memory of rank 0, which holds most: parameters 0.0 MiB, \
             gradients 0.0 MiB, gathered 0.0 MiB, engine buffers 0.0 MiB"
        );
    }
}
