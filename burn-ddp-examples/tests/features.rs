//! One program per feature, run as a user runs them.

mod common;

use common::{fails, shown, two_ranks};

/// The hashes of all ranks.
fn hashes(shown: &str) -> Vec<&str> {
    shown
        .lines()
        .filter_map(|line| line.split_once("parameters "))
        .map(|(_, hash)| hash)
        .filter(|hash| hash.len() == 16)
        .collect()
}

#[test]
fn accumulated_micro_batches_follow_one_batch() {
    let shown = shown(env!("CARGO_BIN_EXE_accumulation"), "");
    let lines: Vec<&str> = shown.lines().collect();
    assert_eq!(lines.len(), 2, "{shown}");
    assert!(lines[0].starts_with("16 backwards, 16 steps, "), "{shown}");
    assert!(lines[1].starts_with("64 backwards, 16 steps, "), "{shown}");
    // One reduction for four micro-batches; a few collectives more belong to the comparison of replicas.
    let collectives = |line: &str| -> u64 { line.split_whitespace().nth(4).unwrap().parse().unwrap() };
    assert_eq!(collectives(lines[0]), collectives(lines[1]), "{shown}");
}

#[test]
fn lora_trains_and_sends_its_factors_only() {
    let shown = shown(env!("CARGO_BIN_EXE_lora"), "");
    assert!(shown.contains("101770 parameters are frozen, 4200 are trained: 16"), "{shown}");
    let losses: Vec<f64> = shown.lines().filter_map(|line| line.split_once("loss ")?.1.parse().ok()).collect();
    assert!(losses.len() == 2 && losses[1] < losses[0], "{shown}");
    let hashes = hashes(&shown);
    assert!(hashes.len() == 2 && hashes[0] == hashes[1], "{shown}");
}

#[test]
fn all_ranks_stop_early_in_the_same_epoch() {
    let shown = shown(env!("CARGO_BIN_EXE_early_stopping"), "");
    let stops: Vec<&str> =
        shown.lines().filter_map(|line| line.split_once("no improvement since epoch ")).map(|(_, at)| at).collect();
    assert!(stops.len() == 2 && stops[0] == stops[1], "{shown}");
    let epochs = shown.lines().filter(|line| line.contains("test loss")).count();
    assert!((3..50).contains(&epochs), "{shown}");
}

#[test]
fn a_loop_of_ones_own_runs_alone_and_on_two_ranks() {
    let program = env!("CARGO_BIN_EXE_existing_loop");
    let [two, other] = two_ranks(program);
    for shown in [&shown(program, ""), &two] {
        let losses: Vec<f64> = shown.lines().filter_map(|line| line.split_once("loss ")?.1.parse().ok()).collect();
        assert!(losses.len() == 3 && losses.is_sorted_by(|a, b| a > b), "{shown}");
    }
    assert_eq!(other, "");
}

#[test]
fn ranks_with_uneven_data_end_equal() {
    let shown = shown(env!("CARGO_BIN_EXE_uneven_data"), "");
    assert!(shown.contains("rank 0: 16 steps, 16 missed") && shown.contains("rank 1: 32 steps, 0 missed"), "{shown}");
    let hashes = hashes(&shown);
    assert!(hashes.len() == 2 && hashes[0] == hashes[1], "{shown}");
}

#[cfg(any(feature = "ndarray", feature = "wgpu"))]
#[test]
fn ranks_on_different_devices_hold_the_same_bits() {
    let shown = shown(env!("CARGO_BIN_EXE_mixed_devices"), "");
    let devices: Vec<_> = shown.lines().filter(|line| line.contains("Device") || line.contains("Cpu")).collect();
    let hashes = hashes(&shown);
    assert!(hashes.len() >= 2 && hashes.iter().all(|hash| *hash == hashes[0]), "{shown}");
    assert!(shown.contains("epoch 2: train loss 0."), "{shown}");
    assert_eq!(devices.len(), hashes.len(), "{shown}");
}

#[test]
fn a_run_that_is_resumed_is_the_run_that_was_not_interrupted() {
    let program = env!("CARGO_BIN_EXE_checkpoint_resume");
    let dir = tempfile::tempdir().unwrap();
    let path = |name: &str| dir.path().join(name).display().to_string();
    let whole = shown(program, &path("whole"));
    assert!(whole.contains("750 steps"), "{whole}");

    // What a run leaves that was killed after step 700: its newest checkpoint but one.
    std::fs::remove_dir_all(dir.path().join("whole/step-00000750")).unwrap();
    let resumed = shown(program, &path("whole"));
    assert!(resumed.starts_with("going on after step 700\n"), "{resumed}");
    assert_eq!(hashes(&resumed), hashes(&whole));
    fails(program, "", "usage: checkpoint_resume DIRECTORY");
}

#[cfg(feature = "train")]
#[test]
fn a_metric_of_ones_own_counts_the_items_of_all_ranks() {
    let dir = tempfile::tempdir().unwrap();
    let shown = shown(env!("CARGO_BIN_EXE_custom_metric"), &dir.path().display().to_string());
    let counts: Vec<f64> = shown
        .lines()
        .filter_map(|line| {
            line.strip_prefix("epoch ")?.split_once(": ")?.1.strip_suffix(" of 1000 test items")?.parse().ok()
        })
        .collect();
    assert_eq!(counts.len(), 2, "{shown}");
    assert!(counts.iter().all(|count| count.fract() == 0.0 && *count < 200.0), "{shown}");
}
