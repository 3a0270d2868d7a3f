//! Merges the parts of all ranks into one file.

use std::fs::{self, File, OpenOptions};
use std::io::{self, BufRead, BufReader, BufWriter, ErrorKind, Read, Seek, SeekFrom, Write};
use std::ops::Range;
use std::path::{Path, PathBuf};

use serde::de::IgnoredAny;

use crate::private_file;

use super::part_file::{END, EVENT, Header, Micros, beside, part_of};

/// Merges the parts beside `file` into it. For a launcher, once all its ranks have ended: these are the ranks `local`
/// of a world of `world_size`. Parts of ranks on other machines are merged, too, if they are in the same directory.
///
/// # Errors
/// Those of reading and writing files. Having no parts is no error.
pub fn conclude(file: &Path, local: Range<usize>, world_size: usize) -> io::Result<()> {
    for rank in local {
        let path = part_of(file, rank);
        if path.exists() && !has_ended(&path)? {
            // The part may end in the middle of a line.
            OpenOptions::new().append(true).open(path)?.write_all(format!("\n{END}").as_bytes())?;
        }
    }
    merge(file, world_size, true)
}

/// Removes parts that earlier ranks of these numbers may have left beside `file`, before a launcher starts `ranks`.
///
/// # Errors
/// If a part cannot be removed.
pub fn clear(file: &Path, ranks: Range<usize>) -> io::Result<()> {
    for rank in ranks {
        match fs::remove_file(part_of(file, rank)) {
            Err(error) if error.kind() != ErrorKind::NotFound => return Err(error),
            _ => {}
        }
    }
    Ok(())
}

/// If all parts are complete, merges and removes them. If some are not, merges what they hold if `now`, else nothing.
pub(super) fn merge(file: &Path, world_size: usize, now: bool) -> io::Result<()> {
    let dir = file.parent().filter(|dir| !dir.as_os_str().is_empty()).unwrap_or(Path::new("."));
    // One process at a time may merge, so that the last one sees all parts complete. Dropping the handle unlocks.
    let turn = File::open(dir)?;
    if let Err(error) = turn.lock() {
        tracing::debug!(%error, dir = %dir.display(), "this filesystem has no locks: two ranks may merge the timeline \
                                                       at the same time");
    }
    let parts: Vec<PathBuf> = (0..world_size).map(|rank| part_of(file, rank)).filter(|path| path.exists()).collect();
    let ended = parts.iter().map(|path| has_ended(path)).collect::<io::Result<Vec<bool>>>()?;
    let all_ended = ended.iter().all(|ended| *ended);
    if parts.is_empty() || !(all_ended || now) {
        return Ok(());
    }
    let unfinished = beside(file, &format!(".{}.tmp", std::process::id()));
    let written = write_all(&parts, &unfinished).and_then(|()| fs::rename(&unfinished, file));
    written.inspect_err(|_| drop(fs::remove_file(&unfinished)))?;
    if all_ended { parts.iter().try_for_each(fs::remove_file) } else { Ok(()) }
}

/// True if a part is complete.
fn has_ended(part: &Path) -> io::Result<bool> {
    let mut file = File::open(part)?;
    let mut tail = [0; END.len()];
    if file.metadata()?.len() < END.len() as u64 {
        return Ok(false);
    }
    file.seek(SeekFrom::End(-(END.len() as i64)))?;
    file.read_exact(&mut tail)?;
    Ok(tail == *END.as_bytes())
}

fn write_all(parts: &[PathBuf], to: &Path) -> io::Result<()> {
    let parts = parts.iter().map(|part| File::open(part).map(BufReader::new)).collect::<io::Result<Vec<_>>>()?;
    let mut out = BufWriter::new(private_file::create(to)?);
    write_trace(parts, &mut out)?;
    out.into_inner().map_err(io::IntoInnerError::into_error)?.sync_all()
}

/// Writes the events of all parts, with times that count from the earliest origin of a part.
pub(super) fn write_trace(parts: Vec<impl BufRead>, out: &mut impl Write) -> io::Result<()> {
    let mut readers = Vec::new();
    for mut reader in parts {
        let mut line = Vec::new();
        reader.read_until(b'\n', &mut line)?;
        // A part without its first line is of a rank that was killed before it recorded an event.
        if let Ok(header) = serde_json::from_slice::<Header>(&line) {
            readers.push((header, reader));
        }
    }
    let origin = readers.iter().map(|(header, _)| header.origin_ns).min().unwrap_or(0);
    out.write_all(b"{\"displayTimeUnit\":\"ms\",\"traceEvents\":[")?;
    let mut separator = "\n";
    for (header, reader) in readers {
        for line in reader.split(b'\n') {
            let line = line?;
            if let Some((time, rest)) = str::from_utf8(&line).ok().and_then(event) {
                let time = Micros(time.0.saturating_add(header.origin_ns - origin));
                write!(out, "{separator}{EVENT}{time},{rest}")?;
                separator = ",\n";
            }
        }
    }
    out.write_all(b"\n]}\n")
}

/// Time of an event's line, and the rest of the line. `None` if the line holds no event or is incomplete.
fn event(line: &str) -> Option<(Micros, &str)> {
    let (time, rest) = line.strip_prefix(EVENT)?.split_once(',')?;
    let time = Micros::parse(time)?;
    serde_json::from_str::<IgnoredAny>(line).ok()?;
    Some((time, rest))
}
