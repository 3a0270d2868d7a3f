//! Cells in shared memory: the words that a rank publishes for all others, and those of a pair, for one other alone.
//!
//! Each word but a doorbell's `rings` has one writer. A line or mailbox is valid once its first word has been read as
//! published.

use super::atomics::{AtomicU32, AtomicU64, Ordering};
use super::doorbell::Doorbell;
use crate::frame::MAX_HEADER_BYTES;

/// Words of a payload that travel in a line itself.
pub(super) const LINE_WORDS: usize = 4;
/// Bytes of a payload that travel in a line itself.
pub(super) const LINE_BYTES: usize = LINE_WORDS * 8;

/// A rank's announcement of a call, on cache lines that it shares with nothing else. A rank has two and uses them in
/// turns, since it may be a call ahead of another rank.
#[derive(Debug, Default)]
#[repr(C, align(128))]
pub(super) struct Line {
    /// The round of the announcement; published last.
    round: AtomicU64,
    /// A hash of the arguments that must be equal on all ranks.
    fingerprint: AtomicU64,
    /// The bits of the rank's weight.
    weight: AtomicU64,
    /// A value whose meaning depends on the kind of call.
    note: AtomicU64,
    payload: [AtomicU64; LINE_WORDS],
}

/// The content of a line.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct Announcement {
    pub(super) fingerprint: u64,
    pub(super) weight: f64,
    pub(super) note: u64,
    pub(super) payload: [u64; LINE_WORDS],
}

impl Line {
    /// Publishes `what` in `round`. The round of a line only grows.
    pub(super) fn publish(&self, round: u64, what: &Announcement, words: usize) {
        self.fingerprint.store(what.fingerprint, Ordering::Relaxed);
        self.weight.store(what.weight.to_bits(), Ordering::Relaxed);
        self.note.store(what.note, Ordering::Relaxed);
        for (word, value) in self.payload.iter().zip(what.payload).take(words) {
            word.store(value, Ordering::Relaxed);
        }
        self.round.store(round, Ordering::Release);
    }

    /// True if the line of `round` is published.
    pub(super) fn is_there(&self, round: u64) -> bool {
        self.round.load(Ordering::Acquire) >= round
    }

    /// The announcement of the round that [is there](Self::is_there).
    pub(super) fn read(&self, words: usize) -> Announcement {
        let mut payload = [0; LINE_WORDS];
        for (value, word) in payload.iter_mut().zip(&self.payload).take(words) {
            *value = word.load(Ordering::Relaxed);
        }
        Announcement {
            fingerprint: self.fingerprint.load(Ordering::Relaxed),
            weight: f64::from_bits(self.weight.load(Ordering::Relaxed)),
            note: self.note.load(Ordering::Relaxed),
            payload,
        }
    }
}

/// A rank's progress, as a number that only grows.
#[derive(Debug, Default)]
#[repr(C, align(128))]
pub(super) struct Progress(AtomicU64);

impl Progress {
    pub(super) fn publish(&self, at: u64) {
        self.0.store(at, Ordering::Release);
    }

    pub(super) fn has_reached(&self, at: u64) -> bool {
        self.0.load(Ordering::Acquire) >= at
    }
}

/// The header of a call that differs from another rank's. Written at most once, since the difference ends the world.
#[derive(Debug)]
#[repr(C, align(128))]
pub(super) struct Mailbox {
    /// Bytes of the header; 0 as long as there is none. Published last.
    len: AtomicU32,
    words: [AtomicU64; MAX_HEADER_BYTES / 8],
}

/// As in a new segment, which is all zeros.
#[cfg(all(test, loom))]
impl Default for Mailbox {
    fn default() -> Mailbox {
        Mailbox { len: AtomicU32::new(0), words: std::array::from_fn(|_| AtomicU64::new(0)) }
    }
}

impl Mailbox {
    /// Posts an encoded header.
    pub(super) fn post(&self, header: &[u8]) {
        let mut bytes = [0; MAX_HEADER_BYTES];
        let len = header.len().min(MAX_HEADER_BYTES);
        bytes[..len].copy_from_slice(&header[..len]);
        for (word, bytes) in self.words.iter().zip(bytes.as_chunks().0) {
            word.store(u64::from_le_bytes(*bytes), Ordering::Relaxed);
        }
        self.len.store(len as u32, Ordering::Release);
    }

    pub(super) fn is_there(&self) -> bool {
        self.len.load(Ordering::Acquire) != 0
    }

    /// The header that [is there](Self::is_there).
    pub(super) fn read(&self) -> Vec<u8> {
        let len = (self.len.load(Ordering::Acquire) as usize).min(MAX_HEADER_BYTES);
        let mut bytes: Vec<u8> =
            self.words.iter().flat_map(|word| word.load(Ordering::Relaxed).to_le_bytes()).collect();
        bytes.truncate(len);
        bytes
    }
}

/// The words of one rank for all others.
#[derive(Debug)]
#[repr(C, align(128))]
pub(super) struct Cell {
    /// The doorbell on which the rank sleeps. Rung by others.
    pub(super) bell: Doorbell,
    /// By parity of the round, since the rank may be a call ahead. Written by the rank.
    lines: [Line; 2],
    /// Ticket of the last chunk that others may read from this rank's slots. Written by the rank.
    pub(super) ready: Progress,
    /// Ticket of the last chunk with which the rank is done: its result is there, or others' slots were read. Written
    /// by the rank.
    pub(super) done: Progress,
    /// Not 0 once the rank has closed its side of the group. Written by the rank.
    pub(super) closed: Progress,
    /// Written by the rank.
    pub(super) mailbox: Mailbox,
}

impl Cell {
    pub(super) fn line(&self, round: u64) -> &Line {
        &self.lines[(round % 2) as usize]
    }
}

/// The words of one rank for one other alone, about payloads sent to it or taken from it. Written by the first of the
/// two.
#[derive(Debug, Default)]
#[repr(C, align(128))]
pub(super) struct Pair {
    /// The rank's calls with the other, by parity of the round, since it may be a call ahead.
    lines: [Line; 2],
    /// Ticket of the last parcel that the other may read.
    pub(super) sent: Progress,
    /// Ticket of the last parcel of the other that the rank has taken.
    pub(super) taken: Progress,
}

impl Pair {
    pub(super) fn line(&self, round: u64) -> &Line {
        &self.lines[(round % 2) as usize]
    }

    pub(super) fn is_there(&self, round: u64) -> bool {
        self.line(round).is_there(round)
    }
}
