//! A trace of all ranks' activities over time, for <https://ui.perfetto.dev> or a browser's `chrome://tracing`.
//!
//! With [`WorldOptions::timeline`](crate::WorldOptions::timeline), each rank appends its activities, while it runs, to
//! a file of its own, its part: `FILE.rank-3` for rank 3. The rank that ends last merges the parts into `FILE` and
//! removes them; a [launcher](conclude) does the same once all of its ranks have ended. A rank that is killed loses the
//! spans that it had not written: at most those in the 200 ms before its last span.
//!
//! The format is Chrome's *Trace Event Format*, as Horovod's timeline and torch's profiler write it: complete events
//! (`ph: X`) with times in µs, whose `pid` is the rank and whose `tid` is a row of that rank. Parts of several machines
//! are merged by the clocks of these machines: spans are shifted by as much as the clocks differ.

use std::fmt::Display;
use std::io;
use std::ops::Range;
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::Instant;

use crate::membership::PeerInfo;
use crate::poison_free_locks::lock;

mod merge_parts;
mod part_file;
mod rank_part_writer;

use merge_parts::merge;
use rank_part_writer::Part;

pub use merge_parts::{clear, conclude};
pub use rank_part_writer::Fact;

/// Most events that a rank records; then a note in the trace says that no more are recorded.
const MAX_EVENTS: usize = 500_000;

/// Recorder of a rank's activities; made by [`World::timeline`](crate::World::timeline). Records nothing unless the
/// timeline is enabled.
///
/// Clones record to the same part.
///
/// ```
/// use burn_ddp_comm::timeline::Fact;
/// use burn_ddp_comm::{WorldOptions, World};
/// use std::time::Instant;
///
/// let directory = tempfile::tempdir()?;
/// let file = directory.path().join("trace.json");
/// let world = World::solo(WorldOptions { timeline: Some(file.clone()), ..WorldOptions::default() });
/// world.group()?.barrier()?;
/// let began = Instant::now();
/// assert!(world.timeline().is_on());
/// world.timeline().span("my own row", "thinking", began..Instant::now(), &[("thoughts", Fact::Number(3))]);
/// world.leave();
///
/// let trace = std::fs::read_to_string(&file)?;
/// assert!(trace.contains("\"name\":\"barrier\"") && trace.contains("\"args\":{\"thoughts\":3}"));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Debug, Default)]
pub struct Timeline(Option<Arc<Recorder>>);

#[derive(Debug)]
struct Recorder {
    file: Box<Path>,
    world_size: usize,
    /// `None` once the part is closed.
    part: Mutex<Option<Part>>,
}

impl Timeline {
    /// Begins the part of the rank `me` beside `file`.
    pub(crate) fn start(file: &Path, me: &PeerInfo, world_size: usize) -> io::Result<Timeline> {
        Timeline::start_with(file, me, world_size, MAX_EVENTS)
    }

    fn start_with(file: &Path, me: &PeerInfo, world_size: usize, max_events: usize) -> io::Result<Timeline> {
        let part = Mutex::new(Some(Part::create(file, me, max_events)?));
        Ok(Timeline(Some(Arc::new(Recorder { file: file.into(), world_size, part }))))
    }

    /// True if spans are recorded. Lets a caller skip work that only prepares facts for a span.
    #[inline]
    pub fn is_on(&self) -> bool {
        self.0.is_some()
    }

    /// Records an activity during `time` in the row of this name. Spans of a row are disjoint or nested.
    ///
    /// Takes about a microsecond. Every 32 KiB, or 200 ms, a span also writes the recorded lines to the part's file.
    pub fn span(&self, row: &str, name: impl Display, time: Range<Instant>, facts: &[(&str, Fact<'_>)]) {
        let Some(recorder) = &self.0 else { return };
        if let Some(part) = &mut *lock(&recorder.part) {
            part.span(row, &name, time, facts);
        }
    }

    /// Ends the recording. Merges the parts if this was the last rank, or if the world `failed`, since other ranks may
    /// then never end theirs.
    pub(crate) fn end(&self, failed: bool) {
        let Some(recorder) = &self.0 else { return };
        let Some(part) = lock(&recorder.part).take() else { return };
        let written = part.close().and_then(|()| merge(&recorder.file, recorder.world_size, failed));
        if let Err(error) = written {
            tracing::warn!(%error, file = %recorder.file.display(), "the timeline cannot be written");
        }
    }
}

/// Merges the parts that zero bytes separate in `bytes`; the result must be JSON whatever the parts hold.
#[cfg(feature = "fuzzing")]
pub(crate) fn fuzz(bytes: &[u8]) {
    let mut trace = Vec::new();
    merge_parts::write_trace(bytes.split(|byte| *byte == 0).collect(), &mut trace).expect("memory takes it");
    serde_json::from_slice::<serde::de::IgnoredAny>(&trace).expect("a trace is JSON");
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;
    use std::time::Duration;

    use serde_json::Value;

    use super::*;

    struct Dir(tempfile::TempDir);

    impl Dir {
        fn new() -> Dir {
            Dir(tempfile::tempdir().unwrap())
        }

        fn file(&self) -> PathBuf {
            self.0.path().join("trace.json")
        }

        fn names(&self) -> Vec<String> {
            let entries = std::fs::read_dir(self.0.path()).unwrap();
            let mut names: Vec<_> = entries.map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
            names.sort();
            names
        }

        fn events(&self) -> Vec<Value> {
            let trace: Value = serde_json::from_slice(&std::fs::read(self.file()).unwrap()).unwrap();
            trace["traceEvents"].as_array().unwrap().clone()
        }
    }

    fn start(file: &Path, rank: usize, max_events: usize) -> Timeline {
        Timeline::start_with(file, &PeerInfo::here(rank, rank, 0), 2, max_events).unwrap()
    }

    fn spans(timeline: &Timeline, count: u32) {
        for nth in 0..count {
            let now = Instant::now();
            timeline.span("row \"one\"", format_args!("span {nth}"), now..now + Duration::from_nanos(1500), &[]);
        }
    }

    fn names_of(events: &[Value], rank: u64, phase: &str) -> Vec<String> {
        let of = |e: &&Value| e["pid"] == rank && e["ph"] == phase;
        events.iter().filter(of).map(|e| e["name"].as_str().unwrap().to_string()).collect()
    }

    #[test]
    fn the_last_rank_puts_the_parts_together() {
        let dir = Dir::new();
        let [one, other] = [0, 1].map(|rank| start(&dir.file(), rank, 100));
        spans(&one, 2);
        one.end(false);
        assert_eq!(dir.names(), ["trace.json.rank-0", "trace.json.rank-1"], "rank 1 goes on");
        spans(&one, 1); // too late
        spans(&other, 1);
        other.end(false);
        assert_eq!(dir.names(), ["trace.json"]);
        let events = dir.events();
        assert_eq!(names_of(&events, 0, "X"), ["span 0", "span 1"]);
        assert_eq!(names_of(&events, 1, "X"), ["span 0"]);
        let row = events.iter().find(|e| e["name"] == "thread_name").unwrap();
        assert_eq!(row["args"]["name"], "row \"one\"");
        let span = events.iter().find(|e| e["ph"] == "X").unwrap();
        assert_eq!((span["dur"].as_f64(), &span["tid"]), (Some(1.5), &row["tid"]));
        assert!(span["ts"].as_f64().unwrap() >= 0.0);
    }

    #[test]
    fn a_rank_that_was_killed_is_in_it() {
        let dir = Dir::new();
        let [one, killed] = [0, 1].map(|rank| start(&dir.file(), rank, 100));
        spans(&one, 1);
        std::thread::sleep(rank_part_writer::PATIENCE);
        spans(&killed, 1);
        // A line that was being written when the rank was killed.
        let name = part_file::part_of(&dir.file(), 1);
        let mut half = std::fs::read(&name).unwrap();
        half.extend_from_slice(b"{\"ts\":1.000,\"dur\":2.000,\"ph\":\"X\",\"pid\":1,\"name\":\"ha");
        std::fs::write(&name, half).unwrap();
        one.end(true);
        assert_eq!(names_of(&dir.events(), 1, "X"), ["span 0"]);
        assert_eq!(dir.names(), ["trace.json", "trace.json.rank-0", "trace.json.rank-1"]);
        // Its launcher knows that no rank writes any more.
        conclude(&dir.file(), 0..2, 2).unwrap();
        assert_eq!(names_of(&dir.events(), 1, "X"), ["span 0"]);
        assert_eq!(dir.names(), ["trace.json"]);
        conclude(&dir.file(), 0..2, 2).unwrap();
        assert_eq!(names_of(&dir.events(), 0, "X"), ["span 0"], "nothing new, and so nothing changes");
    }

    #[test]
    fn there_is_an_end_and_it_is_noted() {
        let dir = Dir::new();
        let one = start(&dir.file(), 0, 3);
        spans(&one, 10);
        one.end(false);
        let events = dir.events();
        assert_eq!(names_of(&events, 0, "X"), ["span 0", "span 1", "span 2"]);
        let [note] = &names_of(&events, 0, "i")[..] else { panic!("one note: {events:?}") };
        assert!(note.contains("no more is recorded") && note.contains('3'), "{note}");
    }

    #[test]
    fn what_cannot_be_written_is_an_error() {
        let dir = Dir::new();
        let nowhere = dir.0.path().join("no such directory").join("trace.json");
        assert!(Timeline::start(&nowhere, &PeerInfo::here(0, 0, 0), 1).is_err());
    }

    #[test]
    fn parts_of_other_machines_clocks_are_put_in_their_place() {
        let dir = Dir::new();
        for (rank, origin) in [(0, 5_000_000_u64), (1, 5_002_500)] {
            let line = format!(
                "{{\"rank\":{rank},\"origin_ns\":{origin}}}\n\
                 {{\"ts\":1.001,\"dur\":1.000,\"ph\":\"X\",\"pid\":{rank},\"tid\":1,\"name\":\"x\",\"args\":{{}}}}\n"
            );
            std::fs::write(part_file::part_of(&dir.file(), rank), line).unwrap();
        }
        conclude(&dir.file(), 0..2, 2).unwrap();
        let times: Vec<f64> = dir.events().iter().map(|e| e["ts"].as_f64().unwrap()).collect();
        assert_eq!(times, [1.001, 3.501]);
    }
}
