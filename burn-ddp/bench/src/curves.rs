//! `curves`: losses and speed of one training on several numbers of ranks.

use std::path::PathBuf;
use std::process::Command;

use anyhow::{Context, Result, ensure};
use clap::Args;
use serde_json::{Value, json};

use crate::contender_ranks::Scratch;
use crate::machine::describe;
use crate::plot::{self, Line, Plot};
use crate::stats::median;
use crate::table::{Table, ratio};

/// Trains the MNIST network on several numbers of ranks with the same global batch, the same seed and no dropout: the
/// losses must be the same curve.
#[derive(Args, Debug)]
pub(crate) struct Curves {
    /// Numbers of ranks; each must divide the global batch.
    #[arg(long, value_delimiter = ',', default_value = "1,2,4")]
    worlds: Vec<usize>,
    /// Items of a step over all ranks.
    #[arg(long, default_value_t = 64)]
    global_batch: usize,
    /// Passes over the training data.
    #[arg(long, default_value_t = 6)]
    epochs: usize,
    /// Number of rounds, in each of which every number of ranks trains once. The losses must be the same in each round;
    /// speeds are medians.
    #[arg(long, default_value_t = 3)]
    rounds: usize,
    /// Trainer program [default: `mnist` in the directory of this program].
    #[arg(long, value_name = "FILE")]
    mnist: Option<PathBuf>,
    /// Draws loss by epoch into this SVG file.
    #[arg(long, value_name = "FILE.svg")]
    plot: Option<PathBuf>,
    /// Prints one JSON object per line instead of a table.
    #[arg(long)]
    json: bool,
}

/// Results of one number of ranks.
#[derive(Default)]
struct Curve {
    loss: Vec<f64>,
    accuracy: f64,
    speeds: Vec<f64>,
}

impl Curves {
    pub(crate) fn run(&self) -> Result<()> {
        plot::check(self.plot.as_deref())?;
        let mut curves: Vec<Curve> = self.worlds.iter().map(|_| Curve::default()).collect();
        for _ in 0..self.rounds {
            for (&world, curve) in self.worlds.iter().zip(&mut curves) {
                self.train(world, curve)?;
            }
        }
        let Some(first) = curves.first() else { return Ok(()) };
        let mut table = Table::new([
            "ranks",
            "batch of each",
            "first loss",
            "last loss",
            "differs by",
            "test accuracy",
            "samples/s",
            "speed",
        ]);
        for (&world, curve) in self.worlds.iter().zip(&curves) {
            let differs = curve.loss.iter().zip(&first.loss).map(|(a, b)| (a - b).abs() / b.abs()).fold(0.0, f64::max);
            let (speed, speedup) = (median(&curve.speeds), median(&curve.speeds) / median(&first.speeds));
            if self.json {
                let row = json!({"bench": "curves", "world": world, "global_batch": self.global_batch,
                    "loss": curve.loss, "relative_difference": differs, "test_accuracy": curve.accuracy,
                    "samples_per_second": speed, "speedup": speedup});
                println!("{row}");
            }
            let ends = [curve.loss.first(), curve.loss.last()]
                .map(|loss| loss.map_or(String::new(), |loss| format!("{loss:.6}")));
            let [begin, end] = ends;
            table.add(vec![
                world.to_string(),
                (self.global_batch / world).to_string(),
                begin,
                end,
                format!("{differs:.1e}"),
                format!("{:.2} %", 100.0 * curve.accuracy),
                format!("{speed:.0}"),
                ratio(speedup),
            ]);
        }
        if !self.json {
            println!(
                "{} epochs, global batch {}, {} rounds, on {}\n\n{table}",
                self.epochs,
                self.global_batch,
                self.rounds,
                describe()
            );
        }
        let Some(path) = &self.plot else { return Ok(()) };
        let line = |(world, curve): (&usize, &Curve)| Line {
            name: format!("{world} x {}", self.global_batch / world),
            points: curve.loss.iter().enumerate().map(|(epoch, loss)| ((epoch + 1) as f64, *loss)).collect(),
        };
        let lines = self.worlds.iter().zip(&curves).map(line).collect();
        Plot::new("one training on several numbers of ranks").panel("epoch", "training loss", lines).write(path)
    }

    fn train(&self, world: usize, curve: &mut Curve) -> Result<()> {
        ensure!(
            world > 0 && self.global_batch.is_multiple_of(world),
            "a global batch of {} items cannot be divided among {world} ranks",
            self.global_batch
        );
        let scratch = Scratch::new()?;
        let summary = scratch.path().join("summary.json");
        let program = match &self.mnist {
            Some(program) => program.clone(),
            None => std::env::current_exe()?.with_file_name("mnist"),
        };
        let (epochs, batch) = (self.epochs.to_string(), (self.global_batch / world).to_string());
        let output = Command::new(&program)
            .args([
                "--nproc",
                &world.to_string(),
                "--epochs",
                &epochs,
                "--batch-size",
                &batch,
                "--no-dropout",
                "--summary",
            ])
            .arg(&summary)
            .env("RAYON_NUM_THREADS", "1")
            .output()
            .with_context(|| {
                format!("cannot start {}: build it with `cargo build --release --bin mnist`", program.display())
            })?;
        ensure!(output.status.success(), "{world} ranks failed: {}", String::from_utf8_lossy(&output.stderr));
        let summary: Value = serde_json::from_slice(&std::fs::read(&summary)?)?;
        let number = |name: &str| summary[name].as_f64().with_context(|| format!("no {name} in the summary"));
        let loss = summary["train_loss"].as_array().context("no train_loss in the summary")?;
        let loss: Vec<f64> = loss.iter().filter_map(Value::as_f64).collect();
        ensure!(
            curve.loss.is_empty() || curve.loss == loss,
            "two runs on {world} ranks differ in their losses: {:?}, {loss:?}",
            curve.loss
        );
        curve.loss = loss;
        curve.accuracy = number("test_accuracy")?;
        curve.speeds.push(number("samples_per_second")?);
        Ok(())
    }
}
