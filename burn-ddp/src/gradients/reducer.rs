//! From gradients of one rank to averaged gradients, bucket by bucket, while backward goes on.
//!
//! Knows bytes, slots and steps; knows nothing of Burn. The order of calls in one backward:
//! [`Reducer::begin`], then [`Reducer::put`] (or [`Reducer::put_on_device`]) for each gradient as it becomes final, then
//! [`Reducer::submit_rest`] and [`Reducer::finish`].

use std::any::Any;
use std::ops::Range;
use std::time::{Duration, Instant};

use burn_ddp_comm::{ProcessGroup, SharedBuffer, SharedView};

use super::accumulation::{self as pack, Sum};
use super::bucket_plan::{Bucket, Caps, Plan, Slot};
use super::piggyback::{Piggyback, PiggybackResult};
use super::store::{Contribution, Keeper};
use super::worker::{Done, Fault, Finished, Job, Worker};
use crate::telemetry::meter::{Communication, Meter, StepMeter};
use crate::{Error, Result};

/// How gradients of several ranks and micro-batches become one.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum GradientReduction {
    /// `Σ nᵢ gᵢ / Σ nᵢ`: right when the loss is a mean over the items of a batch. `nᵢ` comes from the loader or from
    /// [`Ddp::set_batch_items`](crate::Ddp::set_batch_items) and is 1 without either.
    #[default]
    Mean,
    /// `Σ gᵢ`: right when the loss is a sum over items, and what `torch.nn.DataParallel` does. A batch of weight 0 counts nothing.
    Sum,
}

/// What does not change while a model is wrapped.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Settings {
    pub reduction: GradientReduction,
    /// Micro-batches per reduction.
    pub accumulation: usize,
    pub caps: Caps,
    /// How long one collective may take.
    pub timeout: Duration,
    /// Every how many steps the ranks compare their parameters; 0 for never.
    pub replica_check: u64,
    /// Buckets are reduced on a thread piggyback backward; else all together at its end.
    pub overlap: bool,
    /// Gradients stay on their device, and the group's engine reduces them there. Needs `overlap`.
    pub on_device: bool,
}

#[derive(Debug)]
pub(crate) struct Reducer {
    pub(super) rank: usize,
    /// The number of the group: the same on all ranks.
    pub(super) id: u64,
    pub(super) settings: Settings,
    pub(super) slots: Vec<Slot>,
    pub(super) plan: Plan,
    pub(super) worker: Worker,
    pub(super) meter: StepMeter,
    /// One per bucket; `None` while the worker holds it. Dormant ones are empty until they are first needed.
    pub(super) buffers: Vec<Option<SharedBuffer>>,
    /// The averages of the step that ends, one per bucket.
    pub(super) averages: Vec<Option<SharedView>>,
    /// Slots that were put in this backward, and count.
    pub(super) put: Vec<bool>,
    /// How many slots of each bucket were put in this backward.
    pub(super) filled: Vec<usize>,
    /// Order in which slots were put in this backward.
    pub(super) arrived: Vec<u32>,
    /// Next bucket to hand to the worker.
    pub(super) next: usize,
    /// How many buffers are under way piggyback the gradients, and whether digests are.
    pub(super) piggyback: (usize, bool),
    /// Sums over micro-batches, `None` where no gradient was seen since the last reduction.
    pub(super) held: Vec<Option<Sum>>,
    /// Has gradients and sums in place of `buffers` and `held`, if they stay on their device.
    pub(super) keeper: Option<Box<dyn Keeper>>,
    /// Micro-batches since the last reduction, the running one included.
    pub(super) micro_batches: usize,
    /// Items (weights) of those micro-batches.
    pub(super) items: f64,
    pub(super) weight: f64,
    /// The running backward ends with a reduction.
    pub(super) reducing: bool,
    /// This rank has no backward, and takes part in the reduction of the others.
    pub(super) shadowing: bool,
    /// Reductions done; names collectives.
    pub(super) step: u64,
    pub(super) order_agreed: bool,
    /// The agreed order, between the end of the first reduction and that of its step.
    pub(super) order: Option<Vec<usize>>,
    /// How often the user discarded held gradients: all ranks must do so alike.
    pub(super) discards: u64,
    /// Why no further step is possible: buckets of a step that never ended are with the worker.
    pub(super) broken: Option<Error>,
}

impl Reducer {
    /// A reducer for `slots`, which are the same on all ranks. *Collective* over `group`.
    pub(crate) fn new(group: ProcessGroup, slots: Vec<Slot>, settings: Settings, meter: Meter) -> Result<Self> {
        let (rank, id) = (group.rank(), group.id());
        group.hide_from_timeline();
        let plan = Plan::new(&slots, &[], settings.caps, settings.on_device);
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
            id,
            settings,
            put: vec![false; slots.len()],
            held: (0..slots.len()).map(|_| None).collect(),
            keeper: None,
            slots,
            plan,
            worker,
            meter: StepMeter::new(meter, id),
            buffers: Vec::new(),
            averages: Vec::new(),
            filled: Vec::new(),
            arrived: Vec::new(),
            next: 0,
            piggyback: (0, false),
            micro_batches: 0,
            items: 0.0,
            weight: 1.0,
            reducing: true,
            shadowing: false,
            step: 0,
            order_agreed: false,
            order: None,
            discards: 0,
            broken: None,
        };
        reducer.fit_buffers()?;
        Ok(reducer)
    }

    pub(crate) fn slots(&self) -> &[Slot] {
        &self.slots
    }

    /// What orders the reducers of a rank in the same way on all ranks.
    pub(crate) fn id(&self) -> u64 {
        self.id
    }

    /// Whether gradients stay on their device.
    pub(crate) fn is_on_device(&self) -> bool {
        self.settings.on_device
    }

    /// Whether somebody keeps them there.
    pub(crate) fn has_keeper(&self) -> bool {
        self.keeper.is_some()
    }

    /// Who keeps them there; `None` if there is nobody yet, or it is not a `K`.
    pub(crate) fn keeper<K: Keeper>(&mut self) -> Option<&mut K> {
        let keeper: &mut dyn Any = self.keeper.as_deref_mut()?;
        keeper.downcast_mut()
    }

    /// From now on `keeper` does, before the first backward.
    pub(crate) fn keep_by(&mut self, keeper: Box<dyn Keeper>) {
        self.keeper = Some(keeper);
    }

    /// About how large a bucket is.
    pub(crate) fn bucket_bytes(&self) -> usize {
        self.settings.caps.bytes
    }

    pub(crate) fn reduction(&self) -> GradientReduction {
        self.settings.reduction
    }

    /// Reductions done so far.
    pub(crate) fn step(&self) -> u64 {
        self.step
    }

    /// Starts a backward that stands for `weight` items. With `hold`, its gradients are only summed up, like those of the
    /// first `accumulation - 1` micro-batches.
    ///
    /// # Errors
    ///
    /// If an earlier step ended half-way.
    pub(crate) fn begin(&mut self, weight: f64, hold: bool) -> Result<()> {
        if let Some(error) = &self.broken {
            return Err(error.clone());
        }
        self.micro_batches += 1;
        self.weight = weight;
        self.items += weight;
        self.reducing = !hold && self.micro_batches >= self.settings.accumulation;
        self.forget_arrivals();
        self.meter.begin();
        Ok(())
    }

    /// Takes the final gradient of `slot` in this backward, and starts every bucket that is complete now.
    pub(crate) fn put(&mut self, slot: usize, gradient: &[u8]) -> Result<()> {
        let place = self.plan.ranges[slot];
        if gradient.len() != place.len {
            let Slot { path, dims, dtype, .. } = &self.slots[slot];
            return Err(self.fault(format!(
                "the gradient of {path} has {} bytes, but {dims:?} of {dtype} takes {}",
                gradient.len(),
                place.len
            )));
        }
        match self.take() {
            Contribution::Ignored => {}
            Contribution::Added(weight) => {
                let s = &self.slots[slot];
                let held = self.held[slot].get_or_insert_with(|| Sum::zeros(s.dtype, s.len_elems()));
                held.add(s.dtype, gradient, weight);
            }
            Contribution::Whole => {
                let bucket = &self.plan.buckets[place.bucket];
                let Some(buffer) = self.buffers[place.bucket].as_mut() else {
                    return Err(self.fault(format!("the bucket of {} is under way already", self.slots[slot].path)));
                };
                if buffer.len_bytes() != bucket.total_bytes() {
                    *buffer = SharedBuffer::plain(bucket.total_bytes());
                }
                buffer.bytes_mut()[place.bytes()].copy_from_slice(gradient);
            }
        }
        self.arrive(slot)
    }

    /// [`put`](Self::put) of a gradient that stays where it is: `keep` lets the [keeper](Self::keeper) have it.
    pub(crate) fn put_on_device(
        &mut self,
        slot: usize,
        keep: impl FnOnce(&mut Self, Contribution) -> Result<()>,
    ) -> Result<()> {
        let take = self.take();
        keep(self, take)?;
        self.arrive(slot)
    }

    /// What becomes of the gradients of the running backward.
    fn take(&self) -> Contribution {
        if self.weight <= 0.0 {
            Contribution::Ignored
        } else if self.reducing && self.micro_batches == 1 {
            Contribution::Whole
        } else {
            Contribution::Added(match self.settings.reduction {
                GradientReduction::Mean => self.weight,
                GradientReduction::Sum => 1.0,
            })
        }
    }

    /// The gradient of `slot` was taken: starts every bucket that is complete now.
    fn arrive(&mut self, slot: usize) -> Result<()> {
        if !self.reducing {
            return Ok(());
        }
        let bucket = self.plan.ranges[slot].bucket;
        self.put[slot] = self.weight > 0.0;
        self.arrived.push(slot as u32);
        self.filled[bucket] += 1;
        while self.next < self.plan.awake {
            let bucket = &self.plan.buckets[self.next];
            // The wake flag is known only when all gradients are: its bucket is left to `finish`.
            if bucket.has_wake_flag || self.filled[self.next] < bucket.slots.len() {
                break;
            }
            self.launch(self.next, true)?;
        }
        Ok(())
    }

    /// Whether this rank has something for `slot` in the reduction to come.
    fn has(&self, slot: usize) -> bool {
        match &self.keeper {
            Some(keeper) => keeper.holds(slot),
            None => self.put[slot] || self.held[slot].is_some(),
        }
    }

    /// Whether the running backward ends with a reduction.
    pub(crate) fn is_reducing(&self) -> bool {
        self.reducing
    }

    /// Whether the next reduction compares the ranks' parameters. The same on all ranks.
    pub(crate) fn compares_replicas(&self) -> bool {
        let every = self.settings.replica_check;
        every > 0 && self.step > 0 && (self.step <= 2 || self.step.is_multiple_of(every))
    }

    /// All gradients of the backward were put: everything that is to be reduced is under way when it returns, or done if no thread does
    /// it. Reducers that meet in one backward submit_rest in the order of their [`id`](Reducer::id).
    pub(crate) fn submit_rest(&mut self, piggyback: Piggyback) -> Result<()> {
        if !self.reducing {
            self.forget_arrivals();
            return Ok(());
        }
        while self.next < self.plan.awake {
            self.launch(self.next, false)?;
        }
        self.send_piggyback(piggyback)?;
        if !self.worker.is_threaded() {
            let start = Instant::now();
            self.worker.flush();
            self.meter.waits(start);
        }
        Ok(())
    }

    /// Ends the backward after [`Reducer::submit_rest`]. `None` if it did not reduce; else [`Reducer::gradient`] has the results.
    pub(crate) fn finish(&mut self) -> Result<Option<PiggybackResult>> {
        if !self.reducing {
            self.meter.end_backward();
            return Ok(None);
        }
        let wait = Instant::now();
        // All of it is taken before an error is returned: what stays would be taken for the next step's.
        let collected = self.collect(0..self.plan.awake);
        let piggyback_result = self.receive_piggyback();
        let order = self.agreed_order();
        collected?;
        let piggyback_result = piggyback_result?;
        self.order = order?;
        let last = self.plan.awake - 1;
        let bucket = &self.plan.buckets[last];
        let reduced = self.average(last).map_or(&[][..], |average| average);
        let wake = bucket.wake_elem().is_some_and(|e| pack::flag_is_up(bucket.dtype, reduced, e));
        if wake {
            for bucket in self.plan.awake..self.plan.buckets.len() {
                self.launch(bucket, false)?;
            }
            self.collect(self.plan.awake..self.plan.buckets.len())?;
        }
        let now = self.meter.waits(wait);
        self.meter.end_step(self.step, now);
        Ok(Some(piggyback_result))
    }

    /// Where the reduced gradient of `slot` is after [`Reducer::finish`] reduced: the bucket and the bytes of its
    /// [average](Reducer::average); `None` if no rank had one.
    pub(crate) fn gradient(&self, slot: usize) -> Option<(usize, Range<usize>)> {
        let place = self.plan.ranges[slot];
        let bucket = &self.plan.buckets[place.bucket];
        let average = self.average(place.bucket)?;
        pack::flag_is_up(bucket.dtype, average, bucket.flag_elem(place.nth)).then(|| (place.bucket, place.bytes()))
    }

    /// What the bucket was reduced to in the step that ends; `None` if it is dormant, and nobody woke it.
    pub(crate) fn average(&self, bucket: usize) -> Option<&SharedView> {
        self.averages.get(bucket)?.as_ref()
    }

    /// Ends the step after the results were taken: all is ready for the next one. After the first step the buckets are cut anew,
    /// in the order in which rank 0's gradients came. *Collective*.
    pub(crate) fn end_step(&mut self) -> Result<()> {
        self.step += 1;
        self.discard();
        if let Some(order) = self.order.take() {
            self.order_agreed = true;
            let plan = Plan::new(&self.slots, &order, self.settings.caps, self.settings.on_device);
            if plan != self.plan {
                self.plan = plan;
                self.fit_buffers()?;
            }
        }
        Ok(())
    }

    /// Takes part in a reduction of the other ranks without a backward: with what is held of earlier micro-batches, else with weight 0.
    /// `false` if no rank had anything to give: all stand in. That is no step.
    pub(crate) fn shadow(&mut self, piggyback: Piggyback) -> Result<bool> {
        if let Some(error) = &self.broken {
            return Err(error.clone());
        }
        self.reducing = true;
        self.forget_arrivals();
        self.meter.begin();
        self.shadowing = true;
        let submitted = self.submit_rest(piggyback);
        self.shadowing = false;
        submitted?;
        let given = match self.finish() {
            Ok(_) => self.has_gradients(),
            // Weights that are all 0: what all ranks see alike, and the only thing here that they do.
            Err(Error::Comm(e)) if e.group_usable() => false,
            Err(e) => return Err(e),
        };
        if given {
            self.end_step()?;
        } else {
            self.discard();
        }
        Ok(given)
    }

    /// Whether any rank had a gradient in the reduction that ends.
    fn has_gradients(&self) -> bool {
        self.plan.buckets.iter().enumerate().any(|(index, bucket)| {
            let flags = bucket.flag_elem(0)..bucket.total_elems();
            self.average(index)
                .is_some_and(|average| flags.into_iter().any(|elem| pack::flag_is_up(bucket.dtype, average, elem)))
        })
    }

    /// Forgets gradients of micro-batches that were not reduced yet, as all ranks do.
    pub(crate) fn discard_held(&mut self) {
        self.discards += 1;
        self.discard();
    }

    /// Forgets everything of the running step.
    pub(crate) fn discard(&mut self) {
        for (bucket, buffer) in self.worker.recall() {
            self.buffers[bucket] = Some(buffer);
        }
        if self.broken.is_none() && self.buffers.iter().any(Option::is_none) {
            self.broken = Some(self.fault(
                "an earlier backward ended half-way (an error or a panic) with buckets under way; the ranks cannot get back in step".into(),
            ));
        }
        self.averages.iter_mut().for_each(|average| *average = None);
        self.micro_batches = 0;
        self.items = 0.0;
        self.held.iter_mut().for_each(|h| *h = None);
        if let Some(keeper) = &mut self.keeper {
            keeper.forget();
        }
        self.forget_arrivals();
    }

    /// Whether gradients of micro-batches are waiting for their reduction.
    pub(crate) fn holds_gradients(&self) -> bool {
        self.micro_batches > 0
    }

    /// Gives up a backward that will not end.
    ///
    /// # Errors
    ///
    /// If peers already work on its buckets, or count its micro-batch.
    pub(crate) fn abandon(&mut self) -> Result<()> {
        let counted = self.settings.accumulation > 1 || self.micro_batches > 1;
        self.discard();
        if counted && self.broken.is_none() {
            self.broken = Some(self.fault(
                "an earlier backward ended half-way (a panic?) and took the gradients held for accumulation with it; the ranks \
                 cannot get back in step"
                    .into(),
            ));
        }
        self.broken.clone().map_or(Ok(()), Err)
    }

    /// No further step comes: ends the communication thread.
    pub(crate) fn retire(&mut self) {
        self.worker.retire();
    }

    fn launch(&mut self, index: usize, during_backward: bool) -> Result<()> {
        let bucket = &self.plan.buckets[index];
        let Some(mut buffer) = self.buffers[index].take() else {
            return Err(self.fault(format!("bucket {index} is under way already")));
        };
        if buffer.len_bytes() != bucket.total_bytes() {
            buffer = SharedBuffer::plain(bucket.total_bytes());
        }
        let bytes = buffer.bytes_mut();
        let items = match self.settings.reduction {
            GradientReduction::Mean => self.items,
            GradientReduction::Sum => 1.0,
        };
        for (nth, &slot) in bucket.slots.iter().enumerate() {
            let present = self.has(slot);
            if !bucket.on_device {
                let out = &mut bytes[self.plan.ranges[slot].bytes()];
                match &self.held[slot] {
                    Some(sum) => sum.write(bucket.dtype, items, out),
                    None if present => {} // packed by `put`
                    None => out.fill(0),
                }
            }
            pack::set_flag(bucket.dtype, bytes, bucket.flag_elem(nth), present);
        }
        if let Some(elem) = bucket.wake_elem() {
            let sleeper = self.plan.buckets[self.plan.awake..].iter().flat_map(|b| &b.slots);
            let up = sleeper.into_iter().any(|&s| self.has(s));
            pack::set_flag(bucket.dtype, bytes, elem, up);
        }
        let lent = if bucket.on_device && bucket.len_elems > 0 {
            let lent = match &mut self.keeper {
                Some(keeper) => keeper.lend(&bucket.slots, items),
                None => Err("nothing is known of it".to_owned()),
            };
            Some(lent.map_err(|e| self.fault(format!("gradients on their device: {e}")))?)
        } else {
            None
        };
        let bucket = &self.plan.buckets[index];
        self.meter.launched(bucket.reduced_bytes(), during_backward && self.worker.is_threaded());
        let weight = (self.settings.reduction == GradientReduction::Mean).then_some(self.items);
        // 16 bits of discards, 28 of steps, 20 of buckets: enough to tell calls apart that could meet.
        let tag = (self.discards & 0xffff) << 48 | (self.step & 0xfff_ffff) << 20 | index as u64;
        self.submit(Job::Reduce { bucket: index, dtype: bucket.dtype, buffer, lent, weight, tag })?;
        self.next = index + 1;
        Ok(())
    }

    fn collect(&mut self, buckets: std::ops::Range<usize>) -> Result<()> {
        let mut first_error = None;
        for expected in buckets {
            match self.worker.next() {
                Ok(Finished { done: Done::Reduced { bucket, buffer, lent, result }, time }) if bucket == expected => {
                    self.buffers[bucket] = Some(buffer);
                    let Bucket { slots, .. } = &self.plan.buckets[bucket];
                    let bytes = self.plan.buckets[bucket].reduced_bytes();
                    self.meter.done(Communication::Bucket { bucket, bytes, step: self.step }, time);
                    let back = match (&mut self.keeper, lent) {
                        (Some(keeper), Some(lent)) if result.is_ok() => keeper.take_back(slots, lent),
                        _ => Ok(()),
                    };
                    match (result, back) {
                        (Ok(average), Ok(())) => self.averages[bucket] = Some(average),
                        (Err(Fault::Comm(e)), _) => {
                            first_error.get_or_insert(Error::from(e));
                        }
                        (Err(Fault::Device(e)), _) | (_, Err(e)) => {
                            let error = self.fault(format!("gradients on their device: {e}"));
                            first_error.get_or_insert(error);
                        }
                    }
                }
                other => return Err(self.out_of_order(other.err())),
            }
        }
        first_error.map_or(Ok(()), Err)
    }

    pub(super) fn submit(&mut self, job: Job) -> Result<()> {
        self.worker.submit(job).map_err(|e| self.fault(e))
    }

    fn forget_arrivals(&mut self) {
        self.put.iter_mut().for_each(|p| *p = false);
        self.filled.iter_mut().for_each(|f| *f = 0);
        self.arrived.clear();
        self.next = 0;
    }

    /// Gets buffers for the plan. *Collective*.
    fn fit_buffers(&mut self) -> Result<()> {
        self.buffers.clear();
        let lens = self.plan.buckets[..self.plan.awake].iter().map(Bucket::total_bytes).collect();
        self.submit(Job::Allocate(lens))?;
        let awake = match self.worker.next().map(|finished| finished.done) {
            Ok(Done::Allocated(Ok(buffers))) => Ok(buffers),
            Ok(Done::Allocated(Err(e))) => Err(Error::from(e)),
            other => Err(self.out_of_order(other.err())),
        };
        let awake = awake.inspect_err(|e| self.broken = Some(e.clone()))?;
        self.buffers.extend(awake.into_iter().map(Some));
        self.buffers.resize_with(self.plan.buckets.len(), || Some(SharedBuffer::plain(0)));
        self.averages = vec![None; self.plan.buckets.len()];
        self.filled = vec![0; self.plan.buckets.len()];
        Ok(())
    }

    pub(super) fn out_of_order(&self, lost: Option<String>) -> Error {
        self.fault(lost.unwrap_or_else(|| "the communication thread answered out of order".into()))
    }

    /// An error that names this rank.
    pub(crate) fn fault(&self, reason: String) -> Error {
        Error::Backward { rank: self.rank, reason }
    }
}
