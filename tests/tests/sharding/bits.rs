//! Models train sharded to the bits of unsharded training, or almost.

use burn_ddp_tests::four_models::{MODELS, OPTIMIZERS, train};
use burn_ddp_tests::{distance, job};

use super::*;

fn hash(world: usize, model: &str, optim: &str, steps: usize, config: &WrapConfig) -> String {
    let hashes = Ddp::spawn(world, |ddp| Ok(train(&ddp, model, optim, steps, config)?.hash)).unwrap();
    assert!(hashes.iter().all(|hash| *hash == hashes[0]), "{model} with {optim} on {world} ranks");
    hashes[0].clone()
}

fn same(world: usize, model: &str, optim: &str, steps: usize) {
    let [whole, parts] = [WrapConfig::new(), sharded()].map(|config| hash(world, model, optim, steps, &config));
    assert_eq!(whole, parts, "{model} with {optim} on {world} ranks");
}

#[test]
fn a_transformer_of_six_blocks() {
    same(2, "deep-gpt", "adam", 12);
}

#[test]
fn every_crossing_for_100_steps() {
    for world in 1..=4 {
        for model in MODELS {
            OPTIMIZERS.into_iter().for_each(|optim| same(world, model, optim, 100));
        }
    }
}

/// From the 32nd read on, unsharded reads that follow each other may share a depth in Burn's graph, and sharded ones do
/// not. So Burn sums the gradients of a hidden state, which four gates use, in another order.
#[test]
fn a_long_recurrence_differs_in_last_bits_only() {
    let trained = |config| {
        let ranks = Ddp::spawn(2, |ddp| Ok(train(&ddp, "long-lstm", "momentum", 100, &config)?.values)).unwrap();
        assert_eq!(ranks[0], ranks[1]);
        ranks[0].clone()
    };
    let difference = distance(&trained(sharded()), &trained(WrapConfig::new()));
    assert!(difference <= 1e-6, "{difference:e}");
}

fn of_processes(world: usize, model: &str, optim: &str, steps: usize, settings: &[&str]) -> String {
    let steps = steps.to_string();
    let args = [&["bits", model, optim, &steps], settings].concat();
    let ranks = job::job(env!("CARGO_BIN_EXE_rank"), world, &args);
    let hash = |rank: &std::process::Output| {
        assert!(rank.status.success(), "{model} with {optim} on {world} ranks: {}", job::stderr(rank));
        job::stdout(rank)
    };
    let hashes: Vec<String> = ranks.iter().map(hash).collect();
    assert!(hashes.iter().all(|hash| *hash == hashes[0]), "{model} with {optim} on {world} ranks");
    hashes[0].trim().to_owned()
}

#[test]
fn processes_have_the_bits_of_threads() {
    for (settings, config) in [(&[][..], WrapConfig::new()), (&["sharded"], sharded())] {
        assert_eq!(of_processes(3, "gpt", "adam", 5, settings), hash(3, "gpt", "adam", 5, &config));
    }
}

/// `cargo test --test sharding -- --ignored`
#[test]
#[ignore = "100 steps of every crossing between processes take minutes"]
fn every_crossing_for_100_steps_between_processes() {
    for world in 1..=4 {
        for model in MODELS {
            for optim in OPTIMIZERS {
                let [whole, parts] = [&[][..], &["sharded"]].map(|args| of_processes(world, model, optim, 100, args));
                assert_eq!(whole, parts, "{model} with {optim} on {world} ranks");
            }
        }
    }
}
