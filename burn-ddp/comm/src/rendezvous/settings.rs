//! What must be the same on all ranks, compared before the first step.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::sync::OnceLock;

use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use super::round::Entry;
use crate::Options;

/// How much of the program is looked at: this many blocks, evenly spread. A hash of all of it would cost a large program seconds.
const BLOCKS: u64 = 64;
const BLOCK_BYTES: usize = 4096;

/// What a rank brings along.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Settings {
    /// Names and values that must be equal.
    settings: Vec<(String, String)>,
    /// What tells programs apart. Different ones are legitimate (mixed devices), so this is only shown.
    program: Option<u64>,
}

impl Settings {
    pub(super) fn of(options: &Options) -> Settings {
        let own = [
            ("burn-ddp's version", env!("CARGO_PKG_VERSION").to_owned()),
            ("timeout", format!("{:?}", options.timeout)),
            ("heartbeat", format!("{:?}", options.heartbeat)),
            (
                "the engine (BURN_DDP_ENGINE)",
                options.engine.map_or("none".to_owned(), |engine| engine.name().to_owned()),
            ),
            ("peer timeout", options.peer_timeout.map_or("none".to_owned(), |time| format!("{time:?}"))),
        ];
        let own = own.into_iter().map(|(name, value)| (name.to_owned(), value));
        Settings { settings: own.chain(options.config.iter().cloned()).collect(), program: fingerprint() }
    }

    /// Without what was compared already.
    pub(super) fn compared(self) -> Settings {
        Settings { settings: Vec::new(), ..self }
    }
}

/// The first difference in what must be equal, as a sentence.
pub(super) fn difference(entries: &[Entry]) -> Option<String> {
    let (first, others) = entries.split_first()?;
    for entry in others {
        let (ours, theirs) = (&first.config.settings, &entry.config.settings);
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
            None => ("the order of settings", ["one".to_owned(), "another".to_owned()]),
        };
        let mut text = format!(
            "ranks disagree about {what}: {} has {one}, {} has {other}; it must be the same everywhere",
            first.peer, entry.peer
        );
        if different.len() > 1 {
            text.push_str(&format!(" (they differ in {} settings)", different.len()));
        }
        if first.config.program != entry.config.program {
            text.push_str("; they run different programs");
        }
        return Some(text);
    }
    None
}

/// The first two ranks that run different programs.
pub(super) fn different_programs(entries: &[Entry]) -> Option<(&Entry, &Entry)> {
    let (first, others) = entries.split_first()?;
    others.iter().find(|entry| entry.config.program != first.config.program).map(|other| (first, other))
}

/// What tells this program from others; `None` where it cannot be read. A process has but one program, so it is looked at once.
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
    use crate::PeerInfo;

    fn entry(rank: usize, settings: &[(&str, &str)], program: u64) -> Entry {
        let settings = settings.iter().map(|(name, value)| (name.to_string(), value.to_string())).collect();
        let config = Settings { settings, program: Some(program) };
        Entry { peer: PeerInfo::here(rank, rank, 0), world_size: 3, host: "::1".into(), port: 1, machine: None, config }
    }

    #[test]
    fn a_difference_names_both_ranks_and_values() {
        let same = entry(0, &[("a", "1"), ("b", "2")], 7);
        assert_eq!(difference(&[same.clone(), entry(1, &[("a", "1"), ("b", "2")], 8)]), None);
        let text = difference(&[same.clone(), same.clone(), entry(2, &[("a", "1"), ("b", "3")], 7)]).unwrap();
        assert!(
            text.contains("about b: rank 0 (") && text.contains("has 2, rank 2 (") && text.contains("has 3;"),
            "{text}"
        );
        let text = difference(&[same.clone(), entry(1, &[("a", "0")], 8)]).unwrap();
        assert!(
            text.contains("about a") && text.contains("2 settings") && text.contains("different programs"),
            "{text}"
        );
        let text = difference(&[same, entry(1, &[("a", "1")], 7)]).unwrap();
        assert!(text.contains("about b") && text.contains("has nothing"), "{text}");
    }

    #[test]
    fn programs_are_told_apart() {
        let (a, b) = (entry(0, &[], 7), entry(1, &[], 8));
        assert!(different_programs(&[a.clone(), a.clone()]).is_none());
        assert_eq!(different_programs(&[a, b]).unwrap().1.peer.rank, 1);
        assert!(fingerprint().is_some());
        assert_eq!(look(), look());
    }
}
