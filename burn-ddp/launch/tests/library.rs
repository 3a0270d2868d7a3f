//! The launcher inside another program.

use std::time::Duration;

use burn_ddp_launch::{LaunchError, Launcher, RankExit, Stdio};

#[test]
fn the_outcome_says_it_all() {
    let script = r#"[ "$BURN_DDP_RANK" = 0 ] && { echo why >&2; exit 6; }; sleep 600"#;
    let outcome = Launcher::new("sh", ["-c", script]).nproc(3).grace(Duration::from_secs(60)).run().unwrap();
    assert_eq!((outcome.exit_code, outcome.nproc), (6, 3));
    let failure = outcome.failure.as_ref().unwrap();
    assert_eq!((failure.rank, failure.exit, failure.running), (0, RankExit::Code(6), 2));
    assert_eq!(failure.last_lines, ["why"]);
    assert_eq!((&outcome.stopped[..], &outcome.killed[..]), (&[1, 2][..], &[][..]));
    assert_eq!(outcome.interrupted_by, None);
    assert!(outcome.elapsed < Duration::from_secs(45), "{outcome}");
}

#[test]
fn variables_can_be_added_but_those_of_the_job_win() {
    let script = r#"[ "$MINE" = yes ] && [ "$RAYON_NUM_THREADS" = 77 ] && [ "$RANK" = 0 ] &&
        [ "$MALLOC_TRIM_THRESHOLD_" = 4096 ] && [ -z "${MALLOC_MMAP_THRESHOLD_+set}${MALLOC_ARENA_MAX+set}" ]"#;
    let outcome = Launcher::new("sh", ["-c", script])
        .env("MINE", "yes")
        .env("RAYON_NUM_THREADS", "77")
        .env("MALLOC_TRIM_THRESHOLD_", "4096")
        .env("MALLOC_MMAP_THRESHOLD_", "")
        .env("RANK", "5")
        .run()
        .unwrap();
    assert_eq!(outcome.exit_code, 0, "{outcome}");
}

#[test]
fn several_launchers_run_in_one_process() {
    let codes: Vec<_> = std::thread::scope(|scope| {
        let launch = |code: i32| move || Launcher::new("sh", ["-c", &format!("sleep 0.5; exit {code}")]).nproc(2).run();
        let jobs: Vec<_> = (0..3).map(|code| scope.spawn(launch(code))).collect();
        jobs.into_iter().map(|job| job.join().unwrap().unwrap().exit_code).collect()
    });
    assert_eq!(codes, [0, 1, 2]);
}

#[test]
fn without_relayed_output_there_is_no_wait_for_it() {
    let outcome = Launcher::new("sh", ["-c", "exit 3"]).stdio(Stdio::FirstRankInherits).run().unwrap();
    let failure = outcome.failure.unwrap();
    assert_eq!((failure.exit, failure.last_lines.len()), (RankExit::Code(3), 0));
}

#[test]
fn what_cannot_start_is_an_error() {
    let none = Launcher::new("true", [""; 0]).nproc(0).run().unwrap_err();
    assert!(matches!(none, LaunchError::BadRankCount { nproc: 0, .. }), "{none}");
    let missing = Launcher::new("no-such-program-anywhere", [""; 0]).nproc(2).run().unwrap_err();
    assert!(matches!(missing, LaunchError::ProgramNotFound { .. }), "{missing}");
    assert_eq!((none.exit_code(), missing.exit_code()), (2, 127));
}
