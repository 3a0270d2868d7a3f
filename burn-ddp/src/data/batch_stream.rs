//! The batches of one epoch or one evaluation, taken from the pool; errors name the batch.

use std::cell::Cell;
use std::sync::Arc;
use std::time::{Duration, Instant};

use burn_ddp_comm::World;

use super::DataError;
use super::prefetch::{BatchList, Pass, Pool};

/// One pass over a list of batches, which begins when the first batch is asked for.
pub(super) struct BatchStream<O> {
    pool: Arc<Pool<O>>,
    /// `None` before the first batch and after `end`.
    pass: Option<Pass<O>>,
    /// Batches that were asked for.
    taken: usize,
}

impl<O: Send + 'static> BatchStream<O> {
    pub(super) fn new(pool: Arc<Pool<O>>) -> Self {
        Self { pool, pass: None, taken: 0 }
    }

    /// Number of batches that were asked for, loaded or not.
    pub(super) fn taken(&self) -> usize {
        self.taken
    }

    /// Takes the next batch, and waits until it is loaded, with a deadline if there are several ranks. The first call
    /// makes the list of all batches by `list`; `name` names the batch in an error.
    ///
    /// # Errors
    ///
    /// The error of `list`, of the dataset or of a worker, or the cause of the job's end.
    pub(super) fn take(
        &mut self,
        world: &World,
        list: impl FnOnce() -> Result<BatchList, DataError>,
        name: impl FnOnce() -> String,
    ) -> Result<O, DataError> {
        self.taken += 1;
        let pass = match &mut self.pass {
            Some(pass) => pass,
            None => {
                let started = self.pool.start(list()?);
                let not_started =
                    |(worker, e): (usize, std::io::Error)| DataError::WorkerNotStarted { worker, source: e.into() };
                self.pass.insert(started.map_err(not_started)?)
            }
        };
        let timeout = world.options().timeout;
        // In a world of 1 no other rank waits, so the storage may be slow without a time limit, as without workers.
        let deadline = if world.world_size() == 1 { Duration::MAX } else { timeout };
        let (asked, warned) = (Instant::now(), Cell::new(false));
        let check = || {
            if asked.elapsed() >= timeout && !warned.replace(true) {
                tracing::warn!(
                    target: "burn_ddp::data",
                    "a batch has been loading for {} s, and training waits for it: is its storage reachable?",
                    timeout.as_secs()
                );
            }
            world.check()
        };
        match pass.next(deadline, check) {
            Some(loaded) => loaded.map_err(|failure| DataError::from_failure(name(), failure, timeout)),
            None => unreachable!("a caller asks for as many batches as its list has"),
        }
    }

    /// Frees the workers for the next pass.
    pub(super) fn end(&mut self) {
        self.pass = None;
    }
}
