//! `step`: what data parallelism adds to a real training step.

use anyhow::Result;
use clap::Args;
use serde_json::json;

use crate::contender::{Model, Side};
use crate::machine::describe;
use crate::table::{Table, time_us};
use crate::training::{Task, Training, pairs};

/// A training step of a small convolutional network (forward, backward, Adam), one thread per rank. One rank: wrapped against plain.
/// Several: wrapped against the same processes that meet at a bare barrier in each step. Torch and its DDP likewise.
#[derive(Args, Debug)]
pub(crate) struct Step {
    /// Numbers of ranks.
    #[arg(long, value_delimiter = ',', default_value = "1,2")]
    worlds: Vec<usize>,
    #[command(flatten)]
    training: Training,
}

impl Step {
    pub(crate) fn run(&self) -> Result<()> {
        let mut table = Table::new(["ranks", "who", "step", "without", "added", "share"]);
        for &world in &self.worlds {
            let base = if world == 1 { Side::Plain } else { Side::Barrier };
            let task = Task { model: Model::Cnn, sides: &[base], world, keeps_memory: false };
            let mut field = self.training.field(&task)?;
            let timings = field.measure_of(0, 1, &self.training.steps.effort())?;
            for pair in pairs(&timings) {
                let (step, without) = (pair.wrapped.median_us(), pair.base.median_us());
                if self.training.steps.json {
                    let row = json!({"bench": "step", "who": pair.who, "world": world, "dtype": "f32",
                        "median_us": step, "p95_us": pair.wrapped.percentile_us(0.95), "base_us": without,
                        "added_us": pair.added_us(), "added_percent": pair.added_percent()});
                    println!("{row}");
                }
                table.add(vec![
                    world.to_string(),
                    pair.who.clone(),
                    time_us(step),
                    time_us(without),
                    time_us(pair.added_us()),
                    format!("{:.1} %", pair.added_percent()),
                ]);
            }
        }
        if !self.training.steps.json {
            let rounds = self.training.steps.rounds;
            println!("a step of the MNIST network, 16 items per rank, {rounds} rounds, on {}\n\n{table}", describe());
        }
        Ok(())
    }
}
