//! Jobs of real processes over tcp: they train like threads and like one rank, and errors name the faulty rank in time.

use std::collections::HashMap;
use std::net::TcpListener;
use std::process::{Command, Output};
use std::time::{Duration, Instant};

use burn_ddp_tests::distance;
use burn_ddp_tests::job::{FreePort, line, rank_program, stderr, stdout};

const RANK: &str = env!("CARGO_BIN_EXE_rank");

fn rank(r: usize, world: usize, port: u16, args: &[&str]) -> Command {
    burn_ddp_tests::job::rank(&rank_program(RANK), r, world, port, args)
}

fn job(world: usize, args: &[&str]) -> Vec<Output> {
    burn_ddp_tests::job::job(&rank_program(RANK), world, args)
}

#[test]
fn every_world_size_follows_one_rank_with_equal_bits_on_all_ranks() {
    for optim in ["sgd", "adam"] {
        let mut one: Option<Vec<Vec<f64>>> = None;
        for world in 1..=4 {
            let outputs = job(world, &["train", optim]);
            assert!(outputs.iter().all(|o| o.status.success()), "{}", stderr(&outputs[0]));
            let hashes: Vec<_> = outputs.iter().map(|o| line(&stdout(o), "hash ").to_string()).collect();
            assert!(hashes.iter().all(|h| *h == hashes[0]), "world {world}: {hashes:?}");
            let values: Vec<Vec<f64>> = serde_json::from_str(line(&stdout(&outputs[0]), "values ")).unwrap();
            match &one {
                None => one = Some(values),
                Some(one) => {
                    let d = distance(&values, one);
                    assert!(d > 0.0 && d <= 1e-10, "{optim} world {world}: {d:e}");
                }
            }
            if world == 3 {
                let again = job(world, &["train", optim]);
                assert_eq!(line(&stdout(&again[2]), "hash "), hashes[0], "a second run has the same bits");
            }
        }
    }
}

/// Well below the deadline of a call, but enough for a slow and busy machine.
const SOON_MS: u64 = 15_000;

/// The errors of the two survivors of a job in which rank 1 fails: the milliseconds until each, and its message.
fn survivors(scenario: &str) -> Vec<(u64, String)> {
    let outputs = job(3, &[scenario]);
    [0, 2]
        .map(|r| {
            let out = stdout(&outputs[r]);
            assert!(!outputs[r].status.success(), "rank {r} did not notice: {out}");
            assert_eq!(line(&out, "again "), "true");
            let (ms, message) = line(&out, "error after ").split_once(" ms in step ").unwrap();
            (ms.parse().unwrap(), message.to_string())
        })
        .to_vec()
}

#[test]
fn a_dead_rank_is_named_by_all_others_long_before_the_deadline() {
    for scenario in ["kill", "abort"] {
        for (ms, message) in survivors(scenario) {
            assert!(ms < SOON_MS, "{scenario}: {ms} ms");
            assert!(message.contains("rank 1") && message.contains("died") && message.contains("pid"), "{message}");
            assert!(message.contains("all_reduce"), "the operation is named: {message}");
        }
    }
}

#[test]
fn a_panic_is_passed_on_and_an_early_exit_is_named() {
    for (ms, message) in survivors("panic") {
        assert!(ms < SOON_MS, "{ms} ms");
        assert!(message.contains("rank 1") && message.contains("panicked"), "{message}");
    }
    for (ms, message) in survivors("exit") {
        assert!(ms < SOON_MS, "{ms} ms");
        assert!(message.contains("rank 1"), "{message}");
    }
}

#[test]
fn breaking_out_of_an_epoch_alone_is_an_error_that_says_so() {
    let start = Instant::now();
    let outputs = job(3, &["break"]);
    assert!(start.elapsed() < Duration::from_secs(60), "nobody waits for the deadline");
    for r in [0, 2] {
        let text = stderr(&outputs[r]);
        assert!(
            text.contains("rank 1")
                && text.contains("stopped")
                && text.contains("all ranks must stop at the same step"),
            "{text}"
        );
    }
}

#[test]
fn models_that_differ_are_told_on_every_rank() {
    for output in job(2, &["differ"]) {
        let text = stderr(&output);
        assert!(text.contains("weight is [2, 1] f32 on rank 0, but [3, 1] f32 on rank 1"), "{text}");
    }
}

#[test]
fn a_rank_that_never_comes_is_named() {
    let start = Instant::now();
    let output = rank(0, 3, FreePort::reserve().port, &["hello"]).env("BURN_DDP_JOIN_TIMEOUT", "1").output().unwrap();
    assert!(start.elapsed() < Duration::from_secs(60));
    let text = stderr(&output);
    assert!(!output.status.success() && text.contains("rank 0") && text.contains('1') && text.contains('2'), "{text}");
}

#[test]
fn an_unreachable_master_and_a_port_in_use_are_told_with_the_address() {
    let held = FreePort::reserve();
    let port = held.port;
    let output = rank(1, 2, port, &["hello"]).env("BURN_DDP_JOIN_TIMEOUT", "1").output().unwrap();
    assert!(!output.status.success() && stderr(&output).contains(&format!("port {port}")), "{}", stderr(&output));

    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = taken.local_addr().unwrap().port();
    // These ranks use the port because of a variable; ranks of one machine do not need it.
    let mut told = rank(0, 2, port, &["hello"]);
    told.envs([("BURN_DDP_RANK", "0"), ("BURN_DDP_WORLD_SIZE", "2"), ("BURN_DDP_STORE", "rank0")]);
    told.env("BURN_DDP_MASTER", format!("127.0.0.1:{port}")).env("BURN_DDP_TRUST_NETWORK", "1");
    let output = told.env("BURN_DDP_JOIN_TIMEOUT", "5").output().unwrap();
    let text = stderr(&output);
    assert!(
        !output.status.success() && text.contains(&format!("127.0.0.1:{port}")) && text.contains("in use"),
        "{text}"
    );
}

#[test]
fn half_set_and_contradictory_variables_are_errors_and_nothing_is_a_world_of_one() {
    type Change<'a> = (&'a [(&'a str, &'a str)], &'a [&'a str], &'a [&'a str]);
    let cases: [Change<'_>; 4] = [
        (&[], &["MASTER_ADDR"], &["MASTER_ADDR"]),
        (&[], &["WORLD_SIZE", "MASTER_PORT"], &["WORLD_SIZE", "MASTER_PORT"]),
        (&[("RANK", "2")], &[], &["RANK", "2", "WORLD_SIZE"]),
        (&[("WORLD_SIZE", "many")], &[], &["WORLD_SIZE", "many"]),
    ];
    for (set, unset, words) in cases {
        let mut command = rank(0, 2, 1, &["hello"]);
        command.envs(set.iter().copied().collect::<HashMap<_, _>>());
        unset.iter().for_each(|name| {
            command.env_remove(name);
        });
        let output = command.output().unwrap();
        let text = stderr(&output);
        assert!(!output.status.success() && words.iter().all(|w| text.contains(w)), "{words:?}: {text}");
    }
    let mut alone = rank(0, 1, 1, &["hello"]);
    for name in ["RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"] {
        alone.env_remove(name);
    }
    assert_eq!(stdout(&alone.output().unwrap()).trim(), "rank 0 of 1 engine threads");
}

#[test]
fn a_loader_that_one_rank_cannot_build_is_every_ranks_error_and_the_job_goes_on() {
    let port = FreePort::reserve();
    let start = |r: usize| {
        let mut command = rank(r, 2, port.port, &["build"]);
        if r == 1 {
            command.env("BURN_DEVICE", "abacus");
        }
        command.spawn().unwrap()
    };
    let ranks = [0, 1].map(start);
    for (r, output) in ranks.map(|child| child.wait_with_output().unwrap()).iter().enumerate() {
        assert!(output.status.success(), "rank {r}: {}", stderr(output));
        for loader in ["training ", "evaluation "] {
            let text = stdout(output);
            let said = line(&text, loader);
            assert!(said.contains("BURN_DEVICE=abacus"), "rank {r}: {said}");
            assert!(r == 1 || said.starts_with("rank 1 cannot build its loader"), "rank {r}: {said}");
        }
    }
}
