//! `scaling`: what a byte costs as the world grows.

use std::path::PathBuf;

use anyhow::Result;
use burn_ddp_comm::DType;
use clap::Args;
use serde_json::json;

use crate::comparison::{Effort, Field, Timing};
use crate::contender::{Engine, Peer, Programs, Setting, ours, theirs};
use crate::machine::describe;
use crate::plot::{Line, Plot};
use crate::rank::BufferKind;
use crate::stats::median;
use crate::table::{Table, bytes, time_us};

/// CPU time per rank and byte of an all-reduce, as the world grows.
#[derive(Args, Debug)]
pub(crate) struct Scaling {
    /// Engines to measure.
    #[arg(long, value_delimiter = ',', default_value = "shm")]
    engine: Vec<Engine>,
    /// Numbers of ranks.
    #[arg(long, value_delimiter = ',', default_value = "2,4,8,16,32")]
    worlds: Vec<usize>,
    /// Bytes per rank.
    #[arg(long, default_value_t = 16 << 20)]
    bytes: usize,
    /// Where the ranks' buffers are.
    #[arg(long, value_delimiter = ',', default_value = "arena")]
    buffers: Vec<BufferKind>,
    /// Whom to compare with; torch's processes are large, so gloo takes part up to 8 ranks.
    #[arg(long, value_delimiter = ',', num_args = 1.., default_value = "gloo")]
    peers: Vec<Peer>,
    /// Compares with nobody.
    #[arg(long)]
    alone: bool,
    /// How often everybody has a turn.
    #[arg(long, default_value_t = 5)]
    rounds: usize,
    /// About how long a turn takes, in milliseconds.
    #[arg(long, default_value_t = 200.0)]
    round_ms: f64,
    /// Prints one JSON object a line instead of a table.
    #[arg(long)]
    json: bool,
    /// Draws the cost by world into this SVG file.
    #[arg(long, value_name = "FILE.svg")]
    plot: Option<PathBuf>,
    #[command(flatten)]
    programs: Programs,
}

const GLOO_RANKS: usize = 8;

/// All rounds of one contender in one world.
struct Cost {
    world: usize,
    timing: Timing,
}

impl Scaling {
    pub(crate) fn run(&self) -> Result<()> {
        let mut fields = Vec::new();
        for &world in &self.worlds {
            let takes_part = |peer: &Peer| !self.alone && (*peer != Peer::Gloo || world <= GLOO_RANKS);
            let peers: Vec<Peer> = self.peers.iter().copied().filter(takes_part).collect();
            let who = [ours(&self.engine, &self.buffers), theirs(&peers, &self.buffers)].concat();
            fields.push(Field::gather(&who, &Setting::here(world, DType::F32, &self.programs))?);
        }
        // All worlds take turns too, a round at a time.
        let effort = Effort { rounds: 1, round_ms: self.round_ms, per_sample: Some(1) };
        let mut costs: Vec<Cost> = Vec::new();
        for _ in 0..self.rounds {
            for field in &mut fields {
                for timing in field.measure(self.bytes, &effort)? {
                    let world = field.world;
                    match costs.iter_mut().find(|cost| cost.world == world && cost.timing.who == timing.who) {
                        Some(cost) => cost.timing.extend(timing),
                        None => costs.push(Cost { world, timing }),
                    }
                }
            }
        }
        self.show(&costs)
    }

    fn ns_per_byte(&self, cost: &Cost) -> f64 {
        median(&cost.timing.cpu) / (cost.world * self.bytes) as f64
    }

    fn show(&self, costs: &[Cost]) -> Result<()> {
        let mut table = Table::new(["who", "ranks", "time", "CPU ns per rank and byte", "of the smallest world's"]);
        let mut lines: Vec<Line> = Vec::new();
        for cost in costs {
            let who = cost.timing.who;
            let smallest = costs.iter().find(|first| first.timing.who == who).unwrap_or(cost);
            let (ns, of_smallest) = (self.ns_per_byte(cost), self.ns_per_byte(cost) / self.ns_per_byte(smallest));
            let point = (cost.world as f64, ns);
            match lines.iter_mut().find(|line| line.name == who.to_string()) {
                Some(line) => line.points.push(point),
                None => lines.push(Line { name: who.to_string(), points: vec![point] }),
            }
            let median_us = cost.timing.median_us();
            if self.json {
                let row = json!({"bench": "scaling", "who": who.to_string(), "world": cost.world, "dtype": "f32",
                    "bytes": self.bytes, "median_us": median_us, "p95_us": cost.timing.percentile_us(0.95),
                    "cpu_ns_per_rank_byte": ns, "of_smallest_world": of_smallest});
                println!("{row}");
            }
            let time = time_us(median_us);
            table.add(vec![
                who.to_string(),
                cost.world.to_string(),
                time,
                format!("{ns:.3}"),
                format!("{:.0} %", 100.0 * of_smallest),
            ]);
        }
        if !self.json {
            println!(
                "all-reduce (sum) of {} of f32, {} rounds, on {}\n\n{table}",
                bytes(self.bytes),
                self.rounds,
                describe()
            );
        }
        match &self.plot {
            Some(path) => Plot::new("what a byte costs as the world grows")
                .panel("ranks", "CPU ns per rank and byte", lines)
                .write(path),
            None => Ok(()),
        }
    }
}
