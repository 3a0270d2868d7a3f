//! The thread that writes a checkpoint while training goes on.

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;

use burn_ddp_comm::ProcessGroup;

use crate::{Error, Result};

type Outcome = std::result::Result<(), String>;

/// The checkpoint that is under way.
#[derive(Debug, Default)]
pub(crate) struct Writing(Mutex<State>);

#[derive(Debug, Default)]
enum State {
    #[default]
    Idle,
    /// On rank 0.
    Here(JoinHandle<Outcome>),
    /// On the others.
    Elsewhere,
}

impl Writing {
    /// Rank 0 starts to write.
    pub(crate) fn start(&self, step: u64, write: impl FnOnce() -> Outcome + Send + 'static) -> Outcome {
        let thread = std::thread::Builder::new().name(format!("checkpoint {step}"));
        let thread =
            thread.spawn(write).map_err(|e| format!("cannot start the thread that writes checkpoints: {e}"))?;
        *self.lock() = State::Here(thread);
        Ok(())
    }

    /// Rank 0 is writing.
    pub(crate) fn expect(&self) {
        *self.lock() = State::Elsewhere;
    }

    pub(crate) fn is_under_way(&self) -> bool {
        matches!(&*self.lock(), State::Here(thread) if !thread.is_finished())
    }

    /// Waits for the end of what is under way. *Collective*; the ranks know alike whether something is.
    #[track_caller]
    pub(crate) fn wait(&self, group: &ProcessGroup) -> Result<()> {
        let outcome = match std::mem::take(&mut *self.lock()) {
            State::Idle => return Ok(()),
            State::Here(thread) => {
                Some(thread.join().unwrap_or_else(|_| Err("panicked while it wrote a checkpoint".into())))
            }
            State::Elsewhere => None,
        };
        let outcome: Outcome = group.broadcast_object(outcome, 0)?;
        outcome.map_err(|reason| Error::File(format!("rank 0 {reason}")))
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
