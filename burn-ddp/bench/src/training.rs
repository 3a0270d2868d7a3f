//! What the sub-commands that train have in common: two frameworks, each with and without data parallelism.

use anyhow::Result;
use burn_ddp_comm::DType;
use clap::Args;

use crate::comparison::{Field, Timing};
use crate::contender::{Contender, Engine, Framework, Model, Setting, Side, Trainer};
use crate::options::Steps;

/// Options of these sub-commands.
#[derive(Args, Debug)]
pub(crate) struct Training {
    /// The engine under `Ddp::wrap`.
    #[arg(long, default_value = "shm")]
    pub(crate) engine: Engine,
    /// Leaves torch out.
    #[arg(long)]
    pub(crate) alone: bool,
    #[command(flatten)]
    pub(crate) steps: Steps,
}

/// What is trained.
pub(crate) struct Task<'a> {
    pub(crate) model: Model,
    /// How, besides wrapped.
    pub(crate) sides: &'a [Side],
    /// Ranks.
    pub(crate) world: usize,
    /// The allocator gives nothing back between steps.
    pub(crate) keeps_memory: bool,
}

/// One framework's times of the same steps, data-parallel and not.
pub(crate) struct Pair<'a> {
    pub(crate) who: String,
    pub(crate) framework: Framework,
    pub(crate) base: &'a Timing,
    /// As the base, with nodes that do nothing.
    pub(crate) nodes: Option<&'a Timing>,
    pub(crate) wrapped: &'a Timing,
}

impl Training {
    /// Both frameworks' ranks.
    pub(crate) fn field(&self, task: &Task<'_>) -> Result<Field> {
        let &Task { model, sides, world, keeps_memory } = task;
        let frameworks = [Framework::Burn(self.engine), Framework::Torch];
        let frameworks = frameworks.into_iter().filter(|framework| *framework != Framework::Torch || !self.alone);
        let who: Vec<Contender> = frameworks
            .flat_map(|framework| sides.iter().chain(&[Side::Wrapped]).map(move |side| (framework, *side)))
            .filter(|(framework, side)| *framework != Framework::Torch || *side != Side::Nodes)
            .map(|(framework, side)| {
                Contender::Training(Trainer { framework, model, side, bucket_bytes: None, keeps_memory })
            })
            .collect();
        Field::gather(&who, &Setting::here(world, DType::F32, &self.steps.programs))
    }
}

/// The frameworks of which both were measured.
pub(crate) fn pairs(timings: &[Timing]) -> Vec<Pair<'_>> {
    let trainer = |timing: &Timing| match timing.who {
        Contender::Training(trainer) => Some(trainer),
        _ => None,
    };
    let wrapped = timings.iter().filter(|timing| trainer(timing).is_some_and(|one| one.side == Side::Wrapped));
    let pair = |wrapped| {
        let framework = trainer(wrapped)?.framework;
        let of = |sides: &'static [Side]| {
            let is_one = |one: Trainer| one.framework == framework && sides.contains(&one.side);
            timings.iter().find(|timing| trainer(timing).is_some_and(is_one))
        };
        let base = of(&[Side::Plain, Side::Barrier])?;
        Some(Pair { who: wrapped.who.to_string(), framework, base, nodes: of(&[Side::Nodes]), wrapped })
    };
    wrapped.filter_map(pair).collect()
}

impl Pair<'_> {
    /// What data parallelism adds to a step.
    pub(crate) fn added_us(&self) -> f64 {
        self.wrapped.longer_than_us(self.base)
    }

    /// The same as a share of the step without.
    pub(crate) fn added_percent(&self) -> f64 {
        100.0 * (self.wrapped.times_longer_than(self.base) - 1.0)
    }
}
