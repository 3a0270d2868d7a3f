//! `buckets`: a training step by the size of the reducer's buckets.

use anyhow::{Context, Result, ensure};
use burn_ddp_comm::DType;
use clap::Args;
use serde_json::json;

use crate::comparison::{Field, Timing};
use crate::contender::{Contender, Engine, Framework, Model, Setting, Side, Trainer};
use crate::machine::describe;
use crate::options::Steps;
use crate::table::{Table, bytes, ratio, time_us};

/// A wrapped training step by the size of the reducer's buckets and by engine, all interleaved, against the size that the reducer has by
/// itself; and against the same step unwrapped whose ranks meet at a bare barrier. On a link of limited speed: `overlap --bucket-bytes`.
#[derive(Args, Debug)]
pub(crate) struct Buckets {
    /// Engines to measure.
    #[arg(long, value_delimiter = ',', default_value = "shm,tcp")]
    engine: Vec<Engine>,
    /// Ranks.
    #[arg(long, default_value_t = 2)]
    world: usize,
    /// What buckets hold at most, in bytes; the first of a step keeps its own size.
    #[arg(long, value_delimiter = ',', default_value = "65536,262144,4194304,16777216")]
    bucket_bytes: Vec<usize>,
    /// What is trained.
    #[arg(long, default_value = "tensors")]
    model: Model,
    /// Bytes of all parameters; the cnn has its own.
    #[arg(long, default_value_t = 16 << 20)]
    bytes: usize,
    /// Tensors of `tensors`, or items in a batch of `mlp`.
    #[arg(long, default_value_t = 256)]
    count: usize,
    #[command(flatten)]
    steps: Steps,
}

impl Buckets {
    pub(crate) fn run(&self) -> Result<()> {
        ensure!(!self.engine.is_empty() && self.count > 0, "at least one engine, and one tensor or item");
        let setting = Setting::here(self.world, DType::F32, &self.steps.programs);
        let mut field = Field::gather(&self.contenders(), &setting)?;
        let timings = field.measure_of(self.bytes, self.count, &self.steps.effort())?;
        self.show(&timings)
    }

    /// One that reduces nothing; and per engine one with the reducer's own buckets, then one for each size.
    fn contenders(&self) -> Vec<Contender> {
        let trainer = |engine: Engine, side, bucket_bytes| {
            let framework = Framework::Burn(engine);
            // Few large tensors would be page faults and nothing else.
            Contender::Training(Trainer { framework, model: self.model, side, bucket_bytes, keeps_memory: true })
        };
        let sizes = || [None].into_iter().chain(self.bucket_bytes.iter().copied().map(Some));
        let wrapped = self.engine.iter().flat_map(|engine| sizes().map(|size| trainer(*engine, Side::Wrapped, size)));
        [trainer(self.engine[0], Side::Barrier, None)].into_iter().chain(wrapped).collect()
    }

    fn show(&self, timings: &[Timing]) -> Result<()> {
        let trainers = || {
            timings.iter().filter_map(|timing| match timing.who {
                Contender::Training(trainer) => Some((trainer, timing)),
                _ => None,
            })
        };
        let (_, base) = trainers().find(|(one, _)| one.side == Side::Barrier).context("nothing was measured")?;
        let model = format!("{:?}", self.model).to_lowercase();
        let mut table = Table::new(["who", "step", "best round", "p95", "added", "of the reducer's own"]);
        for (one, step) in trainers().filter(|(one, _)| one.side == Side::Wrapped) {
            let Framework::Burn(engine) = one.framework else { continue };
            let own = trainers().find(|(other, _)| *other == Trainer { bucket_bytes: None, ..one });
            let of_own = own.map_or(f64::NAN, |(_, own)| step.times_longer_than(own));
            let added_us = step.longer_than_us(base);
            if self.steps.json {
                let row = json!({"bench": "buckets", "who": one.to_string(), "engine": engine.to_string(), "world": self.world,
                    "dtype": "f32", "model": model, "bytes": self.bytes, "count": self.count,
                    "bucket_bytes": one.bucket_bytes, "median_us": step.median_us(), "p95_us": step.percentile_us(0.95),
                    "best_us": step.best_us(), "base_us": base.median_us(), "added_us": added_us, "of_own": of_own});
                println!("{row}");
            }
            table.add(vec![
                one.to_string(),
                time_us(step.median_us()),
                time_us(step.best_us()),
                time_us(step.percentile_us(0.95)),
                time_us(added_us),
                ratio(of_own),
            ]);
        }
        if !self.steps.json {
            let (what, rounds) = (bytes(self.bytes), self.steps.rounds);
            println!(
                "{model} of {what} and {}, {} ranks, {rounds} rounds, without reducing {}, on {}\n\n{table}",
                self.count,
                self.world,
                time_us(base.median_us()),
                describe()
            );
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct Cli {
        #[command(flatten)]
        buckets: Buckets,
    }

    #[test]
    fn each_engine_has_its_own_size_and_all_others() {
        let cli = Cli::parse_from(["buckets", "--engine", "shm,tcp", "--bucket-bytes", "1024,2097152"]);
        let names: Vec<String> = cli.buckets.contenders().iter().map(Contender::to_string).collect();
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
}
