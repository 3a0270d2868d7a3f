//! `all-reduce`: latency and bandwidth by size.

use std::path::PathBuf;

use anyhow::{Result, ensure};
use burn_ddp_comm::DType;
use clap::Args;

use crate::comparison::{Effort, Field};
use crate::contender::{Contender, Engine, Peer, Programs, Setting, ours, theirs};
use crate::machine::{cores, describe};
use crate::options::Turns;
use crate::plot::Plot;
use crate::rank::BufferKind;
use crate::report::{self, Measured};
use crate::values;

/// Time of an all-reduce (sum) by size, next to its peers and to the hardware's limits.
#[derive(Args, Debug)]
pub(crate) struct AllReduce {
    /// Engines to measure.
    #[arg(long, value_delimiter = ',', default_value = "shm")]
    engine: Vec<Engine>,
    /// Ranks; they are processes (`threads`: threads).
    #[arg(long, default_value_t = 2)]
    world: usize,
    /// Bytes per rank.
    #[arg(
        long,
        value_delimiter = ',',
        default_value = "4,64,1024,8192,65536,262144,1048576,4194304,16777216,26214400,67108864"
    )]
    sizes: Vec<usize>,
    /// f32, f16, bf16 or f64.
    #[arg(long, value_parser = values::parse_dtype, default_value = "f32")]
    dtype: DType,
    /// Where the ranks' buffers are: in memory of their own, or in memory that the group reduces without copies.
    #[arg(long, value_delimiter = ',', default_value = "slice")]
    buffers: Vec<BufferKind>,
    /// Whom to compare with [default: all; those that are not installed are left out];
    #[arg(long, value_delimiter = ',', num_args = 1..)]
    peers: Option<Vec<Peer>>,
    /// Compares with nobody.
    #[arg(long, conflicts_with = "peers")]
    alone: bool,
    #[command(flatten)]
    turns: Turns,
    /// Prints one JSON object a line and size, instead of a table.
    #[arg(long)]
    json: bool,
    /// Draws times and bandwidths by size into this SVG file.
    #[arg(long, value_name = "FILE.svg")]
    plot: Option<PathBuf>,
    #[command(flatten)]
    programs: Programs,
}

impl AllReduce {
    pub(crate) fn run(&self) -> Result<()> {
        ensure!(self.world > 0 && self.turns.rounds > 0, "at least one rank and one round");
        let element = self.dtype.size_bytes();
        ensure!(self.sizes.iter().all(|size| size.is_multiple_of(element)), "sizes are multiples of {element} bytes");
        let effort = Effort { rounds: self.turns.rounds, round_ms: self.turns.round_ms, per_sample: None };
        let setting = Setting::here(self.world, self.dtype, &self.programs);
        let mut field = Field::gather(&self.contenders(), &setting)?;
        let mut all: Vec<Measured> = Vec::new();
        for &bytes in &self.sizes {
            let timings = field.measure(bytes, &effort)?;
            let measured = Measured { world: self.world, dtype: self.dtype, bytes, timings };
            if self.json {
                measured.rows("all-reduce").iter().for_each(|row| println!("{row}"));
            }
            all.push(measured);
        }
        if !self.json {
            println!(
                "all-reduce (sum) of {}, medians of {} interleaved rounds, on {}\n",
                self.dtype,
                self.turns.rounds,
                describe()
            );
            print!("{}", report::table(&all));
        }
        if let Some(path) = &self.plot {
            let title = format!("all-reduce, {} ranks, {}", self.world, self.dtype);
            Plot::new(&title)
                .panel("bytes per rank", "time, µs", report::lines(&all, |_, timing| timing.median_us()))
                .panel("bytes per rank", "bandwidth, GB/s", report::lines(&all, Measured::bandwidth))
                .write(path)?;
        }
        Ok(())
    }

    fn contenders(&self) -> Vec<Contender> {
        let all = [Peer::Gloo, Peer::Mpich, Peer::Openmpi, Peer::Memcpy, Peer::Cacheline, Peer::Pump, Peer::Floor];
        let peers = match &self.peers {
            _ if self.alone => Vec::new(),
            Some(peers) => peers.clone(),
            None => all.into_iter().filter(|peer| self.is_interesting(*peer)).collect(),
        };
        [ours(&self.engine, &self.buffers), theirs(&peers, &self.buffers)].concat()
    }

    fn is_interesting(&self, peer: Peer) -> bool {
        match peer {
            Peer::Mpich | Peer::Openmpi => matches!(self.dtype, DType::F32 | DType::F64),
            Peer::Pump => self.world == 2 && self.engine.contains(&Engine::Tcp),
            Peer::Floor => self.world > cores() && self.dtype == DType::F32,
            _ => true,
        }
    }
}
