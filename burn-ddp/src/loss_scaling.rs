//! Scaling of losses, so that small gradients do not vanish in f16 (Micikevicius et al. 2018, "Mixed Precision
//! Training"). Factors are powers of two, which change no bit of a gradient that is not subnormal.

use serde::{Deserialize, Serialize};

use crate::{Error, Result};

/// Settings of the dynamic loss scale of a wrapped model, for
/// [`WrapConfig::with_loss_scaling`](crate::WrapConfig::with_loss_scaling). The names are DeepSpeed's; growth and
/// backoff are those of torch's `GradScaler`.
///
/// The scale begins at 2 to the `initial_scale_power`. A step with an average that is not finite is skipped on all
/// ranks, and halves the scale; `loss_scale_window` steps without one double it.
///
/// ```
/// # use burn_ddp::{LossScaling, Precision, WrapConfig};
/// let scaling = LossScaling { initial_scale_power: 12, ..LossScaling::default() };
/// let config = WrapConfig::new().with_compute_dtype(Precision::F16).with_loss_scaling(scaling);
/// # assert_ne!(config, WrapConfig::new());
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct LossScaling {
    /// False to leave losses as they are: with f16, small gradients become 0 then.
    pub enabled: bool,
    /// The first scale is 2 to this power: 16 by default.
    pub initial_scale_power: u32,
    /// Steps without overflow after which the scale doubles: 2000 by default.
    pub loss_scale_window: u64,
    /// A scale below this is an error: 1 by default.
    pub min_loss_scale: u64,
}

impl Default for LossScaling {
    fn default() -> Self {
        LossScaling { enabled: true, initial_scale_power: 16, loss_scale_window: 2000, min_loss_scale: 1 }
    }
}

impl LossScaling {
    pub(crate) fn check(&self) -> Result<()> {
        if self.initial_scale_power > 64 {
            return Err(Error::invalid("initial_scale_power is a power of two: at most 64"));
        }
        if self.loss_scale_window == 0 {
            return Err(Error::invalid("loss_scale_window counts steps: 1 or more"));
        }
        let first = f64::from(self.initial_scale_power).exp2();
        if self.min_loss_scale == 0 || self.min_loss_scale as f64 > first {
            return Err(Error::invalid(format!("min_loss_scale is at least 1, and at most the first scale, {first}")));
        }
        Ok(())
    }
}

/// State of a loss scale, as checkpoints have it. The same on all ranks.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct LossScale {
    /// A power of two.
    pub(crate) scale: f64,
    /// Steps without overflow since the scale changed.
    pub(crate) good_steps: u64,
}

/// The loss scale of one wrapped model.
#[derive(Clone, Copy, Debug)]
pub(crate) struct LossScaler {
    settings: LossScaling,
    pub(crate) state: LossScale,
}

impl LossScaler {
    pub(crate) fn new(settings: LossScaling) -> Self {
        let scale = f64::from(settings.initial_scale_power).exp2();
        LossScaler { settings, state: LossScale { scale, good_steps: 0 } }
    }

    /// Notes a step whose averages are finite. `used` was the scale of its loss: that of another model of the call if
    /// it is smaller, which says nothing about this one.
    pub(crate) fn fits(&mut self, used: f64) {
        let LossScale { scale, good_steps } = &mut self.state;
        if *scale > used {
            return;
        }
        *good_steps += 1;
        if *good_steps >= self.settings.loss_scale_window {
            let twice = *scale * 2.0;
            // What a loss in f32 can take.
            *scale = if twice <= f64::from(f32::MAX) { twice } else { *scale };
            *good_steps = 0;
        }
    }

    /// True if half the scale is large enough.
    pub(crate) fn can_fall(&self) -> bool {
        self.state.scale / 2.0 >= self.settings.min_loss_scale as f64
    }

    /// True if the scale is not below its bound.
    pub(crate) fn is_enough(&self) -> bool {
        self.state.scale >= self.settings.min_loss_scale as f64
    }

    /// Notes a step with an average that is not finite.
    pub(crate) fn overflows(&mut self) {
        self.state = LossScale { scale: self.state.scale / 2.0, good_steps: 0 };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn scaler(loss_scale_window: u64) -> LossScaler {
        LossScaler::new(LossScaling { initial_scale_power: 4, loss_scale_window, ..LossScaling::default() })
    }

    #[test]
    fn a_scale_grows_and_falls_as_torchs_does() {
        let mut scaler = scaler(3);
        let mut scales = Vec::new();
        for overflows in [false, false, true, false, false, false, false, false, false, true, true] {
            let used = scaler.state.scale;
            match overflows {
                true => scaler.overflows(),
                false => scaler.fits(used),
            }
            scales.push(scaler.state.scale);
        }
        // torch.cuda.amp.GradScaler(init_scale=16, growth_interval=3) after the same steps.
        assert_eq!(scales, [16.0, 16.0, 8.0, 8.0, 8.0, 16.0, 16.0, 16.0, 32.0, 16.0, 8.0]);
    }

    #[test]
    fn the_smallest_scale_of_a_call_is_the_one_that_grows() {
        let (mut small, mut large) = (scaler(1), scaler(1));
        large.state.scale = 1024.0;
        small.fits(16.0);
        large.fits(16.0);
        assert_eq!((small.state.scale, large.state.scale), (32.0, 1024.0));
    }

    #[test]
    fn a_scale_stays_within_f32_and_above_its_bound() {
        let mut scaler = scaler(1);
        (0..1000).for_each(|_| scaler.fits(f64::MAX));
        assert_eq!(scaler.state.scale, 127f64.exp2());
        let halvings = (0..1000).take_while(|_| {
            scaler.overflows();
            scaler.is_enough()
        });
        assert_eq!(halvings.count(), 127);
        assert_eq!(scaler.state.scale, 0.5);
    }
}
