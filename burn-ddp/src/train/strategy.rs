//! The data-parallel training strategy: the loop of Burn's `SingleDeviceTrainingStrategy` on all ranks together.

use std::panic::Location;
use std::path::PathBuf;

use burn::tensor::Device;
use burn::train::metric::store::EventStoreClient;
use burn::train::{
    EventProcessorTraining, InferenceStep, Interrupter, Learner, LearnerEvent, LearnerModel, LearningCheckpointer,
    LearningResult, SupervisedLearningStrategy, SupervisedTrainingEventProcessor, TrainLoader, TrainOutput, TrainStep,
    TrainingComponents, TrainingItem, ValidLoader,
};
use burn_ddp_comm::attribute_calls;

use super::agreed_stop::{agree_to_stop, decide_on_main, fail, report};
use super::interrupted_epoch::{InterruptedEpochs, UnderWay};
use super::micro_batches::MicroBatches;
use super::sharded_learner::{self, WholeLearner};
use crate::data::ShardedLoader;
use crate::intercept::{self, Call, Models, Own, without_mappers};
use crate::stop::tell_saved;
use crate::wrap::{self, Taps};
use crate::{Ddp, Error, Result, WrapConfig, agreement};

type Output<M> = TrainOutput<<M as TrainStep>::Output>;

/// Data-parallel training; from [`DdpTrainer::training`](super::DdpTrainer::training).
pub(super) struct DdpStrategy<M: LearnerModel> {
    ddp: Ddp,
    config: WrapConfig,
    /// The line that made it.
    site: &'static Location<'static>,
    /// The training loader by its own type; Burn's trainer has it as a `DataLoader`.
    train: ShardedLoader<<M as TrainStep>::Input>,
    /// Directory of the training.
    directory: PathBuf,
}

impl<M: LearnerModel> DdpStrategy<M> {
    pub(super) fn new(
        ddp: Ddp,
        config: WrapConfig,
        train: ShardedLoader<<M as TrainStep>::Input>,
        directory: PathBuf,
        site: &'static Location<'static>,
    ) -> Self {
        DdpStrategy { ddp, config, site, train, directory }
    }

    /// Gives all ranks the same weights. Returns the taps, which each step attaches, and the device. `micro_batches` is
    /// the number of backwards per step.
    fn prepare(
        &self,
        learner: &mut Learner<M>,
        micro_batches: usize,
        events: &EventStoreClient,
    ) -> Result<(Taps, Device)> {
        if self.config.accumulation().is_some_and(|k| k != 1) {
            return Err(Error::invalid(
                "Burn's trainer accumulates by its own setting, `grads_accumulation(k)`: leave `with_accumulation` out",
            ));
        }
        if self.ddp.state().leaves.division().is_some() && micro_batches > 1 {
            return Err(Error::invalid(format!(
                "`grads_accumulation({micro_batches})`, but the job has {} logical ranks, which say how many \
                micro-batches a step has: leave it out; a step then takes the mean over all leaves, and not Burn's sum \
                over the micro-batches of a process",
                self.ddp.logical_ranks()
            )));
        }
        self.ddp.state().make_metric_group()?;
        let (model, agreed) = wrap::agree_and_broadcast(&self.ddp, learner.model(), &self.config)?;
        let accumulates = match micro_batches {
            0 | 1 => Ok(()),
            k => wrap::refuse_accumulation(&format!("`grads_accumulation({k})`"), agreed.local()),
        };
        agreement::on_outcome(self.ddp.group(), "accumulate", accumulates)?;
        // The learner gives no access to its model, but can load values into it.
        match self.config.shards() {
            true => {
                let cut = sharded_learner::cut(learner, model.into_record(), agreed.divided(&self.ddp), events);
                agreement::on_outcome(self.ddp.group(), "divide its learner", cut)?;
            }
            false => learner.load_model(model.into_record()),
        }
        let device = agreed.device.clone();
        let taps = agreed.taps(&self.ddp, &learner.model())?;
        // `ddp.learner` has checked that the optimizer can step divided parameters.
        let slots = 0..taps.wrapped.slots.len();
        slots.filter(|slot| taps.wrapped.is_divided(*slot)).for_each(|slot| taps.wrapped.note_optimizer(slot));
        Ok((taps, device))
    }
}

impl<M: LearnerModel> SupervisedLearningStrategy<M> for DdpStrategy<M> {
    fn train(
        &self,
        learner: Learner<M>,
        train: TrainLoader<M>,
        valid: ValidLoader<M>,
        mut components: TrainingComponents<M>,
    ) -> LearningResult<M> {
        if !self.ddp.is_main() {
            // The summary is read from files that rank 0 may still be writing.
            components.summary = None;
        }
        Fit(self).train(learner, train, valid, components)
    }

    fn fit(
        &self,
        components: TrainingComponents<M>,
        learner: Learner<M>,
        train: TrainLoader<M>,
        valid: ValidLoader<M>,
        starting_epoch: usize,
    ) -> (M, SupervisedTrainingEventProcessor<M>) {
        Fit(self).fit(components, learner, train, valid, starting_epoch)
    }
}

/// The strategy inside Burn's own `train`, which reports start and end.
struct Fit<'a, M: LearnerModel>(&'a DdpStrategy<M>);

impl<M: LearnerModel> SupervisedLearningStrategy<M> for Fit<'_, M> {
    fn fit(
        &self,
        components: TrainingComponents<M>,
        mut learner: Learner<M>,
        train: TrainLoader<M>,
        valid: ValidLoader<M>,
        starting_epoch: usize,
    ) -> (M, SupervisedTrainingEventProcessor<M>) {
        let DdpStrategy { ddp, train: sharded, site, directory, .. } = self.0;
        let TrainingComponents {
            num_epochs,
            mut checkpointer,
            grad_accumulation,
            interrupter,
            mut early_stopping,
            event_processor,
            event_store,
            ..
        } = components;
        let accumulation = grad_accumulation.unwrap_or(1);
        let stops = |interrupter: &Interrupter, saves| attribute_calls(site, || agree_to_stop(ddp, interrupter, saves));
        let mut interrupted = InterruptedEpochs::of_training(ddp, directory);
        let prepared = attribute_calls(site, || {
            let mut left = None;
            if starting_epoch > 1 {
                let read = sharded_learner::read_loaded(&mut learner, &event_store);
                let parameters = agreement::on_outcome(ddp.group(), "read its checkpoint", read)?;
                left = interrupted.load(starting_epoch - 1, &parameters)?;
            }
            let (taps, device) = self.0.prepare(&mut learner, accumulation, &event_store)?;
            // Burn counts epochs from 1. A resumed training continues with the order of its epoch.
            match &left {
                Some(left) => sharded.resume(&left.position)?,
                None => sharded.set_epoch(starting_epoch - 1),
            }
            let saves = ddp.group().broadcast_object(ddp.is_main().then_some(checkpointer.is_some()), 0)?;
            Ok((left, taps, device, saves))
        });
        let (mut left, taps, device, saves) = match prepared {
            Ok(prepared) => prepared,
            Err(error) => {
                // All ranks got the same error, so none waits for this one.
                report(ddp, &interrupter, &error);
                return (learner.model(), event_processor);
            }
        };
        let (train, valid) = (train.to_device(&device), valid.to_device(&device.clone().inner()));
        // With logical ranks each step has equally many batches on every rank.
        let leaves = ddp.state().leaves.division().map(|division| division.of_rank(0).len());
        let accumulation = leaves.unwrap_or(accumulation);
        let events = event_processor;
        let mut run = Run { ddp, site, sharded, taps, learner, accumulation, saves, events, interrupter };

        let first_epoch = if left.is_some() { starting_epoch - 1 } else { starting_epoch };
        for epoch in first_epoch..=num_epochs {
            if !left.take().is_some_and(|left| left.was_trained) {
                let start = LearnerEvent::StartSplit { epoch_number: epoch, total_items: train.num_items() };
                run.report_train(start);
                let stopped = run.train(&train);
                run.report_train(LearnerEvent::EndSplit(epoch));
                if stopped {
                    if run.stop_requested() && run.interrupter.error().is_none() {
                        run.write_checkpoint(checkpointer.as_mut(), (epoch, true), &mut interrupted, &event_store);
                    }
                    break;
                }
            }
            let start = LearnerEvent::StartSplit { epoch_number: epoch, total_items: valid.num_items() };
            run.report_valid(start);
            run.validate(&valid);
            run.report_valid(LearnerEvent::EndSplit(epoch));
            run.report_train(LearnerEvent::EndEpoch(epoch));
            run.flush();
            let stopped = stops(&run.interrupter, saves);
            if run.stop_requested() && run.interrupter.error().is_none() {
                run.write_checkpoint(checkpointer.as_mut(), (epoch, true), &mut interrupted, &event_store);
                break;
            }
            if stopped {
                break;
            }
            if run.write_checkpoint(checkpointer.as_mut(), (epoch, false), &mut interrupted, &event_store) {
                break;
            }
            if let Some(early_stopping) = &mut early_stopping {
                let own = ddp.is_main() && early_stopping.should_stop(epoch, &event_store);
                if attribute_calls(site, || decide_on_main(ddp, &run.interrupter, own)) {
                    break;
                }
            }
        }
        // Dropping it finishes pending writes, which may fail.
        drop(checkpointer);
        if run.interrupter.error().is_none() {
            let last = interrupted.under_way.take();
            let interrupted_in = last.as_ref().and_then(UnderWay::middle_of);
            match interrupted.end(last) {
                Ok(()) => interrupted_in.filter(|_| ddp.is_main()).into_iter().for_each(|epoch| {
                    tell_saved(ddp.world(), &format!("{}, epoch {epoch}", directory.display()));
                }),
                Err(error) => report(ddp, &run.interrupter, &error),
            }
        }
        stops(&run.interrupter, false);
        (run.result(), run.events)
    }
}

/// The state of a running training on this rank.
pub(super) struct Run<'a, M: LearnerModel> {
    pub(super) ddp: &'a Ddp,
    pub(super) site: &'static Location<'static>,
    sharded: &'a ShardedLoader<<M as TrainStep>::Input>,
    pub(super) taps: Taps,
    pub(super) learner: Learner<M>,
    /// Micro-batches per optimizer step.
    accumulation: usize,
    /// True if rank 0 has a checkpointer. Without one a signal ends the program as any other.
    pub(super) saves: bool,
    events: SupervisedTrainingEventProcessor<M>,
    pub(super) interrupter: Interrupter,
}

impl<M: LearnerModel> Run<'_, M> {
    /// True if some parameters of the learner's model are sharded.
    pub(super) fn is_in_parts(&self) -> bool {
        self.taps.wrapped.shards().is_some()
    }

    /// The learner's model: with taps if it is in parts, else without the mappers of [`sharded_learner`].
    pub(super) fn result(&self) -> M {
        match self.is_in_parts() {
            true => self.taps.attach(self.learner.model()),
            false => without_mappers(self.learner.model()),
        }
    }

    /// Lets rank 0 write a checkpoint, if it has a checkpointer. Returns true after an error.
    fn checkpoint(
        &self,
        checkpointer: Option<&mut LearningCheckpointer<M>>,
        epoch: usize,
        events: &EventStoreClient,
    ) -> bool {
        let Run { ddp, site, learner, taps, interrupter, .. } = self;
        let in_parts = self.is_in_parts() && ddp.world_size() > 1;
        let gather = || match self.saves {
            true => WholeLearner::gather(ddp, learner, &self.result(), events),
            false => Ok(None),
        };
        let whole = match in_parts.then(|| attribute_calls(site, gather)).transpose() {
            Ok(whole) => whole.flatten(),
            Err(error) => {
                fail(ddp, interrupter, error);
                return true;
            }
        };
        if let Some(checkpointer) = checkpointer.filter(|_| ddp.is_main()) {
            taps.wrapped.warn_of_local();
            match whole {
                Some(whole) => whole.checkpoint(checkpointer, epoch, events),
                None => checkpointer.checkpoint(learner, epoch, events),
            }
        }
        false
    }

    /// True once all ranks have agreed to save and stop.
    pub(super) fn stop_requested(&self) -> bool {
        self.saves && self.ddp.stop_requested()
    }

    /// Lets rank 0 write the checkpoint of `epoch`: of its end, or of its `middle` (before the end of its validation),
    /// which ends the training. Returns true after an error.
    fn write_checkpoint(
        &self,
        checkpointer: Option<&mut LearningCheckpointer<M>>,
        (epoch, middle): (usize, bool),
        interrupted: &mut InterruptedEpochs<'_>,
        events: &EventStoreClient,
    ) -> bool {
        if !self.saves {
            return false;
        }
        let last = interrupted.under_way.take();
        let write = || {
            let position = self.sharded.position();
            // Burn counts epochs from 1.
            let was_trained = position.epoch() == epoch;
            attribute_calls(self.site, || match middle {
                true => interrupted.begin(epoch, position, was_trained, &self.result()),
                false => interrupted.replace(epoch),
            })?;
            let failed = self.checkpoint(checkpointer, epoch, events);
            // Burn's threads have taken this one, so they have written the last one.
            interrupted.end(last)?;
            Ok(failed)
        };
        let failed = write().unwrap_or_else(|error| {
            fail(self.ddp, &self.interrupter, error);
            true
        });
        if middle && !failed {
            self.interrupter.stop(Some(&format!("asked to stop; the checkpoint of epoch {epoch} is in its middle")));
        }
        failed
    }

    /// Trains for one epoch. Returns true if it ended early, on all ranks; also if the ranks have agreed to stop.
    fn train(&mut self, loader: &TrainLoader<M>) -> bool {
        let mut batches = loader.iter();
        let mut micro_batches = MicroBatches::new(self.accumulation, !self.is_logical());
        let mut iteration = 0;
        while let Some(batch) = batches.next() {
            let batch = match batch {
                Ok(batch) => batch,
                Err(error) => {
                    // The others wait for this rank's gradients.
                    self.ddp.world().fail(error.to_string());
                    self.interrupter.fail(error);
                    return true;
                }
            };
            let progress = batches.progress();
            let completes = micro_batches.completes(progress.is_completed());
            let weight = self.weight(iteration, &micro_batches);
            let counts = weight.unwrap_or_else(|| self.ddp.state().batch_weight.items()) > 0.0;
            let output = self.step(batch, weight, !completes);
            let (TrainOutput { grads, item }, reduced) = match output {
                Ok(output) => output,
                Err(error) => {
                    fail(self.ddp, &self.interrupter, error);
                    return true;
                }
            };
            let grads = micro_batches.add(&self.learner.model(), grads, completes);
            // Not after an overflow of the scaled loss, on any rank.
            if let Some(grads) = grads.filter(|_| reduced) {
                self.learner.lr_step();
                self.learner.optimizer_step(grads);
                // The next step has new values.
                self.taps.wrapped.shards().inspect(|shards| shards.forget_values());
            }
            iteration += 1;
            // Metrics leave out a batch of weight 0, such as the item that a rank without items repeats.
            if counts {
                let item = TrainingItem::new(item, progress, Some(iteration), Some(self.learner.lr_current()));
                self.report_train(LearnerEvent::ProcessedItem(item));
            }
            let stops = || attribute_calls(self.site, || agree_to_stop(self.ddp, &self.interrupter, self.saves));
            if completes && (stops() || self.stop_requested()) {
                return true;
            }
        }
        false
    }

    /// True if the job has logical ranks.
    fn is_logical(&self) -> bool {
        self.ddp.state().leaves.division().is_some()
    }

    /// Weight of a micro-batch: 1 over all ranks, whatever its number of items, as in Burn's trainer. Where the user
    /// weighs batches, each counts by its own weight, and with logical ranks by its items.
    fn weight(&self, nth: usize, micro_batches: &MicroBatches) -> Option<f64> {
        if !micro_batches.accumulates() || self.sharded.has_weights() || self.is_logical() {
            return None;
        }
        let plan = self.sharded.plan();
        let own = plan.share(nth, self.ddp.rank()).len() as f64;
        Some(own / plan.step(nth).len() as f64)
    }

    /// Forward and backward of a micro-batch; one that `holds` only adds up. Otherwise the output has the averaged
    /// gradients, unless the step is skipped. Returns true if it has them.
    fn step(&self, batch: <M as TrainStep>::Input, items: Option<f64>, holds: bool) -> Result<(Output<M>, bool)> {
        let model = self.taps.attach(self.learner.model());
        let models = Models(vec![self.taps.wrapped.clone()]);
        // With logical ranks the loader's batches say where a step ends.
        let call = Call { items, holds: holds && !self.is_logical(), counts_backwards: true };
        let prepare = |TrainOutput { grads: own, .. }: &mut Output<M>, counts| {
            intercept::prepare(&model, &models, Own::Params { own, counts })
        };
        let step = || TrainStep::step(&model, batch);
        let (mut output, prepared) = intercept::run(self.ddp, models.0.clone(), call, step, prepare)?;
        let reduced = prepared.is_some();
        if let Some(prepared) = prepared {
            prepared.put_averages(&mut output.grads);
        }
        Ok((output, reduced))
    }

    fn report_train(&mut self, event: LearnerEvent<<M as TrainStep>::Output>) {
        self.interrupter.fail_on_error(self.events.process_train(event));
    }

    pub(super) fn report_valid(&mut self, event: LearnerEvent<<M as InferenceStep>::Output>) {
        self.interrupter.fail_on_error(self.events.process_valid(event));
    }

    /// Waits until metrics are up to date.
    fn flush(&mut self) {
        self.interrupter.fail_on_error(self.events.flush());
    }
}
