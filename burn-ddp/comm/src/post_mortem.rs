//! Files that a rank writes for its launcher: events while it runs, and a report when its world ends in an error.
//!
//! Both are JSON: one [`Event`] per line in the file that `BURN_DDP_EVENTS` names, one [`PostMortem`] per rank in the
//! directory that `BURN_DDP_REPORT_DIR` names. Times are since 1970.

use std::fs::{self, OpenOptions};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use serde::{Deserialize, Serialize};

use crate::private_file;

/// One line of the events file.
///
/// ```
/// use burn_ddp_comm::post_mortem::Event;
///
/// let event = Event::Suspect { rank: 0, peer: 2, silent_ms: 2100, at: 1_700_000_000_000 };
/// assert_eq!(Event::parse(&event.to_line()), Some(event));
/// assert_eq!(Event::parse("something else"), None);
/// ```
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "event", rename_all = "snake_case")]
pub enum Event {
    /// The world ended by an error. Several ranks may write this event; the first one in the file holds the cause.
    Failed {
        /// The rank that writes the event.
        rank: usize,
        /// The rank that caused the error, if that is certain.
        culprit: Option<usize>,
        /// The root cause, as errors show it.
        cause: String,
        /// Time of the event, in milliseconds.
        at: u64,
    },
    /// No sign of life has come from `peer` for some heartbeats.
    Suspect {
        /// The rank that writes the event.
        rank: usize,
        /// The silent rank.
        peer: usize,
        /// Duration of its silence, in milliseconds.
        silent_ms: u64,
        /// Time of the event, in milliseconds.
        at: u64,
    },
    /// A suspected `peer` has given a sign of life again.
    Recovered {
        /// The rank that writes the event.
        rank: usize,
        /// The rank that is back.
        peer: usize,
        /// Time of the event, in milliseconds.
        at: u64,
    },
    /// A collective has waited for longer than [`WorldOptions::stall`](crate::WorldOptions::stall). Not an error yet.
    Stall {
        /// The rank that writes the event.
        rank: usize,
        /// Ranks whose part has not arrived.
        waiting_for: Vec<usize>,
        /// The collective, and a description of what the awaited ranks do instead.
        call: String,
        /// Time since the collective began, in milliseconds.
        since_ms: u64,
        /// Time of the event, in milliseconds.
        at: u64,
    },
    /// From now on a [`StopSignal`](crate::StopSignal) lets the rank's program save and end, instead of killing it.
    CanStop {
        /// The rank that writes the event.
        rank: usize,
        /// Time of the event, in milliseconds.
        at: u64,
    },
    /// The ranks have agreed to stop, and the rank's program has been told so: it saves and ends.
    Stopping {
        /// The rank that writes the event.
        rank: usize,
        /// Time of the event, in milliseconds.
        at: u64,
    },
    /// A checkpoint is complete.
    Saved {
        /// The rank that writes the event.
        rank: usize,
        /// Path or address of the checkpoint.
        checkpoint: String,
        /// Time of the event, in milliseconds.
        at: u64,
    },
}

impl Event {
    /// This event as a line, with the newline at its end.
    pub fn to_line(&self) -> String {
        // Numbers, texts and lists of them can always be encoded.
        let mut line = serde_json::to_string(self).unwrap_or_default();
        line.push('\n');
        line
    }

    /// The event in a line; `None` if the line holds no event, such as one that is not written to its end yet.
    pub fn parse(line: &str) -> Option<Event> {
        serde_json::from_str(line).ok()
    }
}

/// Report of a rank whose world ended in an error.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct PostMortem {
    /// The rank that writes the report.
    pub rank: usize,
    /// Number of ranks in the world.
    pub world_size: usize,
    /// Id of the rank's job.
    pub job_id: String,
    /// Generation of the job, from 0.
    pub restart_count: u32,
    /// Name of the rank's machine.
    pub host: String,
    /// Id of the rank's process.
    pub pid: u32,
    /// Time of the end, in milliseconds.
    pub at: u64,
    /// The root cause, as errors show it.
    pub cause: String,
    /// The rank that caused the error, if that is certain.
    pub culprit: Option<usize>,
    /// The rank's step, if the program sets it; see [`World::set_step`](crate::World::set_step).
    pub step: Option<u64>,
    /// Collectives that the rank was in when the world ended.
    pub pending: Vec<Pending>,
    /// State of the other ranks, as far as this rank knew it.
    pub peers: Vec<PeerState>,
    /// The rank's last collectives, oldest first.
    pub history: Vec<Record>,
}

/// A collective that had not ended.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Pending {
    /// The call, as errors show it.
    pub call: String,
    /// Its group.
    pub group: u64,
    /// Its number in the group.
    pub sequence: u64,
    /// Time since it began, in milliseconds.
    pub since_ms: u64,
    /// Ranks whose part had not arrived. If this rank waited for a rank that was itself waiting in the same call, the
    /// list names the ranks for which that rank waited instead.
    pub waiting_for: Vec<usize>,
}

/// State of another rank, as far as it is known.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct PeerState {
    /// The other rank.
    pub rank: usize,
    /// Name of its machine.
    pub host: String,
    /// Id of its process.
    pub pid: u32,
    /// Time since its last sign of life, in milliseconds; `None` if it lives in the same process or never gave one.
    pub last_heard_ms: Option<u64>,
    /// True if it had left with a goodbye.
    pub left: bool,
    /// Collectives that it was in, as of its last heartbeat.
    pub pending: Vec<String>,
    /// Its step, as of its last heartbeat.
    pub step: Option<u64>,
}

/// A collective that has ended or is under way.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Record {
    /// Its group.
    pub group: u64,
    /// Its number among the calls of the group; for a call between two ranks, among the calls of these two.
    pub sequence: u64,
    /// The other rank, for a call between two ranks.
    #[serde(default)]
    pub peer: Option<usize>,
    /// The ranks of its group; empty if that is the whole world.
    #[serde(default)]
    pub ranks: Vec<usize>,
    /// Operation, dtype, length and root.
    pub call: String,
    /// `file:line:column` of the call.
    pub site: String,
    /// Training step of the call, if the program sets it.
    pub step: Option<u64>,
    /// Time at which it began, in microseconds.
    pub started: u64,
    /// Its duration, in microseconds; `None` while it is under way.
    pub took_us: Option<u64>,
    /// True if it ended without an error.
    pub ok: bool,
}

impl PostMortem {
    /// Path of the report of `rank` in `dir`.
    pub fn path(dir: &Path, rank: usize) -> PathBuf {
        dir.join(format!("rank-{rank}.json"))
    }

    /// Reads a report.
    ///
    /// # Errors
    /// Those of reading the file; `InvalidData` if the file does not hold a report.
    pub fn read(path: &Path) -> io::Result<PostMortem> {
        Ok(serde_json::from_slice(&fs::read(path)?)?)
    }

    /// Writes the report to its [path](Self::path) in `dir`, which is created if needed. Readers see all of it or
    /// nothing.
    ///
    /// # Errors
    /// Those of writing the file.
    pub fn write(&self, dir: &Path) -> io::Result<()> {
        fs::create_dir_all(dir)?;
        let unfinished = dir.join(format!(".rank-{}.{}.tmp", self.rank, std::process::id()));
        let text = serde_json::to_vec_pretty(self)?;
        let written = private_file::create(&unfinished)
            .and_then(|mut file| file.write_all(&text))
            .and_then(|()| fs::rename(&unfinished, PostMortem::path(dir, self.rank)));
        written.inspect_err(|_| drop(fs::remove_file(&unfinished)))
    }
}

/// Appends `event` to `file` in one write, so that lines of several processes do not mix.
pub(crate) fn append(file: &Path, event: &Event) -> io::Result<()> {
    OpenOptions::new().append(true).open(file)?.write_all(event.to_line().as_bytes())
}

/// Milliseconds since 1970, the times of events.
///
/// ```
/// assert!(burn_ddp_comm::post_mortem::now_ms() > 1_700_000_000_000);
/// ```
pub fn now_ms() -> u64 {
    since_1970().as_millis() as u64
}

/// Time since 1970; zero if the clock is set to before.
pub(crate) fn since_1970() -> Duration {
    SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default()
}

/// Whole milliseconds of `time`.
pub(crate) fn millis(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn events_are_lines_of_json_that_name_their_kind() {
        let events = [
            (Event::Failed { rank: 1, culprit: Some(2), cause: "a\nb \"c\"".into(), at: 3 }, "failed"),
            (Event::Suspect { rank: 1, peer: 2, silent_ms: 3, at: 4 }, "suspect"),
            (Event::Recovered { rank: 1, peer: 2, at: 4 }, "recovered"),
            (Event::Stall { rank: 1, waiting_for: vec![0, 2], call: "barrier".into(), since_ms: 5, at: 6 }, "stall"),
            (Event::CanStop { rank: 1, at: 2 }, "can_stop"),
            (Event::Stopping { rank: 1, at: 2 }, "stopping"),
            (Event::Saved { rank: 0, checkpoint: "/a b/step-3".into(), at: 2 }, "saved"),
        ];
        for (event, kind) in events {
            let line = event.to_line();
            assert!(line.starts_with(&format!("{{\"event\":\"{kind}\"")) && line.lines().count() == 1, "{line}");
            assert_eq!(Event::parse(&line), Some(event.clone()));
            assert_eq!(Event::parse(&line[..line.len() / 2]), None);
        }
    }

    #[test]
    fn a_report_is_read_as_it_was_written() {
        let record = Record {
            group: 1,
            sequence: 2,
            peer: Some(1),
            ranks: vec![0, 1],
            call: "barrier".into(),
            site: "a.rs:1:1".into(),
            step: Some(3),
            started: 4,
            took_us: None,
            ok: false,
        };
        let pending = Pending { call: "barrier #2".into(), group: 1, sequence: 2, since_ms: 9, waiting_for: vec![1] };
        let peer = PeerState {
            rank: 1,
            host: "h".into(),
            pid: 7,
            last_heard_ms: Some(8),
            left: false,
            pending: vec!["all_reduce".into()],
            step: None,
        };
        let report = PostMortem {
            rank: 0,
            world_size: 2,
            job_id: "j".into(),
            restart_count: 1,
            host: "h".into(),
            pid: 6,
            at: 5,
            cause: "rank 1 died".into(),
            culprit: Some(1),
            step: Some(3),
            pending: vec![pending],
            peers: vec![peer],
            history: vec![record],
        };
        let directory = tempfile::tempdir().unwrap();
        let dir = directory.path().join("reports");
        report.write(&dir).unwrap();
        assert_eq!(PostMortem::read(&PostMortem::path(&dir, 0)).unwrap(), report);
        assert_eq!(fs::read_dir(&dir).unwrap().count(), 1, "nothing unfinished stays");
    }
}
