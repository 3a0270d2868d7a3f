//! The manifest of a checkpoint: contents, checksums, values; and the check of a checkpoint against it.

use std::collections::BTreeMap;
use std::fmt;
use std::fs::File;
use std::io::{self, ErrorKind, Read};
use std::path::Path;

use serde::{Deserialize, Serialize};
use serde_json::Value;
use sha2::{Digest, Sha256};

use super::storage::Storage;
use crate::file_failure::FileFailure;
use crate::gradients::HeldBatches;
use crate::loss_scaling::LossScale;
use crate::model::schema::Entry;
use crate::optimizer::state::Ids;

/// Version of the layout of a checkpoint's directory.
const FORMAT: u32 = 1;

pub(super) const MANIFEST: &str = "manifest.json";
/// The manifest's checksum, in the format of `sha256sum --check`.
pub(super) const MANIFEST_CHECKSUM: &str = "manifest.json.sha256";

#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct Manifest {
    pub(super) format: u32,
    pub(super) burn_ddp: String,
    pub(super) step: u64,
    pub(super) world_size: usize,
    pub(super) files: BTreeMap<String, Checksum>,
    /// Parameters and buffers in traversal order, by name of the file.
    pub(super) models: BTreeMap<String, Vec<Entry>>,
    /// Paths of the parameters whose state the file holds, each with its id in the file; by name of the file.
    pub(super) optimizers: BTreeMap<String, Ids>,
    /// Micro-batches that were accumulated and not reduced yet, by name of the model's file: `held[file][n][rank]` is
    /// what that rank had of the n-th wrapped model in the file. The list of a file is empty if no rank had any; a copy
    /// that is not trained has no entry.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub(super) held: BTreeMap<String, Vec<Vec<HeldBatches>>>,
    /// Loss scales of the wrapped models in a file that have one, by name of the file: of the n-th, or `None`.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub(super) loss_scales: BTreeMap<String, Vec<Option<LossScale>>>,
    /// Serde values, by name.
    pub(super) values: BTreeMap<String, Value>,
}

#[cfg(test)]
thread_local! {
    /// Bytes of which this thread has made checksums.
    pub(super) static HASHED: std::cell::Cell<usize> = const { std::cell::Cell::new(0) };
}

/// Size and SHA-256 of a file.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct Checksum {
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
            held: BTreeMap::new(),
            loss_scales: BTreeMap::new(),
            values: BTreeMap::new(),
        }
    }

    /// Parses a manifest of this version's format.
    pub(super) fn parse(text: &str) -> Result<Self, String> {
        #[derive(Deserialize)]
        struct Version {
            format: u32,
            burn_ddp: String,
        }
        let invalid = |e: serde_json::Error| format!("its {MANIFEST} cannot be read: {e}");
        let Version { format, burn_ddp } = serde_json::from_str(text).map_err(invalid)?;
        if format != FORMAT {
            return Err(format!(
                "it was written by burn-ddp {burn_ddp} in format {format}; this version reads format {FORMAT}"
            ));
        }
        serde_json::from_str(text).map_err(invalid)
    }

    /// Names and contents of the manifest's two files.
    pub(super) fn to_files(&self) -> Result<[(&'static str, Vec<u8>); 2], String> {
        let mut text = serde_json::to_vec_pretty(self).map_err(|e| e.to_string())?;
        text.push(b'\n');
        let checksum = checksum_line(&text);
        Ok([(MANIFEST, text), (MANIFEST_CHECKSUM, checksum.into_bytes())])
    }
}

impl Checksum {
    pub(super) fn of(bytes: &[u8]) -> Self {
        #[cfg(test)]
        HASHED.set(HASHED.get() + bytes.len());
        Checksum { bytes: bytes.len() as u64, sha256: hex(Sha256::digest(bytes).as_slice()) }
    }

    /// Checksum of `bytes` bytes that went through `sha`.
    pub(super) fn new(bytes: u64, sha: Sha256) -> Self {
        Checksum { bytes, sha256: hex(sha.finalize().as_slice()) }
    }

    /// Checksum of a file, which is read in pieces.
    pub(super) fn of_file(file: &mut File) -> io::Result<Self> {
        let (mut sha, mut piece, mut bytes) = (Sha256::new(), vec![0; 1 << 20], 0);
        loop {
            match file.read(&mut piece) {
                Ok(0) => return Ok(Checksum::new(bytes, sha)),
                Ok(n) => {
                    sha.update(&piece[..n]);
                    bytes += n as u64;
                }
                Err(e) if e.kind() == ErrorKind::Interrupted => {}
                Err(e) => return Err(e),
            }
        }
    }
}

/// Why a checkpoint cannot be loaded.
#[derive(Debug)]
pub(super) enum VerifyError {
    /// Incomplete or changed since it was written.
    Corrupt(String),
    /// Complete, in a format that this version does not read.
    Unsupported(String),
    /// Not there any more: another job has removed it.
    Vanished,
    /// The storage does not answer, or refuses to: the checkpoint may be complete.
    Unreadable(ErrorKind, String),
}

impl VerifyError {
    /// The failure to do something with the checkpoint at `path` for this reason.
    pub(super) fn failure(&self, cannot: &str, path: &Path) -> FileFailure {
        let failure = FileFailure::of(cannot, path, self.to_string());
        match self {
            VerifyError::Corrupt(_) => failure.of_kind(ErrorKind::InvalidData),
            VerifyError::Unreadable(kind, _) => failure.of_kind(*kind),
            VerifyError::Unsupported(_) | VerifyError::Vanished => failure,
        }
    }
}

impl fmt::Display for VerifyError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            VerifyError::Corrupt(reason) | VerifyError::Unsupported(reason) | VerifyError::Unreadable(_, reason) => {
                f.write_str(reason)
            }
            VerifyError::Vanished => f.write_str("it was removed"),
        }
    }
}

/// Compares every file of a checkpoint with its checksum. Returns the text of the manifest.
pub(super) fn verify(storage: &dyn Storage, checkpoint: &str) -> Result<String, VerifyError> {
    let corrupt = |name: &str, reason: &str| VerifyError::Corrupt(format!("{name}: {reason}"));
    let failed = |name: &str, e: &io::Error| verify_error(storage, checkpoint, name, e);
    let (text, manifest) = read(storage, checkpoint)?;
    for (name, expected) in &manifest.files {
        let file = storage.open(checkpoint, name);
        let actual = file.and_then(|mut file| Checksum::of_file(&mut file)).map_err(|e| failed(name, &e))?;
        if actual != *expected {
            let (expected, actual) = (expected.bytes, actual.bytes);
            return Err(corrupt(name, &format!("checksum mismatch ({actual} bytes, {expected} expected)")));
        }
    }
    Ok(text)
}

/// Reads the manifest of a checkpoint, and compares it with its checksum. Returns its text, too.
pub(super) fn read(storage: &dyn Storage, checkpoint: &str) -> Result<(String, Manifest), VerifyError> {
    let read = |name: &str| {
        let text = storage.open(checkpoint, name).and_then(io::read_to_string);
        text.map_err(|e| verify_error(storage, checkpoint, name, &e))
    };
    let (text, checksum) = (read(MANIFEST)?, read(MANIFEST_CHECKSUM)?);
    if checksum != checksum_line(text.as_bytes()) {
        return Err(VerifyError::Corrupt(format!("{MANIFEST}: checksum mismatch")));
    }
    let manifest = Manifest::parse(&text).map_err(VerifyError::Unsupported)?;
    Ok((text, manifest))
}

/// The reason why a checkpoint cannot be loaded, from the I/O error of reading one of its files.
fn verify_error(storage: &dyn Storage, checkpoint: &str, name: &str, error: &io::Error) -> VerifyError {
    // A job that removes a checkpoint renames it first, and then removes its files.
    match storage.contains(checkpoint) {
        Ok(true) => {}
        Ok(false) => return VerifyError::Vanished,
        Err(e) => return VerifyError::Unreadable(e.kind(), e.to_string()),
    }
    let reason = format!("{name}: {error}");
    match error.kind() {
        // A file is missing or damaged.
        ErrorKind::NotFound | ErrorKind::NotADirectory | ErrorKind::IsADirectory | ErrorKind::InvalidData => {
            VerifyError::Corrupt(reason)
        }
        kind => VerifyError::Unreadable(kind, reason),
    }
}

fn checksum_line(manifest: &[u8]) -> String {
    format!("{}  {MANIFEST}\n", Checksum::of(manifest).sha256)
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|b| format!("{b:02x}")).collect()
}
