//! The part of one rank, line by line: a header, then events whose times count from the header's origin, then [`END`].

use std::fmt::Display;
use std::fs::File;
use std::io::{self, Write};
use std::ops::Range;
use std::path::Path;
use std::time::{Duration, Instant};

use super::part_file::{END, EVENT, Header, Micros, part_of};
use crate::membership::PeerInfo;
use crate::post_mortem::since_1970;
use crate::private_file;

/// Size of the buffered lines at which they are written.
const CHUNK_BYTES: usize = 32 << 10;
/// Time since the last write after which the next span writes the buffered lines.
pub(super) const PATIENCE: Duration = Duration::from_millis(200);
/// All times are multiples of this, an eighth of a microsecond. Viewers read times as binary fractions, and these are
/// exact: spans that end at the same time in the file also do so in the viewer.
const GRID_NANOS: u64 = 125;

/// A fact about a span.
#[derive(Clone, Copy, Debug)]
pub enum Fact<'a> {
    /// A count, a size in bytes, …
    Number(u64),
    /// A name, a line of the program, …
    Text(&'a str),
}

#[derive(Debug)]
pub(super) struct Part {
    rank: usize,
    /// `None` once a write has failed.
    file: Option<File>,
    origin: Instant,
    /// Lines that are not written yet. The memory is reused.
    lines: Vec<u8>,
    /// Time of the last write.
    written: Instant,
    /// Names of the rows, by number from 1.
    rows: Vec<String>,
    /// Number of events that may still be recorded.
    room: usize,
    max_events: usize,
}

impl Part {
    pub(super) fn create(file: &Path, me: &PeerInfo, max_events: usize) -> io::Result<Part> {
        // One right after the other, so that both clocks show nearly the same moment.
        let (origin, since) = (Instant::now(), since_1970());
        let mut part = Part {
            rank: me.rank,
            file: Some(private_file::create(&part_of(file, me.rank))?),
            origin,
            lines: Vec::with_capacity(2 * CHUNK_BYTES),
            written: origin,
            rows: Vec::new(),
            room: max_events,
            max_events,
        };
        let header = Header { rank: me.rank, origin_ns: on_grid(since) };
        serde_json::to_writer(&mut part.lines, &header)?;
        part.lines.push(b'\n');
        part.note("process_name", 0, ("name", &format!("rank {}", me.rank)));
        part.note("process_labels", 0, ("labels", &format!("host {}, pid {}", me.host, me.pid)));
        let line = format!(
            "{EVENT}0.000,\"ph\":\"M\",\"pid\":{0},\"name\":\"process_sort_index\",\"args\":{{\"sort_index\":{0}}}}}\n",
            me.rank
        );
        part.lines.extend_from_slice(line.as_bytes());
        part.write()?;
        Ok(part)
    }

    pub(super) fn span(&mut self, row: &str, name: &dyn Display, time: Range<Instant>, facts: &[(&str, Fact<'_>)]) {
        let (start, end) = (self.nanos(time.start), self.nanos(time.end));
        if self.room == 0 {
            return;
        }
        let row = self.row(row);
        self.room -= 1;
        let lines = &mut self.lines;
        begin(lines, start);
        put(
            lines,
            format_args!(
                "\"dur\":{},\"ph\":\"X\",\"pid\":{},\"tid\":{row},\"name\":",
                Micros(end.saturating_sub(start)),
                self.rank
            ),
        );
        text(lines, &name.to_string());
        put(lines, format_args!(",\"args\":{{"));
        for (nth, (key, fact)) in facts.iter().enumerate() {
            put(lines, format_args!("{}\"{key}\":", if nth > 0 { "," } else { "" }));
            match fact {
                Fact::Number(number) => put(lines, format_args!("{number}")),
                Fact::Text(value) => text(lines, value),
            }
        }
        put(lines, format_args!("}}}}\n"));
        if self.room == 0 {
            begin(lines, end);
            let name = format!("no more is recorded: {} events are kept per rank", self.max_events);
            put(
                lines,
                format_args!("\"ph\":\"i\",\"s\":\"p\",\"pid\":{},\"tid\":{row},\"name\":\"{name}\"}}\n", self.rank),
            );
        }
        if self.lines.len() >= CHUNK_BYTES || time.end.saturating_duration_since(self.written) >= PATIENCE {
            self.written = time.end;
            self.write_or_stop();
        }
    }

    /// Writes the rest and the end of the part.
    pub(super) fn close(mut self) -> io::Result<()> {
        self.lines.extend_from_slice(END.as_bytes());
        self.write()
    }

    fn write_or_stop(&mut self) {
        if let Err(error) = self.write() {
            tracing::warn!(%error, rank = self.rank, "the timeline ends here: it cannot be written");
            (self.file, self.room) = (None, 0);
        }
    }

    fn write(&mut self) -> io::Result<()> {
        if let Some(file) = &mut self.file {
            file.write_all(&self.lines)?;
        }
        self.lines.clear();
        Ok(())
    }

    fn nanos(&self, moment: Instant) -> u64 {
        on_grid(moment.saturating_duration_since(self.origin))
    }

    /// The number of the row of this name.
    fn row(&mut self, name: &str) -> usize {
        if let Some(nth) = self.rows.iter().position(|known| known == name) {
            return nth + 1;
        }
        self.rows.push(name.to_string());
        self.note("thread_name", self.rows.len(), ("name", name));
        self.rows.len()
    }

    /// Adds a metadata event about this rank or one of its rows.
    fn note(&mut self, what: &str, row: usize, (key, value): (&str, &str)) {
        let lines = &mut self.lines;
        begin(lines, 0);
        put(
            lines,
            format_args!("\"ph\":\"M\",\"pid\":{},\"tid\":{row},\"name\":\"{what}\",\"args\":{{\"{key}\":", self.rank),
        );
        text(lines, value);
        put(lines, format_args!("}}}}\n"));
    }
}

fn on_grid(time: Duration) -> u64 {
    time.as_nanos() as u64 / GRID_NANOS * GRID_NANOS
}

fn begin(lines: &mut Vec<u8>, nanos: u64) {
    put(lines, format_args!("{EVENT}{},", Micros(nanos)));
}

fn put(lines: &mut Vec<u8>, what: std::fmt::Arguments<'_>) {
    lines.write_fmt(what).expect("memory takes what is written to it");
}

/// A JSON string.
fn text(lines: &mut Vec<u8>, text: &str) {
    serde_json::to_writer(lines, text).expect("memory takes what is written to it");
}
