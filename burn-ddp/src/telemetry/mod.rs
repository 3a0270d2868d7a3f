//! The time of steps by what it was spent on: counted on each rank, compared between ranks.

mod event_record;
#[cfg(test)]
pub(crate) mod listener;
mod memory_use;
pub(crate) mod meter;
mod report;
mod step_counters;
mod straggler;
mod tensorboard;
mod verdict;

pub use memory_use::MemoryUse;
pub use report::{Bottleneck, Cause, Report};
pub use step_counters::Stats;
pub(crate) use straggler::REPORT_LEN;
pub use straggler::Straggler;
pub use tensorboard::TensorBoard;

use meter::Meter;

/// Counters of one rank's steps, and the slowest rank; from [`Ddp::telemetry`](crate::Ddp::telemetry).
///
/// Cheap to clone; its methods return the values of the moment.
#[derive(Clone, Debug)]
pub struct Telemetry {
    meter: Meter,
}

impl Telemetry {
    pub(crate) fn new(meter: Meter) -> Self {
        Telemetry { meter }
    }

    /// Counters since the rank joined its job, over all of its wrapped models.
    #[must_use]
    pub fn stats(&self) -> Stats {
        self.meter.total()
    }

    /// [`stats`](Self::stats) of the last step; zeros before the first step.
    #[must_use]
    pub fn last_step(&self) -> Stats {
        self.meter.last_step()
    }

    /// Memory that the wrapped models of this rank take, by the shapes of their parameters, without the optimizer's
    /// state ([`MemoryUse::with_optimizer`]).
    #[must_use]
    pub fn memory(&self) -> MemoryUse {
        self.meter.memory()
    }

    /// The slowest rank, if one stands out; the same on all ranks.
    ///
    /// It is determined with the [replica check](crate::WrapConfig::with_replica_check), by default every 100 steps,
    /// and logged once, on rank 0: a `tracing` warning of the target `burn_ddp::straggler`.
    #[must_use]
    pub fn straggler(&self) -> Option<Straggler> {
        self.meter.straggler()
    }
}
