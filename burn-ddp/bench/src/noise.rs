//! `noise`: the same bits, whatever the order of arrival.

use std::collections::BTreeMap;

use anyhow::{Result, ensure};
use burn_ddp_comm::DType;
use clap::Args;
use serde_json::json;

use crate::contender::{Engine, Setting, ours, start};
use crate::machine::describe;
use crate::options::Output;
use crate::rank::BufferKind;
use crate::table::Table;

/// Random arrival, same bits: sums, means and weighted means of random floats, in buckets of six sizes, each call after a random
/// pause on each rank; compares the results of all ranks, runs, engines, kinds of buffers and bucket sizes. Fails if any differ.
#[derive(Args, Debug)]
pub(crate) struct Noise {
    /// Engines to compare.
    #[arg(long, value_delimiter = ',', default_value = "threads,tcp,shm")]
    engine: Vec<Engine>,
    /// Numbers of ranks.
    #[arg(long, value_delimiter = ',', default_value = "2,3,5,8")]
    worlds: Vec<usize>,
    /// Runs of each; each with other pauses.
    #[arg(long, default_value_t = 100)]
    runs: usize,
    /// The longest pause, in microseconds.
    #[arg(long, default_value_t = 300)]
    pause_us: u64,
    #[command(flatten)]
    output: Output,
}

impl Noise {
    pub(crate) fn run(&self) -> Result<()> {
        let mut table = Table::new(["ranks", "dtype", "results", "different"]);
        let mut all_same = true;
        for &world in &self.worlds {
            for dtype in [DType::F32, DType::BF16, DType::F16, DType::F64] {
                let found = self.digests(world, dtype)?;
                let (results, different) = (found.values().sum::<usize>(), found.len() - 1);
                all_same &= different == 0;
                if self.output.json {
                    let engines: Vec<String> = self.engine.iter().map(Engine::to_string).collect();
                    let row = json!({"bench": "noise", "engines": engines, "world": world, "dtype": dtype.to_string(),
                        "results": results, "different": different});
                    println!("{row}");
                }
                table.add(vec![world.to_string(), dtype.to_string(), results.to_string(), different.to_string()]);
            }
        }
        if !self.output.json {
            println!("bits under random arrival, {} runs, on {}\n\n{table}", self.runs, describe());
        }
        ensure!(all_same, "results differ");
        Ok(())
    }

    /// How often each result came.
    fn digests(&self, world: usize, dtype: DType) -> Result<BTreeMap<String, usize>> {
        let mut found = BTreeMap::new();
        for who in ours(&self.engine, &[BufferKind::Slice, BufferKind::Arena]) {
            let mut team = start(who, &Setting::here(world, dtype, &self.output.programs))?;
            for run in 0..self.runs {
                for answer in team.tell(&format!("noise {run} {}", self.pause_us))? {
                    *found.entry(answer).or_default() += 1;
                }
            }
        }
        Ok(found)
    }
}
