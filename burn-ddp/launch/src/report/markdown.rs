//! The report of a job in Markdown, for a person. Its first line is the cause of the end.

use std::collections::BTreeMap;
use std::fmt::Write;

use burn_ddp_comm::GroupId;
use burn_ddp_comm::post_mortem::{Event, PostMortem, Record};

use crate::report::outcome::{Failure, Outcome};
use crate::report::outcome_text::{ranks, seconds};
use crate::report::report_files::{GenerationReport, waiting};
use crate::report::user_notices::Notices;

/// Largest number of collectives that are shown.
const COLLECTIVES: usize = 20;
/// Largest number of rows of the table of ranks, and of notices.
const ROWS: usize = 200;

/// Text of the report; `None` if nothing failed in any generation.
pub(crate) fn report(chapters: &[GenerationReport]) -> Option<String> {
    let failed: Vec<_> = chapters.iter().filter(|chapter| cause(chapter).is_some()).collect();
    let last = failed.last()?;
    let mut text = format!("# {}\n", one_line(&cause(last)?));
    let total = chapters.len();
    if total > 1 {
        let number = last.generation + 1;
        let _ = writeln!(text, "\nGeneration {} (the {number}. of {total}). The others:\n", last.generation);
        for chapter in chapters.iter().filter(|chapter| chapter.generation != last.generation) {
            let end = cause(chapter).unwrap_or_else(|| "all ranks succeeded".into());
            let _ = writeln!(text, "- generation {}: {}", chapter.generation, one_line(&end));
        }
    }
    chapter(&mut text, last);
    Some(text)
}

/// Cause of a generation's end.
fn cause(chapter: &GenerationReport) -> Option<String> {
    if let Some(record) = &chapter.record {
        return of_outcome(&record.outcome);
    }
    // The launcher was killed before it could write the outcome.
    let first = chapter.events.iter().find_map(|event| match event {
        Event::Failed { cause, .. } => Some(cause.clone()),
        _ => None,
    });
    let of_report = || chapter.reports.iter().min_by_key(|report| report.at).map(|report| report.cause.clone());
    Some(first.or_else(of_report).unwrap_or_else(|| "the launcher ended before its job".into()))
}

fn of_outcome(outcome: &Outcome) -> Option<String> {
    if let Some(failure) = &outcome.failure {
        let why = failure.panics.first().map(|panic| format!("panicked at {panic}"));
        let why = why.or_else(|| failure.cause.clone()).map(|why| format!(": {why}")).unwrap_or_default();
        return Some(format!("{failure}{why}"));
    }
    let interrupted = || outcome.to_string().lines().next().map(str::to_owned);
    let ended = outcome.preempted || outcome.interrupted_by.is_some();
    outcome.trouble.clone().or_else(|| if ended { interrupted() } else { None })
}

fn chapter(text: &mut String, chapter: &GenerationReport) {
    let outcome = chapter.record.as_ref().map(|record| &record.outcome);
    let failure = outcome.and_then(|outcome| outcome.failure.as_ref());
    if let Some(cause) = failure.and_then(|failure| failure.cause.as_ref()) {
        let _ = writeln!(text, "\nCause that the ranks report: {}", one_line(cause));
    }
    waits(text, chapter, outcome);
    if let Some(failure) = failure {
        last_lines(text, failure);
    }
    ends(text, chapter);
    collectives(text, &chapter.reports);
    remarks(text, chapter);
    let _ = writeln!(text, "\n## Files\n\n`{}`: output, events and reports of the ranks.", chapter.dir.display());
}

fn waits(text: &mut String, chapter: &GenerationReport, outcome: Option<&Outcome>) {
    let lines = waiting(outcome.unwrap_or(&Outcome::default()), &chapter.reports);
    if !lines.is_empty() {
        text.push_str("\n## Waits of the other ranks\n\n");
        list(text, &lines);
    }
}

fn last_lines(text: &mut String, failure: &Failure) {
    let rank = failure.rank;
    if failure.panics.len() > 1 {
        let _ = writeln!(text, "\n## Panics of rank {rank}, in order\n");
        list(text, &failure.panics);
    }
    if !failure.last_lines.is_empty() {
        let _ = writeln!(text, "\n## The last lines of rank {rank}'s stderr\n");
        // An indented code block, which no content of a line can end.
        for line in &failure.last_lines {
            let _ = writeln!(text, "    {line}");
        }
    }
    if let Some(log) = &failure.log {
        let _ = writeln!(text, "\nAll of its stderr: `{}` on host {}.", log.display(), failure.host);
    }
}

fn ends(text: &mut String, chapter: &GenerationReport) {
    let Some(record) = &chapter.record else { return };
    let steps: BTreeMap<_, _> = chapter.reports.iter().filter_map(|report| Some((report.rank, report.step?))).collect();
    text.push_str("\n## The ranks\n\n| rank | host | pid | end | after | step |\n|---|---|---|---|---|---|\n");
    let rows = record.nodes.iter().flat_map(|node| node.ranks.iter().map(move |rank| (node, rank)));
    for (node, rank) in rows.take(ROWS) {
        let end = rank.exit.map_or("did not exit".to_owned(), |exit| exit.to_string());
        let fate = match (rank.killed, rank.stopped) {
            (true, _) => " (stopped by the launcher, then killed)",
            (_, true) => " (stopped by the launcher)",
            _ => "",
        };
        let step = steps.get(&rank.rank).map_or(String::new(), u64::to_string);
        let (number, pid, after) = (rank.rank, rank.pid, seconds(rank.after));
        let _ = writeln!(text, "| {number} | {} | {pid} | {end}{fate} | {after} | {step} |", cell(&node.host));
    }
    for trouble in record.nodes.iter().filter_map(|node| node.trouble.as_ref()) {
        let _ = writeln!(text, "\n{}", one_line(&trouble.message));
    }
}

/// The last collectives of all ranks in one table: the rows in which ranks differ show where the job went wrong.
fn collectives(text: &mut String, reports: &[PostMortem]) {
    /// Group, pair of ranks, and number of a call. Calls between two ranks are numbered per pair.
    type Key = (u64, Option<[usize; 2]>, u64);
    let mut calls: BTreeMap<Key, Vec<(usize, &Record)>> = BTreeMap::new();
    for report in reports {
        for record in &report.history {
            let pair = record.peer.map(|peer| [report.rank.min(peer), report.rank.max(peer)]);
            calls.entry((record.group, pair, record.sequence)).or_default().push((report.rank, record));
        }
    }
    if calls.is_empty() {
        return;
    }
    let all: Vec<usize> = reports.iter().map(|report| report.rank).collect();
    let mut by_time: Vec<_> = calls.into_iter().collect();
    by_time.sort_by_key(|(_, records)| records.iter().map(|(_, record)| record.started).min());
    let shown = &by_time[by_time.len().saturating_sub(COLLECTIVES)..];
    text.push_str("\n## The last collectives, the latest last\n\n");
    text.push_str(
        "Only ranks whose world ended in an error have recorded their calls.\n\n\
         | group | number | ranks | call | where | state |\n|---|---|---|---|---|---|\n",
    );
    for ((group, pair, sequence), records) in shown {
        let group = GroupId(*group);
        let mut same: BTreeMap<(&str, &str, &str), Vec<usize>> = BTreeMap::new();
        for (rank, record) in records {
            let state = match (record.ok, record.took_us) {
                (true, _) => "done",
                (false, Some(_)) => "failed",
                (false, None) => "under way",
            };
            same.entry((&record.call, &record.site, state)).or_default().push(*rank);
        }
        for ((call, site, state), who) in &same {
            let who = if *who == all { "all".to_owned() } else { ranks(who) };
            let _ = writeln!(text, "| {group} | {sequence} | {who} | {} | `{}` | {state} |", cell(call), cell(site));
        }
        let concerns = |rank: usize| match pair {
            Some(pair) => pair.contains(&rank),
            None => records.iter().all(|(_, record)| record.ranks.is_empty() || record.ranks.contains(&rank)),
        };
        let came: Vec<usize> = records.iter().map(|(rank, _)| *rank).collect();
        let absent: Vec<usize> = all.iter().copied().filter(|rank| concerns(*rank) && !came.contains(rank)).collect();
        if !absent.is_empty() {
            let _ = writeln!(text, "| {group} | {sequence} | {} | did not call it | | |", ranks(&absent));
        }
    }
}

/// Notices that were shown while the generation ran.
fn remarks(text: &mut String, chapter: &GenerationReport) {
    let Some(record) = &chapter.record else { return };
    let mut notices = Notices::default();
    let remarks: Vec<_> =
        chapter.events.iter().filter_map(|event| notices.notice(event.clone(), &record.plan)).take(ROWS).collect();
    if !remarks.is_empty() {
        text.push_str("\n## Notices while the job ran\n\n");
        list(text, &remarks);
    }
}

fn list(text: &mut String, lines: &[String]) {
    for line in lines {
        let _ = writeln!(text, "- {}", one_line(line));
    }
}

fn one_line(text: &str) -> String {
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}

/// Text that stays within a cell of a Markdown table.
fn cell(text: &str) -> String {
    one_line(text).replace('|', "\\|")
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::rank_exit::RankExit;
    use crate::report::report_files::long_waits;
    use burn_ddp_comm::post_mortem::Pending;

    fn record(sequence: u64, call: &str, took_us: Option<u64>) -> Record {
        Record {
            group: 1,
            sequence,
            peer: None,
            ranks: Vec::new(),
            call: call.into(),
            site: "src/train.rs:9:5".into(),
            step: Some(3),
            started: 1000 * sequence,
            took_us,
            ok: took_us.is_some(),
        }
    }

    fn post_mortem(rank: usize, history: Vec<Record>) -> PostMortem {
        let pending = Pending {
            call: "barrier #2 of group 1 called at src/train.rs:9:5".into(),
            group: 1,
            sequence: 2,
            since_ms: 1500,
            waiting_for: vec![1],
        };
        PostMortem {
            rank,
            world_size: 3,
            job_id: "j".into(),
            restart_count: 0,
            host: "h".into(),
            pid: 7,
            at: 5,
            cause: "rank 1 (host h, pid 8) died: connection | reset".into(),
            culprit: Some(1),
            step: Some(3),
            pending: vec![pending],
            peers: Vec::new(),
            history,
        }
    }

    #[test]
    fn the_first_line_is_the_cause_even_if_the_launcher_was_killed() {
        let history = || vec![record(1, "all_reduce (f32, sum, 8 elements)", Some(80)), record(2, "barrier", None)];
        let reports = vec![post_mortem(0, history()), post_mortem(2, history()[..1].to_vec())];
        let chapter = GenerationReport {
            generation: 0,
            dir: "logs/generation-0".into(),
            record: None,
            reports,
            events: Vec::new(),
        };
        let text = report(&[chapter]).unwrap();
        assert_eq!(text.lines().next().unwrap(), "# rank 1 (host h, pid 8) died: connection | reset");
        for line in [
            "- rank 0 had waited 1.5 s for rank 1 in barrier #2 of group 1 called at src/train.rs:9:5",
            "| 1 | 1 | all | all_reduce (f32, sum, 8 elements) | `src/train.rs:9:5` | done |",
            "| 1 | 2 | rank 0 | barrier | `src/train.rs:9:5` | under way |",
            "| 1 | 2 | rank 2 | did not call it | | |",
        ] {
            assert!(text.lines().any(|found| found == line), "{line} is missing in\n{text}");
        }
    }

    #[test]
    fn only_long_waits_that_the_cause_does_not_tell_stand_on_the_terminal() {
        let failure = |cause: &str| Failure {
            rank: 1,
            host: "h".into(),
            pid: 8,
            exit: RankExit::Code(1),
            after: Duration::from_secs(2),
            panics: Vec::new(),
            cause: Some(cause.into()),
            last_lines: Vec::new(),
            log: None,
            running: 2,
        };
        let shown = |since_ms, cause: &str| {
            let mut report = post_mortem(0, Vec::new());
            report.pending[0].since_ms = since_ms;
            long_waits(&Outcome { failure: Some(failure(cause)), ..Outcome::default() }, &[report]).len()
        };
        assert_eq!((shown(1500, "it left"), shown(900, "it left")), (1, 0));
        assert_eq!(shown(1500, "rank 0 waited 1.5 s in barrier #2 of group 1 called at src/train.rs:9:5"), 0);
    }

    #[test]
    fn who_takes_no_part_is_not_missed() {
        let of_some = |sequence, ranks: &[usize]| Record {
            group: GroupId::led_by(0, 1).0,
            ranks: ranks.to_vec(),
            ..record(sequence, "barrier", None)
        };
        let send = Record { peer: Some(2), ..record(1, "send to rank 2 (f32, 8 elements)", None) };
        let history = vec![of_some(1, &[0, 1]), send, record(1, "barrier", Some(3))];
        let reports = vec![
            post_mortem(0, history),
            post_mortem(1, vec![record(1, "barrier", Some(3))]),
            post_mortem(2, vec![record(1, "barrier", Some(3))]),
        ];
        let chapter = GenerationReport {
            generation: 0,
            dir: "logs/generation-0".into(),
            record: None,
            reports,
            events: Vec::new(),
        };
        let text = report(&[chapter]).unwrap();
        for line in [
            "| 0.1 | 1 | rank 0 | barrier | `src/train.rs:9:5` | under way |",
            "| 0.1 | 1 | rank 1 | did not call it | | |",
            "| 1 | 1 | rank 0 | send to rank 2 (f32, 8 elements) | `src/train.rs:9:5` | under way |",
            "| 1 | 1 | rank 2 | did not call it | | |",
            "| 1 | 1 | all | barrier | `src/train.rs:9:5` | done |",
        ] {
            assert!(text.lines().any(|found| found == line), "{line} is missing in\n{text}");
        }
        assert_eq!(text.matches("did not call it").count(), 2, "{text}");
    }
}
