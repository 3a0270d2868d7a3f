//! The result of an `_async` call.

use std::fmt;
use std::sync::{Arc, Condvar, Mutex};

use crate::call::CallingThread;
use crate::poison_free_locks::{lock, wait};
use crate::{Error, Result};

/// A collective that was started and runs on a thread of its group; made by the methods of
/// [`ProcessGroup`](crate::ProcessGroup) whose names end in `_async`.
///
/// It owns the buffers; [`wait`](Self::wait) gives them back. Dropping it does not block and does not stop the
/// collective, which still runs in its turn. If it fails, the rank's next call returns the error, unless it was an
/// [`Error::InvalidArgument`], which is only logged. A process that ends does not wait for pending collectives: wait
/// for all handles first.
///
/// ```
/// use burn_ddp_comm::{ReduceOp, World};
///
/// World::spawn(2, |world| {
///     let group = world.group()?;
///     let sums: Vec<_> = (0..4)
///         .map(|nth| group.all_reduce_async(vec![nth as f32; 1000], ReduceOp::Sum))
///         .collect();
///     // The program can compute here. A blocking call on the group runs after the `_async` calls before it.
///     group.barrier()?;
///     for (nth, sum) in sums.into_iter().enumerate() {
///         assert!(sum.is_done());
///         assert_eq!(sum.wait()?, [2.0 * nth as f32; 1000]);
///     }
///     let error = group.all_reduce_async(vec![1_i32], ReduceOp::Mean).wait().unwrap_err();
///     assert!(error.group_usable() && error.to_string().contains("mean is not defined for i32"));
///     Ok::<_, burn_ddp_comm::Error>(())
/// }).into_iter().collect::<Result<(), _>>()?;
/// # Ok::<(), burn_ddp_comm::Error>(())
/// ```
///
/// Buffers are passed and yielded as vectors:
///
/// ```
/// # use burn_ddp_comm::{ReduceOp, World};
/// World::spawn(2, |world| {
///     let (group, me) = (world.group()?, world.rank() as i32);
///     let mean = group.all_reduce_weighted_async(vec![me as f32], [3.0, 1.0][world.rank()]);
///     let most = group.reduce_async(vec![me], ReduceOp::Max, 0);
///     let part = group.reduce_scatter_async(vec![me, 10], ReduceOp::Sum);
///     let copy = group.broadcast_async(vec![me], 1);
///     let rows = group.all_gather_async(vec![me]);
///     let root = group.gather_async(vec![me], 0);
///     let mine = group.scatter_async((me == 0).then(|| vec![5, 6]), 1, 0);
///     let turn = group.all_to_all_async(vec![10 * me, 10 * me + 1]);
///     group.barrier_async().wait()?; // after all of them
///     assert_eq!((mean.wait()?, most.wait()?), (vec![0.25], vec![1])); // on rank 1 its own 1
///     assert_eq!((part.wait()?, copy.wait()?), (vec![[1, 20][world.rank()]], vec![1]));
///     assert_eq!((rows.wait()?, root.wait()?), (vec![0, 1], (me == 0).then(|| vec![0, 1])));
///     assert_eq!((mine.wait()?, turn.wait()?), (vec![5 + me], vec![me, 10 + me]));
///     Ok::<_, burn_ddp_comm::Error>(())
/// }).into_iter().collect::<Result<(), _>>()?;
/// # Ok::<(), burn_ddp_comm::Error>(())
/// ```
#[must_use = "its buffers and its error come out of `wait`"]
pub struct Pending<R> {
    outcome: Arc<Outcome<R>>,
    /// The thread that runs the collective.
    worker: CallingThread,
}

struct Outcome<R> {
    /// Set once by the [`Promise`], taken by `wait`.
    result: Mutex<Option<Result<R>>>,
    /// Notified when the result is set.
    done: Condvar,
}

/// The other end of a [`Pending`]: sets its result, or sets an error when dropped without one.
pub(super) struct Promise<R> {
    outcome: Arc<Outcome<R>>,
    kept: bool,
}

/// A result that the thread `worker` will set, and the end by which it does so.
pub(super) fn pending<R>(worker: &CallingThread) -> (Pending<R>, Promise<R>) {
    let outcome = Arc::new(Outcome { result: Mutex::new(None), done: Condvar::new() });
    (Pending { outcome: outcome.clone(), worker: worker.clone() }, Promise { outcome, kept: false })
}

impl<R> Pending<R> {
    /// Blocks until the collective is done, and returns the values that it yields: at most for the deadlines of this
    /// collective and of those that were started before it. Adds no step and no bytes to the cost of the collective.
    ///
    /// # Errors
    /// Those of the collective. [`Error::Internal`] if the thread that runs it has panicked.
    pub fn wait(self) -> Result<R> {
        let mut result = lock(&self.outcome.result);
        self.worker.awaited(|| {
            loop {
                match result.take() {
                    Some(result) => return result,
                    None => result = wait(&self.outcome.done, result),
                }
            }
        })
    }

    /// True if the collective is done, so that [`wait`](Self::wait) would return at once. Never blocks.
    pub fn is_done(&self) -> bool {
        lock(&self.outcome.result).is_some()
    }
}

impl<R> Promise<R> {
    pub(super) fn keep(mut self, result: Result<R>) {
        self.kept = true;
        self.set(result);
    }

    fn set(&self, result: Result<R>) {
        // Only this end is left: no `wait` will return the error.
        if let (1, Err(error)) = (Arc::strong_count(&self.outcome), &result) {
            tracing::warn!(%error, "an `_async` collective failed after its `Pending` was dropped");
        }
        *lock(&self.outcome.result) = Some(result);
        self.outcome.done.notify_all();
    }
}

/// Without a result, gives the waiting thread an error.
impl<R> Drop for Promise<R> {
    fn drop(&mut self) {
        if !self.kept {
            self.set(Err(Error::Internal {
                message: "the thread that runs `_async` collectives ended before this one was done".to_string(),
            }));
        }
    }
}

impl<R> fmt::Debug for Pending<R> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Pending").field("done", &self.is_done()).finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_broken_promise_is_an_error() {
        let (pending, promise) = pending::<u8>(&CallingThread::new());
        assert!(!pending.is_done());
        drop(promise);
        assert!(pending.is_done());
        assert!(matches!(pending.wait(), Err(Error::Internal { .. })));
    }
}
