//! Settings that must be the same on all ranks, compared before the first step.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::sync::OnceLock;

use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use crate::{PeerInfo, WorldOptions};

/// Blocks of the program's file, evenly spread, that its fingerprint covers. A hash of the whole file would take
/// seconds for a large program.
const BLOCKS: u64 = 64;
const BLOCK_BYTES: usize = 4096;

/// Settings of a rank.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct ComparedSettings {
    /// Names and values that must be equal.
    settings: Vec<(String, String)>,
    /// Fingerprint of the program. Ranks may run different programs, for different devices, so a difference is only
    /// shown.
    program: Option<u64>,
}

impl ComparedSettings {
    pub(super) fn of(options: &WorldOptions) -> ComparedSettings {
        let own = [
            ("burn-ddp's version", env!("CARGO_PKG_VERSION").to_owned()),
            ("timeout", format!("{:?}", options.timeout)),
            ("heartbeat", format!("{:?}", options.heartbeat)),
            (
                "the engine (BURN_DDP_ENGINE)",
                options.engine.map_or("none".to_owned(), |engine| engine.name().to_owned()),
            ),
            ("encryption of data (BURN_DDP_ENCRYPT)", if options.encrypt_data { "data" } else { "none" }.to_owned()),
            ("flows between two ranks (BURN_DDP_FLOWS)", options.flows.to_string()),
            (
                "logical ranks (BURN_DDP_LOGICAL_RANKS)",
                options.logical_ranks.map_or("none".to_owned(), |count| count.to_string()),
            ),
            ("peer timeout", options.peer_timeout.map_or("none".to_owned(), |time| format!("{time:?}"))),
        ];
        let own = own.into_iter().map(|(name, value)| (name.to_owned(), value));
        ComparedSettings { settings: own.chain(options.config.iter().cloned()).collect(), program: fingerprint() }
    }

    /// The fingerprint alone: the settings are compared by now.
    pub(super) fn compared(self) -> ComparedSettings {
        ComparedSettings { settings: Vec::new(), ..self }
    }
}

/// The first difference in settings that must be equal, as a sentence.
pub(super) fn difference<'a>(mut ranks: impl Iterator<Item = (&'a PeerInfo, &'a ComparedSettings)>) -> Option<String> {
    let (first, ours) = ranks.next()?;
    for (peer, theirs) in ranks {
        let other_program = ours.program != theirs.program;
        let (ours, theirs) = (&ours.settings, &theirs.settings);
        if ours == theirs {
            continue;
        }
        let value = |settings: &[(String, String)], name: &str| {
            settings.iter().find(|(known, _)| known == name).map_or("nothing".to_owned(), |(_, value)| value.clone())
        };
        let names = ours.iter().chain(theirs).map(|(name, _)| name);
        let mut different: Vec<&String> = Vec::new();
        for name in names.filter(|name| value(ours, name) != value(theirs, name)) {
            if !different.contains(&name) {
                different.push(name);
            }
        }
        let (what, [one, other]) = match different.first() {
            Some(name) => (name.as_str(), [ours, theirs].map(|settings| value(settings, name))),
            None => ("the order of settings", ["one order".to_owned(), "another".to_owned()]),
        };
        let mut text = format!(
            "ranks disagree about {what}: {} has {one}, {} has {other}; it must be the same everywhere",
            first, peer
        );
        if different.len() > 1 {
            text.push_str(&format!(" (they differ in {} settings)", different.len()));
        }
        if other_program {
            text.push_str("; they run different programs");
        }
        return Some(text);
    }
    None
}

/// The first two ranks that run different programs.
pub(super) fn different_programs<'a>(
    mut ranks: impl Iterator<Item = (&'a PeerInfo, &'a ComparedSettings)>,
) -> Option<(&'a PeerInfo, &'a PeerInfo)> {
    let (first, ours) = ranks.next()?;
    ranks.find(|(_, theirs)| theirs.program != ours.program).map(|(other, _)| (first, other))
}

/// Fingerprint of this program, computed once per process; `None` if its file cannot be read.
fn fingerprint() -> Option<u64> {
    static FINGERPRINT: OnceLock<Option<u64>> = OnceLock::new();
    *FINGERPRINT.get_or_init(look)
}

fn look() -> Option<u64> {
    let file = File::open(std::env::current_exe().ok()?).ok()?;
    let len = file.metadata().ok()?.len();
    let mut hash = Sha256::new().chain_update(len.to_le_bytes());
    let mut block = [0; BLOCK_BYTES];
    for nth in 0..BLOCKS {
        let read = file.read_at(&mut block, len / BLOCKS * nth).ok()?;
        hash.update(&block[..read]);
    }
    hash.finalize().first_chunk().map(|start| u64::from_le_bytes(*start))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(rank: usize, settings: &[(&str, &str)], program: u64) -> (PeerInfo, ComparedSettings) {
        let settings = settings.iter().map(|(name, value)| (name.to_string(), value.to_string())).collect();
        (PeerInfo::here(rank, rank, 0), ComparedSettings { settings, program: Some(program) })
    }

    fn differ(ranks: &[(PeerInfo, ComparedSettings)]) -> Option<String> {
        difference(ranks.iter().map(|(peer, settings)| (peer, settings)))
    }

    #[test]
    fn a_difference_names_both_ranks_and_values() {
        let same = entry(0, &[("a", "1"), ("b", "2")], 7);
        assert_eq!(differ(&[same.clone(), entry(1, &[("a", "1"), ("b", "2")], 8)]), None);
        let text = differ(&[same.clone(), same.clone(), entry(2, &[("a", "1"), ("b", "3")], 7)]).unwrap();
        assert!(
            text.contains("about b: rank 0 (") && text.contains("has 2, rank 2 (") && text.contains("has 3;"),
            "{text}"
        );
        let text = differ(&[same.clone(), entry(1, &[("a", "0")], 8)]).unwrap();
        assert!(
            text.contains("about a") && text.contains("2 settings") && text.contains("different programs"),
            "{text}"
        );
        let text = differ(&[same, entry(1, &[("a", "1")], 7)]).unwrap();
        assert!(text.contains("about b") && text.contains("has nothing"), "{text}");
    }

    #[test]
    fn programs_are_told_apart() {
        let programs = |ranks: &[(PeerInfo, ComparedSettings)]| {
            different_programs(ranks.iter().map(|(peer, settings)| (peer, settings))).map(|(_, other)| other.rank)
        };
        let (a, b) = (entry(0, &[], 7), entry(1, &[], 8));
        assert_eq!(programs(&[a.clone(), a.clone()]), None);
        assert_eq!(programs(&[a, b]), Some(1));
        assert!(fingerprint().is_some());
        assert_eq!(look(), look());
    }
}
