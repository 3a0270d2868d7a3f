//! Reading a burnpack one tensor at a time.

use std::collections::HashMap;
use std::fs::File;
use std::ops::Range;
use std::os::unix::fs::FileExt;

use burn::tensor::TensorData;

use super::burnpack_header::{Item, read_header};
use super::burnpack_tensors::{StoredTensor, tensors};

/// A file whose header was read.
#[derive(Debug)]
pub(crate) struct TensorFile {
    file: File,
    pub(crate) header: Item,
    /// Offset of the data in the file.
    start: usize,
    tensors: HashMap<String, (StoredTensor, Range<usize>)>,
}

impl TensorFile {
    pub(crate) fn read(mut file: File) -> Result<Self, String> {
        let (header, start) = read_header(&mut file)?;
        let tensors = tensors(&header)?.into_iter().map(|(t, place)| (t.name.clone(), (t, place))).collect();
        Ok(TensorFile { file, header, start, tensors })
    }

    /// Reads a tensor. Each tensor can be read once.
    pub(crate) fn tensor(&mut self, name: &str) -> Result<TensorData, String> {
        let (stored, place) = self.tensors.remove(name).ok_or_else(|| format!("it has no {name}"))?;
        Ok(TensorData::from_bytes_vec(self.bytes(place)?, stored.dims, stored.dtype))
    }

    /// Reads a range of the data.
    pub(crate) fn bytes(&self, place: Range<usize>) -> Result<Vec<u8>, String> {
        let failed = |e: std::io::Error| e.to_string();
        if self.file.metadata().map_err(failed)?.len() < (self.start + place.end) as u64 {
            return Err("it is cut off".into());
        }
        let mut bytes = vec![0; place.len()];
        self.fill(place.start, &mut bytes)?;
        Ok(bytes)
    }

    /// Reads the data from `start` on.
    pub(crate) fn fill(&self, start: usize, bytes: &mut [u8]) -> Result<(), String> {
        self.file.read_exact_at(bytes, (self.start + start) as u64).map_err(|e| e.to_string())
    }
}
