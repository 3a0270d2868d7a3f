//! Schedule of the reductions: gradients of one rank become averages, bucket by bucket, while backward goes on.
//!
//! The reducer knows slots, buckets and steps; only the [store](super::store) knows the gradients' tensors. The order
//! of calls in one backward: [`Reducer::begin`], [`Reducer::put`] for each gradient as it becomes final,
//! [`Reducer::submit_rest`], [`Reducer::finish`], [`Reducer::outcome`] of each slot, [`Reducer::end_step`].

use std::sync::Arc;
use std::time::Instant;

use burn_ddp_comm::ProcessGroup;

use super::accumulation::{Boundary, Contribution, MicroBatch, MicroBatches};
use super::bucket_plan::{Bucket, Plan, Slot};
use super::buffer_ring::BufferRing;
use super::communication_worker::{Done, Fault, Finished, Job, Share, StatisticsSource, Worker};
use super::leaf_nodes::Rows;
use super::not_finite::{FirstNotFinite, NotFinite};
use super::piggyback::{Piggyback, PiggybackResult, Submitted};
use super::presence_flags::{self, Flag};
use super::reducer_settings::ReducerSettings;
use super::store::{Arrival, GradientStore, Outcome};
use crate::batch_weight::Leaf;
use crate::stop::StopWish;
use crate::telemetry::step_meter::{Communication, Meter, StepMeter};
use crate::{Error, Result};

/// Schedules the reductions of one wrapped model whose gradients are tensors `T`.
pub(crate) struct Reducer<T> {
    rank: usize,
    pub(super) settings: ReducerSettings,
    slots: Arc<[Slot]>,
    /// The slots in the types in which their gradients travel.
    sent: Arc<[Slot]>,
    /// With logical ranks, unless gradients stay on their device.
    rows: Option<Rows>,
    plan: Plan,
    pub(super) store: Box<dyn GradientStore<T>>,
    pub(super) worker: Worker,
    pub(super) meter: StepMeter,
    pub(super) ring: BufferRing,
    /// Number of buffers of the ring; `None` means one per bucket. The same on all ranks.
    ring_len: Option<usize>,
    pub(super) batches: MicroBatches,
    /// Number of slots of each bucket that arrived in this backward.
    pub(super) filled: Vec<usize>,
    /// Order in which slots arrived in this backward.
    pub(super) arrived: Vec<u32>,
    /// Next bucket to submit.
    pub(super) next: usize,
    /// Next bucket to collect.
    pub(super) collected: usize,
    /// True for each slot for which any rank had a gradient, in the step being finished.
    pub(super) present: Vec<bool>,
    /// Gradients of any rank that are not finite, in the step being finished.
    pub(super) not_finite: NotFinite,
    /// Of this rank's sharded gradients.
    pub(super) sharded_not_finite: FirstNotFinite,
    /// The reduced wake flag of the step being finished.
    pub(super) wake: bool,
    /// The reduced stop flag of the step being finished.
    pub(super) stop: bool,
    /// Wish of this rank to stop, and what the ranks have agreed on.
    stop_wish: Arc<StopWish>,
    /// First error of a reduction of the step being finished.
    pub(super) failed: Option<Error>,
    /// Payloads behind the buckets whose results the worker has not returned.
    piggyback: Submitted,
    /// True while this rank, which has no backward, takes part in the reduction of the others.
    pub(super) shadowing: bool,
    /// Number of reductions done; part of the tags of collectives.
    step: u64,
    /// True once the ranks have agreed on rank 0's order of gradients.
    order_agreed: bool,
    /// The agreed order, from the end of the first reduction to that of its step.
    order: Option<Vec<usize>>,
    /// Numbers of dropped steps and of skipped batches; the same on all ranks, or reductions fail.
    pub(super) discards: u64,
    pub(super) skips: u64,
    /// Error that all further steps return; set when a step ends half-way with buckets at the worker or gradients lost.
    pub(super) broken: Option<Error>,
}

impl<T> Reducer<T> {
    /// A reducer for the slots, the same on all ranks, and the store of their gradients, which travel in the types of
    /// the second slots. *Collective* over `group`.
    pub(crate) fn new(
        group: ProcessGroup,
        (slots, sent): (Arc<[Slot]>, Arc<[Slot]>),
        store: Box<dyn GradientStore<T>>,
        settings: ReducerSettings,
        (meter, stop_wish): (Meter, Arc<StopWish>),
    ) -> Result<Self> {
        let (rank, id) = (group.ranks()[group.rank()], group.id());
        group.hide_from_timeline();
        let plan = Plan::new(&sent, &[], settings.caps, store.packs());
        // Ranks may compute on different backends, but all have the same buffers: the rank that needs most decides.
        let lens: Option<Vec<_>> = group.all_gather_object(&store.ring_len())?.into_iter().collect();
        let ring_len = lens.and_then(|lens| lens.into_iter().max());
        let worker = if settings.overlap {
            Worker::threaded(group, settings.timeout).map_err(|e| Error::Backward {
                rank,
                reason: format!("could not start the communication thread: {e}"),
            })?
        } else {
            Worker::inline(group)
        };
        let mut reducer = Reducer {
            rank,
            settings,
            present: vec![false; slots.len()],
            not_finite: NotFinite::default(),
            sharded_not_finite: FirstNotFinite::default(),
            slots,
            sent,
            rows: settings.tree().map(Rows::new),
            plan,
            store,
            worker,
            meter: StepMeter::new(meter, id),
            ring: BufferRing::default(),
            ring_len,
            batches: MicroBatches::new(&settings),
            filled: Vec::new(),
            arrived: Vec::new(),
            next: 0,
            collected: 0,
            wake: false,
            stop: false,
            stop_wish,
            failed: None,
            piggyback: Submitted::default(),
            shadowing: false,
            step: 0,
            order_agreed: false,
            order: None,
            discards: 0,
            skips: 0,
            broken: None,
        };
        reducer.allocate()?;
        Ok(reducer)
    }

    /// Number of reductions done.
    pub(crate) fn step(&self) -> u64 {
        self.step
    }

    /// Starts a backward of `weight` items, before which the program has skipped so many batches: with logical ranks
    /// that of the leaf, or of the next one.
    ///
    /// # Errors
    ///
    /// If an earlier step ended half-way, or the leaf is not one that follows.
    pub(crate) fn begin(&mut self, weight: f64, leaf: Option<Leaf>, boundary: Boundary, skips: u64) -> Result<()> {
        self.refuse_broken()?;
        self.skips = skips;
        self.batches.begin(weight, leaf, boundary).map_err(|e| self.fault(e))?;
        self.start();
        Ok(())
    }

    /// Notes that the time of the backward counts from now on, since its first gradient has come or none will.
    pub(crate) fn begin_time(&mut self) {
        self.meter.begin();
    }

    /// Takes the final gradient of `slot` in this backward, and submits every bucket that is complete now.
    pub(crate) fn put(&mut self, slot: usize, gradient: T) -> Result<()> {
        if self.batches.reducing && self.plan.ranges[slot].bucket < self.next {
            return Err(self.fault(format!("the bucket of {} is under way already", self.slots[slot].path)));
        }
        let contribution = self.batches.contribution();
        let at_once = matches!(contribution, Contribution::Whole { .. }) && self.store.packs_at_once();
        let at_once = at_once && self.row_count() == 1;
        let place = if at_once { self.ring.place(&self.plan, slot, self.next) } else { None };
        let arrival = self.store.put(slot, gradient, contribution, place);
        match arrival.map_err(|e| self.fault(e))? {
            Arrival::Now => self.arrive(slot),
            Arrival::Later => Ok(()),
        }
    }

    /// The running backward.
    pub(crate) fn micro_batch(&self) -> MicroBatch {
        self.batches.current()
    }

    /// Leaf and weight of the running backward, if it counts and the job has logical ranks.
    pub(crate) fn own_leaf(&self) -> Option<(usize, f64)> {
        self.rows.as_ref().and_then(|_| self.batches.own_leaf())
    }

    /// True if the next reduction compares the ranks' parameters. The same on all ranks.
    pub(crate) fn compares_replicas(&self) -> bool {
        self.settings.compares_replicas(self.step)
    }

    /// Waits for gradients that arrive after the last [`put`](Self::put), and submits buckets that become complete.
    pub(crate) fn receive_late(&mut self) -> Result<()> {
        while let Some(slot) = self.store.next_late().map_err(|e| self.fault(e))? {
            self.arrive(slot)?;
        }
        Ok(())
    }

    /// Submits all buckets that have not been submitted, complete or not, and `piggyback`; without a communication
    /// thread it also reduces them. Reducers that meet in one backward do so in the order of their groups.
    pub(crate) fn submit_rest(&mut self, piggyback: Piggyback) -> Result<()> {
        if !self.batches.reducing {
            self.forget_arrivals();
            return Ok(());
        }
        while self.next < self.plan.awake {
            while !self.ring.is_free(self.next) {
                let start = Instant::now();
                self.collect_next()?;
                self.meter.waits(start);
            }
            self.submit_bucket(self.next, false)?;
        }
        let source = if piggyback.from_first {
            StatisticsSource::First { trains: !self.shadowing }
        } else if let Some(rows) = &self.rows {
            StatisticsSource::Leaves { division: rows.run.division, weights: rows.weights(self.batches.weights()) }
        } else {
            StatisticsSource::All(self.batches.items())
        };
        let order = (!self.order_agreed).then(|| self.arrived.clone());
        let submitted = piggyback.submit(&mut self.worker, &mut self.meter, source, order);
        self.piggyback = submitted.map_err(|e| self.fault(e))?;
        if !self.worker.is_threaded() {
            let start = Instant::now();
            self.worker.flush();
            self.meter.waits(start);
        }
        Ok(())
    }

    /// Ends the backward after [`Reducer::submit_rest`]. `None` if it did not reduce; else [`Reducer::outcome`] has the
    /// results.
    pub(crate) fn finish(&mut self) -> Result<Option<PiggybackResult>> {
        if !self.batches.reducing {
            self.meter.end_backward();
            return Ok(None);
        }
        let wait = Instant::now();
        // All results are taken before an error is returned: the rest would be taken for results of the next step.
        while self.collected < self.plan.awake {
            self.collect_next()?;
        }
        let rank = self.rank;
        let fault = |reason| Error::Backward { rank, reason };
        let results = std::mem::take(&mut self.piggyback).receive(&mut self.worker, &mut self.meter, fault);
        self.refuse_failed()?;
        let mut results = results?;
        self.order = results.order.take();
        if self.wake {
            for bucket in self.plan.awake..self.plan.buckets.len() {
                self.submit_bucket(bucket, false)?;
            }
            while self.collected < self.plan.buckets.len() {
                self.collect_next()?;
            }
            self.refuse_failed()?;
        }
        self.stop_wish.agree(self.stop);
        let now = self.meter.waits(wait);
        self.meter.end_step(self.step, now);
        Ok(Some(results))
    }

    /// The average of `slot` after [`Reducer::finish`] reduced, once.
    pub(crate) fn outcome(&mut self, slot: usize) -> Outcome<T> {
        self.store.outcome(slot)
    }

    /// Ends the step after the results were taken. After the first step the buckets are cut anew, in the order in which
    /// rank 0's gradients came. *Collective*.
    pub(crate) fn end_step(&mut self) -> Result<()> {
        self.step += 1;
        self.discard();
        if let Some(order) = self.order.take() {
            self.order_agreed = true;
            let plan = Plan::new(&self.sent, &order, self.settings.caps, self.store.packs());
            if plan != self.plan {
                self.plan = plan;
                self.allocate()?;
            }
        }
        Ok(())
    }

    /// True if gradients of micro-batches are waiting for their reduction.
    pub(crate) fn holds_gradients(&self) -> bool {
        self.batches.count() > 0
    }

    /// Ends the communication thread: no further step comes.
    pub(crate) fn retire(&mut self) {
        self.worker.retire();
    }

    /// An error that names this rank.
    pub(crate) fn fault(&self, reason: String) -> Error {
        Error::Backward { rank: self.rank, reason }
    }

    /// True if gradients are added up the tree over all leaves.
    pub(crate) fn has_tree(&self) -> bool {
        self.rows.is_some()
    }

    /// Rows of a buffer: one for each subtree whose sum this rank passes.
    fn row_count(&self) -> usize {
        self.rows.as_ref().map_or(1, |rows| rows.run.division.rows())
    }

    /// Bytes of a bucket, as many as an all-reduce would send: its rows go one way, and its result the other.
    fn reduced_bytes(&self, bucket: &Bucket) -> usize {
        bucket.reduced_bytes() * (self.row_count() + 1) / 2
    }

    /// Starts a backward or a shadow of one.
    pub(super) fn start(&mut self) {
        self.store.release();
        self.forget_arrivals();
    }

    /// The gradient of `slot` is in the store: submits every bucket that is complete now.
    fn arrive(&mut self, slot: usize) -> Result<()> {
        if !self.batches.reducing {
            return Ok(());
        }
        self.arrived.push(slot as u32);
        self.filled[self.plan.ranges[slot].bucket] += 1;
        while self.next < self.plan.awake {
            let bucket = &self.plan.buckets[self.next];
            // Such a bucket is left to `submit_rest`.
            if bucket.comes_last() || self.filled[self.next] < bucket.slots.len() || !self.make_room()? {
                break;
            }
            self.submit_bucket(self.next, true)?;
        }
        Ok(())
    }

    /// Collects reduced buckets until the buffer of the next one is free, without waiting. Returns false if it is not.
    fn make_room(&mut self) -> Result<bool> {
        while !self.ring.is_free(self.next) {
            match self.worker.try_next() {
                Some(finished) => self.collect(finished)?,
                None => return Ok(false),
            }
        }
        Ok(true)
    }

    fn submit_bucket(&mut self, index: usize, during_backward: bool) -> Result<()> {
        let bucket = &self.plan.buckets[index];
        let Some(mut buffer) = self.ring.take(index, bucket.total_bytes() * self.row_count()) else {
            return Err(self.fault(format!("bucket {index} is under way already")));
        };
        let bytes = buffer.bytes_mut();
        let set = |bytes: &mut [u8], elem, flag| presence_flags::set_flag(bucket.dtype, bytes, elem, flag);
        for (nth, &slot) in bucket.slots.iter().enumerate() {
            set(bytes, bucket.flag_elem(nth), Flag::of(self.store.holds(slot)));
        }
        if let Some(elem) = bucket.wake_elem() {
            let mut dormant = self.plan.buckets[self.plan.awake..].iter().flat_map(|b| &b.slots);
            set(bytes, elem, Flag::of(dormant.any(|&slot| self.store.holds(slot))));
        }
        if let Some(elem) = bucket.sharded_elem() {
            set(bytes, elem, if self.sharded_not_finite.is_some() { Flag::NotFinite } else { Flag::Down });
        }
        if let Some(elem) = bucket.stop_elem() {
            set(bytes, elem, Flag::of(self.stop_wish.is_wished()));
        }
        let loan = self.store.fill(bucket, &self.plan.ranges, self.batches.divisor(), bytes);
        for (nth, &slot) in bucket.slots.iter().enumerate() {
            if self.store.not_finite(slot).is_some() {
                set(bytes, bucket.flag_elem(nth), Flag::NotFinite);
            }
        }
        let loan = match loan {
            Ok(loan) => loan,
            Err(reason) => {
                self.ring.put_back(index, buffer);
                return Err(self.fault(reason));
            }
        };
        let bytes = self.reduced_bytes(bucket);
        self.meter.launched(bucket.slots.len(), bytes, during_backward && self.worker.is_threaded());
        let share = match (&self.rows, self.batches.weight_of_mean()) {
            (None, None) => Share::Sum,
            (None, Some(items)) => Share::Mean(items),
            (Some(rows), _) => {
                Share::Leaves { division: rows.run.division, weights: self.batches.current().weights_of_rows(rows) }
            }
        };
        // 16 bits of drops and skips, 28 of steps, 20 of buckets: enough to tell calls apart that could meet.
        let tag =
            (self.discards.wrapping_add(self.skips) & 0xffff) << 48 | (self.step & 0xfff_ffff) << 20 | index as u64;
        self.submit(Job::Reduce { bucket: index, dtype: bucket.dtype, buffer, loan, share, tag })?;
        self.next = index + 1;
        Ok(())
    }

    /// Waits for the next bucket.
    fn collect_next(&mut self) -> Result<()> {
        let finished = self.worker.next().map_err(|e| self.fault(e))?;
        self.collect(finished)
    }

    /// Takes the averages of the next bucket. An error is returned at the end of the backward.
    fn collect(&mut self, finished: Finished) -> Result<()> {
        let Finished { done: Done::Reduced { bucket, buffer, loan, result }, time } = finished else {
            return Err(self.fault(Worker::out_of_order()));
        };
        if bucket != self.collected {
            return Err(self.fault(Worker::out_of_order()));
        }
        self.collected += 1;
        self.ring.put_back(bucket, buffer);
        let plan = &self.plan.buckets[bucket];
        let bytes = self.reduced_bytes(plan);
        self.meter.done(Communication::Bucket { bucket, bytes, step: self.step }, time);
        let taken = match result {
            Ok(reduced) => {
                presence_flags::read(plan, &reduced, &mut self.present, &mut self.not_finite);
                let is_up = |elem| presence_flags::flag_is_up(plan.dtype, &reduced, elem);
                self.wake |= plan.wake_elem().is_some_and(is_up);
                self.stop |= plan.stop_elem().is_some_and(is_up);
                let taken = self.store.take_back(plan, &self.plan.ranges, &self.present, reduced, loan);
                taken.map_err(|e| self.fault(e))
            }
            Err(Fault::Comm(e)) => Err(e.into()),
            Err(Fault::Device(e)) => Err(self.fault(format!("gradients were not reduced on their device: {e}"))),
        };
        if let Err(error) = taken {
            self.failed.get_or_insert(error);
        }
        Ok(())
    }

    fn submit(&mut self, job: Job) -> Result<()> {
        self.worker.submit(job).map_err(|e| self.fault(e))
    }

    pub(super) fn refuse_broken(&self) -> Result<()> {
        self.broken.clone().map_or(Ok(()), Err)
    }

    fn refuse_failed(&mut self) -> Result<()> {
        self.failed.take().map_or(Ok(()), Err)
    }

    /// Makes buffers for the plan. *Collective*.
    fn allocate(&mut self) -> Result<()> {
        let rows = self.row_count();
        let lens_bytes = BufferRing::lens_bytes(&self.plan, self.ring_len).into_iter().map(|len| len * rows).collect();
        self.ring = BufferRing::default();
        self.submit(Job::Allocate(lens_bytes))?;
        let allocated = match self.worker.next().map(|finished| finished.done) {
            Ok(Done::Allocated(buffers)) => buffers.map_err(Error::from),
            other => Err(self.fault(other.err().unwrap_or_else(Worker::out_of_order))),
        };
        let buffers = allocated.inspect_err(|e| self.broken = Some(e.clone()))?;
        self.ring = BufferRing::new(&self.plan, buffers);
        self.filled = vec![0; self.plan.buckets.len()];
        Ok(())
    }
}
