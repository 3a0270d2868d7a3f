//! Validation of a training: each rank's share, without its gradients.

use burn::data::dataloader::DataLoaderIterator;
use burn::train::{InferenceStep, LearnerEvent, LearnerModel, TrainingItem, ValidLoader};
use burn_ddp_comm::{ReduceOp, attribute_calls};

use super::agreed_stop::{agree_to_stop, fail};
use super::strategy::Run;
use crate::model::running_stats::OwnStatistics;
use crate::model::sync_buffers::agreed_statistics;
use crate::{Error, intercept};

impl<M: LearnerModel> Run<'_, M> {
    /// Validates on this rank's share. Ranks have different numbers of batches, so they agree on stopping afterwards.
    pub(super) fn validate(&mut self, loader: &ValidLoader<M>) {
        let model = self.learner.model();
        let wrapped = &self.taps.wrapped;
        let agreed = || agreed_statistics(self.ddp.group(), &model, std::slice::from_ref(wrapped));
        match attribute_calls(self.site, agreed) {
            Ok(own) => {
                own.into_iter().for_each(OwnStatistics::replace);
                wrapped.keep_statistics(true);
            }
            Err(error) => return fail(self.ddp, &self.interrupter, error),
        }
        if self.is_in_parts() {
            return self.validate_in_step(loader);
        }
        // Taps cast what the forward reads.
        let model = if wrapped.computes_in_half() { self.taps.attach(model) } else { model }.valid();
        let mut batches = loader.iter();
        let mut iteration = 0;
        while let Some(batch) = batches.next() {
            let batch = match batch {
                Ok(batch) => batch,
                Err(error) => {
                    self.interrupter.fail(error);
                    break;
                }
            };
            let progress = batches.progress();
            iteration += 1;
            let item = InferenceStep::step(&model, batch);
            self.report_valid(LearnerEvent::ProcessedItem(TrainingItem::new(item, progress, Some(iteration), None)));
            if self.interrupter.should_stop() || self.saves && self.ddp.stop_wished() {
                break;
            }
        }
    }

    /// Validates a model with sharded parameters, which all ranks must read together. A rank with fewer batches than
    /// others passes its batches again, and does not count them.
    fn validate_in_step(&mut self, loader: &ValidLoader<M>) {
        let (ddp, site) = (self.ddp, self.site);
        let model = self.result().valid();
        let mut batches = loader.iter();
        let mut fill_in: Option<Box<dyn DataLoaderIterator<<M as InferenceStep>::Input> + '_>> = None;
        let mut iteration = 0;
        loop {
            let own = batches.next().transpose().unwrap_or_else(|error| {
                self.interrupter.fail(error);
                None
            });
            let mut any = [u8::from(own.is_some())];
            let agreed = attribute_calls(site, || ddp.group().all_reduce(&mut any, ReduceOp::Max));
            if let Err(error) = agreed {
                return fail(ddp, &self.interrupter, error.into());
            }
            let stops = attribute_calls(site, || agree_to_stop(ddp, &self.interrupter, self.saves));
            if stops || any[0] == 0 || self.stop_requested() {
                return;
            }
            let counts = own.is_some();
            let again = || {
                let next = fill_in.as_mut().and_then(|batches| batches.next());
                next.or_else(|| fill_in.insert(loader.iter()).next())
            };
            let batch = match own.map(Ok).or_else(again) {
                Some(Ok(batch)) => batch,
                Some(Err(error)) => return fail(ddp, &self.interrupter, Error::invalid(error.to_string())),
                None => {
                    let reason = "this rank has no item to validate, but all ranks must read sharded parameters \
                        together: there are fewer items than ranks";
                    return fail(ddp, &self.interrupter, Error::invalid(reason));
                }
            };
            let item = match intercept::catch(|| InferenceStep::step(&model, batch)) {
                Ok(item) => item,
                Err(error) => return fail(ddp, &self.interrupter, error),
            };
            if counts {
                iteration += 1;
                let item = TrainingItem::new(item, batches.progress(), Some(iteration), None);
                self.report_valid(LearnerEvent::ProcessedItem(item));
            }
        }
    }
}
