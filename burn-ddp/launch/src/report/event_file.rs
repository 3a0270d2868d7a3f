//! File to which the ranks of this machine append their events, one line each; one file per generation.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::RawFd;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use burn_ddp_comm::post_mortem::Event;

use crate::handed_over_files::HandedOver;

/// Limits of one read and of all reads together, so that a program that writes events in a loop does no harm.
const READ_CAP_BYTES: u64 = 1024 * 1024;
const TOTAL_CAP_BYTES: u64 = 64 * 1024 * 1024;

pub(crate) struct EventFile {
    file: File,
    path: PathBuf,
    /// The same file in memory, which the ranks inherit; `None` if it lies in the log directory.
    own: Option<HandedOver>,
    /// The beginning of a line whose end has not been read yet.
    pending: Vec<u8>,
    /// Number of bytes read so far.
    read: u64,
}

impl EventFile {
    /// Creates the file in `dir`, or without a name if `dir` is `None`, so that no file is left behind however this
    /// process ends.
    pub(crate) fn create(dir: Option<&Path>, node: usize) -> io::Result<Self> {
        let (file, path, own) = match dir {
            Some(dir) => {
                let path = dir.join(format!("events-node-{node}.jsonl"));
                (OpenOptions::new().read(true).append(true).create_new(true).mode(0o600).open(&path)?, path, None)
            }
            None => {
                let own = HandedOver::create("events")?;
                (own.file().try_clone()?, own.path(), Some(own))
            }
        };
        Ok(Self { file, path, own, pending: Vec::new(), read: 0 })
    }

    /// Path by which the ranks open it.
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// Descriptor that the ranks inherit; `None` if they open the file by its path.
    pub(crate) fn fd(&self) -> Option<RawFd> {
        self.own.as_ref().map(HandedOver::fd)
    }

    /// Returns the events that came since the last call.
    pub(crate) fn read(&mut self) -> Vec<Event> {
        if let Err(error) = self.read_bytes() {
            tracing::warn!(%error, "cannot read the events that the ranks report");
        }
        let Some(end) = self.pending.iter().rposition(|&byte| byte == b'\n') else { return Vec::new() };
        let lines: Vec<u8> = self.pending.drain(..=end).collect();
        String::from_utf8_lossy(&lines).lines().filter_map(Event::parse).collect()
    }

    /// Reads by position, since processes that inherit the descriptor share the file's own.
    fn read_bytes(&mut self) -> io::Result<()> {
        let end = TOTAL_CAP_BYTES.min(self.read + READ_CAP_BYTES);
        let mut buffer = [0; 8192];
        while self.read < end {
            let room = buffer.len().min((end - self.read) as usize);
            match self.file.read_at(&mut buffer[..room], self.read) {
                Ok(0) => break,
                Ok(count) => {
                    self.pending.extend_from_slice(&buffer[..count]);
                    self.read += count as u64;
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;

    #[test]
    fn events_are_read_once_and_only_when_complete() {
        let mut events = EventFile::create(None, 0).unwrap();
        let mut rank = OpenOptions::new().append(true).open(events.path()).unwrap();
        let event = Event::Suspect { rank: 0, peer: 1, silent_ms: 2000, at: 3 };
        let line = event.to_line();
        assert_eq!(events.read(), []);
        rank.write_all(b"something else\n").unwrap();
        rank.write_all(&line.as_bytes()[..10]).unwrap();
        assert_eq!(events.read(), []);
        rank.write_all(&line.as_bytes()[10..]).unwrap();
        assert_eq!(events.read(), [event]);
        assert_eq!(events.read(), []);
    }
}
