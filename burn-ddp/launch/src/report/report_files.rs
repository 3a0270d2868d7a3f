//! Files of a job in its log directory. Launchers write them; `burnrun report` rebuilds the report from them alone.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use burn_ddp_comm::post_mortem::{Event, PostMortem};
use serde::{Deserialize, Serialize};

use crate::error::LaunchError;
use crate::node_outcome::NodeOutcome;
use crate::nodes::GenerationPlan;
use crate::output::log_dir::JobDir;
use crate::report::markdown;
use crate::report::outcome::Outcome;
use crate::report::outcome_text::{ranks, seconds};

/// Outcome of a generation, in the file `outcome.json`.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct GenerationRecord {
    pub(crate) generation: u32,
    #[serde(rename = "start")]
    pub(crate) plan: GenerationPlan,
    #[serde(rename = "seen")]
    pub(crate) nodes: Vec<NodeOutcome>,
    pub(crate) outcome: Outcome,
}

/// Content of all files of a generation.
#[derive(Debug)]
pub(crate) struct GenerationReport {
    pub(crate) generation: u32,
    pub(crate) dir: PathBuf,
    /// `None` if node 0's launcher was killed before it wrote the record.
    pub(crate) record: Option<GenerationRecord>,
    pub(crate) reports: Vec<PostMortem>,
    pub(crate) events: Vec<Event>,
}

/// The reports that this machine's ranks wrote when their world ended.
pub(crate) fn read_reports(dir: &Path, own: &NodeOutcome) -> Vec<PostMortem> {
    own.ranks.iter().filter_map(|rank| PostMortem::read(&PostMortem::path(dir, rank.rank)).ok()).collect()
}

/// Lines that say for whom each surviving rank had waited when its world ended: waits of at least a second, except in
/// the call that the failure's cause names. Shorter ones are left out: each rank's own error explains them.
pub(crate) fn long_waits(outcome: &Outcome, reports: &[PostMortem]) -> Vec<String> {
    let cause = outcome.failure.as_ref().and_then(|failure| failure.cause.as_deref()).unwrap_or_default();
    let is_news = |report: &&PostMortem| {
        report.pending.first().is_some_and(|pending| pending.since_ms >= 1000 && !cause.contains(&pending.call))
    };
    waiting(outcome, &reports.iter().filter(is_news).cloned().collect::<Vec<_>>())
}

/// Waits of the surviving ranks, a line each.
pub(crate) fn waiting(outcome: &Outcome, reports: &[PostMortem]) -> Vec<String> {
    const SHOWN: usize = 8;
    let culprit = outcome.failure.as_ref().map(|failure| failure.rank);
    let mut lines: Vec<_> =
        reports.iter().filter(|report| Some(report.rank) != culprit).filter_map(waited_for).collect();
    let more = lines.len().saturating_sub(SHOWN);
    lines.truncate(SHOWN);
    lines.extend((more > 0).then(|| format!("{more} more ranks were waiting")));
    lines
}

/// `rank 0 waited 1.2 s for rank 1 in all_reduce #5 …`.
fn waited_for(report: &PostMortem) -> Option<String> {
    let pending = report.pending.first()?;
    let whom =
        if pending.waiting_for.is_empty() { String::new() } else { format!(" for {}", ranks(&pending.waiting_for)) };
    let waited = seconds(std::time::Duration::from_millis(pending.since_ms));
    Some(format!("rank {} had waited {waited}{whom} in {}", report.rank, pending.call))
}

/// Writes the files of a generation, and the report if something failed. Errors are logged and do not fail the job.
pub(crate) fn store(job_dir: &JobDir, record: &GenerationRecord, reports: &[PostMortem]) -> Option<PathBuf> {
    let written = (|| {
        let dir = job_dir.generation(record.generation)?;
        for report in reports.iter().filter(|report| !PostMortem::path(&dir, report.rank).exists()) {
            report.write(&dir)?;
        }
        write_whole(&dir.join("outcome.json"), &serde_json::to_vec_pretty(record)?)?;
        write_report(job_dir.path())
    })();
    written.unwrap_or_else(|error: io::Error| {
        tracing::warn!(%error, dir = %job_dir.path().display(), "the report cannot be written");
        None
    })
}

/// Builds the report of a job from the files in `dir`: the directory of the job, or a log directory, whose latest job
/// is taken. Writes the report into the job's directory as `report.md`; returns its path and text.
///
/// # Errors
///
/// [`LaunchError::NoReport`] if `dir` holds no job, or no rank of the job has failed; [`LaunchError::LogDir`] if the
/// files cannot be read or the report cannot be written.
///
/// # Example
///
/// ```
/// use burn_ddp_launch::{Launcher, rebuild_report};
///
/// let logs = tempfile::tempdir()?;
/// Launcher::new("sh", ["-c", "exit 7"]).log_dir(logs.path()).run()?;
/// let (path, text) = rebuild_report(logs.path())?;
/// assert!(path.ends_with("report.md") && text.contains("exited with code 7"));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub fn rebuild_report(dir: &Path) -> Result<(PathBuf, String), LaunchError> {
    let failed = |path: &Path, source| LaunchError::LogDir { path: path.to_owned(), source };
    if !dir.is_dir() {
        let reason = if dir.exists() { "not a directory" } else { "no such directory" };
        let reason = format!("{reason}; give the --log-dir of the job, or the directory of one job in it");
        return Err(LaunchError::NoReport { path: dir.to_owned(), reason });
    }
    let of_job = [dir.to_owned(), dir.join("latest")].into_iter().find(|dir| dir.join("generation-0").is_dir());
    let Some(job_dir) = of_job else {
        let message = "no job has left its files here (a job's directory holds `generation-0`): give the --log-dir of \
                       the job, or the directory of one job in it";
        return Err(LaunchError::NoReport { path: dir.to_owned(), reason: message.into() });
    };
    let job_dir = job_dir.canonicalize().map_err(|source| failed(&job_dir, source))?;
    match write_report(&job_dir).map_err(|source| failed(&job_dir, source))? {
        Some(path) => {
            let text = fs::read_to_string(&path).map_err(|source| failed(&path, source))?;
            Ok((path, text))
        }
        None => Err(LaunchError::NoReport { path: job_dir, reason: "no rank of this job has failed".into() }),
    }
}

/// Builds and writes the report; `None` if there is no failure to report.
fn write_report(job_dir: &Path) -> io::Result<Option<PathBuf>> {
    let mut chapters = Vec::new();
    for generation in 0.. {
        let dir = job_dir.join(format!("generation-{generation}"));
        if !dir.is_dir() {
            break;
        }
        chapters.push(read_chapter(generation, dir)?);
    }
    let Some(text) = markdown::report(&chapters) else { return Ok(None) };
    let path = job_dir.join("report.md");
    write_whole(&path, text.as_bytes())?;
    Ok(Some(path))
}

fn read_chapter(generation: u32, dir: PathBuf) -> io::Result<GenerationReport> {
    let (mut reports, mut events) = (Vec::new(), Vec::new());
    for entry in fs::read_dir(&dir)? {
        let path = entry?.path();
        let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
        if name.starts_with("rank-") && name.ends_with(".json") {
            // Unfinished files, and files of other programs, are left out.
            reports.extend(PostMortem::read(&path).ok());
        } else if name.starts_with("events-") {
            events.extend(String::from_utf8_lossy(&fs::read(&path)?).lines().filter_map(Event::parse));
        }
    }
    reports.sort_by_key(|report| report.rank);
    let record = fs::read(dir.join("outcome.json")).ok().and_then(|bytes| serde_json::from_slice(&bytes).ok());
    Ok(GenerationReport { generation, dir, record, reports, events })
}

/// Builds the report of a generation whose record is `bytes`.
#[cfg(feature = "fuzzing")]
pub(crate) fn fuzz(bytes: &[u8]) {
    let record = crate::fuzzing::parse::<GenerationRecord>(bytes);
    let (reports, events) = (Vec::new(), Vec::new());
    if record.is_some() {
        markdown::report(&[GenerationReport { generation: 0, dir: PathBuf::new(), record, reports, events }]);
    }
}

/// Writes a file in one step: readers see the whole file or none.
fn write_whole(path: &Path, bytes: &[u8]) -> io::Result<()> {
    let unfinished = path.with_extension(format!("{}.tmp", std::process::id()));
    let written = fs::write(&unfinished, bytes).and_then(|()| fs::rename(&unfinished, path));
    written.inspect_err(|_| drop(fs::remove_file(&unfinished)))
}
