//! Learning rates over a training.

use std::f64::consts::PI;

/// Share of all steps during which the learning rate rises (Goyal et al. 2017, "Accurate, Large Minibatch SGD").
const WARM_UP: f64 = 0.1;

/// Course of the learning rate after its rise.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum Schedule {
    /// Falls to zero along a cosine (Loshchilov and Hutter 2017).
    Cosine,
    /// A tenth after half of all steps, a hundredth after three quarters (He et al. 2015, for CIFAR-10).
    Step,
}

impl Schedule {
    /// Learning rate of optimizer step `step`, counted from 0, of `steps`: it rises linearly to `peak` in the first
    /// tenth, then follows `self`.
    pub fn rate(self, peak: f64, step: usize, steps: usize) -> f64 {
        let progress = (step + 1) as f64 / (steps + 1) as f64;
        if progress < WARM_UP {
            return peak * progress / WARM_UP;
        }
        match self {
            Self::Cosine => peak * (1.0 + (PI * (progress - WARM_UP) / (1.0 - WARM_UP)).cos()) / 2.0,
            Self::Step if progress < 0.5 => peak,
            Self::Step if progress < 0.75 => peak / 10.0,
            Self::Step => peak / 100.0,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cosine_rises_then_falls_and_is_never_zero() {
        let rates: Vec<f64> = (0..99).map(|step| Schedule::Cosine.rate(0.5, step, 99)).collect();
        assert!(rates.iter().all(|&rate| rate > 0.0 && rate <= 0.5));
        assert_eq!(rates[9], 0.5);
        assert!(rates[..10].is_sorted() && rates[9..].is_sorted_by(|a, b| a > b));
        assert!(Schedule::Cosine.rate(0.5, 0, 1) > 0.0);
    }

    #[test]
    fn steps_are_tenths() {
        let rates: Vec<f64> = (0..99).map(|step| Schedule::Step.rate(0.5, step, 99)).collect();
        assert!(rates[..10].is_sorted_by(|a, b| a < b));
        assert_eq!(rates[9..49], [0.5; 40]);
        assert_eq!(rates[49..74], [0.05; 25]);
        assert_eq!(rates[74..], [0.005; 25]);
    }
}
