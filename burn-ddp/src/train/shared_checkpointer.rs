//! Burn's file checkpointer with files on rank 0's machine only.

use std::panic::Location;
use std::path::Path;

use burn::tensor::Bytes;
use burn::train::checkpoint::{Checkpoint, Checkpointer, CheckpointerError, FileCheckpointer};
use burn_ddp_comm::attribute_calls;

use crate::model::digest::digest;
use crate::{Ddp, Error, Result, agreement, chunked_broadcast, main_first};

/// Writes and reads files on rank 0, and broadcasts the records that it reads; from
/// [`DdpTrainer::checkpointer`](super::DdpTrainer::checkpointer).
pub struct SharedCheckpointer {
    ddp: Ddp,
    /// `None` on ranks other than 0.
    files: Option<FileCheckpointer>,
    /// The line of the program that made the checkpointer.
    site: &'static Location<'static>,
}

impl SharedCheckpointer {
    pub(super) fn new(ddp: Ddp, directory: &Path, name: &str, site: &'static Location<'static>) -> Self {
        let files = ddp.is_main().then(|| FileCheckpointer::new(directory, name));
        SharedCheckpointer { ddp, files, site }
    }

    /// The record that rank 0 reads. *Collective*.
    fn share<R: Checkpoint>(&self, epoch: usize) -> Result<R> {
        let (group, mut read) = (self.ddp.group(), None);
        let (len, sent) = main_first::on_main(group, || {
            let bytes =
                self.read::<R>(epoch).map_err(|e| format!("could not read the checkpoint of epoch {epoch}: {e}"))?;
            let summary = (bytes.len(), digest(&bytes));
            read = Some(bytes);
            Ok(summary)
        })?;
        let bytes = match read {
            Some(bytes) => {
                chunked_broadcast::send(group, &bytes)?;
                bytes
            }
            None => Bytes::from_bytes_vec(chunked_broadcast::receive(group, len, 0)?),
        };
        let record = if digest(&bytes) == sent {
            R::checkpoint_from_bytes(bytes).map_err(|e| Error::file(e.to_string()))
        } else {
            Err(Error::file(format!("the {len} bytes of the record arrived damaged")))
        };
        agreement::on_outcome(group, &format!("load the checkpoint of epoch {epoch}"), record)
    }

    /// The record of `epoch` as bytes, on rank 0.
    fn read<R: Checkpoint>(&self, epoch: usize) -> Result<Bytes, CheckpointerError> {
        let files = self.files.as_ref().ok_or_else(|| CheckpointerError::Unknown("only rank 0 has files".into()))?;
        let record: R = files.restore(epoch)?;
        record.checkpoint_into_bytes().map_err(CheckpointerError::Record)
    }
}

impl<R: Checkpoint> Checkpointer<R> for SharedCheckpointer {
    fn save(&self, epoch: usize, record: R) -> Result<(), CheckpointerError> {
        self.files.as_ref().map_or(Ok(()), |files| files.save(epoch, record))
    }

    fn delete(&self, epoch: usize) -> Result<(), CheckpointerError> {
        self.files.as_ref().map_or(Ok(()), |files| Checkpointer::<R>::delete(files, epoch))
    }

    /// *Collective*. It may use the group of the program's own calls, since Burn calls it on every rank before the
    /// training begins, and waits for it.
    fn restore(&self, epoch: usize) -> Result<R, CheckpointerError> {
        attribute_calls(self.site, || self.share(epoch)).map_err(|e| CheckpointerError::Unknown(e.to_string()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use burn::store::RecordError;
    use std::path::PathBuf;

    /// A record that is its bytes.
    struct Blob(Bytes);

    impl Checkpoint for Blob {
        fn save(self, path: PathBuf) -> Result<(), CheckpointerError> {
            std::fs::write(path, &*self.0).map_err(CheckpointerError::IOError)
        }

        fn load(path: PathBuf) -> Result<Self, CheckpointerError> {
            let bytes = std::fs::read(path).map_err(CheckpointerError::IOError)?;
            Ok(Blob(Bytes::from_bytes_vec(bytes)))
        }

        fn checkpoint_from_bytes(bytes: Bytes) -> Result<Self, RecordError> {
            Ok(Blob(bytes))
        }

        fn checkpoint_into_bytes(self) -> Result<Bytes, RecordError> {
            Ok(self.0)
        }
    }

    /// More than one object can carry.
    #[test]
    fn a_record_may_be_larger_than_any_object() {
        const LEN: usize = 260 << 20;
        // A mark per MiB.
        let marks = || (0..LEN).step_by(1 << 20).map(|at| (at, (at >> 20) as u8 | 1));
        let directory = tempfile::tempdir().unwrap();
        let ranks = Ddp::spawn(2, |ddp| {
            let checkpointer = SharedCheckpointer::new(ddp.clone(), directory.path(), "blob", Location::caller());
            if ddp.is_main() {
                let mut bytes = vec![0; LEN];
                marks().for_each(|(at, mark)| bytes[at] = mark);
                checkpointer.save(2, Blob(Bytes::from_bytes_vec(bytes)))?;
                checkpointer.save(1, Blob(Bytes::from_bytes_vec(vec![])))?;
            }
            let missing: Result<Blob, _> = checkpointer.restore(3);
            let missing = missing.err().unwrap().to_string();
            assert!(missing.contains("rank 0 could not read the checkpoint of epoch 3"), "{missing}");
            let empty: Blob = checkpointer.restore(1)?;
            assert_eq!(empty.0.len(), 0);
            let Blob(bytes) = checkpointer.restore(2)?;
            Ok((bytes.len(), marks().all(|(at, mark)| bytes[at] == mark)))
        });
        assert_eq!(ranks.unwrap(), [(LEN, true); 2]);
    }
}
