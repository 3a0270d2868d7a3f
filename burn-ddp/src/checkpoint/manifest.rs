//! What a checkpoint says about itself.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::Read;
use std::path::Path;

use serde::{Deserialize, Serialize};
use serde_json::Value;
use sha2::{Digest, Sha256};

use crate::model::schema::Entry;
use crate::optimizer::state::Ids;

/// Of the layout of a checkpoint's directory.
const FORMAT: u32 = 1;

pub(super) const MANIFEST: &str = "manifest.json";
/// As `sha256sum --check` reads it.
pub(super) const MANIFEST_SUM: &str = "manifest.json.sha256";

#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct Manifest {
    pub(super) format: u32,
    pub(super) burn_ddp: String,
    pub(super) step: u64,
    pub(super) world_size: usize,
    pub(super) files: BTreeMap<String, Sum>,
    /// By name of the file: parameters and buffers in traversal order.
    pub(super) models: BTreeMap<String, Vec<Entry>>,
    /// By name of the file: under which id it holds the state of which parameter.
    pub(super) optimizers: BTreeMap<String, Ids>,
    /// By name.
    pub(super) values: BTreeMap<String, Value>,
}

/// What is known of a file.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct Sum {
    bytes: u64,
    sha256: String,
}

impl Manifest {
    pub(super) fn new(step: u64, world_size: usize) -> Self {
        Manifest {
            format: FORMAT,
            burn_ddp: env!("CARGO_PKG_VERSION").into(),
            step,
            world_size,
            files: BTreeMap::new(),
            models: BTreeMap::new(),
            optimizers: BTreeMap::new(),
            values: BTreeMap::new(),
        }
    }

    /// The manifest in a text, if this version understands it.
    pub(super) fn read(text: &str) -> Result<Self, String> {
        #[derive(Deserialize)]
        struct Version {
            format: u32,
            burn_ddp: String,
        }
        let unreadable = |e: serde_json::Error| format!("its {MANIFEST} cannot be read: {e}");
        let Version { format, burn_ddp } = serde_json::from_str(text).map_err(unreadable)?;
        if format != FORMAT {
            return Err(format!(
                "it was written by burn-ddp {burn_ddp} in format {format}; this version reads format {FORMAT}"
            ));
        }
        serde_json::from_str(text).map_err(unreadable)
    }

    /// Both files that it is written to.
    pub(super) fn to_files(&self) -> Result<[(&'static str, Vec<u8>); 2], String> {
        let mut text = serde_json::to_vec_pretty(self).map_err(|e| e.to_string())?;
        text.push(b'\n');
        let sum = sum_line(&text);
        Ok([(MANIFEST, text), (MANIFEST_SUM, sum.into_bytes())])
    }
}

impl Sum {
    pub(super) fn of(bytes: &[u8]) -> Self {
        Sum { bytes: bytes.len() as u64, sha256: hex(Sha256::digest(bytes).as_slice()) }
    }

    /// Reads a file piece by piece.
    fn of_file(path: &Path) -> std::io::Result<Self> {
        let (mut file, mut sha, mut piece, mut bytes) = (File::open(path)?, Sha256::new(), vec![0; 1 << 20], 0);
        loop {
            match file.read(&mut piece)? {
                0 => return Ok(Sum { bytes, sha256: hex(sha.finalize().as_slice()) }),
                n => {
                    sha.update(&piece[..n]);
                    bytes += n as u64;
                }
            }
        }
    }
}

/// Why a checkpoint must not be used.
#[derive(Debug)]
pub(super) enum Unfit {
    /// Torn or damaged.
    Damaged(String),
    /// Complete, but not for this version.
    Foreign(String),
}

/// The text of the manifest of the checkpoint in `dir`, if every file is as it was written.
pub(super) fn verify(dir: &Path) -> Result<String, Unfit> {
    let damaged = |name: &str, e: &dyn std::fmt::Display| Unfit::Damaged(format!("{name}: {e}"));
    let text = fs::read_to_string(dir.join(MANIFEST)).map_err(|e| damaged(MANIFEST, &e))?;
    let sum = fs::read_to_string(dir.join(MANIFEST_SUM)).map_err(|e| damaged(MANIFEST_SUM, &e))?;
    if sum != sum_line(text.as_bytes()) {
        return Err(damaged(MANIFEST, &"its checksum is another one"));
    }
    let manifest = Manifest::read(&text).map_err(Unfit::Foreign)?;
    for (name, known) in &manifest.files {
        let sum = Sum::of_file(&dir.join(name)).map_err(|e| damaged(name, &e))?;
        if sum != *known {
            return Err(damaged(name, &format!("it has {} bytes of {}, or other ones", sum.bytes, known.bytes)));
        }
    }
    Ok(text)
}

fn sum_line(manifest: &[u8]) -> String {
    format!("{}  {MANIFEST}\n", Sum::of(manifest).sha256)
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|b| format!("{b:02x}")).collect()
}
