//! Warns of optimizer loops that count backwards by themselves. At the end of an epoch a step may have fewer
//! micro-batches than others: such a loop misses its average, and steps later where there is none.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Watches whether averages of short steps are used, in one wrapped model.
#[derive(Default)]
pub(super) struct ShortSteps {
    /// True if the model was mapped since the last backward began.
    mapped: AtomicBool,
    seen: Mutex<Seen>,
}

#[derive(Default)]
struct Seen {
    /// True if the last backward only summed up.
    sums_up: bool,
    /// True if the model is mapped after backwards that only sum up, so that maps do not tell where the program steps.
    maps_always: bool,
    last: LastShort,
    /// Number of short steps whose averages were not used.
    unused: u32,
}

/// The last short step.
#[derive(Default, PartialEq)]
enum LastShort {
    /// It has been used, or there was none.
    #[default]
    Used,
    /// It was averaged.
    Averaged,
    /// The next backward began before the model was mapped. All ranks may have skipped the step.
    Unused,
    /// Then the model was mapped after a backward that only sums up.
    Miscounted,
}

/// Use that the program made of the average of the last short step, as seen at the beginning of the next backward.
#[derive(Debug, PartialEq)]
pub(super) enum Finding {
    Nothing,
    /// Averages of short steps were not used, twice.
    UnusedTwice,
    /// The average of a short step was not used, and the program stepped later, without an average.
    Miscounted,
}

impl ShortSteps {
    /// Notes that the model, or a copy of it, was mapped.
    pub(super) fn note_map(&self) {
        if self.mapped.swap(true, Ordering::AcqRel) {
            return;
        }
        let mut seen = self.lock();
        match (seen.sums_up, &seen.last) {
            (false, _) => seen.last = LastShort::Used,
            (true, LastShort::Unused) => seen.last = LastShort::Miscounted,
            (true, _) => seen.maps_always = true,
        }
    }

    /// Notes that a backward begins.
    pub(super) fn begin(&self) -> Finding {
        self.mapped.store(false, Ordering::Release);
        let mut seen = self.lock();
        match seen.last {
            LastShort::Averaged => {
                seen.last = LastShort::Unused;
                seen.unused += 1;
                if seen.unused == 2 { Finding::UnusedTwice } else { Finding::Nothing }
            }
            LastShort::Miscounted => {
                seen.last = LastShort::Used;
                Finding::Miscounted
            }
            LastShort::Used | LastShort::Unused => Finding::Nothing,
        }
    }

    /// Notes the kind of backward that has begun: one that only sums up, or one that ends a step, a short one if
    /// `short`.
    pub(super) fn note_kind(&self, sums_up: bool, short: bool) {
        let mut seen = self.lock();
        seen.sums_up = sums_up;
        if short && !seen.maps_always {
            seen.last = LastShort::Averaged;
        }
    }

    fn lock(&self) -> MutexGuard<'_, Seen> {
        self.seen.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(all(test, feature = "flex"))]
mod tests {
    use burn::data::dataloader::batcher::Batcher;
    use burn::data::dataset::InMemDataset;
    use burn::optim::{GradientsParams, SgdConfig};
    use burn::tensor::Device;

    use super::*;
    use crate::intercept::warning_test_model::Pair;
    use crate::telemetry::test_event_capture::Listener;
    use crate::{Ddp, WrapConfig};

    /// Findings of a loop with an accumulation over `per_step` micro-batches in epochs of `per_epoch`. `steps` says
    /// after which backwards, by number and by whether there is an average, the model is mapped.
    fn findings(per_step: usize, per_epoch: usize, steps: impl Fn(usize, bool) -> bool) -> Vec<(usize, Finding)> {
        let short_steps = ShortSteps::default();
        let mut findings = Vec::new();
        let mut held = 0;
        for number in 1..=12 {
            findings.push((number, short_steps.begin()));
            held += 1;
            let averages = held == per_step || number % per_epoch == 0;
            // As the caller does: a program that has never stepped only looks at gradients.
            short_steps.note_kind(!averages, averages && held < per_step && number > per_step);
            if averages {
                held = 0;
            }
            if steps(number, averages) {
                short_steps.note_map();
            }
        }
        findings.retain(|(_, finding)| *finding != Finding::Nothing);
        findings
    }

    #[test]
    fn programs_that_count_backwards_are_found_out() {
        assert_eq!(findings(2, 3, |number, _| number % 2 == 0)[0], (5, Finding::Miscounted));
        assert_eq!(findings(3, 4, |number, _| number % 3 == 0)[0], (7, Finding::Miscounted));
        assert_eq!(findings(4, 6, |number, _| number % 4 == 0)[0], (9, Finding::Miscounted));
        let all_short = findings(2, 1, |number, _| number % 2 == 0);
        assert_eq!(all_short, [(6, Finding::UnusedTwice)], "each backward is a step of its own");
    }

    #[test]
    fn programs_that_step_where_there_is_an_average_are_not() {
        assert_eq!(findings(2, 3, |_, averages| averages), []);
        assert_eq!(findings(2, 3, |_, _| true), [], "nor those that step always");
        assert_eq!(
            findings(2, 3, |number, averages| averages && number != 3),
            [],
            "nor if all ranks skip a short step"
        );
        assert_eq!(findings(2, 3, |number, _| number != 3), []);
        let never_short = findings(2, 3, |number, averages| averages && number % 3 != 0);
        assert_eq!(never_short, [(7, Finding::UnusedTwice)], "a warning");
    }

    struct Sum;

    impl Batcher<f32, f32> for Sum {
        fn batch(&self, items: Vec<f32>, _: &Device) -> f32 {
            items.into_iter().sum()
        }
    }

    /// Trains in three epochs of three batches, in steps of two; `steps` says after which backwards, by number and by
    /// whether there is an average, the model is stepped. Returns the number of warnings of each rank.
    fn train(steps: impl Fn(usize, bool) -> bool + Sync) -> crate::Result<Vec<usize>> {
        let run = |ddp: &Ddp| {
            let mut model = ddp.wrap_with(Pair::ones(), &WrapConfig::new().with_accumulation(2))?;
            let items = InMemDataset::new((0..6).map(|item| item as f32).collect());
            let batches = ddp.loader(Sum).global_batch_size(2).build(items)?;
            let mut number = 0;
            for epoch in batches.epochs(0..3) {
                for batch in epoch {
                    number += 1;
                    let loss = (model.a.val() + model.b.val()) * batch?;
                    let grads = GradientsParams::from_grads(ddp.backward(&loss, &model)?, &model);
                    if steps(number, !grads.is_empty()) {
                        model = SgdConfig::new().init().step(0.1, model, grads);
                    }
                }
            }
            anyhow::Ok(())
        };
        Ddp::spawn(2, |ddp| {
            let listener = Listener::default();
            tracing::subscriber::with_default(listener.clone(), || run(&ddp))?;
            Ok(listener.events("burn_ddp::accumulation").len())
        })
    }

    #[test]
    fn a_short_step_that_all_ranks_skip_ends_no_job() {
        assert_eq!(train(|_, averages| averages).unwrap(), [0, 0]);
        assert_eq!(train(|number, averages| averages && number != 3).unwrap(), [0, 0]);
        assert_eq!(train(|number, averages| averages && number % 3 != 0).unwrap(), [1, 0], "all short steps");
        let error = train(|number, _| number % 2 == 0).unwrap_err().to_string();
        assert!(error.contains("stepped without one") && error.contains("not after every 2 backwards"), "{error}");
    }
}
