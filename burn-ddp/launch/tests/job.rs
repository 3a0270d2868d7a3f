//! A job from start to end: the variables of each rank, the rank that failed, the exit code.
#![cfg(feature = "cli")]

#[allow(unreachable_pub, reason = "one module for several test files")]
mod common;

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::PermissionsExt;

use burn_ddp_comm::{LaunchEnv, Meeting};
use common::{Job, burnrun, run, script};

/// The environment that each rank prints with `env`, by rank.
fn environments(lines: &[String]) -> Vec<BTreeMap<String, String>> {
    let mut found = BTreeMap::<usize, BTreeMap<String, String>>::new();
    for line in lines {
        let (rank, text) = line.strip_prefix("[rank ").and_then(|rest| rest.split_once("] ")).expect("a prefix");
        let variables = found.entry(rank.parse().unwrap()).or_default();
        variables.extend(text.split_once('=').map(|(name, value)| (name.to_owned(), value.to_owned())));
    }
    found.into_values().collect()
}

#[test]
fn each_rank_gets_its_variables() {
    let mut command = script(3, &["--standalone", "--encrypt"], "env");
    command.env("TORCHELASTIC_USE_AGENT_STORE", "True").env("OMPI_COMM_WORLD_RANK", "7").env("PMI_RANK", "7");
    let finished = run(command.env("OMP_NUM_THREADS", "5").env("MINE", "kept"));
    assert_eq!(finished.code(), 0);
    let ranks = environments(&finished.stdout);
    assert_eq!(ranks.len(), 3);
    let cores = std::thread::available_parallelism().unwrap().get();
    for (rank, variables) in ranks.iter().enumerate() {
        let env = LaunchEnv::from_lookup(&|name| variables.get(name).cloned()).unwrap().unwrap();
        assert_eq!(
            (env.rank, env.world_size, env.local_rank, env.local_world_size, env.node_rank),
            (rank, 3, rank, 3, 0)
        );
        assert_eq!(env.launcher, "burnrun");
        assert!(matches!(&env.meeting, Meeting::Launcher { host, port: 1.. } if host == "127.0.0.1"), "{env:?}");
        assert_eq!(variables["MASTER_ADDR"], "127.0.0.1");
        assert_eq!(variables["RANK"], rank.to_string());
        assert_eq!(variables["RAYON_NUM_THREADS"], (cores / 3).max(1).to_string());
        assert_eq!(variables["OMP_NUM_THREADS"], "5");
        // If the rank's libc is not glibc, it ignores them.
        let keeps = common::ALLOCATOR.map(|name| variables.contains_key(name));
        assert_eq!(keeps, [cfg!(all(target_os = "linux", target_pointer_width = "64")); 3]);
        assert_eq!(variables["MINE"], "kept");
        assert_eq!(variables["BURN_DDP_ENCRYPT"], "data");
        assert!(!variables.contains_key("TORCHELASTIC_USE_AGENT_STORE"));
        assert_eq!(variables["BURN_DDP_JOB_ID"], ranks[0]["BURN_DDP_JOB_ID"]);
    }
}

#[test]
fn the_number_of_ranks_comes_from_the_flag_or_the_environment() {
    let cores = std::thread::available_parallelism().unwrap().get();
    for (variable, flag, expected) in
        [("3", None, 3), ("3", Some("2"), 2), ("auto", None, cores), ("auto", Some("1"), 1)]
    {
        let mut command = burnrun(flag.map(|flag| format!("--nproc_per_node={flag}")));
        let finished = run(command.env("BURNRUN_NPROC_PER_NODE", variable).args(["sh", "-c", "echo $WORLD_SIZE"]));
        assert_eq!(finished.stdout.len(), expected, "{variable} {flag:?}");
    }
}

#[test]
fn arguments_reach_the_program_untouched() {
    let finished =
        run(&mut burnrun(["--", "sh", "-c", r#"printf '<%s>' "$@""#, "sh", "-n", "3", "--", "--help", "", "a b"]));
    assert_eq!(finished.stdout, ["[rank 0] <-n><3><--><--help><><a b>"]);
}

#[test]
fn the_first_failure_decides_and_is_explained() {
    let program = r#"
        if [ $RANK = 2 ]; then
            i=0; while [ $i -lt 20 ]; do i=$((i + 1)); echo "line $i" >&2; done
            exit 7
        fi
        trap 'exit 9' TERM; echo waiting; sleep 600 & wait"#;
    let finished = run(&mut script(4, &["--grace", "60"], program));
    assert_eq!(finished.code(), 7, "{}", finished.stderr);
    let report: Vec<_> = finished.stderr.lines().filter(|line| line.starts_with("burnrun: ")).collect();
    assert!(report[0].starts_with("burnrun: rank 2 (host "), "{report:?}");
    assert!(report[0].contains(") exited with code 7 after "), "{report:?}");
    assert!(report[0].ends_with("; stopped the other 3 ranks"), "{report:?}");
    assert_eq!(report[1], "burnrun: the last lines that rank 2 wrote to stderr:");
    let last: Vec<_> = (11..=20).map(|i| format!("burnrun:   line {i}")).collect();
    assert_eq!(report[2..], last);
}

#[test]
fn a_rank_killed_by_a_signal_gives_128_plus_the_signal() {
    let finished = run(&mut script(2, &["--grace", "0.1"], "[ $RANK = 0 ] || kill -KILL $$; sleep 600"));
    assert_eq!(finished.code(), 137);
    assert!(finished.stderr.contains(") was killed by SIGKILL after "), "{}", finished.stderr);
    assert!(finished.stderr.contains("; stopped the other rank\n"), "{}", finished.stderr);
    assert!(finished.stderr.contains("memory runs out"), "{}", finished.stderr);
}

#[test]
fn the_others_may_end_with_their_own_errors() {
    let dir = tempfile::tempdir().unwrap();
    let program = r#"
        if [ $RANK = 1 ]; then touch "$FILE"; exit 5; fi
        while [ ! -e "$FILE" ]; do sleep 0.02; done; sleep 0.2
        echo "I lost rank 1" >&2; exit 3"#;
    let finished = run(script(2, &[], program).env("FILE", dir.path().join("failed")));
    assert_eq!(finished.code(), 5);
    assert!(finished.stderr.contains("[rank 0] I lost rank 1\n"), "{}", finished.stderr);
    assert!(finished.stderr.contains("; the other rank ended after it\n"), "{}", finished.stderr);
    assert!(finished.stderr.contains("burnrun: after it rank 0 exited with code 3\n"), "{}", finished.stderr);
}

#[test]
fn a_sudden_death_is_the_cause_even_if_its_end_is_seen_later() {
    let dir = tempfile::tempdir().unwrap();
    let program = r#"
        if [ $RANK = 0 ]; then touch "$FILE"; exit 1; fi
        while [ ! -e "$FILE" ]; do sleep 0.02; done; sleep 0.2; kill -SEGV $$"#;
    let finished = run(script(2, &[], program).env("FILE", dir.path().join("failed")));
    assert_eq!(finished.code(), 139, "{}", finished.stderr);
    assert!(finished.stderr.contains("burnrun: rank 1 (host "), "{}", finished.stderr);
}

#[test]
fn a_rank_that_will_not_stop_is_killed() {
    let program = "trap '' TERM; [ $RANK = 0 ] && { sleep 0.3; exit 4; }; while :; do sleep 0.05; done";
    let finished = run(&mut script(3, &["--grace", "0.3"], program));
    assert_eq!(finished.code(), 4);
    assert!(
        finished.stderr.contains("burnrun: ranks 1, 2 did not end after the signal and had to be killed\n"),
        "{}",
        finished.stderr
    );
}

#[test]
fn a_rank_may_succeed_early() {
    let finished = run(&mut script(3, &[], "[ $RANK = 2 ] && sleep 0.3 && echo done; exit 0"));
    assert_eq!((finished.code(), finished.stdout), (0, vec!["[rank 2] done".to_owned()]));
    assert_eq!(finished.stderr, "");
}

#[test]
fn what_cannot_be_started_is_named() {
    let dir = tempfile::tempdir().unwrap();
    let file = |name: &str, text: &str, mode| {
        let path = dir.path().join(name);
        fs::write(&path, text).unwrap();
        fs::set_permissions(&path, PermissionsExt::from_mode(mode)).unwrap();
        path.to_str().unwrap().to_owned()
    };
    let data = file("data.bin", "x", 0o644);
    let script = file("train.py", "print()", 0o644);
    let orphan = file("orphan", "#!/no/such/interpreter\n", 0o755);
    for (program, code, part) in [
        ("no-such-program-anywhere", 127, "`no-such-program-anywhere`: no program of this name in PATH"),
        ("./no/such/program", 127, "`./no/such/program`: there is no such file"),
        (&orphan, 127, "interpreter"),
        (&data, 126, "chmod +x"),
        (&script, 126, "write `python "),
        (dir.path().to_str().unwrap(), 126, "it is a directory"),
    ] {
        let finished = run(&mut burnrun(["-n", "2", program]));
        assert_eq!(finished.code(), code, "{program}: {}", finished.stderr);
        assert!(finished.stderr.starts_with("burnrun: cannot start `"), "{}", finished.stderr);
        assert!(finished.stderr.contains(part), "{}", finished.stderr);
    }
    fs::write(dir.path().join("here"), "").unwrap();
    let finished = run(burnrun(["here"]).current_dir(dir.path()));
    assert!(finished.stderr.contains("write ./here"), "{}", finished.stderr);
}

#[test]
fn wrong_usage_ends_with_2_and_starts_nothing() {
    for (args, part) in [
        (vec!["-n", "0", "echo", "started"], "at least one rank"),
        (vec!["-n", "-2", "echo", "started"], "'-2'"),
        (vec!["-n", "5000", "echo", "started"], "5000 ranks"),
        (vec!["--grace", "soon", "echo", "started"], "number of seconds"),
        (vec!["--no-such-flag", "echo", "started"], "--no-such-flag"),
        (vec!["-n", "2", "--epochs", "1", "echo"], "options of the program come after the program"),
        (vec!["-n", "2"], "PROGRAM"),
    ] {
        let finished = run(&mut burnrun(&args));
        assert_eq!(finished.code(), 2, "{args:?}");
        assert!(finished.stderr.contains(part), "{args:?}: {}", finished.stderr);
        assert!(finished.stdout.is_empty());
    }
    let finished = run(burnrun(["true"]).env("BURNRUN_NPROC_PER_NODE", "zero"));
    assert_eq!(finished.code(), 2);
    assert!(finished.stderr.contains("BURNRUN_NPROC_PER_NODE=zero"), "{}", finished.stderr);
}

#[test]
fn two_jobs_at_once_meet_in_different_places() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("go");
    let program = r#"echo "$BURN_DDP_MASTER $BURN_DDP_JOB_ID"; while [ ! -e "$FILE" ]; do sleep 0.02; done"#;
    let start = || Job::start(script(2, &["--stdio", "plain"], program).env("FILE", &file));
    let (one, two) = (start(), start());
    // All four ranks are alive while these lines are read.
    let (places_one, places_two) = (one.lines(2), two.lines(2));
    assert_eq!(places_one[0], places_one[1]);
    assert_eq!(places_two[0], places_two[1]);
    assert_ne!(places_one[0], places_two[0]);
    fs::write(file, "").unwrap();
    assert_eq!((one.finish().code(), two.finish().code()), (0, 0));
}
