//! Measures burn-ddp next to its peers and to the hardware's limits: see README.md, or `burn-ddp-bench --help`.
#![deny(unsafe_code)]

mod all_reduce;
mod buckets;
mod comparison;
mod contender;
mod curves;
mod dtypes;
mod link;
mod machine;
mod memory;
mod noise;
mod options;
mod overlap;
mod oversubscribe;
mod plot;
mod protocol;
mod rank;
mod rendezvous;
mod report;
mod scaling;
mod shared_memory;
mod stats;
mod step;
mod table;
mod team;
mod tensors;
mod timeline;
mod training;
mod values;

use clap::{Parser, Subcommand};

/// Measures burn-ddp next to its peers and to the hardware's limits.
///
/// Contenders are real processes that take turns in interleaved rounds, so that noise hits all alike; results are checked in every
/// round. Trust ratios within one run: absolute times differ from run to run by up to two times on shared machines.
#[derive(Parser)]
#[command(version, propagate_version = false)]
struct Cli {
    #[command(subcommand)]
    bench: Bench,
}

#[derive(Subcommand)]
enum Bench {
    AllReduce(all_reduce::AllReduce),
    #[command(name = "dtypes")]
    DTypes(dtypes::DTypes),
    Oversubscribe(oversubscribe::Oversubscribe),
    Scaling(scaling::Scaling),
    Rendezvous(rendezvous::Rendezvous),
    Noise(noise::Noise),
    Tensors(tensors::Tensors),
    Step(step::Step),
    Memory(memory::Memory),
    Buckets(buckets::Buckets),
    Overlap(overlap::Overlap),
    Curves(curves::Curves),
    Timeline(timeline::Timeline),
    /// A rank of a contender, started by the other sub-commands.
    #[command(hide = true)]
    Rank(rank::RankArgs),
    /// A rank that joins and leaves, started by `rendezvous`.
    #[command(hide = true)]
    Meet(rendezvous::MeetArgs),
}

fn main() -> anyhow::Result<()> {
    match Cli::parse().bench {
        Bench::AllReduce(bench) => bench.run(),
        Bench::DTypes(bench) => bench.run(),
        Bench::Oversubscribe(bench) => bench.run(),
        Bench::Scaling(bench) => bench.run(),
        Bench::Rendezvous(bench) => bench.run(),
        Bench::Noise(bench) => bench.run(),
        Bench::Tensors(bench) => bench.run(),
        Bench::Step(bench) => bench.run(),
        Bench::Memory(bench) => bench.run(),
        Bench::Buckets(bench) => bench.run(),
        Bench::Overlap(bench) => bench.run(),
        Bench::Curves(bench) => bench.run(),
        Bench::Timeline(bench) => bench.run(),
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
