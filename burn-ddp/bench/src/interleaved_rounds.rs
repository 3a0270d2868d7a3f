//! Interleaved rounds of several contenders: in each round the contenders take turns at one size, so that a disturbance
//! hits all alike. Ratios are medians over rounds of the quotient within a round.

use std::time::Instant;

use anyhow::Result;
use burn_ddp_comm::DType;

use crate::contender::{Contender, Setting, Trainer, start};
use crate::contender_ranks::{Round, Team};
use crate::driver_protocol::RoundPlan;
use crate::neighbours::Neighbours;
use crate::simulated_machines::Machines;
use crate::{machine, stats};

/// Shortest time between two readings of the clock.
const SAMPLE_NS: f64 = 20_000.0;
/// Largest number of samples of a round.
const MAX_SAMPLES: usize = 400;

/// Extent of a measurement.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Effort {
    pub(crate) rounds: usize,
    /// Approximate duration of a contender's turn, in milliseconds.
    pub(crate) round_ms: f64,
    /// Steps timed as one sample: 1 for percentiles of single steps, `None` for so many that reading the clock does not
    /// count.
    pub(crate) per_sample: Option<usize>,
}

/// The contenders of a comparison that could be started.
pub(crate) struct Field<'a> {
    pub(crate) world: usize,
    pub(crate) dtype: DType,
    machines: Option<&'a Machines>,
    pub(crate) neighbours: Option<&'a Neighbours>,
    entrants: Vec<(Contender, Team)>,
    /// Number of rounds so far. It decides which contender is first in the next round.
    rounds: usize,
}

/// Times of one contender and one size.
#[derive(Clone, Debug)]
pub(crate) struct Timing {
    pub(crate) contender: Contender,
    /// Per round, the median of its samples in nanoseconds.
    pub(crate) medians: Vec<f64>,
    /// All samples.
    pub(crate) samples: Vec<f64>,
    /// Per round, CPU nanoseconds of all ranks per step.
    pub(crate) cpu: Vec<f64>,
    /// Per round, bytes per step that the busiest machine sends; empty on one machine.
    pub(crate) sent: Vec<f64>,
    /// Bytes that the busiest machine sends in `prepare`, before the first step: a trainer wraps its model there.
    /// `None` on one machine.
    pub(crate) sent_before: Option<f64>,
}

impl<'a> Field<'a> {
    /// Starts `contenders`, and leaves out the peers that do not start.
    ///
    /// # Errors
    /// If one of this project's contenders does not start.
    pub(crate) fn gather(contenders: &[Contender], setting: &Setting<'a>) -> Result<Field<'a>> {
        let &Setting { world, dtype, machines, neighbours, .. } = setting;
        let mut field = Field { world, dtype, machines, neighbours, entrants: Vec::new(), rounds: 0 };
        for &contender in contenders {
            match start(contender, setting) {
                Ok(team) => field.entrants.push((contender, team)),
                Err(error) if contender.is_ours() => return Err(error),
                Err(error) => eprintln!("{contender} is left out: {error:#}"),
            }
        }
        Ok(field)
    }

    /// Runs all rounds of one size. A peer that fails is left out from then on.
    ///
    /// # Errors
    /// If one of this project's contenders fails.
    pub(crate) fn measure(&mut self, bytes: usize, effort: &Effort) -> Result<Vec<Timing>> {
        self.measure_of(bytes, buffers(bytes, self.world), effort)
    }

    /// Runs all rounds of one size with `count` buffers, or, for trainers, tensors or items.
    pub(crate) fn measure_of(&mut self, bytes: usize, count: usize, effort: &Effort) -> Result<Vec<Timing>> {
        let contenders: Vec<Contender> = self.entrants.iter().map(|(contender, _)| *contender).collect();
        self.measure_these(&contenders, (bytes, count), effort)
    }

    /// Runs all rounds of one contender by itself; `None` if it was left out.
    pub(crate) fn measure_only(
        &mut self,
        contender: Contender,
        bytes: usize,
        count: usize,
        effort: &Effort,
    ) -> Result<Option<Timing>> {
        Ok(self.measure_these(&[contender], (bytes, count), effort)?.pop())
    }

    fn measure_these(
        &mut self,
        contenders: &[Contender],
        (bytes, count): (usize, usize),
        effort: &Effort,
    ) -> Result<Vec<Timing>> {
        let _awake = self.neighbours.map(Neighbours::wake);
        let mut running: Vec<(RoundPlan, Timing)> = Vec::new();
        let world = self.world;
        for contender in contenders.iter().copied().filter(|contender| contender.applies(bytes, world)) {
            let before = self.sent_bytes()?;
            let Some(team) = self.team(contender) else { continue };
            let prepared = team.prepare(bytes, count);
            let sent_before = self.busiest_since(before)?;
            let Some(team) = self.team(contender) else { continue };
            match prepared.and_then(|()| calibrate(team, effort)) {
                Ok(plan) => running.push((plan, Timing { sent_before, ..Timing::new(contender) })),
                Err(error) => self.leave_out(contender, error)?,
            }
        }
        for round in 1..=effort.rounds {
            let (turns, first) = (running.len(), self.rounds);
            for turn in 0..turns {
                // Each contender is first, and follows another, equally often.
                let (plan, timing) = &mut running[(first + turn) % turns];
                plan.seed = (first * 100) as u64;
                let contender = timing.contender;
                let before = self.sent_bytes()?;
                let Some(team) = self.team(contender) else { continue };
                match team.round(plan) {
                    Ok(round) => {
                        timing.add(&round, plan);
                        timing.sent.extend(self.busiest_since(before)?.map(|bytes| bytes / plan.steps() as f64));
                    }
                    Err(error) => self.leave_out(contender, error)?,
                }
            }
            self.rounds += 1;
            running.retain(|(_, timing)| timing.medians.len() == round);
        }
        for (_, timing) in &running {
            // Frees the memory of this size.
            self.team(timing.contender).map_or(Ok(()), |team| team.prepare(64, 1))?;
        }
        Ok(running.into_iter().map(|(_, timing)| timing).collect())
    }

    /// Bytes that each machine has sent; none on one machine.
    fn sent_bytes(&self) -> Result<Vec<u64>> {
        self.machines.map_or(Ok(Vec::new()), Machines::sent_bytes)
    }

    /// Bytes that the busiest machine has sent since all had sent `before`.
    fn busiest_since(&self, before: Vec<u64>) -> Result<Option<f64>> {
        let busiest = self.sent_bytes()?.iter().zip(before).map(|(after, before)| after - before).max();
        Ok(busiest.map(|bytes| bytes as f64))
    }

    /// Leaves out `contender` after `error`; a contender of this project must not fail, so its error is returned.
    fn leave_out(&mut self, contender: Contender, error: anyhow::Error) -> Result<()> {
        if contender.is_ours() {
            return Err(error);
        }
        eprintln!("{contender} failed and is left out from now on: {error:#}");
        self.dismiss(contender);
        Ok(())
    }

    /// Ends the processes of `contender`.
    pub(crate) fn dismiss(&mut self, contender: Contender) {
        self.entrants.retain(|(entrant, _)| *entrant != contender);
    }

    /// Processes of `contender`.
    pub(crate) fn team(&mut self, contender: Contender) -> Option<&mut Team> {
        self.entrants.iter_mut().find(|(entrant, _)| *entrant == contender).map(|(_, team)| team)
    }
}

/// Runs all rounds of one size in several fields, which take turns after each round. `bytes` has an entry per field.
pub(crate) fn interleave(fields: &mut [Field<'_>], bytes: &[usize], effort: &Effort) -> Result<Vec<Vec<Timing>>> {
    if let [field] = fields {
        return Ok(vec![field.measure(bytes[0], effort)?]);
    }
    let one_round = Effort { rounds: 1, ..*effort };
    let mut all: Vec<Vec<Timing>> = fields.iter().map(|_| Vec::new()).collect();
    for _ in 0..effort.rounds {
        for ((field, bytes), timings) in fields.iter_mut().zip(bytes).zip(&mut all) {
            for later in field.measure(*bytes, &one_round)? {
                match timings.iter_mut().find(|timing| timing.contender == later.contender) {
                    Some(timing) => timing.extend(later),
                    None => timings.push(later),
                }
            }
        }
    }
    Ok(all)
}

/// Number of buffers that a rank uses in turn. Together they are more than twice the last-level cache, unless buffers
/// are tiny.
fn buffers(bytes: usize, world: usize) -> usize {
    let least = if bytes > 64 << 20 { 2 } else { 4 };
    (2 * machine::last_level_cache_bytes()).div_ceil(bytes.max(1) * world).clamp(least, 64)
}

/// Plan of a round with as many steps as fit into a turn, estimated from the time of a few steps.
fn calibrate(team: &mut Team, effort: &Effort) -> Result<RoundPlan> {
    let mut plan = RoundPlan { seed: 0, samples: 1, per_sample: 1, warmup: 2, late: None };
    let mut step_ns = f64::INFINITY;
    // Several steps are timed together if single ones are too short for the clock.
    for per_sample in [1, 20, 400] {
        plan.per_sample = per_sample;
        let start = Instant::now();
        step_ns = team.round(&plan)?.ns.iter().copied().fold(step_ns, f64::min).max(10.0);
        if step_ns * per_sample as f64 > SAMPLE_NS || start.elapsed().as_secs() > 1 {
            break;
        }
    }
    plan.per_sample = effort.per_sample.unwrap_or(((SAMPLE_NS / step_ns).ceil() as usize).max(1));
    let sample_ns = step_ns * plan.per_sample as f64;
    plan.samples = ((effort.round_ms * 1e6 / sample_ns) as usize).clamp(2, MAX_SAMPLES);
    Ok(plan)
}

impl Timing {
    pub(crate) fn new(contender: Contender) -> Timing {
        Timing {
            contender,
            medians: Vec::new(),
            samples: Vec::new(),
            cpu: Vec::new(),
            sent: Vec::new(),
            sent_before: None,
        }
    }

    /// The contender, if it trains.
    pub(crate) fn trainer(&self) -> Option<Trainer> {
        match self.contender {
            Contender::Training(trainer) => Some(trainer),
            _ => None,
        }
    }

    fn add(&mut self, round: &Round, plan: &RoundPlan) {
        self.medians.push(stats::median(&round.ns));
        self.samples.extend(&round.ns);
        self.cpu.push(round.cpu_ns.iter().sum::<f64>() / (plan.samples * plan.per_sample) as f64);
    }

    /// Appends the rounds of `later`.
    fn extend(&mut self, later: Timing) {
        self.medians.extend(later.medians);
        self.samples.extend(later.samples);
        self.cpu.extend(later.cpu);
        self.sent.extend(later.sent);
    }

    /// Microseconds of a step: the median of the rounds' medians.
    pub(crate) fn median_us(&self) -> f64 {
        stats::median(&self.medians) / 1e3
    }

    /// Microseconds of a step in the fastest round: about the time on a machine without other work.
    pub(crate) fn best_us(&self) -> f64 {
        stats::percentile(&self.medians, 0.0) / 1e3
    }

    /// Microseconds below which a share `p` of all samples lies.
    pub(crate) fn percentile_us(&self, p: f64) -> f64 {
        stats::percentile(&self.samples, p) / 1e3
    }

    /// Microseconds more than `other`, the median over rounds.
    pub(crate) fn longer_than_us(&self, other: &Timing) -> f64 {
        stats::difference(&self.medians, &other.medians) / 1e3
    }

    /// Time as a multiple of `other`'s, the median over rounds.
    pub(crate) fn times_longer_than(&self, other: &Timing) -> f64 {
        stats::ratio(&self.medians, &other.medians)
    }
}
