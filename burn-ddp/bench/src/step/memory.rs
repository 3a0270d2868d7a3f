//! `memory`: what gradients of growing size cost in memory, page faults and time.

use anyhow::{Context, Result};
use clap::Args;
use serde_json::json;

use crate::comparison::{Field, Timing};
use crate::contender::{Model, Side};
use crate::machine::{Usage, describe};
use crate::protocol::RoundPlan;
use crate::table::{Table, bytes};
use crate::team::Team;
use crate::training::{Task, Training, pairs};

/// Memory and page faults of data parallelism as gradients grow: a model that is nothing but parameters, wrapped, against the same
/// unwrapped. Extra memory is the difference of the processes' sizes: RSS counts shared pages in each rank, PSS divides them.
#[derive(Args, Debug)]
pub(crate) struct Memory {
    /// Ranks.
    #[arg(long, default_value_t = 2)]
    world: usize,
    /// Bytes of all parameters.
    #[arg(long, value_delimiter = ',', default_value = "67108864,134217728,268435456,536870912,1073741824")]
    sizes: Vec<usize>,
    /// In how many tensors.
    #[arg(long, default_value_t = 64)]
    tensors: usize,
    #[command(flatten)]
    training: Training,
}

/// Steps over which page faults are counted.
const STEPS: usize = 5;

impl Memory {
    pub(crate) fn run(&self) -> Result<()> {
        let header = [
            "who",
            "bytes",
            "extra PSS",
            "extra RSS",
            "of gradients (PSS)",
            "faults a step",
            "without",
            "added ns per byte",
        ];
        let mut table = Table::new(header);
        // What the allocator gives back is part of what is measured.
        let task = Task { model: Model::Tensors, sides: &[Side::Barrier], world: self.world, keeps_memory: false };
        let mut field = self.training.field(&task)?;
        for &size in &self.sizes {
            let timings = field.measure_of(size, self.tensors, &self.training.steps.effort())?;
            for pair in pairs(&timings) {
                let base = self.usage(&mut field, pair.base, size)?;
                let wrapped = self.usage(&mut field, pair.wrapped, size)?;
                let extra = |of: fn(&Usage) -> u64| of(&wrapped.0) as f64 - of(&base.0) as f64;
                let (pss, rss) = (extra(|usage| usage.pss_bytes), extra(|usage| usage.rss_bytes));
                let ns_per_byte = 1e3 * pair.added_us() / size as f64;
                if self.training.steps.json {
                    let row = json!({"bench": "memory", "who": pair.who, "world": self.world, "dtype": "f32", "bytes": size,
                        "median_us": pair.wrapped.median_us(), "extra_pss_bytes": pss, "extra_rss_bytes": rss,
                        "extra_of_gradients": pss / size as f64, "faults_per_step": wrapped.1,
                        "base_faults_per_step": base.1, "added_ns_per_byte": ns_per_byte});
                    println!("{row}");
                }
                let mib = |bytes: f64| format!("{:.1} MiB", bytes / f64::from(1 << 20));
                table.add(vec![
                    pair.who.clone(),
                    bytes(size),
                    mib(pss),
                    mib(rss),
                    format!("{:.2}", pss / size as f64),
                    format!("{:.0}", wrapped.1),
                    format!("{:.0}", base.1),
                    format!("{ns_per_byte:.3}"),
                ]);
            }
        }
        if !self.training.steps.json {
            println!("{} tensors, {} ranks, on {}\n\n{table}", self.tensors, self.world, describe());
        }
        Ok(())
    }

    /// The largest rank's size after some steps, and page faults of one of them.
    fn usage(&self, field: &mut Field, timing: &Timing, size: usize) -> Result<(Usage, f64)> {
        let team = field.team(timing.who).context("gone")?;
        let usages = |team: &mut Team| -> Result<Vec<Usage>> {
            let answers = team.tell("usage")?;
            answers.iter().map(|answer| Usage::parse(answer).context("no usage")).collect()
        };
        team.prepare(size, self.tensors)?;
        let warm_up = RoundPlan { seed: 0, samples: 1, per_sample: 1, warmup: 3, late: None };
        team.round(&warm_up)?;
        let before = usages(team)?;
        // One less, since each round ends with a step that is checked.
        team.round(&RoundPlan { samples: STEPS - 1, warmup: 0, ..warm_up })?;
        let after = usages(team)?;
        let faults = after.iter().zip(&before).map(|(a, b)| a.faults - b.faults).max().unwrap_or(0);
        let largest = after.iter().copied().max_by_key(|usage| usage.pss_bytes).unwrap_or_default();
        team.prepare(64, 1)?;
        Ok((largest, faults as f64 / STEPS as f64))
    }
}
