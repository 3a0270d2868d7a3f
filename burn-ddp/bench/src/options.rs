//! Options that several sub-commands have, with the same defaults.

use clap::Args;

use crate::comparison::Effort;
use crate::contender::Programs;

/// How much is measured of short steps.
#[derive(Args, Debug)]
pub(crate) struct Turns {
    /// How often everybody has a turn.
    #[arg(long, default_value_t = 15)]
    pub(crate) rounds: usize,
    /// About how long a turn takes, in milliseconds.
    #[arg(long, default_value_t = 50.0)]
    pub(crate) round_ms: f64,
}

/// What comes out, and what is needed besides.
#[derive(Args, Debug)]
pub(crate) struct Output {
    /// Prints one JSON object a line instead of a table.
    #[arg(long)]
    pub(crate) json: bool,
    #[command(flatten)]
    pub(crate) programs: Programs,
}

/// How much is measured of training steps, and what comes out.
#[derive(Args, Debug)]
pub(crate) struct Steps {
    /// How often everybody has a turn.
    #[arg(long, default_value_t = 10)]
    pub(crate) rounds: usize,
    /// About how long a turn takes, in milliseconds.
    #[arg(long, default_value_t = 400.0)]
    pub(crate) round_ms: f64,
    /// Prints JSON objects, one a line, instead of a table.
    #[arg(long)]
    pub(crate) json: bool,
    #[command(flatten)]
    pub(crate) programs: Programs,
}

impl Steps {
    pub(crate) fn effort(&self) -> Effort {
        Effort { rounds: self.rounds, round_ms: self.round_ms, per_sample: Some(1) }
    }
}
