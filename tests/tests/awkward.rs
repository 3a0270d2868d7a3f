//! Each case of `burn_ddp_tests::awkward` on two and three ranks, as threads and as processes, against one rank with
//! the whole batch.

use std::time::Duration;

use burn_ddp::{Ddp, WorldOptions};
use burn_ddp_tests::awkward::{self, Outcome};
use burn_ddp_tests::job::{job, line, stderr, stdout};
use burn_ddp_tests::{awkward_cases, distance};

macro_rules! tests {
    ($($family:ident: $($case:ident $(= $why:literal)?),* $(,)?;)*) => {
        $(mod $family {
            $(#[test]
            $(#[ignore = $why])?
            fn $case() {
                super::check(concat!(stringify!($family), "::", stringify!($case)));
            })*
        })*
    };
}

awkward_cases!(tests);

fn check(case: &str) {
    let oracle = &match threads(1, case) {
        // Not every backend does all that Flex does: where plain Burn cannot, there is nothing to compare with.
        Err(error) if !is_flex() && error.contains("not implemented") => return eprintln!("skipped: {error}"),
        alone => alone.unwrap_or_else(|e| panic!("{case} on one rank: {e}")),
    }[0];
    for world in [2, 3] {
        let ranks = threads(world, case).unwrap_or_else(|e| panic!("{case} on {world} threads: {e}"));
        compare(case, &format!("{world} threads"), oracle, &ranks);
        compare(case, &format!("{world} processes"), oracle, &processes(world, case));
    }
}

fn is_flex() -> bool {
    std::env::var("BURN_DEVICE").map_or(true, |kind| kind == "flex")
}

fn threads(world: usize, case: &str) -> Result<Vec<Outcome>, String> {
    let options = WorldOptions {
        timeout: Duration::from_secs(30),
        join_timeout: Duration::from_secs(30),
        ..WorldOptions::default()
    };
    Ddp::spawn_with(world, options, |ddp| awkward::run(case, &ddp).expect("the case is in the list"))
        .map_err(|e| e.to_string())
}

fn processes(world: usize, case: &str) -> Vec<Outcome> {
    let outputs = job(env!("CARGO_BIN_EXE_rank"), world, &["case", case]);
    for output in &outputs {
        assert!(output.status.success(), "{case} in {world} processes: {}", stderr(output));
    }
    outputs.iter().map(|o| serde_json::from_str(line(&stdout(o), "outcome ")).unwrap()).collect()
}

/// All ranks hold the same bits, and rank 0 what the oracle holds.
fn compare(case: &str, who: &str, oracle: &Outcome, ranks: &[Outcome]) {
    for (rank, outcome) in ranks.iter().enumerate() {
        assert_eq!(outcome.hash, ranks[0].hash, "{case}, {who}: rank {rank} differs from rank 0");
    }
    if ranks[0].values.is_empty() && oracle.values.is_empty() {
        return; // about errors, or about agreement alone
    }
    let d = distance(&ranks[0].values, &oracle.values);
    assert!(d <= oracle.tolerance, "{case}, {who}: {d:e} away from one rank, allowed {:e}", oracle.tolerance);
}
