//! The `_async` collectives: a call starts one, and the caller waits for its result later.

use std::panic::Location;
use std::sync::Arc;

use super::async_queue::CallQueue;
use super::pending_result::{Pending, pending};
use super::{CallPath, ProcessGroup};
use crate::call::GroupId;
use crate::call::call_arguments::{Caller, Site};
use crate::dtype::Element;
use crate::{Error, ReduceOp, Result};

/// The collectives of the same names without `_async`, started and not waited for. None of them blocks: each returns a
/// [`Pending`], whose [`wait`](Pending::wait) yields the result or the error. All ranks make each call, with the
/// arguments of the blocking collective and at its cost; one rank may make the `_async` call while another makes the
/// blocking one.
///
/// A thread of the group runs them in the order in which they were started; a blocking call on the group runs after the
/// `_async` calls that were started before it. The deadline of each counts from when its turn comes. Transfers between
/// two ranks have no `_async` form: both ranks must make them in the order of their programs.
impl ProcessGroup {
    /// Starts a [`barrier`](Self::barrier).
    ///
    /// # Example
    ///
    /// As in [`Pending`].
    #[track_caller]
    pub fn barrier_async(&self) -> Pending<()> {
        self.start(Location::caller(), |calls, caller| calls.barrier(caller))
    }

    /// Starts an [`all_reduce`](Self::all_reduce); yields the reduction.
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

    /// Starts an [`all_reduce_weighted`](Self::all_reduce_weighted); yields the average.
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

    /// Starts a [`reduce`](Self::reduce); yields the reduction on the root, and on the other ranks their own buffer.
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

    /// Starts a [`reduce_scatter`](Self::reduce_scatter) of an input of `[world, n]`; yields the reduction of this
    /// rank's row, `[n]`.
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

    /// Starts a [`broadcast`](Self::broadcast); yields the root's elements.
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

    /// Starts an [`all_gather`](Self::all_gather) of `n` elements per rank; yields `[world, n]`.
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

    /// Starts a [`gather`](Self::gather) of `n` elements per rank; yields `[world, n]` on the root, else `None`.
    ///
    /// # Example
    ///
    /// As in [`Pending`].
    #[track_caller]
    pub fn gather_async<T: Element>(&self, input: Vec<T>, root: usize) -> Pending<Option<Vec<T>>> {
        self.start(Location::caller(), move |calls, caller| calls.gather_elements(caller, &input, root))
    }

    /// Starts a [`scatter`](Self::scatter) of rows of `n` elements; yields this rank's row.
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

    /// Starts an [`all_to_all`](Self::all_to_all); yields the received rows, `[world, n]` like the input.
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
            // Before the result is set: if the caller then drops the group, its reference must be the last one.
            drop(calls);
            promise.keep(result);
            queue.done();
        };
        let name = || format!("ddp {}", GroupId(self.id()));
        let Err(error) = self.queue.add(name, Box::new(job)) else { return result };
        // The other ranks would wait for this call.
        let message = format!("it cannot start the thread for `_async` collectives: {error}");
        self.calls.member.seat.membership.fail_self(message.clone());
        let (result, promise) = pending(self.queue.worker());
        promise.keep(Err(Error::Environment { message }));
        result
    }
}

/// The group, as its thread holds it for a call: a panic of that thread ends the world, like a panic of any other
/// thread that holds the group.
struct Working(Arc<CallPath>);

impl Drop for Working {
    fn drop(&mut self) {
        self.0.member.fail_if_panicking();
    }
}
