//! From gradients of one rank to averaged gradients, bucket by bucket, while backward goes on.
//!
//! Knows bytes, slots and steps; knows nothing of Burn. The order of calls in one backward:
//! [`Reducer::begin`], then [`Reducer::put`] for each gradient as it becomes final, then [`Reducer::finish`].

mod pack;
mod plan;
mod worker;

use std::panic::Location;
use std::time::{Duration, Instant};

use burn_ddp_comm::ProcessGroup;

use crate::stats::StatsCell;
use crate::{Error, Result};
use pack::{Buffer, Sum};
pub(crate) use plan::{Caps, Plan, Slot};
use worker::{Done, Job, Worker};

/// How gradients of several ranks and micro-batches become one.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub enum Reduction {
    /// `Σ nᵢ gᵢ / Σ nᵢ`: right when the loss is a mean over the items of a batch. `nᵢ` comes from the loader or from
    /// [`Ddp::weight`](crate::Ddp::weight) and is 1 without either.
    #[default]
    Mean,
    /// `Σ gᵢ`: right when the loss is a sum over items, and what `torch.nn.DataParallel` does.
    Sum,
}

/// What does not change while a model is wrapped.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Settings {
    pub reduction: Reduction,
    /// Micro-batches per reduction.
    pub accumulation: usize,
    pub caps: Caps,
    /// How long one collective may take.
    pub timeout: Duration,
    /// Where the model was wrapped: what errors show as the caller.
    pub site: &'static Location<'static>,
}

#[derive(Debug)]
pub(crate) struct Reducer {
    rank: usize,
    settings: Settings,
    slots: Vec<Slot>,
    plan: Plan,
    worker: Worker,
    stats: StatsCell,
    /// One per bucket; `None` while the worker holds it. Dormant ones are empty until they are first needed.
    buffers: Vec<Option<Buffer>>,
    /// Slots that were put in this backward.
    put: Vec<bool>,
    /// How many slots of each bucket were put in this backward.
    filled: Vec<usize>,
    /// Order in which slots were put in this backward.
    arrived: Vec<u32>,
    /// Next bucket to hand to the worker.
    next: usize,
    /// Sums over micro-batches, `None` where no gradient was seen since the last reduction.
    held: Vec<Option<Sum>>,
    /// Micro-batches since the last reduction, the running one included.
    micro_batches: usize,
    /// Items (weights) of those micro-batches.
    items: f64,
    weight: f64,
    /// The running backward ends with a reduction.
    reducing: bool,
    /// Reductions done; names collectives.
    step: u64,
    order_agreed: bool,
    /// How often the user discarded held gradients: all ranks must do so alike.
    discards: u64,
    /// Why no further step is possible: buckets of a step that never ended are with the worker.
    broken: Option<Error>,
}

impl Reducer {
    pub(crate) fn new(group: ProcessGroup, slots: Vec<Slot>, settings: Settings, stats: StatsCell) -> Result<Self> {
        let rank = group.rank();
        let plan = Plan::new(&slots, &[], settings.caps);
        let worker = Worker::start(group, settings.timeout, settings.site)
            .map_err(|e| Error::Backward { rank, reason: format!("could not start the communication thread: {e}") })?;
        let mut reducer = Reducer {
            rank,
            settings,
            put: vec![false; slots.len()],
            held: (0..slots.len()).map(|_| None).collect(),
            slots,
            plan,
            worker,
            stats,
            buffers: Vec::new(),
            filled: Vec::new(),
            arrived: Vec::new(),
            next: 0,
            micro_batches: 0,
            items: 0.0,
            weight: 1.0,
            reducing: true,
            step: 0,
            order_agreed: false,
            discards: 0,
            broken: None,
        };
        reducer.fit_buffers();
        Ok(reducer)
    }

    pub(crate) fn slots(&self) -> &[Slot] {
        &self.slots
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
        Ok(())
    }

    /// Takes the final gradient of `slot` in this backward, and starts every bucket that is complete now.
    pub(crate) fn put(&mut self, slot: usize, gradient: &[u8]) -> Result<()> {
        let s = &self.slots[slot];
        if gradient.len() != s.len_bytes() {
            return Err(self.fault(format!(
                "the gradient of {} has {} bytes, but {:?} of {} takes {}",
                s.path,
                gradient.len(),
                s.dims,
                s.dtype,
                s.len_bytes()
            )));
        }
        let summing = !self.reducing || self.micro_batches > 1;
        let weight = match self.settings.reduction {
            Reduction::Mean => self.weight,
            Reduction::Sum => 1.0,
        };
        let place = self.plan.places[slot];
        if summing {
            let held = self.held[slot].get_or_insert_with(|| Sum::zeros(s.dtype, s.len_elems()));
            held.add(s.dtype, gradient, weight);
        }
        if !self.reducing {
            return Ok(());
        }
        if !summing {
            let (dtype, start) = (s.dtype, place.offset_elems * s.dtype.size_bytes());
            let bucket = &self.plan.buckets[place.bucket];
            let Some(buffer) = self.buffers[place.bucket].as_mut() else {
                return Err(self.fault(format!("the bucket of {} is under way already", s.path)));
            };
            if buffer.bytes().is_empty() {
                *buffer = Buffer::zeroed(bucket.total_bytes());
            }
            buffer.bytes_mut()[start..start + gradient.len()].copy_from_slice(gradient);
            pack::set_flag(dtype, buffer.bytes_mut(), bucket.flag_elem(place.nth), true);
        }
        self.put[slot] = true;
        self.arrived.push(slot as u32);
        self.filled[place.bucket] += 1;
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

    /// Ends the backward. Returns whether it reduced; then [`Reducer::gradient`] has the results.
    pub(crate) fn finish(&mut self) -> Result<bool> {
        if !self.reducing {
            self.forget_arrivals();
            return Ok(false);
        }
        while self.next < self.plan.awake {
            self.launch(self.next, false)?;
        }
        let wait = Instant::now();
        self.collect(0..self.plan.awake)?;
        let last = self.plan.awake - 1;
        let bucket = &self.plan.buckets[last];
        let wake = bucket.wake_elem().is_some_and(|e| pack::flag_is_up(bucket.dtype, self.reduced(last), e));
        if wake {
            for bucket in self.plan.awake..self.plan.buckets.len() {
                self.launch(bucket, false)?;
            }
            self.collect(self.plan.awake..self.plan.buckets.len())?;
        }
        self.stats.step(wait.elapsed());
        Ok(true)
    }

    /// The reduced gradient of `slot` after [`Reducer::finish`] returned true; `None` if no rank had one.
    pub(crate) fn gradient(&self, slot: usize) -> Option<&[u8]> {
        let place = self.plan.places[slot];
        let bucket = &self.plan.buckets[place.bucket];
        if place.bucket >= self.next {
            return None; // dormant, and nobody woke it
        }
        let bytes = self.reduced(place.bucket);
        let start = place.offset_elems * bucket.dtype.size_bytes();
        pack::flag_is_up(bucket.dtype, bytes, bucket.flag_elem(place.nth))
            .then(|| &bytes[start..start + self.slots[slot].len_bytes()])
    }

    /// Ends the step after the results were taken: all is ready for the next one. After the first step the ranks agree on
    /// rank 0's order of arrival and cut the buckets anew.
    pub(crate) fn end_step(&mut self) -> Result<()> {
        if !self.order_agreed {
            let arrived = std::mem::take(&mut self.arrived);
            self.submit(Job::AgreeOrder(arrived))?;
            let order = match self.worker.next() {
                Ok(Done::Order(order)) => order?,
                Ok(Done::Reduced { .. }) => {
                    return Err(self.fault("the communication thread answered out of order".into()));
                }
                Err(e) => return Err(self.fault(e)),
            };
            let order: Vec<usize> = order.into_iter().map(|s| s as usize).collect();
            self.plan = Plan::new(&self.slots, &order, self.settings.caps);
            self.order_agreed = true;
            self.fit_buffers();
        }
        self.step += 1;
        self.discard();
        Ok(())
    }

    /// Forgets gradients of micro-batches that were not reduced yet, as all ranks do.
    pub(crate) fn discard_held(&mut self) {
        self.discards += 1;
        self.discard();
    }

    /// Forgets everything of the running step.
    pub(crate) fn discard(&mut self) {
        if self.broken.is_none() && self.buffers.iter().any(Option::is_none) {
            self.broken = Some(self.fault(
                "an earlier backward ended half-way (an error or a panic) with buckets under way; the ranks cannot get back in step".into(),
            ));
        }
        self.micro_batches = 0;
        self.items = 0.0;
        self.held.iter_mut().for_each(|h| *h = None);
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

    fn launch(&mut self, index: usize, during_backward: bool) -> Result<()> {
        let bucket = &self.plan.buckets[index];
        let Some(mut buffer) = self.buffers[index].take() else {
            return Err(self.fault(format!("bucket {index} is under way already")));
        };
        if buffer.bytes().len() != bucket.total_bytes() {
            buffer = Buffer::zeroed(bucket.total_bytes());
        }
        let bytes = buffer.bytes_mut();
        let items = match self.settings.reduction {
            Reduction::Mean => self.items,
            Reduction::Sum => 1.0,
        };
        for (nth, &slot) in bucket.slots.iter().enumerate() {
            let s = &self.slots[slot];
            let start = self.plan.places[slot].offset_elems * bucket.dtype.size_bytes();
            let out = &mut bytes[start..start + s.len_bytes()];
            let present = match &self.held[slot] {
                Some(sum) if items > 0.0 => {
                    sum.write(bucket.dtype, items, out);
                    true
                }
                Some(_) => {
                    out.fill(0);
                    false
                }
                None if self.put[slot] => true, // packed by `put`
                None => {
                    out.fill(0);
                    false
                }
            };
            pack::set_flag(bucket.dtype, bytes, bucket.flag_elem(nth), present);
        }
        if let Some(elem) = bucket.wake_elem() {
            let sleeper = self.plan.buckets[self.plan.awake..].iter().flat_map(|b| &b.slots);
            let up = sleeper.into_iter().any(|&s| self.put[s] || self.held[s].is_some());
            pack::set_flag(bucket.dtype, bytes, elem, up);
        }
        self.stats.launched(bucket.total_bytes(), during_backward);
        let weight = (self.settings.reduction == Reduction::Mean).then_some(self.items);
        // 16 bits of discards, 28 of steps, 20 of buckets: enough to tell calls apart that could meet.
        let tag = (self.discards & 0xffff) << 48 | (self.step & 0xfff_ffff) << 20 | index as u64;
        self.submit(Job::Reduce { bucket: index, dtype: bucket.dtype, buffer, weight, tag })?;
        self.next = index + 1;
        Ok(())
    }

    fn collect(&mut self, buckets: std::ops::Range<usize>) -> Result<()> {
        let mut first_error = None;
        for expected in buckets {
            match self.worker.next() {
                Ok(Done::Reduced { bucket, buffer, busy, result }) if bucket == expected => {
                    self.buffers[bucket] = Some(buffer);
                    self.stats.busy(busy);
                    if let Err(e) = result {
                        first_error.get_or_insert(Error::from(e));
                    }
                }
                Ok(_) => return Err(self.fault("the communication thread answered out of order".into())),
                Err(e) => return Err(self.fault(e)),
            }
        }
        first_error.map_or(Ok(()), Err)
    }

    fn reduced(&self, bucket: usize) -> &[u8] {
        self.buffers[bucket].as_ref().map_or(&[], |b| b.bytes())
    }

    fn submit(&self, job: Job) -> Result<()> {
        self.worker.submit(job).map_err(|e| self.fault(e))
    }

    fn forget_arrivals(&mut self) {
        self.put.iter_mut().for_each(|p| *p = false);
        self.filled.iter_mut().for_each(|f| *f = 0);
        self.arrived.clear();
        self.next = 0;
    }

    fn fit_buffers(&mut self) {
        self.buffers = self
            .plan
            .buckets
            .iter()
            .map(|b| Some(if b.dormant { Buffer::default() } else { Buffer::zeroed(b.total_bytes()) }))
            .collect();
        self.filled = vec![0; self.plan.buckets.len()];
    }

    /// An error that names this rank.
    pub(crate) fn fault(&self, reason: String) -> Error {
        Error::Backward { rank: self.rank, reason }
    }
}
