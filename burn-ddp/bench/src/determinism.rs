//! `determinism`: compares the bits of results while ranks arrive in random order.

use std::collections::BTreeMap;

use anyhow::{Result, ensure};
use burn_ddp_comm::DType;
use clap::Args;
use serde_json::json;

use crate::contender::{Engine, Setting, ours, start};
use crate::machine::describe;
use crate::peer_options::PeerOptions;
use crate::rank::BufferKind;
use crate::table::Table;

/// Checks that results have the same bits whatever the order of arrival.
///
/// Computes sums, means and weighted means of random floats in buckets of six sizes. Each rank pauses for a random time
/// before its first calls. Compares the results of all ranks, runs, engines, kinds of buffers and bucket sizes, and
/// fails if any differ.
#[derive(Args, Debug)]
pub(crate) struct Determinism {
    /// Engines to compare.
    #[arg(long, value_delimiter = ',', default_value = "threads,tcp,shm")]
    engine: Vec<Engine>,
    /// Numbers of ranks.
    #[arg(long, value_delimiter = ',', default_value = "2,3,5,8")]
    worlds: Vec<usize>,
    /// Runs of each engine and kind of buffers, each with other pauses.
    #[arg(long, default_value_t = 100)]
    runs: usize,
    /// Longest pause, in microseconds.
    #[arg(long, default_value_t = 300)]
    pause_us: u64,
    #[command(flatten)]
    common: PeerOptions,
}

impl Determinism {
    pub(crate) fn run(&self) -> Result<()> {
        let mut table = Table::new(["ranks", "dtype", "results", "different"]);
        let mut all_same = true;
        for &world in &self.worlds {
            for dtype in [DType::F32, DType::BF16, DType::F16, DType::F64] {
                let found = self.digests(world, dtype)?;
                let (results, different) = (found.values().sum::<usize>(), found.len() - 1);
                all_same &= different == 0;
                if self.common.json {
                    let engines: Vec<String> = self.engine.iter().map(Engine::to_string).collect();
                    let row = json!({"bench": "determinism", "engines": engines, "world": world,
                        "dtype": dtype.to_string(), "results": results, "different": different});
                    println!("{row}");
                }
                table.add(vec![world.to_string(), dtype.to_string(), results.to_string(), different.to_string()]);
            }
        }
        if !self.common.json {
            println!("bits under random arrival, {} runs, on {}\n\n{table}", self.runs, describe());
        }
        ensure!(all_same, "results differ");
        Ok(())
    }

    /// Number of occurrences of each digest.
    fn digests(&self, world: usize, dtype: DType) -> Result<BTreeMap<String, usize>> {
        let mut found = BTreeMap::new();
        for contender in ours(&self.engine, &[BufferKind::Slice, BufferKind::Arena]) {
            let mut team = start(contender, &Setting::here(world, dtype, &self.common.programs))?;
            for run in 0..self.runs {
                for answer in team.tell(&format!("digest {run} {}", self.pause_us))? {
                    *found.entry(answer).or_default() += 1;
                }
            }
        }
        Ok(found)
    }
}
