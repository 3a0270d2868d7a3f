//! Ranks as processes: one is killed in a step, or makes other calls than the others. The others get an error that
//! names it within [`FAULT_HEARD`]; `--nocapture` prints the times.

use std::process::Command;

use burn_ddp_tests::job;

use super::*;

/// Each rank that gets an error, the time from the fault of rank 1 to this error, and the error.
fn heard(engine: &str, args: &[&str]) -> Vec<(usize, Duration, String)> {
    let port = job::FreePort::reserve();
    let args = [&["sharded-fault"], args].concat();
    let rank = |rank| {
        let mut command = job::rank(env!("CARGO_BIN_EXE_rank"), rank, 3, port.port, &args);
        command.env("BURN_DDP_ENGINE", engine);
        command
    };
    let ranks = job::finish((0..3).map(rank).collect::<Vec<Command>>());
    let said: Vec<String> = ranks.iter().map(job::stdout).collect();
    let ms = |number: &str| number.trim().parse::<u64>().unwrap_or_else(|_| panic!("{engine}, {args:?}: {said:?}"));
    let fault = ms(job::line(&said[1], "FAULT "));
    let errors = said.iter().enumerate().filter(|(_, said)| said.contains("ERROR "));
    let errors = errors.map(|(rank, said)| {
        let (at, error) = job::line(said, "ERROR ").split_once(' ').unwrap();
        (rank, Duration::from_millis(ms(at).saturating_sub(fault)), error.to_owned())
    });
    let errors: Vec<_> = errors.collect();
    for (rank, after, error) in &errors {
        println!("{engine}, {args:?}: rank {rank} after {after:?}: {error}");
        assert!(*after < FAULT_HEARD, "{engine}, {args:?}: rank {rank} after {after:?}: {error}");
    }
    errors
}

/// Asserts that the ranks 0 and 2, and only these, have heard that rank 1 has died in one of these calls.
fn died(engine: &str, args: &[&str], calls: &[&str]) {
    let errors = heard(engine, args);
    assert_eq!(errors.iter().map(|(rank, ..)| *rank).collect::<Vec<_>>(), [0, 2], "{engine}, {args:?}: {errors:?}");
    for (_, _, error) in errors {
        let names =
            error.contains("rank 1 (") && calls.iter().any(|call| error.contains(&format!("died during {call}")));
        assert!(names, "{engine}, {args:?}: {error}");
    }
}

#[test]
fn a_rank_killed_in_a_gather_or_a_scatter_is_an_error_on_the_others() {
    for engine in ["shm", "tcp"] {
        for (moment, call) in [
            ("forward", "all_gather"),
            ("in-forward", "all_gather"),
            ("backward", "all_gather"),
            ("in-backward", "all_gather"),
            ("agreement", "all_gather"),
            ("scatter", "reduce_scatter"),
        ] {
            died(engine, &[moment], &[call]);
        }
        // The others may have left the scatter in which rank 1 dies, and wait in a later call.
        died(engine, &["in-scatter"], &["reduce_scatter", "all_gather", "barrier"]);
    }
}

#[test]
fn a_rank_killed_at_any_moment_of_training_is_an_error_on_the_others() {
    for engine in ["shm", "tcp"] {
        for after in ["100", "133", "171"] {
            died(engine, &["any", after], &[""]);
        }
    }
}

#[test]
fn a_process_that_skips_a_layer_or_evaluates_alone_is_an_error_on_all() {
    for engine in ["shm", "tcp"] {
        for (what, parameter, reads) in [
            ("swaps", "b.weight", "rank 1 reads b.weight in a forward"),
            ("skips", "b.weight", "rank 1 begins to reduce the gradients"),
            ("evaluates", "a.weight", "rank 1 reads a.weight without a gradient (evaluation)"),
            ("evaluates-alone", "a.weight", "rank 1 reads a.weight without a gradient (evaluation)"),
        ] {
            let errors = heard(engine, &[what]);
            assert_eq!(errors.len(), 3, "{engine}, {what}: {errors:?}");
            for (rank, _, error) in &errors {
                let names_both = error.contains(parameter) && error.contains(reads);
                assert!(names_both, "{engine}, {what}: rank {rank}: {error}");
            }
        }
    }
}
