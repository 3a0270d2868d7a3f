//! Real processes that stop and resume: batches and dropout are those of an uninterrupted run.

use std::path::Path;

use burn_ddp_tests::job::{job, line, stderr, stdout};

/// Runs a job in `dir`, which stops after `stop` steps if given; returns the model's hash and the losses of each rank.
fn train(dir: &Path, stop: Option<usize>) -> Vec<(String, Vec<f32>)> {
    let stop = stop.map(|stop| stop.to_string());
    let args: Vec<&str> = ["dropout", dir.to_str().unwrap()].into_iter().chain(stop.as_deref()).collect();
    let outputs = job(env!("CARGO_BIN_EXE_rank"), 2, &args);
    let of_rank = |output: &std::process::Output| {
        assert!(output.status.success(), "{}", stderr(output));
        let text = stdout(output);
        (line(&text, "hash ").to_string(), serde_json::from_str(line(&text, "losses ")).unwrap())
    };
    outputs.iter().map(of_rank).collect()
}

#[test]
fn dropout_goes_on_as_without_the_interruption() {
    let never = tempfile::tempdir().unwrap();
    let whole = train(never.path(), None);
    assert_eq!(whole[0].0, whole[1].0);
    assert_ne!(whole[0].1, whole[1].1, "each rank has losses of its own");
    assert_eq!(train(never.path(), None), whole, "a second run draws the same");
    // The job stops in the first epoch, at its end, and in the second epoch.
    for stop in [1, 4, 6] {
        let dir = tempfile::tempdir().unwrap();
        let first = train(dir.path(), Some(stop));
        let rest = train(dir.path(), None);
        for rank in 0..2 {
            assert_eq!([&first[rank].1[..], &rest[rank].1].concat(), whole[rank].1, "stopped after step {stop}");
            assert_eq!(rest[rank].0, whole[rank].0, "stopped after step {stop}");
        }
    }
}

/// Random numbers of each rank of a job whose program seeds its devices by `seeded_by`.
fn draws(seeded_by: &str) -> Vec<String> {
    let outputs = job(env!("CARGO_BIN_EXE_rank"), 3, &["draws", seeded_by]);
    let of_rank = |output: &std::process::Output| {
        assert!(output.status.success(), "{}", stderr(output));
        line(&stdout(output), "draws ").to_string()
    };
    outputs.iter().map(of_rank).collect()
}

#[test]
fn ranks_that_the_program_seeded_alike_draw_numbers_of_their_own_after_wrap() {
    let differ = |draws: &[String]| draws[0] != draws[1] && draws[1] != draws[2] && draws[0] != draws[2];
    for (seeded_by, repeats) in [("device", true), ("each", true), ("none", false)] {
        let first = draws(seeded_by);
        assert!(differ(&first), "seeded by {seeded_by}: {first:?}");
        assert_eq!(draws(seeded_by) == first, repeats, "seeded by {seeded_by}");
    }
}
