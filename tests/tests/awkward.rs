//! Each case of `burn_ddp_tests::awkward` on two and three ranks, as threads and as processes, against one rank with
//! the whole batch; and on threads with every parameter sharded that can be.

use std::time::Duration;

use burn_ddp::{Ddp, WorldOptions};
use burn_ddp_tests::awkward::{self, Outcome};
use burn_ddp_tests::job::{job, line, rank_program, stderr, stdout};
use burn_ddp_tests::{awkward_cases, distance, is_gpu, tolerance_of_device};

macro_rules! tests {
    ($($family:ident: $($case:ident $(= $why:literal)?),* $(,)?;)*) => {
        $(mod $family {
            $(#[test]
            $(#[ignore = $why])?
            fn $case() {
                super::check(concat!(stringify!($family), "::", stringify!($case)));
            })*

            mod sharded {
                $(#[test]
                $(#[ignore = $why])?
                fn $case() {
                    super::super::check_sharded(concat!(stringify!($family), "::", stringify!($case)));
                })*
            }
        })*
    };
}

awkward_cases!(tests);

/// Cases in which the data of a rank decide which parameters it uses. Sharded parameters must be used by all ranks, so
/// these cases run sharded with the whole batch on every rank.
const ROUTED: [&str; 38] = [
    "experts::routed_by_data",
    "lora::adapters_unused_on_some_ranks",
    "nested_structures::arrays_and_tuples",
    "nested_structures::enums",
    "nested_structures::nested",
    "nested_structures::options",
    "nested_structures::vectors",
    "optimizers::ada_grad",
    "optimizers::adam_ams",
    "optimizers::adam_w",
    "optimizers::adan",
    "optimizers::clipping_by_value",
    "optimizers::learning_rates_per_group",
    "optimizers::lion",
    "optimizers::rms_prop",
    "optimizers::sgd_decay_and_nesterov",
    "optimizers::sgd_plain",
    "records::clone_goes_on",
    "records::fork_goes_on",
    "records::moved_to_its_device",
    "records::optimizer_record",
    "records::unwrap_and_wrap",
    "records::valid_and_train",
    "repeated_reads::another_count_on_each_rank",
    "shapes::in_bf16",
    "shapes::in_f16",
    "shapes::in_f32",
    "shapes::in_mixed_dtypes",
    "two_models::both_in_one_loss",
    "two_models::one_after_the_other",
    "two_models::with_accumulation",
    "two_models::wrapped_twice",
    "unused::by_all_but_one_rank",
    "unused::checkpointing",
    "unused::forward_without_backward",
    "unused::graph_alive_beside",
    "unused::on_changing_ranks",
    "unused::on_some_ranks",
];

/// Cases that sharding refuses, and the error.
const REFUSED: [(&str, &str); 13] = [
    ("optimizers::adafactor", "does not step each element by itself"),
    ("optimizers::clipping_by_norm", "does not step each element by itself"),
    ("optimizers::lamb", "does not step each element by itself"),
    ("optimizers::lbfgs", "no optimizer was checked"),
    ("optimizers::lbfgs_with_unused", "no optimizer was checked"),
    ("optimizers::muon", "does not step each element by itself"),
    ("optimizers::optimizers_per_group", "does not step each element by itself"),
    ("panics::one_rank_goes_on", "every rank must read the same parameters"),
    ("records::a_copy_is_kept_aside", "ddp.save(&model, path)"),
    ("records::from_plain_to_wrapped", "ddp.save(&model, path)"),
    ("records::from_wrapped_to_plain", "ddp.save(&model, path)"),
    ("records::from_wrapped_to_wrapped", "ddp.save(&model, path)"),
    ("unused::graph_dropped_half_way", "every rank must read the same parameters"),
];

fn check(case: &str) {
    let Some(oracle) = &oracle(case) else { return };
    for world in [2, 3] {
        let ranks = threads(world, case, awkward::run).unwrap_or_else(|e| panic!("{case} on {world} threads: {e}"));
        compare(case, &format!("{world} threads"), oracle, &ranks);
        // On a GPU every process compiles its kernels, which takes most of the time.
        if std::env::var_os("BURN_DDP_TEST_THREADS_ALONE").is_none() {
            compare(case, &format!("{world} processes"), oracle, &processes(world, case));
        }
    }
}

/// The case passes with sharded parameters, or is refused with the error that is listed.
fn check_sharded(case: &str) {
    if case == "shapes::ten_thousand_tiny" {
        return; // Its parameters are vectors, which are never sharded.
    }
    let refused = REFUSED.iter().find(|(refused, _)| *refused == case);
    let is_routed = ROUTED.contains(&case);
    let Some(oracle) = &oracle(case) else { return };
    for world in [2, 3] {
        if is_routed {
            // On three ranks some cases happen to use the same parameters on all ranks.
            match threads(world, case, awkward::run_sharded) {
                Ok(ranks) if world > 2 => compare(case, &format!("{world} sharded threads"), oracle, &ranks),
                Ok(_) => panic!("{case} works with sharding on {world} threads: take it off the list"),
                Err(e) => assert!(e.contains("every rank must read the same parameters"), "{case}: {e}"),
            }
        }
        let run = match is_routed || refused.is_some() {
            true => awkward::run_sharded_on_all_data,
            false => awkward::run_sharded,
        };
        match (threads(world, case, run), refused) {
            (Ok(ranks), None) if ranks[0].values.is_empty() => {
                assert!(is_gpu() || ranks.iter().all(|rank| rank.hash == ranks[0].hash), "{case}: the ranks differ");
            }
            (Ok(ranks), None) => compare(case, &format!("{world} sharded threads"), oracle, &ranks),
            (Ok(_), Some(_)) => panic!("{case} works with sharding on {world} threads: take it off the list"),
            (Err(error), None) => panic!("{case} with sharding on {world} threads: {error}"),
            (Err(error), Some((_, words))) => assert!(error.contains(words), "{case} on {world} threads: {error}"),
        }
    }
}

/// The outcome of the case in plain Burn; `None` on a backend that cannot run it.
fn oracle(case: &str) -> Option<Outcome> {
    match threads(1, case, awkward::run) {
        // Some backends lack operations that Flex has; without plain Burn's outcome nothing can be compared.
        Err(error) if !is_flex() && error.contains("not implemented") => {
            eprintln!("skipped: {error}");
            None
        }
        alone => Some(alone.unwrap_or_else(|e| panic!("{case} on one rank: {e}")).remove(0)),
    }
}

fn is_flex() -> bool {
    std::env::var("BURN_DEVICE").map_or(true, |kind| kind == "flex")
}

/// A way to run a case on a rank.
type Runner = fn(&str, &Ddp) -> Option<anyhow::Result<Outcome>>;

fn threads(world: usize, case: &str, run: Runner) -> Result<Vec<Outcome>, String> {
    let options = WorldOptions {
        timeout: Duration::from_secs(30),
        join_timeout: Duration::from_secs(30),
        ..WorldOptions::default()
    };
    Ddp::spawn_with(world, options, |ddp| run(case, &ddp).expect("the case is in the list")).map_err(|e| e.to_string())
}

fn processes(world: usize, case: &str) -> Vec<Outcome> {
    let outputs = job(&rank_program(env!("CARGO_BIN_EXE_rank")), world, &["case", case]);
    for output in &outputs {
        assert!(output.status.success(), "{case} in {world} processes: {}", stderr(output));
    }
    outputs.iter().map(|o| serde_json::from_str(line(&stdout(o), "outcome ")).unwrap()).collect()
}

/// Checks that all ranks hold the same bits, unless they are threads that share a GPU, and the oracle's values within
/// the tolerance.
fn compare(case: &str, who: &str, oracle: &Outcome, ranks: &[Outcome]) {
    for (rank, outcome) in ranks.iter().enumerate() {
        let same = outcome.hash == ranks[0].hash || is_gpu() && who.ends_with("threads");
        assert!(same, "{case}, {who}: rank {rank} differs from rank 0");
    }
    if ranks[0].values.is_empty() && oracle.values.is_empty() {
        return; // the case checks errors, or compares the ranks only
    }
    // Where the bits are equal, only rank 0 may have passed its values.
    for outcome in ranks.iter().filter(|outcome| !outcome.values.is_empty()) {
        let (d, allowed) = (distance(&outcome.values, &oracle.values), tolerance_of_device(oracle.tolerance));
        assert!(d <= allowed, "{case}, {who}: {d:e} away from one rank, allowed {allowed:e}");
    }
}
