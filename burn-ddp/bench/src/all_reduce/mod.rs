//! `all-reduce`: latency, bandwidth and CPU time by size, dtype and number of ranks.

mod machine_options;
mod report;

use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Result, ensure};
use burn_ddp_comm::DType;
use clap::Args;
use clap::builder::ArgPredicate;
use serde_json::json;

use crate::contender::{Contender, Engine, Peer, Setting, ours, theirs};
use crate::driver_protocol::RoundPlan;
use crate::exact_inputs::parse_dtype;
use crate::interleaved_rounds::{Effort, Field, interleave};
use crate::machine::{cores, describe};
use crate::neighbours::{NeighbourOptions, Neighbours};
use crate::peer_options::PeerOptions;
use crate::plot::{self, Plot};
use crate::rank::BufferKind;
use crate::table::Table;
use machine_options::MachineOptions;
use report::{Measured, X};

/// Time of an all-reduce (sum) by size, next to its peers and to the hardware's limits.
///
/// Measurements of several numbers of ranks or dtypes are interleaved with each other, too.
#[derive(Args, Debug)]
pub(crate) struct AllReduce {
    /// Engines to measure; with --machines `auto` by default.
    #[arg(
        long,
        value_delimiter = ',',
        default_value = "shm",
        default_value_if("machines", ArgPredicate::IsPresent, "auto")
    )]
    engine: Vec<Engine>,
    /// Numbers of ranks. Ranks are processes, for the engine `threads` threads.
    #[arg(
        long,
        alias = "worlds",
        value_delimiter = ',',
        default_value = "2",
        default_value_ifs = [("oversubscribe", "true", "4,8"), ("scaling", "true", "2,4,8,16,32")]
    )]
    world: Vec<usize>,
    /// Bytes per rank; 0 for a barrier.
    #[arg(
        long,
        value_delimiter = ',',
        default_value = "4,64,1024,8192,65536,262144,1048576,4194304,16777216,26214400,67108864",
        default_value_ifs = [("oversubscribe", "true", "8192,16777216"), ("scaling", "true", "16777216")]
    )]
    sizes: Vec<usize>,
    /// Numbers of elements instead of bytes, to compare dtypes.
    #[arg(long, value_delimiter = ',', conflicts_with = "sizes")]
    elements: Vec<usize>,
    /// Types of the elements: f32, f16, bf16, f64.
    #[arg(long, alias = "dtypes", value_delimiter = ',', value_parser = parse_dtype, default_value = "f32")]
    dtype: Vec<DType>,
    /// Kinds of the ranks' buffers: their own memory, or shared memory that the group reduces without copies.
    #[arg(
        long,
        value_delimiter = ',',
        default_value = "slice",
        default_value_ifs = [("oversubscribe", "true", "slice,arena"), ("scaling", "true", "arena")]
    )]
    buffers: Vec<BufferKind>,
    /// Peers and limits to compare with; peers that are not installed are left out [default: all that apply]
    #[arg(long, value_delimiter = ',', num_args = 1..)]
    peers: Option<Vec<Peer>>,
    /// Compares with no peer and no limit.
    #[arg(long, conflicts_with = "peers")]
    alone: bool,
    /// Measures with more ranks than cores: times each all-reduce by itself, and measures the CPU time of ranks that
    /// wait for a late one. Changes the defaults to `--world 4,8 --sizes 8192,16777216 --buffers slice,arena --rounds
    /// 10 --round-ms 100`.
    #[arg(long)]
    oversubscribe: bool,
    /// Delay of rank 0, in milliseconds, while the CPU time of the ranks that wait for it is measured.
    #[arg(long, default_value_t = 200, requires = "oversubscribe")]
    late_ms: u64,
    /// Measures the CPU time per rank and byte as the world grows. Changes the defaults to `--world 2,4,8,16,32 --sizes
    /// 16777216 --buffers arena --peers gloo --rounds 5 --round-ms 200`.
    #[arg(long, conflicts_with = "oversubscribe")]
    scaling: bool,
    /// Number of rounds, in each of which every contender has a turn.
    #[arg(
        long,
        default_value = "15",
        default_value_ifs = [("oversubscribe", "true", "10"), ("scaling", "true", "5")]
    )]
    rounds: usize,
    /// Approximate duration of a turn, in milliseconds.
    #[arg(
        long,
        default_value = "50",
        default_value_ifs = [("oversubscribe", "true", "100"), ("scaling", "true", "200")]
    )]
    round_ms: f64,
    /// Draws times and bandwidths by size into this SVG file; with `--scaling` the CPU time by number of ranks.
    #[arg(long, value_name = "FILE.svg")]
    plot: Option<PathBuf>,
    #[command(flatten)]
    machines: MachineOptions,
    #[command(flatten)]
    neighbours: NeighbourOptions,
    #[command(flatten)]
    common: PeerOptions,
}

/// Largest world in which gloo takes part by default: processes of torch need much memory.
const GLOO_RANKS: usize = 8;
/// Number of all-reduces to which rank 0 comes late, and their bytes.
const LATE_STEPS: usize = 5;
const LATE_BYTES: usize = 8192;

impl AllReduce {
    pub(crate) fn run(&self) -> Result<()> {
        ensure!(
            self.rounds > 0 && self.world.iter().all(|world| *world > 0),
            "--world and --rounds must be at least 1"
        );
        plot::check(self.plot.as_deref())?;
        // With more ranks than cores, a percentile of means would hide the few slow all-reduces.
        let per_sample = (self.oversubscribe || self.scaling).then_some(1);
        let effort = Effort { rounds: self.rounds, round_ms: self.round_ms, per_sample };
        let machines = self.machines.start()?;
        let worlds = machines.as_ref().map_or(self.world.clone(), |machines| vec![machines.world()]);
        let neighbours = self.neighbours.start()?;
        // First without neighbours, then with them.
        let beside: Vec<Option<&Neighbours>> = std::iter::once(None).chain(neighbours.as_ref().map(Some)).collect();
        let settings = worlds.iter().flat_map(|world| self.dtype.iter().map(move |dtype| (*world, *dtype)));
        let settings = settings.flat_map(|setting| beside.iter().map(move |beside| (setting, *beside)));
        let gather = |((world, dtype), neighbours)| {
            let here = Setting::here(world, dtype, &self.common.programs);
            let setting = Setting { machines: machines.as_ref(), neighbours, ..here };
            Field::gather(&self.contenders(world, dtype), &setting)
        };
        let mut fields: Vec<Field> = settings.map(gather).collect::<Result<_>>()?;
        let mut all: Vec<Vec<Measured>> = Vec::new();
        let by_elements = !self.elements.is_empty();
        for &size in if by_elements { &self.elements } else { &self.sizes } {
            let bytes = |field: &Field| {
                let element = field.dtype.size_bytes();
                ensure!(by_elements || size.is_multiple_of(element), "sizes are multiples of {element} bytes");
                Ok(if by_elements { size * element } else { size })
            };
            let bytes: Vec<usize> = fields.iter().map(bytes).collect::<Result<_>>()?;
            let timings = interleave(&mut fields, &bytes, &effort)?;
            let measured = fields.iter().zip(bytes).zip(timings).map(|((field, bytes), timings)| Measured {
                world: field.world,
                dtype: field.dtype,
                neighbours: field.neighbours.map_or(0, Neighbours::count),
                bytes,
                timings,
            });
            let of_size: Vec<Measured> = measured.collect();
            if self.common.json {
                of_size.iter().flat_map(|one| one.rows(&of_size)).for_each(|row| println!("{row}"));
            }
            all.push(of_size);
        }
        if !self.common.json {
            let (rounds, on) = (self.rounds, describe());
            println!("all-reduce (sum){}, medians of {rounds} interleaved rounds, on {on}\n", self.machines);
            print!("{}", report::table(&all));
        }
        if self.oversubscribe {
            self.show_waiting(&mut fields)?;
        }
        let Some(path) = &self.plot else { return Ok(()) };
        if self.scaling {
            let lines = report::lines(&all, X::Ranks, Measured::cpu_ns_per_byte);
            return Plot::new("CPU time as the world grows")
                .panel("ranks", "CPU ns per rank and byte", lines)
                .write(path);
        }
        let by_bytes = |value| report::lines(&all, X::Bytes, value);
        Plot::new(&format!("all-reduce{}", self.machines))
            .panel("bytes per rank", "time, µs", by_bytes(|_, timing| timing.median_us()))
            .panel("bytes per rank", "bandwidth, GB/s", by_bytes(Measured::bandwidth))
            .write(path)
    }

    fn contenders(&self, world: usize, dtype: DType) -> Vec<Contender> {
        let all = [Peer::Gloo, Peer::Mpich, Peer::Openmpi, Peer::Memcpy, Peer::Cacheline, Peer::Pump, Peer::Floor];
        let peers = match &self.peers {
            _ if self.alone => Vec::new(),
            Some(peers) => peers.clone(),
            None => all.into_iter().filter(|peer| self.is_interesting(*peer, world, dtype)).collect(),
        };
        [ours(&self.engine, &self.buffers), theirs(&peers, &self.buffers)].concat()
    }

    fn is_interesting(&self, peer: Peer, world: usize, dtype: DType) -> bool {
        match peer {
            Peer::Gloo => world <= GLOO_RANKS || self.machines.any(),
            _ if self.scaling => false,
            Peer::Openmpi => matches!(dtype, DType::F32 | DType::F64),
            _ if self.machines.any() => false,
            Peer::Mpich => matches!(dtype, DType::F32 | DType::F64),
            Peer::Floor => (self.oversubscribe || world > cores()) && dtype == DType::F32,
            _ if self.oversubscribe => false,
            Peer::Pump => world == 2 && self.engine.contains(&Engine::Tcp),
            Peer::Memcpy | Peer::Cacheline => true,
        }
    }

    /// Prints the share of a core that ranks use while they wait for rank 0, which comes late.
    fn show_waiting(&self, fields: &mut [Field]) -> Result<()> {
        let mut table = Table::new(["ranks", "contender", "CPU of a rank that waits"]);
        for field in fields {
            for contender in self.contenders(field.world, field.dtype) {
                let Some(percent) = self.waiting(field, contender)? else { continue };
                if self.common.json {
                    let row = json!({"bench": "oversubscribe-wait", "who": contender.to_string(), "world": field.world,
                        "late_ms": self.late_ms, "waiting_cpu_percent": percent});
                    println!("{row}");
                }
                table.add(vec![field.world.to_string(), contender.to_string(), format!("{percent:.2} %")]);
            }
        }
        if !self.common.json {
            println!("\nrank 0 is {} ms late:\n\n{table}", self.late_ms);
        }
        Ok(())
    }

    fn waiting(&self, field: &mut Field, contender: Contender) -> Result<Option<f64>> {
        let Some(team) = field.team(contender).filter(|_| !contender.is_limit()) else { return Ok(None) };
        team.prepare(LATE_BYTES, 4)?;
        let late = Duration::from_millis(self.late_ms);
        let plan = RoundPlan { seed: 0, samples: LATE_STEPS, per_sample: 1, warmup: 1, late: Some((0, late)) };
        let round = team.round(&plan)?;
        let waiting = &round.cpu_ns[1..];
        let mean = waiting.iter().sum::<f64>() / waiting.len() as f64;
        Ok(Some(100.0 * mean / (LATE_STEPS as f64 * late.as_nanos() as f64)))
    }
}
