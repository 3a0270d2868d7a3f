//! Where the time of steps goes: counters of each rank, and their comparison between ranks.

mod bottleneck_analysis;
mod memory_use;
mod report;
mod step_counters;
pub(crate) mod step_meter;
mod straggler;
mod tensorboard;
mod tensorboard_encoding;
#[cfg(test)]
pub(crate) mod test_event_capture;

pub use memory_use::MemoryUse;
pub use report::{Bottleneck, Cause, Report};
pub use step_counters::Stats;
pub(crate) use straggler::REPORT_LEN;
pub use straggler::Straggler;
pub use tensorboard::TensorBoard;

use crate::ddp::Ddp;
use step_meter::Meter;

/// Counters of one rank's steps, the slowest rank, and why a run is slow; from [`Ddp::telemetry`].
///
/// Cheap to clone; its methods return current values. It does not keep the rank in the job. Only
/// [`report`](Self::report) and [`tensorboard`](Self::tensorboard) communicate.
///
/// # Example
///
/// ```
/// # use burn::{nn::LinearConfig, prelude::*};
/// # use burn_ddp::prelude::*;
/// Ddp::spawn(2, |ddp| {
///     # let device = ddp.device()?.autodiff();
///     let model = ddp.wrap(LinearConfig::new(4, 1).init(&device))?;
///     for _ in 0..3 {
///         ddp.backward(&model.forward(Tensor::<2>::ones([1, 4], &device)).sum(), &model)?;
///     }
///     let telemetry = ddp.telemetry();
///     let (all, last) = (telemetry.stats(), telemetry.last_step());
///     assert_eq!((all.steps, last.steps), (3, 1));
///     println!("{:?} per step, {:?} of it work", all.time() / 3, all.work() / 3);
///     println!("{:.0} % of the last step's communication hidden", 100.0 * last.overlap());
///     assert_eq!(telemetry.memory().parameters, 20); // bytes: a weight of four elements, and a bias
///     assert!(telemetry.straggler().is_none()); // too few steps to name one
///     Ok(())
/// })?;
/// # Ok::<(), burn_ddp::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct Telemetry {
    ddp: Ddp,
}

impl Telemetry {
    /// Takes a handle [without presence](Ddp::without_presence).
    pub(crate) fn new(ddp: Ddp) -> Self {
        Telemetry { ddp }
    }

    fn meter(&self) -> &Meter {
        &self.ddp.state().meter
    }

    /// Counters since the rank joined its job, over all of its wrapped models.
    #[must_use]
    pub fn stats(&self) -> Stats {
        self.meter().total()
    }

    /// [`stats`](Self::stats) of the last step; zeros before the first step.
    #[must_use]
    pub fn last_step(&self) -> Stats {
        self.meter().last_step()
    }

    /// The [loss scale](crate::WrapConfig::with_loss_scaling) of the wrapped model that ended a step last; `None` if it
    /// has none.
    ///
    /// # Example
    ///
    /// ```
    /// # use burn::{nn::LinearConfig, prelude::*};
    /// # use burn_ddp::{Precision, prelude::*};
    /// let ddp = Ddp::init()?;
    /// let device = ddp.device()?.autodiff();
    /// let config = WrapConfig::new().with_compute_dtype(Precision::F16);
    /// let model = ddp.wrap_with(LinearConfig::new(4, 1).init(&device), &config)?;
    /// let loss = model.forward(Tensor::<2>::ones([8, 4], &device).cast(Precision::F16.dtype())).mean();
    /// assert!(ddp.backward(&loss, &model)?.is_none()); // 2¹⁶ is too large for f16
    /// assert_eq!(ddp.telemetry().loss_scale(), Some(32768.0));
    /// # Ok::<(), burn_ddp::Error>(())
    /// ```
    #[must_use]
    pub fn loss_scale(&self) -> Option<f64> {
        self.meter().loss_scale()
    }

    /// Memory that the wrapped models of this rank take, computed from the shapes of their parameters, without the
    /// optimizer's state (see [`MemoryUse::with_optimizer`]).
    #[must_use]
    pub fn memory(&self) -> MemoryUse {
        self.meter().memory()
    }

    /// The slowest rank, if one stands out; the same on all ranks.
    ///
    /// The ranks determine it with each [replica check](crate::WrapConfig::with_replica_check), by default every 100
    /// steps. Rank 0 logs it once, as a `tracing` warning of the target `burn_ddp::straggler`.
    #[must_use]
    pub fn straggler(&self) -> Option<Straggler> {
        self.meter().straggler()
    }
}
