//! The ranks find each other by the variables and the store of the launcher. This test program launches itself.

use std::time::Duration;

use burn_ddp_comm::{LaunchEnv, ReduceOp, World, WorldOptions};
use burn_ddp_launch::{Launcher, Outcome, RankExit};

fn launch(nproc: usize, what: &str) -> Outcome {
    let program = std::env::current_exe().unwrap();
    Launcher::new(program, ["--exact", "as_a_rank", "--ignored", "--nocapture"])
        .env("RANK_DOES", what)
        // A backtrace takes longer to print than the others may take to end.
        .env("RUST_BACKTRACE", "0")
        .nproc(nproc)
        .grace(Duration::from_secs(3))
        .run()
        .unwrap()
}

/// The program of a launched rank.
#[test]
#[ignore = "started by the other tests"]
fn as_a_rank() {
    let what = std::env::var("RANK_DOES").expect("this is no test of its own: run the others");
    let env = LaunchEnv::detect().unwrap().expect("the launcher's variables");
    let options = WorldOptions {
        timeout: Duration::from_secs(120),
        join_timeout: Duration::from_secs(120),
        ..WorldOptions::default()
    };
    if let Some(code) = what.strip_prefix("miss ")
        && env.rank == 1
    {
        std::process::exit(code.parse().unwrap());
    }
    let world = World::join(&env, options).unwrap();
    assert_eq!((world.rank(), world.world_size()), (env.rank, env.world_size));
    let group = world.group().unwrap();
    let mut sum = [1.0_f32, world.rank() as f32];
    let reduced = group.all_reduce(&mut sum, ReduceOp::Sum);
    if what == "reduce" {
        reduced.unwrap();
        assert_eq!(sum, [3.0, 3.0]);
        return;
    }
    if world.rank() == 1 {
        std::process::exit(42);
    }
    // The death of rank 1 may already show in the first call.
    let error = reduced.and_then(|()| group.all_reduce(&mut sum, ReduceOp::Sum)).unwrap_err();
    eprintln!("{error}");
    std::process::exit(if error.rank() == Some(1) { 3 } else { 4 });
}

#[test]
fn ranks_meet_at_the_launchers_store() {
    let outcome = launch(3, "reduce");
    assert_eq!(outcome.exit_code, 0, "{outcome}");
}

#[test]
fn survivors_end_by_themselves_with_an_error_about_the_culprit() {
    let outcome = launch(3, "die");
    // A survivor may be gone before the system shows the end of the culprit.
    let first = outcome.failure.as_ref().map(|failure| (failure.rank, failure.exit));
    let mut failed: Vec<_> = first.into_iter().chain(outcome.also_failed.clone()).collect();
    failed.sort_by_key(|&(rank, _)| rank);
    assert_eq!(failed, [(0, RankExit::Code(3)), (1, RankExit::Code(42)), (2, RankExit::Code(3))], "{outcome}");
    assert!(outcome.stopped.is_empty(), "nobody had to be told: {outcome}");
}

#[test]
fn ranks_that_are_about_to_meet_need_not_wait_for_one_that_ended() {
    for code in [0, 42] {
        let outcome = launch(3, &format!("miss {code}"));
        assert!(outcome.elapsed < Duration::from_secs(45), "far from the join timeout: {outcome}");
        let codes: Vec<_> = outcome.also_failed.iter().map(|(_, end)| *end).collect();
        assert!(outcome.exit_code != 0 && codes.contains(&RankExit::Code(101)), "{outcome}");
        assert!(outcome.stopped.is_empty(), "they ended with the error of their join: {outcome}");
    }
}
