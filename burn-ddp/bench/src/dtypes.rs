//! `dtypes`: the same number of elements as other types.

use anyhow::Result;
use burn_ddp_comm::DType;
use clap::Args;
use serde_json::json;

use crate::comparison::{Effort, Field, Timing};
use crate::contender::{Contender, Engine, Setting};
use crate::machine::describe;
use crate::options::{Output, Turns};
use crate::rank::BufferKind;
use crate::table::{Table, time_us};
use crate::values;

/// All-reduces (sum) of the same number of elements as other types, interleaved, against the first of them.
#[derive(Args, Debug)]
pub(crate) struct DTypes {
    /// The engine to measure.
    #[arg(long, default_value = "shm")]
    engine: Engine,
    /// Where the ranks' buffers are.
    #[arg(long, default_value = "arena")]
    buffers: BufferKind,
    /// Ranks.
    #[arg(long, default_value_t = 2)]
    world: usize,
    /// Of f32, f16, bf16 and f64.
    #[arg(long, value_delimiter = ',', value_parser = values::parse_dtype, default_value = "f32,bf16,f16")]
    dtypes: Vec<DType>,
    /// Numbers of elements.
    #[arg(long, value_delimiter = ',', default_value = "524288,4194304,16777216")]
    elements: Vec<usize>,
    #[command(flatten)]
    turns: Turns,
    #[command(flatten)]
    output: Output,
}

impl DTypes {
    pub(crate) fn run(&self) -> Result<()> {
        let who = Contender::Ours(self.engine, self.buffers);
        let gather = |dtype: &DType| Field::gather(&[who], &Setting::here(self.world, *dtype, &self.output.programs));
        let mut fields: Vec<Field> = self.dtypes.iter().map(gather).collect::<Result<_>>()?;
        let effort = Effort { rounds: 1, round_ms: self.turns.round_ms, per_sample: None };
        let mut table = Table::new(["elements", "dtype", "median", "p95", "of the first"]);
        for &elements in &self.elements {
            let mut all: Vec<Option<Timing>> = vec![None; fields.len()];
            for _ in 0..self.turns.rounds {
                for ((field, dtype), timing) in fields.iter_mut().zip(&self.dtypes).zip(&mut all) {
                    for more in field.measure(elements * dtype.size_bytes(), &effort)? {
                        match timing {
                            Some(timing) => timing.extend(more),
                            None => *timing = Some(more),
                        }
                    }
                }
            }
            let Some(first) = all.first().cloned().flatten() else { continue };
            for (timing, dtype) in all.iter().flatten().zip(&self.dtypes) {
                let (median_us, p95_us) = (timing.median_us(), timing.percentile_us(0.95));
                let of_first = timing.times_longer_than(&first);
                if self.output.json {
                    let row = json!({"bench": "dtypes", "engine": self.engine.to_string(), "buffers": self.buffers.to_string(),
                        "world": self.world, "dtype": dtype.to_string(), "elements": elements,
                        "bytes": elements * dtype.size_bytes(), "median_us": median_us, "p95_us": p95_us, "of_first": of_first});
                    println!("{row}");
                }
                let cells = [elements.to_string(), dtype.to_string(), time_us(median_us), time_us(p95_us)];
                table.add(cells.into_iter().chain([format!("{of_first:.2}")]).collect());
            }
        }
        if !self.output.json {
            println!(
                "all-reduce (sum), {who}, {} ranks, {} rounds, on {}\n\n{table}",
                self.world,
                self.turns.rounds,
                describe()
            );
        }
        Ok(())
    }
}
