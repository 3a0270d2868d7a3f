//! The file of one rank's part: its name, its lines, and the form of its times.

use std::ffi::OsString;
use std::fmt::Display;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

/// Last line of a part that is complete.
pub(super) const END: &str = "end\n";
/// Start of an event's line; the time follows.
pub(super) const EVENT: &str = "{\"ts\":";

/// The first line of a part.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Header {
    pub(super) rank: usize,
    /// Origin of its events' times, in nanoseconds since 1970.
    pub(super) origin_ns: u64,
}

/// Path of a rank's part of the timeline `file`.
pub(super) fn part_of(file: &Path, rank: usize) -> PathBuf {
    beside(file, &format!(".rank-{rank}"))
}

pub(super) fn beside(file: &Path, suffix: &str) -> PathBuf {
    let mut name = OsString::from(file);
    name.push(suffix);
    name.into()
}

/// Nanoseconds, shown as microseconds.
pub(super) struct Micros(pub(super) u64);

impl Display for Micros {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}.{:03}", self.0 / 1000, self.0 % 1000)
    }
}

impl Micros {
    /// Reads what `Display` writes.
    pub(super) fn parse(text: &str) -> Option<Micros> {
        let (whole, thousandths) = text.split_once('.')?;
        let whole: u64 = whole.parse().ok()?;
        Some(Micros(whole.checked_mul(1000)?.checked_add(thousandths.parse().ok()?)?))
    }
}
