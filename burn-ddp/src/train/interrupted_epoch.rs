//! The position in an epoch in which a signal stopped the ranks: a file beside Burn's checkpoint of that epoch, which
//! Burn writes at the end of epochs only. The file also says whether Burn's files of that epoch belong together: other
//! files are never written over older ones.

use std::fs;
use std::io::{self, ErrorKind, Write};
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
    /// Hash of the parameters in the checkpoint.
    parameters: String,
    /// False while the checkpoint is written, over an older one of this epoch perhaps.
    is_complete: bool,
}

/// The files of interrupted epochs, on rank 0's machine.
pub(super) struct InterruptedEpochs<'a> {
    ddp: &'a Ddp,
    directory: PathBuf,
    /// The checkpoint that is being written, if it needs a file here.
    pub(super) under_way: Option<UnderWay>,
}

/// The epoch whose checkpoint is being written, and its state if it is an interrupted one.
pub(super) struct UnderWay(usize, Option<InterruptedEpoch>);

impl UnderWay {
    /// The epoch, if the checkpoint is that of its middle.
    pub(super) fn middle_of(&self) -> Option<usize> {
        self.1.as_ref().map(|_| self.0)
    }
}

impl<'a> InterruptedEpochs<'a> {
    /// The files of a training in `directory`.
    pub(super) fn of_training(ddp: &'a Ddp, directory: &Path) -> Self {
        InterruptedEpochs { ddp, directory: checkpoint_directory(directory), under_way: None }
    }

    /// Writes the state of `epoch`, in which the ranks stop with `model`, before the checkpoint. *Collective*.
    pub(super) fn begin<M: Module>(
        &mut self,
        epoch: usize,
        position: Position,
        was_trained: bool,
        model: &M,
    ) -> Result<()> {
        let state = InterruptedEpoch { position, was_trained, parameters: param_hash(model)?, is_complete: false };
        main_first::on_main(self.ddp.group(), || self.write(epoch, &state))?;
        self.under_way = Some(UnderWay(epoch, Some(state)));
        Ok(())
    }

    /// Notes that the checkpoint of the end of `epoch` is about to be written over that of its middle, if there is one.
    /// *Collective*.
    pub(super) fn replace(&mut self, epoch: usize) -> Result<()> {
        let there = main_first::on_main(self.ddp.group(), || match self.read(epoch)? {
            Some(text) => {
                let state = parse(&text).map_err(|e| self.failure("read", epoch, &e.to_string()))?;
                self.write(epoch, &InterruptedEpoch { is_complete: false, ..state })?;
                Ok(true)
            }
            None => Ok(false),
        })?;
        self.under_way = there.then_some(UnderWay(epoch, None));
        Ok(())
    }

    /// Notes, on rank 0, that the checkpoint that was under way is complete.
    pub(super) fn end(&self, under_way: Option<UnderWay>) -> Result<()> {
        let Some(UnderWay(epoch, state)) = under_way.filter(|_| self.ddp.is_main()) else { return Ok(()) };
        let ended = match state {
            Some(state) => self.write(epoch, &InterruptedEpoch { is_complete: true, ..state }),
            None => fs::remove_file(self.file(epoch)).map_err(|e| self.failure("remove", epoch, &e.to_string())),
        };
        ended.map_err(|e| Error::file(e.to_string()))
    }

    /// The state in which the checkpoint of `epoch` was saved, if the `parameters` with this hash, which were loaded
    /// from it, are in the middle of that epoch. *Collective*.
    pub(super) fn load(&self, epoch: usize, parameters: &str) -> Result<Option<InterruptedEpoch>> {
        // As text: what `Position` flattens can be sent in no other form.
        let text = main_first::on_main(self.ddp.group(), || {
            let Some(text) = self.read(epoch)? else { return Ok(None) };
            let state = parse(&text).map_err(|e| self.failure("read", epoch, &e.to_string()))?;
            if !state.is_complete {
                let reason = format!(
                    "the checkpoint of epoch {epoch} is not complete: the job ended while it was written. Go on from \
                    an earlier epoch, or, if its files are from somewhere else, remove {}",
                    self.file(epoch).display()
                );
                return Err(FileFailure::from(reason).at(&self.file(epoch)));
            }
            Ok(Some(text).filter(|_| state.parameters == parameters))
        })?;
        text.map(|text| parse(&text)).transpose().map_err(|e| Error::file(e.to_string()))
    }

    fn read(&self, epoch: usize) -> Result<Option<String>, FileFailure> {
        match fs::read_to_string(self.file(epoch)) {
            Ok(text) => Ok(Some(text)),
            Err(e) if e.kind() == ErrorKind::NotFound => Ok(None),
            Err(e) => Err(self.failure("read", epoch, &e.to_string())),
        }
    }

    /// Writes the file, whole or not at all.
    fn write(&self, epoch: usize, state: &InterruptedEpoch) -> Result<(), FileFailure> {
        let write = || -> io::Result<()> {
            fs::create_dir_all(&self.directory)?;
            let mut file = tempfile::NamedTempFile::new_in(&self.directory)?;
            file.write_all(&serde_json::to_vec(state)?)?;
            file.as_file().sync_all()?;
            file.persist(self.file(epoch))?;
            Ok(())
        };
        write().map_err(|e| self.failure("write", epoch, &e.to_string()))
    }

    fn file(&self, epoch: usize) -> PathBuf {
        position_file(&self.directory, epoch)
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

fn position_file(directory: &Path, epoch: usize) -> PathBuf {
    directory.join(format!("position-{epoch}.json"))
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
        let is_complete = |epoch: &usize| match fs::read_to_string(position_file(&directory, *epoch)) {
            Ok(text) => parse(&text).is_ok_and(|state| state.is_complete),
            Err(_) => true,
        };
        let whole = |epoch: &usize| has("optim", *epoch) && has("scheduler", *epoch) && is_complete(epoch);
        Ok(epochs.filter(whole).max())
    })
}
