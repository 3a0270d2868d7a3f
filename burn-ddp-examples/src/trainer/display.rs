//! The lines that a trainer prints: a progress bar on a terminal, and a table.

use std::io::IsTerminal;

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

use super::summary::Epoch;

/// Display of a training on rank 0, for the whole job: a bar on a terminal, and a table with a row per epoch. Other
/// ranks print nothing.
#[derive(Debug)]
pub(super) struct Display {
    bar: ProgressBar,
    main: bool,
    epochs: usize,
}

impl Display {
    /// `main`: true on the rank that prints. `steps`: steps per epoch.
    pub(super) fn new(main: bool, epochs: usize, steps: usize) -> Self {
        let shown = main && std::io::stderr().is_terminal();
        let target = if shown { ProgressDrawTarget::stderr() } else { ProgressDrawTarget::hidden() };
        let style = ProgressStyle::with_template("{prefix} {wide_bar} {pos}/{len} steps, {eta} left")
            .unwrap_or_else(|_| ProgressStyle::default_bar());
        let bar = ProgressBar::with_draw_target(Some((epochs * steps) as u64), target).with_style(style);
        let display = Self { bar, main, epochs };
        display.line(&format!("{:>5}  {:>10}  {:>13}  {:>8}", "epoch", "train loss", "test accuracy", "time"));
        display.begin(0);
        display
    }

    /// Begins epoch `number`, counted from 0.
    pub(super) fn begin(&self, number: usize) {
        self.bar.set_prefix(format!("epoch {}/{}", number + 1, self.epochs));
    }

    /// Counts a step.
    pub(super) fn step(&self) {
        self.bar.inc(1);
    }

    /// Prints the row of epoch `number`, counted from 0.
    pub(super) fn end(&self, number: usize, epoch: &Epoch) {
        self.line(&format!(
            "{:>5}  {:>10.4}  {:>11.2} %  {:>6.1} s",
            number + 1,
            epoch.train_loss,
            epoch.test_accuracy * 100.0,
            epoch.train_time.as_secs_f64()
        ));
    }

    /// Removes the bar and prints the last lines.
    pub(super) fn finish(&self, text: &str) {
        self.bar.finish_and_clear();
        self.line(text.trim_end());
    }

    fn line(&self, text: &str) {
        if self.main {
            self.bar.suspend(|| println!("{text}"));
        }
    }
}
