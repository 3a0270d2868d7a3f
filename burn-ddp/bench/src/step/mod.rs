//! `step`: training steps with and without data parallelism, by model, size, number of tensors and of ranks.

mod memory;
mod overlap;
mod step_report;

use std::path::PathBuf;

use anyhow::{Result, ensure};
use burn_ddp_comm::DType;
use clap::Args;
use clap::builder::ArgPredicate::IsPresent;

use crate::contender::{Contender, Engine, Framework, Model, Setting, Side, Trainer, describe_allocator};
use crate::interleaved_rounds::{Effort, Field};
use crate::machine::describe;
use crate::peer_options::PeerOptions;
use crate::plot::{self, Plot};
use overlap::LinkOptions;
use step_report::{Point, pairs};

/// Time that data parallelism adds to a training step with one thread per rank. A step is forward and backward, for
/// `cnn` and `gpt` with Adam.
///
/// A wrapped step is compared with the step of ranks that reduce nothing and meet at a bare barrier; on one rank, `cnn`
/// is compared with the plain step. Torch's DDP is compared in the same way with torch.
#[derive(Args, Debug)]
pub(crate) struct Step {
    /// Model to train [default: cnn; with --memory tensors, with --link mlp].
    #[arg(
        long,
        default_value = "cnn",
        default_value_ifs = [("memory", "true".into(), "tensors"), ("link", IsPresent, "mlp")],
        hide_default_value = true
    )]
    model: Model,
    /// Engines that `Ddp::wrap` uses.
    #[arg(long, value_delimiter = ',', default_value = "shm")]
    engine: Vec<Engine>,
    /// Numbers of ranks [default: 1,2 for cnn, otherwise 2].
    #[arg(
        long,
        alias = "worlds",
        value_delimiter = ',',
        default_value = "2",
        default_value_if("model", "cnn", "1,2"),
        hide_default_value = true
    )]
    world: Vec<usize>,
    /// Bytes of all parameters; ignored for `cnn` [default: 16 MiB; with --memory 64 MiB to 1 GiB, with --link 8 MiB].
    #[arg(
        long,
        value_delimiter = ',',
        default_value = "16777216",
        default_value_ifs = [
            ("memory", "true".into(), "67108864,134217728,268435456,536870912,1073741824"),
            ("link", IsPresent, "8388608"),
        ],
        hide_default_value = true
    )]
    bytes: Vec<usize>,
    /// For the model `tensors` numbers of tensors, for `mlp` and `gpt` numbers of items in a batch [default: 10 to
    /// 10,000; with --memory 64, with --bucket-bytes and for mlp 256, for gpt 16].
    #[arg(
        long,
        value_delimiter = ',',
        default_value = "10,100,1000,10000",
        default_value_ifs = [
            ("memory", "true".into(), "64"),
            ("bucket_bytes", IsPresent, "256"),
            ("model", "mlp".into(), "256"),
            ("model", "gpt".into(), "16"),
            ("model", "gpt-checkpointing".into(), "16"),
            ("model", "cnn".into(), "1"),
        ],
        hide_default_value = true
    )]
    counts: Vec<usize>,
    /// Bucket sizes to measure in addition to the reducer's default, in bytes; the first bucket of a step keeps its
    /// default size.
    #[arg(long, value_delimiter = ',')]
    bucket_bytes: Vec<usize>,
    /// Also measures memory and page faults while the gradients of a step exist: the difference between ranks with and
    /// without data parallelism. RSS counts shared pages in each rank, PSS divides them among the ranks.
    #[arg(long)]
    memory: bool,
    /// Leaves glibc's allocator at its defaults, as --memory and --link do. Otherwise it keeps freed memory, as in
    /// ranks of `burnrun`.
    #[arg(long)]
    glibc_defaults: bool,
    #[command(flatten)]
    overlap: LinkOptions,
    /// Leaves torch out.
    #[arg(long)]
    alone: bool,
    /// Number of rounds, in each of which every contender has a turn.
    #[arg(long, default_value = "10", default_value_if("link", IsPresent, "6"))]
    rounds: usize,
    /// Approximate duration of a turn, in milliseconds.
    #[arg(long, default_value = "400", default_value_if("link", IsPresent, "500"))]
    round_ms: f64,
    /// Draws the time that data parallelism adds, by number of tensors, into this SVG file.
    #[arg(long, value_name = "FILE.svg")]
    plot: Option<PathBuf>,
    #[command(flatten)]
    common: PeerOptions,
}

impl Step {
    pub(crate) fn run(&self) -> Result<()> {
        ensure!(
            !self.engine.is_empty() && !self.counts.contains(&0),
            "--engine must name one, and --counts must be at least 1"
        );
        plot::check(self.plot.as_deref())?;
        if !self.overlap.link.is_empty() {
            return self.run_overlap();
        }
        let mut points: Vec<Point> = Vec::new();
        for &world in &self.world {
            let setting = Setting::here(world, DType::F32, &self.common.programs);
            let mut field = Field::gather(&self.contenders(world), &setting)?;
            for &bytes in if self.model == Model::Cnn { &[0][..] } else { &self.bytes } {
                for &count in &self.counts {
                    let timings = field.measure_of(bytes, count, &self.effort())?;
                    for pair in pairs(&timings) {
                        let mut point = Point::new(&pair, (world, bytes, count));
                        if self.memory {
                            point.memory = Some(memory::extra(&mut field, &pair, (bytes, count))?);
                        }
                        points.push(point);
                    }
                }
            }
        }
        if self.common.json {
            points.iter().for_each(|point| println!("{}", point.row(self.model, &points)));
        } else {
            let table = step_report::table(self.model, &points);
            let allocator = describe_allocator(self.keeps_memory());
            println!("a step of {}, {} rounds, on {}, {allocator}\n\n{table}", self.model, self.rounds, describe());
        }
        let Some(path) = &self.plot else { return Ok(()) };
        let lines = step_report::lines(&points);
        Plot::new("what data parallelism adds to a step").panel("tensors", "added, ms", lines).write(path)
    }

    fn keeps_memory(&self) -> bool {
        !self.glibc_defaults && !self.memory
    }

    fn effort(&self) -> Effort {
        Effort { rounds: self.rounds, round_ms: self.round_ms, per_sample: Some(1) }
    }

    /// Contenders to compare: for each framework a step without data parallelism and a wrapped one; for Burn a wrapped
    /// one for each engine and bucket size.
    fn contenders(&self, world: usize) -> Vec<Contender> {
        let keeps_memory = self.keeps_memory();
        let trainer = |framework, side, bucket_bytes| {
            Contender::Training(Trainer { framework, model: self.model, side, bucket_bytes, keeps_memory })
        };
        let base = if world == 1 && self.model == Model::Cnn { Side::Plain } else { Side::Barrier };
        let ours = Framework::Burn(self.engine[0]);
        let mut all = vec![trainer(ours, base, None)];
        if self.model == Model::Tensors && !self.memory && self.bucket_bytes.is_empty() {
            all.push(trainer(ours, Side::Nodes, None));
        }
        for engine in &self.engine {
            let sizes = [None].into_iter().chain(self.bucket_bytes.iter().copied().map(Some));
            all.extend(sizes.map(|size| trainer(Framework::Burn(*engine), Side::Wrapped, size)));
        }
        let shards = matches!(self.model, Model::Gpt | Model::GptCheckpointing);
        if shards {
            all.push(trainer(ours, Side::Sharded, None));
        }
        if !self.alone && self.model != Model::GptCheckpointing {
            all.extend([base, Side::Wrapped].map(|side| trainer(Framework::Torch, side, None)));
            all.extend(shards.then(|| trainer(Framework::Torch, Side::Sharded, None)));
        }
        all
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct Cli {
        #[command(flatten)]
        step: Step,
    }

    fn parse(line: &str) -> Step {
        Cli::parse_from(std::iter::once("step").chain(line.split_whitespace())).step
    }

    #[test]
    fn each_engine_has_its_own_size_and_all_others() {
        let step = parse("--model tensors --engine shm,tcp --bucket-bytes 1024,2097152 --alone");
        let names: Vec<String> = step.contenders(2).iter().map(Contender::to_string).collect();
        let expected = [
            "burn + barrier",
            "burn-ddp/shm",
            "burn-ddp/shm (1 KiB)",
            "burn-ddp/shm (2 MiB)",
            "burn-ddp/tcp",
            "burn-ddp/tcp (1 KiB)",
            "burn-ddp/tcp (2 MiB)",
        ];
        assert_eq!(names, expected);
    }

    #[test]
    fn defaults_follow_what_is_measured() {
        let defaults = |line| {
            let Step { model, world, bytes, counts, .. } = parse(line);
            (model, world, bytes.len(), counts)
        };
        assert_eq!(defaults(""), (Model::Cnn, vec![1, 2], 1, vec![1]));
        assert_eq!(defaults("--model tensors"), (Model::Tensors, vec![2], 1, vec![10, 100, 1000, 10_000]));
        assert_eq!(defaults("--memory"), (Model::Tensors, vec![2], 5, vec![64]));
        assert_eq!(defaults("--model tensors --bucket-bytes 1024"), (Model::Tensors, vec![2], 1, vec![256]));
        let step = parse("--link 1,2");
        assert_eq!((step.model, step.bytes), (Model::Mlp, vec![8 << 20]));
    }
}
