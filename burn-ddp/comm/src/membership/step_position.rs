//! Positions of ranks, by epoch and step, in sequences of steps that all ranks of a group do.

use std::fmt;

use serde::{Deserialize, Serialize};

/// A step of an epoch. On the wire it is `epoch << 32 | step`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(from = "u64", into = "u64")]
pub struct Progress {
    /// Number of the epoch, from 0.
    pub epoch: u32,
    /// Steps done in it.
    pub step: u32,
}

/// A sequence of steps that all ranks of a group do. No rank may go past a step at which another has stopped.
///
/// On the wire it is two numbers: the group; and the loader, with its run from bit 32 on, and bit 63 for backwards.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(from = "(u64, u64)", into = "(u64, u64)")]
pub enum Track {
    /// Batches read from a loader.
    Batches {
        /// Number of the [group](crate::ProcessGroup::id) whose ranks share the loader.
        group: u64,
        /// Number of the loader in this group.
        loader: u32,
        /// Number of the run, below 2³¹. In a run epochs only grow: a loader that goes back to an epoch begins a new
        /// run.
        run: u32,
    },
    /// Backward passes for the batches of a loader.
    Backwards {
        /// Number of the group whose ranks share the loader.
        group: u64,
        /// Number of the loader in this group.
        loader: u32,
        /// Number of the run, below 2³¹.
        run: u32,
    },
}

const BACKWARDS: u64 = 1 << 63;

impl Track {
    /// Track of the backward passes for the batches of this track.
    pub fn backwards(self) -> Track {
        let (Track::Batches { group, loader, run } | Track::Backwards { group, loader, run }) = self;
        Track::Backwards { group, loader, run }
    }

    /// The same track of another run.
    pub(crate) fn with_run(self, run: u32) -> Track {
        match self {
            Track::Batches { group, loader, .. } => Track::Batches { group, loader, run },
            Track::Backwards { group, loader, .. } => Track::Backwards { group, loader, run },
        }
    }
}

impl From<(u64, u64)> for Track {
    fn from((group, number): (u64, u64)) -> Track {
        let (loader, run) = (number as u32, ((number & !BACKWARDS) >> 32) as u32);
        match number & BACKWARDS {
            0 => Track::Batches { group, loader, run },
            _ => Track::Backwards { group, loader, run },
        }
    }
}

impl From<Track> for (u64, u64) {
    fn from(track: Track) -> (u64, u64) {
        let (Track::Batches { group, loader, run } | Track::Backwards { group, loader, run }) = track;
        let number = u64::from(run) << 32 | u64::from(loader);
        match track {
            Track::Batches { .. } => (group, number),
            Track::Backwards { .. } => (group, BACKWARDS | number),
        }
    }
}

impl From<u64> for Progress {
    fn from(number: u64) -> Progress {
        Progress { epoch: (number >> 32) as u32, step: number as u32 }
    }
}

impl From<Progress> for u64 {
    fn from(progress: Progress) -> u64 {
        u64::from(progress.epoch) << 32 | u64::from(progress.step)
    }
}

impl fmt::Display for Progress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "epoch {}, step {}", self.epoch, self.step)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_travel_as_one_number() {
        let progress = Progress { epoch: 3, step: 40 };
        assert_eq!(postcard::to_stdvec(&progress), postcard::to_stdvec(&(3_u64 << 32 | 40)));
        let of_sub_group = 3_u64 << 32 | 1;
        for track in [
            Track::Batches { group: 1, loader: 5, run: 2 },
            Track::Backwards { group: of_sub_group, loader: u32::MAX, run: 7 },
        ] {
            let bytes = postcard::to_stdvec(&track).unwrap();
            assert_eq!(bytes, postcard::to_stdvec(&<(u64, u64)>::from(track)).unwrap());
            assert_eq!(postcard::from_bytes::<Track>(&bytes), Ok(track));
        }
        let batches = Track::Batches { group: 1, loader: 5, run: 2 };
        assert_eq!(<(u64, u64)>::from(batches.backwards()), (1, 1 << 63 | 2 << 32 | 5));
    }

    #[test]
    fn later_is_greater() {
        assert!(Progress { epoch: 1, step: 0 } > Progress { epoch: 0, step: u32::MAX });
    }
}
