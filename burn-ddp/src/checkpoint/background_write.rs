//! Writing a checkpoint on a thread of rank 0 while training goes on; the directories that a rank has opened.

use std::any::Any;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::thread::JoinHandle;

use burn_ddp_comm::ProcessGroup;

use crate::file_failure::FileFailure;
use crate::{Result, main_first};

type Outcome = std::result::Result<(), FileFailure>;

/// The asynchronous write to one directory of checkpoints, if one is under way. Its presence is the same on all ranks.
#[derive(Debug, Default)]
pub(crate) struct BackgroundWrite(Mutex<State>);

#[derive(Debug, Default)]
enum State {
    #[default]
    Idle,
    /// Rank 0: the thread that writes.
    Here(JoinHandle<Outcome>),
    /// The other ranks: rank 0 writes.
    OnMain,
}

/// A directory of checkpoints that this rank has opened. Handles of one directory share it.
pub(crate) struct OpenedDirectory {
    /// Its absolute path on rank 0's machine.
    pub(super) path: PathBuf,
    /// Lock and entries of the directory, as long as a handle or a thread that writes holds them.
    state: Weak<dyn Any + Send + Sync>,
    /// The group of the handle that opened it.
    pub(crate) group: Arc<ProcessGroup>,
    pub(crate) background: Arc<BackgroundWrite>,
}

impl OpenedDirectory {
    pub(super) fn new(path: PathBuf, group: &Arc<ProcessGroup>) -> Self {
        OpenedDirectory { path, state: Weak::<()>::new(), group: group.clone(), background: Arc::default() }
    }

    /// The state that all holders share; `open` makes it if there is none.
    pub(super) fn state<S: Send + Sync + 'static>(&mut self, open: impl FnOnce(&Path) -> S) -> Arc<S> {
        let held = self.state.upgrade().and_then(|state| state.downcast().ok());
        let state = held.unwrap_or_else(|| Arc::new(open(&self.path)));
        self.state = Arc::<S>::downgrade(&state);
        state
    }
}

impl BackgroundWrite {
    /// Starts `write` on a thread of rank 0. *Collective*.
    ///
    /// # Errors
    ///
    /// [`Error::File`](crate::Error::File) on every rank if rank 0 cannot start the thread; no write is under way then.
    #[track_caller]
    pub(crate) fn start(
        &self,
        group: &ProcessGroup,
        step: u64,
        write: impl FnOnce() -> Outcome + Send + 'static,
    ) -> Result<()> {
        main_first::on_main(group, || {
            let thread = std::thread::Builder::new().name(format!("checkpoint {step}")).spawn(write);
            let failed = |e| format!("cannot start a thread to write checkpoints: {e}");
            *self.lock() = State::Here(thread.map_err(failed)?);
            Ok(())
        })?;
        if group.rank() != 0 {
            *self.lock() = State::OnMain;
        }
        Ok(())
    }

    /// True on rank 0 while the thread has not ended.
    pub(crate) fn is_under_way(&self) -> bool {
        matches!(&*self.lock(), State::Here(thread) if !thread.is_finished())
    }

    /// Waits for the write that is under way, if any. *Collective*.
    ///
    /// # Errors
    ///
    /// [`Error::File`](crate::Error::File) on every rank if rank 0 could not write.
    #[track_caller]
    pub(crate) fn wait(&self, group: &ProcessGroup) -> Result<()> {
        let thread = match std::mem::take(&mut *self.lock()) {
            State::Idle => return Ok(()),
            State::Here(thread) => Some(thread),
            State::OnMain => None,
        };
        let join = |thread: JoinHandle<Outcome>| {
            thread.join().unwrap_or_else(|_| Err("panicked while it wrote a checkpoint".into()))
        };
        main_first::on_main(group, || thread.map_or(Ok(()), join))
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
