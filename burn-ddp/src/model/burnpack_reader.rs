//! Reading a burnpack one tensor at a time.

use std::collections::HashMap;
use std::fs::File;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use burn::tensor::TensorData;

use super::burnpack_header::{Item, read_header};
use super::burnpack_tensors::{StoredTensor, tensors};
use crate::file_failure::FileFailure;

/// A file whose header was read.
#[derive(Debug)]
pub(crate) struct TensorFile {
    file: File,
    path: PathBuf,
    pub(crate) header: Item,
    /// Offset of the data in the file.
    start: usize,
    tensors: HashMap<String, (StoredTensor, Range<usize>)>,
}

impl TensorFile {
    /// Reads the header of `file`, which is at `path`.
    pub(crate) fn read(mut file: File, path: &Path) -> Result<Self, FileFailure> {
        let at = |e: String| FileFailure::from(e).at(path);
        let (header, start) = read_header(&mut file).map_err(at)?;
        let tensors =
            tensors(&header).map_err(at)?.into_iter().map(|(t, place)| (t.name.clone(), (t, place))).collect();
        Ok(TensorFile { file, path: path.into(), header, start, tensors })
    }

    /// Reads a tensor. Each tensor can be read once.
    pub(crate) fn tensor(&mut self, name: &str) -> Result<TensorData, FileFailure> {
        let removed = self.tensors.remove(name);
        let (stored, place) = removed.ok_or_else(|| self.failed(format!("it has no {name}")))?;
        Ok(TensorData::from_bytes_vec(self.bytes(place)?, stored.dims, stored.dtype))
    }

    /// Reads a range of the data.
    pub(crate) fn bytes(&self, place: Range<usize>) -> Result<Vec<u8>, FileFailure> {
        let metadata = self.file.metadata().map_err(|e| self.failed(e))?;
        if metadata.len() < (self.start + place.end) as u64 {
            return Err(self.failed("it is cut off"));
        }
        let mut bytes = vec![0; place.len()];
        self.fill(place.start, &mut bytes)?;
        Ok(bytes)
    }

    /// Reads the data from `start` on.
    pub(crate) fn fill(&self, start: usize, bytes: &mut [u8]) -> Result<(), FileFailure> {
        self.file.read_exact_at(bytes, (self.start + start) as u64).map_err(|e| self.failed(e))
    }

    fn failed(&self, cause: impl Into<FileFailure>) -> FileFailure {
        cause.into().at(&self.path)
    }
}
