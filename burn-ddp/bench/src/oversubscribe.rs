//! `oversubscribe`: more ranks than cores.

use std::time::Duration;

use anyhow::Result;
use burn_ddp_comm::DType;
use clap::Args;
use serde_json::json;

use crate::comparison::{Effort, Field};
use crate::contender::{Contender, Engine, Peer, Programs, Setting, ours, theirs};
use crate::machine::describe;
use crate::protocol::RoundPlan;
use crate::rank::BufferKind;
use crate::report::{self, Measured};
use crate::table::Table;

/// More ranks than cores: times of single all-reduces, and what waiting for a late rank costs.
#[derive(Args, Debug)]
pub(crate) struct Oversubscribe {
    /// Engines to measure.
    #[arg(long, value_delimiter = ',', default_value = "shm")]
    engine: Vec<Engine>,
    /// Numbers of ranks.
    #[arg(long, value_delimiter = ',', default_value = "4,8")]
    worlds: Vec<usize>,
    /// Bytes per rank.
    #[arg(long, value_delimiter = ',', default_value = "8192,16777216")]
    sizes: Vec<usize>,
    /// Where the ranks' buffers are.
    #[arg(long, value_delimiter = ',', default_value = "slice,arena")]
    buffers: Vec<BufferKind>,
    /// Whom to compare with;
    #[arg(long, value_delimiter = ',', num_args = 1.., default_value = "gloo,mpich,openmpi,floor")]
    peers: Vec<Peer>,
    /// Compares with nobody.
    #[arg(long)]
    alone: bool,
    /// How often everybody has a turn.
    #[arg(long, default_value_t = 10)]
    rounds: usize,
    /// About how long a turn takes, in milliseconds.
    #[arg(long, default_value_t = 100.0)]
    round_ms: f64,
    /// By how many milliseconds rank 0 is late when the CPU time of those who wait is taken.
    #[arg(long, default_value_t = 200)]
    late_ms: u64,
    /// Prints JSON objects, one a line, instead of tables.
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    programs: Programs,
}

/// How often rank 0 is late.
const LATE_STEPS: usize = 5;
const LATE_BYTES: usize = 8192;

impl Oversubscribe {
    pub(crate) fn run(&self) -> Result<()> {
        // Each step by itself: a percentile of means would hide what happens to few.
        let effort = Effort { rounds: self.rounds, round_ms: self.round_ms, per_sample: Some(1) };
        let mut all = Vec::new();
        let mut waits = Table::new(["ranks", "who", "CPU of a rank that waits"]);
        for &world in &self.worlds {
            let who = self.contenders();
            let mut field = Field::gather(&who, &Setting::here(world, DType::F32, &self.programs))?;
            for &bytes in &self.sizes {
                let timings = field.measure(bytes, &effort)?;
                let measured = Measured { world, dtype: DType::F32, bytes, timings };
                if self.json {
                    measured.rows("oversubscribe").iter().for_each(|row| println!("{row}"));
                }
                all.push(measured);
            }
            for who in who {
                let Some(percent) = self.waiting(&mut field, who)? else { continue };
                if self.json {
                    let row = json!({"bench": "oversubscribe-wait", "who": who.to_string(), "world": world,
                        "late_ms": self.late_ms, "waiting_cpu_percent": percent});
                    println!("{row}");
                }
                waits.add(vec![world.to_string(), who.to_string(), format!("{percent:.2} %")]);
            }
        }
        if !self.json {
            println!("single all-reduces (sum) of f32 in {} interleaved rounds, on {}\n", self.rounds, describe());
            println!("{}\nrank 0 is {} ms late:\n\n{waits}", report::table(&all), self.late_ms);
        }
        Ok(())
    }

    fn contenders(&self) -> Vec<Contender> {
        let peers = if self.alone { &[][..] } else { &self.peers };
        [ours(&self.engine, &self.buffers), theirs(peers, &self.buffers)].concat()
    }

    /// The share of a core that a rank uses while it waits for rank 0.
    fn waiting(&self, field: &mut Field, who: Contender) -> Result<Option<f64>> {
        let Some(team) = field.team(who).filter(|_| !who.is_limit()) else { return Ok(None) };
        team.prepare(LATE_BYTES, 4)?;
        let late = Duration::from_millis(self.late_ms);
        let plan = RoundPlan { seed: 0, samples: LATE_STEPS, per_sample: 1, warmup: 1, late: Some((0, late)) };
        let round = team.round(&plan)?;
        let waiting = &round.cpu_ns[1..];
        let mean = waiting.iter().sum::<f64>() / waiting.len() as f64;
        Ok(Some(100.0 * mean / (LATE_STEPS as f64 * late.as_nanos() as f64)))
    }
}
