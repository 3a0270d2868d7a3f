//! The position in an epoch in which a signal stopped the ranks: a file beside Burn's checkpoint of that epoch, which
//! Burn writes at the end of epochs only.

use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use burn::module::Module;
use serde::{Deserialize, Serialize};

use crate::data::Position;
use crate::file_failure::FileFailure;
use crate::model::param_hash::param_hash;
use crate::{Ddp, Error, Result, main_first};

/// State of an epoch that was interrupted.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct InterruptedEpoch {
    pub(super) position: Position,
    /// True if all of it was trained: the validation is missing.
    pub(super) was_trained: bool,
    /// Hash of the parameters in the checkpoint. With others the file is that of an earlier run.
    parameters: String,
}

/// The files of interrupted epochs, on rank 0's machine.
pub(super) struct InterruptedEpochs<'a> {
    ddp: &'a Ddp,
    directory: PathBuf,
}

impl<'a> InterruptedEpochs<'a> {
    /// Those of a training in `directory`.
    pub(super) fn of_training(ddp: &'a Ddp, directory: &Path) -> Self {
        InterruptedEpochs { ddp, directory: checkpoint_directory(directory) }
    }

    /// Writes the state of `epoch`, in which the ranks stop with `model`. *Collective*.
    pub(super) fn save<M: Module>(&self, epoch: usize, position: Position, was_trained: bool, model: &M) -> Result<()> {
        let state = InterruptedEpoch { position, was_trained, parameters: param_hash(model)? };
        main_first::on_main(self.ddp.group(), || {
            let written = fs::create_dir_all(&self.directory)
                .and_then(|()| Ok(serde_json::to_vec(&state)?))
                .and_then(|text| fs::write(self.file(epoch), text));
            written.map_err(|e| self.failure("write", epoch, &e.to_string()))
        })
    }

    /// The state in which the checkpoint of `epoch` was saved, if the `parameters` with this hash, which were loaded
    /// from it, are in the middle of that epoch. *Collective*.
    pub(super) fn load(&self, epoch: usize, parameters: &str) -> Result<Option<InterruptedEpoch>> {
        // As text: what `Position` flattens can be sent in no other form.
        let text = main_first::on_main(self.ddp.group(), || {
            let text = match fs::read_to_string(self.file(epoch)) {
                Ok(text) => text,
                Err(e) if e.kind() == ErrorKind::NotFound => return Ok(None),
                Err(e) => return Err(self.failure("read", epoch, &e.to_string())),
            };
            let state = parse(&text).map_err(|e| self.failure("read", epoch, &e.to_string()))?;
            Ok(Some(text).filter(|_| state.parameters == parameters))
        })?;
        text.map(|text| parse(&text)).transpose().map_err(|e| Error::file(e.to_string()))
    }

    fn file(&self, epoch: usize) -> PathBuf {
        self.directory.join(format!("position-{epoch}.json"))
    }

    fn failure(&self, verb: &str, epoch: usize, reason: &str) -> FileFailure {
        let file = self.file(epoch);
        FileFailure::from(format!("cannot {verb} the position in epoch {epoch}, {}: {reason}", file.display()))
            .at(&file)
    }
}

fn parse(text: &str) -> serde_json::Result<InterruptedEpoch> {
    serde_json::from_str(text)
}

/// Directory of the default checkpointers of a training.
fn checkpoint_directory(of_training: &Path) -> PathBuf {
    of_training.join("checkpoint")
}

/// The last epoch of which the default checkpointers of a training in `directory` have written all files, on rank 0's
/// machine. *Collective*.
#[track_caller]
pub(super) fn last_epoch(ddp: &Ddp, directory: &Path) -> Result<Option<usize>> {
    main_first::on_main(ddp.group(), || {
        let directory = checkpoint_directory(directory);
        let entries = match fs::read_dir(&directory) {
            Ok(entries) => entries,
            Err(e) if e.kind() == ErrorKind::NotFound => return Ok(None),
            Err(e) => {
                let text = format!("cannot look for checkpoints in {}: {e}", directory.display());
                return Err(FileFailure::from(text).at(&directory));
            }
        };
        let epoch = |name: &str| name.strip_prefix("model-")?.strip_suffix(".bpk")?.parse::<usize>().ok();
        let epochs = entries.flatten().filter_map(|entry| epoch(entry.file_name().to_str()?));
        let has = |name: &str, epoch: usize| directory.join(format!("{name}-{epoch}.bpk")).exists();
        Ok(epochs.filter(|epoch| has("optim", *epoch) && has("scheduler", *epoch)).max())
    })
}
