//! One step of a wrapped model: begun before its backward, submitted and finished after it. [`run`](super::scope::run)
//! calls these.

use std::sync::atomic::Ordering;

use super::model_state::{ModelState, State};
use super::overflow_verdict::{Overflow, Verdict};
use super::scope::Call;
use super::shard::ShardGroup;
use super::wrapped_model::WrappedModel;
use crate::batch_weight::Batch;
use crate::gradients::{Boundary, Culprit, GradientMemory, Outcome, Piggyback, first_not_finite};
use crate::loss_scaling::{LossScale, LossScaler};
use crate::{Error, Result};

/// Calls that break the promise of logical ranks, and what to do instead.
const FLUSH: (&str, &str) = ("`ddp.flush` within a step", "a step ends with its last leaf");
const ACCUMULATE: (&str, &str) = ("`ddp.accumulate`", "logical ranks say how many micro-batches a step has");
const STREAM: (&str, &str) = ("a stream, which is dealt to processes", "use `ddp.loader`");
pub(crate) const THREADS: (&str, &str) = (
    "random numbers (`ddp.seed`) of ranks that are threads and share one generator",
    "start processes, by `burnrun` or `Ddp::launch`",
);
const SYNC_BATCH_NORM: (&str, &str) =
    ("`SyncBatchNorm`, which normalizes over processes", "`BatchNorm` averages the running statistics of leaves");

impl WrappedModel {
    /// Takes the model for a step, which no other can begin then.
    pub(super) fn open_step(&self) -> Result<()> {
        match self.lock().open() {
            true => Ok(()),
            false => Err(self.fault(
                "a backward of the wrapped model is open already: `ddp.backward` was called inside `ddp.scope`, or on \
                another thread"
                    .into(),
            )),
        }
    }

    /// Begins the step, or the micro-batch of a step, that a call makes with `batch`, whose loss has this scale if it
    /// is scaled. Returns true if it reduces.
    pub(super) fn begin_step(&self, batch: &Batch, call: Call, loss_scale: Option<f64>) -> Result<bool> {
        self.lock().begin(self, Some((batch, call.holds)), loss_scale)
    }

    /// Refuses what breaks the promise of logical ranks, if it `is` what the call does.
    fn refuse_inexact(&self, is: bool, (what, help): (&str, &str)) -> Result<()> {
        match is && self.is_exact {
            true => self.ddp.state().leaves.refuse_if_exact(what, help),
            false => Ok(()),
        }
    }

    /// Begins a step that adds nothing to the gradients that are held, and reduces them.
    pub(super) fn begin_flush(&self, loss_scale: Option<f64>) -> Result<bool> {
        self.lock().begin(self, None, loss_scale)
    }

    /// Refuses a backward that has not reached the model.
    pub(super) fn refuse_unreached(&self) -> Result<()> {
        match self.lock().is_reached() {
            true => Ok(()),
            false => Err(self.fault(
                "the loss depends on no parameter of the wrapped model, or only on parameters without a tap (frozen, \
                or replaced after `wrap`), or there was no backward"
                    .into(),
            )),
        }
    }

    /// Submits the gradients that backward has not submitted.
    pub(super) fn submit_step(&self) -> Result<()> {
        self.lock().submit(self)
    }

    /// Waits for the averages, unless the micro-batch only added up. Returns true if they are there.
    pub(super) fn finish_step(&self) -> Result<bool> {
        let reduced = self.lock().finish(self)?;
        self.end_step();
        Ok(reduced)
    }

    /// Drops everything of the step, and the micro-batches that were held for it; `alike` if all ranks do so.
    pub(super) fn abandon_step(&self, alike: bool) {
        self.lock().abandon(alike);
        self.end_step();
    }

    /// Begins to count reads anew after a backward that did not train this model.
    pub(super) fn restart_reads(&self) {
        self.lock().restart_reads();
        if let Some(shards) = self.shards() {
            shards.restart();
        }
    }

    /// The scale for the next loss, if the model has one.
    pub(super) fn loss_scale(&self) -> Option<f64> {
        self.loss_scale_state().map(|of_model| of_model.scale)
    }

    /// The loss scale, if the model has one, for a checkpoint.
    pub(crate) fn loss_scale_state(&self) -> Option<LossScale> {
        self.lock().loss_scale().copied()
    }

    /// Goes on with the loss scale of a checkpoint, if the model has one.
    pub(crate) fn load_loss_scale(&self, state: LossScale) {
        if let Some(own) = self.lock().loss_scale() {
            *own = state;
        }
    }

    /// See [`State::end_scaled_step`].
    pub(super) fn end_scaled_step(&self, verdict: &Verdict) -> Result<()> {
        self.lock().end_scaled_step(self, verdict)
    }

    /// A gradient that is not finite, in words.
    fn spoken_culprit(&self, Culprit { rank, slot, leaf }: Culprit, has_leaves: bool) -> String {
        let path = slot.map_or("some parameter", |slot| &self.slots[slot].path);
        match rank {
            Some(rank) if has_leaves => {
                format!("the gradient of {path} is not finite on rank {rank}, logical rank {leaf}")
            }
            Some(rank) => format!("the gradient of {path} is not finite on rank {rank}"),
            None => format!("the average gradient of {path} is not finite"),
        }
    }

    /// Adds the overflow of this model to the verdict over its call.
    pub(super) fn add_to(&self, verdict: &mut Verdict) {
        let overflow = self.lock().overflow();
        if let Some(culprit) = overflow {
            verdict.add(self.overflow_of(culprit), self.loss_scale().is_some());
        }
    }

    /// The overflow that a gradient causes.
    pub(super) fn overflow_of(&self, culprit: Culprit) -> Overflow {
        let parameter = culprit.slot.map(|slot| self.slots[slot].path.clone());
        Overflow { rank: culprit.rank, parameter, words: self.spoken_culprit(culprit, self.leaves().is_some()) }
    }

    fn not_finite(&self, Culprit { rank, slot, .. }: Culprit, reason: String) -> Error {
        Error::NotFinite { rank, parameter: slot.map(|slot| self.slots[slot].path.clone()), reason }
    }

    fn end_step(&self) {
        if let Some(shards) = self.shards() {
            shards.restart();
        }
        self.ended.fetch_add(1, Ordering::AcqRel);
    }

    /// The running statistics as a payload behind the buckets; with logical ranks `leaf` is that of the running
    /// backward and its weight, if it counts.
    pub(super) fn statistics<B: GradientMemory>(
        &self,
        state: &mut State<B>,
        leaf: Option<(usize, f64)>,
    ) -> Result<Piggyback> {
        let mut piggyback = Piggyback::default();
        if let Some(statistics) = &mut state.statistics {
            if statistics.is_synced() {
                self.refuse_retrained()?;
            }
            statistics.send(&mut piggyback, leaf)?;
        }
        Ok(piggyback)
    }
}

impl<B: GradientMemory> State<B> {
    /// Begins a micro-batch, with true if it only adds up, or, without one, a reduction of what is held. The loss has
    /// the scale, if it is scaled.
    pub(super) fn begin_step(
        &mut self,
        model: &WrappedModel,
        batch: Option<(&Batch, bool)>,
        loss_scale: Option<f64>,
    ) -> Result<bool> {
        model.ddp.world().set_step(self.reducer.step());
        model.measure_movements(self)?;
        let skips = model.ddp.state().skips();
        self.loss_scale = loss_scale;
        let Some((batch, holds)) = batch else {
            model.refuse_inexact(self.run.is_some_and(|_| self.reducer.holds_gradients()), FLUSH)?;
            self.reducer.begin_flush(skips)?;
            return Ok(true);
        };
        model.refuse_inexact(holds, ACCUMULATE)?;
        model.refuse_inexact(model.has_synced_norm(), SYNC_BATCH_NORM)?;
        model.refuse_inexact(batch.step.is_some() && batch.leaf.is_none(), STREAM)?;
        model.refuse_inexact(model.ddp.draws_alike(), THREADS)?;
        // A weight that the program gave may be that of one of several micro-batches.
        let has_leaf = self.run.is_some() && batch.leaf.is_some();
        let again = batch.number == self.last_batch;
        if again && (has_leaf || self.accumulation > 1 && batch.step.is_some() && !batch.weighted) {
            return Err(model.fault(
                "a second backward for one batch; with accumulation or logical ranks each micro-batch has one: let \
                passes that do not train this model go through `model.clone().no_grad()`"
                    .into(),
            ));
        }
        let epoch = batch.step.map(|step| (step.track, step.at.epoch));
        if self.reducer.holds_gradients() && epoch.is_some() && self.epoch.is_some_and(|held| Some(held) != epoch) {
            return Err(model.fault(format!(
                "an epoch was over while gradients of micro-batches were held (accumulation {}): it was left early, or \
                its last batch was weighted or only added up; reduce them at its end with `ddp.flush(&model)?`, on \
                every rank",
                self.accumulation
            )));
        }
        // A batch that this rank alone gave up, and does not try again, sets it apart from the others.
        if self.given_up.take().is_some_and(|given_up| given_up != batch.number) {
            self.reducer.note_lost();
        }
        self.epoch = epoch;
        self.last_batch = batch.number;
        let boundary = match holds {
            true => Boundary::Later,
            false if batch.last && !batch.weighted => Boundary::Now,
            false => Boundary::Counted,
        };
        let (weight, leaf) = match self.run {
            Some(run) => {
                // The leaf of a loader of another handle has no place in this model's steps.
                let group = model.ddp.group().id();
                let leaf = batch.leaf.filter(|leaf| (leaf.group, leaf.division) == (group, run.division));
                (batch.items / model.ddp.state().leaves.nominal(), leaf)
            }
            None => (batch.items, None),
        };
        self.reducer.begin(weight, leaf, boundary, skips)?;
        Ok(self.reducer.micro_batch().reducing)
    }

    /// Submits the gradients that backward has not submitted. All hooks have run, so sums that wait for further reads
    /// are final.
    pub(super) fn submit_rest(&mut self, model: &WrappedModel) -> Result<()> {
        let micro_batch = self.reducer.micro_batch();
        let shards = model.shards().filter(|_| micro_batch.reducing);
        if let Some(shards) = shards {
            self.sharded.agree(shards, &model.outstanding(), &micro_batch)?;
        }
        for slot in 0..self.slots.len() {
            if let Some(sum) = self.slots[slot].partial.take() {
                model.put(self, slot, sum)?;
            } else if let Some(shards) = shards.filter(|_| !self.slots[slot].done && self.sharded.must_reduce(slot)) {
                self.sharded.reduce(shards, slot, None, &micro_batch, &self.device)?;
            }
        }
        self.reducer.receive_late()?;
        self.reducer.note_sharded(self.sharded.take_not_finite());
        let mut piggyback = Piggyback::default();
        if micro_batch.reducing {
            let leaf = self.reducer.own_leaf();
            piggyback = model.statistics(self, leaf)?;
            if self.reducer.compares_replicas() {
                model.compare(self, &mut piggyback)?;
            }
        }
        self.reducer.submit_rest(piggyback)
    }

    /// See [`WrappedModel::finish_step`].
    pub(super) fn finish_step(&mut self, model: &WrappedModel) -> Result<bool> {
        let step = self.reducer.step();
        let results = self.reducer.finish()?;
        if let Some(shards) = model.shards() {
            self.sharded.refuse_weightless(shards)?;
        }
        if let Some(statistics) = self.statistics.as_mut().filter(|_| results.is_none()) {
            statistics.end_leaf(self.reducer.own_leaf())?;
        }
        if let Some(results) = &results {
            model.refuse_differences(self, step, results)?;
            if let Some(statistics) = &mut self.statistics {
                statistics.receive(results);
            }
            self.look_for_overflow(model, step)?;
            for (slot, average) in self.averages.iter_mut().enumerate() {
                *average = self.sharded.take(slot).or_else(|| match self.reducer.outcome(slot) {
                    Outcome::Whole(average) => Some(average),
                    Outcome::Absent => None,
                });
            }
            self.warn_unused(model);
            self.reducer.end_step()?;
            model.comparing.store(self.reducer.compares_replicas(), Ordering::Release);
        }
        self.end();
        Ok(results.is_some())
    }

    /// Looks whether an average of the step is not finite. If its losses are scaled, notes that: the step will be
    /// skipped. Otherwise the first time is told.
    ///
    /// # Errors
    ///
    /// On all ranks, if such an average is an error.
    pub(super) fn look_for_overflow(&mut self, model: &WrappedModel, step: u64) -> Result<()> {
        // All ranks reduce in calls of the same models, whatever calls have only added up.
        let scaled = self.loss_scale.is_some();
        let mut any = self.reducer.is_not_finite(scaled)?;
        // A rank sees its rows alone there. A mean is in the range of its gradients, whose flags tell.
        let sums_in_half = self.reducer.sums_in_half() && (scaled || self.finite);
        let asks = |shards: &&ShardGroup| sums_in_half || scaled && shards.reach::<B>(&self.device);
        if let Some(shards) = model.shards().filter(asks) {
            let own = first_not_finite::<B>(self.sharded.averages()).map_err(|e| model.fault(e))?;
            any |= shards.numbers(&[f64::from(u8::from(own.is_some()))])?.iter().any(|own| *own > 0.0);
        }
        if !any {
            return Ok(());
        }
        if scaled && self.scaler.as_ref().is_some_and(LossScaler::can_fall) {
            self.overflow = Some(Culprit::default());
            return Ok(());
        }
        if !scaled && !self.finite && std::mem::replace(&mut self.told_not_finite, true) {
            return Ok(());
        }
        let culprit = self.reducer.culprit(model.ddp.group().ranks())?;
        if scaled {
            self.overflow = Some(culprit);
            return Ok(());
        }
        let text = format!("in step {step} {}", model.spoken_culprit(culprit, self.run.is_some()));
        if self.finite {
            return Err(model.not_finite(culprit, text));
        }
        if model.ddp.is_main() {
            tracing::warn!(
                target: "burn_ddp::finite",
                "{text}, so the average is not finite on any rank, and the parameters will not be after an optimizer \
                step; later steps are not looked at (`WrapConfig::with_finite_gradients(true)` makes this an error)"
            );
        }
        Ok(())
    }

    /// Ends a step that has reduced: without averages if the call skips it on all ranks.
    ///
    /// # Errors
    ///
    /// On all ranks, if the scale is below its bound.
    pub(super) fn end_scaled_step(&mut self, model: &WrappedModel, verdict: &Verdict) -> Result<()> {
        let (overflow, used) = (self.overflow.take(), self.loss_scale.take());
        if verdict.skips() {
            self.skipped += 1;
            self.forget_averages();
        }
        let Some(scaler) = &mut self.scaler else {
            model.ddp.state().meter.scaled(None);
            return Ok(());
        };
        let before = scaler.state.scale;
        if verdict.lowers_scale(overflow.is_some()) {
            scaler.overflows();
        } else if !verdict.skips() {
            scaler.fits(used.unwrap_or(before));
        }
        let scale = scaler.state.scale;
        model.ddp.state().meter.scaled(Some(scale));
        if !scaler.is_enough() {
            let Overflow { rank, parameter, words } = verdict.blamed();
            let reason = format!(
                "the loss scale has fallen to {scale}, below `min_loss_scale`: {words}, whatever the scale. The \
                training diverges, or a layer overflows in f16 without any scale: look there, train in bf16, or name \
                the layer in `WrapConfig::with_full_precision`"
            );
            return Err(Error::NotFinite { rank, parameter, reason });
        }
        if model.ddp.is_main() && scale < before {
            tracing::info!(
                target: "burn_ddp::loss_scale",
                scale,
                "gradients are not finite with the loss scale {before}: all ranks skip step {}",
                self.reducer.step() - 1
            );
        }
        Ok(())
    }

    /// Warns on rank 0, in the first step, of parameters that have no gradient on any rank.
    fn warn_unused(&self, model: &WrappedModel) {
        if self.reducer.step() > 0 || model.ddp.rank() > 0 {
            return;
        }
        let slots = model.slots.iter().zip(&self.averages);
        let unused = slots.filter_map(|(slot, average)| {
            (slot.trainable && !slot.sharded && average.is_none()).then_some(&*slot.path)
        });
        let parameters = unused.collect::<Vec<_>>().join(", ");
        if !parameters.is_empty() {
            tracing::warn!(
                target: "burn_ddp::unused",
                parameters,
                "these parameters had no gradient on any rank in the first step: they are unused, or were not read \
                through `val()`"
            );
        }
    }

    /// Ends the running backward.
    fn end(&mut self) {
        self.reset();
        self.sharded.end_backward();
        self.compared.iter_mut().for_each(|value| *value = None);
    }

    /// See [`WrappedModel::abandon_step`].
    pub(super) fn abandon_step(&mut self, alike: bool) {
        self.end();
        self.forget_averages();
        self.overflow = None;
        self.loss_scale = None;
        if let Some(statistics) = &mut self.statistics {
            statistics.restore_step();
        }
        self.given_up = (!alike).then_some(self.last_batch);
        self.forget_batches();
        self.reducer.abandon(alike);
    }
}
