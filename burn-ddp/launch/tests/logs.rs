//! Output in files, and the report of a failure.
#![cfg(feature = "cli")]

#[allow(unreachable_pub, reason = "one module for several test files")]
mod common;

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::time::{Duration, SystemTime};

use common::{Job, burnrun, run, script};
use rustix::process::{Signal, kill_process};

fn read(dir: &Path, name: &str) -> String {
    let path = dir.join("latest").join(name);
    fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

/// `burnrun` with `--log-dir`.
fn logged(dir: &Path, nproc: usize, options: &[&str], program: &str) -> std::process::Command {
    let options = [&["--log-dir", dir.to_str().unwrap()], options].concat();
    script(nproc, &options, program)
}

const SPEAK: &str = "printf 'out %s\\nunfinished' $RANK; echo err $RANK >&2";

#[test]
fn everything_goes_to_files_and_console() {
    let dir = tempfile::tempdir().unwrap();
    let finished = run(&mut logged(dir.path(), 2, &[], SPEAK));
    assert_eq!((finished.code(), finished.stdout.len()), (0, 4));
    for rank in 0..2 {
        let (out, err) = (format!("rank-{rank}.stdout.log"), format!("rank-{rank}.stderr.log"));
        assert_eq!(read(dir.path(), &format!("generation-0/{out}")), format!("out {rank}\nunfinished"));
        assert_eq!(read(dir.path(), &format!("generation-0/{err}")), format!("err {rank}\n"));
    }
    assert!(!dir.path().join("latest/report.md").exists(), "nothing failed");
}

#[test]
fn redirects_tee_and_filter_choose() {
    let dir = tempfile::tempdir().unwrap();
    for (options, shown, file) in [
        (&["--redirects", "1"][..], &["[rank 0] err 0", "[rank 1] err 1"][..], true),
        (&["-r", "3"], &[], true),
        (&["-r", "3", "-t", "1:2"], &["[rank 1] err 1"], true),
        (&["--local-ranks-filter", "1"], &["[rank 1] err 1", "[rank 1] out 1"], true),
        (&["--tee", "2"], &["[rank 0] err 0", "[rank 0] out 0", "[rank 1] err 1", "[rank 1] out 1"], false),
    ] {
        let finished = run(&mut logged(dir.path(), 2, options, "echo out $RANK; echo err $RANK >&2"));
        let mut lines: Vec<_> = finished.stdout.iter().map(String::as_str).chain(finished.stderr.lines()).collect();
        lines.sort_unstable();
        assert_eq!(lines, shown, "{options:?}");
        assert_eq!(dir.path().join("latest/generation-0/rank-0.stdout.log").exists(), file, "{options:?}");
    }
    let jobs = fs::read_dir(dir.path()).unwrap().filter(|entry| entry.as_ref().unwrap().file_type().unwrap().is_dir());
    assert_eq!(jobs.count(), 5, "each job has a directory of its own");
}

#[test]
fn output_of_a_local_rank_that_does_not_exist_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    for options in [["--local-ranks-filter", "0,7"], ["--redirects", "7:3"], ["--tee", "7:1"]] {
        let finished = run(&mut logged(dir.path(), 2, &options, "echo started"));
        assert_eq!((finished.code(), finished.stdout.len()), (2, 0), "{options:?}");
        assert!(finished.stderr.contains("no local rank 7"), "{}", finished.stderr);
        assert!(finished.stderr.contains("this machine has 0 to 1"), "{}", finished.stderr);
    }
}

#[test]
fn commands_say_their_whole_name_and_what_they_need() {
    let empty = tempfile::tempdir().unwrap();
    let nowhere = empty.path().join("nowhere");
    for (dir, part) in
        [(nowhere.as_path(), "no such directory; give the --log-dir of the job"), (empty.path(), "no job")]
    {
        let finished = run(&mut burnrun([std::ffi::OsStr::new("report"), dir.as_os_str()]));
        assert_eq!(finished.code(), 1);
        assert!(finished.stderr.contains(part), "{}", finished.stderr);
    }
    for (command, usage) in [("secret", "Usage: burnrun secret <FILE>"), ("report", "Usage: burnrun report <DIR>")] {
        let finished = run(&mut burnrun([command]));
        assert_eq!(finished.code(), 2);
        assert!(finished.stderr.contains(usage), "{}", finished.stderr);
    }
}

#[test]
fn files_need_a_directory() {
    for option in ["--redirects", "--tee"] {
        let finished = run(&mut script(1, &[option, "3"], "echo started"));
        assert_eq!((finished.code(), finished.stdout.len()), (2, 0));
        assert!(finished.stderr.contains("--log-dir DIR"), "{}", finished.stderr);
    }
    let finished = run(&mut logged(Path::new("/proc/nowhere"), 1, &[], "echo started"));
    assert_eq!((finished.code(), finished.stdout.len()), (1, 0));
    assert!(finished.stderr.contains("cannot write to /proc/nowhere"), "{}", finished.stderr);
}

const PANIC: &str = r#"
    [ $RANK = 1 ] || exec sleep 600
    exec >&2
    echo "epoch 3"
    echo "thread 'main' (77) panicked at src/train.rs:88:13:"
    echo "index out of bounds"
    echo "stack backtrace:"
    i=0; while [ $i -lt 40 ]; do
        echo "  $i: core::ops::function"; echo "             at /rustc/x.rs:1:2"; i=$((i + 1))
    done
    exit 101"#;

#[test]
fn a_panic_is_named_though_a_backtrace_follows_it() {
    let dir = tempfile::tempdir().unwrap();
    let finished = run(&mut logged(dir.path(), 2, &["--grace", "60"], PANIC));
    assert_eq!(finished.code(), 101);
    let report: Vec<_> = finished.stderr.lines().filter_map(|line| line.strip_prefix("burnrun: ")).collect();
    assert!(report[0].starts_with("rank 1 (host "), "{report:?}");
    assert_eq!(report[1], "it panicked at src/train.rs:88:13: index out of bounds");
    let job = fs::canonicalize(dir.path().join("latest")).unwrap();
    let lines = [
        "the last lines that rank 1 wrote to stderr:".to_owned(),
        "  epoch 3".to_owned(),
        format!("stderr of rank 1: {}", job.join("generation-0/rank-1.stderr.log").display()),
        format!("report: {}", job.join("report.md").display()),
    ];
    for line in lines {
        assert!(report.contains(&&line[..]), "{line} is missing in {report:?}");
    }
    let written = read(dir.path(), "report.md");
    let first = written.lines().next().unwrap();
    assert!(
        first.starts_with("# rank 1 (host ") && first.ends_with("panicked at src/train.rs:88:13: index out of bounds")
    );
    assert!(written.contains("(stopped by the launcher)"), "{written}");
}

#[test]
fn a_report_can_be_built_again_and_after_the_launcher_was_killed() {
    let dir = tempfile::tempdir().unwrap();
    assert_eq!(run(&mut logged(dir.path(), 1, &[], "exit 4")).code(), 4);
    let written = read(dir.path(), "report.md");
    fs::remove_file(dir.path().join("latest/report.md")).unwrap();
    for from in [dir.path().to_owned(), dir.path().join("latest")] {
        let rebuilt = run(&mut burnrun([std::ffi::OsStr::new("report"), from.as_os_str()]));
        assert_eq!((rebuilt.code(), rebuilt.stdout.join("\n") + "\n"), (0, written.clone()));
    }

    let job = Job::start(&mut logged(dir.path(), 1, &[], "echo ready; sleep 60"));
    job.line();
    job.signal(Signal::KILL);
    std::thread::sleep(Duration::from_millis(100));
    let rebuilt = run(&mut burnrun([std::ffi::OsStr::new("report"), dir.path().as_os_str()]));
    assert_eq!(rebuilt.stdout[0], "# the launcher ended before its job");

    let nothing = run(&mut burnrun(["report", "/proc"]));
    assert_eq!(nothing.code(), 1);
    assert!(nothing.stderr.contains("generation-0"), "{}", nothing.stderr);
}

#[test]
fn no_temporary_file_stays_behind() {
    let tmp = tempfile::tempdir().unwrap();
    let left = || fs::read_dir(tmp.path()).unwrap().map(|entry| entry.unwrap().file_name()).collect::<Vec<_>>();
    for program in ["exit 0", "exit 1", "kill -9 $$"] {
        run(script(2, &["--max-restarts", "1"], program).env("TMPDIR", tmp.path()));
        assert_eq!(left(), [""; 0], "{program}");
    }
    let job = Job::start(script(2, &[], "echo ready; sleep 60").env("TMPDIR", tmp.path()));
    job.lines(2);
    job.signal(Signal::KILL);
    common::poll_until("the guardian has cleaned up", || left().is_empty().then_some(()));
}

#[test]
fn a_temporary_directory_goes_before_the_search_for_processes() {
    let (tmp, programs) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    // The search takes as long as this program, for which it looks first.
    let (grep, done) = (programs.path().join("grep"), programs.path().join("done"));
    fs::write(&grep, "#!/bin/sh\nwhile [ -d \"${0%/*}\" ] && [ ! -e \"${0%/*}/done\" ]; do sleep 0.02; done\n")
        .unwrap();
    fs::set_permissions(&grep, fs::Permissions::from_mode(0o755)).unwrap();
    let path = format!("{}:{}", programs.path().display(), std::env::var("PATH").unwrap());
    let job = Job::start(script(1, &[], "echo ready; sleep 60").env("TMPDIR", tmp.path()).env("PATH", path));
    job.lines(1);
    job.signal(Signal::KILL);
    common::poll_until("the directory is gone", || fs::read_dir(tmp.path()).unwrap().next().is_none().then_some(()));
    fs::write(done, "").unwrap();
}

/// If the guardian is killed too (memory runs out, or the machine goes down), a directory is left behind.
#[test]
fn the_next_job_removes_the_directory_of_a_launcher_killed_with_its_guardian() {
    let tmp = tempfile::tempdir().unwrap();
    let left = || fs::read_dir(tmp.path()).unwrap().map(|entry| entry.unwrap().path()).collect::<Vec<_>>();
    let start = || {
        let job = Job::start(script(1, &[], "echo ready; sleep 60").env("TMPDIR", tmp.path()));
        job.lines(1);
        job
    };
    let two_hours_ago = SystemTime::now() - Duration::from_secs(7200);
    let alive = start();
    let of_alive = left();
    let killed = start();
    kill_process(common::child_of(killed.pid(), "burnrun-guardian").expect("a guardian"), Signal::KILL).unwrap();
    killed.signal(Signal::KILL);
    killed.finish();
    assert_eq!(left().len(), 2);
    left().iter().for_each(|path| fs::File::open(path).unwrap().set_modified(two_hours_ago).unwrap());
    run(script(1, &[], "exit 0").env("TMPDIR", tmp.path()));
    assert_eq!(left(), of_alive);
    alive.signal(Signal::TERM);
    alive.finish();
    assert_eq!(left().len(), 0);
}
