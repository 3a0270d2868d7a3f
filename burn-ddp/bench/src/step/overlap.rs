//! `step --link`: the share of the communication that is hidden behind the backward pass, on a link of known speed.

use anyhow::{Result, ensure};
use burn_ddp_comm::DType;
use clap::Args;
use serde_json::json;

use super::Step;
use crate::contender::{Contender, Engine, Framework, Model, Peer, Setting, Side, Trainer, mlp_layers};
use crate::interleaved_rounds::{Effort, Field, Timing};
use crate::machine::describe;
use crate::rank::BufferKind;
use crate::simulated_machines::{Cable, Machines};
use crate::stats;
use crate::table::{Table, time_us};

/// Options of the measurement on a link of limited speed.
#[derive(Args, Debug)]
pub(super) struct LinkOptions {
    /// Measures instead the part of the communication that is hidden behind backward, between two machines: network
    /// namespaces on a link with these speeds, in Gbit/s (needs root, ip and tc).
    ///
    /// The model is a stack of linear layers; the batch size sets the ratio of communication to backward (--ratios).
    /// The communication is timed as an all-reduce of the same bytes by itself (for torch by gloo), backward counts as
    /// two thirds of the plain step. The ideal step is the plain step plus the communication that cannot be hidden: the
    /// part that is longer than backward, but at least the share of the layer whose gradient comes last.
    #[arg(long, value_delimiter = ',', value_name = "GBIT")]
    pub(super) link: Vec<f64>,
    /// Ranks on each of the two machines.
    #[arg(long, default_value_t = 1, requires = "link")]
    link_ranks: usize,
    /// Durations of the communication as multiples of backward's.
    #[arg(long, value_delimiter = ',', default_value = "0.5,1,2", requires = "link")]
    ratios: Vec<f64>,
    /// Bucket sizes of torch DDP to try on the link, in MiB.
    #[arg(long, value_delimiter = ',', default_value = "1,4,25", requires = "link")]
    torch_buckets: Vec<usize>,
}

/// Share of a plain step that is backward: two matrix products of three.
const BACKWARD: f64 = 2.0 / 3.0;
/// Batch sizes that are measured to predict the times of other batch sizes.
const TRIED: [usize; 2] = [32, 128];

/// The contender that times a framework's communication by itself: gloo for torch, the default engine for Burn.
const fn alone(framework: Framework) -> Contender {
    match framework {
        Framework::Burn(_) => Contender::Ours(Engine::Auto, BufferKind::Slice),
        Framework::Torch => Contender::Theirs(Peer::Gloo),
    }
}

impl Step {
    pub(super) fn run_overlap(&self) -> Result<()> {
        ensure!(self.model == Model::Mlp, "--link measures the model mlp");
        let header = [
            "Gbit/s",
            "comm / backward",
            "contender",
            "plain",
            "comm",
            "step",
            "of ideal",
            "worst round",
            "hidden",
            "exposed",
            "sent by wrap ÷ gradients",
        ];
        let mut table = Table::new(header);
        for &gbit in &self.overlap.link {
            ensure!(gbit > 0.0, "--link must be above 0");
            let ranks = self.overlap.link_ranks;
            ensure!(ranks > 0, "--link-ranks must be at least 1");
            let machines = Machines::new([vec![0; ranks], vec![1; ranks]].concat(), Cable { gbit, flow_mbit: 0.0 })?;
            for framework in [Framework::Burn(Engine::Auto), Framework::Torch] {
                if framework == Framework::Torch && self.alone {
                    continue;
                }
                let programs = &self.common.programs;
                let setting = Setting { machines: Some(&machines), ..Setting::here(2 * ranks, DType::F32, programs) };
                let mut field = Field::gather(&self.overlapping(framework), &setting)?;
                let alone = alone(framework);
                let communication = self.bytes.iter().map(|bytes| self.communication(&mut field, alone, *bytes));
                // Gloo may be missing.
                let Some(communication) = communication.collect::<Result<Option<Vec<f64>>>>()? else { continue };
                // The all-reduce takes no part in the rounds that follow.
                field.dismiss(alone);
                for (&bytes, comm_us) in self.bytes.iter().zip(communication) {
                    let Some(batch) = batches(&mut field, bytes)? else { continue };
                    for &ratio in &self.overlap.ratios {
                        let timings = field.measure_of(bytes, batch(comm_us / ratio / BACKWARD), &self.effort())?;
                        self.show(&mut table, (gbit, ratio, comm_us, bytes), &timings);
                    }
                }
            }
        }
        if !self.common.json {
            let (ranks, rounds) = (self.overlap.link_ranks, self.rounds);
            println!("gradients of {ranks} + {ranks} ranks on a link, {rounds} rounds, on {}\n\n{table}", describe());
        }
        Ok(())
    }

    fn overlapping(&self, framework: Framework) -> Vec<Contender> {
        let trainer = |side, bucket_bytes| {
            Contender::Training(Trainer { framework, model: Model::Mlp, side, bucket_bytes, keeps_memory: false })
        };
        let buckets = match framework {
            Framework::Burn(_) if self.bucket_bytes.is_empty() => vec![None],
            Framework::Burn(_) => self.bucket_bytes.iter().copied().map(Some).collect(),
            Framework::Torch => self.overlap.torch_buckets.iter().map(|mib| Some(mib << 20)).collect(),
        };
        let wrapped = buckets.into_iter().map(|bucket| trainer(Side::Wrapped, bucket));
        [alone(framework), trainer(Side::Plain, None)].into_iter().chain(wrapped).collect()
    }

    /// Microseconds of an all-reduce of all gradients by itself; `None` if `alone` was left out.
    fn communication(&self, field: &mut Field, alone: Contender, bytes: usize) -> Result<Option<f64>> {
        let timing = field.measure_only(alone, bytes, 4, &Effort { rounds: 3, ..self.effort() })?;
        Ok(timing.map(|timing| timing.median_us()))
    }

    fn show(&self, table: &mut Table, (gbit, ratio, comm_us, bytes): (f64, f64, f64, usize), timings: &[Timing]) {
        let side = |timing: &Timing| timing.trainer().map(|trainer| trainer.side);
        let Some(plain) = timings.iter().find(|timing| side(timing) == Some(Side::Plain)) else { return };
        for step in timings.iter().filter(|timing| side(timing) == Some(Side::Wrapped)) {
            let (plain_us, exposed_us) = (plain.median_us(), step.longer_than_us(plain));
            let before_last = comm_us * (1.0 - 1.0 / mlp_layers(bytes) as f64);
            let hideable = |plain_us: f64| before_last.min(plain_us * BACKWARD);
            let of_ideal = |step_us: f64, plain_us: f64| step_us / (plain_us + comm_us - hideable(plain_us));
            let rounds = step.medians.iter().zip(&plain.medians).map(|(step, plain)| of_ideal(step / 1e3, plain / 1e3));
            let rounds: Vec<f64> = rounds.collect();
            let (of_ideal, worst_of_ideal) = (stats::median(&rounds), rounds.iter().copied().fold(0.0, f64::max));
            let hidden = (comm_us - exposed_us) / hideable(plain_us);
            let wrap_sent = step.sent_before;
            if self.common.json {
                let row = json!({"bench": "overlap", "who": step.contender.to_string(),
                    "world": 2 * self.overlap.link_ranks, "dtype": "f32",
                    "bytes": bytes, "gbit": gbit, "ratio": ratio, "plain_us": plain_us, "communication_us": comm_us,
                    "median_us": step.median_us(), "p95_us": step.percentile_us(0.95), "of_ideal": of_ideal,
                    "worst_of_ideal": worst_of_ideal, "hidden": hidden, "exposed_us": exposed_us,
                    "wrap_bytes_sent": wrap_sent});
                println!("{row}");
            }
            table.add(vec![
                gbit.to_string(),
                ratio.to_string(),
                step.contender.to_string(),
                time_us(plain_us),
                time_us(comm_us),
                time_us(step.median_us()),
                format!("{of_ideal:.2}"),
                format!("{worst_of_ideal:.2}"),
                format!("{:.0} %", 100.0 * hidden),
                time_us(exposed_us),
                wrap_sent.map_or(String::new(), |sent| format!("{:.2}", sent / bytes as f64)),
            ]);
        }
    }
}

/// Function that predicts the batch size from the duration of a plain step in microseconds; `None` if no contender
/// trains.
fn batches(field: &mut Field, bytes: usize) -> Result<Option<impl Fn(f64) -> usize + use<>>> {
    let quick = Effort { rounds: 3, round_ms: 100.0, per_sample: Some(1) };
    let mut plain = Vec::new();
    for items in TRIED {
        let timings = field.measure_of(bytes, items, &quick)?;
        let is_plain = |timing: &&Timing| timing.trainer().is_some_and(|one| one.side == Side::Plain);
        plain.extend(timings.iter().find(is_plain).map(Timing::best_us));
    }
    let [few, many] = plain[..] else { return Ok(None) };
    let per_item = ((many - few) / (TRIED[1] - TRIED[0]) as f64).max(1.0);
    let fixed = few - per_item * TRIED[0] as f64;
    Ok(Some(move |us: f64| ((us - fixed) / per_item).clamp(1.0, 4096.0) as usize))
}
