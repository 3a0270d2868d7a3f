//! Burn's file checkpointer with files on rank 0's machine only.

use std::path::Path;

use burn::tensor::Bytes;
use burn::train::checkpoint::{Checkpoint, Checkpointer, CheckpointerError, FileCheckpointer};

use crate::Ddp;

/// Writes and reads files on rank 0 and broadcasts what it read; from
/// [`DdpTrainer::checkpointer`](super::DdpTrainer::checkpointer).
pub struct SharedCheckpointer {
    ddp: Ddp,
    /// `None` on ranks other than 0.
    files: Option<FileCheckpointer>,
}

impl SharedCheckpointer {
    pub(super) fn new(ddp: Ddp, directory: &Path, name: &str) -> Self {
        let files = ddp.is_main().then(|| FileCheckpointer::new(directory, name));
        SharedCheckpointer { ddp, files }
    }
}

impl<R: Checkpoint> Checkpointer<R> for SharedCheckpointer {
    fn save(&self, epoch: usize, record: R) -> Result<(), CheckpointerError> {
        self.files.as_ref().map_or(Ok(()), |files| files.save(epoch, record))
    }

    fn delete(&self, epoch: usize) -> Result<(), CheckpointerError> {
        self.files.as_ref().map_or(Ok(()), |files| Checkpointer::<R>::delete(files, epoch))
    }

    /// *Collective*: Burn calls it on every rank before the training begins and waits for it, so the group is free.
    fn restore(&self, epoch: usize) -> Result<R, CheckpointerError> {
        let read = self.files.as_ref().map(|files| {
            let record: R = files.restore(epoch).map_err(|e| e.to_string())?;
            let bytes = record.checkpoint_into_bytes().map_err(|e| e.to_string())?;
            Ok(bytes.to_vec())
        });
        let shared: Result<Vec<u8>, String> =
            self.ddp.group().broadcast_object(read, 0).map_err(|e| CheckpointerError::Unknown(e.to_string()))?;
        let bytes = shared.map_err(CheckpointerError::Unknown)?;
        R::checkpoint_from_bytes(Bytes::from_bytes_vec(bytes)).map_err(CheckpointerError::Record)
    }
}
