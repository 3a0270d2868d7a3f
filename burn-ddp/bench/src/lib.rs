//! Measures burn-ddp next to its peers and to the hardware's limits: see README.md, or `burn-ddp-bench --help`.
//!
//! | | file |
//! |---|---|
//! | sub-commands | the files of their names: `all_reduce`, `step`, `curves`, `loading`, `rendezvous`, `determinism`, `timeline_plot` |
//! | contenders and their surroundings | `contender` (starts ranks and peers), `contender_ranks`, `rank` (inside of a rank), `simulated_machines`, `neighbours` |
//! | turns of the contenders | `driver_protocol`, `interleaved_rounds`, `spin_barrier` |
//! | results | `stats`, `table`, `plot` |
#![deny(unsafe_code)]

mod all_reduce;
mod contender;
mod contender_ranks;
mod curves;
mod determinism;
mod driver_protocol;
mod exact_inputs;
mod interleaved_rounds;
#[cfg(feature = "burn")]
mod loading;
mod machine;
mod neighbours;
mod peer_options;
mod plot;
mod rank;
mod rendezvous;
mod simulated_machines;
mod spin_barrier;
mod stats;
mod step;
mod table;
#[cfg(feature = "plot")]
mod timeline_plot;

use clap::{Parser, Subcommand};

/// Measures burn-ddp next to its peers and to the hardware's limits.
///
/// Contenders (engines, peers, limits) are real processes that take turns in interleaved rounds, so that noise hits all
/// alike; every round checks the results. Trust ratios within one run: on shared machines, absolute times of two runs
/// can differ by a factor of two.
#[derive(Parser)]
#[command(version, propagate_version = false)]
struct Cli {
    #[command(subcommand)]
    bench: Bench,
}

#[derive(Subcommand)]
enum Bench {
    AllReduce(all_reduce::AllReduce),
    Step(step::Step),
    Curves(curves::Curves),
    #[cfg(feature = "burn")]
    Loading(loading::Loading),
    Rendezvous(rendezvous::Rendezvous),
    Determinism(determinism::Determinism),
    #[cfg(feature = "plot")]
    Timeline(timeline_plot::Timeline),
    /// Draws steps of a trace that `burnrun --timeline` wrote; needs a build with `--features plot`.
    #[cfg(not(feature = "plot"))]
    Timeline {
        #[arg(hide = true, allow_hyphen_values = true, trailing_var_arg = true)]
        _words: Vec<String>,
    },
    /// A rank of a contender, started by the other sub-commands.
    #[command(hide = true)]
    Rank(rank::RankArgs),
    /// A rank that joins and leaves, started by `rendezvous`.
    #[command(hide = true)]
    Meet(rendezvous::MeetArgs),
}

/// Runs the benchmark that the command line names, and prints its result. On wrong input, and for `--help`, ends the
/// process.
///
/// # Errors
///
/// If a contender of this project fails, results are wrong, or files cannot be written.
pub fn main() -> anyhow::Result<()> {
    match Cli::parse().bench {
        Bench::AllReduce(bench) => bench.run(),
        Bench::Step(bench) => bench.run(),
        Bench::Curves(bench) => bench.run(),
        #[cfg(feature = "burn")]
        Bench::Loading(bench) => bench.run(),
        Bench::Rendezvous(bench) => bench.run(),
        Bench::Determinism(bench) => bench.run(),
        #[cfg(feature = "plot")]
        Bench::Timeline(bench) => bench.run(),
        #[cfg(not(feature = "plot"))]
        Bench::Timeline { .. } => anyhow::bail!("timeline needs a build with `--features plot`"),
        Bench::Rank(args) => rank::run(&args),
        Bench::Meet(args) => rendezvous::meet(&args),
    }
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    #[test]
    fn the_command_line_is_well_formed() {
        super::Cli::command().debug_assert();
    }
}
