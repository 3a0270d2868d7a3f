//! Rounds of several contenders, interleaved: each round, each contender in turn does one size, so that what disturbs the machine
//! disturbs them alike. Ratios are medians over rounds of the quotient within a round.

use std::time::Instant;

use anyhow::Result;

use crate::contender::{Contender, Setting, start};
use crate::protocol::RoundPlan;
use crate::team::{Round, Team};
use crate::{machine, stats};

/// A time between two readings of the clock should be at least this long.
const SAMPLE_NS: f64 = 20_000.0;
/// More samples of a round say nothing new.
const MAX_SAMPLES: usize = 400;

/// How much to measure.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Effort {
    pub(crate) rounds: usize,
    /// About how long a contender is measured in a round.
    pub(crate) round_ms: f64,
    /// Steps between two readings of the clock, if they are not to be chosen: 1 for percentiles of single steps.
    pub(crate) per_sample: Option<usize>,
}

/// The contenders that could be started.
pub(crate) struct Field {
    pub(crate) world: usize,
    entrants: Vec<(Contender, Team)>,
    /// Who could not, and why.
    pub(crate) absent: Vec<(Contender, String)>,
}

/// One contender's times of one size.
#[derive(Clone, Debug)]
pub(crate) struct Timing {
    pub(crate) who: Contender,
    /// Per round, the median of its samples in nanoseconds.
    pub(crate) medians: Vec<f64>,
    /// All samples.
    pub(crate) samples: Vec<f64>,
    /// Per round, CPU nanoseconds of all ranks per step.
    pub(crate) cpu: Vec<f64>,
}

impl Field {
    /// Starts them; who does not start is absent, but not this project's.
    pub(crate) fn gather(who: &[Contender], setting: &Setting<'_>) -> Result<Field> {
        let mut field = Field { world: setting.world, entrants: Vec::new(), absent: Vec::new() };
        for &who in who {
            match start(who, setting) {
                Ok(team) => field.entrants.push((who, team)),
                Err(error) if who.is_ours() => return Err(error),
                Err(error) => {
                    eprintln!("{who} is not there: {error:#}");
                    field.absent.push((who, format!("{error:#}")));
                }
            }
        }
        Ok(field)
    }

    /// All rounds of one size. A peer that fails is absent from then on.
    ///
    /// # Errors
    /// If one of this project's fails.
    pub(crate) fn measure(&mut self, bytes: usize, effort: &Effort) -> Result<Vec<Timing>> {
        self.measure_of(bytes, buffers(bytes, self.world), effort)
    }

    /// The same with `count` buffers, tensors, or items: whatever the contenders count.
    pub(crate) fn measure_of(&mut self, bytes: usize, count: usize, effort: &Effort) -> Result<Vec<Timing>> {
        let names: Vec<Contender> = self.entrants.iter().map(|(who, _)| *who).collect();
        self.measure_these(&names, (bytes, count), effort)
    }

    /// The same of one contender by itself; `None` if it is absent.
    pub(crate) fn measure_only(
        &mut self,
        who: Contender,
        bytes: usize,
        count: usize,
        effort: &Effort,
    ) -> Result<Option<Timing>> {
        Ok(self.measure_these(&[who], (bytes, count), effort)?.pop())
    }

    fn measure_these(
        &mut self,
        names: &[Contender],
        (bytes, count): (usize, usize),
        effort: &Effort,
    ) -> Result<Vec<Timing>> {
        let mut running: Vec<(RoundPlan, Timing)> = Vec::new();
        let world = self.world;
        for who in names.iter().copied().filter(|who| who.applies(bytes, world)) {
            let Some(team) = self.team(who) else { continue };
            match team.prepare(bytes, count).and_then(|()| calibrate(team, effort)) {
                Ok(plan) => {
                    running.push((plan, Timing { who, medians: Vec::new(), samples: Vec::new(), cpu: Vec::new() }));
                }
                Err(error) => self.excuse(who, error)?,
            }
        }
        for round in 0..effort.rounds {
            let turns = running.len();
            for turn in 0..turns {
                // Everybody is first, and follows another, equally often.
                let (plan, timing) = &mut running[(round + turn) % turns];
                plan.seed = (round * 100) as u64;
                let who = timing.who;
                let Some(team) = self.team(who) else { continue };
                match team.round(plan) {
                    Ok(round) => timing.add(&round, plan),
                    Err(error) => self.excuse(who, error)?,
                }
            }
            running.retain(|(_, timing)| timing.medians.len() > round);
        }
        for (_, timing) in &running {
            // Nobody keeps memory for a size that is done.
            self.team(timing.who).map_or(Ok(()), |team| team.prepare(64, 1))?;
        }
        Ok(running.into_iter().map(|(_, timing)| timing).collect())
    }

    /// Goes on without `who`, unless it is this project's.
    fn excuse(&mut self, who: Contender, error: anyhow::Error) -> Result<()> {
        if who.is_ours() {
            return Err(error);
        }
        eprintln!("goes on without {who}: {error:#}");
        self.absent.push((who, format!("{error:#}")));
        self.entrants.retain(|(entrant, _)| *entrant != who);
        Ok(())
    }

    /// Ends the processes of `who`.
    pub(crate) fn dismiss(&mut self, who: Contender) {
        self.entrants.retain(|(entrant, _)| *entrant != who);
    }

    /// The processes of `who`.
    pub(crate) fn team(&mut self, who: Contender) -> Option<&mut Team> {
        self.entrants.iter_mut().find(|(entrant, _)| *entrant == who).map(|(_, team)| team)
    }
}

/// How many buffers a rank uses in turn: together they are more than twice the last cache, where the buffers are not tiny.
fn buffers(bytes: usize, world: usize) -> usize {
    let least = if bytes > 64 << 20 { 2 } else { 4 };
    (2 * machine::last_level_cache_bytes()).div_ceil(bytes.max(1) * world).clamp(least, 64)
}

/// How many steps fit into a round, from a few that are tried.
fn calibrate(team: &mut Team, effort: &Effort) -> Result<RoundPlan> {
    let mut plan = RoundPlan { seed: 0, samples: 1, per_sample: 1, warmup: 2, late: None };
    let mut step_ns = f64::INFINITY;
    // Short steps are timed by the dozen, once they are known to be short.
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
    fn add(&mut self, round: &Round, plan: &RoundPlan) {
        self.medians.push(stats::median(&round.ns));
        self.samples.extend(&round.ns);
        self.cpu.push(round.cpu_ns.iter().sum::<f64>() / (plan.samples * plan.per_sample) as f64);
    }

    /// The rounds of `later`, behind these.
    pub(crate) fn extend(&mut self, later: Timing) {
        self.medians.extend(later.medians);
        self.samples.extend(later.samples);
        self.cpu.extend(later.cpu);
    }

    /// Microseconds of a step: the median of the rounds' medians.
    pub(crate) fn median_us(&self) -> f64 {
        stats::median(&self.medians) / 1e3
    }

    /// Microseconds of a step in the round that went best: on a machine with other work, what it can do without.
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

    /// How many times longer than `other` this took.
    pub(crate) fn times_longer_than(&self, other: &Timing) -> f64 {
        stats::ratio(&self.medians, &other.medians)
    }
}
