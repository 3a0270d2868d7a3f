//! Output of `burnrun`: all lines of every rank, each whole.
#![cfg(feature = "cli")]

#[allow(unreachable_pub, reason = "one module for several test files")]
mod common;

use std::collections::HashMap;
use std::io::Read;
use std::process::Stdio;

use common::{Job, assert_gone, burnrun, pid_in, run, script};
use rustix::process::Signal;

#[test]
fn lines_of_many_writers_stay_whole_and_in_order() {
    // Each line is written in three pieces, on both streams at once.
    let writer = r#"
        i=0; while [ $i -lt 300 ]; do
            printf 'out '; printf "$i "; printf 'abcdefghijklmnopqrstuvwxyz\n'
            { printf 'err '; printf "$i "; printf 'zyxwvutsrqponmlkjihgfedcba\n'; } >&2
            i=$((i + 1))
        done"#;
    let finished = run(&mut script(6, &[], writer));
    assert_eq!(finished.code(), 0, "{}", finished.stderr);
    let stderr = finished.stderr.lines().map(str::to_owned).collect();
    for (lines, word, alphabet) in
        [(finished.stdout, "out", "abcdefghijklmnopqrstuvwxyz"), (stderr, "err", "zyxwvutsrqponmlkjihgfedcba")]
    {
        let mut next = HashMap::<String, usize>::new();
        for line in lines {
            let (rank, text) = line.split_once("] ").unwrap_or_else(|| panic!("no prefix: {line:?}"));
            let i = next.entry(rank.to_owned()).or_default();
            assert_eq!(text, format!("{word} {i} {alphabet}"));
            *i += 1;
        }
        assert_eq!(next, (0..6).map(|rank| (format!("[rank {rank}"), 300)).collect());
    }
}

#[test]
fn the_timeline_is_put_together_when_all_ranks_have_ended() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("trace.json");
    std::fs::write(dir.path().join("trace.json.rank-1"), "left by an earlier job\n").unwrap();
    // Output of killed ranks: rank 1 dies in the middle of a line, in the second job before it has written anything.
    let part = r#"
        [ "$BURN_DDP_TIMELINE" ] || exit 9
        printf '{"rank":%s,"origin_ns":5000}\n{"ts":1.000,"ph":"i","pid":%s,"name":"a"}\n{"ts":2.0' \
            $RANK $RANK > "$BURN_DDP_TIMELINE.rank-$RANK"
        kill -KILL $$"#;
    let finished = run(&mut script(2, &["--timeline", file.to_str().unwrap()], part));
    assert_eq!(finished.code(), 137, "{}", finished.stderr);
    let trace: serde_json::Value = serde_json::from_slice(&std::fs::read(&file).unwrap()).unwrap();
    assert_eq!(trace["traceEvents"][0]["ts"], 1.0);
    let names: Vec<_> = std::fs::read_dir(dir.path()).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    assert_eq!(names, ["trace.json"]);
}

#[test]
fn unfinished_lines_and_any_bytes_come_through() {
    let mut child = script(1, &[], r"printf 'caf\351 \000\n\nno newline'").stdout(Stdio::piped()).spawn().unwrap();
    let mut stdout = Vec::new();
    child.stdout.take().unwrap().read_to_end(&mut stdout).unwrap();
    assert_eq!(stdout, b"[rank 0] caf\xe9 \0\n[rank 0] \n[rank 0] no newline\n");
    assert!(child.wait().unwrap().success());
}

#[test]
fn plain_output_has_no_prefix() {
    let finished = run(script(2, &[], "echo $RANK").env("BURNRUN_STDIO", "plain"));
    let mut stdout = finished.stdout;
    stdout.sort();
    assert_eq!(stdout, ["0", "1"]);
}

#[test]
fn the_first_rank_can_keep_stdin_and_stdout() {
    let mut command = script(2, &["--stdio", "first-rank-inherits"], r#"read -r x; echo "$RANK got '$x'""#);
    let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    std::io::Write::write_all(&mut child.stdin.take().unwrap(), b"hello\n").unwrap();
    let mut stdout = String::new();
    child.stdout.take().unwrap().read_to_string(&mut stdout).unwrap();
    let mut lines: Vec<_> = stdout.lines().collect();
    lines.sort_unstable();
    assert_eq!(lines, ["0 got 'hello'", "[rank 1] 1 got ''"]);
    assert!(child.wait().unwrap().success());
}

#[test]
fn a_stray_process_that_keeps_the_output_open_does_not_hold_the_job() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("pid");
    let stray = "trap '' TERM; echo $$ >$FILE; while :; do sleep 0.1; done";
    let program = format!("setsid sh -c '{}' & printf unfinished", stray.replace('\'', r"'\''"));
    let finished = run(script(1, &[], &program).env("FILE", &file));
    assert_eq!((finished.code(), finished.stdout), (0, vec!["[rank 0] unfinished".to_owned()]));
    assert_gone(pid_in(&file));
}

#[test]
fn the_last_lines_of_a_leftover_process_are_shown() {
    // As with `exec > >(tee log)`: the rank ends before the process that passes its output on.
    let finished = run(&mut script(1, &[], "(sleep 0.2; echo late) & exit 0"));
    assert_eq!((finished.code(), finished.stdout), (0, vec!["[rank 0] late".to_owned()]));
}

#[test]
fn ranks_notice_when_nobody_reads_their_output() {
    let mut job = script(2, &[], "while echo line; do :; done 2>/dev/null; exit 9")
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    drop(job.stdout.take());
    let mut stderr = String::new();
    job.stderr.take().unwrap().read_to_string(&mut stderr).unwrap();
    let code = job.wait().unwrap().code();
    // The shell ends by SIGPIPE, or with 9 if that signal is ignored.
    assert!(matches!(code, Some(141 | 9)), "{code:?}: {stderr}");
    assert!(stderr.contains("burnrun: some output was lost, since writing to stdout failed"), "{stderr}");
}

#[test]
fn output_appears_while_the_rank_still_runs() {
    let job = Job::start(&mut script(1, &[], "echo first; sleep 60"));
    assert_eq!(job.line(), "[rank 0] first");
    job.signal(Signal::TERM);
    assert_eq!(job.finish().code(), 143);
}

#[test]
fn help_and_version_say_what_is_needed() {
    let help = run(&mut burnrun(["--help"])).stdout.join("\n");
    for word in ["Examples:", "BURN_DDP_RANK", "MASTER_PORT", "BURNRUN_GRACE", "Exit code, the same", "--standalone"] {
        assert!(help.contains(word), "{word} is missing in\n{help}");
    }
    assert_eq!(run(&mut burnrun(["--version"])).stdout, [format!("burnrun {}", env!("CARGO_PKG_VERSION"))]);
}
