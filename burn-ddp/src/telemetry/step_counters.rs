//! Counters of steps: how many, how long, and what they communicated.

use std::ops::Sub;
use std::time::Duration;

/// Counters of one rank over all of its wrapped models: since [`Ddp::init`](crate::Ddp::init) from
/// [`Telemetry::stats`](super::Telemetry::stats), or of one step from
/// [`Telemetry::last_step`](super::Telemetry::last_step).
///
/// A step lasts from the end of one reduction to the end of the next, so it has one backward, with accumulation
/// several. Its time is `outside + backward + wait`. Times are those of the training thread: work of an asynchronous
/// device counts where the thread waits for it. A backward over two wrapped models counts for each of them.
///
/// ```
/// # use burn::{nn::LinearConfig, prelude::*};
/// # use burn_ddp::prelude::*;
/// Ddp::spawn(2, |ddp| {
///     let device = ddp.device()?.autodiff();
///     let model = ddp.wrap(LinearConfig::new(4, 1).init(&device))?;
///     for _ in 0..3 {
///         ddp.backward(&model.forward(Tensor::<2>::ones([1, 4], &device)).sum(), &model)?;
///         ddp.mean(0.0)?;
///     }
///     let (step, all) = (ddp.telemetry().last_step(), ddp.telemetry().stats());
///     assert_eq!((step.steps, step.collectives, all.steps, all.collectives), (1, 1, 3, 3)); // one bucket per step
///     assert!(step.calls <= step.outside && all.bytes == 3 * step.bytes);
///     let ms = |time: std::time::Duration| time.as_secs_f64() * 1e3;
///     println!("{:.1} ms a step, {:.1} of them waiting", ms(step.time()), ms(step.wait));
///     Ok(())
/// })?;
/// # Ok::<(), burn_ddp::Error>(())
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct Stats {
    /// Number of reductions; also of optimizer steps, if one follows each reduction.
    pub steps: u64,
    /// Number of backwards that only added up: with accumulation, those for which
    /// [`Ddp::backward`](crate::Ddp::backward) returned `None`.
    pub added_up: u64,
    /// Number of collectives that carried gradients: one per bucket, or sharded parameter, and step.
    pub collectives: u64,
    /// Number of those collectives that started while backward was still running.
    pub overlapped: u64,
    /// Number of gradient tensors in those collectives.
    pub tensors: u64,
    /// Bytes of gradients and flags that this rank passed to the engine.
    pub bytes: u64,
    /// Bytes of [sharded](crate::WrapConfig::with_sharding) parameters that were gathered for reads, files and hashes.
    /// Each gather counts the whole parameter, this rank's part included.
    pub gathered: u64,
    /// Time in [`Ddp::backward`](crate::Ddp::backward) without `wait`: computing gradients and copying them into
    /// buckets; for [sharded](crate::WrapConfig::with_sharding) parameters also gathering them and reducing their
    /// gradients.
    pub backward: Duration,
    /// Time that backward waited for averaged gradients: the cost of communication.
    pub wait: Duration,
    /// Time between backwards: forward, optimizer, loading data and everything else the program does. Zero before the
    /// first.
    pub outside: Duration,
    /// Part of `outside`: waiting for batches of training loaders.
    pub data: Duration,
    /// Part of `outside`: collectives that the program calls by itself on [`Ddp`](crate::Ddp) or its
    /// [group](crate::Ddp::group).
    pub calls: Duration,
    /// Part of `outside`, beside `calls`: [`Ddp::save`](crate::Ddp::save) and
    /// [`Checkpoints::save`](crate::checkpoint::Checkpoints::save), with the collectives in them.
    pub saving: Duration,
    /// Duration of communication. A thread of its own makes most of it during backward; without that thread, it is part
    /// of `wait`.
    pub busy: Duration,
    /// Number of [comparisons](crate::WrapConfig::with_replica_check) in which parameters of the ranks differed by
    /// rounding.
    pub rounded: u64,
    /// Number of calls that all ranks skipped because gradients overflowed with the
    /// [loss scale](crate::WrapConfig::with_loss_scaling).
    pub skipped: u64,
}

impl Stats {
    /// Duration of the steps.
    ///
    /// # Example
    ///
    /// As in [`Telemetry`](super::Telemetry).
    #[must_use]
    pub fn time(&self) -> Duration {
        self.outside + self.backward + self.wait
    }

    /// Time that this rank worked: without waiting for other ranks, and without `saving`, in which all ranks wait for
    /// rank 0.
    ///
    /// # Example
    ///
    /// As in [`Telemetry`](super::Telemetry).
    #[must_use]
    pub fn work(&self) -> Duration {
        (self.outside + self.backward).saturating_sub(self.calls + self.saving)
    }

    /// Share of communication that was hidden behind backward: from 0, none, to 1, all of it.
    ///
    /// # Example
    ///
    /// As in [`Telemetry`](super::Telemetry).
    #[must_use]
    pub fn overlap(&self) -> f64 {
        let busy = self.busy.as_secs_f64();
        if busy > 0.0 { (1.0 - self.wait.as_secs_f64() / busy).clamp(0.0, 1.0) } else { 0.0 }
    }
}

/// Difference from `earlier` counters.
impl Sub for Stats {
    type Output = Stats;

    fn sub(self, earlier: Stats) -> Stats {
        Stats {
            steps: self.steps - earlier.steps,
            added_up: self.added_up - earlier.added_up,
            collectives: self.collectives - earlier.collectives,
            overlapped: self.overlapped - earlier.overlapped,
            tensors: self.tensors - earlier.tensors,
            bytes: self.bytes - earlier.bytes,
            gathered: self.gathered - earlier.gathered,
            backward: self.backward - earlier.backward,
            wait: self.wait - earlier.wait,
            outside: self.outside - earlier.outside,
            data: self.data - earlier.data,
            calls: self.calls - earlier.calls,
            saving: self.saving - earlier.saving,
            busy: self.busy - earlier.busy,
            rounded: self.rounded - earlier.rounded,
            skipped: self.skipped - earlier.skipped,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_parts_of_each_other() {
        let ms = Duration::from_millis;
        let s =
            Stats { outside: ms(10), backward: ms(20), wait: ms(5), calls: ms(3), saving: ms(2), ..Stats::default() };
        let s = Stats { busy: ms(20), ..s };
        assert_eq!((s.time(), s.work()), (ms(35), ms(25)));
        assert_eq!(s.overlap(), 0.75);
        assert_eq!(Stats { wait: ms(30), ..s }.overlap(), 0.0);
        assert_eq!(Stats::default().overlap(), 0.0);
        assert_eq!((s - s), Stats::default());
    }
}
