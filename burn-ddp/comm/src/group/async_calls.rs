//! Collectives that are started and waited for later.

use std::panic::Location;
use std::sync::Arc;

use super::async_queue::CallQueue;
use super::pending_result::{Pending, pending};
use super::{CallPath, ProcessGroup};
use crate::call::GroupId;
use crate::call::call_arguments::{Caller, Site};
use crate::dtype::Element;
use crate::{Error, ReduceOp, Result};

/// The collectives of the same names, started and not waited for.
///
/// They are done by a thread of the group, in the order in which they were started; blocking calls on the group come
/// after what was started before them. Their deadlines count from when their turn comes. Transfers between two ranks
/// have no such form: their order is that of the program on both.
impl ProcessGroup {
    /// [`barrier`](Self::barrier).
    ///
    /// # Example
    ///
    /// As in [`Pending`].
    #[track_caller]
    pub fn barrier_async(&self) -> Pending<()> {
        self.start(Location::caller(), |calls, caller| calls.barrier(caller))
    }

    /// [`all_reduce`](Self::all_reduce); yields the reduction.
    ///
    /// # Example
    ///
    /// As in [`Pending`].
    #[track_caller]
    pub fn all_reduce_async<T: Element>(&self, mut buf: Vec<T>, op: ReduceOp) -> Pending<Vec<T>> {
        self.start(Location::caller(), move |calls, caller| {
            T::edit(&mut buf, |bytes| calls.all_reduce(caller, T::DTYPE, bytes, op, 0))?;
            Ok(buf)
        })
    }

    /// [`all_reduce_weighted`](Self::all_reduce_weighted); yields the average.
    ///
    /// # Example
    ///
    /// As in [`Pending`].
    #[track_caller]
    pub fn all_reduce_weighted_async<T: Element>(&self, mut buf: Vec<T>, weight: f64) -> Pending<Vec<T>> {
        self.start(Location::caller(), move |calls, caller| {
            T::edit(&mut buf, |bytes| calls.all_reduce_weighted(caller, T::DTYPE, bytes, weight, 0))?;
            Ok(buf)
        })
    }

    /// [`reduce`](Self::reduce); yields the reduction on the root, and on the others what they passed.
    ///
    /// # Example
    ///
    /// As in [`Pending`].
    #[track_caller]
    pub fn reduce_async<T: Element>(&self, mut buf: Vec<T>, op: ReduceOp, root: usize) -> Pending<Vec<T>> {
        self.start(Location::caller(), move |calls, caller| {
            T::edit(&mut buf, |bytes| calls.reduce(caller, T::DTYPE, bytes, op, root))?;
            Ok(buf)
        })
    }

    /// [`reduce_scatter`](Self::reduce_scatter) of an input that is `[world, n]`; yields this rank's row, `[n]`.
    ///
    /// # Example
    ///
    /// As in [`Pending`].
    #[track_caller]
    pub fn reduce_scatter_async<T: Element>(&self, input: Vec<T>, op: ReduceOp) -> Pending<Vec<T>> {
        self.start(Location::caller(), move |calls, caller| {
            let mut row = T::zeros(input.len() / calls.size());
            T::edit(&mut row, |row| calls.reduce_scatter(caller, T::DTYPE, T::bytes(&input), row, (op, 0)))?;
            Ok(row)
        })
    }

    /// [`broadcast`](Self::broadcast); yields the root's buffer.
    ///
    /// # Example
    ///
    /// As in [`Pending`].
    #[track_caller]
    pub fn broadcast_async<T: Element>(&self, mut buf: Vec<T>, root: usize) -> Pending<Vec<T>> {
        self.start(Location::caller(), move |calls, caller| {
            T::edit(&mut buf, |bytes| calls.broadcast(caller, T::DTYPE, bytes, root))?;
            Ok(buf)
        })
    }

    /// [`all_gather`](Self::all_gather); yields `[world, n]`.
    ///
    /// # Example
    ///
    /// As in [`Pending`].
    #[track_caller]
    pub fn all_gather_async<T: Element>(&self, input: Vec<T>) -> Pending<Vec<T>> {
        self.start(Location::caller(), move |calls, caller| {
            let mut rows = T::zeros(input.len() * calls.size());
            T::edit(&mut rows, |rows| calls.all_gather(caller, T::DTYPE, T::bytes(&input), rows, 0))?;
            Ok(rows)
        })
    }

    /// [`gather`](Self::gather); yields `[world, n]` on the root.
    ///
    /// # Example
    ///
    /// As in [`Pending`].
    #[track_caller]
    pub fn gather_async<T: Element>(&self, input: Vec<T>, root: usize) -> Pending<Option<Vec<T>>> {
        self.start(Location::caller(), move |calls, caller| calls.gather_elements(caller, &input, root))
    }

    /// [`scatter`](Self::scatter) of rows of `n` elements; yields this rank's.
    ///
    /// # Example
    ///
    /// As in [`Pending`].
    #[track_caller]
    pub fn scatter_async<T: Element>(&self, input: Option<Vec<T>>, n: usize, root: usize) -> Pending<Vec<T>> {
        self.start(Location::caller(), move |calls, caller| {
            let mut row = T::zeros(n);
            let input = input.as_deref().map(T::bytes);
            T::edit(&mut row, |row| calls.scatter(caller, T::DTYPE, input, row, root))?;
            Ok(row)
        })
    }

    /// [`all_to_all`](Self::all_to_all); yields as much as was passed.
    ///
    /// # Example
    ///
    /// As in [`Pending`].
    #[track_caller]
    pub fn all_to_all_async<T: Element>(&self, input: Vec<T>) -> Pending<Vec<T>> {
        self.start(Location::caller(), move |calls, caller| {
            let mut rows = T::zeros(input.len());
            T::edit(&mut rows, |rows| calls.all_to_all(caller, T::DTYPE, T::bytes(&input), rows))?;
            Ok(rows)
        })
    }

    pub(super) fn start<R: Send + 'static>(
        &self,
        site: Site,
        call: impl FnOnce(&CallPath, Caller) -> Result<R> + Send + 'static,
    ) -> Pending<R> {
        let caller = self.caller(site);
        let (result, promise) = pending(self.queue.worker());
        let calls = Working(self.calls.clone());
        let job = move |queue: &CallQueue| {
            let result = call(&calls.0, caller);
            // Before the result is known: a caller that then drops the group drops the last reference to it.
            drop(calls);
            promise.keep(result);
            queue.done();
        };
        let name = || format!("ddp {}", GroupId(self.id()));
        let Err(error) = self.queue.add(name, Box::new(job)) else { return result };
        // The other ranks wait for the call.
        let message = format!("it cannot have a thread for a collective that is not waited for: {error}");
        self.calls.member.seat.membership.fail_self(message.clone());
        let (result, promise) = pending(self.queue.worker());
        promise.keep(Err(Error::Environment { message }));
        result
    }
}

/// The group, while its thread works for it: a panic there ends the world as one of the rank's other threads would.
struct Working(Arc<CallPath>);

impl Drop for Working {
    fn drop(&mut self) {
        self.0.member.fail_if_panicking();
    }
}
