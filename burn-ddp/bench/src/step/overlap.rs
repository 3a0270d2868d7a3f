//! `overlap`: how much of the communication is hidden behind the backward pass, on a link of known speed.

use anyhow::{Context, Result, ensure};
use burn_ddp_comm::DType;
use clap::Args;
use serde_json::json;

use crate::comparison::{Effort, Field, Timing};
use crate::contender::{Contender, Engine, Framework, Model, Programs, Setting, Side, Trainer};
use crate::link::Link;
use crate::machine::describe;
use crate::rank::BufferKind;
use crate::table::{Table, time_us};

/// How much of the communication is hidden behind backward: two ranks over tcp on a link of limited speed between two network namespaces
/// (needs root, ip and tc), a stack of linear layers whose batch makes backward as long as the communication, half of it, or twice.
/// Torch DDP likewise, at several bucket sizes.
///
/// Ideal is the plain step plus what of the communication (an all-reduce of the same bytes by itself) is longer than backward, which is
/// taken as two thirds of the plain step.
#[derive(Args, Debug)]
pub(crate) struct Overlap {
    /// Speeds of the link in Gbit/s.
    #[arg(long, value_delimiter = ',', default_value = "1,2")]
    gbit: Vec<f64>,
    /// Communication as a multiple of backward.
    #[arg(long, value_delimiter = ',', default_value = "0.5,1,2")]
    ratios: Vec<f64>,
    /// Bytes of all gradients, in layers of 1 MiB.
    #[arg(long, default_value_t = 8 << 20)]
    bytes: usize,
    /// Bucket sizes of ours to try, in bytes [default: the reducer's own].
    #[arg(long, value_delimiter = ',')]
    bucket_bytes: Vec<usize>,
    /// Bucket sizes of torch DDP to try, in MiB.
    #[arg(long, value_delimiter = ',', default_value = "1,4,25")]
    torch_buckets: Vec<usize>,
    /// Leaves torch out.
    #[arg(long)]
    alone: bool,
    /// How often everybody has a turn.
    #[arg(long, default_value_t = 6)]
    rounds: usize,
    /// About how long a turn takes, in milliseconds.
    #[arg(long, default_value_t = 500.0)]
    round_ms: f64,
    /// Prints JSON objects, one a line, instead of a table.
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    programs: Programs,
}

/// Share of a plain step that is backward: two matrix products of three.
const BACKWARD: f64 = 2.0 / 3.0;
/// Batches from whose times the others are predicted.
const TRIED: [usize; 2] = [32, 128];

/// The all-reduce by itself.
const ALONE: Contender = Contender::Ours(Engine::Tcp, BufferKind::Slice);

impl Overlap {
    pub(crate) fn run(&self) -> Result<()> {
        let header = ["Gbit/s", "comm / backward", "who", "plain", "comm", "step", "of ideal", "hidden", "exposed"];
        let mut table = Table::new(header);
        for &gbit in &self.gbit {
            ensure!(gbit > 0.0, "a link has a speed");
            let link = Link::new(gbit)?;
            for framework in [Framework::Burn(Engine::Tcp), Framework::Torch] {
                if framework == Framework::Torch && self.alone {
                    continue;
                }
                let setting = Setting { world: 2, dtype: DType::F32, programs: &self.programs, link: Some(&link) };
                let mut field = Field::gather(&self.contenders(framework), &setting)?;
                let effort = Effort { rounds: self.rounds, round_ms: self.round_ms, per_sample: Some(1) };
                let comm_us = self.communication(&mut field, &effort)?;
                let Some(batch) = self.batches(&mut field)? else { continue };
                for &ratio in &self.ratios {
                    let items = batch(comm_us / ratio / BACKWARD);
                    let timings = field.measure_of(self.bytes, items, &effort)?;
                    self.show(&mut table, (gbit, ratio, comm_us), &timings);
                }
            }
        }
        if !self.json {
            println!(
                "{} MiB of gradients over tcp, {} rounds, on {}\n\n{table}",
                self.bytes >> 20,
                self.rounds,
                describe()
            );
        }
        Ok(())
    }

    fn contenders(&self, framework: Framework) -> Vec<Contender> {
        let trainer = |side, bucket_bytes| {
            Contender::Training(Trainer { framework, model: Model::Mlp, side, bucket_bytes, keeps_memory: false })
        };
        let buckets = match framework {
            Framework::Burn(_) if self.bucket_bytes.is_empty() => vec![None],
            Framework::Burn(_) => self.bucket_bytes.iter().copied().map(Some).collect(),
            Framework::Torch => self.torch_buckets.iter().map(|mib| Some(mib << 20)).collect(),
        };
        let wrapped = buckets.into_iter().map(|bucket| trainer(Side::Wrapped, bucket));
        [ALONE, trainer(Side::Plain, None)].into_iter().chain(wrapped).collect()
    }

    /// Microseconds of an all-reduce of all gradients by itself. It takes no part in what follows.
    fn communication(&self, field: &mut Field, effort: &Effort) -> Result<f64> {
        let alone = Effort { rounds: 3, ..*effort };
        let timings = field.measure_only(ALONE, self.bytes, 4, &alone)?;
        field.dismiss(ALONE);
        Ok(timings.context("nothing was measured")?.median_us())
    }

    /// How many items make a plain step as long as asked, in microseconds; `None` if nobody trains.
    fn batches(&self, field: &mut Field) -> Result<Option<impl Fn(f64) -> usize + use<>>> {
        let quick = Effort { rounds: 3, round_ms: 100.0, per_sample: Some(1) };
        let mut plain = Vec::new();
        for items in TRIED {
            let timings = field.measure_of(self.bytes, items, &quick)?;
            let is_plain = |timing: &&Timing| matches!(timing.who, Contender::Training(one) if one.side == Side::Plain);
            plain.extend(timings.iter().find(is_plain).map(Timing::median_us));
        }
        let [few, many] = plain[..] else { return Ok(None) };
        let per_item = ((many - few) / (TRIED[1] - TRIED[0]) as f64).max(1.0);
        let fixed = few - per_item * TRIED[0] as f64;
        Ok(Some(move |us: f64| ((us - fixed) / per_item).clamp(1.0, 4096.0) as usize))
    }

    fn show(&self, table: &mut Table, (gbit, ratio, comm_us): (f64, f64, f64), timings: &[Timing]) {
        let side = |timing: &Timing| match timing.who {
            Contender::Training(trainer) => Some(trainer.side),
            _ => None,
        };
        let Some(plain) = timings.iter().find(|timing| side(timing) == Some(Side::Plain)) else { return };
        for step in timings.iter().filter(|timing| side(timing) == Some(Side::Wrapped)) {
            let (plain_us, exposed_us) = (plain.median_us(), step.longer_than_us(plain));
            let hideable = comm_us.min(plain_us * BACKWARD);
            let hidden = (comm_us - exposed_us) / hideable;
            let of_ideal = step.median_us() / (plain_us + comm_us - hideable);
            if self.json {
                let row = json!({"bench": "overlap", "who": step.who.to_string(), "world": 2, "dtype": "f32", "bytes": self.bytes,
                    "gbit": gbit, "ratio": ratio, "plain_us": plain_us, "communication_us": comm_us,
                    "median_us": step.median_us(), "p95_us": step.percentile_us(0.95), "of_ideal": of_ideal,
                    "hidden": hidden, "exposed_us": exposed_us});
                println!("{row}");
            }
            table.add(vec![
                gbit.to_string(),
                ratio.to_string(),
                step.who.to_string(),
                time_us(plain_us),
                time_us(comm_us),
                time_us(step.median_us()),
                format!("{of_ideal:.2}"),
                format!("{:.0} %", 100.0 * hidden),
                time_us(exposed_us),
            ]);
        }
    }
}
