//! Memory and page faults of training steps.

use anyhow::{Context, Result};

use super::step_report::Pair;
use crate::contender_ranks::Team;
use crate::driver_protocol::RoundPlan;
use crate::interleaved_rounds::{Field, Timing};
use crate::machine::Usage;

/// Number of steps over which page faults are counted.
const STEPS: usize = 5;

/// Memory that a wrapped step uses in addition to the step without data parallelism, and page faults per step of both.
pub(super) struct Memory {
    pub(super) pss_bytes: f64,
    pub(super) rss_bytes: f64,
    pub(super) faults: f64,
    pub(super) base_faults: f64,
}

/// Measures both steps of `pair`. `size` are the bytes and the number of tensors of the model.
pub(super) fn extra(field: &mut Field, pair: &Pair<'_>, size: (usize, usize)) -> Result<Memory> {
    let (base, base_faults) = usage(field, pair.base, size)?;
    let (wrapped, faults) = usage(field, pair.wrapped, size)?;
    Ok(Memory {
        pss_bytes: wrapped.pss_bytes as f64 - base.pss_bytes as f64,
        rss_bytes: wrapped.rss_bytes as f64 - base.rss_bytes as f64,
        faults,
        base_faults,
    })
}

/// Usage of the largest rank after some steps, and the most page faults of a rank per step.
fn usage(field: &mut Field, timing: &Timing, (bytes, tensors): (usize, usize)) -> Result<(Usage, f64)> {
    let team = field.team(timing.contender).context("the contender has failed")?;
    let usages = |team: &mut Team| -> Result<Vec<Usage>> {
        let answers = team.tell("usage")?;
        answers.iter().map(|answer| Usage::parse(answer).context("no usage")).collect()
    };
    team.prepare(bytes, tensors)?;
    let warm_up = RoundPlan { seed: 0, samples: 1, per_sample: 1, warmup: 3, late: None };
    team.round(&warm_up)?;
    let before = usages(team)?;
    // One sample less than STEPS, since each round ends with one more step, which is checked.
    team.round(&RoundPlan { samples: STEPS - 1, warmup: 0, ..warm_up })?;
    let after = usages(team)?;
    let faults = after.iter().zip(&before).map(|(a, b)| a.faults - b.faults).max().unwrap_or(0);
    let largest = after.iter().copied().max_by_key(|usage| usage.pss_bytes).unwrap_or_default();
    team.prepare(64, 1)?;
    Ok((largest, faults as f64 / STEPS as f64))
}
